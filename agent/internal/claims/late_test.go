package claims

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// slowWorld is a hub with slow machines, and a caller that wants one of them. Whenever its claim is
// taken back it makes another one, as Karpenter does.
type slowWorld struct {
	*world
	deadline time.Duration
	// patient is how long the caller itself waits before it releases its claim; zero leaves that to
	// the agent.
	patient time.Duration
	claim   string
	made    time.Time
	count   int
}

func newSlowWorld(t *rapid.T, takes func(*clusterv1.Machine) time.Duration) *slowWorld {
	w := &slowWorld{
		world:    newWorld(t, worldOptions{groups: 1, strategy: clusterv1.RollingUpdateMachineDeploymentStrategyType}),
		deadline: 15 * time.Minute,
	}
	if rapid.Bool().Draw(t, "the caller releases") {
		w.patient = w.deadline
	}
	w.fair = true
	w.slow = func(m *clusterv1.Machine) bool {
		// A Machine that joins between two claims is for the next one only if its holder reports it
		// as unregistered.
		return w.clock.Since(m.CreationTimestamp.Time) < takes(m) || protocol.ClaimOf(m) == ""
	}
	for _, p := range w.agents {
		p.engine.Failure = protocol.FailurePolicy{ProviderIDDeadline: w.deadline, NodeDeadline: w.deadline, CoolDown: 3 * time.Minute}
	}
	return w
}

// tick is how long callers take to come again. It is shorter than the grace period of a spare.
const tick = 40 * time.Second

// pass advances the time by a tick, with two agents.
func (w *slowWorld) pass() {
	if c := w.claims()[w.claim]; c == nil || !w.waits(c) {
		w.count++
		w.claim, w.made = fmt.Sprintf("c%d", w.count), w.clock.Now()
		w.owners[w.claim] = &owner{excused: true} // its claim may be taken back
		w.asAgent(w.count%2, func(ctx context.Context, agent *Engine) error {
			_, err := agent.Create(ctx, Request{
				Namespace: namespace, Cluster: clusterName, ID: w.claim, Holder: holder, Candidates: []string{w.groups[0]},
			})
			return err
		})
	} else if w.patient > 0 && !w.served() && w.clock.Since(w.made) >= w.patient {
		w.asAgent(w.count%2, func(ctx context.Context, agent *Engine) error {
			_, err := agent.Release(ctx, Key{namespace, clusterName, w.claim}, ReleaseOptions{})
			return err
		})
	}
	for e := range w.agents {
		for _, k := range allKinds {
			w.agents[e].caches[k] = w.hub.snapshot(k)
		}
	}
	w.report()
	for e := range w.agents {
		w.agentReconciles(e, w.groups[0])
	}
	w.controllers(w.groups[0])
	w.clock.Step(tick)
}

// report makes the holder report all of its Nodes to one of the agents.
func (w *slowWorld) report() {
	w.asAgent(w.count%2, func(ctx context.Context, agent *Engine) error {
		_, token, err := agent.List(ctx, ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		if err != nil {
			return err
		}
		r := SyncRequest{
			Namespace: namespace, Cluster: clusterName, Holder: holder, Token: token, LiveIDs: []string{w.claim}, NodesComplete: true,
		}
		for _, m := range w.machines(w.groups[0]) {
			if protocol.HasNode(m) {
				r.Nodes = append(r.Nodes, NodeReport{ProviderID: m.Spec.ProviderID, Unregistered: protocol.ClaimOf(m) == ""})
			}
		}
		_, err = agent.Sync(ctx, r)
		return err
	})
}

func (w *slowWorld) waits(c *v1alpha1.MachineClaim) bool {
	phase := c.CurrentPhase()
	return phase == v1alpha1.PhasePending || phase == v1alpha1.PhaseBound
}

func (w *slowWorld) failed() int {
	n := 0
	for _, c := range w.claims() {
		if c.Status.FailedAt != nil {
			n++
		}
	}
	return n
}

func (w *slowWorld) served() bool {
	for _, m := range w.machines(w.groups[0]) {
		if protocol.HasNode(m) && protocol.ClaimOf(m) == w.claim {
			return true
		}
	}
	return false
}

// A machine that takes longer than a claim waits is kept for the next claims until it comes: 25
// minutes with a deadline of 15, or anything less than [patience] deadlines.
func TestALateMachineComesInTheEnd(t *testing.T) {
	inOneGoroutine(t)
	rapid.Check(t, func(t *rapid.T) {
		takes := time.Duration(rapid.IntRange(1, protocol.Patience*15-3).Draw(t, "minutes")) * time.Minute
		w := newSlowWorld(t, func(*clusterv1.Machine) time.Duration { return takes })
		for range takes/tick + 6 {
			w.pass()
		}
		if !w.served() {
			t.Fatalf("a machine that takes %s serves nobody after %d claims\n%s", takes, w.count, w.describe())
		}
		if machines := w.machines(w.groups[0]); len(machines) != 1 || w.failed() != 0 {
			t.Fatalf("there are %d machines, and %d claims failed\n%s", len(machines), w.failed(), w.describe())
		}
	})
}

// A machine that never comes is removed in bounded time, its node group cools down, and the next
// claim gets another machine.
func TestAMachineThatNeverComesIsGivenUpInTheEnd(t *testing.T) {
	inOneGoroutine(t)
	rapid.Check(t, func(t *rapid.T) {
		const never = 1000 * time.Hour
		provisioned := rapid.Bool().Draw(t, "it has a provider ID")
		var first *clusterv1.Machine
		w := newSlowWorld(t, func(m *clusterv1.Machine) time.Duration {
			if first == nil {
				first = m
			}
			if m.UID != first.UID || provisioned && m.Spec.ProviderID == "" {
				return 0
			}
			return never
		})
		w.pass()
		for w.clock.Since(first.CreationTimestamp.Time) < protocol.Patience*w.deadline+10*time.Minute {
			w.pass()
		}
		for _, m := range w.machines(w.groups[0]) {
			if m.UID == first.UID {
				t.Fatalf("it is still there after %d claims\n%s", w.count, w.describe())
			}
		}
		if w.failed() != 1 {
			t.Fatalf("%d claims failed with it\n%s", w.failed(), w.describe())
		}
		if !w.served() {
			t.Fatalf("no other machine came in its place\n%s", w.describe())
		}
	})
}

// setOf returns the MachineSet of the group "small".
func setOf(replicas int32) *clusterv1.MachineSet {
	return &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "small-a", Labels: map[string]string{clusterv1.MachineDeploymentNameLabel: "small"},
		},
		Spec: clusterv1.MachineSetSpec{ClusterName: clusterName, Replicas: &replicas},
	}
}

