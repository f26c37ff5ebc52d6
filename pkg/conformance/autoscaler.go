package conformance

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// provider is the protocol of a stock cluster-autoscaler, called as one.
type provider struct {
	*suite
	externalgrpc.CloudProviderClient
}

// provider skips the rest of a case if the agent does not list the feature. It must not serve the
// protocol then.
func (s *suite) provider() provider {
	s.Helper()
	p := provider{s, externalgrpc.NewCloudProviderClient(s.Autoscaler().Conn())}
	if slices.Contains(s.status(s.Client()).GetFeatures(), features.ClusterAutoscaler) {
		return p
	}
	_, err := p.Refresh(s.bounded(), &externalgrpc.RefreshRequest{})
	p.requireCode(codes.Unimplemented, err)
	s.Skip("the agent does not serve the protocol of a cluster-autoscaler")
	return p
}

var autoscalerCases = []testCase{
	{"autoscaler.callers", autoscalerAlone(), "an identity without the role autoscaler is PERMISSION_DENIED", func(s *suite) {
		p := s.provider()
		_, err := p.Refresh(s.bounded(), &externalgrpc.RefreshRequest{})
		require.NoError(s, err)
		_, err = externalgrpc.NewCloudProviderClient(s.Client().Conn()).Refresh(s.bounded(), &externalgrpc.RefreshRequest{})
		p.requireCode(codes.PermissionDenied, err)
	}},

	{"autoscaler.not-found", autoscalerAlone(), "every call about a group that does not exist is NOT_FOUND", func(s *suite) {
		p := s.provider()
		for method, err := range p.callsAbout(s.Cluster().GetNamespace() + "/missing") {
			require.Equal(s, codes.NotFound, status.Code(err), "%s: %v", method, err)
		}
	}},

	{"autoscaler.not-its-group", autoscaler(), "a group that does not name the holder, and its nodes, do not exist", func(s *suite) {
		p := s.provider()
		id := s.group(deployment("workers"))
		machine := s.running("a-claim", id).GetMachine()
		require.NotContains(s, p.groups(), id)
		for method, err := range p.callsAbout(id) {
			require.Equal(s, codes.NotFound, status.Code(err), "%s: %v", method, err)
		}
		require.Empty(s, p.groupOf(nodeOf(machine)))
		require.EqualValues(s, 1, s.replicas(id))
	}},

	{"autoscaler.sizes", fault(), "the min size is 0, and the max size has room for its own nodes alone", func(s *suite) {
		p := s.provider()
		p.group("batch", minSize(2), maxSize(5), replicas(2))
		id := s.Cluster().GetNamespace() + "/batch"
		require.Zero(s, p.groups()[id].GetMinSize())
		require.EqualValues(s, 3, p.groups()[id].GetMaxSize())
		require.Zero(s, p.target(id))
		require.Empty(s, p.instances(id), "the user's own machines are not shown")
		for _, machine := range s.machinesOnceThereAre(id, 2) {
			require.Empty(s, p.groupOf(nodeOf(machine)))
		}
	}},

	{"autoscaler.increase", fault(), "nodes are claims of its holder, which count once the call returns", func(s *suite) {
		p := s.provider()
		id := p.group("batch")
		p.increase(id, 2)
		require.EqualValues(s, 2, p.target(id))
		claims := p.claims()
		require.Len(s, claims, 2)
		require.Equal(s, map[string]externalgrpc.InstanceStatus_InstanceState{
			p.placeholder(claims[0]): externalgrpc.InstanceStatus_instanceCreating,
			p.placeholder(claims[1]): externalgrpc.InstanceStatus_instanceCreating,
		}, p.instances(id))
		require.Equal(s, id, p.groupOf(&externalgrpc.ExternalGrpcNode{ProviderID: p.placeholder(claims[0])}))

		machine := p.joined(claims[0])
		require.Equal(s, id, p.groupOf(nodeOf(machine)))
		require.NotContains(s, p.instances(id), p.placeholder(claims[0]), "it has its provider ID")
		require.EqualValues(s, 2, p.target(id))
	}},

	{"autoscaler.no-room", fault(), "more nodes than there is room for are RESOURCE_EXHAUSTED, and none of them is made", func(s *suite) {
		p := s.provider()
		id := p.group("batch", maxSize(2))
		p.increase(id, 1)
		_, err := p.NodeGroupIncreaseSize(s.bounded(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: 2})
		p.requireCode(codes.ResourceExhausted, err)
		require.EqualValues(s, 1, p.target(id))
		require.Len(s, p.claims(), 1)
	}},

	{"autoscaler.deltas", fault(), "a delta of the wrong sign is INVALID_ARGUMENT", func(s *suite) {
		p := s.provider()
		id := p.group("batch")
		p.increase(id, 1)
		for _, delta := range []int32{0, -1} {
			_, err := p.NodeGroupIncreaseSize(s.bounded(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: delta})
			p.requireCode(codes.InvalidArgument, err)
		}
		for _, delta := range []int32{0, 1} {
			_, err := p.NodeGroupDecreaseTargetSize(s.bounded(), &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: id, Delta: delta})
			p.requireCode(codes.InvalidArgument, err)
		}
		require.EqualValues(s, 1, p.target(id))
	}},

	{"autoscaler.delete", fault(), "exactly the named nodes are deleted, also if the call is repeated", func(s *suite) {
		p := s.provider()
		id := p.group("batch", replicas(1))
		own := s.machinesOnceThereAre(id, 1)[0]
		p.increase(id, 3)
		kept := map[string]bool{own.GetUid(): true}
		var deleted []*externalgrpc.ExternalGrpcNode
		for i, claim := range p.claims() {
			machine := p.joined(claim)
			if i == 1 {
				kept[machine.GetUid()] = true
			} else {
				deleted = append(deleted, nodeOf(machine))
			}
		}
		for range 2 {
			require.NoError(s, p.deleteNodes(id, deleted...))
			require.EqualValues(s, 1, p.target(id))
		}
		left := s.machinesOnceThereAre(id, 2)
		require.Equal(s, kept, lo.SliceToMap(left, func(m *agentv1alpha1.Machine) (string, bool) { return m.GetUid(), true }))
		s.untilReplicas(id, 2)
		require.EqualValues(s, 1, p.target(id))
	}},

	{"autoscaler.foreign-node", fault(), "a call that also names a node of the user is FAILED_PRECONDITION, and deletes nothing", func(s *suite) {
		p := s.provider()
		id := p.group("batch", replicas(1))
		own := s.machinesOnceThereAre(id, 1)[0]
		p.increase(id, 1)
		machine := p.joined(p.claims()[0])
		p.requireCode(codes.FailedPrecondition, p.deleteNodes(id, nodeOf(machine), nodeOf(own)))
		require.EqualValues(s, 1, p.target(id))
		require.Equal(s, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, p.claims()[0].GetPhase())
	}},

	{"autoscaler.decrease", fault(), "a lower target size gives up nodes that have not joined, and no others", func(s *suite) {
		p := s.provider()
		id := p.group("batch")
		p.increase(id, 2)
		machine := p.joined(p.claims()[0])
		decrease := func() error {
			_, err := p.NodeGroupDecreaseTargetSize(s.bounded(), &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: id, Delta: -1})
			return err
		}
		require.NoError(s, decrease())
		require.EqualValues(s, 1, p.target(id))
		p.requireCode(codes.FailedPrecondition, decrease())
		require.EqualValues(s, 1, p.target(id))
		s.untilReplicas(id, 1)
		require.Equal(s, machine.GetUid(), s.machinesOnceThereAre(id, 1)[0].GetUid())
	}},

	{"autoscaler.template", fault(), "the template is a Node as it would join", func(s *suite) {
		p := s.provider()
		id := p.group("batch", inZone("zone-a"),
			annotated(nodeLabelsAnnotation, "team=blue"), annotated(nodeTaintsAnnotation, "dedicated=batch:NoSchedule"))
		response, err := p.NodeGroupTemplateNodeInfo(s.bounded(), &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: id})
		require.NoError(s, err)
		var node corev1.Node
		require.NoError(s, node.Unmarshal(response.GetNodeBytes()))
		require.Equal(s, "blue", node.Labels["team"])
		require.Equal(s, "zone-a", node.Labels[corev1.LabelTopologyZone])
		require.Equal(s, s.nodeGroup(id).GetInstanceType(), node.Labels[corev1.LabelInstanceTypeStable])
		require.Equal(s, []corev1.Taint{{Key: "dedicated", Value: "batch", Effect: corev1.TaintEffectNoSchedule}}, node.Spec.Taints)
		require.Equal(s, "4", node.Status.Capacity.Cpu().String())
		require.Equal(s, "16Gi", node.Status.Capacity.Memory().String())
		require.Equal(s, "110", node.Status.Capacity.Pods().String())
		require.Positive(s, node.Status.Allocatable.Cpu().Sign())
		require.LessOrEqual(s, node.Status.Allocatable.Memory().Cmp(*node.Status.Capacity.Memory()), 0)
	}},

	{"autoscaler.options", fault(), "annotations replace options of their group alone", func(s *suite) {
		p := s.provider()
		ids := []string{p.group("patient", annotated(unneededTimeAnnotation, "25m")), p.group("ordinary")}
		options := lo.Map(ids, func(id string, _ int) *externalgrpc.NodeGroupAutoscalingOptions {
			response, err := p.NodeGroupGetOptions(s.bounded(), &externalgrpc.NodeGroupAutoscalingOptionsRequest{
				Id: id, Defaults: &externalgrpc.NodeGroupAutoscalingOptions{
					ScaleDownUtilizationThreshold: 0.75, ScaleDownUnneededDuration: durationpb.New(10 * time.Minute),
				},
			})
			require.NoError(s, err)
			return response.GetNodeGroupAutoscalingOptions()
		})
		require.Equal(s, 25*time.Minute, options[0].GetScaleDownUnneededDuration().AsDuration())
		require.InDelta(s, 0.75, options[0].GetScaleDownUtilizationThreshold(), 0)
		if options[1] != nil { // without options, the cluster-autoscaler uses its own
			require.Equal(s, 10*time.Minute, options[1].GetScaleDownUnneededDuration().AsDuration())
		}
	}},
}

