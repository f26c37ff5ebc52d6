package adoption_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/adoption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// nodesEnv is an env with a NodePool, whose machine has a Node of the user.
type nodesEnv struct {
	*env

	kube  client.WithWatch // the controller's client
	nodes *adoption.Nodes
	node  *corev1.Node
	pool  *karpv1.NodePool

	unsettled bool // NodeClaims are still being adopted
}

func (e *nodesEnv) isSettled() bool { return !e.unsettled }

func setUpNodes(t *testing.T, policy v1alpha1.AdoptionPolicy, disturbances ...interceptor.Funcs) *nodesEnv {
	t.Helper()
	e := &nodesEnv{env: setUp(t)}
	e.kube = e.Kube
	for _, disturbance := range disturbances {
		e.kube = interceptor.NewClient(e.kube, disturbance)
	}
	e.nodes = adoption.NewNodes(e.nodesConfig())
	e.node = e.userNode("node", e.machine.GetProviderId())
	e.Create(e.node)
	e.pool = e.nodePool(shimtest.NodePoolName)
	e.Create(e.pool)
	e.setPolicy(policy)
	return e
}

func (e *nodesEnv) nodesConfig() adoption.NodesConfig {
	return adoption.NodesConfig{
		Kube: e.kube, Provider: e.CloudProvider, Unclaimed: e.Unclaimed, Catalogue: e.Catalogue, Agent: e.Client, Cluster: e.Cluster,
		Recorder: e.Recorder, Settled: e.isSettled, Clock: e.clock,
	}
}

// userNode returns a Node that is Ready and not managed by Karpenter.
func (e *env) userNode(name, providerID string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: uuid.NewUUID(), Labels: map[string]string{"team": "blue", "own": "label"}},
		Spec: corev1.NodeSpec{
			ProviderID: providerID, Taints: []corev1.Taint{{Key: "dedicated", Value: "x", Effect: corev1.TaintEffectNoSchedule}},
		},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

func (e *env) nodePool(name string) *karpv1.NodePool {
	pool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: name, UID: uuid.NewUUID()}}
	pool.Spec.Template.Spec.NodeClassRef = shimtest.NodeClassRef()
	return pool
}

func (e *nodesEnv) setPolicy(policy v1alpha1.AdoptionPolicy) {
	class := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	e.Get(class)
	class.Spec.Adoption = policy
	e.Update(class)
}

// look reconciles the Node, and returns the NodeClaim created for it, or nil.
func (e *nodesEnv) look() *karpv1.NodeClaim {
	e.t.Helper()
	e.Get(e.node)
	_, err := e.nodes.Reconcile(e.Context(), e.node)
	require.NoError(e.t, err)
	e.Get(e.node)
	nodeClaim := &karpv1.NodeClaim{}
	err = e.Kube.Get(e.Context(), client.ObjectKey{Name: e.machine.GetName()}, nodeClaim)
	require.NoError(e.t, client.IgnoreNotFound(err))
	if err != nil {
		return nil
	}
	return nodeClaim
}

func TestANodeOfTheUsersGetsANodeClaimThatAdoptsItsMachine(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	e.pool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
		{Key: "own", Operator: corev1.NodeSelectorOpExists}, {Key: "team", Operator: corev1.NodeSelectorOpIn, Values: []string{"blue"}},
	}
	e.pool.Spec.Template.Labels = map[string]string{"added": "by core"}
	e.pool.Spec.Template.Spec.StartupTaints = []corev1.Taint{{Key: "starting", Effect: corev1.TaintEffectNoSchedule}}
	e.Update(e.pool)
	nodeClaim := e.look()
	require.NotNil(t, nodeClaim)

	assert.Equal(t, "true", e.node.Labels[karpv1.NodeDoNotSyncTaintsLabelKey], "registration would add taints")
	assert.Equal(t, "true", e.node.Annotations[karpv1.DoNotDisruptAnnotationKey])
	assert.Equal(t, "true", e.node.Labels[v1alpha1.AdoptedLabel])

	assert.Equal(t, e.machine.GetName(), nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation])
	assert.NotEmpty(t, nodeClaim.Annotations[karpv1.NodePoolHashAnnotationKey])
	assert.Equal(t, shimtest.NodePoolName, nodeClaim.Labels[karpv1.NodePoolLabelKey])
	assert.Equal(t, "blue", nodeClaim.Labels["team"], "as the Node says")
	assert.Equal(t, "label", nodeClaim.Labels["own"])
	assert.Equal(t, "by core", nodeClaim.Labels["added"])
	assert.Equal(t, "large", nodeClaim.Labels[corev1.LabelInstanceTypeStable])
	assert.Equal(t, e.pool.UID, nodeClaim.OwnerReferences[0].UID)
	assert.Empty(t, nodeClaim.Spec.StartupTaints, "the Node has started")

	// This is what core does with it.
	nodeClaim.UID = uuid.NewUUID()
	created, err := e.CloudProvider.Create(e.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, e.Placeholder(nodeClaim.UID), created.Status.ProviderID)
	assert.Equal(t, "blue", nodeClaim.Labels["team"], "still, or its Node would drift")
	assert.Equal(t, e.machine.GetName(), e.claim(nodeClaim).GetAdoptMachine())
	assert.EqualValues(t, 1, e.Agent.NodeGroup(e.machine.GetNodeGroupId()).GetReplicas())
	_, err = e.CloudProvider.Create(e.Context(), nodeClaim)
	require.NoError(t, err, "and once more, as after a lost answer")
	require.NotNil(t, e.look(), "and there is one NodeClaim")
}

