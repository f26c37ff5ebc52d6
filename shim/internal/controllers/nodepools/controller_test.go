package nodepools_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/apiservertest"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/nodepools"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

// kube is a client of a real API server: server-side apply and validation are what is tested.
var kube client.WithWatch

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	server, err := apiservertest.Run("shim")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = server.Stop() }()
	kube = server.Client
	return m.Run()
}

// environment is a controller between a fake agent and the API server, which begins without
// objects.
type environment struct {
	*testing.T

	agent      *fakeagent.Agent
	cluster    *agentv1alpha1.ClusterRef
	mirror     *agentclient.Mirror[*agentv1alpha1.PublishedObject]
	controller *nodepools.Controller
	recorder   *shimtest.Recorder
	clock      *testclock.FakeClock
	types      []*cloudprovider.InstanceType
	revisions  int
}

func newEnvironment(t *testing.T) *environment {
	t.Helper()
	w := &environment{
		T: t, agent: fakeagent.New(), cluster: fakeagent.DefaultCluster(),
		recorder: &shimtest.Recorder{}, clock: testclock.NewFakeClock(time.Now()),
	}
	t.Cleanup(w.agent.Close)
	shim := w.agent.ClientFor(w.cluster)
	w.mirror = shim.MirrorPublishedObjects(w.cluster)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = w.mirror.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	w.controller = nodepools.New(nodepools.Config{
		Kube: kube, Live: kube, Published: w.mirror, Agent: shim.NodePools, Cluster: w.cluster, InstanceTypes: w, Recorder: w.recorder,
		Timeout: shimtest.Timeout, Clock: w.clock,
	})
	t.Cleanup(func() {
		for _, list := range []client.Object{&karpv1.NodePool{}, &karpv1.NodeClaim{}, &v1alpha1.ClusterAPINodeClass{}} {
			assert.NoError(t, kube.DeleteAllOf(context.Background(), list))
		}
	})
	return w
}

func (w *environment) GetInstanceTypes(context.Context, *karpv1.NodePool) ([]*cloudprovider.InstanceType, error) {
	return w.types, nil
}

func (w *environment) eventually(what string, condition func() bool) {
	w.Helper()
	require.Eventually(w, condition, shimtest.Timeout, 5*time.Millisecond, what)
}

// reconcile runs the controller once, after the mirror has what the agent publishes.
func (w *environment) reconcile() {
	w.Helper()
	_, err := w.controller.Reconcile(w.Context(), reconcile.Request{})
	require.NoError(w, err)
}

const spec = `{"template": {"spec": {
	"nodeClassRef": {"group": "karpenter.cluster.x-k8s.io", "kind": "ClusterAPINodeClass", "name": "default"},
	"requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]}]}}%s}`

func TestWholeNumbersArePublishedAsTheyAre(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", `, "limits": {"memory": 9223372036854775807}`)
	assert.Empty(t, w.result("default"))
	limit := w.pool("default").Spec.Limits[corev1.ResourceMemory]
	require.Equal(t, int64(9223372036854775807), limit.Value())
}

// publish publishes the NodePool with more of its spec, and reconciles.
func (w *environment) publish(name, more string, changes ...func(*agentv1alpha1.PublishedObject)) {
	w.Helper()
	w.revisions++
	object := &agentv1alpha1.PublishedObject{
		Kind: "NodePool", Name: name, Set: "fleet", SpecJson: fmt.Sprintf(spec, more), Revision: strconv.Itoa(w.revisions),
		DeletionPolicy: agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN,
	}
	for _, change := range changes {
		change(object)
	}
	w.agent.Publish(w.cluster, object)
	w.eventually("the mirror has it", func() bool {
		shown, ok := w.mirror.Get(agentclient.PublishedKey(object))
		return ok && shown.GetRevision() == object.GetRevision()
	})
	w.reconcile()
}

func deleted(object *agentv1alpha1.PublishedObject) {
	object.DeletionPolicy = agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE
}

func (w *environment) unpublish(name string) {
	w.Helper()
	w.agent.Unpublish(w.cluster, "NodePool", name)
	w.eventually("the mirror knows", func() bool { _, ok := w.mirror.Get("NodePool/" + name); return !ok })
	w.reconcile()
}

func (w *environment) pool(name string) *karpv1.NodePool {
	w.Helper()
	pool := &karpv1.NodePool{}
	require.NoError(w, kube.Get(w.Context(), client.ObjectKey{Name: name}, pool))
	return pool
}

func (w *environment) exists(name string) bool {
	w.Helper()
	err := kube.Get(w.Context(), client.ObjectKey{Name: name}, &karpv1.NodePool{})
	require.NoError(w, client.IgnoreNotFound(err))
	return !apierrors.IsNotFound(err)
}

