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
	// holder of all claims that are not Karpenter's.
	holder = "chaos"
	// attemptWithin bounds one call; a caller repeats it until it has a word to go by.
	attemptWithin = 6 * time.Second
	// pause between two attempts.
	pause = 150 * time.Millisecond
)

// claim is one claim as its holder knows it.
type claim struct {
	id string
	// wanted is true from before the first call that makes it until before the first call that releases it.
	wanted bool
	// accepted says that an agent said yes.
	accepted bool
	// released says that an agent took the release.
	released bool
	// providerID is that of its machine, as an agent said; empty before.
	providerID string
}

// callers are the holders of claims: they call the agents, repeat calls whose answer is lost, and know which claims are
// theirs. Safe for concurrent use.
type callers struct {
	mu     sync.Mutex
	agents []*client.Client // those that are called
	claims map[string]*claim
	going  map[string]bool // ids of node groups that somebody deletes
	// strange are answers that no agent may give.
	strange []string
	// told are the calls, and what the agents answered.
	told *history.Recorder
}

func newCallers() *callers {
	return &callers{claims: map[string]*claim{}, going: map[string]bool{}, told: history.New()}
}

func clusterRef() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}
}

// use says which agents are called from now on.
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

// drop takes a claim for gone: something other than its holder ended it.
func (c *callers) drop(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims[id].wanted, c.claims[id].released = false, true
}

// giveUp says that the claim is not wanted any more, and is to be released before anything is checked.
func (c *callers) giveUp(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims[id].wanted = false
}

// unreleased are the claims whose release no agent has taken yet, and whose holder has given them up.
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

// request asks for a machine of the first of the node groups that has room.
func request(id string, groups ...string) *agentv1alpha1.CreateClaimRequest {
	return &agentv1alpha1.CreateClaimRequest{
		Cluster: clusterRef(), ClaimId: id, Holder: holder, DisplayName: "chaos-" + id[:8],
		Candidates: lo.Map(groups, func(g string, _ int) string { return sandbox.ClusterNamespace + "/" + g }),
	}
}

// report tells of the Machines' Nodes that they keep Karpenter's taint, as a shim without NodeClaims does. An agent that does not answer was not
// told.
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

// create makes a claim and returns its id, or "" when the agents say that there is no room. The error is the context's.
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
			// A call whose answer is lost may have made it: whoever does not want a claim says so.
			return "", c.release(ctx, k.id, false)
		}
		if err := wait(ctx, pause); err != nil {
			// Whether it was made is not known; it is given up, and released before anything is checked.
			c.mu.Lock()
			k.wanted = false
			c.mu.Unlock()
			return "", err
		}
	}
}

// goes says that somebody deletes the node group, so that calls for it may find it gone. Calls that name others besides may, too: of
// those that are full an agent does not say so when the last one is gone.
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

// attempt calls once, or, as a network may, twice at the same time.
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

// release gives a claim back. The error is the context's.
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

// giveBack returns the claim's Machine to the user. It reports false when an agent refuses that. The error is the context's.
func (c *callers) giveBack(ctx context.Context, id string) (bool, error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := c.told.Begin(id, history.Get) // as far as the order of calls goes: the claim lives on until it ends by itself
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

// get asks an agent for a claim until it answers.
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

// madeOf is what a call that makes a claim tells by its error.
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

// shownBy is what a call tells that answers with the claim.
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

// wait returns after a while, or with the context's error when that ends first.
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

// between is a random duration.
func between(least, most time.Duration) time.Duration {
	return least + time.Duration(rand.Int64N(int64(most-least)+1))
}

// takes notes which machine an agent says that a claim has. Two claims with one machine are what no agent may say.
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
