package chaos

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/samber/lo"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// load is a number of callers that create claims, keep them for a while, and release them,
// repeatedly.
type load struct {
	r       *run
	stopped chan struct{}
	working sync.WaitGroup

	mu   sync.Mutex
	kept []string
}

// mix describes the claims of a load.
type mix struct {
	// workers is the number of concurrent callers.
	workers int
	// choices are lists of candidates. Each claim uses one of them.
	choices [][]string
	// hold is the maximum time that a claim is kept once it is Bound.
	hold time.Duration
	// pace is the maximum time between two claims of a caller.
	pace time.Duration
}

// on returns the choices of claims that allow a single group each.
func on(groups ...*group) [][]string {
	return lo.Map(groups, func(g *group, _ int) []string { return []string{g.name} })
}

// startLoad starts callers, which work until [load.finish].
func (r *run) startLoad(ctx context.Context, m mix) *load {
	l := &load{r: r, stopped: make(chan struct{})}
	for range m.workers {
		l.working.Go(func() {
			for !l.done() && ctx.Err() == nil {
				l.life(ctx, m)
			}
		})
	}
	return l
}

func (l *load) done() bool {
	select {
	case <-l.stopped:
		return true
	default:
		return false
	}
}

// finish lets the callers complete their current step. About half of those that have a claim keep
// it.
func (l *load) finish() {
	close(l.stopped)
	l.working.Wait()
}

// life is the life of one claim.
func (l *load) life(ctx context.Context, m mix) {
	r := l.r
	id, err := r.holders.create(ctx, lo.Sample(m.choices)...)
	if err != nil || id == "" { // no such group, or no room
		l.sleep(ctx, between(100*time.Millisecond, 500*time.Millisecond))
		return
	}
	roll := rand.IntN(10)
	if roll >= 2 {
		if !l.bound(ctx, id) {
			return
		}
		if roll >= 4 {
			l.sleep(ctx, between(0, m.hold))
		}
	}
	if l.done() && roll%2 == 0 {
		l.mu.Lock()
		l.kept = append(l.kept, id)
		l.mu.Unlock()
		return
	}
	if err := r.holders.release(ctx, id, roll%3 > 0); err != nil {
		return
	}
	if roll%2 == 0 {
		_, _ = r.holders.get(ctx, id) // the history check verifies the answer
	}
	if roll%3 == 0 {
		bounded, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_ = r.auditor.Await(bounded, func() bool { return l.done() || r.phase(id) == agentv1.PhaseEnded })
	}
	l.sleep(ctx, between(0, m.pace))
}

// bound waits until the claim has its Machine and checks what the agents report of it. It returns
// false if the claim is gone.
func (l *load) bound(ctx context.Context, id string) bool {
	r := l.r
	err := r.auditor.Await(ctx, func() bool { return l.done() || r.phase(id) != agentv1.PhasePending })
	if err != nil || r.phase(id) == agentv1.PhaseEnded {
		r.forgive()
		return false
	}
	if l.done() {
		return true
	}
	claim, err := r.holders.get(ctx, id)
	if err == nil && claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND {
		r.holders.takes(id, claim.GetMachine().GetProviderId())
	}
	return !errors.Is(err, context.Canceled)
}

// sleep waits for a duration, or until the load is to end.
func (l *load) sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-l.stopped:
	case <-ctx.Done():
	}
}
