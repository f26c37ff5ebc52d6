package failedmachine_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	coreevents "sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/failedmachine"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	controller *failedmachine.Controller
}

func setUp(t *testing.T, agent ...fakeagent.Option) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithAgent(agent...), shimtest.WithClock(clk))
	w.Eventually(func() bool { return w.Claims.State().Synced }, "the mirror of claims is complete")
	e := &env{Env: w, t: t, clock: clk}
	e.use()
	return e
}

// use replaces the controller by a new one, with the changes to its configuration.
func (e *env) use(changes ...func(*failedmachine.Config)) {
	c := failedmachine.Config{
		Kube: e.Kube, Live: e.Kube, CloudProvider: e.CloudProvider, Claims: e.Claims, NodeGroups: e.NodeGroups, Agent: e.Client.Claims,
		Cluster: e.Cluster, Recorder: e.Recorder, Unclaimed: e.Unclaimed, Timeout: shimtest.Timeout, Clock: e.clock,
	}
	for _, change := range changes {
		change(&c)
	}
	e.controller = failedmachine.New(c)
}

func (e *env) reconcile(nodeClaim *karpv1.NodeClaim) reconcile.Result {
	e.t.Helper()
	e.Get(nodeClaim)
	result, err := e.controller.Reconcile(e.Context(), nodeClaim)
	require.NoError(e.t, err)
	return result
}

func (e *env) phaseShows(nodeClaim *karpv1.NodeClaim, phase agentv1alpha1.ClaimPhase) {
	e.t.Helper()
	e.Eventually(func() bool {
		claim, _ := e.Claims.Get(string(nodeClaim.UID))
		return claim.GetPhase() == phase
	}, "the mirror shows phase %s", phase)
}

func (e *env) node(nodeClaim *karpv1.NodeClaim, providerID string, ready corev1.ConditionStatus) {
	e.t.Helper()
	e.Create(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-" + nodeClaim.Name, CreationTimestamp: metav1.NewTime(e.clock.Now())},
		Spec:       corev1.NodeSpec{ProviderID: providerID},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}},
	})
}

// lose ends the NodeClaim's claim as a user does by deleting its Machine.
func (e *env) lose(nodeClaim *karpv1.NodeClaim) {
	e.t.Helper()
	machine := e.Provision(nodeClaim, "sim:///"+nodeClaim.Name)
	e.Agent.LoseMachine(e.Cluster, machine.GetName())
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED)
}

func TestAClaimThatEndsCostsItsNodeClaimAtOnce(t *testing.T) {
	for _, reason := range []string{"MachineFailed", "MachineDeleted", "ClaimUnknown"} {
		given := shimtest.Metric(t, "karpenter_capi_node_claims_given_up_total", map[string]string{"reason": reason})
		assert.GreaterOrEqual(t, given, 0.0, "it increases from zero")
	}
	e := setUp(t)
	nodeClaim := e.Launched("claim")
	e.lose(nodeClaim)
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim))
	givenUp := func() float64 {
		return shimtest.Metric(t, "karpenter_capi_node_claims_given_up_total", map[string]string{"reason": "MachineLost"})
	}
	assert.Positive(t, givenUp())
	assert.Equal(t, []string{"MachineLost"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "default/a")

	before, few := givenUp(), shimtest.Scraped(t, time.Now())
	for i := range 4 {
		nodeClaim := e.Launched(fmt.Sprintf("claim-%d", i))
		e.lose(nodeClaim)
		e.reconcile(nodeClaim)
		assert.False(t, e.Exists(nodeClaim))
	}
	assert.Greater(t, givenUp()-before, 3.0)
	scrapes.Record(t, "KarpenterCapiNodeClaimsGivenUp", few, shimtest.Scraped(t, time.Now()), scrapes.Only("reason", "MachineLost"))
}

