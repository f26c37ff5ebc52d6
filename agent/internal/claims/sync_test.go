package claims

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// syncing returns an engine with bound claims a, b, … made by these clusters, each with a Machine
// of the same name, and a function that does one round of the holder an hour later.
func syncing(t *testing.T, change func(id string, c *v1alpha1.MachineClaim), spokes ...string) (
	*Engine, func(r SyncRequest) (SyncResult, error),
) {
	t.Helper()
	objects := []client.Object{groupOf("small", int32(len(spokes)), nil)}
	for i, made := range spokes {
		id := string(rune('a' + i))
		m := joining(id, id)
		c := boundTo(m, id, holder)
		c.Spec.Spoke = made
		if change != nil {
			change(id, c)
		}
		objects = append(objects, m, c)
	}
	e := quiet(engineWith(t, objects...))
	e.Clock, e.parallel = testclock.NewFakeClock(newTestTime().Add(time.Hour)), 1
	return e, func(r SyncRequest) (SyncResult, error) {
		_, token, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		require.NoError(t, err)
		r.Namespace, r.Cluster, r.Holder, r.Token = namespace, clusterName, holder, token
		return e.Sync(t.Context(), r)
	}
}

// knowing makes the holder's cluster known to the engine. recorded is what the hub has.
func knowing(t *testing.T, e *Engine, known, recorded *string) {
	t.Helper()
	of := func(cluster types.NamespacedName, spoke *string) string {
		require.Equal(t, types.NamespacedName{Namespace: namespace, Name: clusterName}, cluster)
		return *spoke
	}
	e.ReportsNodes = func(of string) bool { return of == holder }
	e.SpokeOf = func(cluster types.NamespacedName) string { return of(cluster, known) }
	e.ReadSpokeOf = func(_ context.Context, cluster types.NamespacedName) (string, error) {
		return of(cluster, recorded), nil
	}
}

func claimNamed(t *testing.T, e *Engine, id string) *v1alpha1.MachineClaim {
	t.Helper()
	c, err := e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: id})
	require.NoError(t, err)
	return c
}

// A live set only releases claims that its cluster made.
func TestALiveSetCollectsOnlyWhatItsClusterMade(t *testing.T) {
	registered := func(ids ...string) func(string, *v1alpha1.MachineClaim) {
		return func(id string, c *v1alpha1.MachineClaim) {
			for _, with := range ids {
				if id == with {
					at := metav1.NewTime(newTestTime())
					c.Status.NodeRegisteredAt = &at
				}
			}
		}
	}
	for _, test := range []struct {
		name            string
		claims          []string // the clusters that made a, b, …
		change          func(string, *v1alpha1.MachineClaim)
		set             SyncRequest
		collected, kept []string
		refused         bool
	}{
		{name: "its own", claims: []string{spoke, spoke}, set: SyncRequest{Spoke: spoke, LiveIDs: []string{"b"}}, collected: []string{"a"}},
		{name: "its own, the last one", claims: []string{spoke}, set: SyncRequest{Spoke: spoke}, collected: []string{"a"}},
		{name: "a set that does not say where it was read", claims: []string{spoke, ""}, set: SyncRequest{}},
		{
			name: "a set without anything of this Cluster", claims: []string{spoke, spoke}, set: SyncRequest{Spoke: elsewhere},
			refused: true,
		},
		{
			name: "a set of other claims alone", claims: []string{spoke}, set: SyncRequest{Spoke: elsewhere, LiveIDs: []string{"x", "y"}},
			refused: true,
		},
		{
			name: "another cluster that has made claims too", claims: []string{spoke, elsewhere, elsewhere},
			set: SyncRequest{Spoke: elsewhere, LiveIDs: []string{"b"}}, collected: []string{"c"}, kept: []string{"a"},
		},
		{
			name: "claims of which nothing is recorded, beside one that is live", claims: []string{"", ""},
			set: SyncRequest{Spoke: spoke, LiveIDs: []string{"b"}}, collected: []string{"a"},
		},
		{
			name: "claims of which nothing is recorded, none of them live", claims: []string{"", ""},
			set: SyncRequest{Spoke: spoke, LiveIDs: []string{"x"}}, kept: []string{"a", "b"},
		},
		{
			name: "a claim of which nothing is recorded, where two clusters have made claims", claims: []string{"", spoke, elsewhere},
			set: SyncRequest{Spoke: spoke, LiveIDs: []string{"b"}}, kept: []string{"a", "c"},
		},
		{
			name: "a claim whose Node was registered once", claims: []string{spoke, spoke}, change: registered("a"),
			set: SyncRequest{Spoke: spoke}, collected: []string{"b"}, kept: []string{"a"},
		},
		{
			name: "a claim whose Node is reported with the set", claims: []string{spoke, spoke},
			set: SyncRequest{Spoke: spoke, Nodes: []NodeReport{{ProviderID: "sim://b"}}}, collected: []string{"a"}, kept: []string{"b"},
		},
		{
			name: "a restored cluster whose Nodes are not registered again", claims: []string{spoke, spoke}, change: registered("a"),
			set: SyncRequest{
				Spoke: spoke, NodesComplete: true, LiveIDs: []string{"b"},
				Nodes: []NodeReport{{ProviderID: "sim://a", Unregistered: true}, {ProviderID: "sim://b", Unregistered: true}},
			},
			kept: []string{"a"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, round := syncing(t, test.change, test.claims...)
			result, err := round(test.set)
			if test.refused {
				var foreign *ForeignSpokeError
				require.ErrorAs(t, err, &foreign)
				require.ErrorContains(t, err, spoke)
				require.ErrorContains(t, err, elsewhere)
			} else {
				require.NoError(t, err)
			}
			assert.Equal(t, test.collected, result.Collected, "collected")
			assert.Equal(t, test.kept, result.Kept, "kept")
			for _, id := range test.kept {
				c := claimNamed(t, e, id)
				assert.Equal(t, v1alpha1.PhaseBound, c.Status.Phase, id)
				assert.Equal(t, protocol.ReasonOwnerMissing, c.Status.Reason, id)
				assert.Contains(t, c.Status.Message, "docs/troubleshooting.md", id)
			}
		})
	}
}

