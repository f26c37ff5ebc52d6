package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// failedClaims returns the claims of a node group that have failed, ended or not, earliest failures
// first.
func failedClaims(ctx context.Context, group string) ([]agentv1.MachineClaim, error) {
	var all agentv1.MachineClaimList
	err := w.Hub.List(ctx, &all, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: group})
	failed := lo.Filter(all.Items, func(c agentv1.MachineClaim, _ int) bool { return c.Status.FailedAt != nil })
	slices.SortFunc(failed, func(a, b agentv1.MachineClaim) int { return a.Status.FailedAt.Compare(b.Status.FailedAt.Time) })
	return failed, err
}

// TestMachinesThatFailedAreKeptForDebugging lets four machines of one node group fail, one after
// the other. The node group keeps those that failed: no more than three, and not for longer than it
// is told to.
func TestMachinesThatFailedAreKeptForDebugging(t *testing.T) {
	figure := shows(t, "machines that failed are kept for debugging by an annotation: three of four, and for as long as it says")
	if testing.Short() {
		t.Skip("not in the short run: keeps machines for a minute")
	}
	leaveAsFound(t)
	const (
		kept  = "kept" // a group of its own, as it cools down
		pods  = 4
		limit = 3
		// shortest is the shortest time that the annotation may say.
		shortest = time.Minute
	)
	copies(t, w.Hub, manifests.CrowdHub, kept, func(o *unstructured.Unstructured) {
		of("SimMachineTemplate", func(o *unstructured.Unstructured) {
			set(o, string(simv1.StageBoot), "spec", "template", "spec", "stuckAt")
		})(o)
		annotated(agentv1.KeepFailedAnnotation, "1h")(o)
	})
	copies(t, w.Spoke, manifests.CrowdSpoke, kept, nil)
	copies(t, w.Spoke, manifests.CrowdWorkload, kept, nil)
	require.NoError(t, w.AwaitNodePool(within(t, soon), kept))
	goHome(t, kept)
	t.Cleanup(func() { annotate(t, kept, agentv1.KeepFailedAnnotation, "null") }) // else a test that fails would wait an hour

	scale(t, kept, pods)
	var claims []agentv1.MachineClaim
	poll(t, 2*time.Minute, func(context.Context) (string, error) {
		claims = lo.Filter(claimsOf(t, kept), func(c agentv1.MachineClaim, _ int) bool { return c.CurrentPhase() == agentv1.PhaseBound })
		return lo.Ternary(len(claims) == pods, "", fmt.Sprintf("%d claims with Machines: there are %d", pods, len(claims))), nil
	})
	deleted, err := timeline.Sight(within(t, soon), cached(t, w.Sandbox.HubConfig()), &clusterv1.Machine{}, func(m *clusterv1.Machine, gone bool) bool {
		return gone || !m.DeletionTimestamp.IsZero()
	})
	require.NoError(t, err)

	for i, c := range claims {
		instance := &simv1.SimMachine{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: c.Status.Machine.Name}}
		require.NoError(t, w.Hub.Patch(within(t, soon), instance, mergePatch(
			`{"spec":{"stuckAt":null,"failure":{"reason":"InsufficientCapacity","message":"no host has room"}}}`)))
		poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
			failed, err := failedClaims(ctx, kept)
			// In a second of its own: the hub records whole ones.
			done := len(failed) == i+1 && time.Since(failed[i].Status.FailedAt.Time) > time.Second
			return lo.Ternary(done, "", fmt.Sprintf("the claim of Machine %s to fail", c.Status.Machine.Name)), err
		})
	}
	scale(t, kept, 0) // the pods, for which there is no machine while the node group cools down
	failed, err := failedClaims(within(t, soon), kept)
	require.NoError(t, err)
	failedAt := lo.SliceToMap(failed, func(c agentv1.MachineClaim) (types.UID, time.Time) { return c.UID, c.Status.FailedAt.Time })
	machine := func(c agentv1.MachineClaim) string { return c.Status.Machine.Name }
	require.Equal(t, lo.Map(claims, func(c agentv1.MachineClaim, _ int) types.UID { return c.UID }),
		lo.Map(failed, func(c agentv1.MachineClaim, _ int) types.UID { return c.UID }), "in the order in which they were made to fail")
	for _, c := range failed {
		require.Equal(t, string(failures.Capacity), c.Status.FailureClass)
	}
	first, last := claims[:limit], claims[limit]

	isGone := func(c agentv1.MachineClaim) func(timeline.State) string {
		return func(s timeline.State) string {
			j, _ := lo.Find(s.Timelines, func(j timeline.Timeline) bool { return string(j.UID) == c.Spec.ClaimID })
			return lo.Ternary(j.Reached(timeline.Gone), "", "the NodeClaim of Machine "+machine(c)+" to go")
		}
	}
	await(t, 2*time.Minute, isGone(last))
	stays := func() {
		names := lo.Map(machinesOf(t, kept), func(m clusterv1.Machine, _ int) string { return m.Name })
		require.ElementsMatch(t, lo.Map(first, func(c agentv1.MachineClaim, _ int) string { return machine(c) }), names)
		for _, c := range first {
			_, deleting := deleted.Of(machine(c))
			require.False(t, deleting, "Machine %s", machine(c))
		}
		var md clusterv1.MachineDeployment
		require.NoError(t, w.Hub.Get(t.Context(), client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: kept}, &md))
		require.Equal(t, new(int32(limit)), md.Spec.Replicas, "each keeps its replica")
	}
	poll(t, soon, func(context.Context) (string, error) { // the NodeClaim may go before the Machine object
		left := len(machinesOf(t, kept))
		return lo.Ternary(left == limit, "", fmt.Sprintf("%d Machines to be left: there are %d", limit, left)), nil
	})
	// Longer than a spare is kept. The NodeClaims wait for their machines.
	throughout(t, spareGrace+10*time.Second, time.Second, stays)
	require.Len(t, w.Recorder.State().Live(), limit)
	figure("%d of %d kept, with their replicas", limit, pods)

	annotate(t, kept, agentv1.KeepFailedAnnotation, fmt.Sprintf("%q", shortest))
	began := time.Now()
	for _, c := range first {
		await(t, 3*time.Minute, isGone(c))
		at, deleting := deleted.Of(machine(c))
		require.True(t, deleting)
		lasted := at.Sub(failedAt[c.UID])
		figure("one for %.0f s", lasted.Seconds())
		require.GreaterOrEqual(t, lasted, shortest, "not earlier than the annotation says")
	}
	figure("the last NodeClaim gone %.0f s after the annotation was set to %v", time.Since(began).Seconds(), shortest)
	await(t, 2*time.Minute, noMachines)
}

