package bridge_test

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/testing/protocmp"
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
	speculated = protocol.State_STATE_SPECULATIVE
	creating   = protocol.State_STATE_CREATING
	idle       = protocol.State_STATE_IDLE
	configures = protocol.State_STATE_CONFIGURING
	configured = protocol.State_STATE_CONFIGURED
	draining   = protocol.State_STATE_DRAINING
	deleting   = protocol.State_STATE_DELETING
	failed     = protocol.State_STATE_FAILED
)

// world is a fake agent, a bridge that calls it with the role autoscaler, and BigFleet, which calls the bridge.
type world struct {
	*WithT
	t       *testing.T
	agent   *fakeagent.Agent
	options bridge.Options
	shard   protocol.ProviderClient
	stop    func()
}

func newWorld(t *testing.T, infrastructure fakeagent.Infrastructure) *world {
	t.Helper()
	agent := fakeagent.New(fakeagent.WithInfrastructure(infrastructure))
	t.Cleanup(agent.Close)
	w := &world{WithT: NewWithT(t), t: t, agent: agent, options: bridge.Options{
		Agent: agent.AutoscalerFor(fakeagent.DefaultCluster()), Cluster: fakeagent.DefaultCluster(), Holder: holder,
		StateFile: filepath.Join(t.TempDir(), "state.db"), Slots: 3, SpotInterruption: 0.1, Clock: clock.RealClock{},
	}}
	w.SetDefaultEventuallyTimeout(within)
	return w
}

// group adds a node group that is reserved for BigFleet.
func (w *world) group(described *agentv1alpha1.NodeGroup) string {
	described.Holder = holder
	return w.agent.AddNodeGroup(described)
}

// start runs the bridge until the test ends, or stop.
func (w *world) start() {
	w.t.Helper()
	b, err := bridge.New(w.options)
	w.Expect(err).NotTo(HaveOccurred())
	listener, server := bufconn.Listen(1<<20), grpc.NewServer()
	protocol.Register(server, b)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(listener) })
	ended := make(chan error, 1)
	running.Go(func() { ended <- b.Run(ctx) })
	conn, err := grpc.NewClient("passthrough:///bridge", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	w.Expect(err).NotTo(HaveOccurred())
	w.shard = protocol.NewClient(conn)
	w.stop = sync.OnceFunc(func() {
		_ = conn.Close()
		server.Stop()
		cancel()
		running.Wait()
		w.Expect(<-ended).To(Succeed())
		w.Expect(b.Close()).To(Succeed())
	})
	w.t.Cleanup(w.stop)
	w.Eventually(func() error { _, err := w.shard.List(w.t.Context(), &protocol.ListRequest{}); return err }).Should(Succeed())
}

func (w *world) list(r *protocol.ListRequest) *protocol.ListResponse {
	w.t.Helper()
	response, err := w.shard.List(w.t.Context(), r)
	w.Expect(err).NotTo(HaveOccurred())
	return response
}

// slot returns a machine that could be had.
func (w *world) slot() string {
	w.t.Helper()
	var machines []*protocol.Machine
	w.Eventually(func() []*protocol.Machine {
		machines = w.list(&protocol.ListRequest{States: []protocol.State{speculated}}).GetMachines()
		return machines
	}).ShouldNot(BeEmpty())
	return machines[0].GetId()
}

func (w *world) get(id string) *protocol.Machine {
	w.t.Helper()
	m, err := w.shard.Get(w.t.Context(), &protocol.GetRequest{Id: id})
	w.Expect(err).NotTo(HaveOccurred())
	return m
}

func (w *world) reaches(id string, state protocol.State) *protocol.Machine {
	w.t.Helper()
	w.Eventually(func() protocol.State { return w.get(id).GetState() }).Should(Equal(state))
	return w.get(id)
}

func (w *world) create(id string) *protocol.Accepted {
	w.t.Helper()
	accepted, err := w.shard.Create(w.t.Context(), &protocol.CreateRequest{Id: id})
	w.Expect(err).NotTo(HaveOccurred())
	return accepted
}

