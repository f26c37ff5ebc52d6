package e2e_test

import (
	"context"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// TestAWorkspaceOfKAITOGetsItsMachines applies the objects that KAITO's provisioner for Karpenter
// makes for a Workspace: a static NodePool, which grows, and is deleted with the Workspace.
func TestAWorkspaceOfKAITOGetsItsMachines(t *testing.T) {
	figure := shows(t, "KAITO: the static NodePool of a Workspace gets machines with GPUs, grows, and is deleted")
	if testing.Short() {
		t.Skip("not in the short run: needs a feature gate")
	}
	const (
		pool = "team-phi-4"
		// Earlier releases of KAITO require this of every provider, later ones of Azure's only.
		placement, regional = "karpenter.azure.com/placement-scope", "regional"
	)
	for name, change := range map[string]func(*unstructured.Unstructured){
		"today": nil,
		"with the placement of Azure": of("NodePool", func(o *unstructured.Unstructured) {
			path := []string{"spec", "template", "spec", "requirements"}
			requirements, _, _ := unstructured.NestedSlice(o.Object, path...)
			set(o, append(requirements, map[string]any{"key": placement, "operator": "In", "values": []any{regional}}), path...)
		}),
	} {
		t.Run(name, func(t *testing.T) {
			leaveAsFound(t)
			copies(t, w.Hub, manifests.KaitoHub, "a100", nil)
			copies(t, w.Spoke, manifests.KaitoWorkload, "phi-4", nil)
			before, began := made(pool), time.Now()
			copies(t, w.Spoke, manifests.KaitoSpoke, "gpus", change)
			require.NoError(t, w.AwaitNodePool(within(t, soon), pool))
			scale(t, "phi-4", 3)
			await(t, 3*time.Minute, initialized(pool, 2))
			poll(t, 2*time.Minute, podsRun("phi-4", 2)) // the third has no GPU
			figure("%s: two pods ran after %.0f s", name, time.Since(began).Seconds())
			var nodes corev1.NodeList
			require.NoError(t, w.Spoke.List(t.Context(), &nodes, client.MatchingLabels{karpenterv1.NodePoolLabelKey: pool}))
			for _, n := range nodes.Items {
				require.Equal(t, "phi-4", n.Labels["karpenter.kaito.sh/workspace-name"])
				require.Equal(t, "Standard_NC24ads_A100_v4", n.Labels[corev1.LabelInstanceTypeStable])
				require.Equal(t, lo.Ternary(change != nil, regional, ""), n.Labels[placement])
				require.Contains(t, n.Spec.Taints, corev1.Taint{Key: "sku", Value: "gpu", Effect: corev1.TaintEffectNoSchedule})
			}

			require.NoError(t, sizePool(within(t, soon), pool, 3))
			await(t, 3*time.Minute, initialized(pool, 3))
			await(t, 2*time.Minute, running(3))
			require.Equal(t, 3, made(pool)-before, "one NodeClaim for each replica")

			scale(t, "phi-4", 0)
			require.NoError(t, w.Spoke.Delete(within(t, soon), &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: pool}}))
			await(t, 3*time.Minute, initialized(pool, 0))
			poll(t, soon, func(ctx context.Context) (string, error) {
				err := w.Spoke.Get(ctx, client.ObjectKey{Name: pool}, &karpenterv1.NodePool{})
				return lo.Ternary(err == nil, "the NodePool to go", ""), client.IgnoreNotFound(err)
			})
		})
	}
}
