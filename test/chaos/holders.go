package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/samber/lo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/history"
)

const (
	// holder is the holder of all claims that are not Karpenter's.
	holder = "chaos"
	// attemptWithin bounds one call. A caller retries until it gets a definite answer.
	attemptWithin = 6 * time.Second
	// pause is the time between two attempts.
	pause = 150 * time.Millisecond
)

// claim is a claim as its holder knows it.
type claim struct {
	id string
	// wanted is true from before the first call that creates the claim until before the first call
	// that releases it.
	wanted bool
	// accepted is set once an agent has accepted the claim.
	accepted bool
	// released is set once an agent has accepted the release.
	released bool
	// providerID is the provider ID of its machine, as reported by an agent. Empty before.
	providerID string
}

// holders own the claims. They call the agents, retry calls whose answer is lost, and
// keep track of their claims. They are safe for concurrent use.
type holders struct {
	mu     sync.Mutex
	agents []*client.Client // the agents to call
	claims map[string]*claim
	going  map[string]bool // ids of node groups that are being deleted
	// strange lists answers that no agent may give.
	strange []string
	// told records the calls and the agents' answers.
	told *history.Recorder
}

func newHolders() *holders {
	return &holders{claims: map[string]*claim{}, going: map[string]bool{}, told: history.New()}
}

func clusterRef() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}
}

// use sets the agents to call.
func (h *holders) use(agents ...*client.Client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.agents = agents
}

func (h *holders) anyAgent() *client.Client {
	h.mu.Lock()
	defer h.mu.Unlock()
	return lo.Sample(h.agents)
}

func (h *holders) wanted() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return lo.FilterMap(lo.Values(h.claims), func(k *claim, _ int) (string, bool) { return k.id, k.wanted })
}

func (h *holders) wants(id string) (wanted, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := h.claims[id]
	return k != nil && k.wanted, k != nil
}

// drop treats a claim as gone because something other than its holder ended it.
func (h *holders) drop(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.claims[id].wanted, h.claims[id].released = false, true
}

// giveUp marks a claim as unwanted. It is released before the next check.
func (h *holders) giveUp(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.claims[id].wanted = false
}

// unreleased returns the claims that their holder has given up and whose release no agent has
// accepted yet.
func (h *holders) unreleased() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return lo.FilterMap(lo.Values(h.claims), func(k *claim, _ int) (string, bool) { return k.id, !k.wanted && !k.released })
}

func (h *holders) oddities() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.strange)
}

func (h *holders) odd(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.strange = append(h.strange, fmt.Sprintf(format, args...))
}

// request returns a request for a machine of the first of the node groups that has room.
func request(id string, groups ...string) *agentv1alpha1.CreateClaimRequest {
	return &agentv1alpha1.CreateClaimRequest{
		Cluster: clusterRef(), ClaimId: id, Holder: holder, DisplayName: "chaos-" + id[:8],
		Candidates: lo.Map(groups, func(g string, _ int) string { return sandbox.ClusterNamespace + "/" + g }),
	}
}

// report reports the Machines' Nodes as still carrying Karpenter's taint, like a shim without
// NodeClaims. It ignores an agent that does not answer.
func (h *holders) report(ctx context.Context, machines []clusterv1.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, attemptWithin)
	defer cancel()
	agent := h.anyAgent()
	listed, err := agent.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: clusterRef(), Holder: shimv1.Holder})
	if err == nil {
		_, err = agent.Claims.SyncClaims(ctx, &agentv1alpha1.SyncClaimsRequest{
			Cluster: clusterRef(), Holder: shimv1.Holder, Token: listed.GetToken(),
			Nodes: lo.Map(machines, func(m clusterv1.Machine, _ int) *agentv1alpha1.NodeReport {
				return &agentv1alpha1.NodeReport{ProviderId: m.Spec.ProviderID, Unregistered: true}
			}),
		})
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.PermissionDenied, codes.FailedPrecondition:
		h.odd("a report of Nodes is refused: %v", err)
		return err
	default:
		return nil
	}
}

// create makes a claim and returns its id, or "" if the agents report that there is no room. The
// error is the context's.
func (h *holders) create(ctx context.Context, groups ...string) (string, error) {
	return h.make(ctx, request(uuid.NewString(), groups...))
}

func (h *holders) make(ctx context.Context, r *agentv1alpha1.CreateClaimRequest) (string, error) {
	k := &claim{id: r.GetClaimId(), wanted: true}
	h.mu.Lock()
	h.claims[k.id] = k
	h.mu.Unlock()
	for doubt := false; ; doubt = true {
		yes, final := h.attempt(ctx, r)
		if yes {
			h.mu.Lock()
			k.accepted = true
			h.mu.Unlock()
			return k.id, nil
		}
		if final && !doubt && rand.IntN(8) > 0 {
			h.mu.Lock()
			k.wanted, k.released = false, true
			h.mu.Unlock()
			return "", nil
		}
		if final {
			// A call whose answer was lost may have created the claim, so an unwanted claim must be
			// released.
			return "", h.release(ctx, k.id, false)
		}
		if err := wait(ctx, pause); err != nil {
			// It is not known whether the claim was made, so it is given up and released before the
			// next check.
			h.mu.Lock()
			k.wanted = false
			h.mu.Unlock()
			return "", err
		}
	}
}

// goes records that the node group is being deleted, so that calls for it may return NOT_FOUND.
// That includes calls with further candidates: an agent does not report that those are full once
// the last one is gone.
func (h *holders) goes(group string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.going[sandbox.ClusterNamespace+"/"+group] = true
}

func (h *holders) anyGoes(candidates []string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return lo.SomeBy(candidates, func(id string) bool { return h.going[id] })
}

