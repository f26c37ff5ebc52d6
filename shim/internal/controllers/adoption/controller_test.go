package adoption_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/adoption"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	controller *adoption.Controller
	machine    *agentv1alpha1.Machine
}

// setUp returns an environment with one unclaimed machine.
func setUp(t *testing.T) *env {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Replicas: 1, Zone: "z1", InstanceType: "large", NodeLabels: map[string]string{
		"team": "red",
	}}}, shimtest.WithClock(clk), shimtest.WithAgent(fakeagent.WithSpareGracePeriod(time.Hour)))
	response, err := w.Client.Machines.ListMachines(w.Context(), &agentv1alpha1.ListMachinesRequest{Cluster: w.Cluster})
	require.NoError(t, err)
	require.Len(t, response.GetMachines(), 1)
	e := &env{Env: w, t: t, clock: clk, machine: response.GetMachines()[0]}
	e.controller = adoption.New(e.config())
	return e
}

// config returns the controller's configuration, which tests may change.
func (e *env) config() adoption.Config {
	return adoption.Config{
		Kube: e.Kube, CloudProvider: e.CloudProvider, Provider: e.CloudProvider, Claims: e.Claims, Unclaimed: e.Unclaimed, Agent: e.Client,
		Cluster: e.Cluster, Recorder: e.Recorder, Unmark: func(...string) {},
	}
}

// left creates a NodeClaim on the machine as another provider leaves it.
func (e *env) left(name string, changes ...func(*karpv1.NodeClaim)) *karpv1.NodeClaim {
	e.t.Helper()
	nodeClaim := e.NodeClaim(name, shimtest.Registered, func(nc *karpv1.NodeClaim) {
		nc.Labels = map[string]string{
			karpv1.NodePoolLabelKey: shimtest.NodePoolName, corev1.LabelInstanceTypeStable: "", corev1.LabelTopologyZone: "",
			karpv1.CapacityTypeLabelKey: "on-demand",
		}
		nc.Status.ProviderID = e.machine.GetProviderId()
		nc.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	})
	for _, change := range changes {
		change(nodeClaim)
	}
	e.Create(nodeClaim)
	return nodeClaim
}

// join creates the machine's Node, owned by a NodeClaim.
func (e *env) join(owner *karpv1.NodeClaim) *corev1.Node {
	e.t.Helper()
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name:   "node",
			Labels: map[string]string{corev1.LabelTopologyZone: "from-the-cloud", "team": "blue"},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "karpenter.sh/v1", Kind: "NodeClaim", Name: owner.Name, UID: owner.UID,
			}},
		},
		Spec: corev1.NodeSpec{
			ProviderID: e.machine.GetProviderId(),
			Taints:     []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}},
		},
	}
	e.Create(node)
	return node
}

func (e *env) reconcile(nodeClaim *karpv1.NodeClaim) controllerruntime.Result {
	e.t.Helper()
	e.Get(nodeClaim)
	result, err := e.controller.Reconcile(e.Context(), nodeClaim)
	require.NoError(e.t, err)
	e.Get(nodeClaim)
	return result
}

func (e *env) claim(nodeClaim *karpv1.NodeClaim) *agentv1alpha1.Claim {
	return e.Agent.Claim(e.Cluster, string(nodeClaim.UID))
}

// known waits until the mirror has the NodeClaim's claim.
func (e *env) known(nodeClaim *karpv1.NodeClaim) {
	e.t.Helper()
	e.Eventually(func() bool { _, ok := e.Claims.Get(string(nodeClaim.UID)); return ok }, "the claim is known")
}

func TestAMachineIsAdoptedAsItIs(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	e.reconcile(nodeClaim)

	claim := e.claim(nodeClaim)
	assert.Equal(t, e.machine.GetName(), claim.GetAdoptMachine())
	assert.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, claim.GetPhase())
	assert.EqualValues(t, 1, e.Agent.NodeGroup(e.machine.GetNodeGroupId()).GetReplicas())

	assert.Equal(t, "large", nodeClaim.Labels[corev1.LabelInstanceTypeStable])
	assert.Equal(t, "from-the-cloud", nodeClaim.Labels[corev1.LabelTopologyZone], "the Node knows better")
	assert.Equal(t, "blue", nodeClaim.Labels["team"])
	assert.Equal(t, shimtest.NodePoolName, nodeClaim.Labels[karpv1.NodePoolLabelKey])
	assert.Equal(t, e.machine.GetNodeGroupId(), nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])
	assert.Equal(t, e.machine.GetProviderId(), nodeClaim.Status.ProviderID)

	e.Get(node)
	assert.Equal(t, "true", node.Annotations[karpv1.DoNotDisruptAnnotationKey])
	assert.Equal(t, "true", node.Labels[v1alpha1.AdoptedLabel])
	assert.Equal(t, "large", node.Labels[corev1.LabelInstanceTypeStable])
	assert.Equal(t, "from-the-cloud", node.Labels[corev1.LabelTopologyZone])
	assert.Equal(t, "blue", node.Labels["team"])
	assert.Equal(t, "on-demand", node.Labels[karpv1.CapacityTypeLabelKey])
	assert.Len(t, node.Spec.Taints, 1)
	assert.Equal(t, []string{"MachineAdopted"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "expires, or the Node is unhealthy and the feature gate NodeRepair is on")
	assert.NotContains(t, node.Annotations, karpv1.DoNotRepairAnnotationKey, "its machine can be removed")
}

