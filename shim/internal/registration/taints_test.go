package registration_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// byClusterAPI is the taint as Cluster API defines it.
var byClusterAPI = corev1.Taint{Key: "node.cluster.x-k8s.io/uninitialized", Effect: corev1.TaintEffectNoSchedule}

func TestPodsArePlannedForANodeThatClusterAPIHasNotInitialized(t *testing.T) {
	registration.ExpectTaints()
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.NodePool()
	w.PendingPod("pod", "3")
	nodeClaim := w.Launched("claim", shimtest.Registered)
	node := w.Node(nodeClaim, byClusterAPI)

	results := w.Plan()
	assert.Empty(t, results.NewNodeClaims, "a second Node for the same pod")
	if assert.Len(t, results.ExistingNodes, 1) {
		assert.Len(t, results.ExistingNodes[0].Pods, 1)
	}
	taint, removed := lifecycle.KnownEphemeralTaintsRemoved(node)
	assert.False(t, removed, "the NodeClaim waits for Cluster API before it is initialized")
	assert.Equal(t, &byClusterAPI, taint)
}

func TestATaintThatStaysOnANodeKeepsPodsAway(t *testing.T) {
	registration.ExpectTaints()
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.NodePool()
	w.PendingPod("pod", "3")
	nodeClaim := w.Launched("claim", shimtest.Registered)
	w.Node(nodeClaim, corev1.Taint{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule})
	assert.Len(t, w.Plan().NewNodeClaims, 1)
}

func TestOnlyWhatClusterAPIRemovesFromNewNodesIsExpected(t *testing.T) {
	registration.ExpectTaints()
	known := len(scheduling.KnownEphemeralTaints)
	registration.ExpectTaints()
	assert.Len(t, scheduling.KnownEphemeralTaints, known, "once is enough")
	for name, c := range map[string]struct {
		taint corev1.Taint
		want  bool
	}{
		"uninitialized":       {byClusterAPI, true},
		"with another effect": {corev1.Taint{Key: byClusterAPI.Key, Effect: corev1.TaintEffectNoExecute}, false},
		"core's own":          {karpv1.UnregisteredNoExecuteTaint, true},
		// This taint stays on a Node of an old revision until the Machine is replaced.
		"outdated revision": {corev1.Taint{Key: "node.cluster.x-k8s.io/outdated-revision", Effect: corev1.TaintEffectPreferNoSchedule}, false},
	} {
		assert.Equal(t, c.want, scheduling.IsKnownEphemeralTaint(&c.taint), name)
	}
}
