package providerid_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/providerid"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const machineID = "sim:///1"

// onStatusPatch calls f with each status patch before it reaches the API server. If f returns an
// error, the patch is not sent.
func onStatusPatch(f func(ctx context.Context, c client.Client, object client.Object, patch client.Patch) error) interceptor.Funcs {
	return interceptor.Funcs{SubResourcePatch: func(
		ctx context.Context, c client.Client, sub string, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption,
	) error {
		if err := f(ctx, c, object, patch); err != nil {
			return err
		}
		return c.SubResource(sub).Patch(ctx, object, patch, options...)
	}}
}

// patches records the status patches that reach the API server.
type patches struct{ sent []map[string]any }

func (p *patches) record(_ context.Context, _ client.Client, object client.Object, patch client.Patch) error {
	data, err := patch.Data(object)
	if err != nil {
		return err
	}
	content := map[string]any{}
	p.sent = append(p.sent, content)
	return json.Unmarshal(data, &content)
}

func newController(w *shimtest.Env) *providerid.Controller {
	return providerid.New(providerid.Config{
		Kube: w.Kube, Live: w.Kube, CloudProvider: w.CloudProvider, Claims: w.Claims, Cluster: w.Cluster, Recorder: w.Recorder,
	})
}

func setUp(t *testing.T) (*shimtest.Env, *patches, func(*karpv1.NodeClaim) reconcile.Result) {
	t.Helper()
	recorded := &patches{}
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithInterceptor(onStatusPatch(recorded.record)))
	controller := newController(w)
	return w, recorded, func(nodeClaim *karpv1.NodeClaim) reconcile.Result {
		t.Helper()
		result, err := controller.Reconcile(w.Context(), nodeClaim)
		require.NoError(t, err)
		return result
	}
}

func TestThePlaceholderStaysUntilTheMachineHasAnID(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	nodeClaim := w.Launched("claim")
	result := reconcile(nodeClaim)
	assert.Empty(t, recorded.sent)
	assert.Positive(t, result.RequeueAfter)
	assert.Less(t, result.RequeueAfter, 2*time.Minute, "core's garbage collection looks every two minutes")
}

func TestTheRealIDReplacesThePlaceholder(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, machineID)
	reconcile(nodeClaim.DeepCopy())
	w.Get(nodeClaim)
	assert.Equal(t, machineID, nodeClaim.Status.ProviderID)
	require.Len(t, recorded.sent, 1)
	metadata, _ := recorded.sent[0]["metadata"].(map[string]any)
	assert.Equal(t, []string{"metadata", "status"}, keys(recorded.sent[0]))
	assert.Equal(t, []string{"resourceVersion"}, keys(metadata), "the lock, and nothing else")
	assert.Equal(t, map[string]any{"providerID": machineID}, recorded.sent[0]["status"])
	assert.NotEmpty(t, nodeClaim.Status.Conditions, "the rest of the status is untouched")

	reconcile(nodeClaim)
	assert.Len(t, recorded.sent, 1, "nothing to do any more")
}

func keys(m map[string]any) []string {
	var out []string
	for _, key := range []string{"apiVersion", "kind", "metadata", "spec", "status", "resourceVersion", "name", "uid", "labels", "annotations"} {
		if _, ok := m[key]; ok {
			out = append(out, key)
		}
	}
	return out
}

func TestItIsPutBackAfterCoreWroteThePlaceholderAgain(t *testing.T) {
	for name, change := range map[string]func(*karpv1.NodeClaim){
		"before registration": func(*karpv1.NodeClaim) {},
		"after registration":  shimtest.Registered,
	} {
		t.Run(name, func(t *testing.T) {
			w, recorded, reconcile := setUp(t)
			nodeClaim := w.Launched("claim", change)
			w.Provision(nodeClaim, machineID)
			for range 2 {
				reconcile(nodeClaim.DeepCopy())
				w.Get(nodeClaim)
				require.Equal(t, machineID, nodeClaim.Status.ProviderID)
				nodeClaim.Status.ProviderID = w.Placeholder(nodeClaim.UID)
				require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClaim))
			}
			assert.Len(t, recorded.sent, 2)
		})
	}
}

func TestANodeClaimThatIsBeingDeletedGetsItToo(t *testing.T) {
	w, _, reconcile := setUp(t)
	nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) { nc.Finalizers = []string{karpv1.TerminationFinalizer} })
	w.Provision(nodeClaim, machineID)
	require.NoError(t, w.Kube.Delete(w.Context(), nodeClaim))
	w.Get(nodeClaim)
	reconcile(nodeClaim)
	w.Get(nodeClaim)
	assert.Equal(t, machineID, nodeClaim.Status.ProviderID, "or core would not find its Node, and not drain it")
}

func TestItWaitsUntilCoreHasRecordedTheLaunch(t *testing.T) {
	for name, change := range map[string]func(*karpv1.NodeClaim){
		"not launched":   func(nc *karpv1.NodeClaim) { nc.StatusConditions().SetUnknown(karpv1.ConditionTypeLaunched) },
		"no provider ID": func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = "" },
	} {
		t.Run(name, func(t *testing.T) {
			w, recorded, reconcile := setUp(t)
			nodeClaim := w.Launched("claim", change)
			w.Provision(nodeClaim, machineID)
			result := reconcile(nodeClaim)
			assert.Empty(t, recorded.sent, "core would write the placeholder over it")
			assert.LessOrEqual(t, result.RequeueAfter, 2*time.Second)
		})
	}
}