func (p provider) requireCode(want codes.Code, err error) {
	p.Helper()
	require.Equal(p, want, status.Code(err), "%v", err)
}

// group creates a node group that names the cluster-autoscaler as its holder, and returns its ID
// once the protocol shows it.
func (p provider) group(name string, changes ...func(*MachineDeployment)) string {
	p.Helper()
	id := p.suite.group(deployment(name, append(changes, annotated(holderAnnotation, otherHolder))...))
	p.eventually("the cluster-autoscaler is shown "+id, func() error {
		if p.groups()[id] == nil {
			return errors.New("it is not")
		}
		return nil
	})
	return id
}

// groups returns all groups by ID.
func (p provider) groups() map[string]*externalgrpc.NodeGroup {
	p.Helper()
	response, err := p.NodeGroups(p.bounded(), &externalgrpc.NodeGroupsRequest{})
	require.NoError(p, err)
	return lo.KeyBy(response.GetNodeGroups(), (*externalgrpc.NodeGroup).GetId)
}

// callsAbout makes every call about a group, and returns the errors by method.
func (p provider) callsAbout(id string) map[string]error {
	p.Helper()
	ctx, errs := p.bounded(), map[string]error{}
	_, errs["NodeGroupTargetSize"] = p.NodeGroupTargetSize(ctx, &externalgrpc.NodeGroupTargetSizeRequest{Id: id})
	_, errs["NodeGroupIncreaseSize"] = p.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: 1})
	_, errs["NodeGroupDecreaseTargetSize"] = p.NodeGroupDecreaseTargetSize(ctx, &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: id, Delta: -1})
	_, errs["NodeGroupNodes"] = p.NodeGroupNodes(ctx, &externalgrpc.NodeGroupNodesRequest{Id: id})
	_, errs["NodeGroupTemplateNodeInfo"] = p.NodeGroupTemplateNodeInfo(ctx, &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: id})
	_, errs["NodeGroupGetOptions"] = p.NodeGroupGetOptions(ctx, &externalgrpc.NodeGroupAutoscalingOptionsRequest{Id: id})
	errs["NodeGroupDeleteNodes"] = p.deleteNodes(id, &externalgrpc.ExternalGrpcNode{ProviderID: "strange://node", Name: "node"})
	return errs
}

