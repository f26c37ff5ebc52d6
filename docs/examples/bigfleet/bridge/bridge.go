// Package bridge presents the machines that can be claimed from an agent to BigFleet, as a capacity provider. docs/bigfleet.md
// explains it.
package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Options configure a [Bridge]. All of them are REQUIRED, except where a comment says otherwise.
type Options struct {
	// Agent calls the agent.
	Agent *client.Client
	// Cluster is the Cluster that machines are claimed for.
	Cluster *agentv1alpha1.ClusterRef
	// Holder keeps the claims. No other bridge, and no other tool, may use it for this Cluster.
	Holder string
	// StateFile holds what must survive a restart. A second bridge cannot open it.
	StateFile string
	// ClusterID is BigFleet's name for the Cluster: machines are configured for no other. Empty accepts any name. OPTIONAL.
	ClusterID string
	// Slots is how many machines of one node group BigFleet may have. A lower max size of the node group takes precedence.
	Slots int
	// SpotInterruption is the probability that a spot machine is interrupted within an hour. BigFleet needs it, and the agent does not
	// know it.
	SpotInterruption float64
	// Logger receives what the agent refuses. The zero Logger discards it. OPTIONAL.
	Logger logr.Logger
	// Clock is the system's if it is nil. OPTIONAL.
	Clock clock.WithTicker
}

// Bridge is a capacity provider. It is safe for concurrent use.
type Bridge struct {
	protocol.UnimplementedProviderServer

	options Options
	groups  *client.Mirror[*agentv1alpha1.NodeGroup]
	claims  *client.Mirror[*agentv1alpha1.Claim]
	store   *store
	run     string        // distinguishes the revisions of this run from those of others
	ready   chan struct{} // closed once the slots are those of the agent's node groups
	wake    chan struct{}

	mu       sync.Mutex
	slots    map[string]*protocol.Slot // by machine ID; a slot is replaced, never modified
	changed  map[string]uint64         // the revision of each slot's last change
	revision uint64
	closed   map[string]time.Time // until when a node group is not offered, as it took no claim
	calling  map[string]bool      // slots whose call has not returned yet, and alone may change them
}

