package e2e_test

import (
	"context"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/journey"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// outage is how long the hub is away: longer than the grace period and several rounds of every controller.
const outage = 35 * time.Second

func TestNothingIsLostWhileTheHubIsAway(t *testing.T) {
	shows(t, "nothing is lost while the hub is away")
	if testing.Short() {
		t.Skip("not in the short run: an outage takes its time")
	}
	g := NewWithT(t)
	leaveAsFound(t)
	apply(t, w.Hub, manifests.FleetHub)
	apply(t, w.Spoke, manifests.FleetSpoke, manifests.FleetWorkload)
	g.Expect(w.AwaitNodePool(within(t, soon), "default")).To(Succeed())
	goHome(t, "web", "batch")
	// One node has room for a second pod of web.
	scale(t, "web", 1)
	await(t, 2*time.Minute, running(1))
	await(t, soon, everyMachineRuns)
	g.Expect(w.Checker.Settle(within(t, settleWithin))).To(BeEmpty())
	nodeClaims, nodes := uids(t, &karpenterv1.NodeClaimList{}), uids(t, &corev1.NodeList{})
	shim := w.Status(sandbox.Shim)

	g.Expect(w.Sandbox.StopComponent(sandbox.Agent)).To(Succeed())
	t.Cleanup(func() { // the other tests need it
		if err := w.Sandbox.StartComponent(context.Background(), sandbox.Agent); err != nil {
			t.Error(err)
		}
	})
	away := time.Now()

	// What fits is scheduled; what needs a node waits.
	scale(t, "web", 2)
	await(t, soon, running(2))
	scale(t, "batch", 1)

	poll(t, soon, conditionSays("default", shimv1.ConditionAgentReachable, "no connection to the agent"))
	g.Expect(time.Since(away)).To(BeNumerically(">=", gracePeriod), "a short silence is no news")
	poll(t, soon, conditionSays("default", "Ready", shimv1.ConditionAgentReachable))

	g.Consistently(func(g Gomega) {
		g.Expect(uids(t, &karpenterv1.NodeClaimList{})).To(ContainElements(nodeClaims))
		g.Expect(uids(t, &corev1.NodeList{})).To(ConsistOf(nodes))
		now := w.Status(sandbox.Shim)
		g.Expect(now.PID).To(Equal(shim.PID), "the shim lives")
		g.Expect(now.Ready).To(BeTrue(), "the shim is healthy")
		g.Expect(deleted(t)).To(BeEmpty())
	}).WithTimeout(max(0, outage-time.Since(away))).WithPolling(500 * time.Millisecond).Should(Succeed())

	g.Expect(w.Sandbox.StartComponent(within(t, soon), sandbox.Agent)).To(Succeed())
	g.Expect(w.AwaitNodePool(within(t, soon), "default")).To(Succeed())
	await(t, 2*time.Minute, running(3))
	g.Expect(uids(t, &corev1.NodeList{})).To(ContainElements(nodes))
	g.Expect(lo.Filter(w.Recorder.State().Live(), func(j journey.Journey, _ int) bool { return j.Reached(journey.Deleting) })).To(BeEmpty())
}

// uids lists the UIDs of the spoke's objects, sorted by name as the API server does.
func uids(t *testing.T, list client.ObjectList) []types.UID {
	t.Helper()
	if err := w.Spoke.List(t.Context(), list); err != nil {
		t.Fatal(err)
	}
	switch list := list.(type) {
	case *karpenterv1.NodeClaimList:
		return lo.Map(list.Items, func(n karpenterv1.NodeClaim, _ int) types.UID { return n.UID })
	case *corev1.NodeList:
		return lo.Map(list.Items, func(n corev1.Node, _ int) types.UID { return n.UID })
	}
	t.Fatalf("%T is not known here", list)
	return nil
}

// deleted lists the Nodes and registered NodeClaims whose deletion was asked for.
func deleted(t *testing.T) []string {
	t.Helper()
	var nodes corev1.NodeList
	var nodeClaims karpenterv1.NodeClaimList
	for _, list := range []client.ObjectList{&nodes, &nodeClaims} {
		if err := w.Spoke.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
	}
	return append(
		lo.FilterMap(nodes.Items, func(n corev1.Node, _ int) (string, bool) { return n.Name, !n.DeletionTimestamp.IsZero() }),
		lo.FilterMap(nodeClaims.Items, func(n karpenterv1.NodeClaim, _ int) (string, bool) {
			return n.Name, !n.DeletionTimestamp.IsZero() && n.StatusConditions().IsTrue(karpenterv1.ConditionTypeRegistered)
		})...,
	)
}
