package kubectl

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

func TestAnAgentThatAnswersIsNotSoughtElsewhere(t *testing.T) {
	for _, err := range []error{agenterrors.ClusterPaused("the Cluster is paused"), agenterrors.NotSynced("it has just started")} {
		said := agentProblem(err, &Agent{Address: "hub:8443"})
		assert.Contains(t, said.Error(), "the agent at hub:8443 cannot answer now")
		assert.NotContains(t, Describe(said), "port-forward")
	}
}