func TestWhatAPersonAllowsAfterTheAdoptionStays(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	e.reconcile(nodeClaim)
	e.known(nodeClaim)
	for _, object := range []client.Object{nodeClaim, node} {
		e.Get(object)
		object.SetAnnotations(map[string]string{v1alpha1.NodeGroupAnnotation: object.GetAnnotations()[v1alpha1.NodeGroupAnnotation]})
		e.Update(object)
	}
	node.Labels["team"] = ""
	e.Update(node)
	e.reconcile(nodeClaim)
	e.Get(node)
	assert.NotContains(t, node.Annotations, karpv1.DoNotDisruptAnnotationKey)
	assert.NotContains(t, nodeClaim.Annotations, karpv1.DoNotDisruptAnnotationKey)
	assert.Empty(t, node.Labels["team"])
}

// The process ends after each of the writes in turn, and the next process completes the adoption.
func TestAnAdoptionIsCompletedAfterACrash(t *testing.T) {
	for name, crash := range map[string]func(*env, *karpv1.NodeClaim, *corev1.Node){
		"before the claim": func(e *env, _ *karpv1.NodeClaim, node *corev1.Node) {
			node.Labels[v1alpha1.AdoptedLabel] = "true"
			node.Annotations = map[string]string{karpv1.DoNotDisruptAnnotationKey: "true"}
			e.Update(node)
		},
		"after the claim": func(e *env, nodeClaim *karpv1.NodeClaim, _ *corev1.Node) {
			_, err := e.CloudProvider.Adopt(e.Context(), nodeClaim, e.machine)
			require.NoError(e.t, err)
			e.known(nodeClaim)
		},
		"after the NodeClaim": func(e *env, nodeClaim *karpv1.NodeClaim, node *corev1.Node) {
			e.reconcile(nodeClaim)
			e.known(nodeClaim)
			e.Get(node)
			node.Labels = map[string]string{v1alpha1.AdoptedLabel: "true"}
			node.Annotations = map[string]string{karpv1.DoNotDisruptAnnotationKey: "true"}
			e.Update(node)
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.left("left")
			node := e.join(nodeClaim)
			crash(e, nodeClaim, node)
			e.reconcile(nodeClaim)
			e.Get(node)
			assert.Equal(t, e.machine.GetName(), e.claim(nodeClaim).GetAdoptMachine())
			assert.Equal(t, e.machine.GetNodeGroupId(), nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation])
			assert.Equal(t, e.machine.GetNodeGroupId(), node.Annotations[v1alpha1.NodeGroupAnnotation])
			assert.Equal(t, "large", node.Labels[corev1.LabelInstanceTypeStable])
		})
	}
}

func TestAMachineWithoutANodeIsAdoptedAndRegisteredLater(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("launched", func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetUnknown(karpv1.ConditionTypeRegistered) })
	e.reconcile(nodeClaim)
	assert.Equal(t, e.machine.GetName(), e.claim(nodeClaim).GetAdoptMachine())
	assert.Equal(t, "true", nodeClaim.Annotations[karpv1.DoNotDisruptAnnotationKey], "core copies it to the Node")
	assert.Equal(t, "large", nodeClaim.Labels[corev1.LabelInstanceTypeStable])
}

func TestOfSeveralNodeClaimsOnOneMachineTheNodesOwnHasIt(t *testing.T) {
	e := setUp(t)
	older := e.left("older", func(nc *karpv1.NodeClaim) { nc.CreationTimestamp = metav1.NewTime(e.clock.Now().Add(-time.Hour)) })
	owner := e.left("owner")
	e.join(owner)
	result := e.reconcile(older)
	assert.Positive(t, result.RequeueAfter)
	assert.Nil(t, e.claim(older))
	require.Equal(t, []string{"DuplicateNodeClaim"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "belongs to NodeClaim owner")
	assert.Contains(t, e.Recorder.Messages()[0], e.Placeholder(older.UID))
	e.reconcile(owner)
	assert.NotNil(t, e.claim(owner))
	e.known(owner)
	e.clock.Step(time.Minute) // expire the listing
	e.reconcile(older)
	assert.Nil(t, e.claim(older))
}

func TestWithoutANodeTheOldestNodeClaimHasTheMachine(t *testing.T) {
	e := setUp(t)
	launched := func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetUnknown(karpv1.ConditionTypeRegistered) }
	younger := e.left("younger", launched)
	older := e.left("older", launched, func(nc *karpv1.NodeClaim) { nc.CreationTimestamp = metav1.NewTime(e.clock.Now().Add(-time.Hour)) })
	e.reconcile(younger)
	assert.Nil(t, e.claim(younger))
	e.reconcile(older)
	assert.NotNil(t, e.claim(older))
}

func TestARefusedAdoptionIsToldAndTriedAgain(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	id := e.machine.GetNodeGroupId()
	e.Agent.Block(id, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "the MachineDeployment is paused", time.Time{})
	assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter)
	require.Equal(t, []string{"MachineWithoutClaim"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "the MachineDeployment is paused")
	e.Get(node)
	assert.Equal(t, "true", node.Annotations[karpv1.DoNotDisruptAnnotationKey], "its machine could not be removed")

	e.Agent.Unblock(id)
	e.reconcile(nodeClaim)
	assert.NotNil(t, e.claim(nodeClaim))
}

// failing is a provider whose agent fails every adoption.
type failing struct {
	adoption.Provider

	err error
}

func (f failing) Adopt(context.Context, *karpv1.NodeClaim, *agentv1alpha1.Machine) (*agentv1alpha1.Claim, error) {
	return nil, f.err
}

