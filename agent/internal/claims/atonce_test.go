package claims

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

var smallKey = client.ObjectKey{Namespace: namespace, Name: "small"}

// restingLedger is the ledger of a group with nothing in flight.
func restingLedger(replicas int32) *protocol.Ledger {
	return &protocol.Ledger{
		Version: 1, Of: namespace + "/small", Seq: 7, Floor: replicas, LastReplicas: replicas, Written: &protocol.Written{Replicas: replicas},
	}
}

// small reads the group from the API server, whatever the engine's cache shows.
func small(t *testing.T, e *Engine) (*clusterv1.MachineDeployment, *protocol.Ledger) {
	t.Helper()
	md := &clusterv1.MachineDeployment{}
	require.NoError(t, e.Reader.Get(t.Context(), smallKey, md))
	l, err := protocol.LedgerOf(md)
	require.NoError(t, err)
	return md, l
}

func requestOf(id string) Request {
	return Request{Namespace: namespace, Cluster: clusterName, ID: id, Holder: holder, Candidates: []string{"small"}}
}

// counted counts the reads from the API server itself.
func counted(t *testing.T, e *Engine, reads *atomic.Int32) {
	t.Helper()
	e.Reader = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			reads.Add(1)
			return c.Get(ctx, key, o, opts...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			reads.Add(1)
			return c.List(ctx, list, opts...)
		},
	})
}

func TestALoneClaimIsEnteredWithoutReadingAnything(t *testing.T) {
	e := engineWith(t, groupOf("small", 2, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(2).Encode()}))
	var reads atomic.Int32
	counted(t, e, &reads)
	_, err := e.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	assert.Zero(t, reads.Load())
	md, l := small(t, e)
	assert.Equal(t, int32(3), *md.Spec.Replicas)
	assert.Equal(t, int32(2), l.Floor)
	assert.Equal(t, map[string]protocol.Assignment{"a": {}}, l.Pending)
	assert.Equal(t, "1", md.Annotations[v1alpha1.ClaimedAnnotation])
}

// The caches may be stale. Then the write is refused, and a run enters the claim correctly.
func TestAClaimIsNotEnteredAtOnceOnOldKnowledge(t *testing.T) {
	for name, test := range map[string]struct {
		now      func(md *clusterv1.MachineDeployment)
		replicas int32
		noRoom   bool
		further  []client.Object
	}{
		"another claim is in the ledger": {func(md *clusterv1.MachineDeployment) {
			l := restingLedger(2)
			l.Seq, l.LastReplicas, l.Pending = 8, 3, map[string]protocol.Assignment{"other": {}}
			md.Spec.Replicas = new(int32(3))
			md.Annotations[v1alpha1.LedgerAnnotation] = l.Encode()
		}, 4, false, []client.Object{movingClaim("other", v1alpha1.PhasePending, "", nil)}},
		"the max size was lowered": {func(md *clusterv1.MachineDeployment) {
			md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "2"
		}, 2, true, nil},
		"a person paused it": {func(md *clusterv1.MachineDeployment) {
			md.Annotations[clusterv1.PausedAnnotation] = "true"
		}, 2, true, nil},
		"the user scaled": {func(md *clusterv1.MachineDeployment) { md.Spec.Replicas = new(int32(5)) }, 6, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			e := engineWith(t, append(test.further, groupOf("small", 2, map[string]string{
				v1alpha1.LedgerAnnotation: restingLedger(2).Encode(), clusterv1.AutoscalerMinSizeAnnotation: "0",
			}))...)
			before, _ := small(t, e)
			now := before.DeepCopy()
			test.now(now)
			require.NoError(t, e.Client.Update(t.Context(), now))
			stall(e, before)
			_, err := e.Create(t.Context(), requestOf("a"))
			md, l := small(t, e)
			assert.Equal(t, test.replicas, *md.Spec.Replicas)
			if test.noRoom {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			assert.Contains(t, l.Pending, "a")
		})
	}
}

