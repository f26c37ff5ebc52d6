package claims

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// snapshot is one reading of a node group. The MachineDeployment, and with it the ledger, was read first; claims, Machines
// and MachineSets after it (rule R1).
type snapshot struct {
	md       *clusterv1.MachineDeployment
	group    eligibility.Group
	ledger   *Ledger                  // nil when the MachineDeployment has none
	claims   []*v1alpha1.MachineClaim // those that have not ended, and ended ones that a Machine is still labelled with
	machines []*clusterv1.Machine
	sets     []*clusterv1.MachineSet
	now      time.Time

	// lost holds Machines by the id of the claim that they are labelled with and that has no object any more.
	lost map[string]*clusterv1.Machine
	// foreign are claims of a MachineDeployment of another Cluster that had this one's name before.
	foreign []*v1alpha1.MachineClaim

	// former are claims that were entered for a MachineDeployment that had this one's name before and of which nothing is left.
	former []*v1alpha1.MachineClaim
	// strays are Machines of the foreign claims: none of the group's.
	strays []*clusterv1.Machine

	// Filled by index, to look things up by.
	byUID   map[types.UID]*clusterv1.Machine
	byLabel map[string]*clusterv1.Machine
	holders map[types.UID]string // ids of the claims that live and say that they have the Machine
	byID    map[string]*v1alpha1.MachineClaim
	// unregistered reports whether the holder said that this provider ID's Node still carries the unregistered taint.
	unregistered func(providerID string) bool
	// spareSince is when this process first saw the spare that there is now; zero when there was none.
	spareSince time.Time
	// spareGrace is how long a spare is kept for the next claim.
	spareGrace time.Duration
	// failure says when a Machine is given up.
	failure Failure
	// started is when this process began; zero means long ago.
	started time.Time
	// ledgerBudget is how many bytes all entries of the ledger may take; zero means [ledgerBudget].
	ledgerBudget int
}

