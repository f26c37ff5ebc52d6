// Package eligibility determines whether claims may be made on a MachineDeployment, and within
// which sizes.
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

// Reason is why claims cannot be made now.
type Reason string

const (
	// AtMaxSize means that replicas have reached the max size.
	AtMaxSize Reason = "AtMaxSize"
	// CoolingDown means that a recent claim failed, and that the group refuses claims for a while.
	CoolingDown Reason = "CoolingDown"
	// Paused means that another actor paused the MachineDeployment, or that its Cluster is paused.
	Paused Reason = "Paused"
	// Deleting means that the MachineDeployment or its Cluster is being deleted.
	Deleting Reason = "Deleting"
	// ReplicasOwned means that the Cluster's topology sets the replicas.
	ReplicasOwned Reason = "ReplicasOwned"
	// ReplicasLowered means that another writer lowered replicas below what is claimed, or keeps
	// overwriting them. The node group is frozen until a user removes
	// [v1alpha1.ReplicasLoweredAnnotation].
	ReplicasLowered Reason = "ReplicasLowered"
	// Invalid means that the MachineDeployment's settings cannot be used.
	Invalid Reason = "Invalid"
	// NotMember means that the MachineDeployment has not opted in.
	NotMember Reason = "NotMember"
	// NotAdoptable means that the Machine that a claim is to adopt cannot be adopted.
	NotAdoptable Reason = "NotAdoptable"
	// QuotaExceeded means that a ResourceQuota leaves no room for another Machine.
	QuotaExceeded Reason = "QuotaExceeded"
	// MachinesBlocked means that Cluster API currently creates no Machines for the
	// MachineDeployment, for example because its version does not match the control plane's. This
	// is only known while replicas lack their Machine.
	MachinesBlocked Reason = "MachinesBlocked"
	// Reserved means that the group takes the claims of another holder only; see [Group.For].
	Reserved Reason = "Reserved"
	// Gone means that the MachineDeployment does not exist.
	Gone Reason = "Gone"
)

// NoRoom reports whether no machine is available for a new claim, although the group is open to
// claims. Such a reason does not prevent the agent from raising replicas for claims that are
// already admitted.
func (r Reason) NoRoom() bool {
	switch r {
	case AtMaxSize, CoolingDown, QuotaExceeded, MachinesBlocked:
		return true
	case Paused, Deleting, ReplicasOwned, ReplicasLowered, Invalid, NotMember, NotAdoptable, Reserved, Gone:
	}
	return false
}

// Refusal is why a node group currently refuses claims.
type Refusal struct {
	// NodeGroup is the name of the MachineDeployment.
	NodeGroup string
	// Reason is one of the constants of this package.
	Reason Reason
	// Message is for users. It includes what to do if action is needed.
	Message string
	// RetryAt is when a retry may succeed, or zero if unknown.
	RetryAt time.Time
}

// Problem is an unusable value in the user's object.
type Problem struct {
	// Field is the path of the value, for example `metadata.annotations[…]`.
	Field string
	// Value is the value as the user wrote it, which may have 256 KiB.
	Value string
	// Message states what is wrong and what to write instead.
	Message string
}

// Group holds what a MachineDeployment permits.
type Group struct {
	// Min is the min size, at least 0. It is not meaningful if a size is unusable; see
	// [Group.SizesUsable].
	Min int32
	// Max is the size up to which claims may raise replicas. Nil means no limit.
	Max *int32
	// Replicas is spec.replicas, or 0 if unset, in which case there is a refusal.
	Replicas int32
	// Refusals are all reasons to refuse claims that do not depend on the size. The reason that
	// outlasts the others comes first. A group at its max size has none: its machines can still be
	// handed over from one claim to another; see [Group.Full].
	Refusals []Refusal
	// Suspended means that the Cluster is paused or does not exist. Its objects may be in the
	// process of being moved to another hub, or restored from a backup. Nothing is then concluded
	// from a missing object, and nothing is written.
	Suspended bool
	// Holder is the holder whose claims alone the group takes, or empty if it takes those of every
	// holder.
	Holder string
	// MaxNodeProvisionTime is how long a claim waits for its Machine's provider ID and Node. It is
	// zero if the MachineDeployment does not set it.
	MaxNodeProvisionTime time.Duration
	// KeepFailed is how long the Machine of a failed claim is kept for debugging. It is zero if the
	// MachineDeployment does not set it.
	KeepFailed time.Duration
	// Problems are the values that cannot be used.
	Problems []Problem
}

// Full reports whether the max size prevents raising replicas.
func (g Group) Full() bool {
	return g.Max != nil && g.Replicas >= *g.Max
}