// stall makes the engine's cache show the MachineDeployment as it was.
func stall(e *Engine, was *clusterv1.MachineDeployment) {
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if md, is := o.(*clusterv1.MachineDeployment); is {
				was.DeepCopyInto(md)
				return nil
			}
			return c.Get(ctx, key, o, opts...)
		},
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			o.SetCreationTimestamp(metav1.Now()) // as the API server does
			return c.Create(ctx, o, opts...)
		},
	})
}

// A claim is not left to a run because Cluster API writes the status, or because a cache does not
// show the agent's own last write yet.
func TestClaimsThatFollowEachOtherAreEnteredAtOnce(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	before, _ := small(t, e)
	now := before.DeepCopy()
	now.Status.ObservedGeneration = 7
	require.NoError(t, e.Client.Update(t.Context(), now))
	e.spawn = func(run func()) { run() }
	var reads atomic.Int32
	counted(t, e, &reads)
	stall(e, before)
	for _, id := range []string{"a", "b", "c"} {
		_, err := e.Create(t.Context(), requestOf(id))
		require.NoError(t, err)
	}
	assert.Zero(t, reads.Load())
	md, l := small(t, e)
	assert.Equal(t, int32(3), *md.Spec.Replicas)
	assert.Len(t, l.Pending, 3)
}

// whenCreated calls before and after around the creation of the claim's object, once each. The
// creation waits for them. nil does nothing.
func whenCreated(e *Engine, claimID string, before, after func()) {
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			made, is := o.(*v1alpha1.MachineClaim)
			if !is || made.Spec.ClaimID != claimID {
				return c.Create(ctx, o, opts...)
			}
			if before != nil {
				before()
			}
			err := c.Create(ctx, o, opts...)
			if after != nil {
				after()
			}
			return err
		},
	})
}

// A stream of claims would keep a run busy for ever if each claim waited for a step of the run that
// it meets.
func TestAClaimIsEnteredAtOnceAfterARunOfThisProcess(t *testing.T) {
	for name, first := range map[string]bool{"of the claim before it": true, "that entered it as well": false} {
		t.Run(name, func(t *testing.T) {
			e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
			e.spawn = func(run func()) { run() }
			var reads, then atomic.Int32
			counted(t, e, &reads)
			other := func() {
				_, err := e.Create(t.Context(), requestOf("a")) // not alone
				require.NoError(t, err)
				_, l := small(t, e)
				if first {
					require.Len(t, l.Pending, 1)
				} else {
					require.Len(t, l.Pending, 2)
				}
				then.Store(reads.Load())
			}
			if first {
				whenCreated(e, "b", other, nil)
			} else {
				whenCreated(e, "b", nil, other)
			}
			_, err := e.Create(t.Context(), requestOf("b"))
			require.NoError(t, err)
			assert.NotZero(t, then.Load())
			assert.Equal(t, then.Load(), reads.Load())
			_, l := small(t, e)
			assert.Len(t, l.Pending, 2)
		})
	}
}

func TestAClaimThatEndedMeanwhileIsNotEnteredAtOnce(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	e.spawn = func(run func()) { run() }
	whenCreated(e, "a", nil, func() {
		_, err := e.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"}, ReleaseOptions{})
		require.NoError(t, err)
	})
	_, err := e.Create(t.Context(), requestOf("a"))
	require.Error(t, err)
	md, l := small(t, e)
	assert.Zero(t, *md.Spec.Replicas)
	assert.Empty(t, l.Pending)
}

// Only a step refuses claims, after it has read from the API server.
func TestAClaimIsNotEnteredAtOnceBesideOneThatIsRefused(t *testing.T) {
	refused := movingClaim("refused", "", "", nil)
	refused.Spec.Adopt = "not-shown-yet"
	refused.CreationTimestamp = metav1.Now() // its call still exists
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}), refused)
	e.spawn = func(run func()) { run() }
	var reads atomic.Int32
	counted(t, e, &reads)
	_, err := e.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	assert.NotZero(t, reads.Load())
}