// use replaces the controller's client and provider.
func (e *env) use(kube client.Client, adopter adoption.Provider) {
	c := e.config()
	c.Kube, c.Provider = kube, adopter
	e.controller = adoption.New(c)
}

// Nothing is known in this case, so the user must get no event, least of all one that suggests
// deleting the Machine.
func TestAnAdoptionThatIsNotAnsweredIsRepeated(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	e.join(nodeClaim)
	e.use(e.Kube, failing{e.CloudProvider, status.Error(codes.Unavailable, "the connection was lost")})
	e.start()
	assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter)
	assert.Empty(t, e.Recorder.Reasons())
	assert.Never(t, e.controller.Settled, 300*time.Millisecond, 20*time.Millisecond)
}

// look is the interval for what may last.
const look = 30 * time.Second

// The agent may be one of an earlier version, or have other rights for this shim.
func TestAnErrorThatDoesNotPassIsReported(t *testing.T) {
	for _, err := range []error{
		status.Error(codes.Unimplemented, "unknown method"), agenterrors.PermissionDenied("not for you"),
		agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "claim_id", Description: "too long"}),
		agenterrors.ClusterNotFound(&agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "gone"}),
	} {
		for method, reason := range map[string]string{"ReturnMachine": "MachineNotReturned", "GetClaim": "AdoptionIncomplete"} {
			t.Run(method+", "+status.Code(err).String(), func(t *testing.T) {
				e := setUp(t)
				c, published := e.config(), record.NewFakeRecorder(10)
				c.Recorder = events.NewRecorder(published)
				e.controller = adoption.New(c)
				nodeClaim := e.left("left", func(nc *karpv1.NodeClaim) {
					if reason == "MachineNotReturned" {
						returning(nc)
					}
				})
				node := e.join(nodeClaim)
				e.Agent.Fail(method, fakeagent.Always, err)
				e.start()
				for range 3 {
					assert.Equal(t, look, e.reconcile(nodeClaim).RequeueAfter)
				}
				require.Len(t, published.Events, 1, "the same each time")
				event := <-published.Events
				assert.Contains(t, event, "Warning "+reason)
				assert.Contains(t, event, agenterrors.Describe(err))
				assert.True(t, nodeClaim.DeletionTimestamp.IsZero())
				e.Get(node)
				assert.NotEmpty(t, node.OwnerReferences)
				if reason == "AdoptionIncomplete" {
					assert.Never(t, e.controller.Settled, 300*time.Millisecond, 20*time.Millisecond, "its Node is not protected")
				}
			})
		}
	}
}

func TestAnErrorThatPassesIsNoEvent(t *testing.T) {
	for name, test := range map[string]struct {
		err  error
		away bool
		wait time.Duration
	}{
		"a conflict":                       {err: agenterrors.Conflict("another writer was first"), wait: time.Second},
		"the agent has just started":       {err: agenterrors.NotSynced("not yet"), wait: time.Second},
		"the agent takes too long":         {err: status.Error(codes.DeadlineExceeded, "too late"), wait: time.Second},
		"the hub's API server is away":     {err: agenterrors.HubUnreachable("no route to host"), wait: look},
		"the Cluster is paused":            {err: agenterrors.ClusterPaused("it is being moved"), wait: look},
		"the agent has been away for long": {err: status.Error(codes.Unavailable, "connection refused"), away: true, wait: look},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			left := e.left("left")
			returned := e.left("returned", returning, func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///another" })
			if test.away {
				e.Disconnect()
			}
			for _, method := range []string{"ReturnMachine", "GetClaim"} {
				e.Agent.Fail(method, fakeagent.Always, test.err)
			}
			assert.Equal(t, test.wait, e.reconcile(returned).RequeueAfter)
			assert.Equal(t, test.wait, e.reconcile(left).RequeueAfter)
			e.use(e.Kube, failing{e.CloudProvider, test.err})
			for _, method := range []string{"ReturnMachine", "GetClaim"} {
				e.Agent.Fail(method, 0, nil)
			}
			assert.Equal(t, test.wait, e.reconcile(left).RequeueAfter, "its adoption")
			assert.Empty(t, e.Recorder.Reasons())
		})
	}
}

// start runs the controller's Start.
func (e *env) start() {
	e.t.Helper()
	ctx, cancel := context.WithCancel(e.Context())
	done := make(chan struct{})
	go func() { defer close(done); assert.NoError(e.t, e.controller.Start(ctx)) }()
	e.t.Cleanup(func() { cancel(); <-done })
}

func TestNothingIsSettledBeforeEveryNodeClaimWasLookedAt(t *testing.T) {
	e := setUp(t)
	left := e.left("left")
	placeholder := e.Launched("ours")
	deleted := e.left("deleted", func(nc *karpv1.NodeClaim) { nc.Finalizers = []string{karpv1.TerminationFinalizer} })
	require.NoError(t, e.Kube.Delete(e.Context(), deleted))
	begun := e.left("begun", func(nc *karpv1.NodeClaim) { nc.Status = karpv1.NodeClaimStatus{} })
	e.start()
	for _, nodeClaim := range []*karpv1.NodeClaim{placeholder, deleted, begun} {
		e.reconcile(nodeClaim)
	}
	assert.Never(t, e.controller.Settled, 300*time.Millisecond, 20*time.Millisecond)
	e.reconcile(left)
	e.Eventually(e.controller.Settled, "all were looked at")
	assert.Nil(t, e.claim(deleted), "that is for Delete")
}

