package claims

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

func endedClaim(id string, at time.Time) *v1alpha1.MachineClaim {
	c := heldClaim(id, at)
	c.Status.Phase, c.Status.EndedAt = v1alpha1.PhaseEnded, new(metav1.NewTime(at))
	return c
}

// bounded returns an engine with these bounds, and its clock.
func bounded(t *testing.T, b Bounds, objects ...client.Object) (*Engine, *clocktesting.FakeClock) {
	t.Helper()
	e := engineWith(t, append(objects, groupOf("a", 0, nil))...)
	now := clocktesting.NewFakeClock(newTestTime())
	e.Clock, e.Bounds = now, b
	return e, now
}

func keyOf(id string) Key { return Key{Namespace: namespace, Cluster: clusterName, ID: id} }

func requireTooMany(t *testing.T, err error, bound Bound) TooManyError {
	t.Helper()
	var tooMany *TooManyError
	require.ErrorAs(t, err, &tooMany)
	assert.Equal(t, bound, tooMany.Bound)
	assert.Positive(t, tooMany.RetryAfter)
	return *tooMany
}

func TestAClusterHasNoMoreClaimsThanItMay(t *testing.T) {
	other := heldClaim("other", newTestTime())
	other.Spec.ClusterName, other.Labels[v1alpha1.ClusterLabel] = "another", "another"
	e, now := bounded(t, Bounds{Claims: 2}, other, endedClaim("ended", newTestTime()))
	e.spawn = func(run func()) { run() }
	for _, id := range []string{"first", "second"} {
		_, err := e.Create(t.Context(), ask(id, "a"))
		require.NoError(t, err)
	}
	_, err := e.Create(t.Context(), ask("third", "a"))
	requireTooMany(t, err, BoundLive)
	validate := ask("third", "a")
	validate.ValidateOnly = true
	_, err = e.Create(t.Context(), validate)
	requireTooMany(t, err, BoundLive)
	_, err = e.Create(t.Context(), ask("second", "a"))
	require.NoError(t, err, "a call that is repeated is answered as before")

	_, err = e.Release(t.Context(), keyOf("first"), ReleaseOptions{})
	require.NoError(t, err, "what there is can always be released")
	released, err := e.Get(t.Context(), keyOf("first"))
	require.NoError(t, err)
	require.NoError(t, e.endClaim(t.Context(), released, v1alpha1.Event{Reason: protocol.ReasonReleased}))
	now.Step(censusLife)
	_, err = e.Create(t.Context(), ask("third", "a"))
	require.NoError(t, err)
}

func TestTheHubsQuotaOfClaimsIsSaidToBeUsedUp(t *testing.T) {
	e, _ := bounded(t, Bounds{})
	through, ok := e.Client.(client.WithWatch)
	require.True(t, ok)
	e.Client = interceptor.NewClient(through, interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "machineclaims"}, "x", errors.New("exceeded quota: machine-claims"))
		},
	})
	_, err := e.Create(t.Context(), ask("a", "a"))
	requireTooMany(t, err, BoundQuota)
	require.ErrorContains(t, err, "ResourceQuota")
	_, err = e.Release(t.Context(), keyOf("unknown"), ReleaseOptions{})
	requireTooMany(t, err, BoundQuota)
}

// A release without a tombstone has not happened, because a late call to create the claim would not
// be refused.
func TestReleasesOfUnknownClaimsAreRefusedWhenTheyCannotBeRemembered(t *testing.T) {
	e, _ := bounded(t, Bounds{Ended: 3})
	e = quiet(e)
	for i := range 3 {
		_, err := e.Release(t.Context(), keyOf(fmt.Sprintf("unknown-%d", i)), ReleaseOptions{})
		require.NoError(t, err)
	}
	_, err := e.Release(t.Context(), keyOf("one-more"), ReleaseOptions{})
	requireTooMany(t, err, BoundEnded)
	_, err = e.Release(t.Context(), keyOf("unknown-0"), ReleaseOptions{})
	require.NoError(t, err, "it is remembered already")
	_, err = e.Create(t.Context(), ask("new", "a"))
	requireTooMany(t, err, BoundEnded)
	var ended *EndedError
	_, err = e.Create(t.Context(), ask("unknown-0", "a"))
	require.ErrorAs(t, err, &ended, "a late call is refused all the same")
	var list v1alpha1.MachineClaimList
	require.NoError(t, e.Client.List(t.Context(), &list))
	assert.Len(t, list.Items, 3)
}

