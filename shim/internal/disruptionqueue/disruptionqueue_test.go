package disruptionqueue_test

import (
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/controller"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/controllers/state"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/disruptionqueue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// env is a command of core that replaces two Nodes by one, whose machine is booting.
type env struct {
	*shimtest.Env
	t           *testing.T
	clock       *clocktesting.FakeClock
	queue       *disruption.Queue
	finisher    *disruptionqueue.Finisher
	first       *karpv1.NodeClaim
	second      *karpv1.NodeClaim
	secondNode  *corev1.Node
	replacement *karpv1.NodeClaim
}

func setUp(t *testing.T) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithClock(clk))
	e := &env{Env: w, t: t, clock: clk}
	nodePool := w.NodePool()
	cluster := state.NewCluster(clk, w.Kube, w.CloudProvider)
	e.queue = disruption.NewQueue(w.Kube, w.Recorder, cluster, clk, nil)
	command := &disruption.Command{
		Method: disruption.NewStaticDrift(cluster, nil, w.CloudProvider, w.Recorder), CreationTimestamp: clk.Now(),
	}
	candidate := func(name, providerID string) (*karpv1.NodeClaim, *corev1.Node) {
		nodeClaim := w.Launched(name, shimtest.Registered, func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = providerID })
		node := w.Node(nodeClaim, karpv1.DisruptedNoScheduleTaint)
		stateNode := state.NewNode()
		stateNode.NodeClaim, stateNode.Node = nodeClaim, node
		command.Candidates = append(command.Candidates, &disruption.Candidate{StateNode: stateNode, NodePool: nodePool})
		e.queue.ProviderIDToCommand[providerID] = command
		return nodeClaim, node
	}
	e.first, _ = candidate("first", "sim:///1")
	e.second, e.secondNode = candidate("second", "sim:///2")
	e.replacement = w.Launched("replacement")
	command.Replacements = []*disruption.Replacement{{Name: e.replacement.Name, NodeClaim: &scheduling.NodeClaim{}}}
	var err error
	e.finisher, err = disruptionqueue.New(clk, w.Kube, []controller.Controller{e.queue})
	require.NoError(t, err)
	return e
}

// look has the finisher look twice, with a time between that is long enough.
func (e *env) look() {
	e.finisher.Look(e.Context())
	e.clock.Step(15 * time.Second)
	e.finisher.Look(e.Context())
}

// initialize has the replacement's Node come.
func (e *env) initialize() {
	e.Get(e.replacement)
	e.replacement.StatusConditions().SetTrue(karpv1.ConditionTypeInitialized)
	require.NoError(e.t, e.Kube.Status().Update(e.Context(), e.replacement))
}

func (e *env) tainted() bool {
	e.Get(e.secondNode)
	return len(e.secondNode.Spec.Taints) > 0
}

// It is core's own while its first candidate exists.
func TestACommandIsLeftToCore(t *testing.T) {
	e := setUp(t)
	e.initialize()
	e.look()
	assert.True(t, e.queue.HasAny("sim:///2"))
	assert.True(t, e.Exists(e.second))
}

func TestTheOtherCandidatesOfACommandFollowTheFirst(t *testing.T) {
	e := setUp(t)
	require.NoError(t, e.Kube.Delete(e.Context(), e.first)) // its Machine was deleted, for example
	e.look()
	assert.True(t, e.queue.HasAny("sim:///2"), "the replacement is not initialized")
	assert.True(t, e.Exists(e.second))
	e.initialize()
	e.finisher.Look(e.Context())
	assert.False(t, e.Exists(e.second))
	assert.True(t, e.queue.IsEmpty())
}

func TestACommandWithoutItsFirstCandidateIsGivenUpInTime(t *testing.T) {
	e := setUp(t)
	require.NoError(t, e.Kube.Delete(e.Context(), e.first))
	e.look()
	require.True(t, e.tainted())
	e.clock.Step(10 * time.Minute)
	e.finisher.Look(e.Context())
	assert.True(t, e.queue.IsEmpty())
	assert.False(t, e.tainted(), "its Node takes pods again")
	assert.True(t, e.Exists(e.second))
}

func TestCoresQueueIsNeeded(t *testing.T) {
	_, err := disruptionqueue.New(clocktesting.NewFakeClock(time.Now()), client.Reader(nil), nil)
	require.ErrorContains(t, err, "disruption.Queue")
}
