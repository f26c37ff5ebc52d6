package claims

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

func TestACallWaitsUntilTheLedgerHasRoomForItsClaim(t *testing.T) {
	md := groupOf("small", 1, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":0,"lastReplicas":1,"spare":0,"pending":{"first":{}}}`,
	})
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "first"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "first", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
	}
	e := engineWith(t, md, claim)
	e.ledgerBudget = 200 // three quarters of it are for claims, and an entry takes up to 140
	e.spawn = func(run func()) { run() }
	ask := func(ctx context.Context) error {
		_, err := e.Create(ctx, Request{Namespace: namespace, Cluster: clusterName, ID: "second", Holder: "spoke", Candidates: []string{"small"}})
		return err
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	err := ask(over)
	require.ErrorIs(t, err, context.Canceled, "until its time is over; the claim is neither refused nor lost")
	assert.Empty(t, e.group(namespace, "small").waiters)

	answered := make(chan error, 1)
	waits := make(chan struct{})
	var once sync.Once
	e.spawn = func(run func()) {
		run()
		once.Do(func() { close(waits) })
	}
	go func() { answered <- ask(t.Context()) }()
	<-waits
	_, err = e.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "first"}, ReleaseOptions{})
	require.NoError(t, err)
	require.NoError(t, <-answered)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(md), md))
	l, err := protocol.LedgerOf(md)
	require.NoError(t, err)
	assert.Contains(t, l.Pending, "second")
	assert.Equal(t, int32(1), *md.Spec.Replicas, "it took the place of the one that went")
}

func TestACallThatWaitsForRoomIsNotAnsweredWithTheFailureOfAnotherWrite(t *testing.T) {
	g := &group{engine: engineWith(t), queued: map[string]bool{"waits": true}}
	refused := &actionsError{error: assert.AnError, of: map[string]bool{"begin-delete m": true}}
	for name, test := range map[string]struct {
		err   error
		waits bool
	}{
		"nothing failed":         {nil, true},
		"an action failed":       {fmt.Errorf("a step: %w", refused), true},
		"the ledger was refused": {errors.Join(ErrWriteRefused, refused), false},
		"it could not be read":   {assert.AnError, false},
	} {
		assert.Equal(t, test.waits, g.keepsWaiting("waits", test.err), name)
		assert.False(t, g.keepsWaiting("other", test.err), name)
	}
}

// A refusal is not a race that another attempt could win.
func TestALedgerThatTheHubRefusesIsNotRetriedAsALostRace(t *testing.T) {
	for name, refusal := range map[string]error{
		"annotations that are too long": apierrors.NewInvalid(schema.GroupKind{Kind: "MachineDeployment"}, "small", field.ErrorList{
			field.TooLong(field.NewPath("metadata", "annotations"), "", validation.TotalAnnotationSizeLimitB),
		}),
		"a webhook": &apierrors.StatusError{ErrStatus: metav1.Status{
			Status: metav1.StatusFailure, Code: 422, Reason: metav1.StatusReasonInvalid,
			Message: `admission webhook "freeze.example.com" denied the request: frozen until Monday`,
		}},
		"a policy": apierrors.NewForbidden(schema.GroupResource{Resource: "machinedeployments"}, "small", errors.New(
			"ValidatingAdmissionPolicy 'freeze' with binding 'all' denied request: frozen until Monday")),
	} {
		t.Run(name, func(t *testing.T) {
			e := engineWith(t, groupOf("small", 0, nil), groupOf("other", 0, nil))
			recorder := events.NewFakeRecorder(10)
			e.Recorder = recorder
			tries := 0
			e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
				Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
					if o.GetName() == "small" {
						tries++
						return refusal
					}
					return c.Patch(ctx, o, p, opts...)
				},
			})
			request := Request{Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"small", "other"}}
			c, err := e.Create(t.Context(), request)
			require.NoError(t, err)
			assert.Equal(t, "other", c.Spec.NodeGroup, "it costs the claim no more than that candidate")
			assert.Equal(t, 1, tries)

			request.ID, request.Candidates = "b", []string{"small"}
			_, err = e.Create(t.Context(), request)
			var refused *RefusedError
			require.ErrorAs(t, err, &refused)
			require.ErrorContains(t, err, "WriteRefused on its MachineDeployment has the reason")
			require.NotContains(t, err.Error(), refusal.Error(), "it is for users of the hub alone")
			told := <-recorder.Events
			assert.Contains(t, told, "Warning WriteRefused")
			assert.Contains(t, told, refusal.Error())
		})
	}
}

// Actions that the present ledger permits do not wait for a ledger that is refused.
func TestARefusedLedgerHoldsUpNothingElse(t *testing.T) {
	md := groupOf("small", 1, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":0,"lastReplicas":1,"spare":0,"releasing":{"m":{"m":"m","c":"a"}}}`,
	})
	m := machineOf("m")
	m.Status.NodeRef.Name = "node"
	m.Labels[v1alpha1.ClaimLabel] = "a"
	claimed := func(id string, status v1alpha1.MachineClaimStatus) *v1alpha1.MachineClaim {
		return &v1alpha1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, id), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
			},
			Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: id, NodeGroup: "small", Candidates: []string{"small"}},
			Status: status,
		}
	}
	e := engineWith(t, md, m, claimed("b", v1alpha1.MachineClaimStatus{}), claimed("a", v1alpha1.MachineClaimStatus{
		Phase: v1alpha1.PhaseReleasing, Machine: &v1alpha1.MachineReference{Name: "m", UID: "m"},
	}))
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if o.GetName() == "small" {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "machinedeployments"}, "small", errors.New("frozen"))
			}
			return c.Patch(ctx, o, p, opts...)
		},
	})
	requeueAfter, err := e.group(namespace, "small").run(t.Context())
	require.ErrorIs(t, err, ErrWriteRefused)
	assert.GreaterOrEqual(t, requeueAfter, time.Second, "it is tried again, later")
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.True(t, protocol.HasFinalizer(m))
	assert.False(t, protocol.Alive(m))
}