func TestEndedClaimsAreForgottenEarlyWhenThereAreNearlyTooMany(t *testing.T) {
	e, now := bounded(t, Bounds{Ended: 10})
	forget := func(id string) (time.Duration, bool) {
		var c v1alpha1.MachineClaim
		require.NoError(t, e.Client.Get(t.Context(), keyOf(id).object(), &c))
		left, err := tombstones{e}.deleteExpired(t.Context(), &c)
		require.NoError(t, err)
		err = e.Client.Get(t.Context(), keyOf(id).object(), &c)
		return left, client.IgnoreNotFound(err) == nil && err != nil
	}
	add := func(id string, age time.Duration) {
		require.NoError(t, e.Client.Create(t.Context(), endedClaim(id, now.Now().Add(-age))))
	}
	add("old", 2*time.Hour)
	add("young", 50*time.Minute)
	left, gone := forget("old")
	assert.False(t, gone, "there is room")
	assert.Equal(t, crowdedDelay, left, "there may be more before its time is over")

	for i := range 7 {
		add(fmt.Sprintf("more-%d", i), time.Minute)
	}
	now.Step(censusLife)
	_, gone = forget("young")
	assert.False(t, gone, "a call about it may still be on its way")
	_, gone = forget("old")
	assert.True(t, gone)
	now.Step(time.Hour)
	_, gone = forget("young")
	assert.False(t, gone, "there is room again")
}

func TestEndedClaimsAreForgottenEarlyWhenAllClustersHaveNearlyTooMany(t *testing.T) {
	e, now := bounded(t, Bounds{})
	crowded := types.NamespacedName{}
	e.Crowded = func(cluster types.NamespacedName) bool { return cluster == crowded }
	for id, age := range map[string]time.Duration{"old": 2 * time.Hour, "young": 50 * time.Minute} {
		require.NoError(t, e.Client.Create(t.Context(), endedClaim(id, now.Now().Add(-age))))
	}
	check := func(id string) (left time.Duration, gone bool) {
		var c v1alpha1.MachineClaim
		require.NoError(t, e.Client.Get(t.Context(), keyOf(id).object(), &c))
		left, err := tombstones{e}.deleteExpired(t.Context(), &c)
		require.NoError(t, err)
		return left, apierrors.IsNotFound(e.Client.Get(t.Context(), keyOf(id).object(), &c))
	}
	left, gone := check("old")
	assert.False(t, gone, "there is room")
	assert.Equal(t, crowdedDelay, left, "there may be more before its time is over")
	crowded = types.NamespacedName{Namespace: namespace, Name: clusterName}
	_, gone = check("young")
	assert.False(t, gone, "a call about it may still be on its way")
	_, gone = check("old")
	assert.True(t, gone)
}

func TestACoolDownOutlivesTheCrowd(t *testing.T) {
	e, _ := bounded(t, Bounds{Ended: 1}, endedClaim("ended", newTestTime()))
	e.Failure.CoolDown = 3 * time.Hour
	kept, err := e.remembered(t.Context(), types.NamespacedName{Namespace: namespace, Name: clusterName})
	require.NoError(t, err)
	assert.Equal(t, 3*time.Hour, kept)
}

func TestClaimsAreNotCountedAnewForEachCall(t *testing.T) {
	e, now := bounded(t, Bounds{Claims: 100})
	e = quiet(e)
	cache := reads{}
	e.Client = counting{Client: e.Client, Reader: cache.of(e.Client)}
	r := ask("a", "a")
	r.ValidateOnly = true
	for range 10 {
		_, err := e.Create(t.Context(), r)
		require.NoError(t, err)
	}
	assert.Equal(t, 1, cache["*v1alpha1.MachineClaimList"])
	now.Step(censusLife)
	_, err := e.Create(t.Context(), r)
	require.NoError(t, err)
	assert.Equal(t, 2, cache["*v1alpha1.MachineClaimList"])
}