func TestNothingIsSettledWhileTheAgentIsSilent(t *testing.T) {
	e := setUp(t)
	left := e.left("left")
	e.Disconnect()
	e.start()
	assert.Positive(t, e.reconcile(left).RequeueAfter)
	assert.Never(t, e.controller.Settled, 300*time.Millisecond, 20*time.Millisecond)
	assert.InDelta(t, 1, shimtest.Metric(t, "karpenter_capi_node_claims_awaited", nil), 0)
	waiting := shimtest.Scraped(t, time.Now())
	e.Reconnect()
	e.reconcile(left)
	e.Eventually(e.controller.Settled, "it answers")
	assert.Zero(t, shimtest.Metric(t, "karpenter_capi_node_claims_awaited", nil))
	scrapes.Record(t, "KarpenterCapiAdoptionWaits", shimtest.Scraped(t, time.Now()), waiting)
	assert.NotNil(t, e.claim(left))
}

// The manager's cache never reports a NodeClaim here: the controller is triggered by the claims
// alone.
func TestAllNodeClaimsAreHandledOnceTheClaimsAreKnown(t *testing.T) {
	e := setUp(t)
	mirror := e.Client.MirrorClaims(e.Cluster, v1alpha1.Holder)
	c := e.config()
	c.Claims = mirror
	controller := adoption.New(c)
	left := e.left("left")
	result, err := controller.Reconcile(e.Context(), left.DeepCopy())
	require.NoError(t, err)
	require.Zero(t, result, "or each of thousands is handled once a second for as long as the agent is away")

	m := e.Manager(&informertest.FakeInformers{Scheme: e.Kube.Scheme()})
	require.NoError(t, controller.Register(e.Context(), m))
	ctx, cancel := context.WithCancel(e.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { assert.NoError(t, m.Start(ctx)) })
	running.Go(func() { _ = mirror.Run(ctx) })
	e.Eventually(controller.Settled, "it is handled")
	assert.Equal(t, e.machine.GetName(), e.claim(left).GetAdoptMachine())
}

// Until all NodeClaims are handled, core plans and disrupts nothing in the whole cluster.
func TestOneNodeClaimThatCannotBeAdoptedDoesNotHoldUpTheOthers(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*env, *karpv1.NodeClaim)
		event string
		what  string
	}{
		"its NodeClass does not exist": {
			spoil: func(e *env, nodeClaim *karpv1.NodeClaim) {
				nodeClaim.Spec.NodeClassRef.Name = "gone"
				e.Update(nodeClaim)
			},
			event: "AdoptionIncomplete", what: "ClusterAPINodeClass gone",
		},
		"its claim is one too many": {
			spoil: func(e *env, _ *karpv1.NodeClaim) {
				e.use(e.Kube, failing{e.CloudProvider, agenterrors.TooManyClaims("too many", 0)})
			},
			event: "MachineWithoutClaim", what: "too many",
		},
		"its node group lost the label": {
			spoil: func(e *env, _ *karpv1.NodeClaim) {
				e.use(e.Kube, failing{e.CloudProvider, agenterrors.NodeGroupNotFound("default/a")})
			},
			event: "MachineWithoutClaim", what: "default/a",
		},
		"the agent fails": {
			spoil: func(e *env, _ *karpv1.NodeClaim) {
				e.use(e.Kube, failing{e.CloudProvider, status.Error(codes.Internal, "a mistake")})
			},
			event: "AdoptionIncomplete", what: "a mistake",
		},
		"a webhook denies the change of its Node": {
			spoil: func(e *env, _ *karpv1.NodeClaim) { e.use(denying[*corev1.Node](e.Kube), e.CloudProvider) },
			event: "AdoptionIncomplete", what: "denied the request",
		},
		"a webhook denies its change": {
			spoil: func(e *env, _ *karpv1.NodeClaim) { e.use(denying[*karpv1.NodeClaim](e.Kube), e.CloudProvider) },
			event: "AdoptionIncomplete", what: "denied the request",
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.left("left")
			e.join(nodeClaim)
			tc.spoil(e, nodeClaim)
			e.start()
			assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter, "it is tried again")
			e.Eventually(e.controller.Settled, "the others are not held up")
			require.Contains(t, e.Recorder.Reasons(), tc.event)
			assert.Contains(t, strings.Join(e.Recorder.Messages(), "\n"), tc.what)
		})
	}
}

// Nothing triggers the controller for a NodeClaim whose Node is gone.
func TestANodeThatVanishesDoesNotHoldUpThePlanning(t *testing.T) {
	for name, tc := range map[string]struct {
		patch      int // before which the Node vanishes
		providerID string
	}{
		"before it is protected":           {patch: 1},
		"before its adoption is completed": {patch: 2},
		"and its machine is not known":     {patch: 1, providerID: "fake:///default/workload/elsewhere"},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			e.machine.ProviderId = lo.CoalesceOrEmpty(tc.providerID, e.machine.GetProviderId())
			nodeClaim := e.left("left")
			node := e.join(nodeClaim)
			patches := 0
			e.use(interceptor.NewClient(e.Kube, interceptor.Funcs{
				Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
					if _, is := o.(*corev1.Node); is {
						if patches++; patches == tc.patch {
							require.NoError(t, c.Delete(ctx, node.DeepCopy()))
						}
					}
					return c.Patch(ctx, o, patch, opts...)
				},
			}), e.CloudProvider)
			e.start()
			require.Positive(t, e.reconcile(nodeClaim).RequeueAfter, "it is handled again")
			require.False(t, e.Exists(node))
			e.reconcile(nodeClaim)
			e.Eventually(e.controller.Settled, "it has no Node")
		})
	}
}

