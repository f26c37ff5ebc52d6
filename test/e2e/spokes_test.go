package e2e_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

func TestTwoSpokesHaveOneHub(t *testing.T) {
	figure := shows(t, "two spokes have one hub: neither may ask for the other's claims, and the outage of one leaves the other alone")
	if testing.Short() {
		t.Skip("not in the short run: it takes two spokes of its own")
	}
	first := startHub(t, "e2e-two")
	second := joinHub(t, "e2e-two-second", "e2e-two")

	began := time.Now()
	first.run(t, first.source, 2, 2)
	second.runSecond(t, 2, 1)
	figure("7 pods on Nodes of their own after %.0f s", time.Since(began).Seconds())
	ofFirst, ofSecond := first.holdings(t, first.source), second.holdings(t, second.source)
	require.Equal(t, map[string]int32{"east": own + 2, "west": 2}, ofFirst.replicas)
	require.Equal(t, map[string]int32{"north": own + 2, "south": 1}, ofSecond.replicas)

	for caller, asked := range map[*hubs]*hubs{&first: &second, &second: &first} {
		paths := caller.source.Sandbox.State().Paths
		claims := caller.agentAs(t, paths.ClientCertificate, paths.ClientKey).Claims
		for _, of := range []client.ObjectKey{caller.source.Checker.Cluster, asked.source.Checker.Cluster} {
			_, err := claims.ListClaims(within(t, soon), &agentv1alpha1.ListClaimsRequest{
				Cluster: &agentv1alpha1.ClusterRef{Namespace: of.Namespace, Name: of.Name},
			})
			if of == caller.source.Checker.Cluster {
				require.NoError(t, err, "%s asks for its own claims", of)
			} else {
				require.Equal(t, codes.PermissionDenied, status.Code(err), "%s asks for the claims of %s: %v", caller.source.Checker.Cluster, of, err)
			}
		}
	}

	t.Log("the second spoke's API server hangs, and the first goes on")
	watching := watchSpoke(t, second.source)
	require.NoError(t, second.source.Sandbox.Suspend(sandbox.SpokeAPIServer))
	first.scale(t, 3, 2)
	require.NoError(t, first.source.Recorder.Await(within(t, 2*time.Minute), running(5)))
	first.goes(t)
	require.NoError(t, second.source.Sandbox.Resume(sandbox.SpokeAPIServer))
	poll(t, settleWithin, second.holds(ofSecond))
	second.settle(t)
	require.Empty(t, watching.Incidents(), "what happened in the second spoke")

	second.empty(t)
	require.Equal(t, map[string]int32{"north": own, "south": 0}, second.holdings(t, second.source).replicas)
	require.Equal(t, map[string]int32{"east": own, "west": 0}, first.holdings(t, first.source).replicas)
	require.Empty(t, faultsInLogs(second.source, sandbox.Shim))
}

// runSecond is run for a spoke of [joinHub], whose node groups have names of their own in the hub.
func (h hubs) runSecond(t *testing.T, north, south int) {
	t.Helper()
	cluster := h.source.Checker.Cluster.Name
	renamed, err := manifests.LoadAs(manifests.MoveHub, sandbox.ClusterName, cluster,
		sandbox.BootstrapSecret, cluster+"-bootstrap", "east", "north", "west", "south")
	require.NoError(t, err)
	require.NoError(t, manifests.ApplyObjects(within(t, soon), h.source.Hub, renamed...))
	h.occupy(t, h.source, north, south)
}

// joinHub starts a spoke whose hub is that of the sandbox named hub.
func joinHub(t *testing.T, name, hub string, changes ...func(*sandbox.Options)) hubs {
	t.Helper()
	options := ofHub(name)
	for _, change := range changes {
		change(&options)
	}
	options.HubOf, options.Agents, options.AgentArgs = hub, 0, nil
	second, err := testenv.Start(within(t, startWithin), options, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs: %s", second.Sandbox.State().Paths.Logs)
		}
		second.Stop()
	})
	second.Checker.Expected = func() invariants.Expected {
		return invariants.Expected{Shares: map[string]invariants.Share{"north": {Own: own}, "south": {}}}
	}
	return hubs{source: second, target: second}
}