func (w *world) configure(id string) *protocol.Accepted {
	w.t.Helper()
	accepted, err := w.shard.Configure(w.t.Context(), &protocol.ConfigureRequest{
		Id: id, Cluster: "production", Bootstrap: []byte("#cloud-config"), Metadata: map[string]string{"priority": "7"},
	})
	w.Expect(err).NotTo(HaveOccurred())
	return accepted
}

func (w *world) claim(id string) *agentv1alpha1.Claim {
	return w.agent.Claim(fakeagent.DefaultCluster(), id)
}

func TestAMachineLivesThroughAllStates(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{Provision: fakeagent.Manual, Join: fakeagent.Manual, Terminate: fakeagent.Manual})
	group := w.group(&agentv1alpha1.NodeGroup{Name: "workers", Zone: "zone-a"})
	w.start()
	id, cluster := w.slot(), fakeagent.DefaultCluster()

	accepted := w.create(id)
	w.Expect(accepted.GetMachine().GetState()).To(Equal(creating))
	claim := w.claim(accepted.GetOperation())
	w.Expect(claim.GetHolder()).To(Equal(holder))
	w.Expect(claim.GetDisplayName()).To(Equal(id))
	w.Expect(claim.GetNodeGroupId()).To(Equal(group))
	w.Expect(w.get(id).GetHost()).To(BeNil())
	machine := w.agent.Provision(cluster, claim.GetClaimId(), "example://1")
	w.Expect(w.reaches(id, idle).GetHost().GetName()).To(Equal("example://1"))

	accepted = w.configure(id)
	w.Expect(accepted.GetMachine().GetState()).To(Equal(configures))
	w.Expect(accepted.GetMachine().GetCluster()).To(Equal("production"), "from the first moment on")
	w.Expect(w.claim(accepted.GetOperation())).To(BeNil(), "the machine is there")
	w.agent.Join(cluster, machine.GetName(), "node-1")
	m := w.reaches(id, configured)
	w.Expect(m.GetCluster()).To(Equal("production"))
	w.Expect(m.GetMetadata()).To(Equal(map[string]string{"priority": "7"}))

	accepted, err := w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id, GraceSeconds: 30})
	w.Expect(err).NotTo(HaveOccurred())
	w.Expect(accepted.GetMachine().GetState()).To(Equal(draining))
	w.Expect(accepted.GetMachine().GetCluster()).To(Equal("production"))
	w.Expect(w.claim(claim.GetClaimId()).GetPhase()).To(Equal(agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING))
	w.Expect(w.claim(claim.GetClaimId()).GetDrained()).To(BeFalse(), "Cluster API has to drain the Node")
	w.Consistently(func() protocol.State { return w.get(id).GetState() }, "200ms").Should(Equal(draining), "until the machine is gone")
	w.agent.Terminate(cluster, machine.GetName())
	m = w.reaches(id, idle)
	w.Expect(m.GetCluster()).To(BeEmpty())
	w.Expect(m.GetMetadata()).To(BeEmpty())
	w.Expect(w.agent.NodeGroup(group).GetReplicas()).To(BeZero())

	again := w.configure(id).GetOperation()
	w.Expect(w.claim(again).GetPhase()).To(Equal(agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND), "another machine, as the first is gone")
	machine = w.agent.Provision(cluster, again, "example://2")
	w.agent.Join(cluster, machine.GetName(), "node-2")
	w.Expect(w.reaches(id, configured).GetHost().GetName()).To(Equal("example://2"))
	_, err = w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id})
	w.Expect(err).NotTo(HaveOccurred())
	w.agent.Terminate(cluster, machine.GetName())
	w.reaches(id, idle)

	accepted, err = w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
	w.Expect(err).NotTo(HaveOccurred())
	w.Expect(accepted.GetMachine().GetState()).To(Equal(deleting))
	w.Expect(w.reaches(id, speculated).GetHost()).To(BeNil())
	w.Expect(w.agent.NodeGroup(group).GetReplicas()).To(BeZero())
}

