package sandbox

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

const (
	// ClusterClass is the name of the ClusterClass, in the Cluster's namespace, of a Cluster with
	// [Options.TopologyVersion].
	ClusterClass = "sandbox"
	// WorkerClass is the name of its only class of workers, and of the SimMachineTemplate of their
	// machines. The topology names the MachineDeployments.
	WorkerClass = "worker"
)

// clusterClass returns the ClusterClass and its templates.
func clusterClass(endpoint clusterv1.APIEndpoint) []client.Object {
	metadata := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: ClusterNamespace, Name: name} }
	template := func(kind, name string) clusterv1.ClusterClassTemplateReference {
		return clusterv1.ClusterClassTemplateReference{APIVersion: simv1.GroupVersion.String(), Kind: kind, Name: name}
	}
	return []client.Object{
		&simv1.SimClusterTemplate{ObjectMeta: metadata(ClusterClass)},
		&simv1.SimControlPlaneTemplate{
			ObjectMeta: metadata(ClusterClass),
			Spec: simv1.SimControlPlaneTemplateSpec{Template: simv1.SimControlPlaneTemplateResource{
				Spec: simv1.SimControlPlaneTemplateResourceSpec{ControlPlaneEndpoint: endpoint},
			}},
		},
		&simv1.SimBootstrapConfigTemplate{ObjectMeta: metadata(WorkerClass)},
		&simv1.SimMachineTemplate{
			ObjectMeta: metadata(WorkerClass),
			Spec: simv1.SimMachineTemplateSpec{Template: simv1.SimMachineTemplateResource{Spec: simv1.SimMachineSpec{
				InstanceType: WorkerClass,
				Capacity: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("4Gi"), corev1.ResourcePods: resource.MustParse("110"),
				},
			}}},
		},
		&clusterv1.ClusterClass{
			ObjectMeta: metadata(ClusterClass),
			Spec: clusterv1.ClusterClassSpec{
				Infrastructure: clusterv1.InfrastructureClass{TemplateRef: template("SimClusterTemplate", ClusterClass)},
				ControlPlane:   clusterv1.ControlPlaneClass{TemplateRef: template("SimControlPlaneTemplate", ClusterClass)},
				Workers: clusterv1.WorkersClass{MachineDeployments: []clusterv1.MachineDeploymentClass{{
					Class:  WorkerClass,
					Naming: clusterv1.MachineDeploymentClassNamingSpec{Template: "{{ .machineDeployment.topologyName }}"},
					Bootstrap: clusterv1.MachineDeploymentClassBootstrapTemplate{
						TemplateRef: template("SimBootstrapConfigTemplate", WorkerClass),
					},
					Infrastructure: clusterv1.MachineDeploymentClassInfrastructureTemplate{
						TemplateRef: template("SimMachineTemplate", WorkerClass),
					},
				}}},
			},
		},
	}
}
