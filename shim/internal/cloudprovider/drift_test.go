package cloudprovider_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"
	coredisruption "sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/nodeclaim/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
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
				// The catalogue may not have heard of the NodeClaim yet, by which it remembers what
				// the Node is.
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

// A node group may vanish for good, and with it all that the agent says of it. Neither the time
// that has passed, nor a restart of the shim, nor core's own check of instance types overrules the
// policy.
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

// loseGroupOf removes the NodeClaim's node group, and waits until the catalogue has seen both the
// NodeClaim and that its group is gone.
func loseGroupOf(w *shimtest.Env, nodeClaim *karpv1.NodeClaim) {
	id := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
	w.Agent.RemoveNodeGroup(id)
	w.Eventually(func() bool {
		_, gone := w.Catalogue.Snapshot().GoneSince(id)
		return gone
	}, "the group is gone")
}

func TestANodeGroupThatIsAwayForAWhileDriftsNothing(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}}, shimtest.WithClock(clk))
	nodeClaim := w.Launched("claim", shimtest.Registered)
	loseGroupOf(w, nodeClaim)
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
	loseGroupOf(w, nodeClaim)
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

// The streams of claims and of node groups are opened one after the other, and the catalogue is
// rebuilt after that.
func TestANodeGroupThatIsBackDriftsNothingBeforeItIsInTheCatalogue(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	groups := &followed{connected: true}
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}}, shimtest.WithClock(clk),
		shimtest.WithNodeGroups(func(mirror catalogue.NodeGroups) catalogue.NodeGroups {
			groups.NodeGroups = mirror
			return groups
		}))
	nodeClaim := w.Launched("claim", shimtest.Registered)
	id := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
	loseGroupOf(w, nodeClaim)
	clk.Step(2 * time.Hour)
	drifts := func() corecloudprovider.DriftReason {
		reason, err := w.CloudProvider.IsDrifted(w.Context(), nodeClaim)
		require.NoError(t, err)
		return reason
	}
	require.Equal(t, cloudprovider.DriftNodeGroupNotSelected, drifts())
	groups.connected = false
	assert.Empty(t, drifts(), "only the claims are followed again")
	groups.connected, groups.back = true, id
	assert.Empty(t, drifts(), "the catalogue is older than the agent's view")
}

// followed is a mirror in the state that the test sets, and with a group that the catalogue has not
// been told about.
type followed struct {
	catalogue.NodeGroups
	connected bool
	back      string
}

func (f *followed) State() agentclient.State {
	return agentclient.State{Synced: true, Connected: f.connected}
}

func (f *followed) Get(id string) (*agentv1alpha1.NodeGroup, bool) {
	if id == f.back {
		return &agentv1alpha1.NodeGroup{}, true
	}
	return f.NodeGroups.Get(id)
}

func TestANodeKeepsItsPriceWhenItsNodeGroupGoes(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Zone: "z1", Price: &agentv1alpha1.Price{PerHour: 0.5}}, {Name: "b"}})
	pool := w.NodePool()
	nodeClaim := w.Launched("claim", shimtest.Registered)
	require.Equal(t, "a", nodeClaim.Labels["node.kubernetes.io/instance-type"])
	refreshed(w)
	loseGroupOf(w, nodeClaim)
	types, err := w.CloudProvider.GetInstanceTypes(w.Context(), pool)
	require.NoError(t, err)
	require.Len(t, types, 2)
	price, ok := types[0].OfferingPrice("z1", "on-demand")
	assert.True(t, ok)
	assert.InDelta(t, 0.5, price, 0)
	assert.Empty(t, types[0].Offerings.Available())
}

// lastGroup has a NodePool, and a Node with a pod of the only node group of its NodeClass.
type lastGroup struct {
	*shimtest.Env
	t         *testing.T
	clock     *clocktesting.FakeClock
	pool      *karpv1.NodePool
	nodeClaim *karpv1.NodeClaim
	pod       *corev1.Pod
}

