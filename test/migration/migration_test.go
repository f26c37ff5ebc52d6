package migration

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

func TestNothingOfAnAdoptionIsLeftOnAStrippedObject(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Labels: map[string]string{
			shimv1.AdoptedLabel: "true", shimv1.ReservationLabel: "r", karpenterv1.NodeDoNotSyncTaintsLabelKey: "true", "team": "red",
			corev1.LabelInstanceTypeStable: "large", karpenterv1.NodePoolLabelKey: "pool", shimv1.Group + "/clusterapinodeclass": "default",
		},
		Annotations: map[string]string{
			shimv1.NodeGroupAnnotation: "default/a", karpenterv1.DoNotDisruptAnnotationKey: "true", "example.com/own": "x",
		},
	}}
	strip(node)
	require.Equal(t, map[string]string{
		"team": "red", corev1.LabelInstanceTypeStable: "", karpenterv1.NodePoolLabelKey: "pool", shimv1.Group + "/clusterapinodeclass": "default",
	}, node.Labels)
	require.Equal(t, map[string]string{"example.com/own": "x"}, node.Annotations)
}
