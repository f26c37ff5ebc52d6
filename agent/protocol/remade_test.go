package protocol

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// movedScene is a group right after a move: the ledger is that of the MachineDeployment before it,
// and the holder has reported its live claims since.
func movedScene(replicas int32, ledger *Ledger) *Snapshot {
	ledger.Version, ledger.UID, ledger.LastReplicas = 1, "before", replicas
	s := atRest(replicas, ledger)
	s.Deployment.UID, s.ClusterUID, s.Synced = "after", "cluster-after", true
	s.Deployment.CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
	return s
}

// withCarried adds a claim that was moved without its status.
func (s *Snapshot) withCarried(id string) *Snapshot {
	s.withClaim(id, "", "")
	c := s.Claims[len(s.Claims)-1]
	c.Spec.ClusterUID, c.Spec.Spoke = "cluster-before", "the-spoke"
	c.CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
	return s
}

// A paused Cluster may be on its way to another hub. Its Machines go first, then its claims.
func TestNothingIsConcludedWhileTheClusterIsPaused(t *testing.T) {
	s := atRest(2, &Ledger{
		Version: 1, LastReplicas: 2,
		Pending: map[string]Assignment{"gone": {}}, Releasing: map[types.UID]Release{"vanished": {Machine: "vanished", Claim: "r", Decremented: true}},
	}).withClaim("bound", v1alpha1.PhaseBound, "vanished-too").withClaim("r", v1alpha1.PhaseReleasing, "vanished").withClaim("new", "", "")
	require.True(t, s.Lacks())
	require.NotEmpty(t, Decide(s).Actions, "else the test shows nothing")

	s.Group.Suspended = true
	s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Paused, Message: "paused"}}
	d := Decide(s)
	assert.True(t, d.Held)
	assert.Nil(t, d.Ledger)
	assert.Empty(t, d.Actions)
	assert.Equal(t, eligibility.Paused, d.Refused["new"].Reason)
	assert.NotZero(t, d.RequeueAfter)
}

func TestALedgerThatWasMovedSpeaksOfMachinesByTheirNames(t *testing.T) {
	s := movedScene(3, &Ledger{
		Pending: map[string]Assignment{"p": {Machine: "promised", UID: "old-1"}, "q": {Machine: "vanished", UID: "old-2"}},
		Releasing: map[types.UID]Release{
			"old-3": {Machine: "going", Claim: "r", Drained: true},
			"old-4": {Machine: "given-back", Claim: "b", Decremented: true, Generation: 40},
			"old-5": {Machine: "alive-again", Claim: "a", Decremented: true, Generation: 41},
		},
	}).
		withMachine("promised", "", booting).withMachine("going", "r", node).withMachine("alive-again", "a", node).
		withMachine("given-back", "b", func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.NewTime(newTestTime())) }).
		withClaim("p", v1alpha1.PhasePending, "").withClaim("q", v1alpha1.PhasePending, "").withClaim("r", v1alpha1.PhaseReleasing, "going").
		withClaim("b", v1alpha1.PhaseReleasing, "given-back").withClaim("a", v1alpha1.PhaseReleasing, "alive-again")
	d := Decide(s)
	require.NotNil(t, d.Ledger, "it is written for the MachineDeployment that there is now")
	assert.Equal(t, map[string]Assignment{"p": {Machine: "promised", UID: "promised"}, "q": {}}, d.Ledger.Pending)
	assert.Equal(t, map[types.UID]Release{
		"going":       {Machine: "going", Claim: "r", Drained: true},
		"given-back":  {Machine: "given-back", Claim: "b", Decremented: true, Generation: 3},
		"alive-again": {Machine: "alive-again", Claim: "a", Generation: 3},
	}, d.Ledger.Releasing, "no MachineSet observes the generation of the one that was")
	assert.Equal(t, int32(4), d.Replicas, "the Machine that lives again has one until it is gone")
}

