// Package eligibility says whether claims may be made on a MachineDeployment, and within which sizes.
package eligibility

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
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
	// ReplicasLowered means that another writer set replicas below what is claimed, or keeps setting them to a number of its own, and that
	// the node group is frozen until a person clears [v1alpha1.ReplicasLoweredAnnotation].
	ReplicasLowered Reason = "ReplicasLowered"
	// Invalid means that the MachineDeployment's description cannot be used.
	Invalid Reason = "Invalid"
	// NotMember means that the MachineDeployment did not opt in.
	NotMember Reason = "NotMember"
	// NotAdoptable means that the Machine that a claim is to take over cannot be had.
	NotAdoptable Reason = "NotAdoptable"
	// QuotaExceeded means that a ResourceQuota leaves no room for another Machine.
	QuotaExceeded Reason = "QuotaExceeded"
	// MachinesBlocked means that Cluster API makes no Machines for the MachineDeployment now, for example because its version does not fit
	// the control plane's. It is known only while replicas lack their Machine.
	MachinesBlocked Reason = "MachinesBlocked"
	// Gone means that the MachineDeployment does not exist.
	Gone Reason = "Gone"
)

// NoRoom reports whether no machine can be had for a new claim now, although the group is open to claims. Such a reason does not keep the agent
// from raising replicas for claims that it took already.
func (r Reason) NoRoom() bool {
	switch r {
	case AtMaxSize, CoolingDown, QuotaExceeded, MachinesBlocked:
		return true
	case Paused, Deleting, ReplicasOwned, ReplicasLowered, Invalid, NotMember, NotAdoptable, Gone:
	}
	return false
}

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
	// Min is the size never to go below; at least 0. Not meaningful when a size is unusable: see [Group.SizesUsable].
	Min int32
	// Max is the size never to be raised above by claims; nil means no limit.
	Max *int32
	// Replicas is spec.replicas; 0 when unset (then there is a refusal).
	Replicas int32
	// Refusals are all reasons why no claim may be made, whatever the size, the one that outlasts the others first. A group at
	// its max size has none: its machines can still be handed from one claim to another; see [Group.Full].
	Refusals []Refusal
	// Suspended reports that the Cluster is paused, or does not exist: its objects may be on their way to another hub or coming back from a
	// backup. Nothing is concluded then from one that is missing, and nothing is written.
	Suspended bool
	// MaxNodeProvisionTime is how long a claim waits for its Machine's provider ID and Node; zero where the MachineDeployment does not say.
	MaxNodeProvisionTime time.Duration
	// KeepFailed is how long the Machine of a failed claim is kept for debugging; zero where the MachineDeployment does not say.
	KeepFailed time.Duration
	// Problems are the values that could not be used.
	Problems []Problem
}

// Full reports whether replicas cannot be raised.
func (g Group) Full() bool {
	return g.Max != nil && g.Replicas >= *g.Max
}

// Has reports whether one of the refusals is for that reason.
func (g Group) Has(reason Reason) bool {
	return slices.ContainsFunc(g.Refusals, func(r Refusal) bool { return r.Reason == reason })
}

// With returns the group with one more reason why no claim may be made; a nil refusal adds nothing.
func (g Group) With(refusal *Refusal) Group {
	if refusal != nil {
		g.Refusals = append(slices.Clone(g.Refusals), *refusal)
	}
	return g
}

// Refusal combines all refusals: the first one's reason and retry time, and every message. It is nil when claims may be made.
func (g Group) Refusal() *Refusal {
	if len(g.Refusals) == 0 {
		return nil
	}
	combined := g.Refusals[0]
	if len(g.Refusals) == 1 {
		return &combined
	}
	messages := make([]string, 0, len(g.Refusals))
	for _, r := range g.Refusals {
		messages = append(messages, r.Message)
	}
	combined.Message = strings.Join(messages, "; ")
	combined.RetryAt = time.Time{} // the others may outlast it
	return &combined
}

// MayGrow reports whether the agent may raise replicas for what it owes: claims that it took, and the min size. A cool-down, a
// used-up quota and a MachineSet that makes no Machines refuse new claims only.
func (g Group) MayGrow() bool {
	return !slices.ContainsFunc(g.Refusals, func(r Refusal) bool { return !r.Reason.NoRoom() })
}

// MayShrink reports whether the agent may remove Machines that nobody claims, of its own choice. It must not while a person has
// paused the group, while another writer sets its replicas, or while the sizes cannot be used: which Machines are the user's is
// not certain then. Machines of released claims go in any case.
func (g Group) MayShrink() bool {
	return !g.Has(Paused) && !g.Has(ReplicasOwned) && !g.Has(ReplicasLowered) && !g.Has(Invalid)
}