// result returns what was reported of the object, which is empty if it was applied.
func (w *environment) result(name string) string {
	w.Helper()
	for _, object := range w.agent.ReportedNodePools(w.cluster).GetObjects() {
		if object.GetName() == name {
			assert.Equal(w, object.GetMessage() == "", object.GetApplied())
			return object.GetMessage()
		}
	}
	return "not reported"
}

func (w *environment) userPool(name string) *karpv1.NodePool {
	w.Helper()
	pool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: name}}
	pool.Spec.Template.Spec.NodeClassRef = shimtest.NodeClassRef()
	pool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{{Key: "a.example/b", Operator: "Exists"}}
	require.NoError(w, kube.Create(w.Context(), pool))
	return pool
}

func TestPublishedObjectsAreAppliedAndKept(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", `, "weight": 10, "limits": {"cpu": "5"}`, func(o *agentv1alpha1.PublishedObject) {
		o.Labels, o.Annotations = map[string]string{"team": "a"}, map[string]string{"note": "b"}
	})
	assert.Empty(t, w.result("default"))
	made := w.pool("default")
	assert.Equal(t, "fleet", made.Labels[v1alpha1.PublishedByLabel])
	assert.Equal(t, "default/fleet", made.Annotations[v1alpha1.PublishedFromAnnotation])
	assert.Equal(t, "a", made.Labels["team"])
	assert.EqualValues(t, 10, *made.Spec.Weight)

	w.reconcile()
	assert.Equal(t, made.ResourceVersion, w.pool("default").ResourceVersion, "nothing is written without a reason")

	made.Spec.Weight, made.Labels["mine"] = new(int32(99)), "yes"
	require.NoError(t, kube.Update(t.Context(), made, client.FieldOwner("kubectl-edit")))
	w.reconcile()
	again := w.pool("default")
	assert.EqualValues(t, 10, *again.Spec.Weight, "a user changed a published field")
	assert.Equal(t, "yes", again.Labels["mine"], "a field of the user's own stays")

	w.publish("default", `, "weight": 10`)
	assert.Empty(t, w.result("default"))
	assert.Empty(t, w.pool("default").Spec.Limits, "it is not in the published spec any more")
	assert.NotContains(t, w.pool("default").Labels, "team")
}

func TestNodeClassesArePublishedToo(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", "", func(o *agentv1alpha1.PublishedObject) { o.Kind, o.SpecJson = "ClusterAPINodeClass", `{}` })
	assert.Empty(t, w.result("default"))
	nodeClass := &v1alpha1.ClusterAPINodeClass{}
	require.NoError(t, kube.Get(t.Context(), client.ObjectKey{Name: "default"}, nodeClass))
	assert.Equal(t, "fleet", nodeClass.Labels[v1alpha1.PublishedByLabel])
}

func TestObjectsOfOthersAreNeverTouched(t *testing.T) {
	w := newEnvironment(t)
	theirs := w.userPool("default")
	w.publish("default", `, "weight": 10`, deleted)
	assert.Contains(t, w.result("default"), "exists that was not published from the hub")
	w.unpublish("default")
	assert.Equal(t, theirs.ResourceVersion, w.pool("default").ResourceVersion)

	w.publish("taken", "", deleted)
	taken := w.pool("taken")
	delete(taken.Labels, v1alpha1.PublishedByLabel)
	taken.Spec.Weight = new(int32(7))
	require.NoError(t, kube.Update(t.Context(), taken))
	w.publish("taken", `, "weight": 10`, deleted)
	assert.Contains(t, w.result("taken"), "was removed", "a user took it over")
	w.unpublish("taken")
	assert.EqualValues(t, 7, *w.pool("taken").Spec.Weight)
}

func TestFieldsOfOthersAreNotTaken(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", `, "weight": 10`)
	theirs := &unstructured.Unstructured{}
	theirs.SetAPIVersion("karpenter.sh/v1")
	theirs.SetKind("NodePool")
	theirs.SetName("default")
	require.NoError(t, unstructured.SetNestedField(theirs.Object, "5", "spec", "limits", "cpu"))
	require.NoError(t, kube.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(theirs), client.FieldOwner("the-budget-tool")))
	w.reconcile()
	assert.Empty(t, w.result("default"), "the published fields are ours")

	w.publish("default", `, "weight": 20, "limits": {"cpu": "50"}`)
	assert.Contains(t, w.result("default"), `conflict with "the-budget-tool"`)
	assert.EqualValues(t, 10, *w.pool("default").Spec.Weight, "it is applied as a whole, or not")
}

