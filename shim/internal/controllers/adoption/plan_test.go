package adoption_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/adoption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func (e *nodesEnv) planner() *adoption.Planner {
	return &adoption.Planner{
		Kube: e.kube, CloudProvider: e.CloudProvider, Provider: e.CloudProvider, Catalogue: e.Catalogue, Agent: e.Client, Cluster: e.Cluster,
		Clock: e.clock,
	}
}

func (e *nodesEnv) plan() *adoption.Plan {
	e.t.Helper()
	plan, err := e.planner().Plan(e.Context())
	require.NoError(e.t, err)
	return plan
}

func TestThePlanIsWhatIsDone(t *testing.T) {
	t.Run("a NodeClaim without a claim", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("left")
		want := adoption.Adoption{
			NodeClaim: "left", Node: "node", Machine: e.machine.GetName(), NodeGroup: e.machine.GetNodeGroupId(), NodePool: shimtest.NodePoolName,
		}
		plan := e.plan()
		assert.Equal(t, []adoption.Adoption{want}, plan.NodeClaims)
		assert.Zero(t, plan.Disrupted)
		for _, empty := range []any{plan.Nodes, plan.InTheWay, plan.Unfinished, plan.Left, plan.Raised, plan.Drifted} {
			assert.Empty(t, empty)
		}
		var text bytes.Buffer
		require.NoError(t, plan.Write(&text))
		assert.Contains(t, text.String(), "NodeClaims whose machine is adopted: 1")
		assert.Contains(t, text.String(), "Nodes that the switch disrupts, because their NodeClaims have expired or their disruption is already allowed: 0")
		assert.Nil(t, e.claim(e.left("nothing is written", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "" })))
	})
	t.Run("after it was done", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.reconcile(e.left("left"))
		plan := e.plan()
		assert.Empty(t, plan.NodeClaims)
		assert.Empty(t, plan.InTheWay)
		assert.Empty(t, plan.Left)
	})
	t.Run("a Node without a NodeClaim", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
		assert.Equal(t, []adoption.Adoption{{
			NodeClaim: e.machine.GetName(), Node: "node", Machine: e.machine.GetName(), NodeGroup: e.machine.GetNodeGroupId(), NodePool: shimtest.NodePoolName,
		}}, e.plan().Nodes)
		e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) { g.MinSize = 1 })
		plan := e.plan()
		assert.Empty(t, plan.Nodes)
		require.Len(t, plan.Left, 1)
		assert.Contains(t, plan.Left[0].Message, "the user keeps the min size 1")
	})
	t.Run("a Machine that the other provider forgot", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.node.Labels[v1alpha1.PeerMemberLabel] = ""
		e.Update(e.node)
		plan := e.plan()
		require.Len(t, plan.Left, 1)
		assert.Contains(t, plan.Left[0].Message, "annotate the Machine with cluster.x-k8s.io/delete-machine, then lower the replicas")
	})
	t.Run("what is in the way", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("left")
		e.left("second", func(nc *karpv1.NodeClaim) { nc.CreationTimestamp = metav1.NewTime(e.clock.Now().Add(time.Hour)) })
		e.left("lost", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "aws:///us-west-2a/i-0123" })
		plan := e.plan()
		assert.Len(t, plan.NodeClaims, 1)
		require.Len(t, plan.InTheWay, 2)
		assert.Equal(t, "lost", plan.InTheWay[0].Name)
		assert.Contains(t, plan.InTheWay[1].Message, "has the same provider ID as NodeClaim left")

		e.Agent.Block(e.machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "it is paused", time.Time{})
		plan = e.plan()
		assert.Empty(t, plan.NodeClaims)
		assert.Contains(t, plan.InTheWay[0].Message+plan.InTheWay[1].Message+plan.InTheWay[2].Message, "it is paused")
	})
	t.Run("what is half done", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		unlaunched := func(nc *karpv1.NodeClaim) { nc.Status = karpv1.NodeClaimStatus{} }
		e.left("chosen", unlaunched, func(nc *karpv1.NodeClaim) {
			nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: "default/" + e.machine.GetName()}
		})
		e.left("new", unlaunched)
		plan := e.plan()
		require.Len(t, plan.Unfinished, 2)
		assert.Contains(t, plan.Unfinished[0].Message, "adopts machine "+e.machine.GetName())
		assert.Contains(t, plan.Unfinished[1].Message, "claims a machine like a new one")
		assert.Empty(t, plan.Left, "it has one")
	})
	t.Run("replicas that would be raised", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("left")
		e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) { g.MinSize = 1 })
		plan := e.plan()
		require.Len(t, plan.Raised, 1)
		assert.Equal(t, 1, plan.Raised[0].By)
		assert.Contains(t, plan.Raised[0].Message, "to 0 first")
	})
	t.Run("what core would replace afterwards", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("left")
		e.pool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{
			{Key: "team", Operator: corev1.NodeSelectorOpIn, Values: []string{"green"}},
		}
		e.Update(e.pool)
		plan := e.plan()
		require.Len(t, plan.Drifted, 1)
		assert.Contains(t, plan.Drifted[0].Message, "does not meet the requirements of NodePool pool")
		assert.Zero(t, plan.Disrupted)

		e.setPolicy(v1alpha1.AdoptionPolicy{Disruption: v1alpha1.DisruptAllowed})
		assert.Equal(t, 1, e.plan().Disrupted)
	})
}

