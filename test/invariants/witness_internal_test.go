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

// jury is a judge with the answers that the test sets.
type jury struct {
	asker    Asker
	released map[string]bool
	own      map[types.UID]bool
}

func (j *jury) AskedBy(*clusterv1.Machine) Asker { return j.asker }

func (j *jury) Released(claimID string) bool { return j.released[claimID] }

func (j *jury) Owns(m *clusterv1.Machine) bool { return j.own[m.UID] }

// newWitness returns a Witness that the tests feed with events. The hub contains the given objects.
func newWitness(t *testing.T, judge Judge, objects ...client.Object) *Witness {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clusterv1.AddToScheme, agentv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return &Witness{
		judge: judge, hub: fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build(),
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
		name  string
		judge *jury
		claim string
		taken bool
	}{
		{"by an agent, of a released claim", &jury{asker: Agent, released: map[string]bool{"c": true}}, "c", false},
		{"by an agent, of a claim that is wanted", &jury{asker: Agent}, "c", true},
		{"by an agent, of a claim that failed", &jury{asker: Agent}, "failed", false},
		{"by an agent, of a spare", &jury{asker: Agent}, "", false},
		{"by an agent, of the user's own", &jury{asker: Agent, own: map[types.UID]bool{"m": true}}, "", true},
		{"by Cluster API, of a claim that is wanted", &jury{}, "c", true},
		{"by Cluster API, of a released claim", &jury{released: map[string]bool{"c": true}}, "c", true},
		{"by Cluster API, without an owner", &jury{}, "", true},
		{"by a person", &jury{asker: Person}, "c", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWitness(t, tc.judge, failed.DeepCopy())
			w.seeMachine(seen("m", tc.claim, false))
			w.seeMachine(seen("m", tc.claim, true))
			w.seeMachine(seen("m", tc.claim, true)) // judged only once
			w.machineGone(seen("m", tc.claim, true))
			if tc.taken {
				violations := w.Violations()
				require.Len(t, violations, 1)
				require.Equal(t, NothingTaken, violations[0].Rule)
			} else {
				require.Empty(t, w.Violations())
			}
		})
	}
}

func TestAMachineThatIsGoneAtOnceIsJudgedToo(t *testing.T) {
	w := newWitness(t, &jury{})
	w.seeMachine(seen("m", "c", false))
	w.machineGone(seen("m", "c", false))
	violations := w.Violations()
	require.Len(t, violations, 1)
	require.Equal(t, NothingTaken, violations[0].Rule)
}

func TestWhatIsClaimedTwiceIsSeen(t *testing.T) {
	for _, tc := range []struct {
		name  string
		see   func(*Witness)
		twice bool
	}{
		{"two Machines with one label", func(w *Witness) {
			w.seeMachine(seen("a", "c", false))
			w.seeMachine(seen("b", "c", false))
		}, true},
		{"a second Machine when the first is gone", func(w *Witness) {
			w.seeMachine(seen("a", "c", false))
			w.seeMachine(seen("a", "", false))
			w.seeMachine(seen("b", "c", false))
		}, true},
		{"a label that changes", func(w *Witness) {
			w.seeMachine(seen("a", "c", false))
			w.seeMachine(seen("a", "d", false))
		}, true},
		{"a Machine that is handed over", func(w *Witness) {
			w.seeMachine(seen("a", "c", false))
			w.seeMachine(seen("a", "", false))
			w.seeMachine(seen("a", "d", false))
		}, false},
		{"two claims with one Machine", func(w *Witness) {
			w.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			w.seeClaim(bound("d", agentv1.PhaseBound, "a"))
		}, true},
		{"a claim after the one that had the Machine", func(w *Witness) {
			w.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			w.seeClaim(bound("c", agentv1.PhaseReleasing, "a"))
			w.seeClaim(bound("d", agentv1.PhaseBound, "a"))
		}, false},
		{"a claim that gets another Machine", func(w *Witness) {
			w.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			w.seeClaim(bound("c", agentv1.PhaseBound, "b"))
		}, true},
		{"a claim that loses its status and is restored", func(w *Witness) {
			w.seeClaim(bound("c", agentv1.PhaseBound, "a"))
			w.seeClaim(bound("c", "", ""))
			w.seeClaim(bound("c", agentv1.PhaseBound, "a"))
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWitness(t, &jury{})
			tc.see(w)
			if tc.twice {
				violations := w.Violations()
				require.Len(t, violations, 1)
				require.Equal(t, OneClaimOneMachine, violations[0].Rule)
			} else {
				require.Empty(t, w.Violations())
			}
		})
	}
}

func TestClaimsAreRemembered(t *testing.T) {
	w := newWitness(t, &jury{})
	require.Nil(t, w.Claim("c"))
	w.seeClaim(bound("c", agentv1.PhasePending, ""))
	w.seeClaim(bound("c", agentv1.PhaseBound, "a"))
	released := bound("c", agentv1.PhaseReleasing, "a")
	released.Status.ReleasedAt = new(metav1.Now())
	w.seeClaim(released)
	w.claimGone(released)
	c := w.Claim("c")
	require.NotNil(t, c)
	require.Equal(t, agentv1.PhaseEnded, c.Phase)
	require.True(t, c.Entered)
	require.True(t, c.Releasing)
	require.Equal(t, "a", c.Machine.Name)
	require.Equal(t, 1, w.Count(func(c ClaimRecord) bool { return c.Releasing }))
}
