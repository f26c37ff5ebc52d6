package cloudprovider_test

import (
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"
	coresched "sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// redInZone1BlueInZone2 returns groups of one instance type in which a label that core does not
// know depends on the zone.
func redInZone1BlueInZone2() []*agentv1alpha1.NodeGroup {
	group := func(team, zone string) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{
			Name: team, InstanceType: "m5", Zone: zone, NodeLabels: map[string]string{"team": team},
			Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"},
		}
	}
	return []*agentv1alpha1.NodeGroup{group("red", "z1"), group("blue", "z2")}
}

func wantsTeam(operator corev1.NodeSelectorOperator, values ...string) func(*karpv1.NodePool) {
	return func(np *karpv1.NodePool) {
		np.Spec.Template.Spec.Requirements = append(np.Spec.Template.Spec.Requirements, karpv1.NodeSelectorRequirementWithMinValues{
			Key: "team", Operator: operator, Values: values,
		})
	}
}

func spread(pod *corev1.Pod) {
	pod.Labels = map[string]string{"app": "web"}
	pod.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
		MaxSkew: 1, TopologyKey: corev1.LabelTopologyZone, WhenUnsatisfiable: corev1.DoNotSchedule,
		LabelSelector: &metav1.LabelSelector{MatchLabels: pod.Labels},
	}}
}

// launch creates the NodeClaims that core planned, and returns their node groups.
func launch(t *testing.T, w *shimtest.Env, planned []*coresched.NodeClaim) []string {
	t.Helper()
	return lo.Map(planned, func(p *coresched.NodeClaim, _ int) string {
		nodeClaim := p.ToNodeClaim()
		nodeClaim.Name, nodeClaim.UID = "claim-"+string(uuid.NewUUID()), uuid.NewUUID()
		created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
		require.NoError(t, err, "core planned what no node group serves, and would do so again and again")
		return created.Annotations["karpenter.cluster.x-k8s.io/node-group"]
	})
}

func TestCorePlansNothingThatNoNodeGroupServes(t *testing.T) {
	for name, c := range map[string]struct {
		pool func(*karpv1.NodePool)
		want []string
	}{
		"the NodePool requires one value": {
			pool: wantsTeam(corev1.NodeSelectorOpIn, "red"), want: []string{"default/red", "default/red"},
		},
		"the NodePool has it as a label": {
			pool: func(np *karpv1.NodePool) { np.Spec.Template.Labels = map[string]string{"team": "red"} },
			want: []string{"default/red", "default/red"},
		},
		"the NodePool excludes a value": {
			pool: wantsTeam(corev1.NodeSelectorOpNotIn, "blue"), want: []string{"default/red", "default/red"},
		},
		"the NodePool allows both": {
			pool: wantsTeam(corev1.NodeSelectorOpIn, "red", "blue"), want: []string{"default/blue", "default/red"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, redInZone1BlueInZone2())
			w.NodePool(c.pool)
			w.PendingPod("one", "3", spread)
			w.PendingPod("two", "3", spread)
			results := w.Plan()
			assert.ElementsMatch(t, c.want, launch(t, w, results.NewNodeClaims))
			assert.Empty(t, results.PodErrors)
		})
	}
}

// Core knows that there is a second zone, but not that none of its machines is red. It may want
// that zone for a pod, and must then see that nothing is available there.
func TestCorePlansNothingThatNoNodeGroupServesWherePodsChooseALabel(t *testing.T) {
	w := shimtest.New(t, redInZone1BlueInZone2())
	w.NodePool(wantsTeam(corev1.NodeSelectorOpExists))
	for _, name := range []string{"one", "two"} {
		w.PendingPod(name, "3", spread, func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"team": "red"} })
	}
	results := w.Plan()
	assert.Subset(t, []string{"default/red"}, launch(t, w, results.NewNodeClaims))
	assert.NotEmpty(t, results.PodErrors, "the event of the pod says why it waits")
}