func TestOnlyWhatThisProcessWroteFollowsWhatItRead(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	other := New(e.Config)
	e.spawn = func(run func()) { run() }
	other.spawn = e.spawn
	g := e.group(namespace, "small")
	start, _ := small(t, e)
	newest := func(md *clusterv1.MachineDeployment) *clusterv1.MachineDeployment {
		now, err := g.unlessOthersWrote(t.Context(), md)
		require.NoError(t, err)
		return now
	}
	assert.Same(t, start, newest(start), "it wrote nothing")

	_, err := other.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	others, _ := small(t, e)
	_, err = e.Create(t.Context(), requestOf("b"))
	require.NoError(t, err)
	own, _ := small(t, e)
	_, err = e.Create(t.Context(), requestOf("c"))
	require.NoError(t, err)
	last, _ := small(t, e)
	assert.Same(t, start, newest(start), "another agent wrote since")
	for _, md := range []*clusterv1.MachineDeployment{others, own, last} {
		assert.Equal(t, last.ResourceVersion, newest(md).ResourceVersion)
	}

	// A wiped ledger counts from one again.
	wiped := last.DeepCopy()
	delete(wiped.Annotations, v1alpha1.LedgerAnnotation)
	require.NoError(t, e.Client.Update(t.Context(), wiped))
	_, err = e.Create(t.Context(), requestOf("d"))
	require.NoError(t, err)
	assert.Same(t, last, newest(last))

	present, l := small(t, e)
	assert.Equal(t, present.ResourceVersion, newest(present).ResourceVersion)
	for name, change := range map[string]func(*clusterv1.MachineDeployment){
		"made again": func(md *clusterv1.MachineDeployment) { md.UID = "another" },
		"another agent's": func(md *clusterv1.MachineDeployment) {
			l := l.Clone()
			l.By = "another"
			md.Annotations[v1alpha1.LedgerAnnotation] = l.Encode()
		},
		"an answer was lost": func(md *clusterv1.MachineDeployment) {
			l := l.Clone()
			l.Seq++
			md.Annotations[v1alpha1.LedgerAnnotation] = l.Encode()
		},
	} {
		t.Run(name, func(t *testing.T) {
			now := present.DeepCopy()
			change(now)
			g.engine.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
				Get: func(_ context.Context, _ client.WithWatch, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
					now.DeepCopyInto(o.(*clusterv1.MachineDeployment))
					return nil
				},
			})
			e.written = newOwnWrites(e.Clock)
			assert.Same(t, present, newest(present))
		})
	}
}

// lagging makes the engine's cache show claims as they are now.
func lagging(t *testing.T, e *Engine) {
	t.Helper()
	var shown v1alpha1.MachineClaimList
	require.NoError(t, e.Client.List(t.Context(), &shown))
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if claims, is := list.(*v1alpha1.MachineClaimList); is {
				shown.DeepCopyInto(claims)
				return nil
			}
			return c.List(ctx, list, opts...)
		},
	})
}

func TestACacheThatLagsBehindAMarkStartsNoRun(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	e.spawn = func(run func()) { run() }
	whenCreated(e, "a", nil, func() { lagging(t, e) })
	var reads atomic.Int32
	counted(t, e, &reads)
	_, err := e.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	result, err := e.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
	require.NoError(t, err)
	assert.Zero(t, result.RequeueAfter)
	assert.Zero(t, reads.Load())
}

func TestACacheThatShowsMoreThanThisProcessWroteIsBelieved(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	e.spawn = func(run func()) { run() }
	_, err := e.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	var c v1alpha1.MachineClaim
	require.NoError(t, e.Client.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"}.object(), &c))
	c.Status.Phase = v1alpha1.PhaseReleasing
	require.NoError(t, e.Client.Status().Update(t.Context(), &c))
	_, err = e.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(&c), &c))
	assert.Equal(t, v1alpha1.PhaseEnded, c.Status.Phase)
}

