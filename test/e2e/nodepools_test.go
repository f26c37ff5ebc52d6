package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

func TestNodePoolsFromTheHub(t *testing.T) {
	figure := shows(t, "a NodePool published from the hub gets Nodes in the selected spoke, and leaves a user's NodePool in another alone")
	if testing.Short() {
		t.Skip("not in the short run: it takes two spokes of its own")
	}
	first := startHub(t, "e2e-pools", func(o *sandbox.Options) { o.NodePools = true })
	second := joinHub(t, "e2e-pools-second", "e2e-pools", func(o *sandbox.Options) { o.NodePools = true })
	require.NoError(t, manifests.Apply(within(t, soon), second.source.Spoke, manifests.MoveSpoke))
	theirs := nodePool(t, second.source)
	selectCluster(t, first.source, "general")

	set := published(t)
	require.NoError(t, first.source.Hub.Create(within(t, soon), set))
	began := time.Now()
	require.NoError(t, manifests.Apply(within(t, soon), first.source.Hub, manifests.MoveHub))
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		err := first.source.Spoke.Get(ctx, client.ObjectKey{Name: "move"}, &karpv1.NodePool{})
		return lo.Ternary(err == nil, "", "the NodePool is not in the spoke"), client.IgnoreNotFound(err)
	})
	require.NoError(t, first.source.AwaitNodePool(within(t, soon), "move"))
	require.NoError(t, manifests.Apply(within(t, soon), first.source.Spoke, manifests.MoveWorkload))
	first.scale(t, 1, 1)
	require.NoError(t, first.source.Recorder.Await(within(t, 5*time.Minute), running(2)))
	first.settle(t)
	figure("2 pods on Nodes of a published NodePool after %.0f s", time.Since(began).Seconds())
	require.Equal(t, set.Name, nodePool(t, first.source).Labels["karpenter.cluster.x-k8s.io/published-by"])

	poll(t, settleWithin, shownNodePool(first.source, func(pool v1alpha1.SpokeNodePool) bool {
		return pool.Set == set.Name && pool.Ready && pool.Nodes == 2 && pool.PendingNodeClaims == 0 && pool.PricePerHour != "" && pool.PricePerHour != "0"
	}))
	poll(t, settleWithin, readyFor(first.source, set, v1alpha1.AppliedReason, "applied in all 1 Clusters"))
	poll(t, settleWithin, shownNodePool(second.source, func(pool v1alpha1.SpokeNodePool) bool { return pool.Set == "" && pool.Nodes == 0 }))

	t.Log("the second spoke is selected, too, and has a NodePool of that name")
	selectCluster(t, second.source, "general")
	poll(t, settleWithin, readyFor(first.source, set, v1alpha1.NotAppliedReason, "that was not published from the hub"))
	now := nodePool(t, second.source)
	require.Equal(t, theirs.UID, now.UID)
	require.Equal(t, theirs.Spec, now.Spec)
	require.NotContains(t, now.Labels, "karpenter.cluster.x-k8s.io/published-by")

	t.Log("the first spoke is selected no longer, and its NodePool stays with its Nodes")
	selectCluster(t, first.source, "")
	poll(t, settleWithin, func(context.Context) (string, error) {
		if _, ours := nodePool(t, first.source).Labels["karpenter.cluster.x-k8s.io/published-by"]; ours {
			return "the label is still there", nil
		}
		return "", nil
	})
	first.settle(t)
	require.Equal(t, map[string]int32{"east": own + 1, "west": 1}, first.holdings(t, first.source).replicas)
	first.empty(t)
}

// published returns a NodePoolSet with the objects of [manifests.MoveSpoke].
func published(t *testing.T) *v1alpha1.NodePoolSet {
	t.Helper()
	objects, err := manifests.Load(manifests.MoveSpoke)
	require.NoError(t, err)
	set := &v1alpha1.NodePoolSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "general"},
		Spec:       v1alpha1.NodePoolSetSpec{ClusterSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"pools": "general"}}},
	}
	for _, object := range objects {
		spec, err := json.Marshal(object.Object["spec"])
		require.NoError(t, err)
		entry := v1alpha1.PublishedTemplate{Name: object.GetName(), Spec: runtime.RawExtension{Raw: spec}}
		switch object.GetKind() {
		case "NodePool":
			set.Spec.NodePools = append(set.Spec.NodePools, entry)
		case "ClusterAPINodeClass":
			set.Spec.NodeClasses = append(set.Spec.NodeClasses, entry)
		}
	}
	return set
}

func nodePool(t *testing.T, in *testenv.Env) *karpv1.NodePool {
	t.Helper()
	pool := &karpv1.NodePool{}
	require.NoError(t, in.Spoke.Get(within(t, soon), client.ObjectKey{Name: "move"}, pool))
	return pool
}

func selectCluster(t *testing.T, of *testenv.Env, label string) {
	t.Helper()
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: of.Checker.Cluster.Namespace, Name: of.Checker.Cluster.Name}}
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"metadata":{"labels":{"pools":%q}}}`, label))
	require.NoError(t, of.Hub.Patch(within(t, soon), cluster, patch))
}

// shownNodePool waits until the Spoke shows the NodePool as expected.
func shownNodePool(in *testenv.Env, as func(v1alpha1.SpokeNodePool) bool) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		spoke := &v1alpha1.Spoke{}
		if err := in.Hub.Get(ctx, in.Checker.Cluster, spoke); err != nil {
			return "", client.IgnoreNotFound(err)
		}
		for _, pool := range spoke.Status.NodePools {
			if pool.Name == "move" && as(pool) {
				return "", nil
			}
		}
		return fmt.Sprintf("the Spoke shows %+v", spoke.Status.NodePools), nil
	}
}

// readyFor waits until the set's condition has the reason and a message with the text.
func readyFor(in *testenv.Env, set *v1alpha1.NodePoolSet, reason, text string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		if err := in.Hub.Get(ctx, client.ObjectKeyFromObject(set), set); err != nil {
			return "", err
		}
		c := meta.FindStatusCondition(set.Status.Conditions, v1alpha1.ReadyCondition)
		if c != nil && c.Reason == reason && strings.Contains(c.Message, text) {
			return "", nil
		}
		return fmt.Sprintf("the set's condition is %+v", c), nil
	}
}
