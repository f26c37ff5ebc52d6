package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/journey"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// The tests in this file print how long things take, and judge only their order: durations depend
// on what else the machine does.

// TestNodeClaimsGoWithTheirMachines measures how long a NodeClaim outlives a Machine that has
// failed, and an instance that is gone after a drain.
func TestNodeClaimsGoWithTheirMachines(t *testing.T) {
	figure := shows(t, "a NodeClaim goes as soon as its Machine has failed, or is gone after a drain")
	if testing.Short() {
		t.Skip("not in the short run: about numbers")
	}
	useCrowd(t)
	const failing = "failing" // a group of its own, as it cools down
	copies(t, w.Hub, manifests.CrowdHub, failing, of("SimMachineTemplate", func(o *unstructured.Unstructured) {
		set(o, map[string]any{"reason": "InsufficientCapacity", "message": "no host has room"}, "spec", "template", "spec", "failure")
	}))
	copies(t, w.Spoke, manifests.CrowdSpoke, failing, nil)
	copies(t, w.Spoke, manifests.CrowdWorkload, failing, nil)
	require.NoError(t, w.AwaitNodePool(within(t, soon), failing))
	goHome(t, failing, "crowd")
	hub := cached(t, w.Sandbox.HubConfig())

	scale(t, failing, 1)
	var (
		failed agentv1.MachineClaim
		shown  time.Time
	)
	poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		var claims agentv1.MachineClaimList
		err := hub.List(ctx, &claims, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: failing})
		var found bool
		failed, found = lo.Find(claims.Items, func(c agentv1.MachineClaim) bool { return c.Status.FailedAt != nil })
		shown = time.Now()
		return lo.Ternary(found, "", "a claim that has failed"), err
	})
	var went journey.Journey
	await(t, soon, func(s journey.State) string {
		went, _ = lo.Find(s.Journeys, func(j journey.Journey) bool { return string(j.UID) == failed.Spec.ClaimID })
		return lo.Ternary(went.Reached(journey.Gone), "", "the NodeClaim of the claim that has failed to go")
	})
	figure("hub shows failed to NodeClaim deleted: %v", rounded(max(0, went.At(journey.Deleting).Sub(shown))))
	require.Contains(t, failed.Status.Message, "no host has room")
	require.GreaterOrEqual(t, went.At(journey.Deleting), failed.Status.FailedAt.Time, "not before it has failed")
	require.False(t, went.Reached(journey.Registered))
	scale(t, failing, 0)
	await(t, soon, nothingLives)

	const pods = 5
	scale(t, "crowd", pods)
	await(t, 2*time.Minute, running(pods))
	drained := w.Recorder.State().Live()
	require.Len(t, drained, pods)
	for _, j := range drained {
		nodeClaim := &karpenterv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: j.NodeClaim}}
		require.NoError(t, w.Spoke.Delete(t.Context(), nodeClaim))
	}
	gone := map[string]time.Time{} // by the name of the instance, which is the Machine's
	var early []string
	poll(t, 4*time.Minute, func(ctx context.Context) (string, error) {
		// The NodeClaims first: an instance that is seen afterwards outlives its NodeClaim.
		state := w.Recorder.State()
		var instances simv1.SimMachineList
		if err := w.Hub.List(ctx, &instances, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return "", err
		}
		now := time.Now()
		left := 0
		for _, was := range drained {
			runs := lo.ContainsBy(instances.Items, func(i simv1.SimMachine) bool { return i.Name == was.Machine })
			is, _ := lo.Find(state.Journeys, func(j journey.Journey) bool { return j.UID == was.UID })
			if _, noted := gone[was.Machine]; !runs && !noted {
				gone[was.Machine] = now
			}
			switch {
			case runs && is.Reached(journey.Gone):
				early = append(early, is.String())
			case runs || !is.Reached(journey.Gone):
				left++
			}
		}
		return lo.Ternary(left == 0, "", fmt.Sprintf("%d of %d instances and NodeClaims to go", left, pods)), nil
	})
	require.Empty(t, early, "NodeClaims that have gone before their instances")
	outlived := lo.FilterMap(w.Recorder.State().Journeys, func(j journey.Journey, _ int) (time.Duration, bool) {
		at, noted := gone[j.Machine]
		return max(0, j.At(journey.Gone).Sub(at)), noted
	})
	require.Len(t, outlived, pods)
	slices.Sort(outlived)
	figure("instance gone after a drain to NodeClaim gone: median %v, max %v (n=%d)", rounded(outlived[pods/2]), rounded(outlived[pods-1]), pods)
	await(t, 2*time.Minute, running(pods))
}