func TestWhatTheAPIServerRefusesIsReported(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", `, "weight": 1000`)
	assert.Contains(t, w.result("default"), "spec.weight: Invalid value: 1000")
	assert.False(t, w.exists("default"))
	w.publish("default", `, "weight": 10`)
	assert.Empty(t, w.result("default"))
	w.publish("default", `, "weight": 1000`)
	assert.Contains(t, w.result("default"), "spec.weight")
	assert.EqualValues(t, 10, *w.pool("default").Spec.Weight)
}

func TestAnEntryWithAProblemLeavesTheObject(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", `, "weight": 10`, deleted)
	w.publish("default", "", func(o *agentv1alpha1.PublishedObject) { o.SpecJson, o.Problem = "", "spec: too large" })
	assert.EqualValues(t, 10, *w.pool("default").Spec.Weight)
	assert.Equal(t, "fleet", w.pool("default").Labels[v1alpha1.PublishedByLabel])
}

func TestWhatIsPublishedNoLongerIsKeptOrDeleted(t *testing.T) {
	w := newEnvironment(t)
	w.publish("kept", "")
	w.publish("deleted", "", deleted)
	w.publish("other", "", deleted)
	w.unpublish("kept")
	w.unpublish("deleted")
	kept := w.pool("kept")
	assert.NotContains(t, kept.Labels, v1alpha1.PublishedByLabel)
	assert.NotContains(t, kept.Annotations, v1alpha1.PublishedFromAnnotation)
	assert.Len(t, kept.Spec.Template.Spec.Requirements, 1, "only the marks are removed")
	assert.False(t, w.exists("deleted"))
	assert.True(t, w.exists("other"))
	assert.Contains(t, w.recorder.Reasons(), "Unpublished")

	relabelled := w.pool("other")
	relabelled.Labels[v1alpha1.PublishedByLabel] = "another"
	require.NoError(t, kube.Update(t.Context(), relabelled))
	w.unpublish("other")
	assert.True(t, w.exists("other"), "the label names another NodePoolSet than the one that it was made for")
}

func TestAnObjectWhoseRemovalIsRefusedHoldsUpNothingElse(t *testing.T) {
	w := newEnvironment(t)
	w.publish("a", "", deleted)
	w.publish("b", "", deleted)
	refused := true
	w.controller.Kube = interceptor.NewClient(kube, interceptor.Funcs{
		Delete: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			if refused && object.GetName() == "a" {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "nodepools"}, "a", errors.New("a webhook protects it"))
			}
			return c.Delete(ctx, object, options...)
		},
	})
	w.unpublish("a")
	w.unpublish("b")
	w.publish("c", "")
	assert.True(t, w.exists("a"))
	assert.False(t, w.exists("b"))
	assert.Empty(t, w.result("c"), "the report arrives")
	assert.Contains(t, w.recorder.Reasons(), "UnpublishingRefused")
	assert.Contains(t, strings.Join(w.recorder.Messages(), "\n"), "a webhook protects it")
	refused = false
	w.reconcile()
	assert.False(t, w.exists("a"))
}

func TestAMissingNodePoolSetRemovesNothing(t *testing.T) {
	w := newEnvironment(t)
	w.publish("retained", "")
	w.publish("deleted", "", deleted)
	before := map[string]*karpv1.NodePool{"retained": w.pool("retained"), "deleted": w.pool("deleted")}
	w.agent.DeleteNodePoolSet(w.cluster, "fleet") // or the hub was restored without it
	w.eventually("the mirror knows", func() bool { objects, _ := w.mirror.List(); return len(objects) == 0 })
	for range 3 {
		w.reconcile()
	}
	for name, pool := range before {
		assert.Equal(t, pool.ResourceVersion, w.pool(name).ResourceVersion, name)
	}
	assert.Equal(t, 2, lo.Count(w.recorder.Reasons(), "NodePoolSetMissing"), "each object says so once")

	w.publish("deleted", `, "weight": 10`, deleted)
	assert.Empty(t, w.result("deleted"), "it is the NodePoolSet's again")
	assert.EqualValues(t, 10, *w.pool("deleted").Spec.Weight)
	w.unpublish("deleted")
	assert.False(t, w.exists("deleted"), "the NodePoolSet is there, and publishes it no longer")
	assert.Equal(t, "fleet", w.pool("retained").Labels[v1alpha1.PublishedByLabel], "it is asked for again later")
	w.clock.Step(10 * time.Minute)
	w.reconcile()
	assert.NotContains(t, w.pool("retained").Labels, v1alpha1.PublishedByLabel)
}

func TestNothingIsRemovedBeforeTheHubConfirmsIt(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", "", deleted)
	w.agent.SetPaused(w.cluster, true) // as in a move to another hub
	w.unpublish("default")
	assert.True(t, w.exists("default"))
	w.agent.SetPaused(w.cluster, false)
	w.reconcile()
	assert.False(t, w.exists("default"))

	w.publish("default", "", deleted)
	w.agent.SetSynced(false)
	w.agent.DropStreams()
	w.eventually("the stream is lost", func() bool { return !w.mirror.State().Connected })
	w.reconcile()
	assert.True(t, w.exists("default"), "the hub is away")
}