// counting counts how often the node groups are looked at.
type counting struct {
	adoption.Catalogue
	looks *atomic.Int32
}

func (c counting) Snapshot() *catalogue.Snapshot {
	snapshot := c.Catalogue.Snapshot()
	c.looks.Add(1)
	return snapshot
}

// Which node groups a NodeClass selects also changes without its spec: when a label of a node group
// does.
func TestNodesAreAdoptedWhenTheirNodeGroupBecomesSelected(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	class := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	e.Get(class)
	class.Spec.ScalableResourceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"for": "karpenter"}}
	e.Update(class)
	selected := func() bool {
		e.Catalogue.Refresh()
		known, _ := e.Catalogue.Snapshot().Class(class.Name)
		return len(known.Groups) > 0
	}
	e.Eventually(func() bool { return !selected() }, "the node group is not selected")

	c := e.nodesConfig()
	looks := &atomic.Int32{}
	c.Catalogue = counting{c.Catalogue, looks}
	m := e.Manager(e.Cache(class))
	require.NoError(t, adoption.NewNodes(c).Register(e.Context(), m))
	ctx, cancel := context.WithCancel(e.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { assert.NoError(t, m.Start(ctx)) })
	e.Eventually(func() bool { return looks.Load() == 1 }, "the Node is looked at")

	e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) {
		g.Labels = map[string]string{"for": "karpenter"}
	})
	e.Eventually(selected, "the node group is selected")
	class.Status.NodeGroups, class.Status.Selected = 1, []v1alpha1.SelectedNodeGroup{{Name: "a"}}
	require.NoError(t, e.Kube.Status().Update(e.Context(), class))
	e.Eventually(func() bool {
		return e.Exists(&karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: e.machine.GetName()}})
	}, "the Node has a NodeClaim")
}

func TestOnlyWhatTheNodeClassAsksForIsAdopted(t *testing.T) {
	asked := map[string]string{v1alpha1.AdoptAnnotation: "true"}
	for name, test := range map[string]struct {
		mode        v1alpha1.AdoptionMode
		annotations map[string]string
		want        bool
	}{
		"by default nothing":         {annotations: asked},
		"never":                      {mode: v1alpha1.AdoptNever, annotations: asked},
		"on request, and none":       {mode: v1alpha1.AdoptOnRequest},
		"on request":                 {mode: v1alpha1.AdoptOnRequest, annotations: asked, want: true},
		"on request, with a refusal": {mode: v1alpha1.AdoptOnRequest, annotations: map[string]string{v1alpha1.AdoptAnnotation: "false"}},
		"all":                        {mode: v1alpha1.AdoptAll, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: test.mode})
			e.node.Annotations = test.annotations
			e.Update(e.node)
			assert.Equal(t, test.want, e.look() != nil)
			assert.Equal(t, test.want, e.node.Labels[v1alpha1.AdoptedLabel] != "")
		})
	}
}