// A slow hub shortens runs, but none is cut off in the middle of its writes.
func TestASlowRunBeginsNoFurtherStep(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil), claimIn("", "a", "", ""))
	hours := clocktesting.NewFakeClock(newTestTime())
	e.Clock = hours
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	tries := 0
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			tries++
			hours.Step(longestRun / 2)
			return apierrors.NewConflict(schema.GroupResource{Resource: "machinedeployments"}, "small", errors.New("somebody else wrote"))
		},
	})
	requeueAfter, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	assert.Equal(t, 2, tries, "where a fast hub would be asked %d times", maxConflicts)
	assert.Less(t, requeueAfter, time.Second, "the rest is done at once, after what else waits")
	assert.NotZero(t, requeueAfter)
}

// The list of released Machines on a MachineSet does not grow with their number, and keeps all that
// still count.
func TestAMachineSetForgetsTheMachinesThatWereReleasedLongAgo(t *testing.T) {
	set := &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "small-a"},
		Spec:       clusterv1.MachineSetSpec{ClusterName: clusterName, Replicas: new(int32(1000))},
	}
	e := engineWith(t, set)
	var counts []types.UID
	for round := range 5 {
		var uids []types.UID
		for i := range 150 {
			uids = append(uids, types.UID(fmt.Sprintf("%03d-%d", i, round)))
		}
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(set), set))
		require.NoError(t, e.lowerSet(t.Context(), protocol.Action{Kind: protocol.LowerSet, Set: set, UIDs: uids, Counts: counts}))
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(set), set))
		assert.Subset(t, protocol.ReleasedFrom(set), uids)
		assert.Subset(t, protocol.ReleasedFrom(set), counts)
		assert.LessOrEqual(t, len(protocol.ReleasedFrom(set)), len(uids)+len(counts)+releasedKept)
		counts = uids[:3]
	}
	assert.Equal(t, int32(250), *set.Spec.Replicas)
}

// TestThousandsOfClaimsAndReleasesAtOnce takes one group to 2,000 claims and back, with several
// times as many at once as its ledger has room for.
func TestThousandsOfClaimsAndReleasesAtOnce(t *testing.T) {
	if raced {
		t.Skip("one goroutine does everything, in seconds; with the race detector in minutes")
	}
	for name, several := range map[string]bool{"one MachineSet": false, "several MachineSets": true} {
		t.Run(name, func(t *testing.T) {
			run := false
			rapid.Check(t, func(t *rapid.T) {
				if !run { // nothing is random here
					run = true
					crowd(t, several)
				}
			})
		})
	}
}

func crowd(t *rapid.T, several bool) {
	claims := 2000
	if several {
		claims = 1200 // a release takes more of the ledger
	}
	w := newWorld(t, worldOptions{groups: 1, floor: 3, strategy: clusterv1.OnDeleteMachineDeploymentStrategyType})
	// The invariants are checked at the end, not after every write.
	w.fair, w.withdrawing, w.copies = true, true, true
	group := w.groups[0]
	most := 0
	until := func(what string, done func() bool) {
		for range 200 {
			for e := range w.agents {
				for _, k := range allKinds {
					w.agents[e].caches[k] = w.hub.snapshot(k)
				}
				w.agentReconciles(e, group)
				most = max(most, len(w.md(group).Annotations[v1alpha1.LedgerAnnotation]))
			}
			w.controllers(group)
			w.clock.Step(2 * time.Second)
			if done() {
				return
			}
		}
		w.t.Fatalf("I2: not all claims are %s", what)
	}
	all := func(phase v1alpha1.Phase) func() bool {
		return func() bool {
			for _, o := range w.hub.objects[allClaims] {
				if c := o.(*v1alpha1.MachineClaim); c.Status.Phase != phase { //nolint:forcetypeassert // of the kind
					return false
				}
			}
			return true
		}
	}
	w.controllers(group)
	w.controllers(group)
	w.controllers(group)
	for i := range claims {
		id := fmt.Sprintf("%08d-0000-4000-8000-000000000000", i)
		w.must(w.hub.create(w.agents[0].engine.newClaim(Request{
			Namespace: namespace, Cluster: clusterName, ID: id, Holder: holder, DisplayName: "nc", Candidates: w.groups,
		}, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: clusterName}}, group)))
		if several && i == claims/2 {
			until("bound", all(v1alpha1.PhaseBound))
			w.rollout(group) // replaces nothing, but makes another MachineSet create the rest
			w.controllers(group)
		}
	}
	until("bound", all(v1alpha1.PhaseBound))
	for _, c := range w.claims() {
		c.Status.Phase, c.Status.Drained = v1alpha1.PhaseReleasing, true
		w.must(w.hub.update(c, true))
	}
	until("ended", all(v1alpha1.PhaseEnded))
	until("let go", func() bool { return len(w.machines(group)) == 3 })
	until("at rest", func() bool { l := w.ledger(group); return *w.md(group).Spec.Replicas == 3 && len(l.Releasing) == 0 })
	if limit := protocol.LedgerBudget + protocol.LedgerHeader; most > limit || most < limit/4 {
		w.t.Fatalf("the ledger had up to %d bytes", most)
	}
	for _, m := range w.machines(group) {
		if w.joined[m.UID] > 0 || !protocol.Alive(m) || protocol.HasFinalizer(m) {
			w.t.Fatalf("I6: the floor's Machines are gone\n%s", w.describe())
		}
	}
}
