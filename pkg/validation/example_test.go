package validation_test

import (
	"fmt"

	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func ExampleValidator() {
	validator, err := validation.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	// A server refuses what Check refuses, before its handlers see it.
	_ = grpc.NewServer(grpc.UnaryInterceptor(validator.Unary()), grpc.StreamInterceptor(validator.Stream()))

	err = validator.Check(&agentv1alpha1.GetClaimRequest{ClaimId: "a-claim"})
	for _, violation := range agenterrors.FieldViolations(err) {
		fmt.Printf("%s: %s\n", violation.Field, violation.Description)
	}
	// Output: cluster: value is required
}
