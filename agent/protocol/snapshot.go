package protocol

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// Snapshot is one reading of a node group. The MachineDeployment, and with it the ledger, is read
// first, then claims, Machines and MachineSets (rule R1).
type Snapshot struct {
	// Deployment is the MachineDeployment. Group is what it and its Cluster allow.
	Deployment *clusterv1.MachineDeployment
	Group      eligibility.Group
	// Quota is why the hub admits no further Machine of the group; empty if it does, if that is not
	// known, or if no claim waits. It is no refusal of the group: a spare Machine is still there
	// for a claim.
	Quota string
	// Ledger is the MachineDeployment's ledger; nil when it has no usable one.
	Ledger *Ledger
	// Claims are the claims of this node group that have not ended, and ended ones whose label a
	// Machine still carries.
	Claims   []*v1alpha1.MachineClaim
	Machines []*clusterv1.Machine
	Sets     []*clusterv1.MachineSet
	// Lost holds the Machines whose label names a claim without an object, by claim id.
	Lost map[string]*clusterv1.Machine
	// Foreign are claims of a former MachineDeployment of this name in another Cluster. Strays are
	// their Machines.
	Foreign []*v1alpha1.MachineClaim
	Strays  []*clusterv1.Machine
	// ClusterUID is the present UID of the Cluster; empty when it is not known.
	ClusterUID types.UID
	// Synced reports that live sets of the holder have decided about every [Reported] claim.
	Synced bool
	// Nodes is the holder's last report, by provider ID: whether the Node is registered; false
	// while it still carries the unregistered taint. It is nil when there is no recent report.
	Nodes map[string]bool
	// ReportsNodes reports whether a holder reports Nodes; nil means that none does.
	ReportsNodes func(holder string) bool

	// Now is the time of the reading by the agent's clock.
	Now time.Time
	// Started is when this process began; zero means long ago.
	Started time.Time
	// SpareSince is when this process first saw the present spare; zero when there was none.
	SpareSince time.Time
	// SpareGrace is how long a spare is kept for the next claim.
	SpareGrace time.Duration
	// Failure defines when a Machine is given up.
	Failure FailurePolicy
	// Reports holds the conditions of infrastructure objects that [FailurePolicy.See] names, by the
	// UID of the Machine.
	Reports map[types.UID]Report
	// LedgerBudget is how many bytes all entries of the ledger may take; zero means [LedgerBudget].
	LedgerBudget int

	// former are claims that were entered for a former MachineDeployment of this name and wait for
	// a Machine from it.
	former []*v1alpha1.MachineClaim
	// Filled by index. holders maps the UID of a Machine to the live claim that has it by its
	// status.
	byUID   map[types.UID]*clusterv1.Machine
	byLabel map[string]*clusterv1.Machine
	holders map[types.UID]string
	byID    map[string]*v1alpha1.MachineClaim
	// longest is the longest time that a claim asks to wait for its Machine; zero if none does.
	longest time.Duration
	// expectsReport is set if the holder of a waiting claim reports Nodes.
	expectsReport bool
}