// TestTwentyNodesAgainstClusterAPIAlone gives twenty pods their Nodes, on machines that take two
// seconds to get a provider ID and five more to join, and does the same by hand with replicas.
func TestTwentyNodesAgainstClusterAPIAlone(t *testing.T) {
	figure := shows(t, "twenty pods get their Nodes, against Cluster API alone")
	if testing.Short() {
		t.Skip("not in the short run: about numbers")
	}
	leaveAsFound(t)
	const (
		nodes   = 20
		byHand  = "by-hand"
		byClaim = "by-claim"
	)
	slowly := of("SimMachineTemplate", func(o *unstructured.Unstructured) {
		set(o, "2s", "spec", "template", "spec", "bootDelay")
		set(o, "5s", "spec", "template", "spec", "joinDelay")
	})
	copies(t, w.Hub, manifests.CrowdHub, byHand, func(o *unstructured.Unstructured) {
		slowly(o)
		of("MachineDeployment", func(o *unstructured.Unstructured) {
			o.SetLabels(lo.OmitByKeys(o.GetLabels(), []string{agentv1.MemberLabel}))
		})(o)
	})
	copies(t, w.Hub, manifests.CrowdHub, byClaim, slowly)
	copies(t, w.Spoke, manifests.CrowdSpoke, byClaim, nil)
	copies(t, w.Spoke, manifests.CrowdWorkload, byClaim, nil)
	require.NoError(t, w.AwaitNodePool(within(t, soon), byClaim))
	goHome(t, byClaim)
	spoke := cached(t, w.Sandbox.SpokeConfig())
	up := func(group string, want int) time.Duration {
		began := time.Now()
		poll(t, 4*time.Minute, func(context.Context) (string, error) {
			all := list(spoke, &corev1.NodeList{}, client.MatchingLabels{corev1.LabelInstanceTypeStable: group}).Items
			ready := lo.CountBy(all, func(n corev1.Node) bool {
				return lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
					return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
				})
			})
			return lo.Ternary(ready == want && len(all) == want, "", fmt.Sprintf("%d Nodes of %s to be up: %d of %d are", want, group, ready, len(all))), nil
		})
		return time.Since(began)
	}
	resize := func(replicas int) {
		md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: byHand}}
		require.NoError(t, w.Hub.Patch(t.Context(), md, mergePatch(fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas))))
	}
	resize(nodes)
	alone := up(byHand, nodes)
	resize(0)
	up(byHand, 0)

	known := len(w.Recorder.State().Journeys)
	began := time.Now()
	scale(t, byClaim, nodes)
	claimed := up(byClaim, nodes)
	await(t, 2*time.Minute, running(nodes))
	await(t, 2*time.Minute, func(s journey.State) string {
		return lo.Ternary(lo.EveryBy(s.Live(), func(j journey.Journey) bool { return j.Reached(journey.Initialized) }), "", "all Nodes to be initialized")
	})
	figure("%d Nodes up after %.1f s; by hand after %.1f s", nodes, claimed.Seconds(), alone.Seconds())
	made := w.Recorder.State().Journeys[known:]
	require.Len(t, made, nodes, "one NodeClaim for each pod, and no more")
	for _, stage := range []journey.Stage{
		journey.Created, journey.Launched, journey.Bound, journey.Provisioned, journey.Registered, journey.Initialized,
	} {
		at := lo.Map(made, func(j journey.Journey, _ int) time.Duration { return j.At(stage).Sub(began) })
		slices.Sort(at)
		figure("%s: the first after %.1f s, the last after %.1f s", stage, at[0].Seconds(), at[nodes-1].Seconds())
	}
	for _, j := range made {
		for earlier, later := range map[journey.Stage]journey.Stage{
			journey.Created: journey.Provisioned, journey.Provisioned: journey.Registered, journey.Registered: journey.Initialized,
		} {
			require.True(t, j.Reached(earlier) && j.Reached(later), "%s", j)
			// Two recorders' watches, of hub and spoke, may be this far apart.
			require.GreaterOrEqual(t, j.At(later).Add(time.Second), j.At(earlier), "%s", j)
		}
	}
}