// attempt calls once, or, as a network may cause, twice at the same time.
func (h *holders) attempt(ctx context.Context, r *agentv1alpha1.CreateClaimRequest) (yes, final bool) {
	call := func() (bool, bool) {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		defer cancel()
		answered := h.told.Begin(r.GetClaimId(), history.Create)
		_, err := h.anyAgent().Claims.CreateClaim(bounded, r)
		answered(madeOf(err))
		switch {
		case err == nil:
			return true, true
		case agenterrors.IsNoRoom(err), agenterrors.IsRefused(err), agenterrors.IsEnded(err):
			return false, true
		case agenterrors.IsNotFound(err) && h.anyGoes(r.GetCandidates()):
			return false, true
		case agenterrors.IsNotFound(err), agenterrors.IsInvalidArgument(err), agenterrors.IsPermissionDenied(err), agenterrors.IsUnauthenticated(err):
			h.odd("CreateClaim: %v", err)
			return false, true
		}
		return false, false
	}
	if rand.IntN(8) > 0 {
		return call()
	}
	var both sync.WaitGroup
	var otherYes, otherFinal bool
	both.Go(func() { otherYes, otherFinal = call() })
	yes, final = call()
	both.Wait()
	return yes || otherYes, final && otherFinal && yes == otherYes
}

// release releases a claim. The error is the context's.
func (h *holders) release(ctx context.Context, id string, drained bool) error {
	h.mu.Lock()
	if k := h.claims[id]; k != nil {
		k.wanted = false
	}
	h.mu.Unlock()
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := h.told.Begin(id, history.Release)
		response, err := h.anyAgent().Claims.ReleaseClaim(bounded, &agentv1alpha1.ReleaseClaimRequest{
			Cluster: clusterRef(), ClaimId: id, Drained: drained, Reason: "the caller is done with it",
		})
		cancel()
		answered(shownBy(response.GetClaim(), err))
		if err == nil {
			h.mu.Lock()
			if k := h.claims[id]; k != nil {
				k.released = true
			}
			h.mu.Unlock()
			return nil
		}
		if code := status.Code(err); code == codes.InvalidArgument || code == codes.PermissionDenied || code == codes.NotFound {
			h.odd("ReleaseClaim: %v", err)
			return nil
		}
		if err := wait(ctx, pause); err != nil {
			return err
		}
	}
}

// returnMachine returns the claim's Machine to the user. It returns false if an agent refuses that.
// The error is the context's.
func (h *holders) returnMachine(ctx context.Context, id string) (bool, error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := h.told.Begin(id, history.Get) // like a Get, for the order of calls: the claim lives until it ends by itself
		response, err := h.anyAgent().Claims.ReturnMachine(bounded, &agentv1alpha1.ReturnMachineRequest{
			Cluster: clusterRef(), ClaimId: id, Reason: "the caller returns the machine",
		})
		cancel()
		answered(shownBy(response.GetClaim(), err))
		switch {
		case err == nil:
			return true, nil
		case agenterrors.IsNotReturnable(err), agenterrors.IsNotFound(err):
			return false, nil
		}
		if code := status.Code(err); code == codes.InvalidArgument || code == codes.PermissionDenied {
			h.odd("ReturnMachine: %v", err)
			return false, nil
		}
		if err := wait(ctx, pause); err != nil {
			return false, err
		}
	}
}

// get reads a claim from an agent, and retries until it answers.
func (h *holders) get(ctx context.Context, id string) (*agentv1alpha1.Claim, error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := h.told.Begin(id, history.Get)
		response, err := h.anyAgent().Claims.GetClaim(bounded, &agentv1alpha1.GetClaimRequest{Cluster: clusterRef(), ClaimId: id})
		cancel()
		answered(shownBy(response.GetClaim(), err))
		if err == nil {
			return response.GetClaim(), nil
		}
		if agenterrors.IsNotFound(err) {
			return nil, err
		}
		if err := wait(ctx, pause); err != nil {
			return nil, err
		}
	}
}

// madeOf returns what the error of a call that makes a claim reveals.
func madeOf(err error) history.Answer {
	switch {
	case err == nil:
		return history.Answer{Outcome: history.Live}
	case agenterrors.IsEnded(err):
		return history.Answer{Outcome: history.Ended}
	case agenterrors.IsNoRoom(err), agenterrors.IsRefused(err), agenterrors.IsNotFound(err):
		return history.Answer{Outcome: history.Refused}
	}
	return history.Answer{Outcome: history.Unknown}
}

// shownBy returns what a call that returns the claim reveals.
func shownBy(c *agentv1alpha1.Claim, err error) history.Answer {
	a := history.Answer{Outcome: history.Unknown, Machine: c.GetMachine().GetUid()}
	switch {
	case agenterrors.IsNotFound(err):
		a.Outcome = history.Missing
	case err != nil:
	case c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND:
		a.Outcome = history.Live
	case c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		a.Outcome = history.Releasing
	case c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		a.Outcome = history.Ended
	}
	return a
}

// wait waits for a duration, or returns the context's error if that ends first.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// between returns a random duration.
func between(least, most time.Duration) time.Duration {
	return least + time.Duration(rand.Int64N(int64(most-least)+1))
}

// takes records the machine that an agent reports for a claim. No agent may report the same machine
// for two claims.
func (h *holders) takes(id, providerID string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	k := h.claims[id]
	if providerID == "" || !k.wanted {
		return
	}
	for _, other := range h.claims {
		if other != k && other.wanted && other.providerID == providerID {
			h.strange = append(h.strange, fmt.Sprintf("claims %s and %s both have %s", id, other.id, providerID))
		}
	}
	k.providerID = providerID
}