func TestAMachineThatWasNeverConfiguredIsDeleted(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
	group := w.group(&agentv1alpha1.NodeGroup{Name: "workers", Replicas: 1})
	w.start()
	id := w.slot()
	claim := w.create(id).GetOperation()
	w.reaches(id, idle)
	_, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
	w.Expect(err).NotTo(HaveOccurred())
	w.reaches(id, speculated)
	w.Expect(w.claim(claim).GetReason()).To(Equal("Released"))
	w.Expect(w.agent.NodeGroup(group).GetReplicas()).To(BeEquivalentTo(1), "the user's is left")

	w.Expect(w.create(id).GetOperation()).NotTo(Equal(claim), "an ID of a claim is never used again")
	w.reaches(id, idle)
}

// What a call asked for happens once, whatever is lost on the way.
func TestACallIsRepeated(t *testing.T) {
	for name, disturb := range map[string]func(*world){
		"nothing is lost":            func(*world) {},
		"the request is lost":        func(w *world) { w.agent.Fail("CreateClaim", 2, agenterrors.HubUnreachable("lost")) },
		"the answer is lost":         func(w *world) { w.agent.FailAfter("CreateClaim", 2, agenterrors.HubUnreachable("lost")) },
		"another writer was faster":  func(w *world) { w.agent.Fail("CreateClaim", 1, agenterrors.Conflict("lost")) },
		"the bridge starts again":    func(w *world) { w.agent.Fail("CreateClaim", 1, agenterrors.HubUnreachable("lost")) },
		"releases are being limited": func(w *world) { w.agent.Fail("ReleaseClaim", 2, agenterrors.TooManyClaims("wait", time.Second)) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, fakeagent.Infrastructure{})
			group := w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
			w.start()
			id := w.slot()
			disturb(w)
			first := w.create(id)
			if name == "the bridge starts again" {
				w.stop()
				w.start()
			}
			w.Expect(w.create(id).GetOperation()).To(Equal(first.GetOperation()))
			w.reaches(id, idle)
			w.Expect(w.create(id).GetOperation()).To(Equal(first.GetOperation()))
			w.Expect(w.agent.NodeGroup(group).GetReplicas()).To(BeEquivalentTo(1))

			removal, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
			w.Expect(err).NotTo(HaveOccurred())
			w.reaches(id, speculated)
			repeated, err := w.shard.Delete(t.Context(), &protocol.DeleteRequest{Id: id})
			w.Expect(err).NotTo(HaveOccurred())
			w.Expect(repeated.GetOperation()).To(Equal(removal.GetOperation()))
			w.Expect(w.agent.NodeGroup(group).GetReplicas()).To(BeZero())
		})
	}
}

func TestAStaleTokenIsFenced(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
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
		w.Expect(call(id, c.shard, c.epoch, c.sequence)).To(Equal(c.want), "%+v", c)
	}
	w.Expect(call("unknown", "a", 1, 1)).To(Equal(codes.NotFound), "tokens are counted for each machine")
	w.Expect(call("unknown", "a", 1, 1)).To(Equal(codes.FailedPrecondition), "an old shard does not learn what exists")
	w.Expect(w.agent.NodeGroup(group).GetReplicas()).To(BeEquivalentTo(1))

	w.stop()
	w.start()
	w.Expect(call(id, "a", 3, 0)).To(Equal(codes.FailedPrecondition), "tokens survive a restart")
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
		w.Expect(status.Code(err)).To(Equal(codes.FailedPrecondition))
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
			w := newWorld(t, fakeagent.Infrastructure{})
			w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
			now := clocktesting.NewFakeClock(time.Now())
			w.options.Clock = now
			w.start()
			id := w.slot()
			w.agent.Fail("CreateClaim", 1, c.err)
			_, err := w.shard.Create(t.Context(), &protocol.CreateRequest{Id: id})
			w.Expect(status.Code(err)).To(Equal(c.want))
			_, err = w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
			w.Expect(status.Code(err)).To(Equal(codes.NotFound), "BigFleet takes an error for the end of the machine")
			w.Expect(w.list(&protocol.ListRequest{}).GetMachines()).To(BeEmpty(), "the node group is closed")
			now.Step(2 * time.Minute)
			w.Eventually(func() int { return len(w.list(&protocol.ListRequest{}).GetMachines()) }).Should(Equal(3))
			other := w.slot()
			w.create(other)
			w.reaches(other, idle)
		})
	}
}

