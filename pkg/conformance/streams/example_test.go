package streams_test

import (
	"fmt"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// A stream that sends a claim backwards: it was released, and is shown as bound again.
func ExampleRecord() {
	cluster := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}
	record := streams.New("example", streams.Claims(cluster, "karpenter"), streams.Options{Patience: time.Minute})

	record.Open()
	record.Event(streams.Event[*agentv1alpha1.Claim]{Kind: streams.Synced})
	for _, phase := range []agentv1alpha1.ClaimPhase{
		agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
	} {
		record.Event(streams.Event[*agentv1alpha1.Claim]{Kind: streams.Upsert, Object: &agentv1alpha1.Claim{
			Cluster: cluster, ClaimId: "7c9e", Holder: "karpenter", NodeGroupId: "fleet/small", Phase: phase,
		}})
	}

	figures, wrong := record.Check()
	fmt.Println("events:", figures.Events)
	fmt.Println(streams.Summary(wrong))
	// Output:
	// events: 2
	// example watches claims: 7c9e goes back: it was CLAIM_PHASE_RELEASING and is CLAIM_PHASE_BOUND
}
