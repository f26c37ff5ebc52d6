package streams_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const within = 20 * time.Second

// follow makes watchers follow an agent until the test ends, or until the returned function is
// called.
func follow(t *testing.T, watchers []streams.Watcher) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, w := range watchers {
		all.Go(func() { w.Follow(ctx) })
	}
	stop = func() {
		cancel()
		all.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// live creates claims, gives them machines and releases them.
func live(t *testing.T, agent *fakeagent.Agent, claims int, meanwhile func(i int)) {
	t.Helper()
	group := agent.AddMachineDeployment(fakeagent.MachineDeployment{Name: "workers"})
	c, cluster := agent.Client(), fakeagent.DefaultCluster()
	for i := range claims {
		id := fmt.Sprintf("claim-%d", i)
		for _, r := range []*agentv1alpha1.CreateClaimRequest{
			{Cluster: cluster, ClaimId: id, Holder: "karpenter", Candidates: []string{group}},
			{Cluster: cluster, ClaimId: "other-" + id, Holder: "somebody", Candidates: []string{group}},
		} {
			_, err := c.Claims.CreateClaim(t.Context(), r)
			require.NoError(t, err)
		}
		machine := agent.Provision(cluster, id, "")
		agent.Join(cluster, machine.GetName(), "node-of-"+id)
		if i%2 == 0 {
			_, err := c.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: cluster, ClaimId: id})
			require.NoError(t, err)
		}
		if i%4 == 0 {
			agent.Forget(cluster, id)
		}
		meanwhile(i)
	}
}

func TestNothingIsWrongWithStreamsThatBreakOff(t *testing.T) {
	agent := fakeagent.New(fakeagent.WithHeartbeatInterval(20*time.Millisecond), fakeagent.WithWatchBuffer(4))
	t.Cleanup(agent.Close)
	watchers := streams.All("a watcher", agent.Client(), fakeagent.DefaultCluster(),
		streams.Options{Patience: within, ListEvery: 10 * time.Millisecond}, "karpenter", "somebody")
	stop := follow(t, watchers)
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	live(t, agent, 40, func(i int) {
		switch i % 10 {
		case 3:
			agent.DropStreams()
		case 6:
			agent.Resync()
		case 9:
			for _, w := range watchers {
				require.NoError(t, w.Settled(ctx))
			}
		}
	})
	for _, w := range watchers {
		require.NoError(t, w.Settled(ctx))
	}
	stop()
	for _, w := range watchers {
		figures, wrong := w.Check()
		assert.Empty(t, wrong)
		assert.Greater(t, figures.Streams, 1)
		assert.Greater(t, figures.Snapshots, 1)
		assert.Positive(t, figures.Events)
		assert.Positive(t, figures.Lists)
	}
}

// lossy is a client whose streams of claims lose the events that lost selects.
type lossy struct {
	agentv1alpha1.ClaimServiceClient

	lost func(*agentv1alpha1.WatchClaimsResponse) bool
}

func (l lossy) WatchClaims(
	ctx context.Context, r *agentv1alpha1.WatchClaimsRequest, o ...grpc.CallOption,
) (grpc.ServerStreamingClient[agentv1alpha1.WatchClaimsResponse], error) {
	stream, err := l.ClaimServiceClient.WatchClaims(ctx, r, o...)
	return lossyStream{stream, l.lost}, err
}

type lossyStream struct {
	grpc.ServerStreamingClient[agentv1alpha1.WatchClaimsResponse]

	lost func(*agentv1alpha1.WatchClaimsResponse) bool
}

func (s lossyStream) Recv() (*agentv1alpha1.WatchClaimsResponse, error) {
	for {
		m, err := s.ServerStreamingClient.Recv()
		if err != nil || !s.lost(m) {
			return m, err
		}
	}
}

func TestAnEventThatIsLostIsFound(t *testing.T) {
	for name, lost := range map[string]func(*agentv1alpha1.WatchClaimsResponse) bool{
		"an upsert": func(m *agentv1alpha1.WatchClaimsResponse) bool {
			return m.GetUpsert().GetClaimId() == "claim-1" && m.GetUpsert().GetMachine().GetNodeName() != ""
		},
		"a removal": func(m *agentv1alpha1.WatchClaimsResponse) bool { return m.GetRemovedId() == "claim-0" },
	} {
		t.Run(name, func(t *testing.T) {
			agent := fakeagent.New(fakeagent.WithHeartbeatInterval(20 * time.Millisecond))
			t.Cleanup(agent.Close)
			whole := agent.Client()
			c := &client.Client{Claims: lossy{whole.Claims, lost}, NodeGroups: whole.NodeGroups, Machines: whole.Machines}
			watchers := streams.All("a watcher", c, fakeagent.DefaultCluster(),
				streams.Options{Patience: 100 * time.Millisecond, ListEvery: 10 * time.Millisecond})
			follow(t, watchers)
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			for _, w := range watchers {
				require.NoError(t, w.Settled(ctx), "nothing is there yet")
			}
			live(t, agent, 2, func(int) {
				// Each change is awaited, so that no two events are combined.
				for _, w := range watchers {
					short, cancel := context.WithTimeout(ctx, time.Second)
					_ = w.Settled(short)
					cancel()
				}
			})
			require.Eventually(t, func() bool {
				for _, w := range watchers {
					if _, wrong := w.Check(); len(wrong) > 0 {
						return true
					}
				}
				return false
			}, within, 10*time.Millisecond)
		})
	}
}
