package claims

import (
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
			e.ReportsNodes = func(of string) bool { return of == holder }
			e.SpokeOf = func(cluster types.NamespacedName) string {
				require.Equal(t, types.NamespacedName{Namespace: namespace, Name: clusterName}, cluster)
				return test.known
			}
			_, err := round(test.set)
			if test.refused == "" {
				require.NoError(t, err)
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
		e.ReportsNodes = func(string) bool { return false }
		e.SpokeOf = func(types.NamespacedName) string { return spoke }
		_, err := round(SyncRequest{Spoke: elsewhere})
		require.NoError(t, err)
	})
}

// A caller that names another cluster with each set makes the agent write nothing each time.
func TestAnotherClusterIsRecordedOnceItIsKnown(t *testing.T) {
	e, round := syncing(t, nil, spoke)
	known := spoke
	e.ReportsNodes = func(string) bool { return true }
	e.SpokeOf = func(types.NamespacedName) string { return known }
	_, err := round(SyncRequest{Spoke: elsewhere, LiveIDs: []string{"a"}})
	require.NoError(t, err)
	require.Equal(t, spoke, claimNamed(t, e, "a").Spec.Spoke)
	known = elsewhere
	_, err = round(SyncRequest{Spoke: elsewhere, LiveIDs: []string{"a"}})
	require.NoError(t, err)
	require.Equal(t, elsewhere, claimNamed(t, e, "a").Spec.Spoke)
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