func withLastGroup(t *testing.T, change func(*agentv1alpha1.NodeGroup)) *lastGroup {
	t.Helper()
	group := &agentv1alpha1.NodeGroup{
		Name: "a", InstanceType: "m5", Zone: "z1", Labels: map[string]string{"team": "red"}, Price: &agentv1alpha1.Price{PerHour: 0.5},
		Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"},
	}
	change(group)
	clk := clocktesting.NewFakeClock(time.Now())
	l := &lastGroup{Env: shimtest.New(t, []*agentv1alpha1.NodeGroup{group}, shimtest.WithClock(clk)), t: t, clock: clk}
	l.pool = l.NodePool(disruptable)
	l.nodeClaim = l.running("claim")
	l.pod = l.runningPod("app", "3", l.nodeClaim.Name)
	refreshed(l.Env)
	return l
}

func disruptable(np *karpv1.NodePool) {
	np.Spec.Disruption = karpv1.Disruption{
		ConsolidateAfter: karpv1.MustParseNillableDuration("0s"), ConsolidationPolicy: karpv1.ConsolidationPolicyWhenEmptyOrUnderutilized,
		Budgets: []karpv1.Budget{{Nodes: "100%"}},
	}
}

// running launches a NodeClaim, with a Node that has joined and that core may consolidate.
func (l *lastGroup) running(name string) *karpv1.NodeClaim {
	l.t.Helper()
	nodeClaim := l.Launched(name, shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeInitialized)
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeConsolidatable)
	})
	node := l.Node(nodeClaim)
	node.Labels[karpv1.NodeInitializedLabelKey] = "true"
	l.Update(node)
	return nodeClaim
}

// runningPod creates a pod of a ReplicaSet on a Node.
func (l *lastGroup) runningPod(name, cpu, node string) *corev1.Pod {
	l.t.Helper()
	return l.PendingPod(name, cpu, func(pod *corev1.Pod) {
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "app", UID: "app", Controller: new(true)}}
		pod.Spec.NodeName, pod.Status = node, corev1.PodStatus{Phase: corev1.PodRunning}
	})
}

// drifted returns the reason of the condition Drifted after core has looked at the NodeClaim.
func (l *lastGroup) drifted() string {
	l.t.Helper()
	l.Get(l.nodeClaim)
	_, err := disruption.NewController(l.clock, l.Kube, l.CloudProvider).Reconcile(l.Context(), l.nodeClaim)
	require.NoError(l.t, err, "core tries again late after an error")
	l.Get(l.nodeClaim)
	if drifted := l.nodeClaim.StatusConditions().Get(karpv1.ConditionTypeDrifted); drifted != nil {
		return drifted.Reason
	}
	return ""
}

// empty waits until the NodeClass selects no usable node group.
func (l *lastGroup) empty() {
	l.t.Helper()
	l.Eventually(func() bool {
		l.Catalogue.Refresh()
		class, _ := l.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return len(class.Groups) == 0
	}, "the NodeClass selects nothing")
}

func selects(selector *metav1.LabelSelector) func(*lastGroup) {
	return func(l *lastGroup) {
		changeNodeClass(l.Env, func(spec *v1alpha1.ClusterAPINodeClassSpec) { spec.ScalableResourceSelector = selector })
	}
}

