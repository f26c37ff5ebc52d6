// Package nodegroup builds the objects of node groups whose machines are simulated.
package nodegroup

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// Version is the version of the machines' kubelets: that of the sandbox's control planes.
const Version = "v1.36.3"

// Template returns an infrastructure template for machines with 2 CPUs and 4 GiB in zone-a that
// boot, join and terminate without a delay. The caller may change it.
func Template(name string) *simv1.SimMachineTemplate {
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name}}
	template.Spec.Template.Spec = simv1.SimMachineSpec{
		InstanceType: name, Zone: "zone-a",
		Capacity: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("4Gi"), corev1.ResourcePods: resource.MustParse("110"),
		},
	}
	return template
}

// Deployment returns a MachineDeployment of the Cluster without replicas, whose machines have the
// infrastructure template. It has no labels or annotations of its own, so the agent does not manage
// it. The caller may change it.
func Deployment(cluster, name, template string) *clusterv1.MachineDeployment {
	labels := func() map[string]string { return map[string]string{clusterv1.MachineDeploymentNameLabel: name} }
	return &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: name},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: cluster, Replicas: new(int32(0)),
			Selector: metav1.LabelSelector{MatchLabels: labels()},
			Template: clusterv1.MachineTemplateSpec{
				ObjectMeta: clusterv1.ObjectMeta{Labels: labels()},
				Spec: clusterv1.MachineSpec{
					ClusterName: cluster, Version: Version,
					Bootstrap: clusterv1.Bootstrap{DataSecretName: new(sandbox.BootstrapSecret)},
					InfrastructureRef: clusterv1.ContractVersionedObjectReference{
						APIGroup: simv1.GroupVersion.Group, Kind: "SimMachineTemplate", Name: template,
					},
				},
			},
		},
	}
}