func TestACallInTheWrongStateIsRefused(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.options.ClusterID = "production"
	w.start()
	id := w.slot()
	_, err := w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id})
	w.Expect(status.Code(err)).To(Equal(codes.Internal))
	_, err = w.shard.Configure(t.Context(), &protocol.ConfigureRequest{Id: id, Cluster: "production"})
	w.Expect(status.Code(err)).To(Equal(codes.Internal))
	_, err = w.shard.Configure(t.Context(), &protocol.ConfigureRequest{Id: id, Cluster: "staging"})
	w.Expect(status.Code(err)).To(Equal(codes.InvalidArgument))
	_, err = w.shard.Drain(t.Context(), &protocol.DrainRequest{Id: id, GraceSeconds: -1})
	w.Expect(status.Code(err)).To(Equal(codes.InvalidArgument))
	_, err = w.shard.Create(t.Context(), &protocol.CreateRequest{})
	w.Expect(status.Code(err)).To(Equal(codes.InvalidArgument))
	w.Expect(w.get(id).GetState()).To(Equal(speculated))
}

func TestAMachineThatFailsIsReplacedByAnotherSlot(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{Provision: fakeagent.Manual})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	now := clocktesting.NewFakeClock(time.Now())
	w.options.Clock = now
	w.start()
	id := w.slot()
	w.agent.GiveUp(fakeagent.DefaultCluster(), w.create(id).GetOperation(), "out of capacity")
	w.Expect(w.reaches(id, failed).GetFailure()).To(ContainSubstring("out of capacity"))
	w.Eventually(func() int {
		return len(w.list(&protocol.ListRequest{States: []protocol.State{speculated}}).GetMachines())
	}).Should(Equal(3))
	_, err := w.shard.Create(t.Context(), &protocol.CreateRequest{Id: id})
	w.Expect(status.Code(err)).To(Equal(codes.Internal), "it stays failed")

	other := w.slot()
	w.agent.Fail("CreateClaim", 1, agenterrors.ClaimEnded(&agentv1alpha1.Claim{Reason: "Late", Message: "it took too long"}))
	w.create(other)
	w.Expect(w.reaches(other, failed).GetFailure()).To(Equal("Late: it took too long"))

	now.Step(2 * time.Hour)
	w.Eventually(func() codes.Code {
		_, err := w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
		return status.Code(err)
	}).Should(Equal(codes.NotFound), "it is forgotten in the end")
}

// A machine that is there cannot fail, in BigFleet's eyes. One that is lost is no longer listed.
func TestAMachineIsLost(t *testing.T) {
	for name, away := range map[string]bool{"the bridge sees it": false, "the agent forgot it while the bridge was away": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, fakeagent.Infrastructure{})
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
			w.Eventually(func() []*protocol.Machine {
				return w.list(&protocol.ListRequest{States: []protocol.State{configured}}).GetMachines()
			}).Should(BeEmpty())
			_, err := w.shard.Get(t.Context(), &protocol.GetRequest{Id: id})
			w.Expect(status.Code(err)).To(Equal(codes.NotFound))
			w.Eventually(func() int { return len(w.list(&protocol.ListRequest{}).GetMachines()) }).Should(Equal(3), "another slot takes its place")
		})
	}
}

// While nothing is known for certain, nothing is concluded.
func TestAMachineOfAPausedClusterIsNotLost(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
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
	w.Eventually(func() int { return w.agent.Calls("GetClaim") }).Should(BeNumerically(">", asked+1))
	w.Expect(w.get(id).GetState()).To(Equal(idle))
}

