package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/scenario"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

func TestPodsBecomeNodesAndGoAgain(t *testing.T) {
	shows(t, "pods become nodes, which are consolidated and go again")
	if testing.Short() {
		t.Skip("the next test does the same, and kills processes on the way")
	}
	leaveAsFound(t)
	runScenario(t, false)
}

func TestPodsBecomeNodesAlthoughShimAndAgentAreKilled(t *testing.T) {
	shows(t, "the same, with shim and agent killed meanwhile")
	killed[t.Name()] = true
	leaveAsFound(t)
	result := runScenario(t, true)
	require.Equal(t, 2, result.Killed)
}

func runScenario(t *testing.T, chaos bool) scenario.Result {
	t.Helper()
	began := time.Now()
	tell := func(format string, args ...any) {
		say("%7.1f s  %s", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	result, err := scenario.Run(t.Context(), w, scenario.Options{Chaos: chaos, Title: tell, Note: tell})
	require.NoError(t, err)
	require.Equal(t, scenario.Full.TotalPods(), result.Pods)
	require.Equal(t, scenario.Full.TotalNodes()-1, result.Nodes, "one is the user's own")
	require.GreaterOrEqual(t, result.Consolidated, scenario.Full.TotalNodes()-scenario.Reduced.TotalNodes())
	require.Equal(t, map[string]int32{"small-a": 1, "large-b": 0, "small-b-spot": 0}, result.FinalReplicas)
	return result
}

func TestManifestsForAnotherProviderWorkUnchanged(t *testing.T) {
	shows(t, "discovery: manifests for karpenter-provider-cluster-api work unchanged")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	leaveAsFound(t)
	apply(t, w.Hub, manifests.PeerHub)
	apply(t, w.Spoke, manifests.PeerSpoke, manifests.PeerWorkload)
	require.NoError(t, w.AwaitNodePool(within(t, soon), "peer"))
	goHome(t, "scale-up")
	scale(t, "scale-up", 3)
	await(t, 2*time.Minute, running(3))
	nodes := lo.CountValuesBy(w.Recorder.State().Live(), func(j timeline.Timeline) string { return j.NodePool + " from " + j.Group })
	require.Equal(t, map[string]int{"peer from peer-md-0": 3}, nodes, "the pods keep away from each other")
}
