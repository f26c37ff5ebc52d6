package autoscaler_test

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/autoscaler"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
)

func requesting(cpu, memory string) corev1.ResourceRequirements {
	list := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	return corev1.ResourceRequirements{Requests: list, Limits: list}
}

func encodedPod(t *testing.T, pod *corev1.Pod) []byte {
	t.Helper()
	encoded, err := pod.Marshal()
	require.NoError(t, err)
	return encoded
}

// Every field that counts for what a pod requests must survive.
func TestAParsedPodRequestsTheSame(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", Labels: map[string]string{"a": "b"}},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{
				{Name: "a", Image: "i", Resources: requesting("500m", "1Gi"), Env: []corev1.EnvVar{{Name: "x"}}}, {Name: "b", Resources: requesting("1", "2Gi")},
			},
			InitContainers: []corev1.Container{
				{Name: "c", Resources: requesting("7", "1Gi")}, {Name: "d", Resources: requesting("100m", "3Gi"), RestartPolicy: &always},
			},
			Overhead: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m")},
		},
	}
	for name, change := range map[string]func(){"by its containers": func() {}, "by itself": func() {
		own := requesting("20", "40Gi")
		pod.Spec.Resources = &own
	}} {
		t.Run(name, func(t *testing.T) {
			change()
			parsed, err := autoscaler.ParsePod(encodedPod(t, pod))
			require.NoError(t, err)
			require.Equal(t, "default/p", parsed.Namespace+"/"+parsed.Name)
			require.Empty(t, parsed.Labels)
			wanted := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
			requested := resourcehelper.PodRequests(parsed, resourcehelper.PodResourcesOptions{})
			require.Len(t, requested, len(wanted))
			for resource, amount := range wanted {
				has := requested[resource]
				require.Zero(t, amount.Cmp(has), "%s: %s, not %s", resource, has.String(), amount.String())
			}
		})
	}
}

func TestPodsThatRequestTheImpossibleAreRefused(t *testing.T) {
	pod := func(containers int, cpu string) []byte {
		pod := &corev1.Pod{}
		for range containers {
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}},
			})
		}
		return encodedPod(t, pod)
	}
	for field, encoded := range map[string][]byte{
		// Calculating with 1e9999999 would take minutes and gigabytes. It is written over a
		// quantity of the same length, because encoding it does calculate.
		"pod_bytes.spec.containers.resources.requests.value.string": bytes.Replace(pod(1, "123456789"), []byte("123456789"), []byte("1e9999999"), 1),
		"pod_bytes.spec.containers":                                 pod(501, "1"),
		"pod_bytes":                                                 []byte("nonsense"),
	} {
		_, err := autoscaler.ParsePod(encoded)
		var invalid *autoscaler.InvalidError
		require.ErrorAs(t, err, &invalid, field)
		require.Equal(t, field, invalid.Field)
	}
}

// A group without a max size has room for any number.
func TestOneCallAddsABoundedNumberOfNodes(t *testing.T) {
	f := newFixture(t, func(g *nodegroup.NodeGroup) { g.Limits.Max = nil })
	var invalid *autoscaler.InvalidError
	require.ErrorAs(t, f.increase(math.MaxInt32/2), &invalid)
	require.Equal(t, "delta", invalid.Field)
	require.Empty(t, f.engine.made)
}

func TestErrorsQuoteTheBeginningOfLongNames(t *testing.T) {
	f := newFixture(t)
	long := strings.Repeat("a", 1<<18)
	_, unknown := f.TargetSize(spoke, long)
	_, unpriced := f.NodePrice(spoke, autoscaler.Node{ProviderID: long, Name: long}, time.Hour)
	foreign := f.Delete(t.Context(), spoke, group, []autoscaler.Node{{ProviderID: long, Name: long + "b"}})
	for _, err := range []error{unknown, unpriced, foreign} {
		require.Error(t, err)
		require.Less(t, len(err.Error()), 1024)
	}
}