func TestAnUnknownClaimCostsItsNodeClaimOnceTheAgentIsCertain(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.NodeClaim("claim", func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = e.Placeholder(nc.UID)
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	e.Create(nodeClaim)
	e.reconcile(nodeClaim)
	assert.True(t, e.Exists(nodeClaim), "the mirror may only be behind")
	assert.Zero(t, e.Agent.Calls("GetClaim"))
	e.clock.Step(time.Minute)
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim))
	assert.Equal(t, []string{"ClaimUnknown"}, e.Recorder.Reasons())
}

func TestANodeClaimThatNeverHadAClaimStaysAsLongAsItsMachine(t *testing.T) {
	for name, ready := range map[string]corev1.ConditionStatus{"Node ready": corev1.ConditionTrue, "Node not ready": corev1.ConditionFalse} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			e.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "left", Replicas: 1})
			response, err := e.Client.Machines.ListMachines(e.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: e.Cluster})
			require.NoError(t, err)
			machine := response.GetMachines()[0]
			nodeClaim := e.NodeClaim("left", shimtest.Registered, func(nc *karpv1.NodeClaim) {
				nc.Status.ProviderID = machine.GetProviderId()
				nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
			})
			e.Create(nodeClaim)
			e.node(nodeClaim, machine.GetProviderId(), ready)
			e.clock.Step(time.Hour)
			result := e.reconcile(nodeClaim)
			assert.True(t, e.Exists(nodeClaim))
			assert.Positive(t, result.RequeueAfter, "looked at again")
			assert.Empty(t, e.Recorder.Reasons(), "it is to be adopted")

			if ready == corev1.ConditionFalse {
				e.Agent.LoseMachine(e.Cluster, machine.GetName())
				e.clock.Step(time.Minute)
				e.reconcile(nodeClaim)
				assert.False(t, e.Exists(nodeClaim))
			}
		})
	}
}

// Otherwise core would drain the Node of both.
func TestANodeClaimThatSharesItsMachineWithOneThatHasAClaimStays(t *testing.T) {
	e := setUp(t)
	rightful := e.Launched("rightful", shimtest.Registered)
	machine := e.Provision(rightful, "sim:///1")
	rightful.Status.ProviderID = machine.GetProviderId()
	require.NoError(t, e.Kube.Status().Update(e.Context(), rightful))
	duplicate := e.NodeClaim("duplicate", shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = machine.GetProviderId()
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	e.Create(duplicate)
	e.node(duplicate, machine.GetProviderId(), corev1.ConditionFalse)
	e.clock.Step(time.Hour)
	e.reconcile(duplicate)
	assert.True(t, e.Exists(duplicate))

	e.lose(rightful)
	e.reconcile(duplicate)
	assert.False(t, e.Exists(duplicate), "its machine is gone")
}

func TestNothingIsDeletedWhileTheAgentIsAway(t *testing.T) {
	e := setUp(t)
	ended, slow, unknown := e.Launched("ended"), e.Launched("slow"), e.NodeClaim("unknown", func(nc *karpv1.NodeClaim) {
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	e.Create(unknown)
	e.lose(ended)
	e.Disconnect()
	e.clock.Step(24 * time.Hour)
	for _, nodeClaim := range []*karpv1.NodeClaim{ended, slow, unknown} {
		result := e.reconcile(nodeClaim)
		assert.True(t, e.Exists(nodeClaim), nodeClaim.Name)
		assert.Positive(t, result.RequeueAfter, nodeClaim.Name)
	}
	assert.Equal(t, []string{"AgentSilent"}, lo.Uniq(e.Recorder.Reasons()))
}

// Core gives up a NodeClaim without a Node after 15 minutes.
func TestCoreWaitsWhileTheAgentIsSilent(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.Launched("claim", func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetUnknown(karpv1.ConditionTypeRegistered) })
	e.Disconnect()
	for silent := time.Duration(0); silent < 3*time.Hour; silent += 10 * time.Minute {
		e.clock.Step(10 * time.Minute)
		e.reconcile(nodeClaim)
		require.True(t, e.Exists(nodeClaim), "%s", silent)
		e.Get(nodeClaim)
		waits := e.clock.Since(nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).LastTransitionTime.Time)
		require.Less(t, waits, 14*time.Minute, "core gives it up after 15")
	}
	e.Reconnect()
	assert.False(t, e.wait(nodeClaim, time.Hour), "its machine may have come meanwhile, and its Node joins now")
}

func TestARegisteredNodeClaimWithAReadyNodeIsLeftAlone(t *testing.T) {
	for name, providerID := range map[string]string{"found by provider ID": "sim:///claim", "found by name": "sim:///changed"} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.Launched("claim", shimtest.Registered, func(nc *karpv1.NodeClaim) {
				nc.Status.ProviderID, nc.Status.NodeName = "sim:///claim", "node-claim"
			})
			e.node(nodeClaim, providerID, corev1.ConditionTrue)
			e.lose(nodeClaim)
			result := e.reconcile(nodeClaim)
			assert.True(t, e.Exists(nodeClaim))
			assert.Positive(t, result.RequeueAfter, "looked at again")
		})
	}
}

