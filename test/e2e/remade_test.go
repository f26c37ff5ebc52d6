package e2e_test

import (
	"context"
	"fmt"
	"regexp"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
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
	g := NewWithT(t)
	h := startHub(t, "e2e-crd")
	h.run(t, h.source, inGroup, inGroup)
	// One machine has not joined yet, and joins while there are no claims. Another one is made
	// then.
	hangs := h.hangs(t, func() { h.scale(t, inGroup, inGroup+1) })
	before := h.holdings(t, h.source)
	g.Expect(before.claims).To(HaveLen(2*inGroup + 1))
	g.Expect(h.source.Sandbox.StopComponent(sandbox.ClusterAPI)).To(Succeed())
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
	g.Expect(h.source.Hub.Get(within(t, soon), key, crd)).To(Succeed())
	g.Expect(h.source.Hub.Delete(within(t, soon), crd)).To(Succeed())
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		err := h.source.Hub.Get(ctx, key, crd.DeepCopy())
		if apierrors.IsNotFound(err) {
			return "", nil
		}
		return "the CRD to be gone", err
	})
	g.Expect(h.source.Sandbox.StartComponent(within(t, settleWithin), sandbox.ClusterAPI)).To(Succeed())
	h.joins(t, hangs)
	nothingHappens := func() {
		g.Consistently(func(g Gomega) {
			g.Expect(watching.Incidents()).To(BeEmpty(), "what happened to what ran in the spoke")
			g.Expect(destroyed()).To(BeEmpty(), "instances")
		}).WithTimeout(quiet).WithPolling(time.Second).Should(Succeed())
	}
	nothingHappens()

	again := &unstructured.Unstructured{Object: map[string]any{"spec": crd.Object["spec"]}}
	again.SetGroupVersionKind(crd.GroupVersionKind())
	again.SetName(crd.GetName())
	again.SetLabels(crd.GetLabels())
	again.SetAnnotations(crd.GetAnnotations())
	g.Expect(h.source.Hub.Create(within(t, soon), again)).To(Succeed())
	began := time.Now()
	poll(t, unheard, h.holds(before))
	figure("the claims were there again after %.0f s", time.Since(began).Seconds())
	g.Expect(h.source.Recorder.Await(within(t, unheard), running(2*inGroup+2))).To(Succeed())
	g.Expect(h.source.Recorder.Await(within(t, unheard), everyMachineRuns)).To(Succeed())
	h.settle(t)
	nothingHappens()

	now := h.holdings(t, h.source)
	before.replicas["west"]++
	g.Expect(now.replicas).To(Equal(before.replicas))
	for id, had := range before.claims {
		has := now.claims[id]
		g.Expect([]string{has.nodeClaim, has.group, has.machine}).To(Equal([]string{had.nodeClaim, had.group, had.machine}), "claim %s", id)
	}
	g.Expect(now.claims).To(HaveLen(len(before.claims) + 1))
	g.Expect(h.faultsBut(crdTerminates.MatchString)).To(BeEmpty())
}

// crdTerminates matches the API server's error for the creation of a MachineClaim meanwhile.
var crdTerminates = regexp.MustCompile(`create not allowed while custom resource definition is terminating`)