func TestNodesThatMayBeAClaimsAreLeftAlone(t *testing.T) {
	for name, change := range map[string]func(*nodesEnv){
		"a Node that is not registered": func(e *nodesEnv) { e.node.Spec.Taints = append(e.node.Spec.Taints, karpv1.UnregisteredNoExecuteTaint) },
		"a Node that is not Ready":      func(e *nodesEnv) { e.node.Status.Conditions[0].Status = corev1.ConditionUnknown },
		"a Node of Karpenter's":         func(e *nodesEnv) { e.node.Labels[karpv1.NodePoolLabelKey] = "pool" },
		"a Node of no machine":          func(e *nodesEnv) { e.node.Spec.ProviderID = "aws:///us-west-2a/i-0123" },
	} {
		t.Run(name, func(t *testing.T) {
			e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
			change(e)
			status := e.node.Status
			e.Update(e.node)
			e.node.Status = status
			require.NoError(t, e.Kube.Status().Update(e.Context(), e.node))
			assert.Nil(t, e.look())
		})
	}
	t.Run("a Node that has a NodeClaim", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
		e.left("other")
		assert.Nil(t, e.look())
	})
	t.Run("while the agent is away", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
		e.Disconnect()
		assert.Nil(t, e.look())
		assert.Empty(t, e.Recorder.Reasons())
	})
}

func TestANodeIsAdoptedByTheNodePoolThatItFits(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*karpv1.NodePool)
		says   string
	}{
		"a requirement that the Node does not meet": {func(p *karpv1.NodePool) {
			p.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
				{Key: "team", Operator: corev1.NodeSelectorOpIn, Values: []string{"green"}},
			}
		}, "NodePool pool: "},
		"a taint that the Node does not have": {func(p *karpv1.NodePool) {
			p.Spec.Template.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
		}, "does not have its taint gpu:NoSchedule"},
		"another label than the Node's": {func(p *karpv1.NodePool) {
			p.Spec.Template.Labels = map[string]string{"team": "green"}
		}, "the Node has the label team=blue, and its Nodes have team=green"},
		"a fixed number of Nodes": {func(p *karpv1.NodePool) { p.Spec.Replicas = new(int64(3)) }, "already has the Nodes of its spec.replicas"},
		"another NodeClass's": {func(p *karpv1.NodePool) {
			p.Spec.Template.Spec.NodeClassRef.Name = "other"
		}, "no NodePool refers to ClusterAPINodeClass default"},
		"another provider's NodePool": {func(p *karpv1.NodePool) { p.Spec.Template.Spec.NodeClassRef.Group = "example.com" }, "no NodePool refers"},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
			test.change(e.pool)
			e.Update(e.pool)
			assert.Nil(t, e.look())
			require.Equal(t, []string{"MachineNotAdopted"}, e.Recorder.Reasons())
			assert.Contains(t, e.Recorder.Messages()[0], test.says)
			assert.NotContains(t, e.node.Labels, v1alpha1.AdoptedLabel, "nothing is changed")

			fitting := e.nodePool("fitting")
			e.Create(fitting)
			nodeClaim := e.look()
			require.NotNil(t, nodeClaim)
			assert.Equal(t, "fitting", nodeClaim.Labels[karpv1.NodePoolLabelKey])
		})
	}
	t.Run("the one with the greatest weight", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
		heavy := e.nodePool("z-heavy")
		heavy.Spec.Weight = new(int32(10))
		e.Create(heavy)
		assert.Equal(t, "z-heavy", e.look().Labels[karpv1.NodePoolLabelKey])
	})
}

func TestTheUserKeepsTheMinSize(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptOnRequest})
	e.node.Annotations = map[string]string{v1alpha1.AdoptAnnotation: "true"}
	e.Update(e.node)
	e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) { g.MinSize = 1 })
	assert.Nil(t, e.look())
	require.Equal(t, []string{"MachineNotAdopted"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "min size 1")

	e.setPolicy(v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	e.node.Annotations = nil
	e.Update(e.node)
	assert.Nil(t, e.look())
	assert.Len(t, e.Recorder.Reasons(), 1, "the adoption of this Node was not requested")
}

// Another claim got the machine between the validation and the claim: core then deletes the
// NodeClaim.
func TestANodeClaimWhoseMachineIsAnothersIsOfNoUse(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	nodeClaim := e.look()
	require.NotNil(t, nodeClaim)
	e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) { g.MinSize = 1 })
	nodeClaim.UID = uuid.NewUUID()
	_, err := e.CloudProvider.Create(e.Context(), nodeClaim)
	assert.True(t, corecloudprovider.IsInsufficientCapacityError(err), "%v", err)

	e.Agent.LoseMachine(e.Cluster, e.machine.GetName())
	e.clock.Step(time.Minute)
	_, err = e.CloudProvider.Create(e.Context(), nodeClaim)
	assert.True(t, corecloudprovider.IsInsufficientCapacityError(err), "%v", err)
	assert.Nil(t, e.claim(nodeClaim), "it gets no other machine")
}

// minSize is the number of machines that the user keeps, see [nodesEnv.users].
const minSize = 2

