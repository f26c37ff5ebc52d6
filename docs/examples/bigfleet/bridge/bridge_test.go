package bridge_test

import (
	"context"
	"maps"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/bridge"
	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	holder     = "cluster-autoscaler-bigfleet"
	within     = 20 * time.Second
	interval   = 10 * time.Millisecond
	speculated = protocol.State_STATE_SPECULATIVE
	creating   = protocol.State_STATE_CREATING
	idle       = protocol.State_STATE_IDLE
	configures = protocol.State_STATE_CONFIGURING
	configured = protocol.State_STATE_CONFIGURED
	draining   = protocol.State_STATE_DRAINING
	deleting   = protocol.State_STATE_DELETING
	failed     = protocol.State_STATE_FAILED
)

// environment is a fake agent, a bridge that calls it with the role autoscaler, and BigFleet, which
// calls the bridge.
type environment struct {
	t       *testing.T
	agent   *fakeagent.Agent
	options bridge.Options
	shard   protocol.ProviderClient
	stop    func()
}

func newEnvironment(t *testing.T, infrastructure fakeagent.Infrastructure) *environment {
	t.Helper()
	agent := fakeagent.New(fakeagent.WithInfrastructure(infrastructure))
	t.Cleanup(agent.Close)
	w := &environment{t: t, agent: agent, options: bridge.Options{
		Agent: agent.AutoscalerFor(fakeagent.DefaultCluster()), Cluster: fakeagent.DefaultCluster(), Holder: holder,
		StateFile: filepath.Join(t.TempDir(), "state.db"), Slots: 3, SpotInterruption: 0.1, Clock: clock.RealClock{},
	}}
	return w
}

// group adds a node group that is reserved for BigFleet.
func (w *environment) group(described *agentv1alpha1.NodeGroup) string {
	described.Holder = holder
	return w.agent.AddNodeGroup(described)
}

// start runs the bridge until the test ends, or stop.
func (w *environment) start() {
	w.t.Helper()
	b, err := bridge.New(w.options)
	require.NoError(w.t, err)
	listener, server := bufconn.Listen(1<<20), grpc.NewServer()
	protocol.Register(server, b)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(listener) })
	ended := make(chan error, 1)
	running.Go(func() { ended <- b.Run(ctx) })
	conn, err := grpc.NewClient("passthrough:///bridge", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(w.t, err)
	w.shard = protocol.NewClient(conn)
	w.stop = sync.OnceFunc(func() {
		_ = conn.Close()
		server.Stop()
		cancel()
		running.Wait()
		require.NoError(w.t, <-ended)
		require.NoError(w.t, b.Close())
	})
	w.t.Cleanup(w.stop)
	w.eventually("the bridge answers", func() bool {
		_, err := w.shard.List(w.t.Context(), &protocol.ListRequest{})
		return err == nil
	})
}

// eventually waits for a condition, which may fail the test.
func (w *environment) eventually(what string, condition func() bool) {
	w.t.Helper()
	err := wait.PollUntilContextTimeout(w.t.Context(), interval, within, true, func(context.Context) (bool, error) { return condition(), nil })
	require.NoError(w.t, err, what)
}

func (w *environment) list(r *protocol.ListRequest) *protocol.ListResponse {
	w.t.Helper()
	response, err := w.shard.List(w.t.Context(), r)
	require.NoError(w.t, err)
	return response
}

// slot returns a machine that could be had.
func (w *environment) slot() string {
	w.t.Helper()
	var machines []*protocol.Machine
	w.eventually("a machine could be had", func() bool {
		machines = w.list(&protocol.ListRequest{States: []protocol.State{speculated}}).GetMachines()
		return len(machines) > 0
	})
	return machines[0].GetId()
}

func (w *environment) get(id string) *protocol.Machine {
	w.t.Helper()
	m, err := w.shard.Get(w.t.Context(), &protocol.GetRequest{Id: id})
	require.NoError(w.t, err)
	return m
}