// Has reports whether one of the refusals has the given reason.
func (g Group) Has(reason Reason) bool {
	return slices.ContainsFunc(g.Refusals, func(r Refusal) bool { return r.Reason == reason })
}

// With returns the group with an additional refusal. A nil refusal adds nothing.
func (g Group) With(refusal *Refusal) Group {
	if refusal != nil {
		g.Refusals = append(slices.Clone(g.Refusals), *refusal)
	}
	return g
}

// For returns the refusal of a holder's claims because the group is another holder's. It is nil if
// the group is the holder's, or everyone's. The empty holder stands for every holder but the
// group's own.
func (g Group) For(nodeGroup, holder string) *Refusal {
	if g.Holder == "" || g.Holder == holder {
		return nil
	}
	return &Refusal{NodeGroup: nodeGroup, Reason: Reserved, Message: fmt.Sprintf(
		"the node group accepts only claims of the holder %q (annotation %s of the MachineDeployment)", g.Holder, v1alpha1.HolderAnnotation)}
}

// Refusal combines all refusals. The result has the reason of the first and the messages of all. It
// has a retry time only if there is a single refusal. It is nil if claims may be made.
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

// MayGrow reports whether the agent may raise replicas for admitted claims and for the min size. A
// cool-down, an exhausted quota and a blocked MachineSet only prevent new claims.
func (g Group) MayGrow() bool {
	return !slices.ContainsFunc(g.Refusals, func(r Refusal) bool { return !r.Reason.NoRoom() })
}

// MayShrink reports whether the agent may remove unclaimed Machines of its own accord. It may not
// while a user has paused the group, another writer sets its replicas, or the sizes cannot be used:
// it is then uncertain which Machines are the user's. Machines of released claims are removed in
// any case.
func (g Group) MayShrink() bool {
	return !g.Has(Paused) && !g.Has(ReplicasOwned) && !g.Has(ReplicasLowered) && !g.Has(Invalid)
}

// SizesUsable reports whether Min and Max have the user's values, or the defaults if the user set
// none.
func (g Group) SizesUsable() bool { return !g.Has(Invalid) }

// Of evaluates a MachineDeployment and its Cluster. A nil cluster means that the Cluster does not
// exist. Of only reads its arguments, and never fails. Unusable sizes become a problem and a
// refusal, other unusable values only a problem. Every reason is retained.
func Of(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) Group {
	g := Group{Holder: md.Annotations[v1alpha1.HolderAnnotation]}
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
		refuse(ReplicasLowered, "%.1024s", why)
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

// shortestProvisioning is the minimum that a MachineDeployment or a claim may set for how long
// claims wait.
const shortestProvisioning = 10 * time.Second

// longestDuration is the maximum for duration annotations of a MachineDeployment, and for how long
// a claim may wait.
const longestDuration = 7 * 24 * time.Hour

// MaxNodeProvisionTime returns how long claims wait for a Machine's provider ID and Node, or zero
// if the MachineDeployment does not set it. An unusable value is reported as a problem and
// otherwise ignored: claims are still admitted.
func MaxNodeProvisionTime(md *clusterv1.MachineDeployment) (time.Duration, *Problem) {
	return duration(md, v1alpha1.MaxNodeProvisionTimeAnnotation, shortestProvisioning)
}

// duration reads an annotation with a duration. The result is zero if the annotation is missing or
// unusable.
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

// readSizes reads the size annotations. An unreadable size is a problem, and so are contradictory
// sizes.
func readSizes(g *Group, md *clusterv1.MachineDeployment, refuse func(reason Reason, format string, args ...any)) {
	report := func(problem *Problem) {
		g.Problems = append(g.Problems, *problem)
		refuse(Invalid, "%s: %.128q %s", problem.Field, problem.Value, problem.Message)
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

// ClusterPaused reports whether Cluster API ignores all of a Cluster's objects, as it does while
// the Cluster is being moved.
func ClusterPaused(cluster *clusterv1.Cluster) bool {
	return cluster.Spec.Paused != nil && *cluster.Spec.Paused
}

// suspended computes [Group.Suspended]. A MachineDeployment that is still being deleted after its
// Cluster is gone is not suspended, so that our finalizer is removed from its Machines.
func suspended(md *clusterv1.MachineDeployment, cluster *clusterv1.Cluster) bool {
	if cluster == nil {
		return md.DeletionTimestamp.IsZero()
	}
	return ClusterPaused(cluster)
}

// pausedBy returns what paused the group, or "" if it is not paused, or only by the agent itself.
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

// ownsReplicas reports whether the Cluster's topology sets the MachineDeployment's replicas. Every
// reconcile of the topology would then revert the effect of a claim.
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

// size reads a size annotation. It returns nil, nil if the annotation is missing.
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