// This is why a missing zone may be a problem of the NodeClass. Pods that only prefer to spread get
// their Nodes.
func TestCorePlansNoPodThatMustSpreadOverZonesForAGroupWithoutOne(t *testing.T) {
	group := func(name, zone string) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{Name: name, InstanceType: "m5", Zone: zone}
	}
	prefers := func(pod *corev1.Pod) {
		spread(pod)
		pod.Spec.TopologySpreadConstraints[0].WhenUnsatisfiable = corev1.ScheduleAnyway
	}
	for name, c := range map[string]struct {
		groups []*agentv1alpha1.NodeGroup
		pod    func(*corev1.Pod)
		most   []string
		least  int
	}{
		"no group has a zone": {[]*agentv1alpha1.NodeGroup{group("a", ""), group("b", "")}, spread, nil, 0},
		// Core chooses between the two zones at random, and finds no group in the one without a
		// name.
		"one group has":   {[]*agentv1alpha1.NodeGroup{group("a", ""), group("b", "z1")}, spread, []string{"default/b"}, 0},
		"all groups have": {[]*agentv1alpha1.NodeGroup{group("a", "z1")}, spread, []string{"default/a", "default/a", "default/a"}, 3},
		"no group has, and the pods only prefer to spread": {
			[]*agentv1alpha1.NodeGroup{group("a", "")}, prefers, []string{"default/a", "default/a", "default/a"}, 3,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, c.groups)
			w.NodePool()
			for _, pod := range []string{"one", "two", "three"} {
				w.PendingPod(pod, "3", c.pod)
			}
			results := w.Plan()
			planned := launch(t, w, results.NewNodeClaims)
			assert.Subset(t, c.most, planned)
			assert.GreaterOrEqual(t, len(planned), c.least)
			assert.LessOrEqual(t, len(planned), len(c.most))
			assert.Len(t, results.PodErrors, 3-len(planned), "the events of the pods say why they wait")
		})
	}
}

func TestAFullGroupIsNotPlannedForTheSakeOfAnotherValueOfItsLabel(t *testing.T) {
	groups := redInZone1BlueInZone2()
	groups[1].Zone = "z1"
	w := shimtest.New(t, groups)
	w.NodePool(wantsTeam(corev1.NodeSelectorOpExists))
	w.PendingPod("one", "3", func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"team": "red"} })
	require.Len(t, w.Plan().NewNodeClaims, 1)
	w.Agent.Block("default/red", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
	w.Eventually(func() bool { return len(w.Plan().NewNodeClaims) == 0 }, "the full group shows")
}

// A full reservation has no effect on pods with an alternative by default, but a harmful one once
// it is offered for terminate-first. Therefore it is only offered for that.
func TestPodsRunBesideAFullReservation(t *testing.T) {
	reserved := requirement(karpv1.CapacityTypeLabelKey, karpv1.CapacityTypeReserved)
	prefers := func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 1, Preference: corev1.NodeSelectorTerm{
				MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: karpv1.CapacityTypeLabelKey, Operator: corev1.NodeSelectorOpIn, Values: []string{karpv1.CapacityTypeReserved},
				}},
			}}},
		}}
	}
	anything := func(*corev1.Pod) {}
	for name, c := range map[string]struct {
		pools   []func(*karpv1.NodePool)
		pod     func(*corev1.Pod)
		offered bool
		planned int
	}{
		"a pod for either":                         {pools: []func(*karpv1.NodePool){unchanged}, pod: anything, planned: 1},
		"a pod for either, offered":                {pools: []func(*karpv1.NodePool){unchanged}, pod: anything, offered: true, planned: 1},
		"a preference":                             {pools: []func(*karpv1.NodePool){unchanged}, pod: prefers, planned: 1},
		"a preference, offered: it waits":          {pools: []func(*karpv1.NodePool){unchanged}, pod: prefers, offered: true},
		"a pool of its own before":                 {pools: []func(*karpv1.NodePool){unchanged, first(reserved)}, pod: anything, planned: 1},
		"a pool of its own before, offered: waits": {pools: []func(*karpv1.NodePool){unchanged, first(reserved)}, pod: anything, offered: true},
		"nothing else":                             {pools: []func(*karpv1.NodePool){reserved}, pod: anything},
		"nothing else, offered":                    {pools: []func(*karpv1.NodePool){reserved}, pod: anything, offered: true},
	} {
		t.Run(name, func(t *testing.T) {
			groups := redInZone1BlueInZone2()
			one := int32(1)
			groups[0].CapacityType, groups[0].MaxSize = agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED, &one
			groups[1].Zone = "z1"
			var options []shimtest.Option
			if c.offered {
				options = append(options, shimtest.WithFullReservations())
			}
			w := shimtest.New(t, groups, options...)
			for _, change := range c.pools {
				w.NodePool(change)
			}
			w.PendingPod("one", "3", c.pod)
			w.Agent.Block("default/red", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
			w.Eventually(func() bool {
				group, ok := w.Catalogue.Snapshot().Group("default/red")
				return ok && !group.Available
			}, "the full group shows")
			planned := w.Plan().NewNodeClaims
			assert.Len(t, planned, c.planned)
			for _, group := range launch(t, w, planned) {
				assert.Equal(t, "default/blue", group)
			}
		})
	}
}

