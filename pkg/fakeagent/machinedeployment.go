package fakeagent

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// These are annotations of a MachineDeployment that describe a node group.
const (
	annotationMinSize = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"
	annotationMaxSize = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"
	// annotationPrice takes precedence over the price of [annotationCapacity].
	annotationPrice    = "cluster.x-k8s.io/machine-current-price"
	annotationCapacity = "capacity.cluster-autoscaler.kubernetes.io/"
	// annotationHolder names the only holder whose claims the group takes.
	annotationHolder = "agent.karpenter.cluster.x-k8s.io/holder"
)

// capacityResources maps the suffix of an annotation, after [annotationCapacity], to its resource.
var capacityResources = map[string]corev1.ResourceName{
	"cpu":            corev1.ResourceCPU,
	"memory":         corev1.ResourceMemory,
	"maxPods":        corev1.ResourcePods,
	"ephemeral-disk": corev1.ResourceEphemeralStorage,
}

// maxProblemValue is how many bytes of an invalid value are quoted in a problem.
const maxProblemValue = 128

// MachineDeployment is a node group as a user writes it.
type MachineDeployment struct {
	// Name is the name of the MachineDeployment. REQUIRED.
	Name string
	// Cluster is the Cluster that it belongs to. Nil means [DefaultCluster].
	Cluster *agentv1alpha1.ClusterRef
	// Labels are the labels of the MachineDeployment itself.
	Labels map[string]string
	// Annotations may contain the min and max size, the price, the holder, and the capacity
	// annotations cpu, memory, maxPods, ephemeral-disk, labels and taints. An unusable value
	// appears in the node group's problems and is otherwise ignored.
	Annotations map[string]string
	// Replicas is the number of replicas. Nil means none for a new group, and no change for an
	// existing one.
	Replicas *int32
	// FailureDomain is that of the machine template.
	FailureDomain string
	// Version is the Kubernetes version in the machine template.
	Version string
}

// AddMachineDeployment adds a node group as a user writes it, and returns its ID. It panics if the
// group exists.
func (a *Agent) AddMachineDeployment(deployment MachineDeployment) string {
	return a.AddNodeGroup(deployment.describe())
}

// UpdateMachineDeployment replaces the description of an existing node group. It panics if there is
// no such group.
func (a *Agent) UpdateMachineDeployment(deployment MachineDeployment) {
	described := deployment.describe()
	id := described.GetCluster().GetNamespace() + "/" + described.GetName()
	a.UpdateNodeGroup(id, func(group *agentv1alpha1.NodeGroup) {
		group.Labels = described.GetLabels()
		group.InstanceType = described.GetInstanceType()
		group.Capacity = described.GetCapacity()
		group.NodeLabels = described.GetNodeLabels()
		group.Taints = described.GetTaints()
		group.Zone = described.GetZone()
		group.CapacityType = described.GetCapacityType()
		group.MinSize = described.GetMinSize()
		group.MaxSize = described.MaxSize
		group.KubernetesVersion = described.GetKubernetesVersion()
		group.Problems = described.GetProblems()
		group.Price = described.GetPrice()
		group.Sources = described.GetSources()
		group.Architecture, group.Holder = described.GetArchitecture(), described.GetHolder()
		invalid := agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID
		if described.GetAvailability() != nil || group.GetAvailability().GetReason() == invalid {
			group.Availability = described.GetAvailability() // else what blocks it has nothing to do with its description
		}
		if deployment.Replicas != nil {
			group.Replicas = *deployment.Replicas
		}
	})
}

