package agenterrors_test

import (
	"fmt"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// How an agent refuses a claim, and what the caller reads from the error.
func ExampleRejected() {
	now := time.Now()
	err := agenterrors.Rejected(now, agenterrors.Rejection{
		NodeGroup: "fleet/small", Reason: agenterrors.ReasonNoRoom, Message: "a machine failed recently",
		Unavailable: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, RetryAt: now.Add(3 * time.Minute),
	})

	if agenterrors.IsNoRoom(err) {
		for _, rejection := range agenterrors.Rejections(err) {
			fmt.Println(rejection.NodeGroup, rejection.Unavailable, rejection.Message)
		}
	}
	if delay, known := agenterrors.RetryDelay(err); known {
		fmt.Println("retry after", delay)
	}
	// Output:
	// fleet/small UNAVAILABLE_REASON_COOLING_DOWN a machine failed recently
	// retry after 3m0s
}

// A repeated CreateClaim for a claim that has ended. The caller must not use the ID again.
func ExampleEndedAs() {
	err := agenterrors.ClaimEnded(&agentv1alpha1.Claim{
		ClaimId: "7c9e", Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, Reason: "Released",
	})

	if end, ok := agenterrors.EndedAs(err); ok {
		fmt.Println(end.ClaimID, end.Reason)
	}
	// Output: 7c9e Released
}
