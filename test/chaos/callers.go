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
	// wanted is true from before the first call that makes the claim until before the first call
	// that releases it.
	wanted bool
	// accepted is set once an agent has accepted the claim.
	accepted bool
	// released is set once an agent has accepted the release.
	released bool
	// providerID is the provider ID of its machine, as reported by an agent. Empty before.
	providerID string
}

// callers are the holders of claims. They call the agents, retry calls whose answer is lost, and
// keep track of their claims. They are safe for concurrent use.
type callers struct {
	mu     sync.Mutex
	agents []*client.Client // the agents to call
	claims map[string]*claim
	going  map[string]bool // ids of node groups that are being deleted
	// strange lists answers that no agent may give.
	strange []string
	// told records the calls and the agents' answers.
	told *history.Recorder
}

func newCallers() *callers {
	return &callers{claims: map[string]*claim{}, going: map[string]bool{}, told: history.New()}
}

func clusterRef() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}
}

// use sets the agents to call.
func (c *callers) use(agents ...*client.Client) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.agents = agents
}

func (c *callers) anyone() *client.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	return lo.Sample(c.agents)
}

func (c *callers) wanted() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return lo.FilterMap(lo.Values(c.claims), func(k *claim, _ int) (string, bool) { return k.id, k.wanted })
}

func (c *callers) wants(id string) (wanted, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.claims[id]
	return k != nil && k.wanted, k != nil
}

// drop treats a claim as gone because something other than its holder ended it.
func (c *callers) drop(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims[id].wanted, c.claims[id].released = false, true
}

// giveUp marks a claim as unwanted. It is released before the next check.
func (c *callers) giveUp(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims[id].wanted = false
}

// unreleased returns the claims that their holder has given up and whose release no agent has
// accepted yet.
func (c *callers) unreleased() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return lo.FilterMap(lo.Values(c.claims), func(k *claim, _ int) (string, bool) { return k.id, !k.wanted && !k.released })
}

func (c *callers) oddities() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.strange)
}

func (c *callers) odd(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.strange = append(c.strange, fmt.Sprintf(format, args...))
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
func (c *callers) report(ctx context.Context, machines []clusterv1.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, attemptWithin)
	defer cancel()
	agent := c.anyone()
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
		c.odd("a report of Nodes is refused: %v", err)
		return err
	default:
		return nil
	}
}

// create makes a claim and returns its id, or "" if the agents report that there is no room. The
// error is the context's.
func (c *callers) create(ctx context.Context, groups ...string) (string, error) {
	return c.make(ctx, request(uuid.NewString(), groups...))
}

func (c *callers) make(ctx context.Context, r *agentv1alpha1.CreateClaimRequest) (string, error) {
	k := &claim{id: r.GetClaimId(), wanted: true}
	c.mu.Lock()
	c.claims[k.id] = k
	c.mu.Unlock()
	for doubt := false; ; doubt = true {
		yes, final := c.attempt(ctx, r)
		if yes {
			c.mu.Lock()
			k.accepted = true
			c.mu.Unlock()
			return k.id, nil
		}
		if final && !doubt && rand.IntN(8) > 0 {
			c.mu.Lock()
			k.wanted, k.released = false, true
			c.mu.Unlock()
			return "", nil
		}
		if final {
			// A call whose answer was lost may have made the claim, so an unwanted claim must be
			// released.
			return "", c.release(ctx, k.id, false)
		}
		if err := wait(ctx, pause); err != nil {
			// It is not known whether the claim was made, so it is given up and released before the
			// next check.
			c.mu.Lock()
			k.wanted = false
			c.mu.Unlock()
			return "", err
		}
	}
}

// goes records that the node group is being deleted, so that calls for it may return NOT_FOUND.
// That includes calls with further candidates: an agent does not report that those are full once
// the last one is gone.
func (c *callers) goes(group string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.going[sandbox.ClusterNamespace+"/"+group] = true
}

func (c *callers) anyGoes(candidates []string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return lo.SomeBy(candidates, func(id string) bool { return c.going[id] })
}

// attempt calls once, or, as a network may cause, twice at the same time.
func (c *callers) attempt(ctx context.Context, r *agentv1alpha1.CreateClaimRequest) (yes, final bool) {
	call := func() (bool, bool) {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		defer cancel()
		answered := c.told.Begin(r.GetClaimId(), history.Create)
		_, err := c.anyone().Claims.CreateClaim(bounded, r)
		answered(madeOf(err))
		switch {
		case err == nil:
			return true, true
		case agenterrors.IsNoRoom(err), agenterrors.IsRefused(err), agenterrors.IsEnded(err):
			return false, true
		case agenterrors.IsNotFound(err) && c.anyGoes(r.GetCandidates()):
			return false, true
		case agenterrors.IsNotFound(err), agenterrors.IsInvalidArgument(err), agenterrors.IsPermissionDenied(err), agenterrors.IsUnauthenticated(err):
			c.odd("CreateClaim: %v", err)
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
func (c *callers) release(ctx context.Context, id string, drained bool) error {
	c.mu.Lock()
	if k := c.claims[id]; k != nil {
		k.wanted = false
	}
	c.mu.Unlock()
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := c.told.Begin(id, history.Release)
		response, err := c.anyone().Claims.ReleaseClaim(bounded, &agentv1alpha1.ReleaseClaimRequest{
			Cluster: clusterRef(), ClaimId: id, Drained: drained, Reason: "the caller is done with it",
		})
		cancel()
		answered(shownBy(response.GetClaim(), err))
		if err == nil {
			c.mu.Lock()
			if k := c.claims[id]; k != nil {
				k.released = true
			}
			c.mu.Unlock()
			return nil
		}
		if code := status.Code(err); code == codes.InvalidArgument || code == codes.PermissionDenied || code == codes.NotFound {
			c.odd("ReleaseClaim: %v", err)
			return nil
		}
		if err := wait(ctx, pause); err != nil {
			return err
		}
	}
}

// returnMachine returns the claim's Machine to the user. It returns false if an agent refuses that. The
// error is the context's.
func (c *callers) returnMachine(ctx context.Context, id string) (bool, error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := c.told.Begin(id, history.Get) // equivalent as far as the order of calls goes: the claim lives on until it ends by itself
		response, err := c.anyone().Claims.ReturnMachine(bounded, &agentv1alpha1.ReturnMachineRequest{
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
			c.odd("ReturnMachine: %v", err)
			return false, nil
		}
		if err := wait(ctx, pause); err != nil {
			return false, err
		}
	}
}

// get reads a claim from an agent, and retries until it answers.
func (c *callers) get(ctx context.Context, id string) (*agentv1alpha1.Claim, error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := c.told.Begin(id, history.Get)
		response, err := c.anyone().Claims.GetClaim(bounded, &agentv1alpha1.GetClaimRequest{Cluster: clusterRef(), ClaimId: id})
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
func (c *callers) takes(id, providerID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.claims[id]
	if providerID == "" || !k.wanted {
		return
	}
	for _, other := range c.claims {
		if other != k && other.wanted && other.providerID == providerID {
			c.strange = append(c.strange, fmt.Sprintf("claims %s and %s both have %s", id, other.id, providerID))
		}
	}
	k.providerID = providerID
}