func (w *environment) reaches(id string, state protocol.State) *protocol.Machine {
	w.t.Helper()
	w.eventually("machine "+id+" reaches "+state.String(), func() bool { return w.get(id).GetState() == state })
	return w.get(id)
}

func (w *environment) create(id string) *protocol.Accepted {
	w.t.Helper()
	accepted, err := w.shard.Create(w.t.Context(), &protocol.CreateRequest{Id: id})
	require.NoError(w.t, err)
	return accepted
}

func (w *environment) configure(id string) *protocol.Accepted {
	w.t.Helper()
	accepted, err := w.shard.Configure(w.t.Context(), &protocol.ConfigureRequest{
		Id: id, Cluster: "production", Bootstrap: []byte("#cloud-config"), Metadata: map[string]string{"priority": "7"},
	})
	require.NoError(w.t, err)
	return accepted
}

func (w *environment) claim(id string) *agentv1alpha1.Claim {
	return w.agent.Claim(fakeagent.DefaultCluster(), id)
}

func TestAMachineLivesThroughAllStates(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual})
	group := w.group(&agentv1alpha1.NodeGroup{Name: "workers", Zone: "zone-a"})
	w.start()
	id, cluster := w.slot(), fakeagent.DefaultCluster()

	accepted := w.create(id)
	require.Equal(t, creating, accepted.GetMachine().GetState())
	claim := w.claim(accepted.GetOperation())
	require.Equal(t, holder, claim.GetHolder())
	require.Equal(t, id, claim.GetDisplayName())
	require.Equal(t, group, claim.GetNodeGroupId())
	require.Nil(t, w.get(id).GetHost())
	machine := w.agent.Provision(cluster, claim.GetClaimId(), "example://1")
	require.Equal(t, "example://1", w.reaches(id, idle).GetHost().GetName())

	accepted = w.configure(id)
	require.Equal(t, configures, accepted.GetMachine().GetState())
	require.Equal(t, "production", accepted.GetMachine().GetCluster(), "from the first moment on")
	require.Nil(t, w.claim(accepted.GetOperation()), "the machine is there")
	w.agent.Join(cluster, machine.GetName(), "node-1")
	m := w.reaches(id, configured)
	require.Equal(t, "production", m.GetCluster())
	require.Equal(t, map[string]string{"priority": "7"}, m.GetMetadata())

	accepted, err := w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id, GraceSeconds: 30})
	require.NoError(t, err)
	require.Equal(t, draining, accepted.GetMachine().GetState())
	require.Equal(t, "production", accepted.GetMachine().GetCluster())
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING, w.claim(claim.GetClaimId()).GetPhase())
	require.False(t, w.claim(claim.GetClaimId()).GetDrained(), "Cluster API has to drain the Node")
	require.Never(t, func() bool {
		m, err := w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
		return err != nil || m.GetState() != draining
	}, 200*time.Millisecond, interval, "until the machine is gone")
	w.agent.Terminate(cluster, machine.GetName())
	m = w.reaches(id, idle)
	require.Empty(t, m.GetCluster())
	require.Empty(t, m.GetMetadata())
	require.Zero(t, w.agent.NodeGroup(group).GetReplicas())

	again := w.configure(id).GetOperation()
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, w.claim(again).GetPhase(), "another machine, as the first is gone")
	machine = w.agent.Provision(cluster, again, "example://2")
	w.agent.Join(cluster, machine.GetName(), "node-2")
	require.Equal(t, "example://2", w.reaches(id, configured).GetHost().GetName())
	_, err = w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id})
	require.NoError(t, err)
	w.agent.Terminate(cluster, machine.GetName())
	w.reaches(id, idle)

	accepted, err = w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
	require.NoError(t, err)
	require.Equal(t, deleting, accepted.GetMachine().GetState())
	require.Nil(t, w.reaches(id, speculated).GetHost())
	require.Zero(t, w.agent.NodeGroup(group).GetReplicas())
}