// After a restore of the cluster, the cache has NodeClaims again before it has their Nodes.
func TestANodeThatIsNotInTheCacheIsNotTakenForGone(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.Launched("claim", shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID, nc.Status.NodeName = "sim:///claim", "node-claim"
	})
	e.node(nodeClaim, "sim:///claim", corev1.ConditionTrue)
	e.lose(nodeClaim)
	cache := interceptor.NewClient(e.Kube, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if _, isNode := o.(*corev1.Node); isNode {
				return apierrors.NewNotFound(corev1.Resource("nodes"), key.Name)
			}
			return c.Get(ctx, key, o, opts...)
		},
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			if _, ofNodes := list.(*corev1.NodeList); ofNodes {
				return nil
			}
			return c.List(ctx, list, opts...)
		},
	})
	e.use(func(c *failedmachine.Config) { c.Kube = cache })
	result := e.reconcile(nodeClaim)
	assert.True(t, e.Exists(nodeClaim))
	assert.Positive(t, result.RequeueAfter, "looked at again")

	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-claim"}}
	require.NoError(t, e.Kube.Delete(t.Context(), node))
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim), "there is no Node")
}

func TestARegisteredNodeClaimWithoutAReadyNodeGoesWithItsClaim(t *testing.T) {
	for name, node := range map[string]func(*env, *karpv1.NodeClaim){
		"no Node":        func(*env, *karpv1.NodeClaim) {},
		"Node not ready": func(e *env, nc *karpv1.NodeClaim) { e.node(nc, "sim:///claim", corev1.ConditionUnknown) },
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.Launched("claim", shimtest.Registered, func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///claim" })
			node(e, nodeClaim)
			e.lose(nodeClaim)
			e.reconcile(nodeClaim)
			assert.False(t, e.Exists(nodeClaim))
		})
	}
}

func TestTheMirrorIsNotTrustedWithADeletion(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.Launched("claim")
	// The mirror does not know the claim, but the agent does.
	fresh := e.Client.MirrorClaims(e.Cluster, "nobody-in-particular")
	go func() { _ = fresh.Run(t.Context()) }()
	require.NoError(t, fresh.WaitForSync(t.Context()))
	e.use(func(c *failedmachine.Config) { c.Claims = fresh })
	e.clock.Step(time.Minute)
	e.reconcile(nodeClaim)
	assert.Equal(t, 1, e.Agent.Calls("GetClaim"))
	assert.True(t, e.Exists(nodeClaim))
}

func TestAMachineThatTheAgentGivesUpCostsItsNodeClaimAtOnce(t *testing.T) {
	e := setUp(t, fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual,
	}))
	nodeClaim := e.Launched("claim")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	e.Agent.GiveUp(e.Cluster, string(nodeClaim.UID), "InsufficientCapacity: the zone is full")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim), "before its machine is gone")
	assert.Equal(t, []string{"MachineFailed"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "the zone is full")
}

// events collects Kubernetes events as one line each.
type events struct {
	record.EventRecorder

	lines []string
}

