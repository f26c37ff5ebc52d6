package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const (
	// gitOps is the field manager of the writer in these tests.
	gitOps = "argocd-controller"
	// syncEvery is how often it writes the content of Git.
	syncEvery = time.Second
)

func TestReplicasWrittenBelowWhatIsClaimedFreezeTheGroup(t *testing.T) {
	shows(t, "gitops: replicas written below what is claimed freeze the node group, until a person ends that")
	if testing.Short() {
		t.Skip("not in the short run: waits for longer than a spare is kept")
	}
	const floor, pods, written = 1, 3, 2
	useCrowd(t)
	patchGroup(t, "crowd", fmt.Sprintf(`{"spec":{"replicas":%d}}`, floor))
	await(t, 2*time.Minute, crowdRuns(floor))
	scale(t, "crowd", pods)
	await(t, 3*time.Minute, running(pods))
	await(t, soon, crowdRuns(floor+pods))
	settle(t, w, settleWithin)

	stopSyncing := syncReplicas(t, written)
	poll(t, soon, func(ctx context.Context) (string, error) {
		var md clusterv1.MachineDeployment
		err := w.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: "crowd"}, &md)
		why := md.Annotations[agentv1.ReplicasLoweredAnnotation]
		return lo.Ternary(strings.Contains(why, gitOps), "",
			fmt.Sprintf("the annotation %s to name %s: it is %q", agentv1.ReplicasLoweredAnnotation, gitOps, why)), err
	})
	poll(t, soon, warned("crowd", "ReplicasLoweredBelowClaims", gitOps))
	poll(t, soon, selectedBy("crowd", "crowd", "no room while it is frozen", func(s shimv1.SelectedNodeGroup) bool {
		return !s.Available && s.Reason == "ReplicasLowered" && s.Message != ""
	}))
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_LOWERED, described(t, "crowd").GetAvailability().GetReason())

	// Cluster API removes the Machines in excess of the written replicas. Nothing else is removed,
	// and replicas are not raised back.
	poll(t, 2*time.Minute, func(context.Context) (string, error) {
		left := len(crowdMachines(t))
		return lo.Ternary(left <= written, "", fmt.Sprintf("Cluster API to leave %d of %d Machines", written, left)), nil
	})
	left := crowdMachines(t)
	throughout(t, spareGrace+15*time.Second, 500*time.Millisecond, func() {
		require.LessOrEqual(t, crowdReplicas(t), int32(written), "replicas are not raised back")
		require.Contains(t, crowdDeployment(t).Annotations, agentv1.ReplicasLoweredAnnotation)
		require.ElementsMatch(t, left, crowdMachines(t))
		require.Empty(t, releasedUnclaimed(t))
	})
	stopSyncing()

	annotate(t, "crowd", agentv1.ReplicasLoweredAnnotation, "null")
	await(t, 5*time.Minute, running(pods))
	await(t, 2*time.Minute, crowdRuns(floor+pods))
	has, err := invariants.Floor(crowdDeployment(t))
	require.NoError(t, err)
	require.Equal(t, int32(floor), has, "the user has what the user had before")
	require.NotContains(t, crowdDeployment(t).Annotations, agentv1.ReplicasLoweredAnnotation)
	poll(t, soon, selectedBy("crowd", "crowd", "room again", func(s shimv1.SelectedNodeGroup) bool { return s.Available }))
	settle(t, w, settleWithin)
}

