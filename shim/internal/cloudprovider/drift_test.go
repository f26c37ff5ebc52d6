package cloudprovider_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/disruption"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// Core itself checks the instance types after an hour, independently of IsDrifted.
func TestOnlyTheDriftPolicyDecidesWhetherANodeIsReplacedForItsNodeGroup(t *testing.T) {
	group := func(change func(*agentv1alpha1.NodeGroup)) func(*shimtest.Env) {
		return func(w *shimtest.Env) { w.Agent.UpdateNodeGroup("default/a", change) }
	}
	for name, c := range map[string]struct {
		change func(*shimtest.Env)
		// want is the reason of the condition Drifted with the policy Replace.
		want string
	}{
		"nothing has changed": {func(*shimtest.Env) {}, ""},
		"the selector is narrower": {func(w *shimtest.Env) {
			changeNodeClass(w, func(spec *v1alpha1.ClusterAPINodeClassSpec) {
				spec.ScalableResourceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "blue"}}
			})
		}, string(cloudprovider.DriftNodeGroupNotSelected)},
		"the opt-in label is gone": {
			func(w *shimtest.Env) { w.Agent.RemoveNodeGroup("default/a") }, string(cloudprovider.DriftNodeGroupNotSelected),
		},
		"the instance type is corrected": {group(func(g *agentv1alpha1.NodeGroup) { g.InstanceType = "m5.large" }), ""},
		"the zone is corrected":          {group(func(g *agentv1alpha1.NodeGroup) { g.Zone = "z2" }), ""},
		"the capacity type is corrected": {group(func(g *agentv1alpha1.NodeGroup) { g.CapacityType = spot }), ""},
		"the region is corrected":        {group(func(g *agentv1alpha1.NodeGroup) { g.Region = "eu" }), ""},
		"there is a taint that no NodePool declares": {group(func(g *agentv1alpha1.NodeGroup) {
			g.Taints = []*agentv1alpha1.Taint{{Key: "dedicated", Effect: "NoSchedule"}}
		}), ""},
		"the description cannot be used any more": {group(func(g *agentv1alpha1.NodeGroup) { g.Zone = "no label!" }), ""},
	} {
		for policy, want := range map[v1alpha1.DriftAction]string{v1alpha1.DriftReplace: c.want, v1alpha1.DriftIgnore: ""} {
			t.Run(name+", "+string(policy), func(t *testing.T) {
				clk := clocktesting.NewFakeClock(time.Now())
				w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
					{Name: "a", Zone: "z1", Labels: map[string]string{"team": "red"}}, {Name: "b", Zone: "z1", Labels: map[string]string{"team": "blue"}},
				}, shimtest.WithClock(clk))
				changeNodeClass(w, func(spec *v1alpha1.ClusterAPINodeClassSpec) { spec.Drift.NodeGroupNotSelected = policy })
				w.NodePool()
				nodeClaim := w.Launched("claim", shimtest.Registered)
				require.Equal(t, "default/a", nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])

				c.change(w)
				w.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "later", Labels: map[string]string{"team": "blue"}})
				w.Eventually(func() bool { _, ok := w.Catalogue.Snapshot().Group("default/later"); return ok }, "the catalogue shows the change")
				refreshed(w)
				clk.Step(2 * time.Hour)
				core := disruption.NewController(clk, w.Kube, w.CloudProvider)
				// The catalogue may not have heard of the NodeClaim yet, by which it remembers what the Node is.
				w.Eventually(func() bool {
					w.Get(nodeClaim)
					_, err := core.Reconcile(w.Context(), nodeClaim)
					require.NoError(t, err)
					w.Get(nodeClaim)
					drifted := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeDrifted)
					return want == "" && drifted == nil || want != "" && drifted != nil && drifted.Reason == want
				}, "the NodeClaim is drifted for %q", want)
			})
		}
	}
}

