package invariants

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// State is one reading of a hub and a spoke. The reading is not atomic: its parts may be from
// different moments.
type State struct {
	// Objects of one Cluster in the hub.
	Deployments []clusterv1.MachineDeployment
	Machines    []clusterv1.Machine
	Claims      []agentv1.MachineClaim
	// Objects in the spoke.
	NodeClaims []karpenterv1.NodeClaim
	Nodes      []corev1.Node
}

// Part is the part of a Cluster that belongs to one NodePool with a node group and an instance type
// of its own.
type Part struct {
	NodeGroup, NodePool, InstanceType string
}

// Of returns what belongs to the part.
func (s State) Of(p Part) State {
	return State{
		Deployments: lo.Filter(s.Deployments, func(md clusterv1.MachineDeployment, _ int) bool { return md.Name == p.NodeGroup }),
		Machines: lo.Filter(s.Machines, func(m clusterv1.Machine, _ int) bool {
			return m.Labels[clusterv1.MachineDeploymentNameLabel] == p.NodeGroup
		}),
		Claims: lo.Filter(s.Claims, func(c agentv1.MachineClaim, _ int) bool { return c.Spec.NodeGroup == p.NodeGroup }),
		NodeClaims: lo.Filter(s.NodeClaims, func(n karpenterv1.NodeClaim, _ int) bool {
			return n.Labels[karpenterv1.NodePoolLabelKey] == p.NodePool
		}),
		Nodes: lo.Filter(s.Nodes, func(n corev1.Node, _ int) bool { return n.Labels[corev1.LabelInstanceTypeStable] == p.InstanceType }),
	}
}

// Read reads everything that belongs to a Cluster.
func Read(ctx context.Context, hub, spoke client.Reader, cluster types.NamespacedName) (State, error) {
	var (
		state       State
		deployments clusterv1.MachineDeploymentList
		machines    clusterv1.MachineList
		claims      agentv1.MachineClaimList
		nodeClaims  karpenterv1.NodeClaimList
		nodes       corev1.NodeList
	)
	for _, list := range []client.ObjectList{&deployments, &machines, &claims} {
		if err := hub.List(ctx, list, client.InNamespace(cluster.Namespace)); err != nil {
			return State{}, fmt.Errorf("reading the hub: %w", err)
		}
	}
	for _, list := range []client.ObjectList{&nodeClaims, &nodes} {
		if err := spoke.List(ctx, list); err != nil {
			return State{}, fmt.Errorf("reading the spoke: %w", err)
		}
	}
	for i := range deployments.Items {
		if deployments.Items[i].Spec.ClusterName == cluster.Name {
			state.Deployments = append(state.Deployments, deployments.Items[i])
		}
	}
	for i := range machines.Items {
		if machines.Items[i].Spec.ClusterName == cluster.Name {
			state.Machines = append(state.Machines, machines.Items[i])
		}
	}
	for i := range claims.Items {
		if claims.Items[i].Spec.ClusterName == cluster.Name {
			state.Claims = append(state.Claims, claims.Items[i])
		}
	}
	state.NodeClaims, state.Nodes = nodeClaims.Items, nodes.Items
	return state, nil
}

// ledger is the checked part of the agent's annotation of a MachineDeployment.
type ledger struct {
	Floor        int32                         `json:"floor"`
	LastReplicas int32                         `json:"lastReplicas"`
	Pending      map[string]json.RawMessage    `json:"pending"`
	Releasing    map[types.UID]json.RawMessage `json:"releasing"`
}

// ledgerOf returns nil, nil if there is no ledger.
func ledgerOf(md *clusterv1.MachineDeployment) (*ledger, error) {
	text, ok := md.Annotations[agentv1.LedgerAnnotation]
	if !ok {
		return nil, nil
	}
	var l ledger
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return nil, err
	}
	return &l, nil
}

// Floor returns the number of a MachineDeployment's machines that are the user's: the agent's floor
// with users' later changes, and at least the min size. Without a ledger all of them are.
func Floor(md *clusterv1.MachineDeployment) (int32, error) {
	var replicas int32
	if md.Spec.Replicas != nil {
		replicas = *md.Spec.Replicas
	}
	l, err := ledgerOf(md)
	if err != nil {
		return 0, fmt.Errorf("the ledger is not readable: %w", err)
	}
	if l == nil {
		return replicas, nil
	}
	return max(l.Floor+replicas-l.LastReplicas, size(md, clusterv1.AutoscalerMinSizeAnnotation, 0), 0), nil
}

// size parses a size annotation. An invalid one counts as absent.
func size(md *clusterv1.MachineDeployment, key string, absent int32) int32 {
	n, err := strconv.ParseInt(md.Annotations[key], 10, 32)
	if err != nil || n < 0 {
		return absent
	}
	return int32(n)
}

func live(c *agentv1.MachineClaim) bool { return c.CurrentPhase() != agentv1.PhaseEnded }
