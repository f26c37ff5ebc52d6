package validation_test

import (
	"context"
	"slices"
	"strconv"
	"testing"

	"buf.build/go/protovalidate"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func newValidator(t *testing.T) *validation.Validator {
	t.Helper()
	validator, err := validation.New()
	require.NoError(t, err)
	return validator
}

func TestCheckNamesAFieldThatIsMalformed(t *testing.T) {
	err := newValidator(t).Check(&agentv1alpha1.CreateClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "fine", Name: "fine"},
		ClaimId: "fine", Holder: "karpenter", Candidates: []string{"a/b", "nothing"},
	})
	require.True(t, agenterrors.IsInvalidArgument(err))
	violations := agenterrors.FieldViolations(err)
	require.Len(t, violations, 1)
	require.Equal(t, "candidates[1]", violations[0].Field)
	require.NotEmpty(t, violations[0].Description)
}

// oneOf returns a valid SyncClaims request.
func oneOf(nodes ...*agentv1alpha1.NodeReport) *agentv1alpha1.SyncClaimsRequest {
	return &agentv1alpha1.SyncClaimsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "a", Name: "b"}, Holder: "karpenter", Token: "token", Nodes: nodes,
	}
}

func TestCheckStopsAtTheFirstViolation(t *testing.T) {
	request := oneOf(slices.Repeat([]*agentv1alpha1.NodeReport{{}}, 20000)...)
	validator := newValidator(t)
	err := validator.Check(request)
	require.Equal(t, "nodes[0].provider_id", agenterrors.FieldViolations(err)[0].Field)
	require.Len(t, agenterrors.FieldViolations(err), 1)
	allocated := testing.AllocsPerRun(5, func() { _ = validator.Check(request) })
	require.Less(t, allocated, 1000.0, "each further violation costs more than that")
}

func TestTooManyElementsAreFoundWithoutDecodingThem(t *testing.T) {
	many := map[string]string{}
	for i := range 129 {
		many[strconv.Itoa(i)] = "1"
	}
	node := func(change func(*agentv1alpha1.NodeReport)) *agentv1alpha1.NodeReport {
		n := &agentv1alpha1.NodeReport{ProviderId: "test://a"}
		change(n)
		return n
	}
	fits := oneOf(slices.Repeat([]*agentv1alpha1.NodeReport{{ProviderId: "test://a"}}, 20000)...)
	for _, c := range []struct {
		name, field string
		request     *agentv1alpha1.SyncClaimsRequest
	}{
		{name: "as many as may be", request: fits},
		{name: "one more", field: "nodes", request: oneOf(append(fits.GetNodes(), fits.GetNodes()[0])...)},
		{name: "claims", field: "live_claim_ids", request: &agentv1alpha1.SyncClaimsRequest{LiveClaimIds: slices.Repeat([]string{"a"}, 50001)}},
		{
			name: "entries of a map in a list", field: "nodes[1].capacity",
			request: oneOf(fits.GetNodes()[0], node(func(n *agentv1alpha1.NodeReport) { n.Capacity = many })),
		},
		{name: "labels", field: "nodes[0].labels", request: oneOf(node(func(n *agentv1alpha1.NodeReport) { n.Labels = many }))},
	} {
		t.Run(c.name, func(t *testing.T) {
			encoded, err := proto.Marshal(c.request)
			require.NoError(t, err)
			err = newValidator(t).CheckEncoded(c.request.ProtoReflect().Descriptor(), encoded)
			if c.field == "" {
				require.NoError(t, err)
				return
			}
			require.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
			require.Equal(t, c.field, agenterrors.FieldViolations(err)[0].Field)
		})
	}
}

func TestWhatCannotBeReadIsLeftToTheDecoder(t *testing.T) {
	descriptor := (&agentv1alpha1.SyncClaimsRequest{}).ProtoReflect().Descriptor()
	encoded, err := proto.Marshal(oneOf(&agentv1alpha1.NodeReport{ProviderId: "test://a", Capacity: map[string]string{"cpu": "1"}}))
	require.NoError(t, err)
	for length := range encoded {
		require.NoError(t, newValidator(t).CheckEncoded(descriptor, encoded[:length]))
	}
}

// TestEveryListAndMapOfARequestIsBounded walks every request of the API: an unbounded list or map
// would be decoded whatever its size.
func TestEveryListAndMapOfARequestIsBounded(t *testing.T) {
	var walk func(message protoreflect.MessageDescriptor)
	walk = func(message protoreflect.MessageDescriptor) {
		for i := range message.Fields().Len() {
			field := message.Fields().Get(i)
			rules, err := protovalidate.ResolveFieldRules(field)
			require.NoError(t, err)
			switch {
			case field.IsMap():
				require.Positive(t, rules.GetMap().GetMaxPairs(), "%s has no max_pairs", field.FullName())
			case field.IsList():
				require.Positive(t, rules.GetRepeated().GetMaxItems(), "%s has no max_items", field.FullName())
			}
			if field.Message() != nil && !field.IsMap() {
				walk(field.Message())
			}
		}
	}
	for _, file := range []protoreflect.FileDescriptor{
		agentv1alpha1.File_capi_agent_v1alpha1_claim_proto, agentv1alpha1.File_capi_agent_v1alpha1_machine_proto,
		agentv1alpha1.File_capi_agent_v1alpha1_node_group_proto, agentv1alpha1.File_capi_agent_v1alpha1_status_proto,
	} {
		for i := range file.Services().Len() {
			methods := file.Services().Get(i).Methods()
			for j := range methods.Len() {
				walk(methods.Get(j).Input())
			}
		}
	}
}

func TestCheckAcceptsWhatItCannotJudge(t *testing.T) {
	validator := newValidator(t)
	require.NoError(t, validator.Check(nil))
	require.NoError(t, validator.Check("no message"))
	require.NoError(t, validator.Check(&agentv1alpha1.GetStatusRequest{}))
}

func TestUnaryKeepsMalformedRequestsFromTheHandler(t *testing.T) {
	interceptor := newValidator(t).Unary()
	called := 0
	handler := func(context.Context, any) (any, error) { called++; return nil, nil }
	_, err := interceptor(t.Context(), &agentv1alpha1.GetClaimRequest{}, nil, handler)
	require.True(t, agenterrors.IsInvalidArgument(err))
	require.Zero(t, called)
	_, err = interceptor(t.Context(), &agentv1alpha1.GetClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "a", Name: "b"}, ClaimId: "c",
	}, nil, handler)
	require.NoError(t, err)
	require.Equal(t, 1, called)
}

// received is a stream on which one message arrives.
type received struct {
	grpc.ServerStream

	message proto.Message
}

func (r received) RecvMsg(into any) error {
	message, ok := into.(proto.Message)
	if ok {
		proto.Merge(message, r.message)
	}
	return nil
}

func TestStreamKeepsMalformedRequestsFromTheHandler(t *testing.T) {
	interceptor := newValidator(t).Stream()
	read := func(_ any, stream grpc.ServerStream) error {
		return stream.RecvMsg(&agentv1alpha1.WatchClaimsRequest{})
	}
	err := interceptor(nil, received{message: &agentv1alpha1.WatchClaimsRequest{}}, nil, read)
	require.True(t, agenterrors.IsInvalidArgument(err))
	err = interceptor(nil, received{message: &agentv1alpha1.WatchClaimsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "a", Name: "b"},
	}}, nil, read)
	require.NoError(t, err)
}