// SizesUsable reports whether Min and Max are what the user wrote, or the defaults where the user wrote nothing.
func (g Group) SizesUsable() bool { return !g.Has(Invalid) }

// Of examines a MachineDeployment and its Cluster. A nil cluster means that the Cluster does not exist. It reads only its
// arguments and never fails: what cannot be used is a problem and a refusal, and every reason is kept.
func Of(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) Group {
	var g Group
	refuse := func(reason Reason, format string, args ...any) {
		g = g.With(&Refusal{NodeGroup: md.Name, Reason: reason, Message: fmt.Sprintf(format, args...)})
	}
	if md.Spec.Replicas != nil {
		g.Replicas = *md.Spec.Replicas
	}

	if !md.DeletionTimestamp.IsZero() {
		refuse(Deleting, "the MachineDeployment is being deleted")
	}
	g.Suspended = suspended(md, cluster)
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
	if why, lowered := md.Annotations[v1alpha1.ReplicasLoweredAnnotation]; lowered {
		refuse(ReplicasLowered, "%s", why)
	}
	if md.Spec.Replicas == nil {
		refuse(Invalid, "spec.replicas is not set yet")
	}
	readSizes(&g, md, refuse)
	var problem *Problem
	if g.MaxNodeProvisionTime, problem = MaxNodeProvisionTime(md); problem != nil {
		g.Problems = append(g.Problems, *problem)
	}
	if g.KeepFailed, problem = duration(md, v1alpha1.KeepFailedAnnotation, time.Minute); problem != nil {
		g.Problems = append(g.Problems, *problem)
	}
	return g
}

// shortestProvisioning is the least that a MachineDeployment may say of how long claims wait. A claim itself may ask for no less either.
const shortestProvisioning = 10 * time.Second

// longestDuration is the most that an annotation of a MachineDeployment may say; nor may a claim wait for longer.
const longestDuration = 7 * 24 * time.Hour

// MaxNodeProvisionTime returns how long claims wait for a Machine's provider ID and Node; zero where the MachineDeployment does not say. A
// value that cannot be used is ignored, apart from the problem: claims are still made.
func MaxNodeProvisionTime(md *clusterv1.MachineDeployment) (time.Duration, *Problem) {
	return duration(md, v1alpha1.MaxNodeProvisionTimeAnnotation, shortestProvisioning)
}

// duration reads an annotation that holds a duration; zero where there is none, or none that can be used.
func duration(md *clusterv1.MachineDeployment, key string, shortest time.Duration) (time.Duration, *Problem) {
	text, present := md.Annotations[key]
	if !present {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < shortest || d > longestDuration {
		return 0, &Problem{
			Field: annotationField(key), Value: text,
			Message: fmt.Sprintf(`is not a duration from %.0fs to 168h; write one such as "30m" or "1h30m"`, shortest.Seconds()),
		}
	}
	return d, nil
}

// readSizes reads the sizes that the user wrote. One that cannot be read, or that contradicts the other, is a problem.
func readSizes(g *Group, md *clusterv1.MachineDeployment, refuse func(reason Reason, format string, args ...any)) {
	report := func(problem *Problem) {
		g.Problems = append(g.Problems, *problem)
		refuse(Invalid, "%s: %q %s", problem.Field, problem.Value, problem.Message)
	}
	smallest, problem := size(md, clusterv1.AutoscalerMinSizeAnnotation)
	switch {
	case problem != nil:
		report(problem)
	case smallest != nil:
		g.Min = *smallest
	}
	if g.Max, problem = size(md, clusterv1.AutoscalerMaxSizeAnnotation); problem != nil {
		report(problem)
	}
	if smallest != nil && g.Max != nil && *smallest > *g.Max {
		report(&Problem{
			Field:   annotationField(clusterv1.AutoscalerMinSizeAnnotation),
			Value:   md.Annotations[clusterv1.AutoscalerMinSizeAnnotation],
			Message: fmt.Sprintf("is above the max size %d; write a number from 0 to %d, or raise the max size", *g.Max, *g.Max),
		})
	}
}

// ClusterPaused reports whether Cluster API leaves all of a Cluster's objects alone, as it does while the Cluster is moved.
func ClusterPaused(cluster *clusterv1.Cluster) bool {
	return cluster.Spec.Paused != nil && *cluster.Spec.Paused
}

// suspended computes [Group.Suspended]. A MachineDeployment that is being deleted after its Cluster is not suspended, so that its Machines
// lose our finalizer.
func suspended(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) bool {
	if cluster == nil {
		return md.DeletionTimestamp.IsZero()
	}
	return ClusterPaused(cluster)
}

// pausedBy says who paused the group, or "" when nobody but the agent itself did.
func pausedBy(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) string {
	if cluster != nil && ClusterPaused(cluster) {
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
