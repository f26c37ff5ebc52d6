package server_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/health/grpc_health_v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/contact"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// hubContact is a server.Contact whose state the test sets.
type hubContact struct {
	mu      sync.Mutex
	lost    error
	changed chan struct{}
}

func (c *hubContact) State() (changed <-chan struct{}, lost error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed, c.lost
}

func (c *hubContact) turn(lost error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.changed)
	c.lost, c.changed = lost, make(chan struct{})
}

func startInContact(t *testing.T) (*fixture, *hubContact) {
	t.Helper()
	c := &hubContact{changed: make(chan struct{})}
	return start(t, func(_ *fixture, config *server.Config) { config.Contact = c }), c
}

var errHubAway = errors.New("the hub's API server has not answered since noon")

// A shim assumes that its view is current as long as its stream continues.
func TestStreamsEndWhileTheHubsAPIServerDoesNotAnswer(t *testing.T) {
	f, contact := startInContact(t)
	watchers := map[string]func() error{}
	nodeGroups, err := f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	watchers["node groups"] = func() error { _, err := nodeGroups.Recv(); return err }
	machines, err := f.cluster().Machines.WatchMachines(f.ctx(), &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef})
	require.NoError(t, err)
	watchers["machines"] = func() error { _, err := machines.Recv(); return err }
	claims, err := f.cluster().Claims.WatchClaims(f.ctx(), &agentv1alpha1.WatchClaimsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	watchers["claims"] = func() error { _, err := claims.Recv(); return err }
	for name, receive := range watchers {
		require.NoError(t, receive(), "%s: synced", name)
	}

	contact.turn(errHubAway)
	for name, receive := range watchers {
		err := receive()
		require.True(t, agenterrors.IsUnavailable(err), "%s: %v", name, err)
		require.Equal(t, agenterrors.ReasonHubUnreachable, agenterrors.ReasonOf(err), name)
		require.ErrorContains(t, err, "since noon", name)
	}
	again, err := f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = again.Recv()
	require.Equal(t, agenterrors.ReasonHubUnreachable, agenterrors.ReasonOf(err), "new ones are refused: %v", err)

	contact.turn(nil)
	again, err = f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	first, err := again.Recv()
	require.NoError(t, err)
	require.NotNil(t, first.GetSynced())
}

// Cached responses may be wrong by now, and calls that need the hub would wait until they time out.
func TestCallsAreRefusedWhileTheHubsAPIServerDoesNotAnswer(t *testing.T) {
	f, contact := startInContact(t)
	contact.turn(errHubAway)
	c := f.cluster()
	for name, call := range map[string]func() error{
		"ListNodeGroups": func() error {
			_, err := c.NodeGroups.ListNodeGroups(f.ctx(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: spokeRef})
			return err
		},
		"GetMachine": func() error {
			_, err := c.Machines.GetMachine(f.ctx(), &agentv1alpha1.GetMachineRequest{Cluster: spokeRef, Name: "m"})
			return err
		},
		"ListMachines": func() error {
			_, err := c.Machines.ListMachines(f.ctx(), &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef})
			return err
		},
		"ListClaims": func() error {
			_, err := c.Claims.ListClaims(f.ctx(), &agentv1alpha1.ListClaimsRequest{Cluster: spokeRef})
			return err
		},
		"ReleaseClaim": func() error {
			_, err := c.Claims.ReleaseClaim(f.ctx(), &agentv1alpha1.ReleaseClaimRequest{Cluster: spokeRef, ClaimId: "a"})
			return err
		},
	} {
		err := call()
		require.Equal(t, agenterrors.ReasonHubUnreachable, agenterrors.ReasonOf(err), "%s: %v", name, err)
	}
	_, err := c.Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{})
	require.NoError(t, err, "the agent itself lives")
}