// TestAQuotaThatIsUsedUpIsReportedAndTriedAgain runs into a quota of the infrastructure, which is
// raised later.
func TestAQuotaThatIsUsedUpIsReportedAndTriedAgain(t *testing.T) {
	figure := shows(t, "a quota of the infrastructure is used up: reported where users look, tried again now and then, and used once it is raised")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	const (
		coolDown = 20 * time.Second
		attempts = 3
		reason   = "QuotaExceeded"
		message  = "20 of 20 vCPUs are in use"
	)
	inSandbox(t, sandbox.Options{Name: "e2e-quota", AgentArgs: []string{"--failure-cool-down=" + coolDown.String()}})
	useCrowd(t)
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
	quota := func(failure string) {
		t.Helper()
		require.NoError(t, w.Hub.Patch(within(t, soon), template, mergePatch(`{"spec":{"template":{"spec":{"failure":`+failure+`}}}}`)))
	}
	quota(fmt.Sprintf(`{"reason":%q,"message":%q}`, reason, message))

	scale(t, "crowd", 1)
	var failed []agentv1.MachineClaim
	fails := func(claims int) {
		t.Helper()
		poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
			var err error
			failed, err = failedClaims(ctx, "crowd")
			return lo.Ternary(len(failed) >= claims, "", fmt.Sprintf("%d claims to fail: %d have", claims, len(failed))), err
		})
	}
	fails(1)
	first := failed[0]
	require.Equal(t, string(failures.Quota), first.Status.FailureClass)
	say := failures.Quota.Says()
	for _, text := range []string{say, reason, message} {
		require.Contains(t, first.Status.Message, text)
		poll(t, soon, eventInSpokeSays("NodeClaim", first.Spec.DisplayName, text))
		poll(t, soon, eventInSpokeSays("NodePool", "crowd", text))
	}
	for kind, name := range map[string]string{"NodeClaim": first.Spec.DisplayName, "NodePool": "crowd"} {
		told, err := eventsAbout(within(t, soon), w.Spoke, kind, name, "MachineFailed")
		require.NoError(t, err)
		require.NotEmpty(t, told, "%s %s", kind, name)
	}
	// The status is written every five seconds at most: the next cool-down shows it, if this one
	// ends first.
	poll(t, 2*time.Minute, selectedBy("crowd", "crowd", "no room for what failed there", func(s shimv1.SelectedNodeGroup) bool {
		return !s.Available && s.Reason == "CoolingDown" && strings.Contains(s.Message, say) && strings.Contains(s.Message, message)
	}))
	state := w.Sandbox.State()
	claim, err := agentAs(t, state.Paths.ReaderCertificate, state.Paths.ReaderKey).Claims.GetClaim(within(t, soon),
		&agentv1alpha1.GetClaimRequest{Cluster: theCluster(), ClaimId: first.Spec.ClaimID})
	require.NoError(t, err)
	require.Equal(t, agentv1alpha1.FailureClass_FAILURE_CLASS_QUOTA, claim.GetClaim().GetFailureClass())

	fails(attempts)
	require.Zero(t, w.Recorder.State().Pods.Running)
	quota("null")
	raised := time.Now()
	await(t, 3*time.Minute, running(1))
	figure("a pod ran %.0f s after the quota was raised, with a cool-down of %v", time.Since(raised).Seconds(), coolDown)
	fails(attempts) // for the list
	for i := range failed[1:] {
		apart := failed[i+1].Status.FailedAt.Sub(failed[i].Status.FailedAt.Time)
		require.GreaterOrEqual(t, apart, coolDown, "no claim was admitted in the cool-down")
	}
	all := made("crowd")
	figure("%d machines failed meanwhile, of %d NodeClaims", len(failed), all)
	// After each failure one may be planned before the shim has heard of it, and is refused.
	require.LessOrEqual(t, all, 2*len(failed)+1, "no loop of plans and refusals")
	await(t, soon, crowdRuns(1))
	poll(t, 2*time.Minute, selectedBy("crowd", "crowd", "room again", func(s shimv1.SelectedNodeGroup) bool { return s.Available }))
	var nodeClaims karpenterv1.NodeClaimList
	require.NoError(t, w.Spoke.List(within(t, soon), &nodeClaims))
	require.Len(t, nodeClaims.Items, 1)
}