func TestAMachineThatWasNeverConfiguredIsDeleted(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	group := w.group(&agentv1alpha1.NodeGroup{Name: "workers", Replicas: 1})
	w.start()
	id := w.slot()
	claim := w.create(id).GetOperation()
	w.reaches(id, idle)
	_, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
	require.NoError(t, err)
	w.reaches(id, speculated)
	require.Equal(t, "Released", w.claim(claim).GetReason())
	require.EqualValues(t, 1, w.agent.NodeGroup(group).GetReplicas(), "the user's is left")

	require.NotEqual(t, claim, w.create(id).GetOperation(), "an ID of a claim is never used again")
	w.reaches(id, idle)
}

// What a call asked for happens once, whatever is lost on the way.
func TestACallIsRepeated(t *testing.T) {
	for name, disturb := range map[string]func(*environment){
		"nothing is lost":            func(*environment) {},
		"the request is lost":        func(w *environment) { w.agent.Fail("CreateClaim", 2, agenterrors.HubUnreachable("lost")) },
		"the answer is lost":         func(w *environment) { w.agent.FailAfter("CreateClaim", 2, agenterrors.HubUnreachable("lost")) },
		"another writer was faster":  func(w *environment) { w.agent.Fail("CreateClaim", 1, agenterrors.Conflict("lost")) },
		"the bridge starts again":    func(w *environment) { w.agent.Fail("CreateClaim", 1, agenterrors.HubUnreachable("lost")) },
		"releases are being limited": func(w *environment) { w.agent.Fail("ReleaseClaim", 2, agenterrors.TooManyClaims("wait", time.Second)) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t, fakeagent.Infrastructure{})
			group := w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
			w.start()
			id := w.slot()
			disturb(w)
			first := w.create(id)
			if name == "the bridge starts again" {
				w.stop()
				w.start()
			}
			require.Equal(t, first.GetOperation(), w.create(id).GetOperation())
			w.reaches(id, idle)
			require.Equal(t, first.GetOperation(), w.create(id).GetOperation())
			require.EqualValues(t, 1, w.agent.NodeGroup(group).GetReplicas())

			removal, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
			require.NoError(t, err)
			w.reaches(id, speculated)
			repeated, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
			require.NoError(t, err)
			require.Equal(t, removal.GetOperation(), repeated.GetOperation())
			require.Zero(t, w.agent.NodeGroup(group).GetReplicas())
		})
	}
}

func TestAStaleTokenIsFenced(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	group := w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.start()
	id := w.slot()
	call := func(id, shard string, epoch, sequence int64) codes.Code {
		_, err := w.shard.Create(t.Context(), &protocol.CreateRequest{Id: id, Shard: shard, Epoch: epoch, Sequence: sequence})
		return status.Code(err)
	}
	for _, c := range []struct {
		shard           string
		epoch, sequence int64
		want            codes.Code
	}{
		{"a", 2, 5, codes.OK},
		{"a", 2, 5, codes.FailedPrecondition},
		{"a", 1, 9, codes.FailedPrecondition},
		{"a", 2, 6, codes.OK},
		{"a", 3, 0, codes.OK},
		{"a", 2, 7, codes.FailedPrecondition},
		{"b", 1, 1, codes.OK},
		{"", 0, 0, codes.OK},
		{"a", 3, -1, codes.FailedPrecondition},
		{strings.Repeat("a", 1025), 1, 1, codes.InvalidArgument},
	} {
		require.Equal(t, c.want, call(id, c.shard, c.epoch, c.sequence), "%+v", c)
	}
	require.Equal(t, codes.NotFound, call("unknown", "a", 1, 1), "tokens are counted for each machine")
	require.Equal(t, codes.FailedPrecondition, call("unknown", "a", 1, 1), "an old shard does not learn what exists")
	require.EqualValues(t, 1, w.agent.NodeGroup(group).GetReplicas())

	w.stop()
	w.start()
	require.Equal(t, codes.FailedPrecondition, call(id, "a", 3, 0), "tokens survive a restart")
	for _, err := range []error{
		func() error {
			_, err := w.shard.Configure(t.Context(), &protocol.ConfigureRequest{Id: id, Cluster: "c", Shard: "a", Epoch: 1})
			return err
		}(),
		func() error {
			_, err := w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id, Shard: "a", Epoch: 1})
			return err
		}(),
		func() error {
			_, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id, Shard: "a", Epoch: 1})
			return err
		}(),
	} {
		require.Equal(t, codes.FailedPrecondition, status.Code(err))
	}
}

