package simprovider

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

func resources(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

func TestAllocatableIsWhatAKubeletWouldReport(t *testing.T) {
	for name, c := range map[string]struct {
		spec simv1.SimMachineSpec
		want corev1.ResourceList
	}{
		"default eviction thresholds": {
			spec: simv1.SimMachineSpec{Capacity: resources("cpu", "4", "memory", "8Gi", "ephemeral-storage", "100Gi", "pods", "58")},
			want: resources("cpu", "4", "memory", "8092Mi", "ephemeral-storage", "90Gi", "pods", "58"),
		},
		"pods by default, no storage where none is": {
			spec: simv1.SimMachineSpec{Capacity: resources("cpu", "2", "memory", "1Gi")},
			want: resources("cpu", "2", "memory", "924Mi", "pods", "110"),
		},
		"reserved besides": {
			spec: simv1.SimMachineSpec{
				Capacity: resources("cpu", "2", "memory", "1Gi"), KubeReserved: resources("cpu", "200m", "memory", "124Mi", "gpu", "1"),
			},
			want: resources("cpu", "1800m", "memory", "800Mi", "pods", "110"),
		},
		"never below zero": {
			spec: simv1.SimMachineSpec{Capacity: resources("cpu", "1", "memory", "50Mi"), KubeReserved: resources("cpu", "2")},
			want: resources("cpu", "0", "memory", "0", "pods", "110"),
		},
		"less than was announced": {
			spec: simv1.SimMachineSpec{Capacity: resources("cpu", "4", "memory", "8Gi"), NodeCapacity: resources("cpu", "4", "memory", "7Gi")},
			want: resources("cpu", "4", "memory", "7068Mi", "pods", "110"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := c.spec.DeepCopy()
			got := nodeAllocatable(&c.spec)
			if len(got) != len(c.want) {
				t.Errorf("got %v", got)
			}
			for name, want := range c.want {
				if quantity := got[name]; quantity.Cmp(want) != 0 {
					t.Errorf("%s is %s, want %s", name, quantity.String(), want.String())
				}
			}
			for name, want := range before.Capacity {
				if have := c.spec.Capacity[name]; have.Cmp(want) != 0 {
					t.Errorf("the spec's %s was changed to %s", name, have.String())
				}
			}
		})
	}
}

func TestAddressesAreOfTheBenchmarkBlock(t *testing.T) {
	block := netip.MustParsePrefix("198.18.0.0/15")
	for _, name := range []string{"", "a", "standard-4-x7k2p-9qzrm"} {
		if got := netip.MustParseAddr(nodeAddress(name)); !block.Contains(got) {
			t.Errorf("%q has the address %s", name, got)
		}
	}
}
