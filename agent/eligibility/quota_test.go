package eligibility_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

func quota(name string, resourceName corev1.ResourceName, used, hard string) corev1.ResourceQuota {
	return corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.ResourceQuotaStatus{
		Hard: corev1.ResourceList{resourceName: resource.MustParse(hard)}, Used: corev1.ResourceList{resourceName: resource.MustParse(used)},
	}}
}

func TestQuotaRefusesWhenItIsUsedUp(t *testing.T) {
	const machines = eligibility.MachineCount
	for name, c := range map[string]struct {
		quotas []corev1.ResourceQuota
		want   string
	}{
		"none":            {nil, ""},
		"of other things": {[]corev1.ResourceQuota{quota("a", "count/pods", "3", "3")}, ""},
		"room":            {[]corev1.ResourceQuota{quota("a", machines, "2", "3")}, ""},
		"not counted yet": {[]corev1.ResourceQuota{{Status: corev1.ResourceQuotaStatus{Hard: corev1.ResourceList{machines: resource.MustParse("3")}}}}, ""},
		"used up": {
			[]corev1.ResourceQuota{quota("a", machines, "3", "3")},
			"ResourceQuota a allows 3 count/machines.cluster.x-k8s.io and 3 are used; raise spec.hard, or remove Machines",
		},
		"none allowed": {
			[]corev1.ResourceQuota{quota("a", machines, "0", "0")},
			"ResourceQuota a allows 0 count/machines.cluster.x-k8s.io and 0 are used; raise spec.hard, or remove Machines",
		},
		"lowered, and one of several": {
			[]corev1.ResourceQuota{quota("b", machines, "5", "3"), quota("c", machines, "5", "9"), quota("a", machines, "5", "5")},
			"ResourceQuota a allows 5 count/machines.cluster.x-k8s.io and 5 are used; " +
				"ResourceQuota b allows 3 count/machines.cluster.x-k8s.io and 5 are used; raise spec.hard, or remove Machines",
		},
	} {
		t.Run(name, func(t *testing.T) {
			refusal := eligibility.Quota(c.quotas, "group")
			if c.want == "" {
				require.Nil(t, refusal)
				return
			}
			require.Equal(t, eligibility.Refusal{NodeGroup: "group", Reason: eligibility.QuotaExceeded, Message: c.want}, *refusal)
		})
	}
}

func FuzzSizes(f *testing.F) {
	for _, text := range []string{"0", "10", "-1", "1.5", "1e3", "", " 1", "2147483648", "x", "+1", "0x1"} {
		f.Add(text, "5")
		f.Add("5", text)
	}
	f.Fuzz(func(t *testing.T, least, most string) {
		md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			clusterv1.AutoscalerMinSizeAnnotation: least, clusterv1.AutoscalerMaxSizeAnnotation: most,
		}}, Spec: clusterv1.MachineDeploymentSpec{Replicas: new(int32(1))}}
		group := eligibility.Of(md, &clusterv1.Cluster{})
		if group.Min < 0 || group.Max != nil && (*group.Max < 0 || group.Min > *group.Max && group.SizesUsable()) {
			t.Errorf("%q and %q became %d and %v", least, most, group.Min, group.Max)
		}
	})
}
