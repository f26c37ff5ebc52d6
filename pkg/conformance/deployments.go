package conformance

import (
	"maps"
	"strconv"
)

// These annotations are set by users of Cluster API.
const (
	minSizeAnnotation    = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"
	maxSizeAnnotation    = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"
	cpuAnnotation        = "capacity.cluster-autoscaler.kubernetes.io/cpu"
	memoryAnnotation     = "capacity.cluster-autoscaler.kubernetes.io/memory"
	maxPodsAnnotation    = "capacity.cluster-autoscaler.kubernetes.io/maxPods"
	nodeLabelsAnnotation = "capacity.cluster-autoscaler.kubernetes.io/labels"
	priceAnnotation      = "cluster.x-k8s.io/machine-current-price"
	otherPriceAnnotation = "capacity.cluster-autoscaler.kubernetes.io/price"
	nodeTaintsAnnotation = "capacity.cluster-autoscaler.kubernetes.io/taints"
	holderAnnotation     = "agent.karpenter.cluster.x-k8s.io/holder"

	unneededTimeAnnotation = "cluster.x-k8s.io/autoscaling-options-scaledownunneededtime"
)

// deployment returns an ordinary MachineDeployment: 4 CPUs, 16 GiB, no size limit.
func deployment(name string, changes ...func(*MachineDeployment)) MachineDeployment {
	d := MachineDeployment{
		Name:        name,
		Labels:      map[string]string{},
		Annotations: map[string]string{cpuAnnotation: "4", memoryAnnotation: "16Gi", maxPodsAnnotation: "110"},
	}
	for _, change := range changes {
		change(&d)
	}
	return d
}

func maxSize(n int) func(*MachineDeployment) { return annotated(maxSizeAnnotation, strconv.Itoa(n)) }

func minSize(n int) func(*MachineDeployment) { return annotated(minSizeAnnotation, strconv.Itoa(n)) }

func annotated(key, value string) func(*MachineDeployment) {
	return func(d *MachineDeployment) { d.Annotations[key] = value }
}

func labelled(labels map[string]string) func(*MachineDeployment) {
	return func(d *MachineDeployment) { maps.Copy(d.Labels, labels) }
}

func replicas(n int32) func(*MachineDeployment) {
	return func(d *MachineDeployment) { d.Replicas = &n }
}

func inZone(zone string) func(*MachineDeployment) {
	return func(d *MachineDeployment) { d.FailureDomain = zone }
}
