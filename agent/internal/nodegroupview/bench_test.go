package nodegroupview

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/infrastructure"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// cached returns copies, like a cache.
type cached struct {
	client.Client

	deployments map[types.NamespacedName]*clusterv1.MachineDeployment
}

func (c *cached) Get(_ context.Context, key types.NamespacedName, object client.Object, _ ...client.GetOption) error {
	if md, ok := object.(*clusterv1.MachineDeployment); ok {
		c.deployments[key].DeepCopyInto(md)
	}
	return nil
}

func (*cached) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

// BenchmarkRebuildOne changes one of many node groups and updates the view. The cost does not
// depend on the number of groups.
func BenchmarkRebuildOne(b *testing.B) {
	for _, groups := range []int{1, 1000} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) {
			c, hub := filled(b, groups)
			request := reconcile.Request{NamespacedName: key(groups / 2)}
			md := hub.deployments[request.NamespacedName]
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				md.Annotations[capacity.CPUAnnotation] = []string{"4", "8"}[i%2]
				_, err := c.Reconcile(b.Context(), request)
				require.NoError(b, err)
			}
			b.StopTimer()
			require.EqualValues(b, groups+b.N, c.Cache.Generation(), "each change was published, and nothing else")
		})
	}
}

func key(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "fleet", Name: fmt.Sprintf("group-%d", i)}
}

func filled(b *testing.B, groups int) (*View, *cached) {
	b.Helper()
	hub := &cached{deployments: map[types.NamespacedName]*clusterv1.MachineDeployment{}}
	nodes, err := learned.New(learned.Config{Client: hub})
	require.NoError(b, err)
	c, err := New(Config{
		Cache:    watchcache.New(watchcache.Options[*agentv1alpha1.NodeGroup]{Equal: Equal, Buffer: 1024, Heartbeat: time.Minute}),
		Recorder: &events.FakeRecorder{}, Learned: nodes, Clock: clock.RealClock{},
		Pricing: pricing.Policy{Coefficients: pricing.DefaultCoefficients},
		CoolingDown: func(context.Context, types.NamespacedName) (*eligibility.Refusal, error) {
			return nil, nil
		},
	})
	require.NoError(b, err)
	c.client = hub
	// The references are incomplete, so no API server is called.
	c.templates = infrastructure.New(infrastructure.Config{Changed: func(schema.GroupKind, types.NamespacedName) {}})
	for i := range groups {
		md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{
			Namespace: key(i).Namespace, Name: key(i).Name, Labels: map[string]string{v1alpha1.MemberLabel: ""},
			Annotations: map[string]string{
				capacity.CPUAnnotation: "8", capacity.MemoryAnnotation: "32Gi", capacity.DiskAnnotation: "100Gi",
				capacity.LabelsAnnotation: "topology.kubernetes.io/zone=a,karpenter.sh/capacity-type=spot,team=blue",
				capacity.TaintsAnnotation: "dedicated=blue:NoSchedule", capacity.CSIDriverAnnotation: "ebs.csi.aws.com=25",
			},
		}}
		md.Spec.ClusterName, md.Spec.Replicas = "spoke", new(int32)
		hub.deployments[key(i)] = md
		_, err := c.Reconcile(b.Context(), reconcile.Request{NamespacedName: key(i)})
		require.NoError(b, err)
	}
	return c, hub
}