// The sets of another cluster than the shim's are refused, also where no claim exists.
func TestOnlyTheClusterOfTheShimIsSynchronized(t *testing.T) {
	for _, test := range []struct {
		name    string
		known   string
		claims  []string
		set     SyncRequest
		refused string // what the error names
	}{
		{name: "nothing is known", set: SyncRequest{Spoke: elsewhere}},
		{
			name: "nothing is known, and another cluster's claims exist", claims: []string{spoke},
			set: SyncRequest{Spoke: elsewhere}, refused: "release the old claims",
		},
		{name: "the shim's own cluster", known: spoke, set: SyncRequest{Spoke: spoke}},
		{name: "another cluster", known: spoke, set: SyncRequest{Spoke: elsewhere}, refused: "delete the Cluster's Spoke"},
		{
			name: "another cluster, where claims exist", known: spoke, claims: []string{spoke},
			set: SyncRequest{Spoke: elsewhere}, refused: "release the old claims",
		},
		{
			name: "the shim's own cluster, where another made claims before it was known", known: spoke, claims: []string{elsewhere},
			set: SyncRequest{Spoke: spoke},
		},
		{
			name: "another cluster, which has made claims before", known: spoke, claims: []string{elsewhere},
			set: SyncRequest{Spoke: elsewhere},
		},
		{
			name: "a cluster that was restored elsewhere", known: spoke, claims: []string{spoke},
			set: SyncRequest{Spoke: elsewhere, LiveIDs: []string{"a"}},
		},
		{name: "a caller that names no cluster", known: spoke, set: SyncRequest{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, round := syncing(t, nil, test.claims...)
			knowing(t, e, &test.known, &test.known)
			result, err := round(test.set)
			if test.refused == "" {
				require.NoError(t, err)
				require.Equal(t, len(test.set.LiveIDs) > 0, result.Matched)
				return
			}
			var foreign *ForeignSpokeError
			require.ErrorAs(t, err, &foreign)
			require.ErrorContains(t, err, elsewhere)
			require.ErrorContains(t, err, spoke)
			require.ErrorContains(t, err, test.refused)
		})
	}
	t.Run("a holder that reports no Nodes", func(t *testing.T) {
		e, round := syncing(t, nil)
		knowing(t, e, new(spoke), new(spoke))
		e.ReportsNodes = func(string) bool { return false }
		_, err := round(SyncRequest{Spoke: elsewhere})
		require.NoError(t, err)
	})
}