// Text from callers and infrastructure providers is kept short and on one line, because all of it
// is written again with each change.
func TestTextsOfAClaimAreCut(t *testing.T) {
	e, _ := bounded(t, Bounds{})
	c := heldClaim("a", newTestTime())
	c.Status.History = []v1alpha1.Event{{Message: strings.Repeat("x", 5000)}}
	for range 2 * historyLength {
		e.note(c, v1alpha1.Event{Reason: "Why", Message: "two\nlines\x1b[2J" + strings.Repeat("ä", 4000)})
	}
	require.Len(t, c.Status.History, historyLength)
	for _, text := range []string{c.Status.Message, c.Status.History[0].Message} {
		assert.True(t, strings.HasPrefix(text, "two lines [2Jä"), text)
		assert.LessOrEqual(t, len(text), protocol.MaxMessage)
		assert.True(t, utf8.ValidString(text))
	}
	c.Status.History = []v1alpha1.Event{{Message: strings.Repeat("x", 5000)}}
	e.note(c, v1alpha1.Event{Reason: "Why", Message: "short"})
	assert.LessOrEqual(t, len(c.Status.History[0].Message), protocol.MaxMessage, "one of an agent that did not cut it")
	assert.Equal(t, "short", c.Status.Message)
}

func TestAnEndedClaimKeepsTheEndOfItsHistory(t *testing.T) {
	for before, kept := range map[int]int{0: 0, endedHistory - 1: endedHistory - 1, endedHistory: endedHistory - 1, historyLength: endedHistory - 1} {
		c := heldClaim("a", newTestTime())
		e, _ := bounded(t, Bounds{}, c)
		c, err := e.getUncached(t.Context(), keyOf("a"))
		require.NoError(t, err)
		for i := range before {
			e.note(c, v1alpha1.Event{Reason: "Happened", Message: strconv.Itoa(i)})
		}
		require.NoError(t, e.endClaim(t.Context(), c, v1alpha1.Event{Reason: "Over", Message: "it is"}))
		ended, err := e.getUncached(t.Context(), keyOf("a"))
		require.NoError(t, err)
		require.Len(t, ended.Status.History, kept+1)
		assert.Equal(t, "Over", ended.Status.History[kept].Reason)
		for i, event := range ended.Status.History[:kept] {
			assert.Equal(t, strconv.Itoa(before-kept+i), event.Message)
		}
	}
}

func TestANodeGroupGetsNoMoreClaimsAMinuteThanItMay(t *testing.T) {
	long := heldClaim("long-ago", newTestTime().Add(-2*time.Minute))
	e, now := bounded(t, Bounds{Creations: 2}, long, groupOf("b", 0, nil))
	e.spawn = func(run func()) { run() }
	through, ok := e.Client.(client.WithWatch)
	require.True(t, ok)
	e.Client = interceptor.NewClient(through, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.CreateOption) error {
			object.SetCreationTimestamp(metav1.NewTime(now.Now())) // as the API server does
			return c.Create(ctx, object, options...)
		},
	})
	for _, id := range []string{"first", "second"} {
		_, err := e.Create(t.Context(), ask(id, "a"))
		require.NoError(t, err)
		now.Step(10 * time.Second)
	}
	_, err := e.Create(t.Context(), ask("third", "a"))
	tooMany := requireTooMany(t, err, BoundCreations)
	assert.Contains(t, tooMany.Message, "node group a had 2 claims")
	assert.Equal(t, 40*time.Second, tooMany.RetryAfter.Round(time.Second), "then the first does not count any more")
	_, err = e.Create(t.Context(), ask("second", "a"))
	require.NoError(t, err, "a call that is repeated is answered as before")
	_, err = e.Create(t.Context(), ask("third", "b"))
	require.NoError(t, err, "another node group has a limit of its own")
	now.Step(tooMany.RetryAfter + time.Second)
	_, err = e.Create(t.Context(), ask("fourth", "a"))
	require.NoError(t, err)
}

// clusterWith sets the Cluster's annotations.
func clusterWith(t *testing.T, e *Engine, annotations map[string]string) {
	t.Helper()
	cluster, err := e.cluster(t.Context(), namespace, clusterName)
	require.NoError(t, err)
	cluster.Annotations = annotations
	require.NoError(t, e.Client.Update(t.Context(), cluster))
}

