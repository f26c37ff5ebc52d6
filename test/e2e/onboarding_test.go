package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// TestASpokeIsOnboardedAnew onboards the spoke again, as every sandbox does initially, but while
// the shim already has Nodes: first by one command, and then by Cluster API.
func TestASpokeIsOnboardedAnew(t *testing.T) {
	figure := shows(t, "a spoke is onboarded again by one command, and again by Cluster API: its shim gets its certificates, and no Node is affected")
	if testing.Short() {
		t.Skip("not in the short run: its sandbox is onboarded by the command as well")
	}
	leaveAsFound(t)
	apply(t, w.Hub, manifests.FleetHub)
	apply(t, w.Spoke, manifests.FleetSpoke, manifests.FleetWorkload)
	require.NoError(t, w.AwaitNodePool(within(t, soon), "default"))
	// Otherwise two Nodes would be consolidated into one.
	pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	budget := func(nodes string) error {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		return w.Spoke.Patch(ctx, pool, mergePatch(`{"spec":{"disruption":{"budgets":[{"nodes":"`+nodes+`"}]}}}`))
	}
	require.NoError(t, budget("0"))
	goHome(t, "web", "batch")
	t.Cleanup(func() { // before the pods are removed
		if err := budget("100%"); err != nil {
			t.Error(err)
		}
	})
	scale(t, "web", 2)
	await(t, 2*time.Minute, running(2))
	settle(t, w, settleWithin)
	nodes, nodeClaims := uids(t, &corev1.NodeList{}), uids(t, &karpenterv1.NodeClaimList{})
	paths := w.Sandbox.State().Paths
	var cluster clusterv1.Cluster
	require.NoError(t, w.Hub.Get(within(t, soon), testenv.Cluster, &cluster))
	certificate, key, err := w.Sandbox.AgentCertificate("earlier",
		sandbox.ClusterIdentity(testenv.Cluster.Namespace, testenv.Cluster.Name, cluster.Labels[agentv1.OnboardingLabel]))
	require.NoError(t, err)
	earlier := agentAs(t, certificate, key)
	list := func(ctx context.Context) error {
		_, err := earlier.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: testenv.Cluster.Namespace, Name: testenv.Cluster.Name},
		})
		return err
	}
	require.NoError(t, list(within(t, soon)))

	said, err := w.Sandbox.Onboard(within(t, soon), "--again", "--dry-run", "--spoke-kubeconfig="+paths.SpokeKubeconfig)
	require.NoError(t, err)
	require.Contains(t, said, "would onboard fleet/spoke")
	require.NoError(t, list(within(t, soon)), "a dry run does nothing")

	// The shim is not touched: its certificate ends at once, and the command provides the bootstrap
	// certificate for the next one.
	shim := w.Status(sandbox.Shim)
	began := time.Now()
	said, err = w.Sandbox.Onboard(within(t, soon), "--again", "--spoke-kubeconfig="+paths.SpokeKubeconfig)
	require.NoError(t, err)
	require.Contains(t, said, "fleet/spoke is onboarded")
	poll(t, 2*time.Minute, connectedSince(began))
	took := time.Since(began)
	figure("connected %.0f s after the command began", took.Seconds())
	require.Less(t, took, onboardedWithin, "from the start of the command until the spoke is shown as connected")
	poll(t, soon, func(ctx context.Context) (string, error) {
		if err := list(ctx); !agenterrors.IsUnauthenticated(err) {
			return fmt.Sprintf("the earlier certificate to be refused, and not answered %v", err), nil
		}
		return "", nil
	})
	scale(t, "batch", 1)
	await(t, 2*time.Minute, running(3))
	require.Subset(t, uids(t, &corev1.NodeList{}), nodes)
	require.Subset(t, uids(t, &karpenterv1.NodeClaimList{}), nodeClaims)

	began = time.Now()
	_, err = w.Sandbox.Onboard(within(t, soon), "--again", "--cluster-resource-set")
	require.NoError(t, err)
	poll(t, 2*time.Minute, connectedSince(began))
	figure("and %.0f s after the second one, by a ClusterResourceSet", time.Since(began).Seconds())
	scale(t, "web", 3)
	await(t, 2*time.Minute, running(4))
	require.Subset(t, uids(t, &corev1.NodeList{}), nodes)
	require.Equal(t, shim.PID, w.Status(sandbox.Shim).PID)
}

// onboardedWithin bounds the time from the start of the command until the hub shows the spoke as
// connected (docs/operations.md).
const onboardedWithin = time.Minute

// lifetime is the default lifetime of the certificates.
const lifetime = 24 * time.Hour

// connectedSince returns a condition: the Spoke reports that its shim has synced with a certificate
// that was issued after the given time.
func connectedSince(moment time.Time) func(ctx context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var spoke agentv1.Spoke
		if err := w.Hub.Get(ctx, testenv.Cluster, &spoke); client.IgnoreNotFound(err) != nil {
			return "", err
		}
		enrolled, status := spoke.Spec.Enrollment, spoke.Status
		switch {
		case enrolled == nil || enrolled.Time.Add(time.Second).Before(moment):
			return "the shim to get its certificate", nil
		case !meta.IsStatusConditionTrue(status.Conditions, agentv1.ConnectedCondition) || status.Certificate == nil:
			return "the Spoke to be connected", nil
		case status.Certificate.NotAfter.Time.Before(moment.Add(lifetime - time.Second)):
			return "the shim to synchronize with that certificate", nil
		}
		return "", nil
	}
}