// FAILED_PRECONDITION is only for stale tokens.
func TestTheAgentRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want codes.Code
	}{
		"no room":    {agenterrors.Rejected(time.Now(), agenterrors.Rejection{NodeGroup: "g", Reason: agenterrors.ReasonNoRoom}), codes.ResourceExhausted},
		"not open":   {agenterrors.Rejected(time.Now(), agenterrors.Rejection{NodeGroup: "g", Reason: agenterrors.ReasonNotOpen}), codes.ResourceExhausted},
		"no group":   {agenterrors.NodeGroupNotFound("g"), codes.NotFound},
		"too many":   {agenterrors.TooManyClaims("wait", time.Minute), codes.ResourceExhausted},
		"not ours":   {agenterrors.PermissionDenied("no"), codes.PermissionDenied},
		"our fault":  {agenterrors.InvalidArgument(), codes.Internal},
		"no cluster": {agenterrors.ClusterNotFound(fakeagent.DefaultCluster()), codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t, fakeagent.Infrastructure{})
			w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
			now := clocktesting.NewFakeClock(time.Now())
			w.options.Clock = now
			w.start()
			id := w.slot()
			w.agent.Fail("CreateClaim", 1, c.err)
			_, err := w.shard.Create(t.Context(), &protocol.CreateRequest{Id: id})
			require.Equal(t, c.want, status.Code(err))
			_, err = w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
			require.Equal(t, codes.NotFound, status.Code(err), "BigFleet takes an error for the end of the machine")
			require.Empty(t, w.list(&protocol.ListRequest{}).GetMachines(), "the node group is closed")
			now.Step(2 * time.Minute)
			w.eventually("the node group is open again", func() bool { return len(w.list(&protocol.ListRequest{}).GetMachines()) == 3 })
			other := w.slot()
			w.create(other)
			w.reaches(other, idle)
		})
	}
}

func TestACallInTheWrongStateIsRefused(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.options.ClusterID = "production"
	w.start()
	id := w.slot()
	_, err := w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id})
	require.Equal(t, codes.Internal, status.Code(err))
	_, err = w.shard.Configure(t.Context(), &protocol.ConfigureRequest{Id: id, Cluster: "production"})
	require.Equal(t, codes.Internal, status.Code(err))
	_, err = w.shard.Configure(t.Context(), &protocol.ConfigureRequest{Id: id, Cluster: "staging"})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	_, err = w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id, GraceSeconds: -1})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	_, err = w.shard.Create(t.Context(), &protocol.CreateRequest{})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.Equal(t, speculated, w.get(id).GetState())
}

func TestAMachineThatFailsIsReplacedByAnotherSlot(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{Provision: fakeagent.Manual})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	now := clocktesting.NewFakeClock(time.Now())
	w.options.Clock = now
	w.start()
	id := w.slot()
	w.agent.GiveUp(fakeagent.DefaultCluster(), w.create(id).GetOperation(), "out of capacity")
	require.Contains(t, w.reaches(id, failed).GetFailure(), "out of capacity")
	w.eventually("another slot takes its place", func() bool {
		return len(w.list(&protocol.ListRequest{States: []protocol.State{speculated}}).GetMachines()) == 3
	})
	_, err := w.shard.Create(t.Context(), &protocol.CreateRequest{Id: id})
	require.Equal(t, codes.Internal, status.Code(err), "it stays failed")

	other := w.slot()
	w.agent.Fail("CreateClaim", 1, agenterrors.ClaimEnded(&agentv1alpha1.Claim{Reason: "Late", Message: "it took too long"}))
	w.create(other)
	require.Equal(t, "Late: it took too long", w.reaches(other, failed).GetFailure())

	now.Step(2 * time.Hour)
	w.eventually("it is forgotten in the end", func() bool {
		_, err := w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
		return status.Code(err) == codes.NotFound
	})
}