// users sets the number of machines and a min size, creates the missing Nodes, and returns the
// machines.
func (e *nodesEnv) users(replicas int) []*agentv1alpha1.Machine {
	e.t.Helper()
	e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) {
		g.Replicas, g.MinSize, g.MaxSize = int32(replicas), minSize, new(int32(100))
	})
	e.clock.Step(time.Minute) // expire the listing
	response, err := e.Client.Machines.ListMachines(e.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: e.Cluster})
	require.NoError(e.t, err)
	machines := response.GetMachines()
	require.Len(e.t, machines, replicas)
	for _, m := range machines {
		if m.GetProviderId() != e.machine.GetProviderId() {
			require.NoError(e.t, client.IgnoreAlreadyExists(e.Kube.Create(e.Context(), e.userNode(m.GetName(), m.GetProviderId()))))
		}
	}
	return machines
}

// lookAtAll reconciles all Nodes, and returns the resulting number of NodeClaims.
func (e *nodesEnv) lookAtAll() int {
	e.t.Helper()
	nodes, nodeClaims := &corev1.NodeList{}, &karpv1.NodeClaimList{}
	require.NoError(e.t, e.Kube.List(e.Context(), nodes))
	for i := range nodes.Items {
		_, err := e.nodes.Reconcile(e.Context(), &nodes.Items[i])
		require.NoError(e.t, err)
		e.clock.Step(time.Second) // until the next turn
	}
	require.NoError(e.t, e.Kube.List(e.Context(), nodeClaims))
	return len(nodeClaims.Items)
}

// launch does what core does with the NodeClaims created for Nodes.
func (e *nodesEnv) launch() {
	e.t.Helper()
	nodeClaims := &karpv1.NodeClaimList{}
	require.NoError(e.t, e.Kube.List(e.Context(), nodeClaims))
	for i := range nodeClaims.Items {
		nodeClaim := &nodeClaims.Items[i]
		if nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation] == "" {
			continue
		}
		nodeClaim.UID = uuid.NewUUID()
		if _, err := e.CloudProvider.Create(e.Context(), nodeClaim); !corecloudprovider.IsInsufficientCapacityError(err) {
			require.NoError(e.t, err)
		}
	}
}

func (e *nodesEnv) replicas() int32 {
	return e.Agent.NodeGroup(e.machine.GetNodeGroupId()).GetReplicas()
}

// Otherwise Nodes would take what the user has above the min size, and each NodeClaim would raise
// replicas.
func TestNodeClaimsAdoptBeforeNodes(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	machines := e.users(5)
	e.unsettled = true
	var left []*karpv1.NodeClaim
	for _, m := range machines[2:] {
		left = append(left, e.left("left-"+m.GetName(), func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = m.GetProviderId() }))
	}
	assert.Equal(t, 3, e.lookAtAll(), "nothing is settled yet")
	e.launch()
	for _, nodeClaim := range left {
		e.reconcile(nodeClaim)
		assert.NotNil(t, e.claim(nodeClaim))
	}
	e.unsettled = false
	assert.Equal(t, 3, e.lookAtAll(), "the user keeps the min size")
	assert.EqualValues(t, 5, e.replicas())
}

func TestNodesWaitForTheNodeClaimsThatAreNotLaunchedYet(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	machines := e.users(3)
	begun := e.NodeClaim("begun", func(nc *karpv1.NodeClaim) {
		nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: "default/" + machines[2].GetName()}
	})
	e.Create(begun)
	assert.Equal(t, 1, e.lookAtAll(), "neither its machine is adopted, nor what it needs above the min size")
	e.launch()
	_, err := e.CloudProvider.Create(e.Context(), begun)
	require.NoError(t, err)
	assert.Equal(t, machines[2].GetName(), e.claim(begun).GetAdoptMachine())
	assert.EqualValues(t, 3, e.replicas())

	begun.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	require.NoError(t, e.Kube.Status().Update(e.Context(), begun))
	for name, reference := range map[string]string{"gone": "default/gone", "other": "other/" + machines[0].GetName(), "odd": "odd"} {
		e.Create(e.NodeClaim(name, func(nc *karpv1.NodeClaim) {
			nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: reference}
		}))
	}
	e.users(4)
	assert.Equal(t, 4+3, e.lookAtAll(), "the others have no machine to wait for")
	events := e.Recorder.Reasons()
	assert.Equal(t, 4+3, e.lookAtAll())
	assert.Equal(t, events, e.Recorder.Reasons(), "these wait for their launch")
}

