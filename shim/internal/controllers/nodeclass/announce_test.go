package nodeclass_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/nodeclass"
)

func TestWhatConcernsAllNodeClassesIsAnEventOnEach(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	e.AddNodeClass("other", nil)
	nodeclass.Announce(e.Context(), e.Kube, e.Recorder, "AgentCertificateEnded", "Do something.")
	assert.Equal(t, []string{"AgentCertificateEnded", "AgentCertificateEnded"}, e.Recorder.Reasons())
	assert.Equal(t, []string{"Do something.", "Do something."}, e.Recorder.Messages())
}