// unlaunched makes a NodeClaim one for which another provider has chosen the machine but which it
// has not launched. If deleted, it waits for core.
func unlaunched(machine string) func(*karpv1.NodeClaim) {
	return func(nc *karpv1.NodeClaim) {
		nc.Status = karpv1.NodeClaimStatus{}
		nc.Finalizers = []string{karpv1.TerminationFinalizer}
		nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: machine}
	}
}

func TestThePlanOfNodeClaimsThatWereNotLaunched(t *testing.T) {
	t.Run("one that is being deleted", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		nodeClaim := e.left("leaving", unlaunched("default/"+e.machine.GetName()))
		require.NoError(t, e.Kube.Delete(e.Context(), nodeClaim))
		plan := e.plan()
		require.Len(t, plan.Unfinished, 1)
		assert.Equal(t, "is being deleted and was never launched; machine "+e.machine.GetName()+", which was chosen for it, stays the user's",
			plan.Unfinished[0].Message)
		require.Len(t, plan.Left, 1, "so that the user finds it")
		assert.Equal(t, e.machine.GetName(), plan.Left[0].Machine)
	})
	t.Run("of another namespace", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("elsewhere", unlaunched("other/"+e.machine.GetName()))
		plan := e.plan()
		require.Len(t, plan.Unfinished, 1)
		assert.Contains(t, plan.Unfinished[0].Message, "claims a machine like a new one")
		assert.Len(t, plan.Left, 1)
	})
	t.Run("on the machine of one that was launched", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("begun", unlaunched("default/"+e.machine.GetName()))
		e.left("launched")
		plan := e.plan()
		assert.Len(t, plan.NodeClaims, 1)
		require.Len(t, plan.Unfinished, 1)
		assert.Contains(t, plan.Unfinished[0].Message, "claims a machine like a new one")
	})
	t.Run("one that was made for a Node", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
		require.NotNil(t, e.look())
		plan := e.plan()
		assert.Empty(t, plan.Nodes, "it is not planned twice")
		require.Len(t, plan.Unfinished, 1)
		assert.Contains(t, plan.Unfinished[0].Message, "adopts machine "+e.machine.GetName())
		e.Agent.LoseMachine(e.Cluster, e.machine.GetName())
		plan = e.plan()
		require.Len(t, plan.Unfinished, 1)
		assert.Contains(t, plan.Unfinished[0].Message, "gone or claimed")
	})
	t.Run("that cannot have its machine", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("begun", unlaunched("default/"+e.machine.GetName()))
		e.Agent.Block(e.machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "it is paused", time.Time{})
		plan := e.plan()
		assert.Empty(t, plan.Unfinished)
		require.Len(t, plan.InTheWay, 1)
		assert.Contains(t, plan.InTheWay[0].Message, "it is paused")
	})
}

// A missing answer of the agent says nothing about the machine.
func TestThereIsNoPlanWithoutAnAnswer(t *testing.T) {
	for name, policy := range map[string]v1alpha1.AdoptionPolicy{"NodeClaims": {}, "Nodes": {Machines: v1alpha1.AdoptAll}} {
		t.Run(name, func(t *testing.T) {
			e := setUpNodes(t, policy)
			if policy.Machines == "" {
				e.left("left")
			}
			e.Agent.Fail("CreateClaim", 10, status.Error(codes.Unavailable, "the connection was lost"))
			_, err := e.planner().Plan(e.Context())
			require.ErrorContains(t, err, "the connection was lost")
		})
	}
}