// The mark is refused on a claim that has changed since it was read.
func TestAClaimThatIsReleasedWhileItIsEnteredIsNotMarked(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil), movingClaim("a", "", "", nil))
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "a"}
	released := false
	e.spawn = func(func()) {}
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			err := c.Patch(ctx, o, p, opts...)
			if _, is := o.(*clusterv1.MachineDeployment); is && !released {
				released = true
				_, err := e.Release(ctx, key, ReleaseOptions{})
				require.NoError(t, err)
			}
			return err
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			claim, is := o.(*v1alpha1.MachineClaim)
			err := c.SubResource(sub).Update(ctx, o, opts...)
			if is && err == nil {
				assert.NotEqual(t, v1alpha1.PhasePending, claim.Status.Phase)
			}
			return err
		},
	})
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	assert.True(t, released)
	c, err := e.getUncached(t.Context(), key)
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseEnded, c.Status.Phase)
}

func TestAStepThatEntersClaimsMarksThem(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil), movingClaim("a", "", "", nil), movingClaim("b", "", "", nil))
	var reads atomic.Int32
	counted(t, e, &reads)
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	for _, id := range []string{"a", "b"} {
		c, err := e.asCached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: id})
		require.NoError(t, err)
		require.NotNil(t, c)
		assert.Equal(t, v1alpha1.PhasePending, c.Status.Phase)
	}
	assert.EqualValues(t, 4, reads.Load(), "one reading")
}

// A claim takes a spare Machine before it gets a new replica.
func TestAClaimIsNotEnteredAtOnceBesideASpare(t *testing.T) {
	l := restingLedger(0)
	l.LastReplicas, l.Spare = 1, 1
	e := engineWith(t, groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: l.Encode()}), machineOf("m"))
	_, err := e.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	md, _ := small(t, e)
	assert.Equal(t, int32(1), *md.Spec.Replicas)
}

// Two agents that do the same work do no harm, but it is wasted.
func TestAGroupIsLeftToTheAgentThatWorksOnIt(t *testing.T) {
	clock := testclock.NewFakeClock(time.Now())
	first := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	first.Clock, first.spawn = clock, func(run func()) { run() }
	second := New(first.Config)
	second.Clock, second.spawn = clock, first.spawn
	writes := 0
	second.Client = interceptor.NewClient(first.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			writes++
			return c.Patch(ctx, o, p, opts...)
		},
	})
	reconcile := func(e *Engine) ctrl.Result {
		result, err := e.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
		require.NoError(t, err)
		return result
	}
	_, err := first.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	require.NoError(t, first.Client.Create(t.Context(), machineOf("m")))

	result := reconcile(second)
	assert.Zero(t, writes)
	assert.Equal(t, deference, result.RequeueAfter)
	clock.Step(deference - time.Second)
	reconcile(second)
	assert.Zero(t, writes)

	// The first agent has not done it.
	clock.Step(time.Second)
	reconcile(second)
	assert.NotZero(t, writes)
	_, l := small(t, first)
	assert.Equal(t, second.id, l.By)
	m := &clusterv1.Machine{}
	require.NoError(t, first.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "m"}, m))
	assert.Equal(t, "a", protocol.ClaimOf(m))

	// From now on the other agent waits.
	require.NoError(t, first.Client.Delete(t.Context(), m))
	assert.Equal(t, deference, reconcile(first).RequeueAfter)
}

// groupOfAnother returns a group of an engine with a fake clock, and its snapshot, whose ledger another agent has
// written.
func groupOfAnother(t *testing.T) (*testclock.FakeClock, *group, *protocol.Snapshot) {
	t.Helper()
	clock := testclock.NewFakeClock(time.Now())
	e := engineWith(t, groupOf("small", 0, nil))
	e.Clock = clock
	md, _ := small(t, e)
	s := &protocol.Snapshot{Deployment: md, Ledger: restingLedger(0)}
	s.Ledger.By = "another"
	return clock, e.group(namespace, "small"), s
}

