package autoscaler

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// GPULabel is the label of Nodes with GPUs, as in the cluster-autoscaler's provider for Cluster
// API.
const GPULabel = "cluster-api/accelerator"

// Template returns a Node of a group as it would join, for simulations. Errors:
// [*UnknownGroupError], [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) Template(name types.NamespacedName, id string) (node *corev1.Node, err error) {
	err = s.inGroup(name, id, func(_ *cluster, g *group) error {
		node = g.template()
		return nil
	})
	return node, err
}

func (g *group) template() *corev1.Node {
	m := g.Machine
	hostname := "template-of-" + g.Key.Name
	labels := map[string]string{
		corev1.LabelHostname: hostname, corev1.LabelInstanceTypeStable: m.InstanceType,
		corev1.LabelArchStable: m.Architecture, corev1.LabelOSStable: m.OperatingSystem,
	}
	if m.Zone != "" {
		labels[corev1.LabelTopologyZone] = m.Zone
	}
	if m.Region != "" {
		labels[corev1.LabelTopologyRegion] = m.Region
	}
	maps.Copy(labels, m.Labels)
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: hostname, Labels: labels},
		Spec:       corev1.NodeSpec{Taints: slices.Clone(m.Taints), ProviderID: fmt.Sprintf("capi-template://%s", g.ID())},
		Status: corev1.NodeStatus{
			Capacity: m.Resources.DeepCopy(), Allocatable: g.allocatable(),
			NodeInfo: corev1.NodeSystemInfo{
				Architecture: m.Architecture, OperatingSystem: m.OperatingSystem, KubeletVersion: g.KubernetesVersion,
			},
			Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue},
				{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse},
				{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse},
				{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse},
				{Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionFalse},
			},
		},
	}
}

// allocatable is what pods can have of a machine.
func (g *group) allocatable() corev1.ResourceList {
	allocatable := g.Machine.Resources.DeepCopy()
	for name, overhead := range g.Machine.Overhead {
		left, found := allocatable[name]
		if !found {
			continue
		}
		if left.Sub(overhead); left.Sign() < 0 {
			left.Set(0)
		}
		allocatable[name] = left
	}
	return allocatable
}

// GPUTypes returns the values that the label [GPULabel] has in the Cluster's groups, in order.
// Errors: [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) GPUTypes(name types.NamespacedName) (kinds []string, err error) {
	err = s.read(name, func(c *cluster) error {
		for _, g := range c.view.order {
			if kind := g.Machine.Labels[GPULabel]; kind != "" {
				kinds = append(kinds, kind)
			}
		}
		slices.Sort(kinds)
		kinds = slices.Compact(kinds)
		return nil
	})
	return kinds, err
}
