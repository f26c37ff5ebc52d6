package spokes_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
)

const namespace = "fleet"

// world is a hub with Clusters, and agents that have the same time.
type world struct {
	*testing.T

	hub client.WithWatch
	now *clocktesting.FakeClock
}

func newWorld(t *testing.T, clusters ...string) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, clusterv1.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	hub := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.Spoke{}).Build()
	for _, name := range clusters {
		require.NoError(t, hub.Create(t.Context(), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}))
	}
	return &world{T: t, hub: hub, now: clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0))}
}

// agent returns an agent whose requests to the hub the functions intercept.
func (w *world) agent(between interceptor.Funcs) *spokes.Spokes {
	return spokes.New(spokes.Config{
		Client: interceptor.NewClient(w.hub, between), Clock: w.now, Serves: func(types.NamespacedName) bool { return true },
	})
}

func key(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: namespace, Name: name}
}

func (w *world) cluster(name string) *clusterv1.Cluster {
	w.Helper()
	cluster := &clusterv1.Cluster{}
	require.NoError(w, w.hub.Get(w.Context(), key(name), cluster))
	return cluster
}

// spoke returns the Spoke of the Cluster "a".
func (w *world) spoke() *v1alpha1.Spoke {
	w.Helper()
	spoke := &v1alpha1.Spoke{}
	require.NoError(w, w.hub.Get(w.Context(), key("a"), spoke))
	return spoke
}

// note is what an agent does after a live set of the Cluster "a" was accepted.
func (w *world) note(agent *spokes.Spokes, contact spokes.Contact) {
	w.Helper()
	agent.Note(w.Context(), w.cluster("a"), contact)
}

// onboard does what the command does.
func (w *world) onboard(id string) {
	w.Helper()
	cluster := w.cluster("a")
	require.NoError(w, spokes.Expect(w.Context(), w.hub, cluster, id, func() error { return nil }))
	metav1.SetMetaDataLabel(&cluster.ObjectMeta, v1alpha1.OnboardingLabel, id)
	require.NoError(w, w.hub.Update(w.Context(), cluster))
}

func (w *world) enroll(agent *spokes.Spokes, id string) {
	w.Helper()
	require.NoError(w, agent.Enroll(w.Context(), key("a"), id, "key of "+id))
}

// What a set without an id, or one that is unrelated to the claims, says is no news about the
// cluster.
func TestOnlyASetOfExistingClaimsReplacesTheCluster(t *testing.T) {
	w := newWorld(t, "a")
	agent := w.agent(interceptor.Funcs{})
	for _, step := range []struct {
		contact spokes.Contact
		want    string
	}{
		{contact: spokes.Contact{}, want: ""},
		{contact: spokes.Contact{SpokeID: "first"}, want: "first"},
		{contact: spokes.Contact{}, want: "first"},
		{contact: spokes.Contact{Matched: true}, want: "first"},
		{contact: spokes.Contact{SpokeID: "second"}, want: "first"},
		{contact: spokes.Contact{SpokeID: "second", Matched: true}, want: "second"},
	} {
		w.note(agent, step.contact)
		require.Equal(t, step.want, w.spoke().Status.SpokeID, "%+v", step.contact)
		require.Equal(t, step.want, agent.SpokeID(key("a")), "%+v", step.contact)
		w.now.Step(10 * time.Minute)
	}
}

func TestTheFirstClusterIsRecordedAtOnce(t *testing.T) {
	w := newWorld(t, "a")
	agent := w.agent(interceptor.Funcs{})
	w.note(agent, spokes.Contact{})
	w.note(agent, spokes.Contact{SpokeID: "first"})
	require.Equal(t, "first", w.spoke().Status.SpokeID)

	w.now.Step(time.Second)
	require.NoError(t, w.hub.Delete(t.Context(), w.spoke()))
	id, err := agent.ReadSpokeID(t.Context(), key("a"))
	require.NoError(t, err)
	require.Empty(t, id)
	require.Empty(t, agent.SpokeID(key("a")))
	w.note(agent, spokes.Contact{SpokeID: "second"})
	require.Equal(t, "second", w.spoke().Status.SpokeID, "the next one after the Spoke was deleted is the first again")
}

