package agent_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// provider returns a client of the cluster-autoscaler's protocol with the identity of an
// autoscaler.
func (e *env) provider(tb testing.TB) externalgrpc.CloudProviderClient {
	tb.Helper()
	return externalgrpc.NewCloudProviderClient(e.connect(tb, "spiffe://karpenter-capi/cluster-autoscaler/"+e.namespace))
}

func (r *running) connect(tb testing.TB, uri string) *grpc.ClientConn {
	tb.Helper()
	files := r.authority.Issue(tb, tb.TempDir(), r.authority, uri)
	certificate, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(tb, err)
	conn, err := grpc.NewClient("passthrough:///"+r.address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
		RootCAs: r.authority.Pool(), Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13,
	})))
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = conn.Close() })
	return conn
}

func (e *env) connect(tb testing.TB, uri string) *grpc.ClientConn {
	tb.Helper()
	return e.running.connect(tb, uri)
}

// ofAutoscaler returns a MachineDeployment of the cluster-autoscaler.
func ofAutoscaler(namespace, name string, replicas int32, options ...func(*clusterv1.MachineDeployment)) *clusterv1.MachineDeployment {
	return capitest.NewMachineDeployment(namespace, name, "spoke", replicas, append([]func(*clusterv1.MachineDeployment){
		capitest.Sized("0", "10"), capitest.Annotated(v1alpha1.HolderAnnotation, v1alpha1.ClusterAutoscaler),
		capitest.Annotated(capacity.CPUAnnotation, "4"), capitest.Annotated(capacity.MemoryAnnotation, "16Gi"),
	}, options...)...)
}

