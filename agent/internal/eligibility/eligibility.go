// Package eligibility says whether claims may be made on a MachineDeployment, and within which sizes.
package eligibility

import (
	"fmt"
	"strconv"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// Reason is why claims may not be made now.
type Reason string

const (
	// AtMaxSize means that replicas have reached the max size.
	AtMaxSize Reason = "AtMaxSize"
	// CoolingDown means that a recent claim failed and the group is left alone for a while.
	CoolingDown Reason = "CoolingDown"
	// Paused means that somebody paused the MachineDeployment or its Cluster.
	Paused Reason = "Paused"
	// Deleting means that the MachineDeployment or its Cluster is being deleted.
	Deleting Reason = "Deleting"
	// ReplicasOwned means that somebody else owns the replicas.
	ReplicasOwned Reason = "ReplicasOwned"
	// Invalid means that the MachineDeployment's description cannot be used.
	Invalid Reason = "Invalid"
	// NotMember means that the MachineDeployment did not opt in.
	NotMember Reason = "NotMember"
	// NotAdoptable means that the Machine that a claim is to take over cannot be had.
	NotAdoptable Reason = "NotAdoptable"
	// QuotaExceeded means that a ResourceQuota leaves no room for another Machine.
	QuotaExceeded Reason = "QuotaExceeded"
	// Gone means that the MachineDeployment does not exist.
	Gone Reason = "Gone"
)

// Refusal says why a node group cannot be claimed from now.
type Refusal struct {
	// NodeGroup is the name of the MachineDeployment.
	NodeGroup string
	// Reason is one of this package's constants.
	Reason Reason
	// Message is for people, and says what to do where somebody has to act.
	Message string
	// RetryAt is when asking again may help; zero when unknown.
	RetryAt time.Time
}

// Problem is one value that the user wrote and that cannot be used.
type Problem struct {
	// Field as the user wrote it, for example `metadata.annotations[…]`.
	Field string
	// Value as the user wrote it.
	Value string
	// Message says what is wrong and what to write instead.
	Message string
}

// Group is what a MachineDeployment allows.
type Group struct {
	// Min is the size never to go below; at least 0.
	Min int32
	// Max is the size never to be raised above by claims; nil means no limit.
	Max *int32
	// Replicas is spec.replicas; 0 when unset (then Refusal is set).
	Replicas int32
	// Refusal is set when no claim may be made, whatever the size. A group at its max size has none: its machines can
	// still be handed from one claim to another; see [Group.Full].
	Refusal *Refusal
	// Problems are the values that could not be used.
	Problems []Problem
}

// Full reports whether replicas cannot be raised.
func (g Group) Full() bool {
	return g.Max != nil && g.Replicas >= *g.Max
}

// Of examines a MachineDeployment and its Cluster. A nil cluster means that the Cluster does not exist. It reads only its
// arguments and never fails: what cannot be used is a problem, and refuses claims where guessing would be unsafe.
func Of(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) Group {
	var g Group
	refuse := func(reason Reason, format string, args ...any) {
		if g.Refusal == nil {
			g.Refusal = &Refusal{NodeGroup: md.Name, Reason: reason, Message: fmt.Sprintf(format, args...)}
		}
	}
	if md.Spec.Replicas != nil {
		g.Replicas = *md.Spec.Replicas
	}

	if !md.DeletionTimestamp.IsZero() {
		refuse(Deleting, "the MachineDeployment is being deleted")
	}
	switch {
	case cluster == nil:
		refuse(Deleting, "Cluster %s does not exist", md.Spec.ClusterName)
	case !cluster.DeletionTimestamp.IsZero():
		refuse(Deleting, "Cluster %s is being deleted", cluster.Name)
	}
	if _, member := md.Labels[v1alpha1.MemberLabel]; !member {
		refuse(NotMember, "the MachineDeployment lacks the label %s", v1alpha1.MemberLabel)
	}
	if why := pausedBy(md, cluster); why != "" {
		refuse(Paused, "%s", why)
	}
	if ownsReplicas(md, cluster) {
		refuse(ReplicasOwned, "the topology of Cluster %s sets the replicas; remove them from spec.topology.workers", cluster.Name)
	}
	if md.Spec.Replicas == nil {
		refuse(Invalid, "spec.replicas is not set yet")
	}

	if n, problem := size(md, clusterv1.AutoscalerMinSizeAnnotation); problem != nil {
		g.Problems = append(g.Problems, *problem)
	} else if n != nil {
		g.Min = *n
	}
	if n, problem := size(md, clusterv1.AutoscalerMaxSizeAnnotation); problem != nil {
		g.Problems = append(g.Problems, *problem)
		refuse(Invalid, "%s: %s", problem.Field, problem.Message)
	} else {
		g.Max = n
	}
	if g.Max != nil && g.Min > *g.Max {
		problem := Problem{
			Field:   annotationField(clusterv1.AutoscalerMinSizeAnnotation),
			Value:   md.Annotations[clusterv1.AutoscalerMinSizeAnnotation],
			Message: fmt.Sprintf("is above the max size %d; write a number from 0 to %d", *g.Max, *g.Max),
		}
		g.Problems = append(g.Problems, problem)
		refuse(Invalid, "%s: %s", problem.Field, problem.Message)
		g.Min = *g.Max
	}
	return g
}

// pausedBy says who paused the group, or "" when nobody but the agent itself did.
func pausedBy(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) string {
	if cluster != nil && cluster.Spec.Paused != nil && *cluster.Spec.Paused {
		return fmt.Sprintf("Cluster %s is paused (spec.paused)", cluster.Name)
	}
	if md.Spec.Paused != nil && *md.Spec.Paused {
		return "the MachineDeployment is paused (spec.paused)"
	}
	if value, paused := md.Annotations[clusterv1.PausedAnnotation]; paused && value != v1alpha1.PausedByAgent {
		return fmt.Sprintf("the MachineDeployment is paused (annotation %s)", clusterv1.PausedAnnotation)
	}
	return ""
}

// ownsReplicas reports whether the Cluster's topology sets the MachineDeployment's replicas; every reconcile of the topology
// would then undo what a claim did.
func ownsReplicas(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) bool {
	name, owned := md.Labels[clusterv1.ClusterTopologyMachineDeploymentNameLabel]
	if !owned || cluster == nil {
		return false
	}
	for i := range cluster.Spec.Topology.Workers.MachineDeployments {
		topology := &cluster.Spec.Topology.Workers.MachineDeployments[i]
		if topology.Name == name {
			return topology.Replicas != nil
		}
	}
	return false
}

func annotationField(key string) string {
	return fmt.Sprintf("metadata.annotations[%s]", key)
}

// size reads a size annotation: nil, nil when absent.
func size(md *clusterv1.MachineDeployment, key string) (*int32, *Problem) {
	text, present := md.Annotations[key]
	if !present {
		return nil, nil
	}
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil || n < 0 {
		return nil, &Problem{
			Field:   annotationField(key),
			Value:   text,
			Message: "is not a size; write a whole number of machines, 0 or more",
		}
	}
	value := int32(n)
	return &value, nil
}
