package claims

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// reads counts the requests to a reader, by kind.
type reads map[string]int

func (r reads) of(from client.Reader) client.Reader {
	through, ok := from.(client.WithWatch)
	if !ok {
		panic(fmt.Sprintf("%T cannot be counted", from))
	}
	return interceptor.NewClient(through, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, o ...client.GetOption) error {
			r[fmt.Sprintf("%T", into)]++
			return c.Get(ctx, key, into, o...)
		},
		List: func(ctx context.Context, c client.WithWatch, into client.ObjectList, o ...client.ListOption) error {
			r[fmt.Sprintf("%T", into)]++
			return c.List(ctx, into, o...)
		},
	})
}

func (r reads) sum() int {
	sum := 0
	for _, n := range r {
		sum += n
	}
	return sum
}

func ask(id string, candidates ...string) Request {
	return Request{Namespace: namespace, Cluster: clusterName, ID: id, Holder: "karpenter", Candidates: candidates}
}

func names(prefix string, n int) []string {
	all := make([]string, 0, n)
	for i := range n {
		all = append(all, fmt.Sprintf("%s-%d", prefix, i))
	}
	return all
}

// One identity's calls must not use up the capacity that all claims need.
func TestCandidatesThatWereMadeUpCostFewLiveReads(t *testing.T) {
	for _, validateOnly := range []bool{true, false} {
		t.Run(fmt.Sprintf("validate only %v", validateOnly), func(t *testing.T) {
			e := quiet(engineWith(t))
			live := reads{}
			e.Reader = live.of(e.Reader)
			r := ask("a", names("invented", 1000)...)
			r.ValidateOnly = validateOnly
			_, err := e.Create(t.Context(), r)
			var unseen *UnseenError
			require.ErrorAs(t, err, &unseen, "what was not looked for is not gone")
			assert.Equal(t, 1000-maxLookups, unseen.Candidates)
			assert.LessOrEqual(t, live.sum(), maxLookups+1, "%v", live)
		})
	}
}

// Otherwise a caller could find out which names the MachineDeployments of other Clusters have.
func TestAnotherClustersNodeGroupsAreAnsweredLikeThoseThatDoNotExist(t *testing.T) {
	theirs := groupOf("theirs", 0, nil)
	theirs.Spec.ClusterName = "another"
	for _, invented := range []int{0, maxLookups - 1, maxLookups, 2 * maxLookups} {
		t.Run(fmt.Sprintf("behind %d that do not exist", invented), func(t *testing.T) {
			answer := func(last string) (reads, error) {
				e := quiet(engineWith(t, theirs.DeepCopy()))
				live := reads{}
				e.Reader = live.of(e.Reader)
				r := ask("a", append(names("invented", invented), last)...)
				r.ValidateOnly = true
				_, err := e.Create(t.Context(), r)
				require.Error(t, err)
				return live, err
			}
			read, existing := answer("theirs")
			readToo, missing := answer("absent")
			assert.Equal(t, strings.ReplaceAll(missing.Error(), "absent", "theirs"), existing.Error())
			assert.Equal(t, fmt.Sprintf("%T", missing), fmt.Sprintf("%T", existing))
			assert.Equal(t, readToo, read)
		})
	}
}

func TestACandidateBehindMadeUpOnesIsChosen(t *testing.T) {
	e := quiet(engineWith(t, groupOf("real", 0, nil)))
	live := reads{}
	e.Reader = live.of(e.Reader)
	r := ask("a", append(names("invented", 100), "real")...)
	r.ValidateOnly = true
	c, err := e.Create(t.Context(), r)
	require.NoError(t, err)
	assert.Equal(t, "real", c.Spec.NodeGroup)
	assert.LessOrEqual(t, live.sum(), maxLookups+1, "%v", live)
}

