package e2e_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// outage is how long the hub is unreachable: longer than the grace period and several rounds of
// every controller. In the short run it is over soon after it has been noticed.
const outage = 35 * time.Second

// unserved is for how long at least no NodeClaim must be created for pods that need one: longer
// than Karpenter waits for further pods.
const unserved = 5 * time.Second

// noticedWithin is how long a shim may treat the data of an unresponsive hub as current.
const noticedWithin = 15 * time.Second

func TestNothingIsLostWhileTheHubIsAway(t *testing.T) {
	agentsAway := func(ctx context.Context, away bool) error {
		var errs []error
		for _, agent := range lo.Times(agents, sandbox.AgentName) {
			if away {
				errs = append(errs, w.Sandbox.StopComponent(agent))
			} else {
				errs = append(errs, w.Sandbox.StartComponent(ctx, agent))
			}
		}
		return errors.Join(errs...)
	}
	hangs := func(_ context.Context, away bool) error {
		if away {
			return w.Sandbox.Suspend(sandbox.HubAPIServer)
		}
		return w.Sandbox.Resume(sandbox.HubAPIServer)
	}
	for _, test := range []struct {
		shows, says string
		turn        func(ctx context.Context, away bool) error
		short       bool // part of the short run
	}{
		{"nothing is lost while the hub is away", "no connection to the agent", agentsAway, false},
		{"nothing is lost while the hub's API server does not answer and the agents live", "API server has not answered", hangs, true},
	} {
		t.Run(test.shows, func(t *testing.T) {
			figure := shows(t, test.shows)
			if testing.Short() && !test.short {
				t.Skip("not in the short run: one outage is enough")
			}
			leaveAsFound(t)
			apply(t, w.Hub, manifests.FleetHub)
			apply(t, w.Spoke, manifests.FleetSpoke, manifests.FleetWorkload)
			require.NoError(t, w.AwaitNodePool(within(t, soon), "default"))
			goHome(t, "web", "batch")
			// One node has room for a second pod of web.
			scale(t, "web", 1)
			await(t, 2*time.Minute, running(1))
			await(t, soon, everyMachineRuns)
			settle(t, w, settleWithin)
			nodeClaims, nodes := uids(t, &karpenterv1.NodeClaimList{}), uids(t, &corev1.NodeList{})
			shim := w.Status(sandbox.Shim)
			connected := follow(t)

			t.Cleanup(func() { // the other tests need it
				ctx, cancel := context.WithTimeout(context.Background(), soon)
				defer cancel()
				if err := test.turn(ctx, false); err != nil {
					t.Error(err)
				}
			})
			went := time.Now() // when the first of them does
			require.NoError(t, test.turn(within(t, soon), true))
			away := time.Now()

			require.EventuallyWithT(t, func(c *assert.CollectT) {
				require.Zero(c, connected())
			}, noticedWithin, 50*time.Millisecond, "all streams to the agents")
			figure("noticed after %.1f s", time.Since(away).Seconds())
			// Pods that fit are scheduled.
			scale(t, "web", 2)
			await(t, soon, running(2))

			poll(t, soon, conditionSays("default", shimv1.ConditionAgentReachable, test.says))
			require.GreaterOrEqual(t, time.Since(went), gracePeriod, "a short silence is no news")
			poll(t, soon, conditionSays("default", "Ready", shimv1.ConditionAgentReachable))
			// Pods that need a node wait.
			scale(t, "batch", 1)

			throughout(t, max(unserved, lo.Ternary(testing.Short(), 0, outage)-time.Since(away)), 500*time.Millisecond, func() {
				require.ElementsMatch(t, nodeClaims, uids(t, &karpenterv1.NodeClaimList{}), "none is created that cannot be served")
				require.ElementsMatch(t, nodes, uids(t, &corev1.NodeList{}))
				now := w.Status(sandbox.Shim)
				require.Equal(t, shim.PID, now.PID, "the shim lives")
				require.True(t, now.Ready, "the shim is healthy")
				require.Empty(t, deleted(t))
			})

			require.NoError(t, test.turn(within(t, soon), false))
			require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, agents, connected()) }, soon, 10*time.Millisecond, "by itself")
			require.NoError(t, w.AwaitNodePool(within(t, soon), "default"))
			await(t, 2*time.Minute, running(3))
			require.Subset(t, uids(t, &corev1.NodeList{}), nodes)
			require.Empty(t, lo.Filter(w.Recorder.State().Live(), func(j timeline.Timeline, _ int) bool { return j.Reached(timeline.Deleting) }))
		})
	}
}

// follow follows each agent like a shim, and returns a function that returns how many of them are
// being followed.
func follow(t *testing.T) func() int {
	t.Helper()
	state := w.Sandbox.State()
	cluster := &agentv1alpha1.ClusterRef{Namespace: testenv.Cluster.Namespace, Name: testenv.Cluster.Name}
	mirrors := lo.Map(state.AgentAddresses, func(address string, _ int) *agentclient.Mirror[*agentv1alpha1.NodeGroup] {
		c, err := agentclient.New(agentclient.Options{
			Address: address,
			TLS:     &agentclient.TLS{CertFile: state.Paths.AdminCertificate, KeyFile: state.Paths.AdminKey, CAFile: state.Paths.AgentCA},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		mirror := c.MirrorNodeGroups(cluster)
		go func() { _ = mirror.Run(t.Context()) }()
		if err := mirror.WaitForSync(within(t, soon)); err != nil {
			t.Fatal(err)
		}
		return mirror
	})
	return func() int {
		return lo.CountBy(mirrors, func(m *agentclient.Mirror[*agentv1alpha1.NodeGroup]) bool { return m.State().Connected })
	}
}

// uids returns the UIDs of the spoke's objects, sorted by name as in the API server.
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

// deleted returns the Nodes and registered NodeClaims that are being deleted.
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