// An agent that writes ledgers is at work, however long that takes. An agent that writes none, or
// only ledgers for minutes, is not waited for.
func TestAGroupIsLeftForAsLongAsLedgersAreWritten(t *testing.T) {
	for name, c := range map[string]struct {
		writes bool
		bound  time.Duration
	}{
		"none written": {writes: false, bound: silentDeference},
		"all the time": {writes: true, bound: longestDeference},
	} {
		t.Run(name, func(t *testing.T) {
			clock, g, s := groupOfAnother(t)
			var left time.Duration
			for range c.bound / time.Second {
				d := &protocol.Decision{Ledger: s.Ledger.Clone()} // a different one each time
				d.Ledger.Seq = clock.Now().Unix()
				left = g.deferToOther(s, d)
				require.NotZero(t, left)
				if clock.Step(time.Second); c.writes {
					s.Ledger.Seq++
				}
			}
			assert.Equal(t, time.Second, left)
			assert.Zero(t, g.deferToOther(s, &protocol.Decision{Ledger: s.Ledger.Clone()}))
		})
	}
}

// The time at which the agent would pause the MachineDeployment is a later one at each look.
func TestAPauseThatIsDueIsTheSameWorkAtEachLook(t *testing.T) {
	clock, g, s := groupOfAnother(t)
	look := func() time.Duration {
		d := &protocol.Decision{Ledger: s.Ledger.Clone(), Pause: protocol.PauseSet}
		d.Ledger.Paused = &protocol.Paused{At: clock.Now().Unix()}
		return g.deferToOther(s, d)
	}
	assert.Equal(t, deference, look())
	clock.Step(deference)
	assert.Zero(t, look())
}

// A clock that is set back does not make the wait longer by what it was set back.
func TestAClockSetBackDoesNotProlongTheDeference(t *testing.T) {
	clock, g, s := groupOfAnother(t)
	d := &protocol.Decision{Ledger: s.Ledger.Clone()}
	assert.Equal(t, deference, g.deferToOther(s, d))
	clock.SetTime(clock.Now().Add(-time.Hour))
	assert.Equal(t, deference, g.deferToOther(s, d))
	clock.Step(deference)
	assert.Zero(t, g.deferToOther(s, d))
}

// An agent that only watches sees another agent give a spare to a claim, and then a new spare
// appear.
func TestASpareHasAGracePeriodOfItsOwn(t *testing.T) {
	clock := testclock.NewFakeClock(time.Now())
	l := restingLedger(0)
	l.LastReplicas, l.Spare = 1, 1
	first := engineWith(t, groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: l.Encode()}), machineOf("m"))
	first.Clock, first.spawn = clock, func(run func()) { run() }
	second := New(first.Config)
	second.Clock, second.spawn, second.deference = clock, func(func()) {}, time.Hour
	since := func() time.Time {
		_, err := second.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
		require.NoError(t, err)
		return second.group(namespace, "small").spareSince
	}
	assert.Equal(t, clock.Now(), since())
	_, err := first.Create(t.Context(), requestOf("a"))
	require.NoError(t, err)
	assert.Zero(t, since(), "a claim has it")
	clock.Step(50 * time.Second)
	_, err = first.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"}, ReleaseOptions{})
	require.NoError(t, err)
	_, err = first.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
	require.NoError(t, err)
	assert.Equal(t, clock.Now(), since(), "it is a spare again, from now on")
}