// The Machine that was ordered for the claim joined before an agent could assign it, and no report
// says that nothing runs on it. Another one is ordered just before the claim's deadline.
func TestAClaimDoesNotFailAsAnotherMachineIsOrderedForIt(t *testing.T) {
	md := groupWith("group", 1, &protocol.Ledger{Version: 1, Seq: 4, LastReplicas: 1, Pending: map[string]protocol.Assignment{"a": {}}})
	md.Status.ObservedGeneration = md.Generation
	set := setOf(1)
	joined := machineOf("joined")
	joins(joined)
	const deadline = 5 * time.Minute
	clock := clocktesting.NewFakeClock(newTestTime().Add(deadline))
	joined.Status.LastUpdated = metav1.NewTime(clock.Now().Add(-2 * time.Minute))
	e := quiet(engineWith(t, md, set, joined, claimIn("group", "a", v1alpha1.PhasePending, "")))
	e.Clock, e.started, e.Failure.ObjectDeadline = clock, time.Time{}, deadline
	e.ReportsNodes = func(string) bool { return true }

	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	c, err := e.Get(t.Context(), keyOf("a"))
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhasePending, c.Status.Phase, "%s", c.Status.Message)
	assert.True(t, clock.Now().Equal(c.Status.WaitingSince.Time), "its wait began anew")
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(md), md))
	assert.Equal(t, int32(2), *md.Spec.Replicas)
}

// A burst's last claim waits for a moment only: a Machine is ordered for it while the waits of the
// others restart, and until that Machine is made nothing tells that others are to be ordered.
func TestAClaimDoesNotFailAsAnotherMachineIsOrderedForAnotherClaim(t *testing.T) {
	md := groupWith("group", 3, &protocol.Ledger{
		Version: 1, Seq: 4, LastReplicas: 3, Pending: map[string]protocol.Assignment{"a": {}, "b": {}, "c": {}},
	})
	md.Status.ObservedGeneration = md.Generation
	const deadline = 5 * time.Minute
	clock := clocktesting.NewFakeClock(newTestTime().Add(deadline))
	young := claimIn("group", "c", v1alpha1.PhasePending, "")
	young.CreationTimestamp = metav1.NewTime(clock.Now())
	set := setOf(3)
	objects := []client.Object{md, set, claimIn("group", "a", v1alpha1.PhasePending, ""), claimIn("group", "b", v1alpha1.PhasePending, ""), young}
	for _, name := range []string{"x", "y", "z"} {
		joined := machineOf(name)
		joins(joined)
		objects = append(objects, joined)
	}
	e := quiet(engineWith(t, objects...))
	e.Clock, e.started, e.Failure.ObjectDeadline = clock, time.Time{}, deadline

	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(md), md))
	require.Equal(t, int32(4), *md.Spec.Replicas)
	for _, id := range []string{"a", "b"} {
		c, err := e.Get(t.Context(), keyOf(id))
		require.NoError(t, err)
		assert.Equal(t, v1alpha1.PhasePending, c.Status.Phase, "%s", c.Status.Message)
		require.NotNil(t, c.Status.WaitingSince, id)
		assert.True(t, clock.Now().Equal(c.Status.WaitingSince.Time), id)
	}
}

// Another agent explains meanwhile why the claim waits.
func TestAWaitRestartsThoughAnotherWriteCameFirst(t *testing.T) {
	e := quiet(engineWith(t, claimIn("", "a", v1alpha1.PhasePending, ""), claimIn("", "b", v1alpha1.PhasePending, "")))
	clock := clocktesting.NewFakeClock(newTestTime().Add(time.Hour))
	e.Clock = clock
	for id, phase := range map[string]v1alpha1.Phase{"a": v1alpha1.PhasePending, "b": v1alpha1.PhaseReleasing} {
		old, err := e.getUncached(t.Context(), keyOf(id))
		require.NoError(t, err)
		now := old.DeepCopy()
		now.Status.Phase, now.Status.Message = phase, "the control plane is being upgraded"
		require.NoError(t, e.Client.Status().Update(t.Context(), now))
		err = e.do(t.Context(), protocol.Action{Kind: protocol.WaitAnew, Claim: old, Event: v1alpha1.Event{Reason: protocol.ReasonWaitingForMachine}})
		now, readErr := e.getUncached(t.Context(), keyOf(id))
		require.NoError(t, readErr)
		require.Equal(t, phase, now.Status.Phase)
		if phase == v1alpha1.PhasePending {
			require.NoError(t, err)
			require.True(t, clock.Now().Equal(now.Status.WaitingSince.Time))
		} else {
			require.True(t, apierrors.IsConflict(err), "%v", err)
			require.Nil(t, now.Status.WaitingSince)
		}
	}
}
