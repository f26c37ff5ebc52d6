package registration_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/lifecycle"
	"sigs.k8s.io/karpenter/pkg/controllers/state/informer"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// The taints as Cluster API defines them.
var (
	byClusterAPI = corev1.Taint{Key: "node.cluster.x-k8s.io/uninitialized", Effect: corev1.TaintEffectNoSchedule}
	outdated     = corev1.Taint{Key: "node.cluster.x-k8s.io/outdated-revision", Effect: corev1.TaintEffectPreferNoSchedule}
)

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

// A template may change while a machine boots. Its Node is then outdated from the start, and may
// take a while to become ready.
func TestPodsArePlannedForAnOutdatedNode(t *testing.T) {
	registration.ExpectTaints()
	tolerated := []corev1.Toleration{{Key: outdated.Key, Operator: corev1.TolerationOpExists, Effect: outdated.Effect}}
	notReady := corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}
	strict := func(key string) corev1.Taint { return corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule} }
	for name, c := range map[string]struct {
		taints      []corev1.Taint
		tolerations []corev1.Toleration
		fits        bool
	}{
		"outdated":                                              {taints: []corev1.Taint{outdated}, fits: true},
		"outdated and not ready":                                {taints: []corev1.Taint{outdated, notReady}, fits: true},
		"outdated, and the pod tolerates it":                    {taints: []corev1.Taint{outdated}, tolerations: tolerated, fits: true},
		"outdated, and has another taint":                       {taints: []corev1.Taint{outdated, strict("dedicated")}},
		"has such a taint with an effect that is no preference": {taints: []corev1.Taint{strict(outdated.Key)}},
		"has a preference of another actor":                     {taints: []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectPreferNoSchedule}}},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
			w.NodePool()
			w.PendingPod("pod", "3", func(pod *corev1.Pod) { pod.Spec.Tolerations = c.tolerations })
			nodeClaim := w.Launched("claim", shimtest.Registered)
			node := w.Node(nodeClaim, c.taints...)
			results := w.Plan()
			if !c.fits {
				assert.Len(t, results.NewNodeClaims, 1)
				return
			}
			assert.Empty(t, results.NewNodeClaims, "a second Node for the same pod")
			if assert.Len(t, results.ExistingNodes, 1) {
				assert.Len(t, results.ExistingNodes[0].Pods, 1)
			}
			w.Get(node)
			assert.Equal(t, c.taints, node.Spec.Taints, "the taint stays")
			for _, taint := range c.taints {
				assert.Equal(t, taint == notReady, scheduling.IsKnownEphemeralTaint(&taint), "the NodeClaim does not wait for it")
			}
		})
	}
}

// A write of a Node's taints replaces all of them.
func TestOnlyPlanningOverlooksTheTaintOfOutdatedNodes(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	node := w.Node(w.Launched("claim", shimtest.Registered), outdated)
	kube := registration.PlanningClient(w.Kube)
	planning := informer.NewNodeController(nil, nil).Name() // as core names it, and so may rename it
	for controller, want := range map[string][]corev1.Taint{planning: {}, "disruption": {outdated}, "": {outdated}} {
		ctx := w.Context()
		if controller != "" {
			ctx = injection.WithControllerName(ctx, controller)
		}
		got := &corev1.Node{}
		require.NoError(t, kube.Get(ctx, client.ObjectKeyFromObject(node), got))
		assert.Equal(t, want, got.Spec.Taints, controller)
	}
	ctx := injection.WithControllerName(w.Context(), planning)
	assert.True(t, apierrors.IsNotFound(kube.Get(ctx, client.ObjectKey{Name: "gone"}, &corev1.Node{})))
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
		"outdated revision": {outdated, false},
	} {
		assert.Equal(t, c.want, scheduling.IsKnownEphemeralTaint(&c.taint), name)
	}
}