// denying returns a client that is forbidden to patch objects of the type.
func denying[T client.Object](kube client.WithWatch) client.Client {
	return interceptor.NewClient(kube, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if _, is := o.(T); is {
				return apierrors.NewForbidden(corev1.Resource("objects"), o.GetName(), errors.New("admission webhook denied the request"))
			}
			return c.Patch(ctx, o, patch, opts...)
		},
	})
}

// The agent does not report Machines of a MachineDeployment without the label. Adoption follows
// once it is labelled.
func TestANodeClaimWhoseMachineTheAgentDoesNotShowIsProtectedAndAdoptedLater(t *testing.T) {
	e := setUp(t)
	later := "fake:///default/workload/later-00002"
	elsewhere := e.left("elsewhere", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = later })
	node := e.join(elsewhere)
	node.Spec.ProviderID = later
	e.Update(node)
	e.start()
	assert.Positive(t, e.reconcile(elsewhere).RequeueAfter)
	e.Eventually(e.controller.Settled, "the others do not wait for it")
	assert.Nil(t, e.claim(elsewhere))
	assert.True(t, e.Exists(elsewhere))
	require.Equal(t, []string{"MachineUnknown"}, e.Recorder.Reasons())
	e.Get(node)
	assert.Equal(t, "true", node.Annotations[karpv1.DoNotDisruptAnnotationKey], "its machine could not be removed")
	assert.Equal(t, "true", node.Annotations[karpv1.DoNotRepairAnnotationKey], "not even if it is unhealthy")

	e.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "later", Replicas: 1})
	e.Catalogue.Refresh()
	e.Eventually(func() bool { _, ok := e.Catalogue.Snapshot().Source("default/later"); return ok }, "the catalogue knows the node group")
	e.clock.Step(time.Minute)
	e.reconcile(elsewhere)
	assert.Equal(t, "later-00002", e.claim(elsewhere).GetAdoptMachine())
	assert.Equal(t, "default/later", elsewhere.Annotations[v1alpha1.NodeGroupAnnotation])
	e.Get(node)
	assert.Equal(t, "true", node.Annotations[karpv1.DoNotDisruptAnnotationKey], "until its user allows it")
	assert.NotContains(t, node.Annotations, karpv1.DoNotRepairAnnotationKey, "its machine can be removed now")
}

// A process with the wrong kubeconfig, or one that is connected to a hub without the claims, sees
// no Machine of a NodeClaim that has a claim.
func TestTheProtectionOfANodeEndsWhenItsClaimIsKnown(t *testing.T) {
	for name, test := range map[string]struct {
		marks []string
		stay  []string // protections
	}{
		"protected because its machine was unknown": {marks: []string{v1alpha1.KeptAnnotation, v1alpha1.KeptFromRepairAnnotation}},
		"protected from disruption alone, as by an earlier version": {
			marks: []string{v1alpha1.KeptAnnotation}, stay: []string{karpv1.DoNotRepairAnnotationKey},
		},
		"protected from repair alone": {
			marks: []string{v1alpha1.KeptFromRepairAnnotation}, stay: []string{karpv1.DoNotDisruptAnnotationKey},
		},
		"protected by a user": {stay: []string{karpv1.DoNotDisruptAnnotationKey, karpv1.DoNotRepairAnnotationKey}},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.left("own")
			_, err := e.Client.Claims.CreateClaim(e.Context(), &agentv1alpha1.CreateClaimRequest{
				Cluster: e.Cluster, ClaimId: string(nodeClaim.UID), Holder: "karpenter", Candidates: []string{e.machine.GetNodeGroupId()},
			})
			require.NoError(t, err)
			e.known(nodeClaim)
			node := e.join(nodeClaim)
			protections := map[string]string{karpv1.DoNotDisruptAnnotationKey: "true", karpv1.DoNotRepairAnnotationKey: "true"}
			node.Annotations = lo.Assign(protections, map[string]string{"team": "blue"})
			for _, mark := range test.marks {
				node.Annotations[mark] = "true"
			}
			e.Update(node)

			e.reconcile(nodeClaim)
			e.Get(node)
			assert.Equal(t, lo.Assign(map[string]string{"team": "blue"}, lo.PickByKeys(protections, test.stay)), node.Annotations)
			assert.Empty(t, e.Recorder.Reasons())
		})
	}
}