// prepare orders what the decision depends on, so that two agents decide alike, and makes it known by id.
func (s *snapshot) prepare() {
	defer func() {
		s.index()
		s.separate()
	}()
	slices.SortFunc(s.claims, func(a, b *v1alpha1.MachineClaim) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	slices.SortFunc(s.machines, func(a, b *clusterv1.Machine) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
}

// index makes claims and Machines known by their ids.
func (s *snapshot) index() {
	s.byUID = make(map[types.UID]*clusterv1.Machine, len(s.machines)+len(s.strays))
	for _, m := range s.strays {
		s.byUID[m.UID] = m
	}
	s.byLabel = make(map[string]*clusterv1.Machine, len(s.machines))
	for _, m := range s.machines {
		s.byUID[m.UID] = m
		if id := claimOf(m); id != "" && s.byLabel[id] == nil {
			s.byLabel[id] = m
		}
	}
	s.byID = make(map[string]*v1alpha1.MachineClaim, len(s.claims))
	s.holders = make(map[types.UID]string, len(s.claims))
	for _, c := range s.claims {
		s.byID[c.Spec.ClaimID] = c
		if hasMachine(c) {
			s.holders[c.Status.Machine.UID] = c.Spec.ClaimID
		}
	}
}

// seq returns the ledger's, zero when there is none.
func (s *snapshot) seq() int64 {
	if s.ledger == nil {
		return 0
	}
	return s.ledger.Seq
}

// separate takes out the claims that wait for a MachineDeployment that is no more: one that has its name was made, with replicas that
// are not theirs.
func (s *snapshot) separate() {
	if s.md.UID == "" {
		return // it is gone, and no other one is there
	}
	s.claims = slices.DeleteFunc(s.claims, func(c *v1alpha1.MachineClaim) bool {
		id := c.Spec.ClaimID
		if c.Status.Phase != v1alpha1.PhasePending || c.Status.NodeGroupUID == "" || c.Status.NodeGroupUID == s.md.UID || s.labelled(id) != nil {
			return false
		}
		if s.ledger != nil {
			if _, entered := s.ledger.Pending[id]; entered {
				return false // that MachineDeployment was moved, and this is it
			}
		}
		s.former = append(s.former, c)
		delete(s.byID, id)
		return true
	})
}

// leftBehind reports whether a claim had its Machine from a MachineDeployment that is no more, and lost it with that.
func (s *snapshot) leftBehind(c *v1alpha1.MachineClaim) bool {
	return c.Status.NodeGroupUID != "" && c.Status.NodeGroupUID != s.md.UID && s.machine(c.Status.Machine.UID) == nil
}

// madeAgain reports whether the ledger is one that was put on a MachineDeployment when that was made again in place of another:
// claims that were entered in the other one's are still there. Of a MachineDeployment that was moved, or restored, there are none: its
// ledger is its own.
func (s *snapshot) madeAgain() bool {
	if s.ledger == nil || s.ledger.UID == "" || s.ledger.UID == s.md.UID {
		return false
	}
	return slices.ContainsFunc(s.claims, func(c *v1alpha1.MachineClaim) bool {
		return c.CurrentPhase() != v1alpha1.PhaseEnded && c.Status.NodeGroupUID == s.ledger.UID
	})
}

func (s *snapshot) machine(uid types.UID) *clusterv1.Machine { return s.byUID[uid] }

// named returns the Machine of that name, or nil.
func (s *snapshot) named(name string) *clusterv1.Machine {
	if i := slices.IndexFunc(s.machines, func(m *clusterv1.Machine) bool { return m.Name == name }); i >= 0 {
		return s.machines[i]
	}
	return nil
}

func (s *snapshot) claim(id string) *v1alpha1.MachineClaim { return s.byID[id] }

// labelled returns the Machine that carries the claim's label, or nil.
func (s *snapshot) labelled(claimID string) *clusterv1.Machine { return s.byLabel[claimID] }

// activeSets returns the MachineSets that have replicas or are asked to.
func (s *snapshot) activeSets() []*clusterv1.MachineSet {
	var active []*clusterv1.MachineSet
	for _, set := range s.sets {
		if replicasOf(set) > 0 {
			active = append(active, set)
		}
	}
	return active
}

// observed reports whether Cluster API has carried generation g of the MachineDeployment through to all its MachineSets.
func (s *snapshot) observed(g int64) bool {
	return s.carriedThrough(g) && s.assigned()
}

// assigned reports whether the MachineSets have been told all of the MachineDeployment's replicas.
func (s *snapshot) assigned() bool {
	return s.allLowered() && s.sum() == *s.md.Spec.Replicas
}

// allLowered reports whether the MachineSets have been told of every lowering of the MachineDeployment's replicas. Of a raise they
// need not have: Cluster API puts that off while a MachineSet's status counts more Machines than its spec, which is for as long
// as it is paused.
func (s *snapshot) allLowered() bool {
	return s.md.Status.ObservedGeneration >= s.md.Generation && s.md.Spec.Replicas != nil && s.sum() <= *s.md.Spec.Replicas
}

func (s *snapshot) sum() int32 {
	var sum int32
	for _, set := range s.sets {
		sum += replicasOf(set)
	}
	return sum
}

// newest returns the MachineSet that Cluster API made, or took up again, last; nil when there is none.
func (s *snapshot) newest() *clusterv1.MachineSet {
	var newest *clusterv1.MachineSet
	latest := int64(-1)
	for _, set := range s.sets {
		revision, _ := strconv.ParseInt(set.Annotations[clusterv1.RevisionAnnotation], 10, 64) // zero when somebody broke it
		if revision > latest {
			newest, latest = set, revision
		}
	}
	return newest
}

// deleted reports whether the MachineDeployment is being deleted, and everything with it.
func (s *snapshot) deleted() bool { return !s.md.DeletionTimestamp.IsZero() }

func (s *snapshot) onDelete() bool {
	return s.md.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType
}

// carriedThrough reports whether every MachineSet has acted on generation g of the MachineDeployment, whatever a rollout
// makes of the numbers meanwhile.
func (s *snapshot) carriedThrough(g int64) bool {
	if s.md.Status.ObservedGeneration < g {
		return false
	}
	return !slices.ContainsFunc(s.sets, func(set *clusterv1.MachineSet) bool { return set.Status.ObservedGeneration < set.Generation })
}

// rollingOut reports whether Cluster API is replacing Machines by itself, which makes Machines beyond replicas and charges
// replicas to MachineSets as it sees fit. Under OnDelete it never does.
func (s *snapshot) rollingOut() bool {
	if s.onDelete() {
		return false
	}
	return len(s.activeSets()) > 1 || slices.ContainsFunc(s.machines, outdated)
}

// settled reports whether nothing is under way in Cluster API: everything observed, no rollout, as many Machines as replicas
// and none of them being deleted.
func (s *snapshot) settled() bool {
	if !s.observed(s.md.Generation) || s.rollingOut() || len(s.machines) != int(s.group.Replicas) {
		return false
	}
	return !slices.ContainsFunc(s.machines, func(m *clusterv1.Machine) bool { return !alive(m) })
}

func replicasOf(set *clusterv1.MachineSet) int32 {
	if set.Spec.Replicas == nil {
		return 0
	}
	return *set.Spec.Replicas
}

func alive(m *clusterv1.Machine) bool {
	return m.DeletionTimestamp.IsZero()
}

func hasNode(m *clusterv1.Machine) bool {
	return m.Status.NodeRef.Name != ""
}

// setOf returns the name of the Machine's MachineSet, "" when it has none. The label of that name may hold a hash.
func setOf(m *clusterv1.Machine) string {
	for i := range m.OwnerReferences {
		if owner := &m.OwnerReferences[i]; owner.Kind == "MachineSet" && owner.Controller != nil && *owner.Controller {
			return owner.Name
		}
	}
	return ""
}

func claimOf(m *clusterv1.Machine) string {
	return m.Labels[v1alpha1.ClaimLabel]
}

func held(m *clusterv1.Machine) bool {
	return slices.Contains(m.Finalizers, v1alpha1.ReleaseFinalizer)
}

// hooked reports whether the agent's pre-terminate hook is on the Machine.
func hooked(m *clusterv1.Machine) bool {
	_, yes := m.Annotations[v1alpha1.ReleaseHook]
	return yes
}

// stoppable reports whether a pre-terminate hook still comes in time for a Machine that is being deleted.
func stoppable(m *clusterv1.Machine) bool {
	switch deletingReason(m) {
	case clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason, clusterv1.MachineDeletingWaitingForBootstrapDeletionReason,
		clusterv1.MachineDeletingDeletingNodeReason, clusterv1.MachineDeletingDeletionCompletedReason:
		return false
	}
	return !alive(m)
}

// waitsForHook reports whether Cluster API has stopped the Machine's deletion before its instance because of our hook.
func waitsForHook(m *clusterv1.Machine) bool {
	return !alive(m) && hooked(m) && deletingReason(m) == clusterv1.MachineDeletingWaitingForPreTerminateHookReason
}

// outdated reports whether Cluster API wants the Machine replaced, because of a template change.
func outdated(m *clusterv1.Machine) bool {
	for i := range m.Status.Conditions {
		c := &m.Status.Conditions[i]
		if c.Type == clusterv1.MachineUpToDateCondition {
			return c.Status == "False" && c.Reason == clusterv1.MachineNotUpToDateReason
		}
	}
	return false
}

// deletionCompleted reports whether the Machine's instance and Node are gone and only the agent's finalizer keeps the object.
func deletionCompleted(m *clusterv1.Machine) bool {
	if alive(m) || len(m.Finalizers) != 1 || m.Finalizers[0] != v1alpha1.ReleaseFinalizer {
		return false
	}
	return deletingReason(m) == clusterv1.MachineDeletingDeletionCompletedReason
}

// deletingReason returns what the deletion of the Machine is at, in Cluster API's words, "" when it says nothing.
func deletingReason(m *clusterv1.Machine) string {
	if c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineDeletingCondition); c != nil {
		return c.Reason
	}
	return ""
}

// deletingMessage returns the same in a sentence.
func deletingMessage(m *clusterv1.Machine) string {
	if c := meta.FindStatusCondition(m.Status.Conditions, clusterv1.MachineDeletingCondition); c != nil {
		return c.Message
	}
	return ""
}