func TestAClustersAnnotationsReplaceTheLimits(t *testing.T) {
	for name, test := range map[string]struct {
		flag       int
		annotation string
		may        int // how many of three claims may be made
		releases   int // how many of three claims may be released
		event      string
	}{
		"fewer":           {flag: 2, annotation: "1", may: 1, releases: 1},
		"more":            {flag: 1, annotation: "2", may: 2, releases: 2},
		"one of its own":  {flag: 0, annotation: "2", may: 2, releases: 2},
		"none any more":   {flag: 1, annotation: "0", may: 3, releases: 3},
		"not a number":    {flag: 1, annotation: "ten", may: 0, releases: 1, event: `"ten" is not a whole number`},
		"below 0":         {flag: 1, annotation: "-1", may: 0, releases: 1, event: `"-1" is not a whole number`},
		"nothing":         {flag: 1, annotation: "", may: 0, releases: 1, event: `"" is not a whole number`},
		"beyond all size": {flag: 1, annotation: "99999999999", may: 0, releases: 1, event: "is not a whole number"},
	} {
		t.Run(name, func(t *testing.T) {
			ids := []string{"first", "second", "third"}
			count := func(may int, do func(e *Engine, id string) error, bounds Bounds, bound Bound, objects ...client.Object) {
				t.Helper()
				e, _ := bounded(t, bounds, objects...)
				if len(objects) > 0 {
					e = quiet(e) // the Machines of those claims do not exist
				} else {
					e.spawn = func(run func()) { run() }
				}
				recorder := events.NewFakeRecorder(100)
				e.Recorder = recorder
				clusterWith(t, e, map[string]string{annotations[bound]: test.annotation})
				done := 0
				for _, id := range ids {
					if err := do(e, id); err == nil {
						done++
					} else {
						assert.Contains(t, requireTooMany(t, err, bound).Message, annotations[bound])
					}
				}
				assert.Equal(t, may, done, bound)
				close(recorder.Events)
				invalid := lo.Filter(lo.ChannelToSlice(recorder.Events), func(e string, _ int) bool { return strings.Contains(e, "InvalidLimit") })
				if test.event == "" {
					assert.Empty(t, invalid)
				} else {
					require.NotEmpty(t, invalid)
					assert.Contains(t, invalid[0], test.event)
					assert.Contains(t, invalid[0], annotations[bound])
				}
			}
			create := func(e *Engine, id string) error {
				_, err := e.Create(t.Context(), ask(id, "a"))
				return err
			}
			count(test.may, create, Bounds{Claims: test.flag}, BoundLive)
			count(test.may, create, Bounds{Creations: test.flag}, BoundCreations)
			count(test.releases, func(e *Engine, id string) error {
				_, err := e.Release(t.Context(), keyOf(id), ReleaseOptions{})
				return err
			}, Bounds{Releases: test.flag, ReleaseWindow: time.Minute}, BoundReleases,
				lo.Map(ids, func(id string, _ int) client.Object { return withMachine(id) })...)
		})
	}
}

func withMachine(id string) *v1alpha1.MachineClaim {
	c := heldClaim(id, newTestTime())
	c.Status.Phase, c.Status.Machine = v1alpha1.PhaseBound, &v1alpha1.MachineReference{Name: id, UID: types.UID(id)}
	return c
}

// All releases are about to be written when the first one is.
func TestReleasesAtTheSameMomentDoNotExceedTheirBound(t *testing.T) {
	const calls, bound = 8, 3
	ids := lo.Times(calls, func(i int) string { return fmt.Sprintf("claim-%d", i) })
	e, _ := bounded(t, Bounds{Releases: bound, ReleaseWindow: 10 * time.Minute},
		lo.Map(ids, func(id string, _ int) client.Object { return withMachine(id) })...)
	e = quiet(e)
	through, ok := e.Client.(client.WithWatch)
	require.True(t, ok)
	var arrived sync.WaitGroup
	arrived.Add(calls)
	e.Client = interceptor.NewClient(through, interceptor.Funcs{SubResourceUpdate: func(
		ctx context.Context, c client.Client, subresource string, object client.Object, options ...client.SubResourceUpdateOption,
	) error {
		arrived.Done()
		arrived.Wait()
		return c.SubResource(subresource).Update(ctx, object, options...)
	}})
	var released, refused atomic.Int64
	var calling sync.WaitGroup
	for _, id := range ids {
		calling.Go(func() {
			var tooMany *TooManyError
			switch _, err := e.Release(t.Context(), keyOf(id), ReleaseOptions{}); {
			case err == nil:
				released.Add(1)
			case errors.As(err, &tooMany):
				refused.Add(1)
				arrived.Done()
			default:
				t.Errorf("%s: %v", id, err)
				arrived.Done()
			}
		})
	}
	calling.Wait()
	assert.EqualValues(t, bound, released.Load())
	assert.EqualValues(t, calls-bound, refused.Load())
}

