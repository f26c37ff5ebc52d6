package validation_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

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

func TestCheckNamesEveryField(t *testing.T) {
	err := newValidator(t).Check(&agentv1alpha1.CreateClaimRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "Bad", Name: "fine"},
		ClaimId: "fine", Holder: "karpenter", Candidates: []string{"a/b", "nothing"},
	})
	require.True(t, agenterrors.IsInvalidArgument(err))
	var fields []string
	for _, violation := range agenterrors.FieldViolations(err) {
		require.NotEmpty(t, violation.Description)
		fields = append(fields, violation.Field)
	}
	require.ElementsMatch(t, []string{"cluster.namespace", "candidates[1]"}, fields)
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
