package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// TestAShimWithTheKubeconfigOfAnotherSpokeHarmsNeither runs the first spoke's shim with the
// kubeconfig of the second one: with the identity that it finds there, which is the second spoke's,
// and with its own, with which only the live set of NodeClaims gives it away.
func TestAShimWithTheKubeconfigOfAnotherSpokeHarmsNeither(t *testing.T) {
	figure := shows(t, "a shim with the kubeconfig of another spoke is refused, gets no machine, and neither spoke loses anything")
	if testing.Short() {
		t.Skip("not in the short run: it takes two spokes of its own")
	}
	first := startHub(t, "e2e-mixed")
	second := joinHub(t, "e2e-mixed-second", "e2e-mixed")
	first.run(t, first.source, 2, 1)
	second.runSecond(t, 1, 1)
	before := map[*hubs]holdings{&first: first.holdings(t, first.source), &second: second.holdings(t, second.source)}
	for spoke := range before {
		require.NoError(t, spoke.source.Sandbox.StopComponent(sandbox.Shim))
	}
	watching := lo.Map([]hubs{first, second}, func(h hubs, _ int) func() []string { return watchSpoke(t, h.source).Incidents })
	unharmed := func() []string {
		var all []string
		for _, incidents := range watching {
			all = append(all, incidents()...)
		}
		for spoke, had := range before {
			is := spoke.holdings(t, spoke.source)
			if fmt.Sprint(is) != fmt.Sprint(had) {
				all = append(all, fmt.Sprintf("%s had %v and has %v", spoke.source.Checker.Cluster, had, is))
			}
		}
		return all
	}

	t.Log("as it is installed")
	stop := first.mixUp(t, second)
	poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		class, err := second.nodeClass(ctx)
		reachable := lo.FromPtr(class.StatusConditions().Get(shimv1.ConditionAgentReachable))
		return lo.Ternary(reachable.Reason == "AgentRefused", "",
			fmt.Sprintf("the NodeClass to say that the agent refuses the shim: it says %s: %s", reachable.Reason, reachable.Message)), err
	})
	require.Empty(t, unharmed())
	stop()

	t.Log("with the first spoke's certificate")
	paths := first.source.Sandbox.State().Paths
	began := time.Now()
	stop = first.mixUp(t, second,
		"AGENT_IDENTITY_SECRET=", "AGENT_BOOTSTRAP_SECRET=",
		"AGENT_TLS_CERT_FILE="+paths.ClientCertificate, "AGENT_TLS_KEY_FILE="+paths.ClientKey, "AGENT_CA_FILE="+paths.AgentCA)
	poll(t, 2*time.Minute, func(ctx context.Context) (string, error) {
		told, err := eventsAbout(ctx, first.source.Hub, "Cluster", first.source.Checker.Cluster.Name, "LiveSetRefused")
		return lo.Ternary(len(told) > 0, "", "the Cluster to say that the set of NodeClaims is refused"), err
	})
	figure("the set of the other spoke's NodeClaims was refused after %.0f s", time.Since(began).Seconds())
	poll(t, soon, func(ctx context.Context) (string, error) {
		class, err := second.nodeClass(ctx)
		reachable := lo.FromPtr(class.StatusConditions().Get(shimv1.ConditionAgentReachable))
		ready := class.StatusConditions().Root().IsTrue()
		return lo.Ternary(reachable.Reason == "LiveSetRefused" && !ready, "",
			fmt.Sprintf("the NodeClass to say it, too: it says %s: %s", reachable.Reason, reachable.Message)), err
	})
	// A Node for this pod would join the first spoke.
	second.scale(t, 2, 1)
	throughout(t, 3*syncInterval, time.Second, func() {
		var nodeClaims karpenterv1.NodeClaimList
		require.NoError(t, second.source.Spoke.List(t.Context(), &nodeClaims))
		require.Len(t, nodeClaims.Items, len(before[&second].claims), "Karpenter launches nothing for a NodeClass that is not ready")
		require.Empty(t, unharmed())
	})
	second.scale(t, 1, 1)
	require.Empty(t, unharmed())
	stop()

	for spoke := range before {
		require.NoError(t, spoke.source.Sandbox.StartComponent(within(t, settleWithin), sandbox.Shim))
	}
	for spoke, had := range before {
		poll(t, settleWithin, spoke.holds(had))
		spoke.settle(t)
	}
	require.Empty(t, unharmed())
	var nodeClaims karpenterv1.NodeClaimList
	require.NoError(t, second.source.Spoke.List(t.Context(), &nodeClaims))
	require.Len(t, nodeClaims.Items, len(before[&second].claims))
	second.empty(t)
	first.goes(t)
}

// mixUp runs the shim of h with the kubeconfig of the other spoke's shim, and further environment
// variables, until the returned function is called or the test ends.
func (h hubs) mixUp(t *testing.T, other hubs, env ...string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := h.source.Sandbox.ShimCommand(ctx)
	theirs := filepath.Join(other.source.Sandbox.State().Paths.Dir, "karpenter.kubeconfig")
	require.FileExists(t, theirs)
	cmd.Env = append(cmd.Env, slices.Concat([]string{
		"KUBECONFIG=" + theirs,
		"METRICS_BIND_ADDRESS=127.0.0.1:0", "METRICS_SECURE=false", "HEALTH_PROBE_BIND_ADDRESS=127.0.0.1:0",
		"DISABLE_LEADER_ELECTION=true", "HUB_UNREACHABLE_GRACE_PERIOD=" + gracePeriod.String(), "CLAIM_SYNC_INTERVAL=" + syncInterval.String(),
	}, env)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = soon
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait()
	}()
	stop = func() {
		cancel()
		<-ended
	}
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("the mixed up shim: %s", strings.Join(lo.Slice(strings.Split(said.String(), "\n"), 0, 200), "\n"))
		}
	})
	return stop
}

// nodeClass reads the spoke's NodeClass.
func (h hubs) nodeClass(ctx context.Context) (*shimv1.ClusterAPINodeClass, error) {
	var class shimv1.ClusterAPINodeClass
	return &class, h.source.Spoke.Get(ctx, client.ObjectKey{Name: "move"}, &class)
}

// eventsAbout returns the messages of the events with a reason about an object.
func eventsAbout(ctx context.Context, c client.Client, kind, name, reason string) ([]string, error) {
	var all corev1.EventList
	err := c.List(ctx, &all)
	return lo.FilterMap(all.Items, func(e corev1.Event, _ int) (string, bool) {
		return e.Message, e.InvolvedObject.Kind == kind && e.InvolvedObject.Name == name && e.Reason == reason
	}), err
}