// As while the shim has the certificate of another Cluster.
func TestAUsersProtectionOutlivesATimeInWhichTheMachineIsUnknown(t *testing.T) {
	for value, marked := range map[string]string{
		"true":  "",     // the end of the shim's own protection would end the user's
		"false": "true", // core heeds no other value
	} {
		for protection, mark := range map[string]string{
			karpv1.DoNotDisruptAnnotationKey: v1alpha1.KeptAnnotation, karpv1.DoNotRepairAnnotationKey: v1alpha1.KeptFromRepairAnnotation,
		} {
			e := setUp(t)
			nodeClaim := e.left("own", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///elsewhere" })
			node := e.join(nodeClaim)
			node.Spec.ProviderID = nodeClaim.Status.ProviderID
			node.Annotations = map[string]string{protection: value}
			e.Update(node)
			e.reconcile(nodeClaim)
			require.Equal(t, []string{"MachineUnknown"}, e.Recorder.Reasons())
			e.Get(node)
			assert.Equal(t, marked, node.Annotations[mark], "%s=%s", protection, value)
			for _, key := range []string{karpv1.DoNotDisruptAnnotationKey, karpv1.DoNotRepairAnnotationKey} {
				assert.Equal(t, "true", node.Annotations[key], "%s, with %s=%s", key, protection, value)
			}
			assert.True(t, v1alpha1.IsKept(node))
		}
	}
	e := setUp(t)
	nodeClaim := e.left("own", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///elsewhere" })
	node := e.join(nodeClaim)
	node.Spec.ProviderID = nodeClaim.Status.ProviderID
	own := map[string]string{karpv1.DoNotDisruptAnnotationKey: "true", karpv1.DoNotRepairAnnotationKey: "true"}
	node.Annotations = own
	e.Update(node)
	e.reconcile(nodeClaim)
	e.Get(node)
	assert.Equal(t, lo.Assign(own, map[string]string{v1alpha1.KeptFromExpiryAnnotation: "true"}), node.Annotations, "expiry heeds neither of them")
}

// An earlier version protected from disruption alone.
func TestANodeThatIsKeptFromDisruptionIsAlsoKeptFromRepair(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("own", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///elsewhere" })
	node := e.join(nodeClaim)
	node.Spec.ProviderID = nodeClaim.Status.ProviderID
	node.Annotations = map[string]string{v1alpha1.KeptAnnotation: "true"} // a user has allowed its disruption since
	e.Update(node)
	e.reconcile(nodeClaim)
	e.Get(node)
	assert.Equal(t, map[string]string{
		v1alpha1.KeptAnnotation: "true", v1alpha1.KeptFromRepairAnnotation: "true", karpv1.DoNotRepairAnnotationKey: "true",
		v1alpha1.KeptFromExpiryAnnotation: "true",
	}, node.Annotations)
}

// The same, for a Node whose adoption was completed, and whose disruption its user allowed.
func TestAnApprovedDisruptionOutlivesATimeInWhichTheMachineIsUnknown(t *testing.T) {
	for name, adopted := range map[string]bool{"its claim is known again": true, "its claim is made again": false} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			adopt := func(object client.Object) {
				object.SetLabels(lo.Assign(object.GetLabels(), map[string]string{v1alpha1.AdoptedLabel: "true"}))
				object.SetAnnotations(map[string]string{v1alpha1.NodeGroupAnnotation: e.machine.GetNodeGroupId()})
			}
			nodeClaim := e.left("own", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "sim:///elsewhere"; adopt(nc) })
			node := e.join(nodeClaim)
			adopt(node)
			node.Spec.ProviderID = nodeClaim.Status.ProviderID
			e.Update(node)
			e.reconcile(nodeClaim)
			require.Equal(t, []string{"MachineUnknown"}, e.Recorder.Reasons())
			e.Get(node)
			require.Equal(t, "true", node.Annotations[karpv1.DoNotDisruptAnnotationKey])
			require.Equal(t, e.machine.GetNodeGroupId(), node.Annotations[v1alpha1.NodeGroupAnnotation], "it is still the adopted one")

			node.Spec.ProviderID = e.machine.GetProviderId()
			e.Update(node)
			nodeClaim.Status.ProviderID = e.machine.GetProviderId()
			require.NoError(t, e.Kube.Status().Update(e.Context(), nodeClaim))
			if adopted {
				_, err := e.Client.Claims.CreateClaim(e.Context(), &agentv1alpha1.CreateClaimRequest{
					Cluster: e.Cluster, ClaimId: string(nodeClaim.UID), Holder: "karpenter", AdoptMachine: e.machine.GetName(),
					Candidates: []string{e.machine.GetNodeGroupId()},
				})
				require.NoError(t, err)
				e.known(nodeClaim)
			}
			e.clock.Step(time.Minute)
			e.reconcile(nodeClaim)
			require.NotNil(t, e.claim(nodeClaim))
			e.Get(node)
			for _, key := range []string{v1alpha1.KeptAnnotation, v1alpha1.KeptFromRepairAnnotation, karpv1.DoNotRepairAnnotationKey} {
				assert.NotContains(t, node.Annotations, key)
			}
			assert.Equal(t, !adopted, node.Annotations[karpv1.DoNotDisruptAnnotationKey] == "true", "an adoption protects, by the policy of the NodeClass")
			assert.Equal(t, e.machine.GetNodeGroupId(), node.Annotations[v1alpha1.NodeGroupAnnotation])
		})
	}
}

