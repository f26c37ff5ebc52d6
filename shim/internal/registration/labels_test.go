package registration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func TestZone(t *testing.T) {
	uninitialized := []corev1.Taint{{Key: "node.cloudprovider.kubernetes.io/uninitialized", Value: "true", Effect: corev1.TaintEffectNoSchedule}}
	for name, c := range map[string]struct {
		groupZone string
		node      *corev1.Node
		waits     bool
		want      string
	}{
		"the group has a zone": {
			groupZone: "z1", node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelTopologyZone: "z2"}}}, want: "z1",
		},
		"the Node has a zone": {
			node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{corev1.LabelTopologyZone: "z2"}}}, want: "z2",
		},
		"neither has one":               {node: &corev1.Node{}},
		"a cloud controller is to come": {node: &corev1.Node{Spec: corev1.NodeSpec{Taints: uninitialized}}, waits: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Zone: c.groupZone}})
			nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///1" })
			c.node.Name, c.node.Spec.ProviderID = "node", "sim:///1"
			w.Create(c.node)
			hook := registration.NewLabels(w.Kube, w.Catalogue)
			result, err := hook.Registered(w.Context(), nodeClaim)
			require.NoError(t, err)
			assert.Equal(t, c.waits, result.RequeueAfter > 0)
			assert.Equal(t, c.want, nodeClaim.Labels[corev1.LabelTopologyZone])
			w.Eventually(func() bool {
				class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
				_, ok := class.InstanceTypes(nil, nil)[0].OfferingPrice(c.want, "on-demand")
				return ok
			}, "core finds an offering for the Node")
		})
	}
}

// Core reports it for each NodeClaim, in an event; what must be corrected is the node group's
// template.
func TestAMissingTaintIsReportedOnceForItsNodeGroup(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}})
	problems := func() []string {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return class.Problems
	}
	hook := registration.NewLabels(w.Kube, w.Catalogue)
	join := func(name string, taints ...corev1.Taint) {
		t.Helper()
		nodeClaim := w.Launched(name, func(nc *karpv1.NodeClaim) {
			nc.Status.ProviderID, nc.Annotations = "sim:///"+name, map[string]string{"karpenter.cluster.x-k8s.io/node-group": "default/a"}
		})
		w.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{ProviderID: "sim:///" + name, Taints: taints}})
		_, err := hook.Registered(w.Context(), nodeClaim)
		require.NoError(t, err)
	}
	join("with", karpv1.UnregisteredNoExecuteTaint)
	assert.Empty(t, problems())
	join("without")
	join("without-either")
	w.Eventually(func() bool { return len(problems()) == 1 }, "one problem of the NodeClass")
	assert.Contains(t, problems()[0], "default/a: its Nodes join without the taint karpenter.sh/unregistered:NoExecute")
	join("with-again", karpv1.UnregisteredNoExecuteTaint)
	w.Eventually(func() bool { return len(problems()) == 0 }, "it is corrected")
}

func TestOtherNodeClaimsPass(t *testing.T) {
	w := shimtest.New(t, nil)
	result, err := registration.NewLabels(w.Kube, w.Catalogue).Registered(w.Context(), w.NodeClaim("foreign"))
	require.NoError(t, err)
	assert.Zero(t, result)
	assert.Equal(t, "labels", registration.NewLabels(w.Kube, w.Catalogue).Name())
}

func TestALabelThatCoreChoseAtRandomIsCorrectedOnceMore(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Zone: "z1", NodeLabels: map[string]string{"team": "red"}}})
	nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) {
		nc.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
			{Key: "team", Operator: corev1.NodeSelectorOpExists}, {Key: "use", Operator: corev1.NodeSelectorOpExists},
		}
		nc.Labels["team"], nc.Labels["use"] = "4711", "4712" // as after a failed patch of the NodeClaim
		nc.Status.ProviderID = "sim:///1"
	})
	w.Create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}, Spec: corev1.NodeSpec{ProviderID: "sim:///1"}})
	result, err := registration.NewLabels(w.Kube, w.Catalogue).Registered(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Zero(t, result)
	assert.Equal(t, "red", nodeClaim.Labels["team"])
	assert.Equal(t, "4712", nodeClaim.Labels["use"], "what the group does not say is core's to choose")
}

// With the node group's value, which the NodePool need not allow, core would treat the Node as
// drifted.
func TestAnAdoptedNodeKeepsItsLabels(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Zone: "z1", NodeLabels: map[string]string{"team": "red"}}})
	nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) {
		nc.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
			{Key: "team", Operator: corev1.NodeSelectorOpIn, Values: []string{"blue"}},
		}
		nc.Labels["team"], nc.Labels[v1alpha1.AdoptedLabel] = "blue", "true"
		nc.Annotations = map[string]string{v1alpha1.NodeGroupAnnotation: "default/a"}
		nc.Status.ProviderID = "sim:///1"
	})
	w.Create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"team": "blue"}}, Spec: corev1.NodeSpec{ProviderID: "sim:///1"},
	})
	_, err := registration.NewLabels(w.Kube, w.Catalogue).Registered(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, "blue", nodeClaim.Labels["team"])
	assert.Never(t, func() bool {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return len(class.Problems) > 0
	}, 100*time.Millisecond, 5*time.Millisecond, "how it joined is no news of the node group's template")
}
