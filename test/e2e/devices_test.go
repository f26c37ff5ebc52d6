package e2e_test

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	deviceDriver   = "gpu.example.com"
	devicesPerNode = 2
)

// TestPodsGetDevices runs pods that claim devices. The test itself acts as the driver, which would
// run on each Node.
func TestPodsGetDevices(t *testing.T) {
	figure := shows(t, "pods with resource claims get Nodes with devices, two to a Node")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	inSandbox(t, sandbox.Options{Name: "e2e-devices", DynamicResources: true})
	leaveAsFound(t)
	const prefix = "capacity.cluster-autoscaler.kubernetes.io/"
	group(t, "devices", "plain", "on-demand", "1", "10")
	group(t, "devices", "devices", "on-demand", "5", "10")
	annotate(t, "devices", prefix+"dra-driver", strconv.Quote(deviceDriver))
	annotate(t, "devices", prefix+"gpu-count", strconv.Quote(strconv.Itoa(devicesPerNode)))
	copies(t, w.Spoke, manifests.CrowdSpoke, "devices", nil)
	copies(t, w.Spoke, manifests.CrowdWorkload, "devices", nil)
	require.NoError(t, w.AwaitNodePool(within(t, soon), "devices"))
	goHome(t, "devices")

	ours := resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: fmt.Sprintf("device.driver == %q", deviceDriver)}}
	class := &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{ours}},
	}
	template := &resourcev1.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one-gpu"},
		Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{
			Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class.Name},
		}}}}},
	}
	for _, o := range []client.Object{class, template} {
		require.NoError(t, w.Spoke.Create(t.Context(), o))
	}
	deployment := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "devices"}}
	require.NoError(t, w.Spoke.Patch(t.Context(), deployment, mergePatch(`{"spec":{"template":{"spec":{
		"resourceClaims":[{"name":"gpu","resourceClaimTemplateName":"one-gpu"}],
		"containers":[{"name":"app","image":"app","resources":{"claims":[{"name":"gpu"}],"requests":{"cpu":"100m"}}}]}}}}`)))
	driveDevices(t)

	const pods = 3
	scale(t, "devices", pods)
	await(t, 3*time.Minute, running(pods))
	require.Equal(t, map[string]int{"devices": 2}, where(), "not the cheaper group, which has none")
	figure("%d pods on %d Nodes of %d devices", pods, len(w.Recorder.State().Live()), devicesPerNode)
	await(t, soon, func(s timeline.State) string {
		late, found := lo.Find(s.Live(), func(j timeline.Timeline) bool { return !j.Reached(timeline.Initialized) })
		return lo.Ternary(found, late.NodeClaim+" to be initialized", "")
	})
	require.Equal(t, 2, made("devices"))
	var claims resourcev1.ResourceClaimList
	require.NoError(t, w.Spoke.List(t.Context(), &claims, client.InNamespace("default")))
	require.Len(t, claims.Items, pods)
	for _, c := range claims.Items {
		require.NotNil(t, c.Status.Allocation, c.Name)
	}
}

// driveDevices publishes the devices of each Node of the group until the test ends.
func driveDevices(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		_ = testenv.Poll(ctx, func(ctx context.Context) (string, error) {
			var nodes corev1.NodeList
			// Failures are retried.
			_ = w.Spoke.List(ctx, &nodes, client.MatchingLabels{corev1.LabelInstanceTypeStable: "devices"})
			for _, n := range nodes.Items {
				slice := &resourcev1.ResourceSlice{
					ObjectMeta: metav1.ObjectMeta{
						Name:            n.Name,
						OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}},
					},
					Spec: resourcev1.ResourceSliceSpec{
						Driver: deviceDriver, NodeName: &n.Name, Pool: resourcev1.ResourcePool{Name: n.Name, ResourceSliceCount: 1},
						Devices: lo.Times(devicesPerNode, func(i int) resourcev1.Device { return resourcev1.Device{Name: fmt.Sprintf("gpu-%d", i)} }),
					},
				}
				_ = w.Spoke.Create(ctx, slice) // most already exist
			}
			return "the test to end", nil
		})
	}()
}