// A machine that is there cannot fail, in BigFleet's eyes. One that is lost is no longer listed.
func TestAMachineIsLost(t *testing.T) {
	for name, away := range map[string]bool{"the bridge sees it": false, "the agent forgot it while the bridge was away": true} {
		t.Run(name, func(t *testing.T) {
			w := newEnvironment(t, fakeagent.Infrastructure{})
			w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
			w.start()
			id := w.slot()
			claim := w.create(id).GetOperation()
			w.reaches(id, idle)
			w.configure(id)
			w.reaches(id, configured)
			if away {
				w.stop()
			}
			w.agent.LoseMachine(fakeagent.DefaultCluster(), w.claim(claim).GetMachine().GetName())
			if away {
				w.agent.Forget(fakeagent.DefaultCluster(), claim)
				w.start()
			}
			w.eventually("the machine is no longer listed", func() bool {
				return len(w.list(&protocol.ListRequest{States: []protocol.State{configured}}).GetMachines()) == 0
			})
			_, err := w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
			require.Equal(t, codes.NotFound, status.Code(err))
			w.eventually("another slot takes its place", func() bool { return len(w.list(&protocol.ListRequest{}).GetMachines()) == 3 })
		})
	}
}

// While nothing is known for certain, nothing is concluded.
func TestAMachineOfAPausedClusterIsNotLost(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.start()
	id := w.slot()
	claim := w.create(id).GetOperation()
	w.reaches(id, idle)
	w.stop()
	w.agent.LoseMachine(fakeagent.DefaultCluster(), w.claim(claim).GetMachine().GetName())
	w.agent.Forget(fakeagent.DefaultCluster(), claim)
	w.agent.SetPaused(fakeagent.DefaultCluster(), true)
	w.start()
	asked := w.agent.Calls("GetClaim")
	w.eventually("the bridge goes on asking", func() bool { return w.agent.Calls("GetClaim") > asked+1 })
	require.Equal(t, idle, w.get(id).GetState())
}

