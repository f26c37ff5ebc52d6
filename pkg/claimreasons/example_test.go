package claimreasons_test

import (
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func Example() {
	claim := &agentv1alpha1.Claim{Reason: "NodeNotSeen"} // as a call has returned it
	switch claim.GetReason() {
	case claimreasons.NodeJoined:
		fmt.Println("the Node is there")
	case claimreasons.NodeNotSeen:
		fmt.Println("the Node may be there: do not give the machine up")
	default: // also reasons that are newer than this program
		fmt.Println("wait")
	}
	// Output: the Node may be there: do not give the machine up
}
