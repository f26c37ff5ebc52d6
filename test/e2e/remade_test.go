package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// TestNothingIsLostWithTheCRDOfMachineClaims deletes the CRD of MachineClaims, and all claims with
// it, while agents run, and creates it again. The Machines' labels identify their claims. A claim
// that waits for its Machine is lost with its object, and its pod is planned again.
func TestNothingIsLostWithTheCRDOfMachineClaims(t *testing.T) {
	figure := shows(t, "the CRD of MachineClaims is deleted, with all claims, and made again: every NodeClaim keeps its machine")
	if testing.Short() {
		t.Skip("not in the short run: waits as long as machines without a claim are kept")
	}
	const inGroup = 5
	h := startHub(t, "e2e-crd")
	h.run(t, h.source, inGroup, inGroup)
	// One machine has not joined yet, and joins while there are no claims. Another one is made
	// then.
	hangs := h.hangs(t, func() { h.scale(t, inGroup, inGroup+1) })
	before := h.holdings(t, h.source)
	require.Len(t, before.claims, 2*inGroup+1)
	require.NoError(t, h.source.Sandbox.StopComponent(sandbox.ClusterAPI))
	h.scale(t, inGroup, inGroup+2)
	poll(t, soon, func(context.Context) (string, error) {
		waiting := len(h.claims(t, h.source, agentv1.PhasePending))
		return lo.Ternary(waiting == 1, "", fmt.Sprintf("a claim to wait for its Machine: %d do", waiting)), nil
	})
	watching := watchSpoke(t, h.source)
	destroyed := providerLogs(t, h.source, "instance stops")

	crd := &unstructured.Unstructured{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	key := client.ObjectKey{Name: "machineclaims.agent.karpenter.cluster.x-k8s.io"}
	require.NoError(t, h.source.Hub.Get(within(t, soon), key, crd))
	require.NoError(t, h.source.Hub.Delete(within(t, soon), crd))
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		err := h.source.Hub.Get(ctx, key, crd.DeepCopy())
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return "the CRD to be gone", err
	})
	require.NoError(t, h.source.Sandbox.StartComponent(within(t, settleWithin), sandbox.ClusterAPI))
	h.joins(t, hangs)
	nothingHappens := func() {
		throughout(t, quiet, time.Second, func() {
			require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke")
			require.Empty(t, destroyed(), "instances")
		})
	}
	nothingHappens()

	again := &unstructured.Unstructured{Object: map[string]any{"spec": crd.Object["spec"]}}
	again.SetGroupVersionKind(crd.GroupVersionKind())
	again.SetName(crd.GetName())
	again.SetLabels(crd.GetLabels())
	again.SetAnnotations(crd.GetAnnotations())
	require.NoError(t, h.source.Hub.Create(within(t, soon), again))
	began := time.Now()
	poll(t, unheard, h.holds(before))
	figure("the claims were there again after %.0f s", time.Since(began).Seconds())
	require.NoError(t, h.source.Recorder.Await(within(t, unheard), running(2*inGroup+2)))
	require.NoError(t, h.source.Recorder.Await(within(t, unheard), everyMachineRuns))
	h.settle(t)
	nothingHappens()

	now := h.holdings(t, h.source)
	before.replicas["west"]++
	require.Equal(t, before.replicas, now.replicas)
	for id, had := range before.claims {
		has := now.claims[id]
		require.Equal(t, []string{had.nodeClaim, had.group, had.machine}, []string{has.nodeClaim, has.group, has.machine}, "claim %s", id)
	}
	require.Len(t, now.claims, len(before.claims)+1)
	require.Empty(t, h.faults())
}