// A release made from a stale claim is refused, and then made from the present one.
func TestAReleaseIsMadeOfThePresentClaim(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, nil), movingClaim("a", v1alpha1.PhasePending, "", nil), machineOf("m"))
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "a"}
	var old, bound v1alpha1.MachineClaim
	require.NoError(t, e.Client.Get(t.Context(), key.object(), &old))
	old.DeepCopyInto(&bound)
	bound.Status.Phase = v1alpha1.PhaseBound
	bound.Status.Machine = &v1alpha1.MachineReference{Name: "m", UID: "m"}
	require.NoError(t, e.Client.Status().Update(t.Context(), &bound))
	e.spawn = func(func()) {}
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if claim, is := o.(*v1alpha1.MachineClaim); is {
				old.DeepCopyInto(claim)
				return nil
			}
			return c.Get(ctx, key, o, opts...)
		},
	})
	c, err := e.Release(t.Context(), key, ReleaseOptions{})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseReleasing, c.Status.Phase)
	require.NotNil(t, c.Status.Machine)
}

// Whichever agent finds room for a claim in the ledger, the waiting call is answered.
func TestACallIsAnsweredWhenAnotherAgentEntersItsClaim(t *testing.T) {
	full := restingLedger(0)
	full.LastReplicas, full.Pending = 1, map[string]protocol.Assignment{"first": {}}
	e := engineWith(t, groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: full.Encode()}),
		movingClaim("first", v1alpha1.PhasePending, "", nil))
	e.ledgerBudget = 200 // room for one claim
	waits, ran := make(chan struct{}), false
	e.spawn = func(run func()) {
		run()
		if !ran {
			ran = true
			close(waits)
		}
	}
	answered := make(chan error, 1)
	go func() {
		_, err := e.Create(t.Context(), requestOf("second"))
		answered <- err
	}()
	<-waits

	md, l := small(t, e)
	l.Seq, l.By, l.Pending = l.Seq+1, "another", map[string]protocol.Assignment{"second": {}}
	md.Annotations[v1alpha1.LedgerAnnotation] = l.Encode()
	require.NoError(t, e.Client.Update(t.Context(), md))
	e.deference = time.Hour
	_, err := e.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
	require.NoError(t, err)
	select {
	case err := <-answered:
		require.NoError(t, err)
	case <-time.After(10 * time.Second):
		t.Fatal("the call is not answered")
	}
}

// A refusal may be stale when it is acted on.
func TestAClaimThatAnotherAgentEnteredMeanwhileStays(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil), groupOf("other", 0, nil))
	e.decide = func(s *protocol.Snapshot) *protocol.Decision {
		d := protocol.Decide(s)
		if s.Deployment.Name == "small" && s.Ledger == nil {
			d = &protocol.Decision{Refused: map[string]eligibility.Refusal{"a": protocol.FullGroup("small", 0)}}
			md, _ := small(t, e)
			l := restingLedger(0)
			l.By, l.LastReplicas, l.Pending = "another", 1, map[string]protocol.Assignment{"a": {}}
			md.Spec.Replicas, md.Annotations = new(int32(1)), map[string]string{v1alpha1.LedgerAnnotation: l.Encode()}
			require.NoError(t, e.Client.Update(t.Context(), md))
		}
		return d
	}
	r := requestOf("a")
	r.Candidates = append(r.Candidates, "other")
	c, err := e.Create(t.Context(), r)
	require.NoError(t, err)
	assert.Equal(t, "small", c.Spec.NodeGroup)
	var stored v1alpha1.MachineClaim
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), &stored))
	assert.Equal(t, "small", stored.Spec.NodeGroup)
}

// Work that hangs does not block all other work on the node group.
func TestEventsAreNotPutOffForLong(t *testing.T) {
	clock := testclock.NewFakeClock(time.Now())
	e := engineWith(t, groupOf("small", 0, nil), movingClaim("a", "", "", nil))
	e.Clock, e.deference = clock, 0
	done := e.group(namespace, "small").begin()
	defer done()
	reconcile := func() ctrl.Result {
		result, err := e.Reconcile(t.Context(), ctrl.Request{NamespacedName: smallKey})
		require.NoError(t, err)
		return result
	}
	assert.Equal(t, occupiedDelay, reconcile().RequeueAfter)
	_, l := small(t, e)
	assert.Nil(t, l)
	clock.Step(longestOccupied)
	reconcile()
	_, l = small(t, e)
	require.NotNil(t, l)
	assert.Contains(t, l.Pending, "a")
}