func (p provider) increase(id string, delta int32) {
	p.Helper()
	_, err := p.NodeGroupIncreaseSize(p.bounded(), &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: delta})
	require.NoError(p, err)
}

func (p provider) deleteNodes(id string, nodes ...*externalgrpc.ExternalGrpcNode) error {
	p.Helper()
	_, err := p.NodeGroupDeleteNodes(p.bounded(), &externalgrpc.NodeGroupDeleteNodesRequest{Id: id, Nodes: nodes})
	return err
}

func (p provider) target(id string) int32 {
	p.Helper()
	response, err := p.NodeGroupTargetSize(p.bounded(), &externalgrpc.NodeGroupTargetSizeRequest{Id: id})
	require.NoError(p, err)
	return response.GetTargetSize()
}

// instances returns the state of each instance of a group, by its ID.
func (p provider) instances(id string) map[string]externalgrpc.InstanceStatus_InstanceState {
	p.Helper()
	response, err := p.NodeGroupNodes(p.bounded(), &externalgrpc.NodeGroupNodesRequest{Id: id})
	require.NoError(p, err)
	return lo.SliceToMap(response.GetInstances(), func(i *externalgrpc.Instance) (string, externalgrpc.InstanceStatus_InstanceState) {
		return i.GetId(), i.GetStatus().GetInstanceState()
	})
}