func TestAClaimThatWasMovedIsKnownByItsMachineOrByTheLedger(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Snapshot)
		kind   ActionKind
		check  func(*Decision) bool
	}{
		"its Machine carries its label": {
			change: func(s *Snapshot) { s.withMachine("m", "c", node) }, kind: Restore,
			check: func(d *Decision) bool { return d.Actions[0].Release.Machine == "" },
		},
		"its Machine is being released": {
			change: func(s *Snapshot) {
				s.withMachine("m", "c", node)
				s.Ledger.Releasing = map[types.UID]Release{"old": {Machine: "m", Claim: "c", Drained: true}}
			},
			kind: Restore, check: func(d *Decision) bool { return d.Actions[0].Release.Drained },
		},
		"another actor is deleting its Machine": {
			change: func(s *Snapshot) {
				s.withMachine("m", "c", func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.NewTime(s.Now)) })
			},
			kind: Restore,
		},
		"the ledger has it": {
			change: func(s *Snapshot) { s.Ledger.Pending = map[string]Assignment{"c": {}} }, kind: MarkAdmitted,
		},
		"nobody knows it": {
			change: func(*Snapshot) {}, kind: End,
			check: func(d *Decision) bool { return d.Actions[0].Event.Reason == ReasonStateLost },
		},
		"nobody knows it yet": {
			change: func(s *Snapshot) { s.Claims[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-remadeSettles / 2)) },
		},
		"its Machine may still be coming": {
			change: func(s *Snapshot) {
				s.withMachine("other", "", node).Machines[1].CreationTimestamp = metav1.NewTime(s.Now)
				s.Claims[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-5 * time.Minute))
			},
		},
		"Cluster API creates Machines all the time": {
			change: func(s *Snapshot) {
				s.withMachine("other", "", node).Machines[1].CreationTimestamp = metav1.NewTime(s.Now)
				s.Claims[0].CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Hour))
				s.Deployment.CreationTimestamp = s.Claims[0].CreationTimestamp
			}, kind: End,
		},
		"an older agent made it, and nobody knows it": {
			change: func(s *Snapshot) { s.Claims[0].Spec.ClusterUID = "" }, kind: End,
		},
	} {
		for _, synced := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				s := movedScene(1, &Ledger{Floor: 1}).withMachine("floor", "", node).withCarried("c")
				s.Synced, s.Machines[0].CreationTimestamp = synced, s.Claims[0].CreationTimestamp
				test.change(s)
				d := Decide(s)
				assert.True(t, d.Held)
				assert.Empty(t, d.Refused, "it is not taken for one that asks for a Machine")
				assert.Nil(t, d.Ledger, "which may know more of it than is known yet")
				if test.kind == "" {
					assert.Empty(t, d.Actions)
					assert.NotZero(t, d.RequeueAfter)
					return
				}
				require.Equal(t, []ActionKind{test.kind}, kinds(d)[:1])
				assert.True(t, test.check == nil || test.check(d), "%+v", d.Actions[0])
			})
		}
	}
}

func TestNothingIsOrderedAndNothingRemovedBeforeTheHolderHasSaidWhoLives(t *testing.T) {
	spare := func() *Snapshot {
		s := movedScene(2, &Ledger{}).withMachine("mine", "c", node).withMachine("spare", "", node).
			withClaim("c", v1alpha1.PhaseBound, "mine").withClaim("new", "", "")
		s.SpareSince, s.Claims[0].Spec.Spoke, s.Claims[1].Spec.ClusterUID = s.Now.Add(-time.Hour), "the-spoke", s.ClusterUID
		return s
	}
	s := spare()
	s.Synced = false
	d := Decide(s)
	assert.Nil(t, d.Ledger)
	assert.Empty(t, d.Actions)
	assert.Contains(t, d.Refused, "new")

	assert.Contains(t, Decide(spare()).Ledger.Pending, "new")
	idle := spare()
	idle.Claims = idle.Claims[:1]
	assert.Contains(t, Decide(idle).Ledger.Releasing, types.UID("spare"))

	alone := spare()
	alone.Synced, alone.Claims[0].Spec.Spoke = false, ""
	assert.NotNil(t, Decide(alone).Ledger, "a holder that never says who lives is not waited for")
}