// Calls that come at the same time are entered in one write: Cluster API may carry a second one
// through only seconds later.
func TestClaimsThatAreMadeAtTheSameTimeAreEnteredInOneWrite(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	var writes atomic.Int32
	bMakes, aExists := make(chan struct{}), make(chan struct{})
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			made, is := o.(*v1alpha1.MachineClaim)
			if is && made.Spec.ClaimID == "b" {
				close(bMakes)
				<-aExists
			}
			return c.Create(ctx, o, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if _, is := o.(*clusterv1.MachineDeployment); is {
				writes.Add(1)
			}
			return c.Patch(ctx, o, p, opts...)
		},
	})
	var calls sync.WaitGroup
	create := func(id string) {
		_, err := e.Create(t.Context(), requestOf(id))
		assert.NoError(t, err)
	}
	calls.Go(func() { create("b") })
	<-bMakes
	calls.Go(func() { create("a") })
	g := e.group(namespace, "small")
	require.Eventually(t, func() bool { // the run for a waits, or has written already
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.lock) == 1 && len(g.making) == 1 || writes.Load() > 0
	}, 10*time.Second, time.Millisecond)
	close(aExists)
	calls.Wait()
	assert.Equal(t, int32(1), writes.Load())
	md, l := small(t, e)
	assert.Equal(t, int32(2), *md.Spec.Replicas)
	assert.Len(t, l.Pending, 2)
}

// A webhook may take half a minute for one claim.
func TestASlowCreateDelaysOneRunOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{}
		made := g.beginMaking()
		began := time.Now()
		g.gather(t.Context())
		assert.Equal(t, gathersFor, time.Since(began))
		g.gather(t.Context())
		assert.Equal(t, gathersFor, time.Since(began), "the next run has it waited for already")
		assert.True(t, made())
	})
}

// What a run gathers is entered by that run.
func TestTheLastClaimOfABurstIsLeftToTheRunThatGathersIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &group{}
		made := g.beginMaking()
		gathered := make(chan struct{})
		go func() {
			defer close(gathered)
			g.gather(t.Context())
		}()
		synctest.Wait()
		assert.False(t, made())
		<-gathered
		assert.True(t, g.beginMaking()())
	})
}

func TestACallDoesNotOutlastItsDeadlineBecauseAWriteHangs(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, map[string]string{v1alpha1.LedgerAnnotation: restingLedger(0).Encode()}))
	hangs, writes := make(chan struct{}), make(chan struct{})
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if _, is := o.(*clusterv1.MachineDeployment); is {
				close(writes)
				<-hangs
			}
			return c.Patch(ctx, o, p, opts...)
		},
	})
	call, over := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := e.Create(call, requestOf("a"))
		ended <- err
	}()
	<-writes
	over()
	require.ErrorIs(t, <-ended, context.Canceled)
	close(hangs)
	require.Eventually(t, func() bool { // what it had begun is completed
		_, l := small(t, e)
		return len(l.Pending) == 1 && len(e.group(namespace, "small").lock) == 0
	}, 10*time.Second, time.Millisecond)
}

// The agent's clock follows the API server's, which may be set back, or be another one's.
func TestNoBoundGrowsWhenTheClockIsSetBack(t *testing.T) {
	clock := testclock.NewFakeClock(newTestTime())
	e := engineWith(t)
	e.Clock = clock
	g := e.group(namespace, "small")
	g.notePanic(nil)
	done := g.begin()
	defer done()
	require.True(t, g.occupied())
	clock.SetTime(newTestTime().Add(-time.Hour))
	assert.False(t, g.occupied())
	left, _ := g.panicBackoff()
	assert.Equal(t, longestRetry, left)
}