// Most often this is a mistake. Until it is corrected, core knows what it needs to know of the
// Nodes, and launches nothing. The NodePool stays Ready in this test, as it is until its NodeClass
// is not.
func TestANodeClassThatSelectsNothingCostsNoNode(t *testing.T) {
	typo := &metav1.LabelSelector{MatchLabels: map[string]string{"team": "rde"}}
	invalid := &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Near"}}}
	normal := func(*agentv1alpha1.NodeGroup) {}
	zoneless := func(g *agentv1alpha1.NodeGroup) { g.Zone = "" }
	reserved := func(g *agentv1alpha1.NodeGroup) { g.CapacityType = agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED }
	for name, c := range map[string]struct {
		group  func(*agentv1alpha1.NodeGroup)
		change func(*lastGroup)
	}{
		"the opt-in label is gone": {normal, func(l *lastGroup) { l.Agent.RemoveNodeGroup("default/a") }},
		"the selector has a typo":  {normal, selects(typo)},
		"the selector is invalid":  {normal, selects(invalid)},
		"the group cannot be used": {normal, func(l *lastGroup) {
			l.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Zone = "no label!" })
		}},
		"the group has no zone":      {zoneless, selects(typo)},
		"the group is a reservation": {reserved, selects(typo)},
	} {
		for _, policy := range []v1alpha1.DriftAction{v1alpha1.DriftReplace, v1alpha1.DriftIgnore} {
			for _, restarts := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, restarted: %t", name, policy, restarts), func(t *testing.T) {
					l := withLastGroup(t, c.group)
					changeNodeClass(l.Env, func(spec *v1alpha1.ClusterAPINodeClassSpec) { spec.Drift.NodeGroupNotSelected = policy })
					c.change(l)
					l.empty()
					if restarts {
						l.Restart()
					}
					l.PendingPod("pending", "3")
					for range 3 {
						l.clock.Step(2 * time.Hour)
						assert.Empty(t, l.drifted())
						assert.Empty(t, l.Plan().NewNodeClaims)
						commands, err := l.Disrupt()
						require.NoError(t, err)
						assert.Empty(t, commands)
					}
					types, err := l.CloudProvider.GetInstanceTypes(l.Context(), l.pool)
					require.NoError(t, err)
					require.Len(t, types, 1, "core still finds what the Node is")
					assert.Equal(t, "m5", types[0].Name)
					assert.Empty(t, types[0].Offerings.Available())
				})
			}
		}
	}
}

func TestCoreDisruptsTheNodesOfANodeClassThatSelectsNothing(t *testing.T) {
	typo := selects(&metav1.LabelSelector{MatchLabels: map[string]string{"team": "rde"}})
	onDelete := func(g *agentv1alpha1.NodeGroup) {
		g.RolloutStrategy = agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE
	}
	normal := func(*agentv1alpha1.NodeGroup) {}
	// The NodeClaims that core removes without a replacement.
	removed := func(l *lastGroup) []string {
		l.t.Helper()
		commands, err := l.Disrupt()
		require.NoError(l.t, err)
		return lo.FlatMap(commands, func(command coredisruption.Command, _ int) []string {
			assert.Equal(l.t, coredisruption.DeleteDecision, command.Decision())
			return lo.Map(command.Candidates, func(c *coredisruption.Candidate, _ int) string { return c.NodeClaim.Name })
		})
	}

	t.Run("an empty one is removed", func(t *testing.T) {
		l := withLastGroup(t, normal)
		typo(l)
		require.NoError(t, l.Kube.Delete(l.Context(), l.pod))
		assert.Equal(t, []string{"claim"}, removed(l))
	})
	t.Run("one whose pods fit on another is removed", func(t *testing.T) {
		l := withLastGroup(t, normal)
		l.running("other")
		l.runningPod("small", "500m", "other")
		refreshed(l.Env)
		typo(l)
		assert.Len(t, removed(l), 1)
	})
	t.Run("an empty one is removed while no NodePool is Ready, and no other one is looked at", func(t *testing.T) {
		l := withLastGroup(t, normal)
		l.running("other")
		typo(l)
		l.pool.StatusConditions().SetFalse(karpv1.ConditionTypeNodeClassReady, "NoNodeGroups", "it selects nothing")
		require.NoError(t, l.Kube.Status().Update(l.Context(), l.pool))
		assert.Equal(t, []string{"other"}, removed(l))
		l.runningPod("small", "500m", "other")
		_, err := l.Disrupt()
		assert.ErrorIs(t, err, provisioning.ErrNodePoolsNotFound, "core looks again after an interval that doubles")
	})
	t.Run("the other reasons of the drift policy count", func(t *testing.T) {
		l := withLastGroup(t, onDelete)
		typo(l)
		l.CloudProvider.Claims = stale{l.Claims, &agentv1alpha1.Claim{
			ClaimId: string(l.nodeClaim.UID), NodeGroupId: "default/a", Machine: &agentv1alpha1.Machine{Name: "m", UpToDate: false},
		}}
		l.clock.Step(2 * time.Hour)
		assert.Equal(t, string(cloudprovider.DriftMachineNotUpToDate), l.drifted())
		assert.Empty(t, removed(l), "there is no replacement for it")
	})
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