// groupOf returns the ID of the group of a node, or "".
func (p provider) groupOf(node *externalgrpc.ExternalGrpcNode) string {
	p.Helper()
	response, err := p.NodeGroupForNode(p.bounded(), &externalgrpc.NodeGroupForNodeRequest{Node: node})
	require.NoError(p, err)
	return response.GetNodeGroup().GetId()
}

// claims returns the cluster-autoscaler's live claims, oldest first.
func (p provider) claims() []*agentv1alpha1.Claim {
	p.Helper()
	return p.list(otherHolder, false).GetClaims()
}

// placeholder is the instance ID of a claim that has no provider ID.
func (p provider) placeholder(claim *agentv1alpha1.Claim) string {
	return fmt.Sprintf("capi-claim://%s/%s/%s", p.Cluster().GetNamespace(), p.Cluster().GetName(), claim.GetClaimId())
}

// joined makes the Node of a claim join, and returns the claim's machine once it is shown as
// running.
func (p provider) joined(claim *agentv1alpha1.Claim) *agentv1alpha1.Machine {
	p.Helper()
	machine := p.joinNode(claim.GetClaimId()).GetMachine()
	p.eventually("machine "+machine.GetName()+" is running", func() error {
		state := p.instances(claim.GetNodeGroupId())[machine.GetProviderId()]
		if state != externalgrpc.InstanceStatus_instanceRunning {
			return fmt.Errorf("it is %v", state)
		}
		return nil
	})
	return machine
}

func nodeOf(machine *agentv1alpha1.Machine) *externalgrpc.ExternalGrpcNode {
	return &externalgrpc.ExternalGrpcNode{ProviderID: machine.GetProviderId(), Name: machine.GetNodeName()}
}