func TestTheDecisionIsMadeOnTheAPIServersState(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, machineID)
	cached := nodeClaim.DeepCopy()
	w.Get(nodeClaim)
	nodeClaim.Status.ProviderID = machineID
	require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClaim))
	reconcile(cached)
	assert.Empty(t, recorded.sent)

	other := w.NodeClaim("claim")
	other.UID = "another-incarnation"
	reconcile(other)
	assert.Empty(t, recorded.sent)
}

func TestALostRaceIsTriedAgain(t *testing.T) {
	fail := true
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithInterceptor(onStatusPatch(
		func(_ context.Context, _ client.Client, object client.Object, _ client.Patch) error {
			if fail {
				return apierrors.NewConflict(schema.GroupResource{}, object.GetName(), nil)
			}
			return nil
		})))
	controller := newController(w)
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, machineID)
	result, err := controller.Reconcile(w.Context(), nodeClaim.DeepCopy())
	require.NoError(t, err)
	assert.Positive(t, result.RequeueAfter)
	assert.Less(t, result.RequeueAfter, time.Second)
	fail = false
	_, err = controller.Reconcile(w.Context(), nodeClaim.DeepCopy())
	require.NoError(t, err)
	w.Get(nodeClaim)
	assert.Equal(t, machineID, nodeClaim.Status.ProviderID)
}

func TestTheLockIsHonoured(t *testing.T) {
	racing := true
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}}, shimtest.WithInterceptor(onStatusPatch(
		func(ctx context.Context, c client.Client, object client.Object, _ client.Patch) error {
			if !racing {
				return nil
			}
			racing = false // another writer comes between our read and our write
			current := &karpv1.NodeClaim{}
			if err := c.Get(ctx, client.ObjectKeyFromObject(object), current); err != nil {
				return err
			}
			current.Status.NodeName = "raced"
			return c.SubResource("status").Update(ctx, current)
		})))
	controller := newController(w)
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, machineID)
	_, err := controller.Reconcile(w.Context(), nodeClaim.DeepCopy())
	require.NoError(t, err)
	w.Get(nodeClaim)
	assert.Equal(t, w.Placeholder(nodeClaim.UID), nodeClaim.Status.ProviderID, "the write was refused")
}

func TestOneRealIDNeverGoesToTwoNodeClaims(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	owner := w.Launched("owner", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = machineID })
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, machineID)
	before, none := shimtest.Metric(t, "karpenter_capi_provider_id_conflicts_total", nil), shimtest.Scraped(t, time.Now())
	reconcile(nodeClaim)
	assert.InDelta(t, before+1, shimtest.Metric(t, "karpenter_capi_provider_id_conflicts_total", nil), 0)
	scrapes.Record(t, "KarpenterCapiProviderIDConflicts", none, shimtest.Scraped(t, time.Now()))
	assert.Empty(t, recorded.sent)
	assert.Equal(t, []string{"ProviderIDConflict"}, w.Recorder.Reasons())
	assert.Contains(t, w.Recorder.Messages()[0], owner.Name)
}

// The agent hands a Machine without a Node over to another claim as soon as its own is released,
// and core needs another five seconds to end the NodeClaim.
func TestAMachineThatIsHandedOverWaitsForTheEndOfItsNodeClaim(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	leaving := w.Launched("leaving", func(nc *karpv1.NodeClaim) {
		nc.Finalizers, nc.Status.ProviderID = []string{karpv1.TerminationFinalizer}, machineID
	})
	require.NoError(t, w.Kube.Delete(w.Context(), leaving))
	nodeClaim := w.Launched("claim")
	w.Provision(nodeClaim, machineID)
	before := shimtest.Metric(t, "karpenter_capi_provider_id_conflicts_total", nil)
	assert.LessOrEqual(t, reconcile(nodeClaim).RequeueAfter, time.Second, "its Node cannot be registered before")
	assert.InDelta(t, before, shimtest.Metric(t, "karpenter_capi_provider_id_conflicts_total", nil), 0, "that is no conflict")
	assert.Empty(t, w.Recorder.Reasons())
	assert.Empty(t, recorded.sent, "two NodeClaims never have the ID")

	w.Get(leaving)
	leaving.Finalizers = nil
	w.Update(leaving)
	reconcile(nodeClaim)
	w.Get(nodeClaim)
	assert.Equal(t, machineID, nodeClaim.Status.ProviderID)
}

func TestAnIDThatIsNotTheNodeClaimsOwnPlaceholderStays(t *testing.T) {
	for _, id := range []string{"sim:///2", "capi-claim://default/workload/somebody-else"} {
		w, recorded, reconcile := setUp(t)
		nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) { nc.Status.ProviderID = id })
		w.Provision(nodeClaim, machineID)
		reconcile(nodeClaim)
		assert.Empty(t, recorded.sent)
		assert.Equal(t, []string{"ProviderIDConflict"}, w.Recorder.Reasons())
	}
}

func TestEndedClaimsGiveNoID(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	nodeClaim := w.Launched("claim")
	machine := w.Provision(nodeClaim, machineID)
	w.Agent.LoseMachine(w.Cluster, machine.GetName())
	w.Eventually(func() bool {
		claim, _ := w.Claims.Get(string(nodeClaim.UID))
		return claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	}, "the claim ends")
	reconcile(nodeClaim)
	assert.Empty(t, recorded.sent)
}

func TestForeignNodeClaimsAreLeftAlone(t *testing.T) {
	w, recorded, reconcile := setUp(t)
	nodeClaim := w.Launched("claim", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Kind = "EC2NodeClass" })
	w.Provision(nodeClaim, machineID)
	result := reconcile(nodeClaim)
	assert.Empty(t, recorded.sent)
	assert.Zero(t, result)
}