// Writes may take longer than a census counts, and caches lag.
func TestWritesUnderWayCountUntilTheCachesShowThem(t *testing.T) {
	e, now := bounded(t, Bounds{Claims: 3, Releases: 1, ReleaseWindow: 10 * time.Minute}, withMachine("first"), withMachine("second"))
	e = quiet(e)
	through, ok := e.Client.(client.WithWatch)
	require.True(t, ok)
	began, goOn := make(chan struct{}, 2), make(chan struct{})
	e.Client = interceptor.NewClient(through, interceptor.Funcs{
		SubResourceUpdate: func(
			ctx context.Context, c client.Client, subresource string, object client.Object, options ...client.SubResourceUpdateOption,
		) error {
			began <- struct{}{}
			select {
			case <-goOn:
			case <-ctx.Done():
				return ctx.Err()
			}
			return c.SubResource(subresource).Update(ctx, object, options...)
		},
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			began <- struct{}{}
			<-goOn
			return errors.New("the API server is away")
		},
	})
	var calls sync.WaitGroup
	calls.Go(func() {
		_, err := e.Release(t.Context(), keyOf("first"), ReleaseOptions{})
		assert.NoError(t, err)
	})
	calls.Go(func() {
		_, err := e.Create(t.Context(), ask("third", "a"))
		assert.ErrorContains(t, err, "the API server is away")
	})
	for range 2 {
		<-began
	}
	now.Step(10 * censusLife)
	briefly, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a write that must not begin
	defer cancel()
	_, err := e.Release(briefly, keyOf("second"), ReleaseOptions{})
	requireTooMany(t, err, BoundReleases)
	validate := ask("fourth", "a")
	validate.ValidateOnly = true
	_, err = e.Create(t.Context(), validate)
	requireTooMany(t, err, BoundLive)

	close(goOn)
	calls.Wait()
	_, err = e.Create(t.Context(), validate)
	require.NoError(t, err, "the creation that failed counts no more")
	now.Step(reservedAtMost + time.Second)
	_, err = e.Release(t.Context(), keyOf("second"), ReleaseOptions{})
	requireTooMany(t, err, BoundReleases)
}

func TestAMistakeReleasesNoMoreMachinesThanItMay(t *testing.T) {
	before := withMachine("before")
	before.Status.Phase, before.Status.ReleasedAt = v1alpha1.PhaseReleasing, new(metav1.NewTime(newTestTime().Add(-time.Minute)))
	longBefore := withMachine("long-before")
	longBefore.Status.Phase, longBefore.Status.ReleasedAt = v1alpha1.PhaseReleasing, new(metav1.NewTime(newTestTime().Add(-time.Hour)))
	e, now := bounded(t, Bounds{Releases: 2, ReleaseWindow: 10 * time.Minute},
		before, longBefore, withMachine("first"), withMachine("second"), heldClaim("waiting", newTestTime()))
	e = quiet(e)
	for range 2 {
		_, err := e.Release(t.Context(), keyOf("first"), ReleaseOptions{})
		require.NoError(t, err, "what was released within the window was one; and the call may be repeated")
	}
	_, err := e.Release(t.Context(), keyOf("second"), ReleaseOptions{})
	tooMany := requireTooMany(t, err, BoundReleases)
	assert.Equal(t, 9*time.Minute, tooMany.RetryAfter.Round(time.Minute))
	second, err := e.Get(t.Context(), keyOf("second"))
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseBound, second.CurrentPhase(), "nothing was done")
	_, err = e.Release(t.Context(), keyOf("waiting"), ReleaseOptions{})
	require.NoError(t, err, "a claim without a Machine costs none")
	_, err = e.Release(t.Context(), keyOf("unknown"), ReleaseOptions{})
	require.NoError(t, err)
	now.Step(tooMany.RetryAfter + time.Second)
	_, err = e.Release(t.Context(), keyOf("second"), ReleaseOptions{})
	require.NoError(t, err)
}
