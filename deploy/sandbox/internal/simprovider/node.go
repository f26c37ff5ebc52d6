package simprovider

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/netip"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// A Node with this label has a living kubelet: kwok renews its lease and runs its pods. It must be
// a label, because only for labels does the API server notify kwok that a Node has left its
// selection.
const (
	KubeletLabel      = "kwok.x-k8s.io/node"
	KubeletLabelValue = "fake"
)

// defaultPods is the kubelet's default for the maximum number of pods.
const defaultPods = "110"

// nodeCapacity returns the capacity that the machine's kubelet reports.
func nodeCapacity(spec *simv1.SimMachineSpec) corev1.ResourceList {
	capacity := spec.NodeCapacity.DeepCopy()
	if capacity == nil {
		capacity = spec.Capacity.DeepCopy()
	}
	if capacity == nil {
		capacity = corev1.ResourceList{}
	}
	if _, ok := capacity[corev1.ResourcePods]; !ok {
		capacity[corev1.ResourcePods] = resource.MustParse(defaultPods)
	}
	return capacity
}

// nodeAllocatable returns the capacity less what the kubelet reserves: the configured reservations,
// and its default hard eviction thresholds of 100Mi of memory and a tenth of the node's file
// system.
func nodeAllocatable(spec *simv1.SimMachineSpec) corev1.ResourceList {
	allocatable := nodeCapacity(spec)
	withhold := func(name corev1.ResourceName, quantity resource.Quantity) {
		if have, ok := allocatable[name]; ok {
			have.Sub(quantity)
			if have.Sign() < 0 {
				have = resource.Quantity{Format: have.Format}
			}
			allocatable[name] = have
		}
	}
	for name, quantity := range spec.KubeReserved {
		withhold(name, quantity)
	}
	withhold(corev1.ResourceMemory, resource.MustParse("100Mi"))
	if disk, ok := nodeCapacity(spec)[corev1.ResourceEphemeralStorage]; ok {
		withhold(corev1.ResourceEphemeralStorage, *resource.NewQuantity(disk.Value()/10, resource.BinarySI))
	}
	return allocatable
}

// nodeAddress derives a machine's address from the block reserved for benchmarks, so that it cannot
// collide with a real one.
func nodeAddress(name string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	sum := h.Sum32()
	return netip.AddrFrom4([4]byte{198, 18 + byte(sum>>16&1), byte(sum >> 8), byte(sum)}).String()
}

// newNode returns the Node that the machine's kubelet registers.
func newNode(m *simv1.SimMachine, name, zone string) *corev1.Node {
	labels := map[string]string{
		corev1.LabelHostname:   name,
		corev1.LabelArchStable: m.Spec.NodeInfo.Architecture,
		corev1.LabelOSStable:   m.Spec.NodeInfo.OperatingSystem,
		KubeletLabel:           KubeletLabelValue,
	}
	if m.Spec.InstanceType != "" {
		labels[corev1.LabelInstanceTypeStable] = m.Spec.InstanceType
	}
	if zone != "" {
		labels[corev1.LabelTopologyZone] = zone
	}
	if m.Spec.Region != "" {
		labels[corev1.LabelTopologyRegion] = m.Spec.Region
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: lo.Assign(m.Spec.NodeLabels, labels)},
		Spec:       corev1.NodeSpec{ProviderID: m.Spec.ProviderID, Taints: m.Spec.NodeTaints},
	}
}