// After a return to the other provider the claims are gone, but what the first adoption set on
// Nodes and NodeClaims is still there.
func TestAnAdoptionAfterGoingBackProtectsTheNodeAgain(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	e.reconcile(nodeClaim)
	e.known(nodeClaim)
	allow := func() {
		for _, object := range []client.Object{nodeClaim, node} {
			e.Get(object)
			annotations := object.GetAnnotations()
			delete(annotations, karpv1.DoNotDisruptAnnotationKey)
			object.SetAnnotations(annotations)
			e.Update(object)
		}
	}
	allow()
	_, err := e.Client.Claims.ReturnMachine(e.Context(), &agentv1alpha1.ReturnMachineRequest{Cluster: e.Cluster, ClaimId: string(nodeClaim.UID)})
	require.NoError(t, err)
	e.Agent.Forget(e.Cluster, string(nodeClaim.UID))
	e.Eventually(func() bool { _, known := e.Claims.Get(string(nodeClaim.UID)); return !known }, "the claim is gone")
	e.clock.Step(time.Minute)

	block := func() {
		e.Agent.Block(e.machine.GetNodeGroupId(), agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "paused", time.Time{})
	}
	block()
	e.reconcile(nodeClaim)
	for _, object := range []client.Object{nodeClaim, node} {
		e.Get(object)
		assert.Equal(t, "true", object.GetAnnotations()[karpv1.DoNotDisruptAnnotationKey])
	}
	allow()
	e.reconcile(nodeClaim)
	e.Agent.Unblock(e.machine.GetNodeGroupId())
	e.reconcile(nodeClaim)
	e.Get(node)
	assert.NotNil(t, e.claim(nodeClaim))
	assert.NotContains(t, node.Annotations, karpv1.DoNotDisruptAnnotationKey, "once for each adoption")
	assert.Equal(t, e.machine.GetNodeGroupId(), node.Annotations[v1alpha1.NodeGroupAnnotation])
}

// returning requests the return of the machine.
func returning(nc *karpv1.NodeClaim) {
	nc.Annotations = map[string]string{v1alpha1.ReturnMachineAnnotation: "true"}
	nc.Finalizers = []string{karpv1.TerminationFinalizer}
}

func TestAMachineIsReturnedAsItIs(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	node.Finalizers = []string{karpv1.TerminationFinalizer, "example.com/other"}
	e.Update(node)
	e.reconcile(nodeClaim)
	e.known(nodeClaim)
	returning(nodeClaim)
	e.Update(nodeClaim)
	assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter)
	assert.True(t, nodeClaim.DeletionTimestamp.IsZero(), "core must see first that the Node is no NodeClaim's")
	e.Get(node)
	node.Labels[v1alpha1.Group+"/clusterapinodeclass"] = shimtest.NodeClassName // like a late pass of core's hydration
	e.Update(node)
	e.reconcile(nodeClaim)

	assert.Equal(t, "Returned", e.claim(nodeClaim).GetReason())
	machine := e.Agent.Machine(e.Cluster, e.machine.GetName())
	assert.Empty(t, machine.GetClaimId())
	assert.Nil(t, machine.GetDeletedAt())
	assert.EqualValues(t, 1, e.Agent.NodeGroup(e.machine.GetNodeGroupId()).GetFloorReplicas())

	e.Get(node)
	assert.Equal(t, []string{"example.com/other"}, node.Finalizers)
	assert.Empty(t, node.OwnerReferences, "or the garbage collector would delete it")
	assert.Equal(t, map[string]string{
		corev1.LabelTopologyZone: "from-the-cloud", "team": "blue", corev1.LabelInstanceTypeStable: "large",
		corev1.LabelArchStable: node.Labels[corev1.LabelArchStable], corev1.LabelOSStable: node.Labels[corev1.LabelOSStable],
	}, node.Labels)
	assert.Empty(t, node.Annotations)
	assert.Len(t, node.Spec.Taints, 1)
	assert.True(t, node.DeletionTimestamp.IsZero())

	assert.False(t, nodeClaim.DeletionTimestamp.IsZero())
	assert.Equal(t, e.Placeholder(nodeClaim.UID), nodeClaim.Status.ProviderID, "core finds no Node to drain")
	assert.True(t, corecloudprovider.IsNodeClaimNotFoundError(e.CloudProvider.Delete(e.Context(), nodeClaim)), "and ends")
	assert.Contains(t, e.Recorder.Reasons(), "MachineReturned")
}

// Core may be replacing the Node, and has marked it in memory.
func TestCoreForgetsThatItWasRemovingAReturnedNode(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	e.reconcile(nodeClaim)
	e.known(nodeClaim)
	core := state.NewCluster(e.clock, e.Kube, e.CloudProvider)
	knows := func() {
		core.UpdateNodeClaim(nodeClaim)
		require.NoError(t, core.UpdateNode(e.Context(), node))
	}
	knows()
	core.MarkForDeletion(node.Spec.ProviderID)
	c := e.config()
	c.Unmark = core.UnmarkForDeletion
	e.controller = adoption.New(c)
	returning(nodeClaim)
	e.Update(nodeClaim)
	e.reconcile(nodeClaim)
	e.reconcile(nodeClaim)
	require.False(t, nodeClaim.DeletionTimestamp.IsZero())
	e.Get(node)
	knows()
	core.DeleteNodeClaim(nodeClaim.Name)
	for known := range core.Nodes() {
		if known.Node != nil && known.Node.Name == node.Name {
			require.False(t, known.MarkedForDeletion())
			return
		}
	}
	t.Fatal("core does not know the Node")
}

