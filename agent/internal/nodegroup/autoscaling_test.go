package nodegroup_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
)

func TestOptionsOfTheClusterAutoscaler(t *testing.T) {
	md := deployment()
	md.Annotations = map[string]string{
		v1alpha1.HolderAnnotation:                v1alpha1.ClusterAutoscaler,
		nodegroup.UtilizationThresholdAnnotation: "0.3",
		nodegroup.GPUThresholdAnnotation:         "2",
		nodegroup.UnneededTimeAnnotation:         "90S", // it is read in lower case
		nodegroup.UnreadyTimeAnnotation:          "soon",
		v1alpha1.MaxNodeProvisionTimeAnnotation:  "20m",
	}
	g := of(md)
	require.InDelta(t, 0.3, *g.Autoscaling.UtilizationThreshold, 0)
	require.Equal(t, 90*time.Second, *g.Autoscaling.UnneededTime)
	require.Equal(t, 20*time.Minute, *g.Autoscaling.MaxNodeProvisionTime)
	require.Nil(t, g.Autoscaling.GPUUtilizationThreshold)
	require.Nil(t, g.Autoscaling.UnreadyTime)
	var fields []string
	for _, problem := range g.Problems {
		fields = append(fields, problem.Field)
	}
	require.Contains(t, fields, "metadata.annotations["+nodegroup.GPUThresholdAnnotation+"]")
	require.Contains(t, fields, "metadata.annotations["+nodegroup.UnreadyTimeAnnotation+"]")

	for _, unusable := range []string{"0s", "5s", "8760h", "20M", "soon"} {
		md.Annotations[v1alpha1.MaxNodeProvisionTimeAnnotation] = unusable
		require.Nil(t, of(md).Autoscaling.MaxNodeProvisionTime, "claims do not use %s either", unusable)
	}

	delete(md.Annotations, v1alpha1.HolderAnnotation)
	require.True(t, of(md).Autoscaling.Empty(), "they are nothing to Karpenter")
}