// Each agent remembers what it noted, and learns what the other noted at its next look, or when it
// reads the Spoke.
func TestTheClusterThatAnotherAgentRecordedIsNotReplaced(t *testing.T) {
	w := newWorld(t, "a")
	one := w.agent(interceptor.Funcs{})
	t.Run("before", func(t *testing.T) {
		other := w.agent(interceptor.Funcs{})
		w.note(one, spokes.Contact{SpokeID: "first"})
		require.Empty(t, other.SpokeID(key("a")))
		w.note(other, spokes.Contact{SpokeID: "second"})
		require.Equal(t, "first", w.spoke().Status.SpokeID)
		require.Equal(t, "first", other.SpokeID(key("a")))
	})
	t.Run("during the write", func(t *testing.T) {
		require.NoError(t, w.hub.Delete(t.Context(), w.spoke()))
		w.now.Step(10 * time.Minute)
		raced := false
		other := w.agent(interceptor.Funcs{SubResourcePatch: func(
			ctx context.Context, c client.Client, resource string, o client.Object, p client.Patch, options ...client.SubResourcePatchOption,
		) error {
			if !raced {
				raced = true
				w.note(one, spokes.Contact{SpokeID: "first"})
			}
			return c.SubResource(resource).Patch(ctx, o, p, options...)
		}})
		w.note(other, spokes.Contact{SpokeID: "second"})
		require.True(t, raced)
		require.Equal(t, "first", w.spoke().Status.SpokeID)
		require.Equal(t, "first", other.SpokeID(key("a")))
	})
	t.Run("when it is read", func(t *testing.T) {
		other := w.agent(interceptor.Funcs{})
		id, err := other.ReadSpokeID(t.Context(), key("a"))
		require.NoError(t, err)
		require.Equal(t, "first", id)
		require.Equal(t, "first", other.SpokeID(key("a")))
	})
}

// A call that was authorized with the certificate of an earlier onboarding may still be running.
func TestTheClusterOfAnEndedOnboardingIsNotRecorded(t *testing.T) {
	w := newWorld(t, "a")
	agent, late := w.agent(interceptor.Funcs{}), w.agent(interceptor.Funcs{})
	w.onboard("one")
	w.enroll(agent, "one")
	w.note(agent, spokes.Contact{SpokeID: "first", Onboarding: "one"})
	require.Equal(t, "first", w.spoke().Status.SpokeID)
	w.onboard("two")
	w.enroll(agent, "two")
	for _, by := range []*spokes.Spokes{agent, late} {
		w.note(by, spokes.Contact{SpokeID: "first", Onboarding: "one", Matched: true})
		require.Empty(t, w.spoke().Status.SpokeID)
	}
	w.note(agent, spokes.Contact{SpokeID: "second", Onboarding: "two"})
	require.Equal(t, "second", w.spoke().Status.SpokeID)

	// Certificates that were issued elsewhere belong to no onboarding.
	w.now.Step(10 * time.Minute)
	w.note(agent, spokes.Contact{SpokeID: "third", Matched: true})
	require.Equal(t, "third", w.spoke().Status.SpokeID)
}

// A listing and a read may return what the hub had before the Cluster was onboarded again.
func TestAReadThatBeganEarlierDoesNotBringTheClusterBack(t *testing.T) {
	for name, reads := range map[string]func(ctx context.Context, agent *spokes.Spokes) error{
		"a look": func(ctx context.Context, agent *spokes.Spokes) error { return agent.Look(ctx) },
		"a read": func(ctx context.Context, agent *spokes.Spokes) error {
			_, err := agent.ReadSpokeID(ctx, key("a"))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "a")
			between := func() {}
			agent := w.agent(interceptor.Funcs{
				List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
					defer between()
					return c.List(ctx, list, options...)
				},
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
					if _, is := o.(*v1alpha1.Spoke); is {
						defer between()
					}
					return c.Get(ctx, key, o, options...)
				},
			})
			w.onboard("one")
			w.enroll(agent, "one")
			w.note(agent, spokes.Contact{SpokeID: "first", Onboarding: "one"})
			w.now.Step(time.Minute)
			between = func() {
				between = func() {}
				w.now.Step(time.Second)
				w.onboard("two")
				w.enroll(agent, "two")
				w.now.Step(time.Second)
			}
			require.NoError(t, reads(t.Context(), agent))
			require.Empty(t, agent.SpokeID(key("a")))
			w.now.Step(time.Minute)
			require.NoError(t, agent.Look(t.Context()))
			require.Empty(t, agent.SpokeID(key("a")))
		})
	}
}

