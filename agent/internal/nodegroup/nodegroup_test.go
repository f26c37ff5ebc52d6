package nodegroup_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
)

func deployment() *clusterv1.MachineDeployment {
	return &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "small", Labels: map[string]string{v1alpha1.MemberLabel: ""}},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: "spoke", Replicas: ptr.To[int32](1),
			Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
				Version: "v1.36.3", InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: "g", Kind: "K", Name: "t1"},
			}},
		},
	}
}

func of(md *clusterv1.MachineDeployment) nodegroup.NodeGroup {
	return nodegroup.Of(md, nodegroup.Sources{Cluster: &clusterv1.Cluster{}})
}

func TestRevisionChangesWithWhatRollsMachinesOut(t *testing.T) {
	before := of(deployment()).TemplateRevision
	for name, change := range map[string]func(*clusterv1.MachineDeployment){
		"version":        func(md *clusterv1.MachineDeployment) { md.Spec.Template.Spec.Version = "v1.37.0" },
		"template":       func(md *clusterv1.MachineDeployment) { md.Spec.Template.Spec.InfrastructureRef.Name = "t2" },
		"bootstrap":      func(md *clusterv1.MachineDeployment) { md.Spec.Template.Spec.Bootstrap.DataSecretName = new("x") },
		"failure domain": func(md *clusterv1.MachineDeployment) { md.Spec.Template.Spec.FailureDomain = "a" },
		"rollout after":  func(md *clusterv1.MachineDeployment) { md.Spec.Rollout.After = metav1.NewTime(time.Unix(1, 0)) },
	} {
		md := deployment()
		change(md)
		require.NotEqual(t, before, of(md).TemplateRevision, name)
	}
	md := deployment()
	md.Spec.Replicas = ptr.To[int32](5)
	md.Spec.Template.Labels = map[string]string{"a": "b"}
	md.Spec.Template.Spec.Taints = []clusterv1.MachineTaint{{Key: "k", Effect: "NoSchedule"}}
	require.Equal(t, before, of(md).TemplateRevision, "changes in place are no rollout")
}

func TestProblemsOfEverySourceAreTogether(t *testing.T) {
	md := deployment()
	md.Annotations = map[string]string{
		capacity.CPUAnnotation: "x", capacity.MemoryAnnotation: "1Gi",
		"cluster.x-k8s.io/machine-current-price": "free", clusterv1.AutoscalerMinSizeAnnotation: "-1",
	}
	var fields []string
	for _, problem := range of(md).Problems {
		fields = append(fields, problem.Field)
	}
	require.ElementsMatch(t, []string{
		capacity.AnnotationField(capacity.CPUAnnotation), capacity.AnnotationField("cluster.x-k8s.io/machine-current-price"),
		capacity.AnnotationField(clusterv1.AutoscalerMinSizeAnnotation),
	}, fields)
}

func TestIDs(t *testing.T) {
	key, err := nodegroup.ParseID("fleet/small")
	require.NoError(t, err)
	require.Equal(t, of(deployment()).Key, key)
	require.Equal(t, "fleet/small", of(deployment()).ID())
	for _, bad := range []string{"", "fleet", "/small", "fleet/", "a/b/c", strings.Repeat("n", 64) + "/small", "fleet/" + strings.Repeat("m", 254)} {
		_, err := nodegroup.ParseID(bad)
		require.Error(t, err, bad)
	}
}

func TestTheFloorIsWhatTheLedgerSays(t *testing.T) {
	for text, want := range map[string]int32{
		"":                                     5, // there is no claim yet
		`{"v":1,"floor":2,"lastReplicas":5}`:   2,
		`{"v":1,"floor":1,"min":3}`:            3,
		`{"v":99,"floor":2}`:                   0,
		`{"v":1,"floor":2,"of":"other/group"}`: 0,
	} {
		md := deployment()
		md.Spec.Replicas = new(int32(5))
		if text != "" {
			metav1.SetMetaDataAnnotation(&md.ObjectMeta, v1alpha1.LedgerAnnotation, text)
		}
		require.Equal(t, want, of(md).Floor, text)
	}
}
