package agent_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// encoded is a message as it is on the wire.
type encoded []byte

// asItIs is a codec that sends and receives [encoded].
type asItIs struct{}

func (asItIs) Name() string { return "proto" }

func (asItIs) Marshal(message any) (mem.BufferSlice, error) {
	request, ok := message.(*encoded)
	if !ok {
		return nil, fmt.Errorf("%T is not encoded", message)
	}
	return mem.BufferSlice{mem.SliceBuffer(*request)}, nil
}

func (asItIs) Unmarshal(data mem.BufferSlice, into any) error {
	answer, ok := into.(*encoded)
	if !ok {
		return fmt.Errorf("%T is not encoded", into)
	}
	*answer = data.Materialize()
	return nil
}

// answerable are the codes that an authorized caller may receive: all those that mean that the
// request or the hub's current state is at fault.
var answerable = []codes.Code{
	codes.OK, codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.ResourceExhausted, codes.Aborted, codes.PermissionDenied,
}

const (
	// maxFuzzedAnswer is larger than any response of the fuzzed agent, which has one node group.
	maxFuzzedAnswer = 1 << 20
	// maxFuzzedStatus is the maximum size of an error, which may name up to a thousand candidates.
	maxFuzzedStatus = 512 << 10
)

// FuzzHandlers sends arbitrary bytes as requests to every method that the agent's reflection lists,
// over mutual TLS, from authorized callers. The agent must respond with a suitable error, and keep
// serving.
func FuzzHandlers(f *testing.F) {
	target := newTarget(f)
	calls := target.calls(f)
	for i, of := range calls {
		request := dynamicpb.NewMessage(of.method.Input())
		require.NoError(f, protojson.Unmarshal([]byte(strings.ReplaceAll(of.request, "$ID", "claim")), request))
		valid, err := proto.Marshal(request)
		require.NoError(f, err)
		for _, seed := range [][]byte{valid, valid[:len(valid)/2], append(slices.Clone(valid), 0xff), slices.Repeat(valid, 3)} {
			f.Add(uint8(i), seed)
		}
	}
	f.Fuzz(func(t *testing.T, i uint8, request []byte) {
		of := calls[int(i)%len(calls)]
		conn := target.caller(of)
		answer, err := of.send(t, conn, request)
		code := status.Code(err)
		require.Contains(t, answerable, code, "%s: %v", of.name(), err)
		require.LessOrEqual(t, len(answer), maxFuzzedAnswer, of.name())
		require.LessOrEqual(t, proto.Size(status.Convert(err).Proto()), maxFuzzedStatus, of.name())
		if code == codes.OK {
			require.NoError(t, proto.Unmarshal(answer, dynamicpb.NewMessage(of.method.Output())), of.name())
		}
		var alive encoded
		require.NoError(t, conn.Invoke(t.Context(), agentv1alpha1.StatusService_GetStatus_FullMethodName, &encoded{}, &alive), "after %s", of.name())
	})
}

// target is an agent with a node group, and its callers that may call all methods between them.
type target struct {
	namespace                      string
	agent                          *running
	admin, ofCluster, ofAutoscaler *grpc.ClientConn
}

func newTarget(tb testing.TB) *target {
	tb.Helper()
	t := &target{namespace: plane.Namespace(tb)}
	cluster := capitest.NewCluster(t.namespace, "spoke")
	cluster.Labels = map[string]string{v1alpha1.OnboardingLabel: present}
	sized := []func(*clusterv1.MachineDeployment){
		capitest.Sized("0", "1000"), capitest.Annotated(capacity.MemoryAnnotation, "16Gi"), capitest.Annotated(capacity.CPUAnnotation, "4"),
	}
	held := append(slices.Clone(sized), capitest.Annotated(v1alpha1.HolderAnnotation, v1alpha1.ClusterAutoscaler))
	plane.Create(tb, cluster, capitest.NewInfrastructureTemplate(t.namespace, "workers", nil),
		capitest.NewMachineDeployment(t.namespace, "workers", "spoke", 0, sized...),
		capitest.NewMachineDeployment(t.namespace, "held", "spoke", 0, held...))
	policy, err := authz.ParsePolicy(fmt.Appendf(nil, `
identities:
- {id: %q, roles: [admin], allClusters: true}
- {id: %q, roles: [autoscaler], clusters: ["%s/spoke"]}
`, adminID, autoscalerID, t.namespace), "karpenter-capi")
	require.NoError(tb, err)
	o := testOptions(t.namespace)
	o.Limits.CallsPerSecond, o.Limits.CallBurst = 1e6, 1e6
	authority := testpki.New(tb)
	own := authority.Issue(tb, tb.TempDir(), authority)
	o.ClientCAFile, o.TLSCertFile = own.CAFile, own.CertFile
	o.IssuerCertFile, o.IssuerKeyFile = authority.Write(tb, tb.TempDir())
	t.agent = startFor(tb, authority, agent.Config{Options: o, Policy: func() *authz.Policy { return policy }})
	t.admin, t.ofAutoscaler = t.agent.raw(adminID), t.agent.raw(autoscalerID)
	t.ofCluster = t.agent.raw("spiffe://karpenter-capi/cluster/" + t.namespace + "/spoke/" + present)
	eventually(tb, "the node groups take claims", func(ctx context.Context) (bool, error) {
		response, err := t.agent.as(adminID).NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: t.namespace, Name: "spoke"},
		})
		return err == nil && len(response.GetNodeGroups()) == 2 && slices.ContainsFunc(response.GetNodeGroups(), func(g *agentv1alpha1.NodeGroup) bool {
			return g.GetAvailability().GetAvailable()
		}), nil
	})
	return t
}

const (
	adminID      = "spiffe://karpenter-capi/admin"
	autoscalerID = "spiffe://karpenter-capi/autoscaler"
)

// calls returns the methods to call.
func (t *target) calls(tb testing.TB) []rpc {
	tb.Helper()
	return served(tb, t.agent.as(adminID).Conn(), t.namespace)
}

// caller returns a caller that may call the method.
func (t *target) caller(of rpc) *grpc.ClientConn {
	switch {
	case of.certifies:
		return t.ofCluster
	case of.scales:
		return t.ofAutoscaler
	}
	return t.admin
}

// raw connects with a certificate for the URI name, to send [encoded] messages.
func (r *running) raw(uri string) *grpc.ClientConn {
	r.t.Helper()
	files := r.authority.Issue(r.t, r.t.TempDir(), r.authority, uri)
	pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(r.t, err)
	conn, err := grpc.NewClient("passthrough:///"+r.address, grpc.WithDefaultCallOptions(grpc.ForceCodecV2(asItIs{})),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: r.authority.Pool(),
		})))
	require.NoError(r.t, err)
	r.t.Cleanup(func() { require.NoError(r.t, conn.Close()) })
	return conn
}

// send sends a request and returns the first response. The error is the call's status.
func (c rpc) send(t *testing.T, conn *grpc.ClientConn, request encoded) (encoded, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	// All kinds of methods are called as streams.
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		fmt.Sprintf("/%s/%s", c.method.Parent().FullName(), c.method.Name()))
	require.NoError(t, err)
	_ = stream.SendMsg(&request) // if it fails, the status has the reason
	_ = stream.CloseSend()
	var answer encoded
	if err := stream.RecvMsg(&answer); err != io.EOF { //nolint:errorlint // as documented
		return answer, err
	}
	return nil, nil
}