func (e *events) Event(object runtime.Object, kind, reason, message string) {
	e.lines = append(e.lines, fmt.Sprintf("%T %s %s: %s", object, kind, reason, message))
}

func (e *events) of(object any) []string {
	return lo.Filter(e.lines, func(line string, _ int) bool { return strings.HasPrefix(line, fmt.Sprintf("%T ", object)) })
}

// The NodeClaim and its events are soon gone. A NodePool whose machines fail for hours gets few.
func TestAMachineThatFailsLeavesATraceOnItsNodePool(t *testing.T) {
	e := setUp(t, fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual,
	}))
	published := &events{}
	e.use(func(c *failedmachine.Config) { c.Recorder = coreevents.NewRecorder(published) })
	e.NodePool()
	fails := func(name string) {
		t.Helper()
		nodeClaim := e.Launched(name)
		e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
		e.Agent.GiveUp(e.Cluster, string(nodeClaim.UID), "InsufficientCapacity: the zone of "+name+" is full")
		e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING)
		e.reconcile(nodeClaim)
		require.False(t, e.Exists(nodeClaim))
	}
	fails("one")
	require.Len(t, published.of(&karpv1.NodePool{}), 1)
	assert.Contains(t, published.of(&karpv1.NodePool{})[0], "Warning MachineFailed: ")
	assert.Contains(t, published.of(&karpv1.NodePool{})[0], "node group default/a")
	assert.Contains(t, published.of(&karpv1.NodePool{})[0], "the zone of one is full")
	fails("two")
	fails("three")
	assert.Len(t, published.of(&karpv1.NodeClaim{}), 3)
	assert.Len(t, published.of(&karpv1.NodePool{}), 1)

	e.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "b"})
	e.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, "cooling down", time.Time{})
	e.Eventually(func() bool {
		a, _ := e.Catalogue.Snapshot().Group("default/a")
		_, ok := e.Catalogue.Snapshot().Group("default/b")
		return ok && !a.Available
	}, "the catalogue shows the change")
	fails("four")
	require.Len(t, published.of(&karpv1.NodePool{}), 2, "another node group's failure is news")
	assert.Contains(t, published.of(&karpv1.NodePool{})[1], "node group default/b")
}

// A machine that was lost, or that is late, has not failed.
func TestOnlyAFailureIsToldOnTheNodePool(t *testing.T) {
	e := setUp(t)
	e.NodePool()
	nodeClaim := e.Launched("claim")
	e.lose(nodeClaim)
	e.reconcile(nodeClaim)
	assert.Equal(t, []string{"MachineLost"}, e.Recorder.Reasons())
}

func TestAMachineThatTheAgentCallsLateCostsItsNodeClaimAtOnce(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.Launched("claim")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	e.Agent.TimeOut(e.Cluster, string(nodeClaim.UID), "no provider ID in 20m")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED)
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim))
	assert.Equal(t, []string{"HandedOver"}, e.Recorder.Reasons())
}

// Providers set these reasons on every error, throttled calls included, and retry.
func TestWhatAnInfrastructureProviderReportsAloneGivesNothingUp(t *testing.T) {
	for _, reason := range []string{
		"InstanceProvisionFailed", "VMProvisionFailed", "VMCreateFailed", "Failed", "QuotaExceeded", "WaitingForBootstrapData", "Unheard0f",
	} {
		t.Run(reason, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.Launched("claim")
			e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
			machine := e.Agent.Claim(e.Cluster, string(nodeClaim.UID)).GetMachine()
			e.Agent.FailMachine(e.Cluster, machine.GetName(), reason, "the infrastructure says")
			e.Eventually(func() bool {
				claim, _ := e.Claims.Get(string(nodeClaim.UID))
				return claim.GetMachine().GetInfrastructureReason() == reason
			}, "the mirror shows %s", reason)
			e.reconcile(nodeClaim)
			assert.True(t, e.Exists(nodeClaim))
			assert.Zero(t, e.Agent.Calls("ReleaseClaim"))
			assert.Empty(t, e.Recorder.Reasons())
		})
	}
}