// A new claim is refused like a set of its cluster. An existing one is returned, wherever the call
// comes from.
func TestOnlyTheClusterOfTheShimMakesClaims(t *testing.T) {
	releasing := func(_ string, c *v1alpha1.MachineClaim) { c.Status.Phase = v1alpha1.PhaseReleasing }
	ofAnotherHolder := func(_ string, c *v1alpha1.MachineClaim) {
		c.Spec.Holder, c.Labels[v1alpha1.HolderLabel] = "another", "another"
	}
	for _, test := range []struct {
		name    string
		known   string
		claims  []string
		change  func(string, *v1alpha1.MachineClaim)
		from    string
		refused string // what the error names
	}{
		{name: "nothing is known", from: elsewhere},
		{name: "the shim's own cluster", known: spoke, from: spoke},
		{name: "the shim's own cluster, where another made claims before it was known", known: spoke, claims: []string{elsewhere}, from: spoke},
		{name: "another cluster", known: spoke, from: elsewhere, refused: "delete the Cluster's Spoke"},
		{name: "another cluster, where claims exist", known: spoke, claims: []string{spoke}, from: elsewhere, refused: "release the old claims"},
		{name: "nothing is known, and another cluster's claims exist", claims: []string{spoke}, from: elsewhere, refused: "release the old claims"},
		{name: "nothing is known, and another cluster's claims are released", claims: []string{spoke}, change: releasing, from: elsewhere},
		{name: "nothing is known, and another holder's claims exist", claims: []string{spoke}, change: ofAnotherHolder, from: elsewhere},
		{name: "nothing is known, and the claims record no cluster", claims: []string{""}, from: elsewhere},
		{name: "another cluster, which has made claims before", known: spoke, claims: []string{spoke, elsewhere}, from: elsewhere},
		{name: "a caller that names no cluster", known: spoke, claims: []string{spoke}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, _ := syncing(t, test.change, test.claims...)
			knowing(t, e, &test.known, &test.known)
			create := func(id string, validateOnly bool) (*v1alpha1.MachineClaim, error) {
				ctx, cancel := context.WithCancel(t.Context())
				cancel() // the claim need not be entered
				return e.Create(ctx, Request{
					Namespace: namespace, Cluster: clusterName, ID: id, Holder: holder, Spoke: test.from, Candidates: []string{"small"},
					ValidateOnly: validateOnly,
				})
			}
			for _, validateOnly := range []bool{true, false} {
				_, err := create("new", validateOnly)
				if foreign := (*ForeignSpokeError)(nil); test.refused == "" {
					require.NotErrorAs(t, err, &foreign)
				} else {
					require.ErrorAs(t, err, &foreign)
					require.ErrorContains(t, err, elsewhere)
					require.ErrorContains(t, err, spoke)
					require.ErrorContains(t, err, test.refused)
					require.True(t, isRefusal(err))
				}
			}
			c, err := e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "new"})
			if test.refused != "" {
				require.ErrorIs(t, err, ErrNotFound)
			} else {
				require.NoError(t, err)
				require.Equal(t, test.from, c.Spec.Spoke)
			}
			if len(test.claims) > 0 && test.change == nil {
				c, err = create("a", false)
				require.NoError(t, err)
				require.Equal(t, test.claims[0], c.Spec.Spoke)
			}
		})
	}
}

// Another agent may have recorded the Cluster's spoke, or forgotten it.
func TestTheSpokeIsReadBeforeItDecides(t *testing.T) {
	for _, test := range []struct {
		name            string
		known, recorded string
		from            string
		reads           int
		refused         bool
	}{
		{name: "the known cluster", known: spoke, recorded: spoke, from: spoke},
		{name: "no cluster", known: "", recorded: spoke, from: ""},
		{name: "the first cluster", known: "", recorded: "", from: elsewhere, reads: 1},
		{name: "another cluster than the first one, which called another agent", known: "", recorded: spoke, from: elsewhere, reads: 1, refused: true},
		{name: "the first cluster, which called another agent", known: "", recorded: spoke, from: spoke, reads: 1},
		{name: "another cluster", known: spoke, recorded: spoke, from: elsewhere, reads: 1, refused: true},
		{name: "another cluster, after the Cluster was onboarded again", known: spoke, recorded: "", from: elsewhere, reads: 1},
		{name: "another cluster, which was recorded meanwhile", known: spoke, recorded: elsewhere, from: elsewhere, reads: 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, round := syncing(t, nil)
			knowing(t, e, &test.known, &test.recorded)
			reads, read := 0, e.ReadSpokeOf
			e.ReadSpokeOf = func(ctx context.Context, cluster types.NamespacedName) (string, error) {
				reads++
				return read(ctx, cluster)
			}
			for range 2 {
				_, err := round(SyncRequest{Spoke: test.from})
				if test.refused {
					require.ErrorAs(t, err, new(*ForeignSpokeError))
				} else {
					require.NoError(t, err)
				}
			}
			require.Equal(t, 2*test.reads, reads)
			_, err := e.Create(t.Context(), Request{
				Namespace: namespace, Cluster: clusterName, ID: "new", Holder: holder, Spoke: test.from, Candidates: []string{"small"}, ValidateOnly: true,
			})
			if test.refused {
				require.ErrorAs(t, err, new(*ForeignSpokeError))
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, 3*test.reads, reads)
		})
	}
	t.Run("the hub does not answer", func(t *testing.T) {
		e, round := syncing(t, nil)
		knowing(t, e, new(string), new(string))
		down := errors.New("the hub does not answer")
		e.ReadSpokeOf = func(context.Context, types.NamespacedName) (string, error) { return "", down }
		_, err := round(SyncRequest{Spoke: spoke})
		require.ErrorIs(t, err, down)
	})
}

