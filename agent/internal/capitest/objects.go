package capitest

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// NewCluster returns a Cluster whose control plane is managed elsewhere.
func NewCluster(namespace, name string) *clusterv1.Cluster {
	return &clusterv1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: clusterv1.ClusterSpec{
			ControlPlaneRef: clusterv1.ContractVersionedObjectReference{
				APIGroup: "controlplane.cluster.x-k8s.io", Kind: "TestControlPlane", Name: name,
			},
		},
	}
}

// NewMachineDeployment returns a MachineDeployment that has opted in, with the strategy OnDelete.
// All fields that Cluster API's webhooks would default are set.
func NewMachineDeployment(
	namespace, name, cluster string, replicas int32, options ...func(*clusterv1.MachineDeployment),
) *clusterv1.MachineDeployment {
	labels := map[string]string{
		clusterv1.ClusterNameLabel:           cluster,
		clusterv1.MachineDeploymentNameLabel: name,
	}
	md := &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name,
			Labels: map[string]string{clusterv1.ClusterNameLabel: cluster, v1alpha1.MemberLabel: ""},
		},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: cluster,
			Replicas:    new(replicas),
			Rollout: clusterv1.MachineDeploymentRolloutSpec{
				Strategy: clusterv1.MachineDeploymentRolloutStrategy{Type: clusterv1.OnDeleteMachineDeploymentStrategyType},
			},
			Selector: metav1.LabelSelector{MatchLabels: labels},
			Template: clusterv1.MachineTemplateSpec{
				ObjectMeta: clusterv1.ObjectMeta{Labels: labels},
				Spec: clusterv1.MachineSpec{
					ClusterName: cluster,
					Version:     "v1.36.3",
					Bootstrap:   clusterv1.Bootstrap{DataSecretName: new("bootstrap")},
					InfrastructureRef: clusterv1.ContractVersionedObjectReference{
						APIGroup: InfrastructureGroup, Kind: InfrastructureTemplateKind, Name: name,
					},
				},
			},
		},
	}
	for _, option := range options {
		option(md)
	}
	return md
}

// RollingUpdate makes Cluster API replace outdated Machines by itself, with a surge of one Machine.
func RollingUpdate(md *clusterv1.MachineDeployment) {
	md.Spec.Rollout.Strategy = clusterv1.MachineDeploymentRolloutStrategy{
		Type: clusterv1.RollingUpdateMachineDeploymentStrategyType,
		RollingUpdate: clusterv1.MachineDeploymentRolloutStrategyRollingUpdate{
			MaxSurge: new(intstr.FromInt32(1)), MaxUnavailable: new(intstr.FromInt32(0)),
		},
	}
}

// Annotated sets an annotation on the MachineDeployment itself.
func Annotated(key, value string) func(*clusterv1.MachineDeployment) {
	return func(md *clusterv1.MachineDeployment) {
		if md.Annotations == nil {
			md.Annotations = map[string]string{}
		}
		md.Annotations[key] = value
	}
}

// Sized sets the annotations for the min and max size.
func Sized(minSize, maxSize string) func(*clusterv1.MachineDeployment) {
	return func(md *clusterv1.MachineDeployment) {
		Annotated(clusterv1.AutoscalerMinSizeAnnotation, minSize)(md)
		Annotated(clusterv1.AutoscalerMaxSizeAnnotation, maxSize)(md)
	}
}

// Create creates objects, and fails the test if one cannot be created.
func (p *ControlPlane) Create(tb testing.TB, objects ...client.Object) {
	tb.Helper()
	for _, object := range objects {
		if err := p.Client.Create(context.Background(), object); err != nil {
			tb.Fatalf("creating %T %s: %v", object, object.GetName(), err)
		}
	}
}

// Machines returns the current Machines of a MachineDeployment, including those being deleted, in
// the order of their names.
func (p *ControlPlane) Machines(tb testing.TB, namespace, deployment string) []clusterv1.Machine {
	tb.Helper()
	machines := &clusterv1.MachineList{}
	if err := p.Client.List(context.Background(), machines, client.InNamespace(namespace),
		client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: deployment}); err != nil {
		tb.Fatalf("listing machines of %s: %v", deployment, err)
	}
	return machines.Items
}

// NewInfrastructureTemplate returns the infrastructure template that a MachineDeployment of that
// name refers to, with the given status. A nil status is omitted.
func NewInfrastructureTemplate(namespace, name string, status map[string]any) *unstructured.Unstructured {
	template := &unstructured.Unstructured{Object: map[string]any{}}
	template.SetGroupVersionKind(schema.GroupVersionKind{
		Group: InfrastructureGroup, Version: InfrastructureVersion, Kind: InfrastructureTemplateKind,
	})
	template.SetNamespace(namespace)
	template.SetName(name)
	if status != nil {
		template.Object["status"] = status
	}
	return template
}

// SetStatus writes the status of an existing object.
func (p *ControlPlane) SetStatus(tb testing.TB, object client.Object) {
	tb.Helper()
	if err := p.Client.Status().Update(context.Background(), object); err != nil {
		tb.Fatalf("writing the status of %T %s: %v", object, object.GetName(), err)
	}
}