// The Spokes of all other Clusters are seen, and what is known of that one stays.
func TestASpokeThatFailsHidesNoOther(t *testing.T) {
	for name, fails := range map[string]func() error{
		"an error": func() error { return errors.New("the hub refuses the write") },
		"a panic":  func() error { panic("a bug") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "a", "b")
			var told []types.NamespacedName
			broken := interceptor.Funcs{SubResourcePatch: func(
				ctx context.Context, c client.Client, resource string, o client.Object, p client.Patch, options ...client.SubResourcePatchOption,
			) error {
				if o.GetName() == "a" {
					return fails()
				}
				return c.SubResource(resource).Patch(ctx, o, p, options...)
			}}
			writer := w.agent(interceptor.Funcs{})
			agent := spokes.New(spokes.Config{
				Client: interceptor.NewClient(w.hub, broken), Clock: w.now, Serves: func(types.NamespacedName) bool { return true },
				Changed: func(cluster types.NamespacedName) { told = append(told, cluster) },
			})
			for _, name := range []string{"a", "b"} {
				writer.Note(t.Context(), w.cluster(name), spokes.Contact{SpokeID: "of-" + name})
			}
			w.now.Step(time.Minute)
			require.NoError(t, agent.Look(t.Context()))
			require.Equal(t, "of-a", agent.SpokeID(key("a")))
			require.Equal(t, "of-b", agent.SpokeID(key("b")))

			told = nil
			w.now.Step(time.Hour) // both are silent
			require.Error(t, agent.Look(t.Context()))
			connected := func(name string) bool {
				status, known := agent.Status(key(name))
				require.True(t, known, name)
				return meta.IsStatusConditionTrue(status.Conditions, v1alpha1.ConnectedCondition)
			}
			require.True(t, connected("a"))
			require.False(t, connected("b"))
			require.Equal(t, "of-a", agent.SpokeID(key("a")))
			require.Equal(t, []types.NamespacedName{key("b")}, told)
		})
	}
}

func TestAListThatFailsHidesNoSpoke(t *testing.T) {
	w := newWorld(t, "a")
	down := errors.New("the hub does not answer")
	agent := w.agent(interceptor.Funcs{List: func(_ context.Context, _ client.WithWatch, _ client.ObjectList, _ ...client.ListOption) error {
		return down
	}})
	w.note(agent, spokes.Contact{SpokeID: "first"})
	w.now.Step(time.Minute)
	require.ErrorIs(t, agent.Look(t.Context()), down)
	require.Equal(t, "first", agent.SpokeID(key("a")))
}

// A Spoke that cannot be written does not delay every sync.
func TestAFailedWriteIsRepeatedAnIntervalLater(t *testing.T) {
	w := newWorld(t, "a")
	writes := 0
	agent := w.agent(interceptor.Funcs{SubResourcePatch: func(
		context.Context, client.Client, string, client.Object, client.Patch, ...client.SubResourcePatchOption,
	) error {
		writes++
		return errors.New("the hub refuses the write")
	}})
	for range 10 * 60 {
		w.note(agent, spokes.Contact{SpokeID: "first"})
		w.now.Step(time.Second)
	}
	require.Equal(t, 2, writes)
}

// The hub's etcd keeps each version of a Spoke for minutes.
func TestALargeReportIsFollowedByTheNextOneMuchLater(t *testing.T) {
	w := newWorld(t, "a")
	agent := w.agent(interceptor.Funcs{})
	small := spokes.Report{MoreNodePools: 1}
	large := spokes.Report{MoreNodePools: 2}
	for i := range 70 {
		large.NodePools = append(large.NodePools, v1alpha1.SpokeNodePool{Name: strconv.Itoa(i), Message: strings.Repeat("x", 1024)})
	}
	report := func(report spokes.Report, wait time.Duration) {
		t.Helper()
		err := agent.Report(t.Context(), w.cluster("a"), report)
		if wait == 0 {
			require.NoError(t, err)
			return
		}
		var early *spokes.TooSoonError
		require.ErrorAs(t, err, &early)
		require.Equal(t, wait, early.RetryAfter)
	}
	report(small, 0)
	report(large, 10*time.Second)
	w.now.Step(10 * time.Second)
	report(large, 0)
	report(large, 0) // it is no news
	report(small, 100*time.Second)
	w.now.Step(100 * time.Second)
	report(small, 0)
	require.Equal(t, int32(1), w.spoke().Status.MoreNodePools)
}

// etcd keeps each version of a Spoke for minutes, whatever is new in it.
func TestALargeSpokeIsNotedRarely(t *testing.T) {
	w := newWorld(t, "a")
	writes := 0
	agent := w.agent(interceptor.Funcs{SubResourcePatch: func(
		ctx context.Context, c client.Client, resource string, o client.Object, p client.Patch, options ...client.SubResourcePatchOption,
	) error {
		writes++
		return c.SubResource(resource).Patch(ctx, o, p, options...)
	}})
	w.note(agent, spokes.Contact{Version: "0"})
	large := spokes.Report{}
	for i := range 200 {
		large.NodePools = append(large.NodePools, v1alpha1.SpokeNodePool{Name: strconv.Itoa(i), Message: strings.Repeat("x", 1024)})
	}
	w.now.Step(10 * time.Second)
	require.NoError(t, agent.Report(t.Context(), w.cluster("a"), large))
	writes = 0
	for i := range 60 { // ten minutes
		w.now.Step(10 * time.Second)
		w.note(agent, spokes.Contact{Version: strconv.Itoa(i)})
	}
	require.LessOrEqual(t, writes, 4, "of 200 KiB each")
}