// nodeStatus returns the status that the machine's kubelet reports once it is running.
func nodeStatus(m *simv1.SimMachine, name, version string, now time.Time) corev1.NodeStatus {
	healthy := func(kind corev1.NodeConditionType, status corev1.ConditionStatus, reason, message string) corev1.NodeCondition {
		return corev1.NodeCondition{
			Type: kind, Status: status, Reason: reason, Message: message,
			LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(now),
		}
	}
	return corev1.NodeStatus{
		Capacity:    nodeCapacity(&m.Spec),
		Allocatable: nodeAllocatable(&m.Spec),
		Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: nodeAddress(name)},
			{Type: corev1.NodeHostName, Address: name},
		},
		Conditions: []corev1.NodeCondition{
			healthy(corev1.NodeReady, corev1.ConditionTrue, "KubeletReady", "the simulated kubelet is ready"),
			healthy(corev1.NodeMemoryPressure, corev1.ConditionFalse, "KubeletHasSufficientMemory", "memory is plentiful"),
			healthy(corev1.NodeDiskPressure, corev1.ConditionFalse, "KubeletHasNoDiskPressure", "disk is plentiful"),
			healthy(corev1.NodePIDPressure, corev1.ConditionFalse, "KubeletHasSufficientPID", "process ids are plentiful"),
		},
		NodeInfo: corev1.NodeSystemInfo{
			Architecture:            m.Spec.NodeInfo.Architecture,
			OperatingSystem:         m.Spec.NodeInfo.OperatingSystem,
			KubeletVersion:          version,
			ContainerRuntimeVersion: "sim://1.0.0",
			KernelVersion:           "simulated",
			OSImage:                 "Simulated",
			MachineID:               string(m.UID),
			SystemUUID:              string(m.UID),
			BootID:                  string(m.UID),
		},
	}
}

// registerNode registers the Node and reports its status, as a kubelet does at its start: it takes
// over an existing Node of that name. The patches carry no resource version, so that they do not
// conflict with other writers.
func registerNode(ctx context.Context, workload client.Client, node *corev1.Node, status corev1.NodeStatus) error {
	if err := workload.Create(ctx, node.DeepCopy()); err != nil {
		if !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("registering Node %s: %w", node.Name, err)
		}
		patch := map[string]any{
			"metadata": map[string]any{"labels": node.Labels},
			"spec":     map[string]any{"providerID": node.Spec.ProviderID},
		}
		if err := patchNode(ctx, workload, node.Name, patch); err != nil {
			return fmt.Errorf("taking over Node %s: %w", node.Name, err)
		}
	}
	if err := patchNodeStatus(ctx, workload, node.Name, status); err != nil {
		return fmt.Errorf("reporting the status of Node %s: %w", node.Name, err)
	}
	return nil
}

// silenceNode simulates the shutdown of a machine: its kubelet reports that it is not ready and
// then stops reporting. A missing Node is not an error.
func silenceNode(ctx context.Context, workload client.Client, name string, now time.Time) error {
	// Detach kwok first, or it could react to the second patch.
	patch := map[string]any{"metadata": map[string]any{"labels": map[string]any{KubeletLabel: nil}}}
	if err := patchNode(ctx, workload, name, patch); err != nil {
		return client.IgnoreNotFound(err)
	}
	return client.IgnoreNotFound(patchNodeStatus(ctx, workload, name, corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionFalse,
			Reason: "KubeletNotReady", Message: "node is shutting down",
			LastHeartbeatTime: metav1.NewTime(now), LastTransitionTime: metav1.NewTime(now),
		}},
	}))
}

func patchNode(ctx context.Context, workload client.Client, name string, patch map[string]any) error {
	data, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	return workload.Patch(ctx, node, client.RawPatch(types.StrategicMergePatchType, data))
}

func patchNodeStatus(ctx context.Context, workload client.Client, name string, status corev1.NodeStatus) error {
	// Conditions merge by type. Zero values are omitted, so that only given fields are written.
	fields := map[string]any{"conditions": status.Conditions}
	if status.Capacity != nil {
		fields["capacity"] = status.Capacity
		fields["allocatable"] = status.Allocatable
		fields["addresses"] = status.Addresses
		fields["nodeInfo"] = status.NodeInfo
	}
	data, err := json.Marshal(map[string]any{"status": fields})
	if err != nil {
		return err
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	return workload.Status().Patch(ctx, node, client.RawPatch(types.StrategicMergePatchType, data))
}