func TestCandidatesThatAreCertainlyGoneAreSaidToBe(t *testing.T) {
	e := quiet(engineWith(t))
	_, err := e.Create(t.Context(), ask("a", names("gone", maxLookups)...))
	var unknown *UnknownGroupError
	require.ErrorAs(t, err, &unknown)
	assert.Equal(t, names("gone", maxLookups), unknown.Candidates)
}

// The cache lags: the node group was made just now.
func TestACandidateThatTheCachesDoNotShowYetIsLookedUp(t *testing.T) {
	e := quiet(engineWith(t))
	e.Reader = engineWith(t, groupOf("new", 0, nil)).Reader
	r := ask("a", "invented", "new")
	r.ValidateOnly = true
	c, err := e.Create(t.Context(), r)
	require.NoError(t, err)
	assert.Equal(t, "new", c.Spec.NodeGroup)
}

func TestAClaimKeepsTheNextBestNodeGroupsOfItsClusterAlone(t *testing.T) {
	closed, foreign := groupOf("closed", 0, nil), groupOf("foreign", 0, nil)
	closed.Labels = nil
	foreign.Spec.ClusterName = "another"
	objects := []client.Object{closed, foreign}
	for _, name := range names("group", 20) {
		objects = append(objects, groupOf(name, 0, nil))
	}
	e := engineWith(t, objects...)
	candidates := append([]string{"closed", "invented"}, "group-0", "foreign", "invented-too")
	candidates = append(candidates, names("group", 20)[1:]...)
	c, err := e.Create(t.Context(), ask("a", candidates...))
	require.NoError(t, err)
	assert.Equal(t, "group-0", c.Spec.NodeGroup)
	assert.Equal(t, names("group", maxCandidates), c.Spec.Candidates)
}

func TestAFullGroupWithoutASpareIsRefusedWithoutReadingItsMachines(t *testing.T) {
	ledger := func(floor int32) string {
		l := &protocol.Ledger{Version: protocol.LedgerVersion, Floor: floor, LastReplicas: 1, Of: namespace + "/full"}
		return l.Encode()
	}
	for name, c := range map[string]struct {
		ledger string
		claims []client.Object
		read   bool
	}{
		"the user has them":           {ledger: ledger(1)},
		"claims have them":            {ledger: ledger(0), claims: []client.Object{heldClaim("theirs", newTestTime())}},
		"one may be free":             {ledger: ledger(0), read: true},
		"the ledger is not there yet": {read: true},
	} {
		t.Run(name, func(t *testing.T) {
			annotations := map[string]string{"cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size": "1"}
			if c.ledger != "" {
				annotations[v1alpha1.LedgerAnnotation] = c.ledger
			}
			for _, claim := range c.claims {
				held, ok := claim.(*v1alpha1.MachineClaim)
				require.True(t, ok)
				held.Spec.NodeGroup, held.Labels[v1alpha1.NodeGroupLabel] = "full", "full"
			}
			e := quiet(engineWith(t, append(c.claims, groupOf("full", 1, annotations))...))
			cache := reads{}
			e.Client = counting{Client: e.Client, Reader: cache.of(e.Client)}
			r := ask("a", "full")
			r.ValidateOnly = true
			_, err := e.Create(t.Context(), r)
			if noRoom := (*NoRoomError)(nil); !c.read {
				require.ErrorAs(t, err, &noRoom)
				assert.Equal(t, eligibility.AtMaxSize, noRoom.Candidates[0].Reason)
			}
			assert.Equal(t, c.read, cache["*v1beta2.MachineSetList"] > 0, "%v", cache)
		})
	}
}

// counting reads through Reader.
type counting struct {
	client.Client
	client.Reader
}

func (c counting) Get(ctx context.Context, key client.ObjectKey, into client.Object, o ...client.GetOption) error {
	return c.Reader.Get(ctx, key, into, o...)
}

func (c counting) List(ctx context.Context, into client.ObjectList, o ...client.ListOption) error {
	return c.Reader.List(ctx, into, o...)
}

var _ client.Client = counting{}