// The deletion of a moved Cluster does not wait for its shim, which may be gone as well.
func TestAGroupThatIsDeletedWaitsForNoHolder(t *testing.T) {
	s := movedScene(1, &Ledger{Releasing: map[types.UID]Release{"old": {Machine: "m", Claim: "c"}}}).
		withMachine("m", "c", func(m *clusterv1.Machine) {
			m.Finalizers, m.DeletionTimestamp = []string{v1alpha1.ReleaseFinalizer}, new(metav1.NewTime(newTestTime()))
			m.Status.Conditions = []metav1.Condition{{
				Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: clusterv1.MachineDeletingDeletionCompletedReason,
			}}
		}).withClaim("other", v1alpha1.PhaseBound, "gone")
	s.Synced, s.Claims[0].Spec.Spoke = false, "the-spoke"
	require.True(t, Decide(s).Held, "else the test shows nothing")
	s.Deployment.DeletionTimestamp = new(metav1.NewTime(s.Now))
	assert.Contains(t, kinds(Decide(s)), RemoveFinalizer)
}

// Backups may leave claims out. Those are recreated from their Machines' labels, and are not new
// claims that could be refused.
func TestAClaimThatWasLeftBehindIsMadeAgainWhileTheHolderIsWaitedFor(t *testing.T) {
	s := movedScene(2, &Ledger{}).withMachine("lost", "lost", node).withMachine("again", "again", node).
		withClaim("again", "", "").withCarried("other")
	s.Synced, s.Claims[0].Spec.ClusterUID = false, s.ClusterUID
	s.Lost = map[string]*clusterv1.Machine{"lost": s.Machines[0]}
	d := Decide(s)
	assert.Subset(t, kinds(d), []ActionKind{Recreate, Restore})
	assert.Empty(t, d.Refused)
}

// The MachineSet was lowered for the Machine under its former UID.
func TestAMachineSetThatWasLoweredBeforeAMoveIsNotLoweredAgain(t *testing.T) {
	one, two := int32(1), int32(2)
	s := movedScene(3, &Ledger{Releasing: map[types.UID]Release{"old": {Machine: "m", Claim: "c", Set: "small-a"}}}).
		withMachine("m", "c", func(m *clusterv1.Machine) {
			m.Finalizers, m.DeletionTimestamp = []string{v1alpha1.ReleaseFinalizer}, new(metav1.NewTime(newTestTime()))
			m.Status.Conditions = []metav1.Condition{{
				Type: clusterv1.MachineDeletingCondition, Status: metav1.ConditionTrue, Reason: clusterv1.MachineDeletingDeletionCompletedReason,
			}}
		}).withClaim("c", v1alpha1.PhaseReleasing, "m").
		withMachine("b1", "b1", node).withMachine("b2", "b2", node).
		withClaim("b1", v1alpha1.PhaseBound, "b1").withClaim("b2", v1alpha1.PhaseBound, "b2")
	for _, m := range s.Machines[1:] {
		m.OwnerReferences[0].Name = "small-b"
	}
	s.Deployment.Annotations = map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent}
	s.Deployment.Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue}}
	s.Sets = []*clusterv1.MachineSet{
		{
			ObjectMeta: metav1.ObjectMeta{Name: "small-a", Annotations: map[string]string{v1alpha1.ReleasedAnnotation: "old"}},
			Spec:       clusterv1.MachineSetSpec{Replicas: new(int32(0))},
		},
		{ObjectMeta: metav1.ObjectMeta{Name: "small-b"}, Spec: clusterv1.MachineSetSpec{Replicas: &two}},
	}
	d := Decide(s)
	assert.NotContains(t, kinds(d), LowerSet)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, types.UID("old"), d.Ledger.Releasing["m"].LoweredAs)
	assert.True(t, d.Ledger.Releasing["m"].Decremented)
	assert.Equal(t, 3-one, d.Replicas)
}