func TestWhatCanBeHad(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
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
	w.Expect(offered()).To(Equal(map[string]int{"c5": 3, "small": 1}))
	for _, m := range w.list(&protocol.ListRequest{}).GetMachines() {
		if m.GetInstanceType() != "c5" {
			w.Expect(m.GetInterruption()).To(BeZero())
			continue
		}
		w.Expect(m.GetZone()).To(Equal("zone-a"))
		w.Expect(m.GetCapacityType()).To(Equal(protocol.CapacityType_CAPACITY_TYPE_SPOT))
		w.Expect(m.GetHourlyPrice()).To(Equal(0.25))
		w.Expect(m.GetInterruption()).To(Equal(0.1))
		w.Expect(m.GetCapacity().GetAmounts()).To(Equal(map[string]string{"cpu": "4", "memory": "16Gi", "gpu": "1"}))
		w.Expect(m.GetAllocatable().GetAmounts()).To(Equal(map[string]string{"cpu": "3900m", "memory": "15Gi", "gpu": "1"}))
		w.Expect(m.GetLabels()).To(Equal(map[string]string{"team": "a", "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}))
	}
	before := w.list(&protocol.ListRequest{}).GetRevision()

	w.agent.UpdateNodeGroup(spot, func(g *agentv1alpha1.NodeGroup) { g.Price.PerHour = 0.5 })
	w.agent.UpdateNodeGroup(small, func(g *agentv1alpha1.NodeGroup) { g.MaxSize = new(int32(1)) })
	w.Eventually(offered).Should(Equal(map[string]int{"c5": 3}))
	changes := w.list(&protocol.ListRequest{Since: before}).GetMachines()
	w.Expect(changes).To(HaveLen(3))
	w.Expect(changes[0].GetHourlyPrice()).To(Equal(0.5))
	w.agent.RemoveNodeGroup(spot)
	w.Eventually(offered).Should(BeEmpty())
}

func TestChangesSinceARevision(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.start()
	revision := w.list(&protocol.ListRequest{}).GetRevision()
	w.Expect(w.list(&protocol.ListRequest{Since: revision}).GetMachines()).To(BeEmpty())
	w.Expect(w.list(&protocol.ListRequest{Limit: 2}).GetMachines()).To(HaveLen(2))
	changed := map[string]bool{}
	for range 3 {
		id := w.slot()
		w.create(id)
		w.reaches(id, idle)
		changed[id] = true
	}
	w.Expect(changed).To(HaveLen(3))
	for range 3 { // one at a time, none twice
		response := w.list(&protocol.ListRequest{Since: revision, Limit: 1})
		w.Expect(response.GetMachines()).To(HaveLen(1))
		w.Expect(changed).To(HaveKey(response.GetMachines()[0].GetId()))
		delete(changed, response.GetMachines()[0].GetId())
		revision = response.GetRevision()
	}
	w.Expect(w.list(&protocol.ListRequest{Since: revision}).GetMachines()).To(BeEmpty())
	for _, unknown := range [][]byte{[]byte("junk"), append(revision, '0'), {0, 255}} {
		w.Expect(w.list(&protocol.ListRequest{Since: unknown}).GetMachines()).To(HaveLen(3), "%q", unknown)
	}
	w.stop()
	w.start()
	w.Expect(w.list(&protocol.ListRequest{Since: revision}).GetMachines()).To(HaveLen(3), "a revision of another run")
}

// What BigFleet wants to find again is stored.
func TestABindingSurvivesARestart(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
	w.group(&agentv1alpha1.NodeGroup{Name: "workers"})
	w.start()
	id := w.slot()
	w.create(id)
	w.reaches(id, idle)
	operation := w.configure(id).GetOperation()
	before := w.reaches(id, configured)
	_, err := bridge.New(w.options)
	w.Expect(err).To(MatchError(ContainSubstring("state.db")), "a second bridge")
	w.stop()
	w.start()
	w.Expect(w.get(id)).To(BeComparableTo(before, protocmp.Transform()))
	w.Expect(w.configure(id).GetOperation()).To(Equal(operation))
}

func TestNothingIsServedBeforeTheAgentWasHeard(t *testing.T) {
	w := newWorld(t, fakeagent.Infrastructure{})
	w.agent.SetSynced(false)
	b, err := bridge.New(w.options)
	w.Expect(err).NotTo(HaveOccurred())
	defer b.Close() //nolint:errcheck // The test is over.
	_, err = b.List(t.Context(), &protocol.ListRequest{})
	w.Expect(status.Code(err)).To(Equal(codes.Unavailable))
	_, err = b.Create(t.Context(), &protocol.CreateRequest{Id: "x"})
	w.Expect(status.Code(err)).To(Equal(codes.Unavailable))
}
