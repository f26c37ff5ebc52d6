package agent_test

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	toolscache "k8s.io/client-go/tools/cache"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var (
	manyClusters = flag.Int("clusters", 4, "how many Clusters, of 50 Machines each, claim one more at the same time")
	manyRounds   = flag.Int("claims", 2, "how often they do, one claim after the other")
	manyApart    = flag.Bool("apart", false, "whether each of these Clusters has a namespace of its own; the agent serves all of the hub's then")
)

// TestClaimsOfManyClustersAtOnce makes every Cluster of a hub claim and release a machine at the
// same moment, over mutual TLS, each with its own certificate. Cluster API creates no Machines
// meanwhile. The durations are only logged, so a call may take longer than a client waits by
// default.
func TestClaimsOfManyClustersAtOnce(t *testing.T) {
	o := testOptions("")
	o.KubeAPIQPS, o.KubeAPIBurst = options.New().KubeAPIQPS, options.New().KubeAPIBurst
	var namespaces []string
	if *manyApart {
		namespaces = lo.Times(*manyClusters, func(int) string { return plane.Namespace(t) })
		o.Namespaces = nil
	} else {
		namespaces = []string{plane.Namespace(t)}
		o.Namespaces = namespaces
	}
	settle(t, *manyClusters*machinesPerGroup, namespaces...)
	running := start(t, agent.Config{Options: o})
	clusters := lo.Times(*manyClusters, func(i int) types.NamespacedName {
		return types.NamespacedName{Namespace: namespaces[i%len(namespaces)], Name: clusterName(i)}
	})
	ref := func(c types.NamespacedName) *agentv1alpha1.ClusterRef {
		return &agentv1alpha1.ClusterRef{Namespace: c.Namespace, Name: c.Name}
	}
	groupID := func(c types.NamespacedName) string { return c.Namespace + "/" + groupName(c.Name) }
	// Afterwards the clients are connected, and the node groups are known.
	for _, c := range clusters {
		client := running.client(c.Namespace, c.Name)
		eventually(t, "the node group takes claims", func(ctx context.Context) (bool, error) {
			group, err := client.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: ref(c), Id: groupID(c)})
			return err == nil && group.GetNodeGroup().GetAvailability().GetAvailable(), nil
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	atOnce := func(call func(c types.NamespacedName) error) []time.Duration {
		took := make([]time.Duration, len(clusters))
		var calls errgroup.Group
		for i, c := range clusters {
			calls.Go(func() error {
				began := time.Now()
				err := call(c)
				took[i] = time.Since(began)
				return err
			})
		}
		require.NoError(t, calls.Wait())
		return took
	}
	for round := range *manyRounds {
		id := fmt.Sprintf("one-more-%d", round)
		created := atOnce(func(c types.NamespacedName) error {
			_, err := running.client(c.Namespace, c.Name).Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
				Cluster: ref(c), ClaimId: id, Holder: "karpenter", Candidates: []string{groupID(c)},
			})
			return err
		})
		for _, c := range clusters {
			md := deployment(t, c)
			assert.EqualValues(t, machinesPerGroup+1, *md.Spec.Replicas, "%s: what a claim leaves is the next one's", md.Name)
			ledger, err := protocol.LedgerOf(md)
			require.NoError(t, err)
			assert.Contains(t, ledger.Pending, id, md.Name)
		}

		ends := watchEnds(t, o.Namespaces, id)
		began := time.Now()
		released := atOnce(func(c types.NamespacedName) error {
			_, err := running.client(c.Namespace, c.Name).Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
				Cluster: ref(c), ClaimId: id,
			})
			return err
		})
		ended := ends.await(t, len(clusters), began)
		t.Logf("%d claims at once, of as many Clusters in %d namespaces with %d Machines in all: CreateClaim %s; ReleaseClaim %s; until they have ended %s",
			len(clusters), len(namespaces), len(clusters)*machinesPerGroup, spread(created), spread(released), spread(ended))
	}
}

func deployment(t *testing.T, cluster types.NamespacedName) *clusterv1.MachineDeployment {
	t.Helper()
	md := &clusterv1.MachineDeployment{}
	require.NoError(t, plane.Client.Get(t.Context(), ctrlclient.ObjectKey{Namespace: cluster.Namespace, Name: groupName(cluster.Name)}, md))
	return md
}

func spread(took []time.Duration) string {
	if len(took) == 0 {
		return "none"
	}
	slices.SortFunc(took, cmp.Compare)
	at := func(percent int) time.Duration {
		return took[min(len(took)-1, len(took)*percent/100)].Round(time.Millisecond)
	}
	return fmt.Sprintf("p50 %s, p99 %s", at(50), at(99))
}

// ends are the times when claims ended, as seen by a watch.
type ends struct {
	mu   sync.Mutex
	when map[string]time.Time // by name
}

// watchEnds follows the claims with an ID in the given namespaces, or in all, until the test ends.
// It misses none even if the API server ends its watch.
func watchEnds(t *testing.T, namespaces []string, claimID string) *ends {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	following, err := cache.New(hub, cache.Options{
		Scheme: plane.Client.Scheme(), DefaultNamespaces: lo.SliceToMap(namespaces, func(n string) (string, cache.Config) { return n, cache.Config{} }),
	})
	require.NoError(t, err)
	e := &ends{when: map[string]time.Time{}}
	note := func(object any) {
		c, isClaim := object.(*v1alpha1.MachineClaim)
		if !isClaim || c.Spec.ClaimID != claimID || c.CurrentPhase() != v1alpha1.PhaseEnded {
			return
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if _, known := e.when[c.Name]; !known {
			e.when[c.Name] = time.Now()
		}
	}
	var running sync.WaitGroup
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	informer, err := following.GetInformer(ctx, &v1alpha1.MachineClaim{}, cache.BlockUntilSynced(false))
	require.NoError(t, err)
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{AddFunc: note, UpdateFunc: func(_, now any) { note(now) }})
	require.NoError(t, err)
	running.Go(func() { assert.NoError(t, following.Start(ctx)) })
	require.True(t, following.WaitForCacheSync(ctx))
	return e
}

// await returns how long after a moment each of the given number of claims ended.
func (e *ends) await(t *testing.T, claims int, since time.Time) []time.Duration {
	t.Helper()
	var took []time.Duration
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, 5*time.Minute, true, func(context.Context) (bool, error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		took = lo.MapToSlice(e.when, func(_ string, at time.Time) time.Duration { return at.Sub(since) })
		return len(took) == claims, nil
	})
	require.NoError(t, err, "%d of %d claims have ended, %s", len(took), claims, spread(took))
	return took
}
