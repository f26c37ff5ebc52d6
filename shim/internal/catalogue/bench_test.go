package catalogue

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// mirrored is a mirror whose node groups the benchmark replaces.
type mirrored struct {
	listed
	groups []*agentv1alpha1.NodeGroup
}

func (m *mirrored) List() ([]*agentv1alpha1.NodeGroup, uint64) { return slices.Clone(m.groups), 1 }

// cached is a reader with one NodeClass.
type cached struct{ client.Reader }

func (cached) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	if classes, ok := list.(*v1alpha1.ClusterAPINodeClassList); ok {
		classes.Items = []v1alpha1.ClusterAPINodeClass{{ObjectMeta: metav1.ObjectMeta{Name: "default", Generation: 1}}}
	}
	return nil
}

// BenchmarkRebuild builds a snapshot of 1,000 node groups of 250 instance types, with 5,000
// NodeClaims, after some groups changed. It measures the cost of one change compared to converting
// everything, without the stream and without waking the goroutine.
func BenchmarkRebuild(b *testing.B) {
	const groups = 1000
	for _, changed := range []int{0, 1, groups} {
		b.Run(fmt.Sprintf("changed=%d", changed), func(b *testing.B) {
			mirror := &mirrored{}
			for i := range groups {
				mirror.groups = append(mirror.groups, &agentv1alpha1.NodeGroup{
					Id: fmt.Sprintf("fleet/group-%04d", i), Name: fmt.Sprintf("group-%04d", i), InstanceType: fmt.Sprintf("type-%03d", i/4),
					Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110", "ephemeral-storage": "100Gi"},
					Labels:   map[string]string{"team": "blue"}, NodeLabels: map[string]string{"team": "blue"},
					Zone: fmt.Sprintf("zone-%d", i%4), Architecture: "amd64", OperatingSystem: "linux",
					CapacityType: agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND, Price: &agentv1alpha1.Price{PerHour: 1},
					Availability: &agentv1alpha1.Availability{Available: true},
				})
			}
			c := New(clock.RealClock{}, mirror, cached{}, time.Minute)
			for i := range 5 * groups {
				c.memories.see(&karpv1.NodeClaim{
					ObjectMeta: metav1.ObjectMeta{
						Name: strconv.Itoa(i), Annotations: map[string]string{v1alpha1.NodeGroupAnnotation: fmt.Sprintf("fleet/group-%04d", i%groups)},
						Labels: map[string]string{
							corev1.LabelInstanceTypeStable: fmt.Sprintf("type-%03d", i%groups/4), corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%4),
							karpv1.CapacityTypeLabelKey: "on-demand",
						},
					},
					Spec: karpv1.NodeClaimSpec{NodeClassRef: &karpv1.NodeClassReference{Group: v1alpha1.Group, Name: "default"}},
				})
			}
			if err := c.rebuild(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				b.StopTimer()
				for i := range changed {
					group := proto.CloneOf(mirror.groups[i])
					group.Price.PerHour = float64(n%7 + 2)
					mirror.groups[i] = group
				}
				b.StartTimer()
				if err := c.rebuild(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			class, _ := c.Snapshot().Class("default")
			if found := class.InstanceTypes(nil, nil); len(found) != groups/4 {
				b.Fatal(len(found))
			}
		})
	}
}