// All agents write to the same Spokes, whatever the clocks of their machines.
func TestAnAgentWithAnotherClockSilencesNoShim(t *testing.T) {
	w := newWorld(t, "a")
	agent := func(ahead time.Duration) *spokes.Spokes {
		return spokes.New(spokes.Config{
			Client: w.hub, Clock: clocktesting.NewFakeClock(w.now.Now().Add(ahead)), HubTime: w.now, Serves: func(types.NamespacedName) bool { return true },
		})
	}
	first, second := agent(0), agent(time.Hour)
	w.note(first, spokes.Contact{SpokeID: "id"})
	require.NoError(t, second.Look(t.Context()))
	require.True(t, meta.IsStatusConditionTrue(w.spoke().Status.Conditions, v1alpha1.ConnectedCondition))
	w.note(second, spokes.Contact{SpokeID: "id", Version: "another"})
	require.WithinDuration(t, w.now.Now(), w.spoke().Status.LastSyncTime.Time, time.Second)
}

// Neither an outage of all agents nor one of the hub is the silence of every spoke.
func TestShimsGetTimeAfterAnOutage(t *testing.T) {
	w := newWorld(t, "a")
	var down error
	agent := w.agent(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if down != nil {
				return down
			}
			return c.List(ctx, list, options...)
		},
	})
	w.note(agent, spokes.Contact{SpokeID: "id"})
	connected := func() bool {
		return meta.IsStatusConditionTrue(w.spoke().Status.Conditions, v1alpha1.ConnectedCondition)
	}
	for _, outage := range []error{nil, errors.New("the hub does not answer")} { // the agent starts, or goes on
		w.now.Step(time.Hour)
		if down = outage; outage != nil {
			require.ErrorIs(t, agent.Look(t.Context()), outage)
			down = nil
		}
		require.NoError(t, agent.Look(t.Context()))
		require.True(t, connected())
		w.now.Step(time.Minute)
		require.NoError(t, agent.Look(t.Context()))
		require.True(t, connected())
		w.note(agent, spokes.Contact{SpokeID: "id"}) // the shim is back
	}
	w.now.Step(time.Hour)
	require.NoError(t, agent.Look(t.Context()))
	require.False(t, connected())
}

// While a Cluster is paused, such as during a move, no live set of it is accepted.
func TestTheShimOfAPausedClusterIsNotSilent(t *testing.T) {
	w := newWorld(t, "a")
	agent := w.agent(interceptor.Funcs{})
	w.note(agent, spokes.Contact{SpokeID: "id"})
	connected := func() bool {
		require.NoError(t, agent.Look(t.Context()))
		return meta.IsStatusConditionTrue(w.spoke().Status.Conditions, v1alpha1.ConnectedCondition)
	}
	require.True(t, connected())
	pause := func(paused bool) {
		cluster := w.cluster("a")
		cluster.Spec.Paused = &paused
		require.NoError(t, w.hub.Update(t.Context(), cluster))
	}
	pause(true)
	w.now.Step(time.Hour)
	require.True(t, connected())
	pause(false)
	w.now.Step(time.Minute)
	require.True(t, connected(), "the shim may synchronize now")
	w.note(agent, spokes.Contact{SpokeID: "id"})
	pause(true)
	w.now.Step(14*time.Minute + 30*time.Second)
	require.True(t, connected())
	pause(false)
	w.now.Step(40 * time.Second)
	require.True(t, connected(), "the same after a pause that ends just before the shim counts as silent")
	w.now.Step(time.Hour)
	require.False(t, connected())
}

// actions are the actions of the events that were recorded.
type actions []string

func (a *actions) Eventf(_, _ runtime.Object, _, _, action, _ string, _ ...any) {
	*a = append(*a, action)
}

// The API server's events are counted as one if they differ in their message alone.
func TestEachCertificateThatIsIssuedIsAnEventOfItsOwn(t *testing.T) {
	w := newWorld(t, "a")
	recorded := &actions{}
	agent := spokes.New(spokes.Config{
		Client: w.hub, Clock: w.now, Serves: func(types.NamespacedName) bool { return true }, Recorder: recorded,
	})
	w.note(agent, spokes.Contact{SpokeID: "id"})
	for _, serial := range []string{"4f01", "4f02"} {
		agent.NoteIssued(t.Context(), key("a"), spokes.Issued{Serial: serial, NotAfter: w.now.Now()})
	}
	require.Len(t, *recorded, 2)
	require.NotEqual(t, (*recorded)[0], (*recorded)[1])
}
