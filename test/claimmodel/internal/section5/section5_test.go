package section5_test

import (
	"testing"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/section5"
)

// TestNumberOfStates holds the model to the number of states that it had when the design was checked with it.
func TestNumberOfStates(t *testing.T) {
	p := section5.Protocol{Claims: 1, Floor: 0, StaleAgents: 1, Outsiders: 1, Rules: section5.AllRules()}
	r := explore.Search(&p, explore.Options{States: 1_000_000, Ignore: []string{"E4"}})
	if !r.Complete || r.States != 151_630 || r.Transitions != 724_663 || len(r.Violations) != 0 {
		t.Errorf("want 151,630 states, 724,663 transitions, complete, without a violation")
		r.Report(t.Output())
	}
}