func TestAdoptionsAreAsManyAMinuteAsTheNodeClassSays(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll, NodesPerMinute: new(int32(2))})
	require.NotNil(t, e.look())
	e.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "b", Replicas: 1, InstanceType: "large", NodeLabels: map[string]string{"team": "red"}})
	e.clock.Step(6 * time.Second) // expire the listing
	response, err := e.Client.Machines.ListMachines(e.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: e.Cluster})
	require.NoError(t, err)
	second := response.GetMachines()[1]
	e.Eventually(func() bool { _, ok := e.Catalogue.Snapshot().Group(second.GetNodeGroupId()); return ok }, "the catalogue knows the group")
	node := e.userNode("second", second.GetProviderId())
	e.Create(node)
	look := func() time.Duration {
		e.Get(node)
		result, err := e.nodes.Reconcile(e.Context(), node)
		require.NoError(t, err)
		e.Get(node)
		return result.RequeueAfter
	}
	wait := look()
	assert.InDelta(t, 24, wait.Seconds(), 1, "two a minute, and six seconds are over")
	assert.NotContains(t, node.Labels, v1alpha1.AdoptedLabel)
	e.clock.Step(wait)
	look()
	assert.Contains(t, node.Labels, v1alpha1.AdoptedLabel)
}

// With thousands of Nodes, looking at all of them for each turn would be all that the shim does.
func TestNodesThatWaitForTheirTurnComeBackOneAfterTheOther(t *testing.T) {
	const many = 60
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll, NodesPerMinute: new(int32(60))})
	require.NotNil(t, e.look())
	e.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "b", Replicas: many, InstanceType: "large", NodeLabels: map[string]string{"team": "red"}})
	e.clock.Step(6 * time.Second) // expire the listing
	response, err := e.Client.Machines.ListMachines(e.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: e.Cluster})
	require.NoError(t, err)
	e.Eventually(func() bool { _, ok := e.Catalogue.Snapshot().Group("default/b"); return ok }, "the catalogue knows the group")
	due := map[string]time.Time{} // of Nodes
	for i, machine := range response.GetMachines()[1:] {
		node := e.userNode(fmt.Sprintf("node-%d", i), machine.GetProviderId())
		e.Create(node)
		due[node.Name] = e.clock.Now()
	}
	require.Len(t, due, many)
	looks, began := 0, e.clock.Now()
	for len(due) > 0 {
		name := lo.MinBy(lo.Keys(due), func(a, b string) bool { return due[a].Before(due[b]) })
		if left := due[name].Sub(e.clock.Now()); left > 0 {
			e.clock.Step(left)
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		e.Get(node)
		result, err := e.nodes.Reconcile(e.Context(), node)
		require.NoError(t, err)
		looks++
		e.Get(node)
		if due[name] = e.clock.Now().Add(result.RequeueAfter); node.Labels[v1alpha1.AdoptedLabel] != "" {
			delete(due, name)
		}
	}
	assert.Less(t, looks, 6*many, "looks at %d Nodes", many)
	assert.Less(t, e.clock.Since(began), 2*many*time.Second, "at 60 a minute")
}

func TestANodeThatMayNotBeAdoptedTakesNoTurn(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll, NodesPerMinute: new(int32(1))})
	group := e.machine.GetNodeGroupId()
	e.Agent.UpdateNodeGroup(group, func(g *agentv1alpha1.NodeGroup) { g.MinSize = 1 })
	require.Nil(t, e.look(), "the user keeps the min size")
	e.Agent.UpdateNodeGroup(group, func(g *agentv1alpha1.NodeGroup) { g.MinSize = 0 })
	assert.NotNil(t, e.look(), "and within the same minute")
}

// The NodeClaim was given up. The user's permission to disrupt does not extend to the next
// adoption.
func TestANodeThatIsAdoptedAgainIsProtectedAgain(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	e.node.Labels[v1alpha1.AdoptedLabel] = "true"
	e.Update(e.node)
	require.NotNil(t, e.look())
	assert.Equal(t, "true", e.node.Annotations[karpv1.DoNotDisruptAnnotationKey])
}

func TestDisruptionCanBeAllowedFromTheStart(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll, Disruption: v1alpha1.DisruptAllowed})
	nodeClaim := e.look()
	require.NotNil(t, nodeClaim)
	for _, object := range []client.Object{e.node, nodeClaim} {
		assert.NotContains(t, object.GetAnnotations(), karpv1.DoNotDisruptAnnotationKey)
		assert.Equal(t, "true", object.GetLabels()[v1alpha1.AdoptedLabel])
	}
}