func TestAShimWithoutAViewDoesNothing(t *testing.T) {
	w := newEnvironment(t)
	w.publish("default", "", deleted)
	other := fakeagent.New()
	other.SetSynced(false)
	t.Cleanup(other.Close)
	shim := other.ClientFor(w.cluster)
	restarted := nodepools.New(nodepools.Config{
		Kube: kube, Live: kube, Published: shim.MirrorPublishedObjects(w.cluster), Agent: shim.NodePools, Cluster: w.cluster, InstanceTypes: w,
		Recorder: w.recorder, Timeout: shimtest.Timeout, Clock: clock.RealClock{},
	})
	_, err := restarted.Reconcile(t.Context(), reconcile.Request{})
	require.NoError(t, err)
	assert.True(t, w.exists("default"))
}

func TestTheStatusOfAllNodePoolsIsReported(t *testing.T) {
	w := newEnvironment(t)
	w.userPool("own")
	w.publish("default", "")
	ready := w.pool("default")
	for _, condition := range []string{
		karpv1.ConditionTypeValidationSucceeded, karpv1.ConditionTypeNodeClassReady, karpv1.ConditionTypeNodeRegistrationHealthy,
	} {
		ready.StatusConditions().SetTrue(condition)
	}
	require.NoError(t, kube.Status().Update(t.Context(), ready))
	offering := func(zone string, price float64) *cloudprovider.Offering {
		return &cloudprovider.Offering{Price: price, Available: true, Requirements: scheduling.NewLabelRequirements(map[string]string{
			corev1.LabelTopologyZone: zone, karpv1.CapacityTypeLabelKey: karpv1.CapacityTypeOnDemand,
		})}
	}
	w.types = []*cloudprovider.InstanceType{{Name: "metal", Offerings: cloudprovider.Offerings{offering("a", 0.25), offering("b", 0.5)}}}
	claim := func(name, zone string, registered bool) {
		nodeClaim := &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: lo.PickBy(map[string]string{
			karpv1.NodePoolLabelKey: "default", corev1.LabelTopologyZone: zone, karpv1.CapacityTypeLabelKey: karpv1.CapacityTypeOnDemand,
			corev1.LabelInstanceTypeStable: lo.Ternary(zone == "", "", "metal"),
		}, func(_, value string) bool { return value != "" })}}
		nodeClaim.Spec.NodeClassRef = shimtest.NodeClassRef()
		nodeClaim.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{{Key: "a.example/b", Operator: "Exists"}}
		require.NoError(t, kube.Create(t.Context(), nodeClaim))
		if registered {
			nodeClaim.StatusConditions().SetTrue(karpv1.ConditionTypeRegistered)
			require.NoError(t, kube.Status().Update(t.Context(), nodeClaim))
		}
	}
	claim("one", "a", true)
	claim("two", "b", false)
	claim("waiting", "", false)
	w.reconcile()
	report := w.agent.ReportedNodePools(w.cluster)
	require.Len(t, report.GetNodePools(), 2)
	published, own := report.GetNodePools()[0], report.GetNodePools()[1]
	assert.Equal(t, "fleet", published.GetSet())
	assert.True(t, published.GetReady(), published.GetMessage())
	assert.EqualValues(t, 1, published.GetNodes())
	assert.EqualValues(t, 2, published.GetPendingNodeClaims())
	assert.Equal(t, "0.75", published.GetPricePerHour())
	assert.Equal(t, "own", own.GetName())
	assert.Empty(t, own.GetSet())
	assert.False(t, own.GetReady())
	assert.NotEmpty(t, own.GetMessage())
	assert.Equal(t, "0", own.GetPricePerHour())

	w.types = nil
	w.reconcile()
	assert.Empty(t, w.agent.ReportedNodePools(w.cluster).GetNodePools()[0].GetPricePerHour(), "the price of a node is not known")
}

func TestManyNodePoolsAreCounted(t *testing.T) {
	w := newEnvironment(t)
	for i := range 66 {
		w.userPool(fmt.Sprintf("pool-%02d", i))
	}
	w.eventually("the mirror has synced", func() bool { return w.mirror.State().Synced })
	w.reconcile()
	report := w.agent.ReportedNodePools(w.cluster)
	require.Len(t, report.GetNodePools(), 64)
	assert.Equal(t, "pool-63", report.GetNodePools()[63].GetName())
	assert.EqualValues(t, 2, report.GetMoreNodePools())
}