func (d MachineDeployment) describe() *agentv1alpha1.NodeGroup {
	group := &agentv1alpha1.NodeGroup{
		Name:              d.Name,
		Cluster:           d.Cluster,
		Labels:            d.Labels,
		InstanceType:      d.Name,
		Capacity:          map[string]string{},
		NodeLabels:        map[string]string{},
		Architecture:      "amd64",
		OperatingSystem:   "linux",
		Zone:              d.FailureDomain,
		CapacityType:      agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND,
		Replicas:          ptr.Deref(d.Replicas, 0),
		KubernetesVersion: d.Version,
		Sources:           map[string]*agentv1alpha1.ValueSource{},
		Holder:            d.Annotations[annotationHolder],
	}
	if group.GetCluster() == nil {
		group.Cluster = DefaultCluster()
	}
	problem := func(key string, err error) {
		value := d.Annotations[key]
		if len(value) > maxProblemValue {
			value = strings.ToValidUTF8(value[:maxProblemValue], "")
		}
		group.Problems = append(group.Problems, &agentv1alpha1.Problem{
			Field:   fmt.Sprintf("metadata.annotations[%s]", key),
			Value:   value,
			Message: err.Error(),
		})
	}
	for _, key := range slices.Sorted(maps.Keys(d.Annotations)) {
		var err error
		value := d.Annotations[key]
		name, isCapacity := strings.CutPrefix(key, annotationCapacity)
		resourceName, isResource := capacityResources[name]
		switch {
		case key == annotationMinSize:
			group.MinSize, err = size(value)
		case key == annotationMaxSize:
			var limit int32
			if limit, err = size(value); err == nil {
				group.MaxSize = &limit
			} else {
				// Assuming no limit would be an expensive guess.
				group.Availability = &agentv1alpha1.Availability{
					Reason:  agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID,
					Message: key + ": " + err.Error(),
				}
			}
		case key == annotationPrice, isCapacity && name == "price":
			var perHour float64
			if perHour, err = strconv.ParseFloat(strings.TrimSpace(value), 64); err != nil || !(perHour >= 0) || math.IsInf(perHour, 1) {
				err = errors.New("is not a price; write a number, 0 or more, for example 0.096")
				break
			}
			if group.GetPrice() != nil && group.GetPrice().GetPerHour() != perHour {
				problem(annotationCapacity+"price", fmt.Errorf("differs from the price of %s, which takes precedence; remove one of the two", annotationPrice))
			}
			group.Price = &agentv1alpha1.Price{PerHour: perHour}
			group.Sources["price"] = &agentv1alpha1.ValueSource{Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, Detail: key}
		case isCapacity && isResource:
			quantity, parseErr := wire.Quantity(value)
			if err = parseErr; err == nil {
				field := string(resourceName)
				group.Capacity[field] = quantity.String()
				group.Sources["capacity."+field] = &agentv1alpha1.ValueSource{
					Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, Detail: key,
				}
			}
		case isCapacity && name == "labels":
			err = labelNodes(group, value)
		case isCapacity && name == "taints":
			group.Taints, err = parseTaints(value)
		}
		if err != nil {
			problem(key, err)
		}
	}
	if group.GetPrice() == nil {
		estimatePrice(group)
	}
	return group
}

func size(value string) (int32, error) {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%.64q is not a size: write a number of machines, 0 or more", value)
	}
	return int32(n), nil
}

// labelNodes parses `key=value,…`, and applies the well-known labels to the group.
func labelNodes(group *agentv1alpha1.NodeGroup, value string) error {
	for pair := range strings.SplitSeq(value, ",") {
		key, label, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return fmt.Errorf("%.64q is not a label: write key=value", pair)
		}
		group.NodeLabels[key] = label
		switch key {
		case corev1.LabelInstanceTypeStable:
			group.InstanceType = label
		case corev1.LabelArchStable:
			group.Architecture = label
		case corev1.LabelTopologyZone:
			group.Zone = label
		case wire.CapacityTypeLabel:
			capacityType, err := wire.ParseCapacityType(label)
			if err != nil {
				return err
			}
			group.CapacityType = capacityType
		}
	}
	return nil
}

// parseTaints parses `key=value:effect,…`.
func parseTaints(value string) ([]*agentv1alpha1.Taint, error) {
	var taints []*agentv1alpha1.Taint
	for text := range strings.SplitSeq(value, ",") {
		rest, effect, _ := strings.Cut(text, ":")
		key, taintValue, _ := strings.Cut(rest, "=")
		taint := &agentv1alpha1.Taint{Key: key, Value: taintValue, Effect: effect}
		if _, err := wire.Taint(taint); err != nil {
			return nil, fmt.Errorf("%.64q is not a taint: write key=value:effect: %w", text, err)
		}
		taints = append(taints, taint)
	}
	return taints, nil
}