// A caller that names another cluster with each set makes the agent write nothing each time.
func TestAnotherClusterIsRecordedOnceItIsKnown(t *testing.T) {
	e, round := syncing(t, nil, spoke)
	known := spoke
	knowing(t, e, &known, &known)
	recorded := func(from string) string {
		_, err := round(SyncRequest{Spoke: from, LiveIDs: []string{"a"}})
		require.NoError(t, err)
		return claimNamed(t, e, "a").Spec.Spoke
	}
	require.Equal(t, spoke, recorded(elsewhere))
	known = ""
	require.Equal(t, spoke, recorded(""))
	require.Equal(t, spoke, recorded(elsewhere), "nothing is known yet")
	known = elsewhere
	require.Equal(t, elsewhere, recorded(elsewhere))
	require.Equal(t, elsewhere, recorded(""))
	require.Equal(t, elsewhere, recorded(spoke))
}

// The reason why a claim is kept is written once, and removed when its owner is back.
func TestAKeptClaimSaysSoUntilItsOwnerIsBack(t *testing.T) {
	e, round := syncing(t, func(_ string, c *v1alpha1.MachineClaim) {
		at := metav1.NewTime(newTestTime())
		c.Status.NodeRegisteredAt = &at
	}, spoke)
	for range 2 {
		result, err := round(SyncRequest{Spoke: spoke})
		require.NoError(t, err)
		assert.Equal(t, []string{"a"}, result.Kept)
		assert.Len(t, claimNamed(t, e, "a").Status.History, 1)
	}
	result, err := round(SyncRequest{Spoke: spoke, LiveIDs: []string{"a"}})
	require.NoError(t, err)
	assert.Empty(t, result.Kept)
	assert.Equal(t, protocol.ReasonBound, claimNamed(t, e, "a").Status.Reason)

	_, err = e.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"}, ReleaseOptions{Reason: "an admin looked"})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseReleasing, claimNamed(t, e, "a").Status.Phase, "a person may release it")
}

// The cluster of a claim survives the loss of the claim's object.
func TestTheClusterOfALiveClaimIsRecorded(t *testing.T) {
	for name, made := range map[string]string{"an older version made it": "", "another cluster made it": elsewhere} {
		t.Run(name, func(t *testing.T) {
			e, round := syncing(t, nil, made)
			_, err := round(SyncRequest{LiveIDs: []string{"a"}})
			require.NoError(t, err)
			assert.Equal(t, made, claimNamed(t, e, "a").Spec.Spoke, "a set that does not say where it was read says nothing")
			_, err = round(SyncRequest{Spoke: spoke, LiveIDs: []string{"a"}})
			require.NoError(t, err)
			assert.Equal(t, spoke, claimNamed(t, e, "a").Spec.Spoke)

			require.NoError(t, e.Client.Delete(t.Context(), claimNamed(t, e, "a")))
			assert.Equal(t, spoke, claimNamed(t, e, "a").Spec.Spoke, "made again from its Machine")
		})
	}
}

// Another cluster's Nodes are not those of this Cluster's Machines, whatever their provider IDs
// are.
func TestNodesOfAnotherClusterSayNothingOfAClaim(t *testing.T) {
	e, round := syncing(t, nil, spoke, elsewhere)
	e.Failure.NodeDeadline = nodeDeadline
	_, err := round(SyncRequest{Spoke: elsewhere, LiveIDs: []string{"b"}, NodesComplete: true})
	require.NoError(t, err)
	assert.Nil(t, claimNamed(t, e, "a").Status.NodeAbsentAt)
	assert.NotNil(t, claimNamed(t, e, "b").Status.NodeAbsentAt)
}