func TestAReturnIsCompletedAfterACrash(t *testing.T) {
	for name, crash := range map[string]func(*env, *karpv1.NodeClaim, *corev1.Node){
		"after the claim ended": func(e *env, nodeClaim *karpv1.NodeClaim, _ *corev1.Node) {
			_, err := e.Client.Claims.ReturnMachine(e.Context(), &agentv1alpha1.ReturnMachineRequest{Cluster: e.Cluster, ClaimId: string(nodeClaim.UID)})
			require.NoError(e.t, err)
		},
		"after the Node was detached": func(e *env, nodeClaim *karpv1.NodeClaim, node *corev1.Node) {
			_, err := e.Client.Claims.ReturnMachine(e.Context(), &agentv1alpha1.ReturnMachineRequest{Cluster: e.Cluster, ClaimId: string(nodeClaim.UID)})
			require.NoError(e.t, err)
			e.Get(node)
			node.OwnerReferences, node.Labels, node.Annotations = nil, nil, nil
			e.Update(node)
		},
		"after the provider ID was changed": func(e *env, nodeClaim *karpv1.NodeClaim, node *corev1.Node) {
			_, err := e.Client.Claims.ReturnMachine(e.Context(), &agentv1alpha1.ReturnMachineRequest{Cluster: e.Cluster, ClaimId: string(nodeClaim.UID)})
			require.NoError(e.t, err)
			e.Get(node)
			node.OwnerReferences = nil
			e.Update(node)
			nodeClaim.Status.ProviderID = e.Placeholder(nodeClaim.UID)
			require.NoError(e.t, e.Kube.Status().Update(e.Context(), nodeClaim))
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.left("left")
			node := e.join(nodeClaim)
			e.reconcile(nodeClaim)
			e.known(nodeClaim)
			returning(nodeClaim)
			e.Update(nodeClaim)
			crash(e, nodeClaim, node)
			e.reconcile(nodeClaim)
			e.reconcile(nodeClaim)
			e.Get(node)
			assert.Empty(t, node.OwnerReferences)
			assert.Equal(t, e.Placeholder(nodeClaim.UID), nodeClaim.Status.ProviderID)
			assert.False(t, nodeClaim.DeletionTimestamp.IsZero())
		})
	}
}

// Otherwise Kubernetes would delete the Node with its owner, and core would drain it.
func TestANodeIsDetachedFromANodeClaimWithThePlaceholder(t *testing.T) {
	for name, unset := range map[string]func(*karpv1.NodeClaim){
		"found by the claim's machine": func(*karpv1.NodeClaim) {},
		"found by name":                func(nc *karpv1.NodeClaim) { nc.Status.NodeName = "node" },
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t)
			nodeClaim := e.left("left")
			node := e.join(nodeClaim)
			if adopted := name == "found by the claim's machine"; adopted {
				e.reconcile(nodeClaim)
				e.known(nodeClaim)
			}
			returning(nodeClaim)
			e.Update(nodeClaim)
			nodeClaim.Status.ProviderID = e.Placeholder(nodeClaim.UID)
			unset(nodeClaim)
			require.NoError(t, e.Kube.Status().Update(e.Context(), nodeClaim))
			e.reconcile(nodeClaim)
			e.Get(node)
			assert.Empty(t, node.OwnerReferences)
			assert.False(t, nodeClaim.DeletionTimestamp.IsZero())
		})
	}
}

// The order in which NodeClaims are looked at is not theirs.
func TestADuplicateIsToldOfAlthoughItsMachineWasAdoptedFirst(t *testing.T) {
	e := setUp(t)
	owner := e.left("owner")
	e.join(owner)
	e.reconcile(owner)
	e.known(owner)
	require.Equal(t, []string{"MachineAdopted"}, e.Recorder.Reasons())
	e.clock.Step(time.Minute) // expire the listing
	duplicate := e.left("duplicate")
	assert.Positive(t, e.reconcile(duplicate).RequeueAfter)
	require.Equal(t, []string{"MachineAdopted", "DuplicateNodeClaim"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[1], "belongs to NodeClaim owner")
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, e.claim(owner).GetPhase(), "nothing happens to it")
}

func TestADuplicateReturnsNothing(t *testing.T) {
	e := setUp(t)
	owner := e.left("owner")
	node := e.join(owner)
	node.Finalizers = []string{karpv1.TerminationFinalizer}
	e.Update(node)
	duplicate := e.left("duplicate", returning)
	assert.Positive(t, e.reconcile(duplicate).RequeueAfter)
	require.Equal(t, []string{"DuplicateNodeClaim"}, e.Recorder.Reasons())
	assert.True(t, duplicate.DeletionTimestamp.IsZero())

	duplicate.Status.ProviderID, duplicate.Status.NodeName = e.Placeholder(duplicate.UID), node.Name // as the event instructs
	require.NoError(t, e.Kube.Status().Update(e.Context(), duplicate))
	e.reconcile(duplicate)
	assert.False(t, duplicate.DeletionTimestamp.IsZero())
	e.Get(node)
	assert.NotEmpty(t, node.OwnerReferences)
	assert.NotEmpty(t, node.Finalizers)
}

func TestAReturnThatCannotBeIsTold(t *testing.T) {
	e := setUp(t)
	e.Agent.SetInfrastructure(fakeagent.Infrastructure{Appear: fakeagent.Manual})
	nodeClaim := e.Launched("waiting", returning)
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, e.claim(nodeClaim).GetPhase())
	assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter)
	require.Equal(t, []string{"MachineNotReturned"}, e.Recorder.Reasons())
	assert.Contains(t, e.Recorder.Messages()[0], "has no machine yet")
	assert.True(t, nodeClaim.DeletionTimestamp.IsZero())
}

func TestNothingIsDetachedWhileTheAgentIsAway(t *testing.T) {
	e := setUp(t)
	nodeClaim := e.left("left")
	node := e.join(nodeClaim)
	e.reconcile(nodeClaim)
	e.known(nodeClaim)
	returning(nodeClaim)
	e.Update(nodeClaim)
	e.Disconnect()
	assert.Positive(t, e.reconcile(nodeClaim).RequeueAfter)
	e.Get(node)
	assert.NotEmpty(t, node.OwnerReferences)
	assert.True(t, nodeClaim.DeletionTimestamp.IsZero())
}
