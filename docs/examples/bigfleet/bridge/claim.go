package bridge

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// rememberFailed is how long a failed machine is shown.
const rememberFailed = time.Hour

// settle pursues every slot. It ends early while the agent gives no answers. An error is one of the state file.
func (b *Bridge) settle(ctx context.Context) error {
	b.mu.Lock()
	var slots []*protocol.Slot
	for id, slot := range b.slots {
		if !b.calling[id] {
			slots = append(slots, slot)
		}
	}
	b.mu.Unlock()
	for _, slot := range slots {
		err := b.pursue(ctx, slot)
		if err == nil {
			continue
		}
		b.options.Logger.Error(err, "not there yet", "machine", slot.GetMachine().GetId(), "claim", slot.GetClaimId())
		if agenterrors.IsUnavailable(err) {
			return nil
		}
		if refused(slot, err) {
			if err := b.refuse(slot, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// pursue asks the agent for what the slot's state needs, and records what came of it.
func (b *Bridge) pursue(ctx context.Context, slot *protocol.Slot) error {
	claim, err := b.ask(ctx, slot)
	if err != nil {
		return err
	}
	return b.replace(slot, b.progress(slot, claim))
}

// ask returns the slot's claim, which is nil if the slot needs none.
func (b *Bridge) ask(ctx context.Context, slot *protocol.Slot) (*agentv1alpha1.Claim, error) {
	if slot.GetClaimId() == "" {
		return nil, nil
	}
	agent, cluster, id := b.options.Agent.Claims, b.options.Cluster, slot.GetClaimId()
	claim, known := b.claims.Get(id)
	switch slot.GetMachine().GetState() {
	case protocol.State_STATE_CREATING, protocol.State_STATE_CONFIGURING:
		if !known {
			created, err := agent.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
				Cluster: cluster, ClaimId: id, Holder: b.options.Holder, Candidates: []string{slot.GetNodeGroup()},
				DisplayName: slot.GetMachine().GetId(),
			})
			if end, has := agenterrors.EndedAs(err); has { // since it was made, by a call before
				return &agentv1alpha1.Claim{Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED, Reason: end.Reason, Message: end.Message}, nil
			}
			return created.GetClaim(), err
		}
	case protocol.State_STATE_DRAINING, protocol.State_STATE_DELETING:
		if !over(claim) {
			released, err := agent.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
				Cluster: cluster, ClaimId: id, Reason: "BigFleet does not need the machine any more",
			})
			return released.GetClaim(), err
		}
	case protocol.State_STATE_IDLE, protocol.State_STATE_CONFIGURED:
		if !known { // only GetClaim can tell that a claim is gone for certain
			found, err := agent.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: cluster, ClaimId: id})
			if agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound {
				return &agentv1alpha1.Claim{Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED}, nil
			}
			return found.GetClaim(), err
		}
	default:
	}
	return claim, nil
}

// over reports whether the claim gives its machine back, or has.
func over(claim *agentv1alpha1.Claim) bool {
	return claim.GetPhase() >= agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
}

// progress returns the slot as the claim makes it, and nil if the machine is lost: BigFleet knows no way from IDLE or CONFIGURED to
// FAILED, but drops what is not listed.
func (b *Bridge) progress(slot *protocol.Slot, claim *agentv1alpha1.Claim) *protocol.Slot {
	next := proto.CloneOf(slot)
	m, ended := next.GetMachine(), claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	instance := claim.GetMachine().GetProviderId()
	if instance != "" {
		m.Host = &protocol.Host{Provider: client.ClusterKey(b.options.Cluster), Name: instance}
	}
	switch state := m.GetState(); {
	case (state == create.via || state == configure.via) && over(claim):
		return b.failed(slot, claim.GetReason()+": "+claim.GetMessage())
	case state == create.via && instance != "":
		m.State = create.to
	case state == configure.via && claim.GetMachine().GetNodeName() != "":
		m.State = configure.to
	case (state == create.to || state == configure.to) && over(claim):
		return nil
	case state == drain.via && ended:
		m.State, m.Cluster, m.Metadata, next.ClaimId = drain.to, "", nil, ""
	case state == remove.via && (ended || next.GetClaimId() == ""):
		m.State, m.Host, next.ClaimId = remove.to, nil, ""
	case state == protocol.State_STATE_FAILED && b.options.Clock.Since(next.GetFailedAt().AsTime()) > rememberFailed:
		return nil
	}
	return next
}

func (b *Bridge) failed(slot *protocol.Slot, why string) *protocol.Slot {
	next := proto.CloneOf(slot)
	next.Machine.State, next.Machine.Failure = protocol.State_STATE_FAILED, why
	next.FailedAt = timestamppb.New(b.options.Clock.Now())
	return next
}

// replace saves what came of a slot, nil for nothing, unless the slot has changed since, or nothing has.
func (b *Bridge) replace(slot, next *protocol.Slot) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := slot.GetMachine().GetId()
	switch {
	case b.slots[id] != slot || proto.Equal(slot, next):
		return nil
	case next == nil:
		return b.save(nil, []string{id})
	}
	return b.save([]*protocol.Slot{next}, nil)
}

// refused reports whether the agent will not claim a machine for the slot. After any other error the call is repeated: it may have had
// an effect, or may have one later. Releases succeed in the end.
func refused(slot *protocol.Slot, err error) bool {
	if state := slot.GetMachine().GetState(); state != create.via && state != configure.via || agenterrors.IsThrottled(err) {
		return false
	}
	return agenterrors.IsNoRoom(err) || agenterrors.IsTooMany(err) || agenterrors.IsRefused(err) ||
		agenterrors.IsNotFound(err) || agenterrors.IsPermissionDenied(err) || agenterrors.IsUnauthenticated(err) || agenterrors.IsInvalidArgument(err)
}

// refuse ends a slot that gets no claim, and closes its node group for a while. BigFleet gives a slot up after an error; another slot
// with another ID takes its place.
func (b *Bridge) refuse(slot *protocol.Slot, err error) error {
	delay, known := agenterrors.RetryDelay(err)
	if !known {
		delay = closedFor
	}
	b.mu.Lock()
	b.closed[slot.GetNodeGroup()] = b.options.Clock.Now().Add(delay)
	b.mu.Unlock()
	if slot.GetMachine().GetState() == create.via {
		return b.replace(slot, nil)
	}
	return b.replace(slot, b.failed(slot, err.Error()))
}

// rejection is a final error of the agent as BigFleet may see it.
func rejection(err error) error {
	code := status.Code(err)
	switch code {
	case codes.FailedPrecondition: // reserved for stale tokens: the node group is paused, or not open to claims
		code = codes.ResourceExhausted
	case codes.InvalidArgument: // no fault of BigFleet's
		code = codes.Internal
	}
	return status.Error(code, "agent: "+status.Convert(err).Message())
}