func TestThePlanOfNodesComesAfterThatOfNodeClaims(t *testing.T) {
	e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
	machines := e.users(5)
	for _, m := range machines[3:] {
		e.left("left-"+m.GetName(), func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = m.GetProviderId() })
	}
	plan := e.plan()
	assert.Len(t, plan.NodeClaims, 2)
	assert.Len(t, plan.Nodes, 1)
	assert.Len(t, plan.Left, 2)
	assert.Empty(t, plan.Raised)

	e.left("third", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = machines[2].GetProviderId() })
	e.left("begun", unlaunched("default/"+machines[1].GetName()))
	leaving := e.left("leaving", func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID, nc.Finalizers = machines[0].GetProviderId(), []string{karpv1.TerminationFinalizer}
	})
	require.NoError(t, e.Kube.Delete(e.Context(), leaving))
	plan = e.plan()
	assert.Len(t, plan.NodeClaims, 3)
	assert.Len(t, plan.Unfinished, 2)
	require.Len(t, plan.Raised, 1)
	assert.Equal(t, 2, plan.Raised[0].By, "Create and Delete adopt as well")

	e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) { g.MaxSize = new(int32(6)) })
	plan = e.plan()
	require.Len(t, plan.Raised, 1)
	assert.Equal(t, 1, plan.Raised[0].By)
	require.Len(t, plan.InTheWay, 1)
	assert.Contains(t, plan.InTheWay[0].Message, "cannot be raised above the max size 6")
}

func TestThePlanPassesOverTheNodesThatTheControllerPassesOver(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*corev1.Node)
		says   string
	}{
		"a NodePool's without a NodeClaim": {
			func(n *corev1.Node) { n.Labels[karpv1.NodePoolLabelKey] = "pool" }, " karpenter.sh/nodepool-)",
		},
		"not Ready": {func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }, "is not Ready"},
		"not registered": {
			func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, karpv1.UnregisteredNoExecuteTaint) }, "has the taint karpenter.sh/",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
			test.change(e.node)
			status := e.node.Status
			e.Update(e.node)
			e.node.Status = status
			require.NoError(t, e.Kube.Status().Update(e.Context(), e.node))
			plan := e.plan()
			assert.Empty(t, plan.Nodes)
			require.Len(t, plan.InTheWay, 1)
			assert.Equal(t, "Node", plan.InTheWay[0].Kind)
			assert.Contains(t, plan.InTheWay[0].Message, test.says)
			assert.Nil(t, e.look())
		})
	}
}

func TestThePlanOfWhatIsDisrupted(t *testing.T) {
	t.Run("a Node that is described otherwise than its node group", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll, Disruption: v1alpha1.DisruptAllowed})
		e.node.Labels[corev1.LabelTopologyZone] = "z9"
		e.Update(e.node)
		plan := e.plan()
		assert.Len(t, plan.Nodes, 1)
		require.Len(t, plan.Drifted, 1)
		assert.Contains(t, plan.Drifted[0].Message, corev1.LabelTopologyZone+"=z9")
		assert.Equal(t, 1, plan.Disrupted)
	})
	t.Run("a Node whose node group has no zone", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{Machines: v1alpha1.AdoptAll})
		e.node.Labels[corev1.LabelTopologyZone] = "z9"
		e.Update(e.node)
		e.Agent.UpdateNodeGroup(e.machine.GetNodeGroupId(), func(g *agentv1alpha1.NodeGroup) { g.Zone = "" })
		e.Eventually(func() bool {
			group, ok := e.Catalogue.Snapshot().Group(e.machine.GetNodeGroupId())
			return ok && group.Zone == ""
		}, "the catalogue knows")
		assert.Empty(t, e.plan().Drifted)
	})
	t.Run("a NodeClaim that has expired", func(t *testing.T) {
		e := setUpNodes(t, v1alpha1.AdoptionPolicy{})
		e.left("old", func(nc *karpv1.NodeClaim) {
			nc.Spec.ExpireAfter = karpv1.MustParseNillableDuration("1h")
			nc.CreationTimestamp = metav1.NewTime(e.clock.Now().Add(-59 * time.Minute))
		})
		assert.Empty(t, e.plan().Expired)
		e.clock.Step(2 * time.Minute)
		plan := e.plan()
		require.Len(t, plan.Expired, 1)
		assert.Contains(t, plan.Expired[0].Message, "has expired at ")
		assert.Equal(t, 1, plan.Disrupted)
		assert.Len(t, plan.NodeClaims, 1, "before it is adopted")
	})
}