// prepare sorts claims and Machines, so that two agents decide alike, and indexes them.
func (s *Snapshot) prepare() {
	defer func() {
		s.index()
		s.rename()
		s.separate()
	}()
	slices.SortFunc(s.Claims, func(a, b *v1alpha1.MachineClaim) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	slices.SortFunc(s.Machines, func(a, b *clusterv1.Machine) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
}

// index fills the maps from ids to claims and Machines.
func (s *Snapshot) index() {
	s.byUID = make(map[types.UID]*clusterv1.Machine, len(s.Machines)+len(s.Strays))
	for _, m := range s.Strays {
		s.byUID[m.UID] = m
	}
	s.byLabel = make(map[string]*clusterv1.Machine, len(s.Machines))
	for _, m := range s.Machines {
		s.byUID[m.UID] = m
		if id := ClaimOf(m); id != "" {
			if before := s.byLabel[id]; before == nil || !Alive(before) && Alive(m) {
				s.byLabel[id] = m
			}
		}
	}
	s.byID = make(map[string]*v1alpha1.MachineClaim, len(s.Claims))
	s.holders, s.longest, s.expectsReport = make(map[types.UID]string, len(s.Claims)), 0, false
	for _, c := range s.Claims {
		s.byID[c.Spec.ClaimID] = c
		if hasMachine(c) {
			s.holders[c.Status.Machine.UID] = c.Spec.ClaimID
		}
		s.longest = max(s.longest, c.MaxNodeProvisionTime())
		waits := c.CurrentPhase() == v1alpha1.PhasePending && s.ReportsNodes != nil && s.ReportsNodes(c.Spec.Holder)
		s.expectsReport = s.expectsReport || waits
	}
}

// Seq returns the ledger's seq, zero when there is no ledger.
func (s *Snapshot) Seq() int64 {
	if s.Ledger == nil {
		return 0
	}
	return s.Ledger.Seq
}

// separate moves claims to former that wait for a MachineDeployment that no longer exists. Another
// one with its name has been made, whose replicas are not theirs.
func (s *Snapshot) separate() {
	if s.Deployment.UID == "" {
		return // it is gone, and no other has its name
	}
	s.Claims = slices.DeleteFunc(s.Claims, func(c *v1alpha1.MachineClaim) bool {
		id := c.Spec.ClaimID
		if c.Status.Phase != v1alpha1.PhasePending || c.Status.NodeGroupUID == "" || c.Status.NodeGroupUID == s.Deployment.UID || s.labelled(id) != nil {
			return false
		}
		if s.Ledger != nil {
			if _, entered := s.Ledger.Pending[id]; entered {
				return false // the MachineDeployment was moved, and this is it
			}
		}
		s.former = append(s.former, c)
		delete(s.byID, id)
		return true
	})
}

// leftBehind reports whether a claim had its Machine from a MachineDeployment that no longer
// exists, and lost the Machine with it.
func (s *Snapshot) leftBehind(c *v1alpha1.MachineClaim) bool {
	return c.Status.NodeGroupUID != "" && c.Status.NodeGroupUID != s.Deployment.UID && s.machine(c.Status.Machine.UID) == nil
}

// MadeAgain reports whether the ledger came with a MachineDeployment that was deleted and made
// again: claims that were entered under the ledger's UID still exist. A MachineDeployment that was
// moved or restored has no such claims, and its ledger is its own.
func (s *Snapshot) MadeAgain() bool {
	if s.Ledger == nil || s.Ledger.UID == "" || s.Ledger.UID == s.Deployment.UID {
		return false
	}
	return slices.ContainsFunc(s.Claims, func(c *v1alpha1.MachineClaim) bool {
		return c.CurrentPhase() != v1alpha1.PhaseEnded && c.Status.NodeGroupUID == s.Ledger.UID
	})
}

func (s *Snapshot) machine(uid types.UID) *clusterv1.Machine { return s.byUID[uid] }

// machineNamed returns the Machine of that name, or nil.
func (s *Snapshot) machineNamed(name string) *clusterv1.Machine {
	if i := slices.IndexFunc(s.Machines, func(m *clusterv1.Machine) bool { return m.Name == name }); i >= 0 {
		return s.Machines[i]
	}
	return nil
}

// Claim returns the claim with that id, or nil. The snapshot must have been passed to [Decide]
// before.
func (s *Snapshot) Claim(id string) *v1alpha1.MachineClaim { return s.byID[id] }

// labelled returns the Machine that carries the claim's label, or nil.
func (s *Snapshot) labelled(claimID string) *clusterv1.Machine { return s.byLabel[claimID] }

// activeSets returns the MachineSets whose spec asks for replicas.
func (s *Snapshot) activeSets() []*clusterv1.MachineSet {
	var active []*clusterv1.MachineSet
	for _, set := range s.Sets {
		if ReplicasOf(set) > 0 {
			active = append(active, set)
		}
	}
	return active
}

// observed reports whether Cluster API has carried generation g of the MachineDeployment through to
// all its MachineSets and assigned all replicas.
func (s *Snapshot) observed(g int64) bool {
	return s.reconciled(g) && s.replicasDistributed()
}

// replicasDistributed reports whether the MachineDeployment's replicas are all distributed to the
// MachineSets.
func (s *Snapshot) replicasDistributed() bool {
	return s.scaleDownObserved() && s.sum() == *s.Deployment.Spec.Replicas
}

// scaleDownObserved reports whether every lowering of the MachineDeployment's replicas has reached
// the MachineSets. A raise need not have: Cluster API defers it while a MachineSet's status counts
// more Machines than its spec, which may last as long as the MachineSet is paused.
func (s *Snapshot) scaleDownObserved() bool {
	md := s.Deployment
	return md.Status.ObservedGeneration >= md.Generation && md.Spec.Replicas != nil && s.sum() <= *md.Spec.Replicas
}

func (s *Snapshot) sum() int32 {
	var sum int32
	for _, set := range s.Sets {
		sum += ReplicasOf(set)
	}
	return sum
}

func (s *Snapshot) newest() *clusterv1.MachineSet { return Newest(s.Sets) }

// Newest returns the MachineSet with the highest revision, which Cluster API created or reused last
// and which raised replicas go to. It is nil when there is none.
func Newest(sets []*clusterv1.MachineSet) *clusterv1.MachineSet {
	var newest *clusterv1.MachineSet
	latest := int64(-1)
	for _, set := range sets {
		revision, _ := strconv.ParseInt(set.Annotations[clusterv1.RevisionAnnotation], 10, 64) // zero if it was edited
		if revision > latest {
			newest, latest = set, revision
		}
	}
	return newest
}

// deleted reports whether the MachineDeployment is being deleted, and everything with it.
func (s *Snapshot) deleted() bool { return !s.Deployment.DeletionTimestamp.IsZero() }

func (s *Snapshot) onDelete() bool {
	return s.Deployment.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType
}

// reconciled reports whether every MachineSet has acted on generation g of the
// MachineDeployment, whatever a rollout does to the numbers meanwhile.
func (s *Snapshot) reconciled(g int64) bool {
	return s.distributed(g) && !slices.ContainsFunc(s.Sets, behind)
}

// reconciledFor is like reconciled, for what concerns one Machine: of the MachineSets, only the
// Machine's own must have acted. Another one that a person has paused never does.
func (s *Snapshot) reconciledFor(m *clusterv1.Machine, g int64) bool {
	set := s.set(SetOf(m))
	return s.distributed(g) && (set == nil || !behind(set))
}

// distributed reports whether Cluster API has distributed the replicas of generation g of the
// MachineDeployment. It observes a generation without that when it repairs the managed fields of a
// MachineSet first. Otherwise the newest MachineSet never has more replicas than the
// MachineDeployment.
func (s *Snapshot) distributed(g int64) bool {
	md, newest := s.Deployment, s.newest()
	return md.Status.ObservedGeneration >= g && (newest == nil || md.Spec.Replicas == nil || ReplicasOf(newest) <= *md.Spec.Replicas)
}

// behind reports whether Cluster API has not acted on the MachineSet's present generation.
func behind(set *clusterv1.MachineSet) bool { return actedOn(set) < set.Generation }

// actedOn returns the newest generation of a MachineSet that Cluster API has acted on, with or
// without an error. status.observedGeneration stays behind as long as a reconcile ends with one,
// although all else in it was done: while a quota or a webhook refuses a Machine, while the
// infrastructure object of a Machine is missing, or a template. The condition ScalingUp is written
// at the end of each reconcile, but not while the MachineSet is paused. It is Unknown if the
// reconcile got no further than listing the Machines.
func actedOn(set *clusterv1.MachineSet) int64 {
	generation := set.Status.ObservedGeneration
	if scaling := meta.FindStatusCondition(set.Status.Conditions, clusterv1.MachineSetScalingUpCondition); scaling != nil &&
		scaling.Status != metav1.ConditionUnknown {
		generation = max(generation, scaling.ObservedGeneration)
	}
	return generation
}

// rollingOut reports whether Cluster API is replacing Machines by itself. A rollout creates
// Machines beyond replicas and distributes replicas among MachineSets by its own rules. Under
// OnDelete there is none.
func (s *Snapshot) rollingOut() bool {
	if s.onDelete() {
		return false
	}
	return len(s.activeSets()) > 1 || slices.ContainsFunc(s.Machines, Outdated)
}

// ReplicasOf returns spec.replicas of a MachineSet, 0 when unset.
func ReplicasOf(set *clusterv1.MachineSet) int32 {
	if set.Spec.Replicas == nil {
		return 0
	}
	return *set.Spec.Replicas
}

// Alive reports whether the Machine is not being deleted.
func Alive(m *clusterv1.Machine) bool {
	return m.DeletionTimestamp.IsZero()
}

// HasNode reports whether Cluster API has seen the Machine's Node. False does not mean that there
// is none: see [Snapshot.nodeless].
func HasNode(m *clusterv1.Machine) bool {
	return m.Status.NodeRef.Name != ""
}

// SetOf returns the name of the Machine's MachineSet, "" when it has none. It reads the owner
// reference, because the label for that name may hold a hash.
func SetOf(m *clusterv1.Machine) string {
	for i := range m.OwnerReferences {
		if owner := &m.OwnerReferences[i]; owner.Kind == "MachineSet" && owner.Controller != nil && *owner.Controller {
			return owner.Name
		}
	}
	return ""
}

// ClaimOf returns the id of the claim whose label the Machine carries, "" for none. A value that no
// claim can have, which only a person writes, is none: such a claim can never exist.
func ClaimOf(m *clusterv1.Machine) string {
	if id := m.Labels[v1alpha1.ClaimLabel]; isClaimID(id) {
		return id
	}
	return ""
}

// isClaimID reports whether a text can be a claim's id, which is a DNS label. A label may have
// other values.
func isClaimID(text string) bool {
	return text != "" && len(text) <= validation.DNS1123LabelMaxLength && text[0] != '-' && text[len(text)-1] != '-' &&
		strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}

// HasFinalizer reports whether the agent's finalizer is on the Machine.
func HasFinalizer(m *clusterv1.Machine) bool {
	return slices.Contains(m.Finalizers, v1alpha1.ReleaseFinalizer)
}

// hasHook reports whether the Machine has the pre-terminate hook that earlier versions of the agent
// put on Machines that other actors delete.
func hasHook(m *clusterv1.Machine) bool {
	_, yes := m.Annotations[v1alpha1.ReleaseHook]
	return yes
}

// Outdated reports whether Cluster API wants the Machine replaced, because of a template change.
func Outdated(m *clusterv1.Machine) bool {
	for i := range m.Status.Conditions {
		c := &m.Status.Conditions[i]
		if c.Type == clusterv1.MachineUpToDateCondition {
			return c.Status == "False" && c.Reason == clusterv1.MachineNotUpToDateReason
		}
	}
	return false
}

// DeletionCompleted reports whether the Machine's instance is gone, and only the agent's finalizer
// keeps the object. Cluster API then deletes the Node again now and then, and its reason says so
// while that fails.
func DeletionCompleted(m *clusterv1.Machine) bool {
	if Alive(m) || len(m.Finalizers) != 1 || m.Finalizers[0] != v1alpha1.ReleaseFinalizer {
		return false
	}
	reason := DeletingReason(m)
	return reason == clusterv1.MachineDeletingDeletionCompletedReason || reason == clusterv1.MachineDeletingDeletingNodeReason
}

// DeletingReason returns Cluster API's reason for the state of the Machine's deletion, "" if there
// is none.
func DeletingReason(m *clusterv1.Machine) string {
	if c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineDeletingCondition); c != nil {
		return c.Reason
	}
	return ""
}

// reportedAsDeleting reports whether Cluster API has stated that it is deleting the Machine. From
// then on, a MachineSet that has too many Machines counts this one among them.
func reportedAsDeleting(m *clusterv1.Machine) bool {
	return !Alive(m) && meta.IsStatusConditionTrue(m.Status.Conditions, clusterv1.MachineDeletingCondition)
}

// deletingMessage returns the message that belongs to [DeletingReason].
func deletingMessage(m *clusterv1.Machine) string {
	if c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineDeletingCondition); c != nil {
		return c.Message
	}
	return ""
}

func splitUIDs(text string) []types.UID {
	var uids []types.UID
	for part := range strings.SplitSeq(text, ",") {
		if part != "" {
			uids = append(uids, types.UID(part))
		}
	}
	return uids
}

// JoinUIDs returns the UIDs sorted and separated by commas, as an annotation holds them.
func JoinUIDs(uids []types.UID) string {
	parts := make([]string, 0, len(uids))
	for _, uid := range uids {
		parts = append(parts, string(uid))
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}