func TestTheClusterAutoscalerScalesByClaims(t *testing.T) {
	e, c := newHub(t)
	var scaling atomic.Bool // machines take longer to join than to be assigned to their claims
	e.model.SetBehaviour(func(m *clusterv1.Machine) capitest.Behaviour {
		return capitest.Behaviour{HoldJoin: scaling.Load() && protocol.ClaimOf(m) == ""}
	})
	plane.Create(t, capitest.NewInfrastructureTemplate(e.namespace, "batch", nil), ofAutoscaler(e.namespace, "batch", 2,
		capitest.Annotated(nodegroup.UnneededTimeAnnotation, "1m"), capitest.Annotated(capacity.LabelsAnnotation, "team=blue")))
	plane.Create(t, capitest.NewInfrastructureTemplate(e.namespace, "workers", nil),
		capitest.NewMachineDeployment(e.namespace, "workers", "spoke", 0, capitest.Sized("0", "10")))
	e.running = start(t, c)
	provider := e.provider(t)
	ctx := t.Context()
	id := e.namespace + "/batch"
	joined := func(n int) []clusterv1.Machine {
		var machines []clusterv1.Machine
		eventually(t, fmt.Sprintf("%d Machines have their Nodes", n), func(context.Context) (bool, error) {
			machines = plane.Machines(t, e.namespace, "batch")
			return len(machines) == n && lo.EveryBy(machines, func(m clusterv1.Machine) bool { return m.Status.NodeRef.Name != "" }), nil
		})
		return machines
	}
	users := joined(2)
	target := func() int32 {
		response, err := provider.NodeGroupTargetSize(ctx, &externalgrpc.NodeGroupTargetSizeRequest{Id: id})
		require.NoError(t, err)
		return response.GetTargetSize()
	}

	_, err := provider.Refresh(ctx, &externalgrpc.RefreshRequest{})
	require.NoError(t, err)
	var group *externalgrpc.NodeGroup
	eventually(t, "the group is shown", func(ctx context.Context) (bool, error) {
		response, err := provider.NodeGroups(ctx, &externalgrpc.NodeGroupsRequest{})
		require.LessOrEqual(t, len(response.GetNodeGroups()), 1, "no group of Karpenter")
		if err != nil || len(response.GetNodeGroups()) == 0 {
			return false, err
		}
		group = response.GetNodeGroups()[0]
		return true, nil
	})
	require.Equal(t, id, group.GetId())
	require.Zero(t, group.GetMinSize())
	require.EqualValues(t, 8, group.GetMaxSize())
	require.Zero(t, target())

	template, err := provider.NodeGroupTemplateNodeInfo(ctx, &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: id})
	require.NoError(t, err)
	var node corev1.Node
	require.NoError(t, node.Unmarshal(template.GetNodeBytes()))
	require.Equal(t, "blue", node.Labels["team"])
	require.Equal(t, "4", node.Status.Allocatable.Cpu().String())
	options, err := provider.NodeGroupGetOptions(ctx, &externalgrpc.NodeGroupAutoscalingOptionsRequest{
		Id:       id,
		Defaults: &externalgrpc.NodeGroupAutoscalingOptions{ScaleDownUtilizationThreshold: 0.7, MaxNodeProvisionDuration: durationpb.New(time.Hour)},
	})
	require.NoError(t, err)
	require.Equal(t, time.Minute, options.GetNodeGroupAutoscalingOptions().GetScaleDownUnneededDuration().AsDuration())
	require.InDelta(t, 0.7, options.GetNodeGroupAutoscalingOptions().GetScaleDownUtilizationThreshold(), 0)
	require.Equal(t, time.Hour, options.GetNodeGroupAutoscalingOptions().GetMaxNodeProvisionDuration().AsDuration())

	_, err = provider.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: 9})
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	require.Zero(t, target())
	scaling.Store(true)
	_, err = provider.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: id, Delta: 3})
	require.NoError(t, err)
	require.EqualValues(t, 3, target(), "at once")
	var claims v1alpha1.MachineClaimList
	require.NoError(t, plane.Client.List(ctx, &claims, ctrlclient.InNamespace(e.namespace)))
	require.Len(t, claims.Items, 3, "they are durable")
	machines := joined(5)

	claimed := lo.Filter(machines, func(m clusterv1.Machine, _ int) bool { return protocol.ClaimOf(&m) != "" })
	eventually(t, "three Machines are claimed and shown as running", func(ctx context.Context) (bool, error) {
		claimed = lo.Filter(plane.Machines(t, e.namespace, "batch"), func(m clusterv1.Machine, _ int) bool { return protocol.ClaimOf(&m) != "" })
		response, err := provider.NodeGroupNodes(ctx, &externalgrpc.NodeGroupNodesRequest{Id: id})
		if err != nil {
			return false, err
		}
		running := lo.FilterMap(response.GetInstances(), func(i *externalgrpc.Instance, _ int) (string, bool) {
			return i.GetId(), i.GetStatus().GetInstanceState() == externalgrpc.InstanceStatus_instanceRunning
		})
		own := lo.Map(claimed, func(m clusterv1.Machine, _ int) string { return m.Spec.ProviderID })
		return len(own) == 3 && lo.ElementsMatch(running, own), nil
	})
	grpcNode := func(m clusterv1.Machine) *externalgrpc.ExternalGrpcNode {
		return &externalgrpc.ExternalGrpcNode{ProviderID: m.Spec.ProviderID, Name: m.Status.NodeRef.Name}
	}
	for _, m := range plane.Machines(t, e.namespace, "batch") {
		response, err := provider.NodeGroupForNode(ctx, &externalgrpc.NodeGroupForNodeRequest{Node: grpcNode(m)})
		require.NoError(t, err)
		require.Equal(t, lo.Ternary(protocol.ClaimOf(&m) != "", id, ""), response.GetNodeGroup().GetId())
	}

	_, err = provider.NodeGroupDeleteNodes(ctx, &externalgrpc.NodeGroupDeleteNodesRequest{
		Id: id, Nodes: []*externalgrpc.ExternalGrpcNode{grpcNode(claimed[0]), grpcNode(users[0])},
	})
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "%v", err)
	_, err = provider.NodeGroupDecreaseTargetSize(ctx, &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: id, Delta: -1})
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "%v", err)
	require.EqualValues(t, 3, target())
	gone := claimed[:2]
	_, err = provider.NodeGroupDeleteNodes(ctx, &externalgrpc.NodeGroupDeleteNodesRequest{
		Id: id, Nodes: lo.Map(gone, func(m clusterv1.Machine, _ int) *externalgrpc.ExternalGrpcNode { return grpcNode(m) }),
	})
	require.NoError(t, err)
	require.EqualValues(t, 1, target(), "at once")
	left := joined(3)
	require.ElementsMatch(t, append(names(users), claimed[2].Name), names(left), "exactly these are gone")
}

func names(machines []clusterv1.Machine) []string {
	return lo.Map(machines, func(m clusterv1.Machine, _ int) string { return m.Name })
}