func TestReadinessAndMetricsShowThatTheHubsAPIServerDoesNotAnswer(t *testing.T) {
	f, contact := startInContact(t)
	health := func() grpc_health_v1.HealthCheckResponse_ServingStatus {
		response, err := grpc_health_v1.NewHealthClient(f.cluster().Conn()).Check(f.ctx(), &grpc_health_v1.HealthCheckRequest{})
		require.NoError(t, err)
		return response.GetStatus()
	}
	require.Eventually(t, func() bool { return health() == grpc_health_v1.HealthCheckResponse_SERVING }, patience, time.Millisecond)
	require.NoError(t, f.server.Check())
	for _, away := range []bool{true, false} {
		want, reachable := grpc_health_v1.HealthCheckResponse_SERVING, 1.0
		if away {
			want, reachable = grpc_health_v1.HealthCheckResponse_NOT_SERVING, 0
			contact.turn(errHubAway)
			require.ErrorContains(t, f.server.Check(), "since noon")
		} else {
			contact.turn(nil)
			require.NoError(t, f.server.Check())
		}
		require.Eventually(t, func() bool { return health() == want }, patience, time.Millisecond)
		families, err := f.registry.Gather()
		require.NoError(t, err)
		found := false
		for _, family := range families {
			if family.GetName() == "capi_agent_hub_reachable" {
				found = true
				require.InDelta(t, reachable, family.GetMetric()[0].GetGauge().GetValue(), 0)
			}
		}
		require.True(t, found)
	}
}

func TestTheMetricShowsThatNoRequestToTheHubIsAnswered(t *testing.T) {
	var away atomic.Bool
	now := clocktesting.NewFakeClock(time.Now())
	probe := contact.New(contact.Config{
		Ask: func(context.Context) error {
			if away.Load() {
				return errHubAway
			}
			return nil
		},
		Interval: 2 * time.Second, Timeout: 2 * time.Second, Patience: 5 * time.Second, Clock: now,
	})
	f := start(t, func(_ *fixture, c *server.Config) { c.Contact = probe })
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(t, probe.Run(ctx)) })
	defer running.Wait()
	defer cancel()
	become := func(reachable string) {
		t.Helper()
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			now.Step(2 * time.Second)
			assert.NoError(c, testutil.GatherAndCompare(f.registry, strings.NewReader(`
# HELP capi_agent_hub_reachable 1 if the hub's API server responds, 0 otherwise.
# TYPE capi_agent_hub_reachable gauge
capi_agent_hub_reachable `+reachable+"\n"), "capi_agent_hub_reachable"))
		}, patience, time.Millisecond)
	}
	become("1")
	reachable := f.scraped()
	away.Store(true)
	become("0")
	scrapes.Record(t, "CapiAgentHubUnreachable", reachable, f.scraped())
	away.Store(false)
	become("1")
}

// inFront forwards connections to the first agent that is ready, like a Service, and returns its
// address.
func inFront(t *testing.T, agents ...*fixture) string {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	forward := func(from net.Conn) {
		defer func() { _ = from.Close() }()
		for _, agent := range agents {
			if agent.server.Check() != nil {
				continue
			}
			to, err := new(net.Dialer).DialContext(context.Background(), "tcp", agent.address)
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = from.Close() }()
				_, _ = io.Copy(from, to)
			}()
			_, _ = io.Copy(to, from)
			_ = to.Close()
			return
		}
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go forward(conn)
		}
	}()
	return listener.Addr().String()
}

// A connection outlasts the readiness of its agent. Otherwise a shim would stay with an agent that
// cannot do anything.
func TestCallersLeaveAnAgentWhoseHubDoesNotAnswerForOneWhoseDoes(t *testing.T) {
	first, contact := startInContact(t)
	second := start(t, func(f *fixture, _ *server.Config) { f.authority = first.authority })
	files := first.authority.Issue(t, t.TempDir(), first.authority, spokeURI)
	shim := first.connect(client.Options{
		Address: inFront(t, first, second), TLS: &client.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile},
	})
	require.NoError(t, first.list(shim))
	require.Empty(t, startedCalls(t, second.registry))
	contact.turn(errHubAway)
	require.Eventually(t, func() bool { return first.list(shim) == nil }, patience, time.Millisecond)
	require.Contains(t, startedCalls(t, second.registry), "ListNodeGroups")
}