func manual() fakeagent.Option {
	return fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Appear: fakeagent.Manual, Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual,
	})
}

func unregistered(nc *karpv1.NodeClaim) {
	nc.StatusConditions().SetUnknown(karpv1.ConditionTypeRegistered)
}

// cores returns when core gives up the NodeClaim.
func (e *env) cores(nodeClaim *karpv1.NodeClaim) time.Time {
	e.t.Helper()
	e.Get(nodeClaim)
	return nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).LastTransitionTime.Add(15 * time.Minute)
}

// wait advances the clock and runs core meanwhile, and reports whether core has given up the
// NodeClaim by then.
func (e *env) wait(nodeClaim *karpv1.NodeClaim, d time.Duration) (givenUp bool) {
	e.t.Helper()
	for until := e.clock.Now().Add(d); e.clock.Now().Before(until); {
		result := e.reconcile(nodeClaim)
		require.Positive(e.t, result.RequeueAfter)
		e.clock.Step(min(result.RequeueAfter, until.Sub(e.clock.Now())))
		if !e.clock.Now().Before(e.cores(nodeClaim)) {
			return true
		}
	}
	return false
}

func TestHowLongAMachineTakesIsTheAgentsMatter(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.Launched("claim", unregistered)
	require.False(t, e.wait(nodeClaim, 2*time.Hour), "the node group has made no machine")
	e.Agent.Appear("default/a")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	require.False(t, e.wait(nodeClaim, 2*time.Hour), "its machine has no provider ID")
	e.Provision(nodeClaim, "sim:///1")
	require.False(t, e.wait(nodeClaim, 2*time.Hour), "its machine has not joined")
	assert.Zero(t, e.Agent.Calls("ReleaseClaim"))

	e.Agent.TimeOut(e.Cluster, string(nodeClaim.UID), "no Node in 2h")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED)
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim), "the agent has had enough")
}

func TestWhatHasJoinedIsCoresToRegister(t *testing.T) {
	least := 9 * time.Minute // what core has left
	for name, join := range map[string]func(*env, *karpv1.NodeClaim, *agentv1alpha1.Machine){
		"as Cluster API sees": func(e *env, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) {
			e.Agent.Join(e.Cluster, machine.GetName(), "node")
			e.Eventually(func() bool {
				claim, _ := e.Claims.Get(string(nodeClaim.UID))
				return claim.GetMachine().GetNodeName() != ""
			}, "the mirror shows the Node")
		},
		"as this cluster shows, which Cluster API may not reach": func(e *env, nodeClaim *karpv1.NodeClaim, _ *agentv1alpha1.Machine) {
			e.node(nodeClaim, "sim:///1", corev1.ConditionTrue)
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t, manual())
			nodeClaim := e.Launched("claim", unregistered)
			e.Agent.Appear("default/a")
			machine := e.Provision(nodeClaim, "sim:///1")
			e.Get(nodeClaim)
			nodeClaim.Status.ProviderID = "sim:///1"
			require.NoError(t, e.Kube.Status().Update(e.Context(), nodeClaim))
			require.False(t, e.wait(nodeClaim, time.Hour))
			join(e, nodeClaim, machine)
			joined := e.clock.Now()
			assert.True(t, e.wait(nodeClaim, 16*time.Minute))
			assert.GreaterOrEqual(t, e.clock.Since(joined), least)
		})
	}
}

// Other node groups may have room, and the length of a pause is unknown.
func TestANodeClaimThatWaitsInAPausedGroupIsCoresToGiveUp(t *testing.T) {
	e := setUp(t, manual())
	pause := func(paused bool) {
		if paused {
			e.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "the MachineDeployment is paused", time.Time{})
		} else {
			e.Agent.Unblock("default/a")
		}
		e.Eventually(func() bool {
			group, _ := e.NodeGroups.Get("default/a")
			return group.GetAvailability().GetAvailable() != paused
		}, "the mirror shows it")
	}
	nodeClaim := e.Launched("claim", unregistered)
	pause(true)
	require.False(t, e.wait(nodeClaim, 10*time.Minute))
	pause(false)
	require.False(t, e.wait(nodeClaim, time.Hour))
	pause(true)
	require.True(t, e.wait(nodeClaim, 15*time.Minute))
}