// New returns a bridge with the slots of the state file, which is created if it does not exist.
func New(options Options) (*Bridge, error) {
	if options.Logger.GetSink() == nil {
		options.Logger = logr.Discard()
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	if options.Slots < 1 || options.SpotInterruption <= 0 || options.SpotInterruption > 1 {
		return nil, errors.New("a bridge needs at least one slot, and a probability of interruption above 0 and up to 1")
	}
	opened, err := openStore(options.StateFile)
	if err != nil {
		return nil, err
	}
	b := &Bridge{
		options: options,
		groups:  options.Agent.MirrorNodeGroups(options.Cluster),
		claims:  options.Agent.MirrorClaims(options.Cluster, options.Holder),
		store:   opened,
		run:     uuid.NewString(),
		ready:   make(chan struct{}),
		wake:    make(chan struct{}, 1),
		changed: map[string]uint64{},
		closed:  map[string]time.Time{},
		calling: map[string]bool{},
	}
	if b.slots, err = opened.slots(); err != nil {
		return nil, errors.Join(err, opened.close())
	}
	for id := range b.slots {
		b.revision++
		b.changed[id] = b.revision
	}
	return b, nil
}

// Close closes the state file. Neither [Bridge.Run] nor a call may be under way.
func (b *Bridge) Close() error { return b.store.close() }

const (
	// retryInterval is how often calls that the agent did not answer are repeated.
	retryInterval = time.Second
	// closedFor is how long a node group that took no claim is not offered, unless the agent knows better.
	closedFor = 30 * time.Second
)

// Run follows the agent until ctx is done. It must be called once.
func (b *Bridge) Run(ctx context.Context) error {
	groups, claims := b.groups.Subscribe(), b.claims.Subscribe()
	defer groups.Close()
	defer claims.Close()
	var mirrors sync.WaitGroup
	defer mirrors.Wait()
	mirrors.Go(func() { _ = b.groups.Run(ctx) }) // they only return the end of ctx
	mirrors.Go(func() { _ = b.claims.Run(ctx) })
	if errors.Join(b.groups.WaitForSync(ctx), b.claims.WaitForSync(ctx)) != nil {
		return nil // ctx has ended: nothing else ends the wait
	}
	ticker := b.options.Clock.NewTicker(retryInterval)
	defer ticker.Stop()
	for first := true; ; first = false {
		if err := errors.Join(b.settle(ctx), b.offer()); err != nil {
			return err
		}
		if first {
			close(b.ready)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-groups.Changed():
			groups.Take()
		case <-claims.Changed():
			claims.Take()
		case <-b.wake:
		case <-ticker.C():
		}
	}
}

// A call starts a transition, which then completes on its own.
type transition struct {
	name          string
	from, via, to protocol.State
}

var (
	create    = transition{"create", protocol.State_STATE_SPECULATIVE, protocol.State_STATE_CREATING, protocol.State_STATE_IDLE}
	configure = transition{"configure", protocol.State_STATE_IDLE, protocol.State_STATE_CONFIGURING, protocol.State_STATE_CONFIGURED}
	drain     = transition{"drain", protocol.State_STATE_CONFIGURED, protocol.State_STATE_DRAINING, protocol.State_STATE_IDLE}
	remove    = transition{"delete", protocol.State_STATE_IDLE, protocol.State_STATE_DELETING, protocol.State_STATE_SPECULATIVE}
)

// Create claims a machine. The claim has the ID of the operation.
func (b *Bridge) Create(ctx context.Context, r *protocol.CreateRequest) (*protocol.Accepted, error) {
	return b.begin(ctx, create, r, func(s *protocol.Slot, operation string) {
		s.ClaimId, s.Operations = operation, map[string]string{}
	})
}

// Configure waits for the machine's Node. A machine that was drained is gone, and another one is claimed. The bootstrap data is not
// used: Cluster API has its own.
func (b *Bridge) Configure(ctx context.Context, r *protocol.ConfigureRequest) (*protocol.Accepted, error) {
	if id := b.options.ClusterID; r.GetCluster() == "" || id != "" && id != r.GetCluster() {
		return nil, status.Errorf(codes.InvalidArgument, "cluster %q is not %q, whose machines this provider has", r.GetCluster(), id)
	}
	return b.begin(ctx, configure, r, func(s *protocol.Slot, operation string) {
		s.Machine.Cluster, s.Machine.Metadata = r.GetCluster(), r.GetMetadata()
		s.ClaimId = cmp.Or(s.GetClaimId(), operation)
	})
}

// Drain releases the claim: Cluster API drains the Node, and removes the machine. The grace period is not used: how long Cluster API
// drains is a setting of the MachineDeployment.
func (b *Bridge) Drain(ctx context.Context, r *protocol.DrainRequest) (*protocol.Accepted, error) {
	if r.GetGraceSeconds() < 0 {
		return nil, status.Error(codes.InvalidArgument, "the grace period is negative")
	}
	return b.begin(ctx, drain, r, func(*protocol.Slot, string) {})
}

// Delete releases the claim, unless a drain has.
func (b *Bridge) Delete(ctx context.Context, r *protocol.DeleteRequest) (*protocol.Accepted, error) {
	return b.begin(ctx, remove, r, func(*protocol.Slot, string) {})
}

// Get returns a machine.
func (b *Bridge) Get(_ context.Context, r *protocol.GetRequest) (*protocol.Machine, error) {
	if err := b.serves(r.GetId()); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	slot, ok := b.slots[r.GetId()]
	if !ok {
		return nil, status.Errorf(codes.NotFound, "there is no machine %q", r.GetId())
	}
	return slot.GetMachine(), nil
}

// List returns machines. Those that could be had are left out while their node group is closed.
func (b *Bridge) List(_ context.Context, r *protocol.ListRequest) (*protocol.ListResponse, error) {
	if err := b.serves("all"); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	since, resumed := b.parse(r.GetSince())
	now := b.options.Clock.Now()
	var ids []string
	for id, slot := range b.slots {
		state := slot.GetMachine().GetState()
		if b.changed[id] > since && (len(r.GetStates()) == 0 || slices.Contains(r.GetStates(), state)) &&
			(state != protocol.State_STATE_SPECULATIVE || b.closed[slot.GetNodeGroup()].Before(now)) {
			ids = append(ids, id)
		}
	}
	response := &protocol.ListResponse{Revision: b.format(b.revision)}
	if limit := int(r.GetLimit()); limit > 0 && limit < len(ids) {
		if resumed { // the rest follows after the revision of the last one
			slices.SortFunc(ids, func(x, y string) int { return cmp.Compare(b.changed[x], b.changed[y]) })
			response.Revision = b.format(b.changed[ids[limit-1]])
		} else { // any of them, as nothing was seen before: nothing follows
			response.Revision = nil
		}
		ids = ids[:limit]
	}
	for _, id := range ids {
		response.Machines = append(response.Machines, b.slots[id].GetMachine())
	}
	return response, nil
}

func (b *Bridge) format(revision uint64) []byte { return fmt.Appendf(nil, "%s.%d", b.run, revision) }

// parse returns 0 and false for what this run has not formatted.
func (b *Bridge) parse(cursor []byte) (uint64, bool) {
	number, ours := strings.CutPrefix(string(cursor), b.run+".")
	revision, err := strconv.ParseUint(number, 10, 64)
	if !ours || err != nil || revision > b.revision {
		return 0, false
	}
	return revision, true
}

// serves returns an error for requests that cannot be answered, whatever the machine is.
func (b *Bridge) serves(id string) error {
	select {
	case <-b.ready:
	default:
		return status.Error(codes.Unavailable, "the agent's node groups and claims are not known yet")
	}
	if id == "" || len(id) > maxName {
		return status.Error(codes.InvalidArgument, "the machine's id is empty, or too long")
	}
	return nil
}

// begin accepts a call, and asks the agent for what it needs. A claim that the agent refuses is not repeated: BigFleet takes the error
// for the end of the machine.
func (b *Bridge) begin(
	ctx context.Context, t transition, r request, change func(slot *protocol.Slot, operation string),
) (*protocol.Accepted, error) {
	if err := b.serves(r.GetId()); err != nil {
		return nil, err
	}
	if len(r.GetShard()) > maxName {
		return nil, status.Error(codes.InvalidArgument, "the token's shard is too long")
	}
	slot, repeated, err := b.accept(t, r, change)
	if err != nil {
		return nil, err
	}
	if !repeated {
		defer b.again(r.GetId())
		// What was accepted is pursued even if the caller has gone.
		if err := b.pursue(context.WithoutCancel(ctx), slot); refused(slot, err) {
			if err := b.refuse(slot, err); err != nil {
				return nil, err
			}
			return nil, rejection(err)
		}
	}
	return &protocol.Accepted{Operation: slot.GetOperations()[t.name], Machine: slot.GetMachine()}, nil
}

// accept returns the slot with the transition begun. It checks the token first, so that a shard that was replaced learns nothing.
func (b *Bridge) accept(t transition, r request, change func(*protocol.Slot, string)) (slot *protocol.Slot, repeated bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.store.pass(r); err != nil {
		return nil, false, err
	}
	slot, known := b.slots[r.GetId()]
	state := slot.GetMachine().GetState()
	switch {
	case !known:
		return nil, false, status.Errorf(codes.NotFound, "there is no machine %q", r.GetId())
	case slot.GetOperations()[t.name] != "" && (state == t.via || state == t.to):
		return slot, true, nil
	case state != t.from:
		// BigFleet reserves FAILED_PRECONDITION for stale tokens.
		return nil, false, status.Errorf(codes.Internal, "machine %q is %s, and %s needs %s", r.GetId(), state, t.name, t.from)
	}
	operation := uuid.NewString()
	slot = proto.CloneOf(slot)
	change(slot, operation)
	slot.Operations[t.name], slot.Machine.State = operation, t.via
	if err := b.save([]*protocol.Slot{slot}, nil); err != nil {
		return nil, false, err
	}
	b.calling[r.GetId()] = true
	return slot, false, nil
}

// again leaves the slot to [Bridge.Run].
func (b *Bridge) again(id string) {
	b.mu.Lock()
	delete(b.calling, id)
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// save writes slots, and removes those with the IDs. b.mu must be held.
func (b *Bridge) save(slots []*protocol.Slot, gone []string) error {
	if len(slots)+len(gone) == 0 {
		return nil
	}
	if err := b.store.save(slots, gone); err != nil {
		return err
	}
	for _, slot := range slots {
		b.revision++
		id := slot.GetMachine().GetId()
		b.slots[id], b.changed[id] = slot, b.revision
	}
	for _, id := range gone {
		delete(b.slots, id)
		delete(b.changed, id)
	}
	return nil
}