// A node group may vanish for good, and with it all that the agent says of it. Neither the time that
// has passed, nor a restart of the shim, nor core's own check of instance types overrules the policy.
func TestOnlyTheDriftPolicyDecidesWhenANodeGroupHasVanished(t *testing.T) {
	for policy, want := range map[v1alpha1.DriftAction]corecloudprovider.DriftReason{
		v1alpha1.DriftReplace: cloudprovider.DriftNodeGroupNotSelected, v1alpha1.DriftIgnore: "",
	} {
		for _, restarts := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, restarted: %t", policy, restarts), func(t *testing.T) {
				clk := clocktesting.NewFakeClock(time.Now())
				w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Zone: "z1"}, {Name: "b", Zone: "z1"}}, shimtest.WithClock(clk))
				changeNodeClass(w, func(spec *v1alpha1.ClusterAPINodeClassSpec) { spec.Drift.NodeGroupNotSelected = policy })
				pool := w.NodePool()
				nodeClaim := w.Launched("claim", shimtest.Registered)
				group := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
				w.Agent.RemoveNodeGroup(group)
				w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 1 }, "the group is gone")
				if restarts {
					w.Restart()
				}
				w.Eventually(func() bool {
					types, err := w.CloudProvider.GetInstanceTypes(w.Context(), pool)
					return err == nil && len(types) == 2
				}, "core still finds what the Node is")
				core := disruption.NewController(clk, w.Kube, w.CloudProvider)
				drifted := func() corecloudprovider.DriftReason {
					t.Helper()
					w.Get(nodeClaim)
					_, err := core.Reconcile(w.Context(), nodeClaim)
					require.NoError(t, err)
					w.Get(nodeClaim)
					if condition := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeDrifted); condition != nil {
						return corecloudprovider.DriftReason(condition.Reason)
					}
					return ""
				}
				refreshed(w)
				assert.Empty(t, drifted(), "it may come back")
				for range 3 {
					clk.Step(2 * time.Hour)
					refreshed(w)
					assert.Equal(t, want, drifted())
				}
				types, err := w.CloudProvider.GetInstanceTypes(w.Context(), pool)
				require.NoError(t, err)
				assert.Len(t, types, 2, "core still finds what the Node is")
			})
		}
	}
}

func TestANodeGroupThatIsAwayForAWhileDriftsNothing(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}}, shimtest.WithClock(clk))
	nodeClaim := w.Launched("claim", shimtest.Registered)
	w.Agent.RemoveNodeGroup(nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 1 }, "the group is gone")
	clk.Step(59 * time.Minute)
	reason, err := w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Empty(t, reason)
	clk.Step(time.Minute)
	reason, err = w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, cloudprovider.DriftNodeGroupNotSelected, reason)
}

// The group may have come back meanwhile.
func TestANodeGroupIsNotGoneForGoodWhileTheAgentIsUnreachable(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}}, shimtest.WithClock(clk))
	nodeClaim := w.Launched("claim", shimtest.Registered)
	w.Agent.RemoveNodeGroup(nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 1 }, "the group is gone")
	w.Disconnect()
	clk.Step(2 * time.Hour)
	reason, err := w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Empty(t, reason)
	w.Reconnect()
	reason, err = w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, cloudprovider.DriftNodeGroupNotSelected, reason)
}

func TestANodeKeepsItsPriceWhenItsNodeGroupGoes(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Zone: "z1", Price: &agentv1alpha1.Price{PerHour: 0.5}}, {Name: "b"}})
	pool := w.NodePool()
	nodeClaim := w.Launched("claim", shimtest.Registered)
	require.Equal(t, "a", nodeClaim.Labels["node.kubernetes.io/instance-type"])
	refreshed(w)
	w.Agent.RemoveNodeGroup(nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 1 }, "the group is gone")
	types, err := w.CloudProvider.GetInstanceTypes(w.Context(), pool)
	require.NoError(t, err)
	require.Len(t, types, 2)
	price, ok := types[0].OfferingPrice("z1", "on-demand")
	assert.True(t, ok)
	assert.InDelta(t, 0.5, price, 0)
	assert.Empty(t, types[0].Offerings.Available())
}

func changeNodeClass(w *shimtest.Env, change func(*v1alpha1.ClusterAPINodeClassSpec)) {
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	w.Get(nodeClass)
	change(&nodeClass.Spec)
	w.Update(nodeClass)
	refreshed(w)
}

// refreshed waits for a snapshot that is newer than all changes so far.
func refreshed(w *shimtest.Env) {
	for range 2 { // one may already be in progress
		before := w.Catalogue.Snapshot()
		w.Catalogue.Refresh()
		w.Eventually(func() bool { return w.Catalogue.Snapshot() != before }, "a newer snapshot")
	}
}