// A number that is never below what is claimed costs a machine each time it is written back.
func TestReplicasThatAreWrittenBackFreezeTheGroup(t *testing.T) {
	shows(t, "gitops: replicas that are written back again and again, above what is claimed, freeze the node group as well")
	if testing.Short() {
		t.Skip("not in the short run: a variant of the test above")
	}
	const floor, written = 7, 8
	useCrowd(t)
	patchGroup(t, "crowd", fmt.Sprintf(`{"spec":{"replicas":%d}}`, floor))
	await(t, 2*time.Minute, crowdRuns(floor))
	scale(t, "crowd", written-floor)
	await(t, 3*time.Minute, running(written-floor))
	await(t, soon, crowdRuns(written))

	stopSyncing := syncReplicas(t, written)
	frozen := func(context.Context) (string, error) {
		why := crowdDeployment(t).Annotations[agentv1.ReplicasLoweredAnnotation]
		return lo.Ternary(strings.Contains(why, "keeps setting spec.replicas"), "", fmt.Sprintf("the group to be frozen: it says %q", why)), nil
	}
	// Each of these makes the agent write another number.
	for pods := int32(written - floor + 1); pods < written; pods++ {
		scale(t, "crowd", pods)
		if err := testenv.Poll(within(t, 20*time.Second), frozen); err == nil {
			break
		}
	}
	poll(t, soon, frozen)
	poll(t, soon, warned("crowd", "ReplicasWrittenBack", gitOps))
	left, _ := invariants.Floor(crowdDeployment(t))
	throughout(t, 15*time.Second, 500*time.Millisecond, func() {
		require.EqualValues(t, written, crowdReplicas(t))
		has, err := invariants.Floor(crowdDeployment(t))
		require.NoError(t, err)
		require.Equal(t, left, has)
	})
	stopSyncing()

	annotate(t, "crowd", agentv1.ReplicasLoweredAnnotation, "null")
	poll(t, soon, selectedBy("crowd", "crowd", "room again", func(s shimv1.SelectedNodeGroup) bool { return s.Available }))
	settle(t, w, settleWithin)
}

// syncReplicas repeatedly writes the crowd's replicas, like a GitOps controller whose manifest sets
// them, until it is stopped.
func syncReplicas(t *testing.T, replicas int64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	desired := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": clusterv1.GroupVersion.String(), "kind": "MachineDeployment",
		"metadata": map[string]any{"namespace": sandbox.ClusterNamespace, "name": "crowd"},
		"spec":     map[string]any{"replicas": replicas},
	}}
	write := func() error {
		return w.Hub.Apply(ctx, client.ApplyConfigurationFromUnstructured(desired.DeepCopy()), client.FieldOwner(gitOps), client.ForceOwnership)
	}
	if err := write(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		ticks := time.NewTicker(syncEvery)
		defer ticks.Stop()
		for {
			select {
			case <-ctx.Done():
				done <- nil
				return
			case <-ticks.C:
			}
			if err := write(); err != nil && !errors.Is(err, context.Canceled) {
				done <- err
				return
			}
		}
	}()
	return func() {
		t.Helper()
		cancel()
		if err := <-done; err != nil {
			t.Fatalf("writing replicas: %v", err)
		}
	}
}

// warned returns a condition for poll: there is a Warning event about a MachineDeployment with the
// reason and text.
func warned(group, reason, text string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var events eventsv1.EventList
		if err := w.Hub.List(ctx, &events, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return "", err
		}
		found := lo.ContainsBy(events.Items, func(e eventsv1.Event) bool {
			return strings.Contains(e.Note, text) && e.Type == corev1.EventTypeWarning && e.Reason == reason &&
				e.Regarding.Kind == "MachineDeployment" && e.Regarding.Name == group
		})
		return lo.Ternary(found, "", fmt.Sprintf("a Warning %s about %s that names %s", reason, group, text)), nil
	}
}

// releasedUnclaimed returns the crowd's Machines that the agent removes although no claim was
// released for them.
func releasedUnclaimed(t *testing.T) []string {
	t.Helper()
	return lo.FilterMap(listCrowd(t), func(m clusterv1.Machine, _ int) (string, bool) {
		return m.Name, controllerutil.ContainsFinalizer(&m, agentv1.ReleaseFinalizer) && m.Labels[agentv1.ClaimLabel] == ""
	})
}