func TestANodeThatJoinsLateHasAllOfCoresTimeToBeRegistered(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.Launched("claim", unregistered)
	e.Agent.Appear("default/a")
	e.Provision(nodeClaim, "sim:///1")
	e.Get(nodeClaim)
	nodeClaim.Status.ProviderID = "sim:///1"
	require.NoError(t, e.Kube.Status().Update(e.Context(), nodeClaim))
	require.False(t, e.wait(nodeClaim, time.Hour))
	e.clock.Step(3 * time.Minute)
	e.node(nodeClaim, "sim:///1", corev1.ConditionTrue)
	e.reconcile(nodeClaim)
	assert.WithinDuration(t, e.clock.Now().Add(15*time.Minute), e.cores(nodeClaim), time.Second)
}

// The machine will not come, however long its deletion takes.
func TestAMachineThatAnotherActorDeletesCostsItsNodeClaimAtOnce(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.Launched("claim", unregistered)
	e.Agent.Appear("default/a")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	machine := e.Agent.Claim(e.Cluster, string(nodeClaim.UID)).GetMachine()
	e.Agent.HoldDeletion(e.Cluster, machine.GetName(), "WaitingForInfrastructureDeletion", "")
	e.Eventually(func() bool {
		claim, _ := e.Claims.Get(string(nodeClaim.UID))
		return claim.GetMachine().GetDeletedAt() != nil
	}, "the mirror shows it")
	e.reconcile(nodeClaim)
	assert.False(t, e.Exists(nodeClaim))
	assert.Equal(t, []string{"MachineDeleted"}, e.Recorder.Reasons())
}

func TestASlowMachineIsGivenMoreTimeByCoreToo(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.Launched("claim", unregistered)
	before := e.cores(nodeClaim)
	e.reconcile(nodeClaim)
	e.clock.Step(4 * time.Minute)
	e.Agent.Appear("default/a")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	e.reconcile(nodeClaim)
	assert.Equal(t, before, e.cores(nodeClaim), "not before it is needed")
	e.clock.Step(2 * time.Minute)
	result := e.reconcile(nodeClaim)
	again := e.clock.Now().Add(15 * time.Minute)
	assert.WithinDuration(t, again, e.cores(nodeClaim), time.Second)
	assert.LessOrEqual(t, result.RequeueAfter, time.Minute, "core may write the old date back")
	assert.True(t, nodeClaim.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue(), "nothing else changes")

	// Core may write the old time back.
	for i := range nodeClaim.Status.Conditions {
		if nodeClaim.Status.Conditions[i].Type == karpv1.ConditionTypeRegistered {
			nodeClaim.Status.Conditions[i].LastTransitionTime = metav1.NewTime(before.Add(-15 * time.Minute))
		}
	}
	require.NoError(t, e.Kube.Status().Update(e.Context(), nodeClaim))
	e.reconcile(nodeClaim)
	assert.WithinDuration(t, again, e.cores(nodeClaim), time.Second)
}

