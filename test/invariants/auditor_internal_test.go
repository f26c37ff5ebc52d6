package invariants

import (
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// stubIntent is an Intent with the answers that the test sets.
type stubIntent struct {
	actor    Actor
	released map[string]bool
	own      map[types.UID]bool
}

func (i *stubIntent) DeletedBy(*clusterv1.Machine) Actor { return i.actor }

func (i *stubIntent) Released(claimID string) bool { return i.released[claimID] }

func (i *stubIntent) Owns(m *clusterv1.Machine) bool { return i.own[m.UID] }

// newAuditor returns an Auditor that the tests feed with events. The hub contains the given
// objects.
func newAuditor(t *testing.T, intent Intent, objects ...client.Object) *Auditor {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, agentv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return &Auditor{
		intent: intent, hub: fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build(),
		machines: map[types.UID]*machineRecord{}, labelled: map[string]types.UID{},
		claims: map[string]*ClaimRecord{}, changed: make(chan struct{}),
	}
}

func seen(name, claim string, deleted bool) *clusterv1.Machine {
	m := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name, UID: types.UID(name)},
		Spec:       clusterv1.MachineSpec{ClusterName: "spoke"},
	}
	if claim != "" {
		m.Labels = map[string]string{agentv1.ClaimLabel: claim}
	}
	if deleted {
		m.DeletionTimestamp = new(metav1.Now())
	}
	return m
}

func bound(id string, phase agentv1.Phase, machine string) *agentv1.MachineClaim {
	c := &agentv1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: agentv1.ObjectName("spoke", id)},
		Spec:       agentv1.MachineClaimSpec{ClusterName: "spoke", ClaimID: id, Holder: "chaos", NodeGroup: "small"},
		Status:     agentv1.MachineClaimStatus{Phase: phase},
	}
	if machine != "" {
		c.Status.Machine = &agentv1.MachineReference{Name: machine, UID: types.UID(machine)}
	}
	return c
}

func TestDeletionsAreJudgedByWhoAskedForThem(t *testing.T) {
	failed := bound("failed", agentv1.PhaseReleasing, "m")
	failed.Status.FailedAt = new(metav1.Now())
	for _, tc := range []struct {
		name   string
		intent *stubIntent
		claim  string
		taken  bool
	}{
		{"by an agent, of a released claim", &stubIntent{actor: Agent, released: map[string]bool{"c": true}}, "c", false},
		{"by an agent, of a claim that is wanted", &stubIntent{actor: Agent}, "c", true},
		{"by an agent, of a claim that failed", &stubIntent{actor: Agent}, "failed", false},
		{"by an agent, of a spare", &stubIntent{actor: Agent}, "", false},
		{"by an agent, of the user's own", &stubIntent{actor: Agent, own: map[types.UID]bool{"m": true}}, "", true},
		{"by Cluster API, of a claim that is wanted", &stubIntent{}, "c", true},
		{"by Cluster API, of a released claim", &stubIntent{released: map[string]bool{"c": true}}, "c", true},
		{"by Cluster API, without an owner", &stubIntent{}, "", true},
		{"by a person", &stubIntent{actor: Person}, "c", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := newAuditor(t, tc.intent, failed.DeepCopy())
			a.seeMachine(seen("m", tc.claim, false))
			a.seeMachine(seen("m", tc.claim, true))
			a.seeMachine(seen("m", tc.claim, true)) // audited only once
			a.machineGone(seen("m", tc.claim, true))
			if tc.taken {
				violations := a.Violations()
				require.Len(t, violations, 1)
				require.Equal(t, NothingTaken, violations[0].Rule)
			} else {
				require.Empty(t, a.Violations())
			}
		})
	}
}

func TestAMachineThatIsGoneAtOnceIsJudgedToo(t *testing.T) {
	a := newAuditor(t, &stubIntent{})
	a.seeMachine(seen("m", "c", false))
	a.machineGone(seen("m", "c", false))
	violations := a.Violations()
	require.Len(t, violations, 1)
	require.Equal(t, NothingTaken, violations[0].Rule)
}

func TestWhatIsClaimedTwiceIsSeen(t *testing.T) {
	for _, tc := range []struct {
		name  string
		see   func(*Auditor)
		twice bool
	}{
		{"two Machines with one label", func(a *Auditor) {
			a.seeMachine(seen("a", "c", false))
			a.seeMachine(seen("b", "c", false))
		}, true},
		{"a second Machine when the first is gone", func(a *Auditor) {
			a.seeMachine(seen("a", "c", false))
			a.seeMachine(seen("a", "", false))
			a.seeMachine(seen("b", "c", false))
		}, true},
		{"a label that changes", func(a *Auditor) {
			a.seeMachine(seen("a", "c", false))
			a.seeMachine(seen("a", "d", false))
		}, true},
		{"a Machine that is handed over", func(a *Auditor) {
			a.seeMachine(seen("a", "c", false))
			a.seeMachine(seen("a", "", false))
			a.seeMachine(seen("a", "d", false))
		}, false},
		{"two claims with one Machine", func(a *Auditor) {
			a.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			a.seeClaim(bound("d", agentv1.PhaseBound, "a"))
		}, true},
		{"a claim after the one that had the Machine", func(a *Auditor) {
			a.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			a.seeClaim(bound("c", agentv1.PhaseReleasing, "a"))
			a.seeClaim(bound("d", agentv1.PhaseBound, "a"))
		}, false},
		{"a claim that gets another Machine", func(a *Auditor) {
			a.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			a.seeClaim(bound("c", agentv1.PhaseBound, "b"))
		}, true},
		{"a claim that loses its status and is restored", func(a *Auditor) {
			a.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			a.seeClaim(bound("c", "", ""))
			a.seeClaim(bound("c", agentv1.PhaseBound, "a"))
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a := newAuditor(t, &stubIntent{})
			tc.see(a)
			if tc.twice {
				violations := a.Violations()
				require.Len(t, violations, 1)
				require.Equal(t, OneClaimOneMachine, violations[0].Rule)
			} else {
				require.Empty(t, a.Violations())
			}
		})
	}
}

func TestClaimsAreRemembered(t *testing.T) {
	a := newAuditor(t, &stubIntent{})
	require.Nil(t, a.Claim("c"))
	a.seeClaim(bound("c", agentv1.PhasePending, ""))
	a.seeClaim(bound("c", agentv1.PhaseBound, "a"))
	released := bound("c", agentv1.PhaseReleasing, "a")
	released.Status.ReleasedAt = new(metav1.Now())
	a.seeClaim(released)
	a.claimGone(released)
	c := a.Claim("c")
	require.NotNil(t, c)
	require.Equal(t, agentv1.PhaseEnded, c.Phase)
	require.True(t, c.Entered)
	require.True(t, c.Releasing)
	require.Equal(t, "a", c.Machine.Name)
	require.Equal(t, 1, a.Count(func(c ClaimRecord) bool { return c.Releasing }))
}