func TestWhatCanBeHad(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	spot := w.group(&agentv1alpha1.NodeGroup{
		Name: "spot", InstanceType: "c5", Zone: "zone-a", CapacityType: agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT,
		Price: &agentv1alpha1.Price{PerHour: 0.25, Currency: "USD"}, Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "gpu": "1"},
		Overhead:   map[string]string{"cpu": "100m", "memory": "1Gi"},
		NodeLabels: map[string]string{"team": "a", "topology.kubernetes.io/zone": "zone-a", "karpenter.sh/capacity-type": "spot"},
	})
	small := w.group(&agentv1alpha1.NodeGroup{Name: "small", MaxSize: new(int32(2)), Replicas: 1})
	w.agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "shared"})
	w.agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "foreign", Holder: "cluster-autoscaler"})
	w.start()
	offered := func() map[string]int {
		counts := map[string]int{}
		for _, m := range w.list(&protocol.ListRequest{}).GetMachines() {
			counts[m.GetInstanceType()]++
		}
		return counts
	}
	require.Equal(t, map[string]int{"c5": 3, "small": 1}, offered())
	for _, m := range w.list(&protocol.ListRequest{}).GetMachines() {
		if m.GetInstanceType() != "c5" {
			require.Zero(t, m.GetInterruption())
			continue
		}
		require.Equal(t, "zone-a", m.GetZone())
		require.Equal(t, protocol.CapacityType_CAPACITY_TYPE_SPOT, m.GetCapacityType())
		require.InDelta(t, 0.25, m.GetHourlyPrice(), 0)
		require.InDelta(t, 0.1, m.GetInterruption(), 0)
		require.Equal(t, map[string]string{"cpu": "4", "memory": "16Gi", "gpu": "1"}, m.GetCapacity().GetAmounts())
		require.Equal(t, map[string]string{"cpu": "3900m", "memory": "15Gi", "gpu": "1"}, m.GetAllocatable().GetAmounts())
		require.Equal(t, map[string]string{"team": "a", "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}, m.GetLabels())
	}
	before := w.list(&protocol.ListRequest{}).GetRevision()

	w.agent.UpdateNodeGroup(spot, func(g *agentv1alpha1.NodeGroup) { g.Price.PerHour = 0.5 })
	w.agent.UpdateNodeGroup(small, func(g *agentv1alpha1.NodeGroup) { g.MaxSize = new(int32(1)) })
	w.eventually("the full node group is no longer offered", func() bool { return maps.Equal(offered(), map[string]int{"c5": 3}) })
	changes := w.list(&protocol.ListRequest{Since: before}).GetMachines()
	require.Len(t, changes, 3)
	require.InDelta(t, 0.5, changes[0].GetHourlyPrice(), 0)
	w.agent.RemoveNodeGroup(spot)
	w.eventually("nothing is offered any more", func() bool { return len(offered()) == 0 })
}

func TestChangesSinceARevision(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.start()
	revision := w.list(&protocol.ListRequest{}).GetRevision()
	require.Empty(t, w.list(&protocol.ListRequest{Since: revision}).GetMachines())
	require.Len(t, w.list(&protocol.ListRequest{Limit: 2}).GetMachines(), 2)
	changed := map[string]bool{}
	for range 3 {
		id := w.slot()
		w.create(id)
		w.reaches(id, idle)
		changed[id] = true
	}
	require.Len(t, changed, 3)
	for range 3 { // one at a time, none twice
		response := w.list(&protocol.ListRequest{Since: revision, Limit: 1})
		require.Len(t, response.GetMachines(), 1)
		require.Contains(t, changed, response.GetMachines()[0].GetId())
		delete(changed, response.GetMachines()[0].GetId())
		revision = response.GetRevision()
	}
	require.Empty(t, w.list(&protocol.ListRequest{Since: revision}).GetMachines())
	for _, unknown := range [][]byte{[]byte("junk"), append(revision, '0'), {0, 255}} {
		require.Len(t, w.list(&protocol.ListRequest{Since: unknown}).GetMachines(), 3, "%q", unknown)
	}
	w.stop()
	w.start()
	require.Len(t, w.list(&protocol.ListRequest{Since: revision}).GetMachines(), 3, "a revision of another run")
}

// What BigFleet wants to find again is stored.
func TestABindingSurvivesARestart(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.start()
	id := w.slot()
	w.create(id)
	w.reaches(id, idle)
	operation := w.configure(id).GetOperation()
	before := w.reaches(id, configured)
	_, err := bridge.New(w.options)
	require.ErrorContains(t, err, "state.db", "a second bridge")
	w.stop()
	w.start()
	after := w.get(id)
	require.True(t, proto.Equal(before, after), "%v became %v", before, after)
	require.Equal(t, operation, w.configure(id).GetOperation())
}

func TestNothingIsServedBeforeTheAgentWasHeard(t *testing.T) {
	w := newEnvironment(t, fakeagent.Infrastructure{})
	w.agent.SetSynced(false)
	b, err := bridge.New(w.options)
	require.NoError(t, err)
	defer b.Close() //nolint:errcheck // The test is over.
	_, err = b.List(t.Context(), &protocol.ListRequest{})
	require.Equal(t, codes.Unavailable, status.Code(err))
	_, err = b.Create(t.Context(), &protocol.CreateRequest{Id: "x"})
	require.Equal(t, codes.Unavailable, status.Code(err))
}