func TestNodeGroupsBelongToOneHolder(t *testing.T) {
	e, c := newHub(t)
	for _, md := range []*clusterv1.MachineDeployment{
		ofAutoscaler(e.namespace, "batch", 0), capitest.NewMachineDeployment(e.namespace, "workers", "spoke", 0, capitest.Sized("0", "10")),
	} {
		plane.Create(t, capitest.NewInfrastructureTemplate(e.namespace, md.Name, nil), md)
	}
	e.running = start(t, c)
	ctx := t.Context()
	response, err := e.Client().NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: e.Cluster(), Id: e.namespace + "/batch"})
	require.NoError(t, err)
	group := response.GetNodeGroup()
	require.Equal(t, "cluster-autoscaler", group.GetHolder())
	require.False(t, group.GetAvailability().GetAvailable())
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED, group.GetAvailability().GetReason())
	require.Contains(t, group.GetAvailability().GetMessage(), v1alpha1.HolderAnnotation)

	create := &agentv1alpha1.CreateClaimRequest{Cluster: e.Cluster(), ClaimId: "a", Holder: "karpenter", Candidates: []string{e.namespace + "/batch"}}
	_, err = e.Client().Claims.CreateClaim(ctx, create)
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "%v", err)
	require.ErrorContains(t, err, `accepts only claims of the holder "cluster-autoscaler"`)
	create.Candidates = append(create.Candidates, e.namespace+"/workers")
	made, err := e.Client().Claims.CreateClaim(ctx, create)
	require.NoError(t, err)
	require.Equal(t, e.namespace+"/workers", made.GetClaim().GetNodeGroupId(), "the next candidate")

	provider := e.provider(t)
	_, err = provider.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: e.namespace + "/workers", Delta: 1})
	require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
	_, err = provider.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: e.namespace + "/batch", Delta: 1})
	require.NoError(t, err)
	_, err = provider.NodeGroupIncreaseSize(ctx, &externalgrpc.NodeGroupIncreaseSizeRequest{Id: e.namespace + "/batch"})
	require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
	_, err = provider.NodeGroupDecreaseTargetSize(ctx, &externalgrpc.NodeGroupDecreaseTargetSizeRequest{Id: e.namespace + "/batch", Delta: -1})
	require.NoError(t, err, "its machine has no Node")
	target, err := provider.NodeGroupTargetSize(ctx, &externalgrpc.NodeGroupTargetSizeRequest{Id: e.namespace + "/batch"})
	require.NoError(t, err)
	require.Zero(t, target.GetTargetSize())

	_, err = externalgrpc.NewCloudProviderClient(e.connect(t, "spiffe://karpenter-capi/admin")).Refresh(ctx, &externalgrpc.RefreshRequest{})
	require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
}

// BenchmarkClusterAutoscalerRound makes the calls of one loop of the cluster-autoscaler in which no
// node group has a node and nothing is to be scaled: Refresh, NodeGroups, and then for all groups
// NodeGroupTemplateNodeInfo, NodeGroupTargetSize and NodeGroupNodes, one call after the other, over
// mutual TLS. It is the most that node groups cost: a group with a ready node needs no template,
// and the cluster-autoscaler asks for the instances of a group whose size fits every two minutes
// only. The calls of each node (NodeGroupForNode, NodeGroupGetOptions) are left out, and the GPU
// calls, which are made once. The cluster-autoscaler's own work and its API server's are left out
// too.
func BenchmarkClusterAutoscalerRound(b *testing.B) {
	const groups = 1000
	namespace := plane.Namespace(b)
	plane.Create(b, capitest.NewCluster(namespace, "spoke"), capitest.NewInfrastructureTemplate(namespace, "group", nil))
	for i := range groups {
		md := ofAutoscaler(namespace, fmt.Sprintf("group-%d", i), 0)
		md.Spec.Template.Spec.InfrastructureRef.Name = "group"
		plane.Create(b, md)
	}
	policy, err := authz.ParsePolicy(fmt.Appendf(nil,
		"identities:\n- {id: spiffe://karpenter-capi/autoscaler, roles: [autoscaler], clusters: [%s/spoke]}\n", namespace), "karpenter-capi")
	require.NoError(b, err)
	r := start(b, agent.Config{Options: testOptions(namespace), Policy: func() *authz.Policy { return policy }})
	provider := externalgrpc.NewCloudProviderClient(r.connect(b, "spiffe://karpenter-capi/autoscaler"))
	round := func() time.Duration {
		began := time.Now()
		_, err := provider.Refresh(b.Context(), &externalgrpc.RefreshRequest{})
		require.NoError(b, err)
		response, err := provider.NodeGroups(b.Context(), &externalgrpc.NodeGroupsRequest{})
		require.NoError(b, err)
		require.Len(b, response.GetNodeGroups(), groups)
		for _, group := range response.GetNodeGroups() {
			template, err := provider.NodeGroupTemplateNodeInfo(b.Context(), &externalgrpc.NodeGroupTemplateNodeInfoRequest{Id: group.GetId()})
			require.NoError(b, err)
			require.NotEmpty(b, template.GetNodeBytes())
		}
		for _, group := range response.GetNodeGroups() {
			_, err := provider.NodeGroupTargetSize(b.Context(), &externalgrpc.NodeGroupTargetSizeRequest{Id: group.GetId()})
			require.NoError(b, err)
		}
		for _, group := range response.GetNodeGroups() {
			_, err := provider.NodeGroupNodes(b.Context(), &externalgrpc.NodeGroupNodesRequest{Id: group.GetId()})
			require.NoError(b, err)
		}
		return time.Since(began)
	}
	round()
	b.ResetTimer()
	var took []time.Duration
	for range b.N {
		took = append(took, round())
	}
	perThousand := func(d time.Duration) float64 { return float64(d.Milliseconds()) * 1000 / groups }
	b.ReportMetric(perThousand(b.Elapsed()/time.Duration(b.N)), "ms/1000-groups")
	b.ReportMetric(perThousand(slices.Max(took)), "ms/1000-groups-slowest")
}