// What is left of a reservation is known from the agent's last report. Core may therefore plan one
// NodeClaim too many, which costs no machine, and only one attempt.
func TestANodeClaimTooManyForAReservationIsPlannedElsewhere(t *testing.T) {
	groups := redInZone1BlueInZone2()
	groups[0].CapacityType, groups[0].MaxSize = agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED, new(int32(1))
	groups[1].Zone = "z1"
	w := shimtest.New(t, groups)
	w.NodePool()
	pod := w.PendingPod("one", "3")
	w.Agent.FreezeStreams(true)
	require.Equal(t, []string{"default/red"}, launch(t, w, w.Plan().NewNodeClaims))
	require.NoError(t, w.Kube.Delete(w.Context(), pod)) // it has its Node

	w.PendingPod("two", "3")
	planned := w.Plan().NewNodeClaims
	require.Len(t, planned, 1)
	tooMany := planned[0].ToNodeClaim()
	tooMany.Name, tooMany.UID = "too-many", uuid.NewUUID()
	_, err := w.CloudProvider.Create(w.Context(), tooMany)
	require.True(t, corecloudprovider.IsInsufficientCapacityError(err), "%v", err)
	assert.EqualValues(t, 1, w.Agent.NodeGroup("default/red").GetReplicas())
	w.Eventually(func() bool {
		planned = w.Plan().NewNodeClaims
		return len(planned) == 1 && !planned[0].Requirements.Has(v1alpha1.ReservationLabel)
	}, "core no longer plans with the reservation, although the agent's report has not arrived")
	assert.Equal(t, []string{"default/blue"}, launch(t, w, planned))
}

func unchanged(*karpv1.NodePool) {}

func requirement(key string, values ...string) func(*karpv1.NodePool) {
	return func(np *karpv1.NodePool) {
		np.Spec.Template.Spec.Requirements = append(np.Spec.Template.Spec.Requirements, karpv1.NodeSelectorRequirementWithMinValues{
			Key: key, Operator: corev1.NodeSelectorOpIn, Values: values,
		})
	}
}

// first makes core try the NodePool before the others.
func first(change func(*karpv1.NodePool)) func(*karpv1.NodePool) {
	return func(np *karpv1.NodePool) {
		np.Name, np.Spec.Weight = "first", new(int32(10))
		change(np)
	}
}

func TestNodesOfGroupsThatTheNodePoolToldApartAreFoundByTheirLabels(t *testing.T) {
	w := shimtest.New(t, redInZone1BlueInZone2())
	pool := w.NodePool(wantsTeam(corev1.NodeSelectorOpExists))
	types, err := w.CloudProvider.GetInstanceTypes(w.Context(), pool)
	require.NoError(t, err)
	require.Len(t, types, 1)
	assert.Len(t, types[0].Offerings.Available(), 2)
	// The catalogue may be rebuilt once, as the NodePool is new.
	w.Eventually(func() bool {
		before := types[0]
		types, err = w.CloudProvider.GetInstanceTypes(w.Context(), pool)
		require.NoError(t, err)
		return types[0] == before
	}, "the same objects for the same question")
	without, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePoolOf("other"))
	require.NoError(t, err)
	for _, offering := range without[0].Offerings {
		assert.False(t, offering.Requirements.Has("team"), "core refuses a label there that this NodePool does not name")
	}
}

func TestWhatWasRefusedIsLeftAloneForAWhile(t *testing.T) {
	refused := func(ttl time.Duration) (w *shimtest.Env, available func(nodePool string) []string) {
		w = shimtest.New(t, redInZone1BlueInZone2(), shimtest.WithUnavailableTTL(ttl))
		tooMuch := w.NodeClaim("claim", requiring(corev1.LabelTopologyZone, "z1"), requests("cpu", "64"))
		_, err := w.CloudProvider.Create(w.Context(), tooMuch)
		require.True(t, corecloudprovider.IsInsufficientCapacityError(err), "%v", err)
		return w, func(nodePool string) []string {
			types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePoolOf(nodePool))
			require.NoError(t, err)
			return lo.Map(types[0].Offerings.Available(), func(o *corecloudprovider.Offering, _ int) string { return o.Zone() })
		}
	}
	w, available := refused(time.Hour)
	w.Eventually(func() bool { return !lo.Contains(available(shimtest.NodePoolName), "z1") }, "core does not plan it again")
	assert.Equal(t, []string{"z2"}, available(shimtest.NodePoolName), "nothing else is left alone")
	assert.ElementsMatch(t, []string{"z1", "z2"}, available("another"), "nor for other NodePools")
	w, available = refused(2 * time.Second)
	begun := time.Now()
	w.Eventually(func() bool { return len(available(shimtest.NodePoolName)) == 1 || time.Since(begun) > 2*time.Second },
		"core does not plan it, or does so again already")
	w.Eventually(func() bool { return len(available(shimtest.NodePoolName)) == 2 }, "it is tried again later")
}

func nodePoolOf(name string) *karpv1.NodePool {
	nodePool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: name}}
	nodePool.Spec.Template.Spec.NodeClassRef = shimtest.NodeClassRef()
	return nodePool
}