func TestANodeClaimThatWaitsForLongSaysWhereItsMachineIs(t *testing.T) {
	e := setUp(t, manual())
	nodeClaim := e.Launched("claim")
	e.reconcile(nodeClaim)
	assert.Empty(t, e.Recorder.Reasons(), "most machines need no word")
	e.clock.Step(time.Minute)
	for range 3 {
		e.reconcile(nodeClaim)
	}
	e.Agent.Appear("default/a")
	e.phaseShows(nodeClaim, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	for range 3 {
		e.reconcile(nodeClaim)
	}
	require.Equal(t, []string{"WaitingForMachine", "WaitingForMachine"}, e.Recorder.Reasons(), "once for each thing that is new")
	assert.Contains(t, e.Recorder.Messages()[0], "node group default/a has not created a machine for it")
	claim, _ := e.Claims.Get(string(nodeClaim.UID))
	machine := claim.GetMachine().GetName()
	assert.Contains(t, e.Recorder.Messages()[1], "machine "+machine+" has no provider ID")

	e.Agent.FailMachine(e.Cluster, machine, "InstanceProvisionFailed", "UnauthorizedOperation: you are not authorized")
	e.Eventually(func() bool {
		claim, _ := e.Claims.Get(string(nodeClaim.UID))
		return claim.GetMachine().GetInfrastructureReason() != ""
	}, "the mirror shows what the infrastructure reports")
	for range 3 {
		e.reconcile(nodeClaim)
	}
	require.Len(t, e.Recorder.Messages(), 3)
	assert.Contains(t, e.Recorder.Messages()[2],
		"machine "+machine+" has no provider ID (InstanceProvisionFailed: UnauthorizedOperation: you are not authorized)")
}

func TestWhatIsNotWaitingIsLeftAlone(t *testing.T) {
	e := setUp(t)
	for name, nodeClaim := range map[string]*karpv1.NodeClaim{
		"not launched": e.Launched("launching", func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetUnknown(karpv1.ConditionTypeLaunched) }),
		"registered":   e.Launched("registered", shimtest.Registered),
		"foreign":      e.Launched("foreign", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Kind = "EC2NodeClass" }),
	} {
		e.clock.Step(time.Hour)
		assert.Zero(t, e.reconcile(nodeClaim), name)
		assert.True(t, e.Exists(nodeClaim), name)
	}
}

// An older shim may have released a claim that never existed.
func TestANodeClaimThatIsToBeAdoptedStaysWhenItsClaimWasNeverMade(t *testing.T) {
	e := setUp(t)
	e.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "left", Replicas: 1})
	response, err := e.Client.Machines.ListMachines(e.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: e.Cluster})
	require.NoError(t, err)
	nodeClaim := e.NodeClaim("left", func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = response.GetMachines()[0].GetProviderId()
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	e.Create(nodeClaim)
	_, err = e.Client.Claims.ReleaseClaim(e.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: e.Cluster, ClaimId: string(nodeClaim.UID)})
	require.NoError(t, err)
	e.clock.Step(time.Minute)
	e.reconcile(nodeClaim)
	assert.True(t, e.Exists(nodeClaim))
}

func TestANodeClaimWhoseMachineTheAgentDoesNotShowStays(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.NodeClaim("elsewhere", func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = "aws:///us-west-2a/i-0123"
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	e.Create(nodeClaim)
	e.clock.Step(time.Hour)
	e.Get(nodeClaim)
	registered := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).LastTransitionTime
	assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter)
	assert.True(t, e.Exists(nodeClaim))
	assert.True(t, registered.Equal(&nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).LastTransitionTime),
		"without a Node it is no capacity: core ends it")
}

// The mirror may not have the claim of the other NodeClaim yet, whose Node core would drain.
func TestTheMirrorIsNotTrustedAboutWhoSharesAMachine(t *testing.T) {
	e := setUp(t)
	rightful := e.Launched("rightful", shimtest.Registered)
	machine := e.Provision(rightful, "sim:///1")
	rightful.Status.ProviderID = machine.GetProviderId()
	require.NoError(t, e.Kube.Status().Update(e.Context(), rightful))
	duplicate := e.NodeClaim("duplicate", shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.Status.ProviderID = machine.GetProviderId()
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	e.Create(duplicate)
	empty := e.Client.MirrorClaims(e.Cluster, "another-holder")
	go func() { _ = empty.Run(t.Context()) }()
	require.NoError(t, empty.WaitForSync(t.Context()))
	e.use(func(c *failedmachine.Config) { c.Claims = empty })
	e.clock.Step(time.Hour)
	e.reconcile(duplicate)
	assert.True(t, e.Exists(duplicate))
}
