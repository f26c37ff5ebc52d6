package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/samber/lo"
	"go.opentelemetry.io/otel/trace"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	// runTimeout ends a run whose requests hang. The calls that wait for it have deadlines of their
	// own.
	runTimeout = time.Minute
	// longestRun is how long a run may take before it begins no further step, so that a run that is
	// merely slow is not cut off in the middle of its writes.
	longestRun = 20 * time.Second
	// maxSteps bounds the steps of one run. A group that needs more is run again at once.
	maxSteps = 24
	// maxYields is how often a run defers other writes for calls that arrived meanwhile.
	maxYields = 4
	// maxActions is how many writes on other objects one step does before it looks again at the
	// ledger and at waiting calls.
	maxActions = 64
	// maxConflicts is how many lost races in a row end a run.
	maxConflicts = 8
	// failedDelay is after how long a node group is looked at again whose run for a call failed.
	failedDelay = time.Second
)

// group is the process's state about one MachineDeployment: a lock, the waiting calls, and times.
// All of it may be lost.
type group struct {
	engine *Engine
	key    types.NamespacedName
	lock   chan struct{} // held during a run

	mu      sync.Mutex
	kicked  bool
	waiters map[string][]chan outcome
	// busy counts runs, and claims that are made and entered at once, that are in progress or about
	// to start. busySince is when it last rose from zero.
	busy      int
	busySince time.Time
	making    map[chan struct{}]time.Time // since when calls are creating a claim's object; each is closed when it exists or failed
	gathering bool                        // a run waits for these calls
	// traced are recorded spans of calls that ask for the next step.
	traced []trace.Span
	// cluster is the name of the Cluster, as read last; empty before that.
	cluster string

	// Used under lock only.
	spareSince time.Time
	lastQuiet  time.Time // when the ledger was last written for no call in particular
	wanted     time.Time // since when such a write is deferred; zero when none is
	unfinished int       // how many such writes in a row left something for another one
	failures   int       // number of runs in a row that ended because a write failed
	spareSeq   int64     // the ledger's seq when the spare was first seen
	panics     int       // number of runs in a row that panicked
	resting    time.Time // until when the group is left alone after a panic
	panicked   *panics.Error
	wrote      int64 // seq of the ledger that this process wrote last
	// writtenFrom is the first seq of the unbroken series of ledgers by this process that ends with
	// wrote.
	writtenFrom int64
	// due is a hash of the work that is left to another agent; zero for none. It has not changed
	// since dueSince, and has not been zero since dueFirst. The ledger has had the seq dueSeq since
	// dueWritten. takenOver is one more than the seq of the ledger (0 for none) under which that
	// agent did not do the work; zero for none.
	due                            uint64
	dueSeq                         int64
	dueSince, dueWritten, dueFirst time.Time
	takenOver                      int64
	// failed are the actions that failed when they were tried last, by their texts. skip is by how
	// many their order has moved on.
	failed map[string]bool
	skip   int
	// queued holds the ids of the claims that the last step found no room in the ledger for.
	queued map[string]bool
	// mislabelled are the Machines with an event about their label.
	mislabelled map[types.UID]bool
}

type outcome struct {
	refusal *eligibility.Refusal
	err     error
}

func (e *Engine) group(namespace, name string) *group {
	key := types.NamespacedName{Namespace: namespace, Name: name}
	e.mu.Lock()
	defer e.mu.Unlock()
	g := e.groups[key]
	if g == nil {
		g = &group{engine: e, key: key, lock: make(chan struct{}, 1), waiters: map[string][]chan outcome{}}
		e.groups[key] = g
	}
	return g
}

// awaitEntry waits until the claim is in the ledger (nil, nil) or was refused. While the ledger has
// no room for the claim, it waits as long as ctx allows. Nothing is guaranteed until then, and a
// repeated call waits again.
func (g *group) awaitEntry(ctx context.Context, claimID string) (*eligibility.Refusal, error) {
	done := make(chan outcome, 1)
	g.mu.Lock()
	g.waiters[claimID] = append(g.waiters[claimID], done)
	g.mu.Unlock()
	g.kick(ctx)
	select {
	case o := <-done:
		return o.refusal, o.err
	default:
	}
	select {
	case o := <-done:
		return o.refusal, o.err
	case <-ctx.Done():
		err := fmt.Errorf("waiting for the claim to be admitted: %w", ctx.Err())
		g.answerThese(claimID, []chan outcome{done}, outcome{err: err})
		return nil, err
	}
}

// begin registers a writer of the group until done is called.
func (g *group) begin() (done func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.busy++; g.busy == 1 {
		g.busySince = g.engine.Clock.Now()
	}
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.busy--
	}
}

// beginMaking registers a call that creates a claim's object, until made is called, which reports
// whether by then no other call does so, and no run gathers the claims of such calls. made may be
// called again.
func (g *group) beginMaking() (made func() (alone bool)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.making == nil {
		g.making = map[chan struct{}]time.Time{}
	}
	done := make(chan struct{})
	g.making[done] = time.Now()
	return func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		if _, still := g.making[done]; still {
			delete(g.making, done)
			close(done)
		}
		return len(g.making) == 0 && !g.gathering
	}
}

// gather waits until the objects exist that calls are creating now, so that the claims of a burst
// are entered in one write. Cluster API reconciles a MachineDeployment at most once a second, and
// then its MachineSet: what a second write adds may come two seconds later. It waits for each call
// at most until [gathersFor] after that began, so a slow one delays one run only.
//
// It does not wait for those that begin meanwhile: a caller that makes one claim after the other
// must not wait for its own next one.
func (g *group) gather(ctx context.Context) {
	g.mu.Lock()
	others := maps.Clone(g.making)
	g.gathering = len(others) > 0
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		g.gathering = false
		g.mu.Unlock()
	}()
	for made, began := range others {
		timer := time.NewTimer(gathersFor - time.Since(began))
		select {
		case <-made:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// occupied reports whether the group has a writer. It returns false again once the group has had
// one for [longestOccupied].
func (g *group) occupied() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	busyFor := g.engine.Clock.Since(g.busySince) // below zero if the clock was set back
	return g.busy > 0 && busyFor >= 0 && busyFor < longestOccupied
}

const (
	// mostAtOnce is the maximum number of entries of a ledger to which a claim is added at once.
	// More are a crowd, and the write carries the ledger three times.
	mostAtOnce = 256
	// planTakes is how long [group.enterAtOnce] waits for the lock. A look at the caches holds it
	// for less.
	planTakes = 20 * time.Millisecond
	// gathersFor is how long a run waits for claims whose objects calls are creating. It is much
	// longer than a write usually takes, and much shorter than Cluster API takes for a Machine.
	gathersFor = 300 * time.Millisecond
)

// enterAtOnce enters a claim without listing anything from the API server first, and reports
// whether it did. md was read, possibly from a cache, before the claim's object was made. If the
// MachineDeployment is unchanged, or only this process has written it since, no ledger can have had
// the claim meanwhile. Rule R1 asks no more of a write that only raises replicas for a claim. What
// the caches show of everything else only decides whether there is something else to do, which is
// then left to a run. It does not wait for longer than the call. The caller has called begin, and
// done ends that.
func (g *group) enterAtOnce(call context.Context, md *clusterv1.MachineDeployment, c *v1alpha1.MachineClaim, done func()) bool {
	// Not the call's context: others wait for the lock, and must not depend on this call's deadline
	// or its identity's rate limit.
	ctx, cancel := context.WithTimeout(g.span(g.context(), "EnterAtOnce", trace.SpanFromContext(call)), runTimeout)
	end := func() {
		trace.SpanFromContext(ctx).End()
		cancel()
		done()
	}
	if md == nil || !g.acquireSoon() {
		end()
		return false
	}
	free := end
	end = func() {
		<-g.lock
		free()
	}
	if left, _ := g.panicBackoff(); left > 0 {
		end()
		return false
	}
	entered := make(chan bool, 1)
	copied := c.DeepCopy() // the call uses the original
	g.engine.spawn(func() {
		defer end()
		s, in := g.tryToEnter(ctx, md, copied)
		entered <- in
		if s == nil {
			return
		}
		// The call is answered meanwhile. If this fails, a run does it. Until then only the ledger
		// knows of the claim.
		if _, err := g.engine.perform(ctx, s, []protocol.Action{s.Admitted(copied)}); err != nil {
			log.FromContext(ctx).V(1).Info("the claim is marked as admitted by a step", "claim", copied.Spec.ClaimID, "cause", err.Error())
		}
	})
	select {
	case in := <-entered:
		return in
	case <-call.Done(): // a request of the agent hangs
		return false
	}
}

// tryToEnter is [group.admitOnly], and leaves the claim to a run where that fails or panics.
func (g *group) tryToEnter(ctx context.Context, md *clusterv1.MachineDeployment, c *v1alpha1.MachineClaim) (s *protocol.Snapshot, in bool) {
	err := recovered(ctx, func() (err error) {
		s, in, err = g.admitOnly(ctx, md, c)
		return err
	})
	if bug, panicked := errors.AsType[*panics.Error](err); panicked {
		g.notePanic(bug)
	}
	if err != nil {
		log.FromContext(ctx).V(1).Info("the claim is left to a step", "claim", c.Spec.ClaimID, "cause", err.Error())
	}
	return s, in
}

// admitOnly enters a claim if that is all there is to do, and reports whether the ledger has the
// claim. If this call wrote it, it returns the snapshot that it decided from. lock is held.
func (g *group) admitOnly(
	ctx context.Context, read *clusterv1.MachineDeployment, c *v1alpha1.MachineClaim,
) (from *protocol.Snapshot, in bool, err error) {
	e := g.engine
	md, err := g.unlessOthersWrote(ctx, read)
	if err != nil {
		return nil, false, err
	}
	s, err := e.readAround(ctx, cached, g.key, md)
	if err != nil || s.Seq() < g.wrote || s.Ledger == nil || len(s.Ledger.Pending)+len(s.Ledger.Releasing) > mostAtOnce {
		return nil, false, err
	}
	if _, in := s.Ledger.Pending[c.Spec.ClaimID]; in {
		return nil, md != read, nil // a run came first
	}
	if !slices.ContainsFunc(s.Claims, func(other *v1alpha1.MachineClaim) bool { return other.Spec.ClaimID == c.Spec.ClaimID }) {
		switch err := e.Client.Get(ctx, client.ObjectKeyFromObject(c), &v1alpha1.MachineClaim{}); {
		case apierrors.IsNotFound(err): // the cache does not show it yet
			s.Claims = append(s.Claims, c)
		default: // it has ended, or moved on, meanwhile
			return nil, false, err
		}
	}
	d := e.decide(s)
	if !d.EntersOnly(s, c.Spec.ClaimID) {
		return nil, false, nil
	}
	if err := g.commit(ctx, s, d, unchanged(md)...); err != nil {
		return nil, false, err
	}
	return s, true, nil
}

// unlessOthersWrote returns the MachineDeployment as the cache and this process have it now, if no
// other agent has written a ledger since md was read. In that case no other agent has entered a
// claim that was made after that. Otherwise it returns md. lock is held.
func (g *group) unlessOthersWrote(ctx context.Context, md *clusterv1.MachineDeployment) (*clusterv1.MachineDeployment, error) {
	e := g.engine
	now := &clusterv1.MachineDeployment{}
	if err := e.Client.Get(ctx, g.key, now); err != nil {
		return nil, fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	now = over(now, e.written)
	then, errThen := protocol.LedgerOf(md)
	l, err := protocol.LedgerOf(now)
	if now.UID != md.UID || errThen != nil || err != nil || then == nil || l == nil {
		return md, nil //nolint:nilerr // a run looks at it
	}
	if own := l.By == e.id && l.Seq == g.wrote && then.Seq+1 >= g.writtenFrom && then.Seq <= l.Seq; !own {
		return md, nil
	}
	return now, nil
}

const (
	// deference is how long due work may stay undone by the agent that last wrote the ledger before
	// another agent does it. It matters only after that agent was killed, and only for events: a
	// call is served by the agent that it reaches.
	deference = 3 * time.Second
	// silentDeference bounds deference where the due work keeps changing but the ledger does not.
	// The work also changes while only Cluster API is active, but only an agent writes the ledger.
	silentDeference = 30 * time.Second
	// longestDeference bounds deference in any case, because an agent may write ledgers and fail at
	// everything else.
	longestDeference = 5 * time.Minute
)

// deferToOther returns how long due work is still left to the agent that last wrote the ledger, or
// that serves the call that begins one. It is zero if the work is this agent's or if none is due.
// Two agents that do it at the same time do no harm, but they double the reads and lose every other
// write. While the due work changes, the other agent is likely to be active.
func (g *group) deferToOther(s *protocol.Snapshot, d *protocol.Decision) time.Duration {
	mine := s.Ledger != nil && (s.Ledger.By == "" || s.Ledger.By == g.engine.id) || s.Seq()+1 == g.takenOver
	if mine || d.Ledger == nil && len(d.Actions) == 0 {
		g.due = 0
		return 0
	}
	due := fnv.New64a()
	_, _ = fmt.Fprintln(due, s.Seq(), len(d.Actions))
	if len(d.Actions) > 0 {
		_, _ = fmt.Fprintln(due, d.Actions[0])
	}
	if d.Ledger != nil {
		next := *d.Ledger
		next.Paused = nil // it has the time of this look
		_, _ = io.WriteString(due, next.Encode())
	}
	now := g.engine.Clock.Now()
	if g.due == 0 {
		g.dueFirst = now
	}
	if g.due == 0 || g.dueSeq != s.Seq() {
		g.dueSeq, g.dueWritten = s.Seq(), now
	}
	if sum := due.Sum64(); g.due != sum {
		g.due, g.dueSince = sum, now
	}
	if now.Before(g.dueSince) { // the clock was set back
		g.dueSince, g.dueWritten, g.dueFirst = now, now, now
	}
	left := min(g.engine.deference-now.Sub(g.dueSince), silentDeference-now.Sub(g.dueWritten), longestDeference-now.Sub(g.dueFirst))
	if left <= 0 {
		g.due, g.takenOver = 0, s.Seq()+1
	}
	return max(0, left)
}

// kick starts a run, or makes sure that one starts when the present one ends. ctx is the context of
// the caller that asks for it.
func (g *group) kick(ctx context.Context) { //nolint:contextcheck // a run serves many calls and outlives each of them
	g.mu.Lock()
	g.toTrace(ctx)
	already := g.kicked
	g.kicked = true
	g.mu.Unlock()
	if already {
		return
	}
	g.engine.spawn(func() {
		defer g.engine.turns.take(g.owner())()
		// Not the caller's context: others' claims are in the same run.
		ctx := g.context()
		requeueAfter, err := g.run(ctx)
		if err != nil {
			log.FromContext(ctx).V(1).Info("reconciling the node group failed; it is retried", "cause", err.Error())
			requeueAfter = cmp.Or(requeueAfter, failedDelay)
		}
		if requeueAfter > 0 {
			g.engine.wake(g.key, requeueAfter)
		}
	})
}

// belongsTo records which Cluster the group belongs to.
func (g *group) belongsTo(s *protocol.Snapshot) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cluster = s.Deployment.Spec.ClusterName
}

// owner returns the group's Cluster, without a name if that is not known yet.
func (g *group) owner() types.NamespacedName {
	g.mu.Lock()
	defer g.mu.Unlock()
	return types.NamespacedName{Namespace: g.key.Namespace, Name: g.cluster}
}

// run does steps until there is nothing left to do. It returns after how long to look again; zero
// means not at all.
func (g *group) run(ctx context.Context) (time.Duration, error) {
	done := g.begin()
	defer done()
	if err := g.acquire(ctx); err != nil {
		return 0, err
	}
	defer func() { <-g.lock }()
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	g.gather(ctx)
	g.mu.Lock()
	g.kicked = false
	g.mu.Unlock()
	asked := g.waiting()

	requeueAfter, err := g.guardedSteps(ctx)
	unanswered := err
	if unanswered == nil {
		unanswered = ErrConflict // the claim moved elsewhere during the run
	}
	for id, waiters := range asked {
		if g.keepsWaiting(id, err) {
			continue // the run that finds room for it answers
		}
		g.answerThese(id, waiters, outcome{err: unanswered})
	}
	return requeueAfter, err
}

// keepsWaiting reports whether a call about the claim waits on after a run that ended with err: the
// ledger has no room for the claim yet, and at most other writes failed. lock is held.
func (g *group) keepsWaiting(claimID string, err error) bool {
	_, onlyActions := errors.AsType[*actionsError](err)
	return g.queued[claimID] && (err == nil || onlyActions && !errors.Is(err, ErrWriteRefused))
}

// guardedSteps is [group.steps] with panics turned into an error that leaves this group alone for a
// while. lock is held.
func (g *group) guardedSteps(ctx context.Context) (requeueAfter time.Duration, err error) {
	if left, err := g.panicBackoff(); left > 0 {
		return left, err
	}
	err = recovered(ctx, func() (err error) {
		requeueAfter, err = g.steps(ctx)
		return err
	})
	if bug, panicked := errors.AsType[*panics.Error](err); panicked {
		return g.notePanic(bug), err
	}
	g.panics = 0
	return requeueAfter, err
}

// context returns the context for work on the group that is not done for one call.
func (g *group) context() context.Context {
	return log.IntoContext(context.Background(), log.Log.WithName("claims").WithValues("nodeGroup", g.key))
}

// acquireSoon takes the lock if it is free or becomes free within [planTakes].
func (g *group) acquireSoon() bool {
	select {
	case g.lock <- struct{}{}:
		return true
	default:
	}
	timer := time.NewTimer(planTakes)
	defer timer.Stop()
	select {
	case g.lock <- struct{}{}:
		return true
	case <-timer.C:
		return false
	}
}

// acquire takes the lock that is held during a run, unless ctx ends first.
func (g *group) acquire(ctx context.Context) error {
	select {
	case g.lock <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for another run: %w", ctx.Err())
	}
}

// answerThese answers those of the waiters that have had no answer yet.
func (g *group) answerThese(claimID string, waiters []chan outcome, o outcome) {
	g.mu.Lock()
	defer g.mu.Unlock()
	left := slices.DeleteFunc(slices.Clone(g.waiters[claimID]), func(w chan outcome) bool {
		gone := slices.Contains(waiters, w)
		if gone {
			w <- o
		}
		return gone
	})
	if len(left) == 0 {
		delete(g.waiters, claimID)
	} else {
		g.waiters[claimID] = left
	}
}

func (g *group) answer(claimID string, o outcome) {
	g.mu.Lock()
	waiters := g.waiters[claimID]
	delete(g.waiters, claimID)
	g.mu.Unlock()
	for _, w := range waiters {
		w <- o
	}
}

// steps does one step after the other until there is nothing to do.
func (g *group) steps(ctx context.Context) (time.Duration, error) {
	e := g.engine
	conflicts, yields := 0, 0
	g.queued = nil
	began := e.Clock.Now()
	raced := false
	defer func() { trace.SpanFromContext(ctx).End() }()
	for step := 0; step < maxSteps && e.Clock.Since(began) < longestRun; step++ {
		if step > 0 && !raced {
			if requeueAfter, yes := g.finished(ctx); yes {
				return requeueAfter, nil
			}
		}
		raced = true
		ctx = g.traceStep(ctx) //nolint:fatcontext // a run has one span at most
		asked := g.waiting()
		s, requeueAfter, err := g.readOrSettle(ctx, asked)
		if s == nil || err != nil {
			return requeueAfter, err
		}
		s.SpareSince = g.spareSince
		d := e.decide(s)
		keepClaimed(s, d)
		g.noteSpare(s, d)
		g.queued = d.Queued
		if e.withdraws {
			// A claim that moves on would have a ledger written in a group that may be withdrawn
			// already.
			d.Actions = slices.DeleteFunc(d.Actions, func(a protocol.Action) bool { return a.Kind == protocol.MoveOn })
		}

		wait := g.coalesce(s, d)
		var refused error
		if d.Ledger != nil && wait == 0 {
			g.restartWaits(ctx, s, d)
			err := g.commit(ctx, s, d)
			switch {
			case err == nil:
				conflicts, raced = 0, false
				g.refuse(asked, d.Refused)
				if err := g.markNewlyAdmitted(ctx, s, d); err != nil {
					return g.retry(d, 0), err
				}
				continue
			case errors.Is(err, ErrConflict):
				if conflicts++; conflicts < maxConflicts {
					continue
				}
				return 0, err
			case errors.Is(err, ErrWriteRefused):
				refused = err // what the ledger permits as it is goes on
			default:
				return 0, err
			}
		}
		g.refuse(asked, d.Refused)
		g.answerFrom(s, d, s.Ledger)
		g.leaveToCalls(asked, d)
		if len(d.Actions) == 0 {
			return g.idle(d, wait, refused)
		}
		if g.overtaken(s, &yields) {
			continue
		}
		// Rule R2: the ledger is read again after the objects that the actions change.
		if same, err := e.sameLedger(ctx, s.Deployment); err != nil {
			return 0, err
		} else if !same {
			continue
		}
		tried := g.batch(d.Actions)
		progress, err := e.perform(ctx, s, tried)
		g.noteFailures(d.Actions, tried, err)
		if err != nil {
			// Work that is due at its own time is not delayed by a write that may never succeed.
			return g.retry(d, wait), errors.Join(refused, err)
		}
		if refused != nil {
			return g.retry(d, 0), refused
		}
		g.failures, raced = 0, false
		if !progress {
			// Every write lost its race. The events of the winners' writes restart the group, or at
			// the latest this timer does.
			return time.Second, nil
		}
	}
	return 10 * time.Millisecond, nil
}

// finished reports whether the caches show nothing left to do after a step, and when to look again.
// If the caches lag, their events start another run.
func (g *group) finished(ctx context.Context) (requeueAfter time.Duration, yes bool) {
	if g.awaited() {
		return 0, false
	}
	d, err := g.planLocked(ctx)
	if err != nil || d == nil || d.Ledger != nil || len(d.Actions) > 0 {
		return 0, false
	}
	return d.RequeueAfter, true
}

// idle returns when to run again a group for which nothing is to be written now: its ledger
// needs no change or was refused, or its write is deferred for wait.
func (g *group) idle(d *protocol.Decision, wait time.Duration, refused error) (time.Duration, error) {
	if refused != nil {
		return g.retry(d, 0), refused
	}
	if d.Ledger != nil {
		d.Wake(wait)
	}
	return d.RequeueAfter, nil
}

// keepClaimed has the present ledger written again if the number of claims in the annotation beside
// it is wrong. A move, a restore or an older agent leaves another number, and a claim may end
// without a write.
func keepClaimed(s *protocol.Snapshot, d *protocol.Decision) {
	if d.Ledger == nil && !d.Held && s.Ledger != nil && s.Deployment.Annotations[v1alpha1.ClaimedAnnotation] != strconv.Itoa(int(d.Claimed)) {
		d.Ledger = s.Ledger.Clone()
	}
}

// batch returns the actions that come next: as many as one step does. Those that failed last time
// come last, in turns, and so do those on which nothing else depends, which a policy may refuse for
// all Machines.
func (g *group) batch(actions []protocol.Action) []protocol.Action {
	if len(actions) <= maxActions {
		return actions
	}
	first, last := lo.FilterReject(actions, func(a protocol.Action, _ int) bool { return a.Kind != protocol.MarkRepair && !g.failed[a.String()] })
	if len(last) > 0 {
		at := g.skip % len(last)
		last = slices.Concat(last[at:], last[:at])
	}
	return slices.Concat(first, last)[:maxActions]
}

// noteFailures notes which of the decided actions failed when they were tried last.
func (g *group) noteFailures(decided, tried []protocol.Action, err error) {
	if err == nil && len(g.failed) == 0 {
		return
	}
	failed := map[string]bool{}
	for _, a := range decided {
		if text := a.String(); g.failed[text] {
			failed[text] = true
		}
	}
	refused, _ := errors.AsType[*actionsError](err)
	for _, a := range tried {
		if text := a.String(); refused != nil && refused.of[text] {
			failed[text] = true
		} else {
			delete(failed, text)
		}
	}
	g.failed = failed
	if err != nil {
		g.skip += maxActions
	}
}

// longestRetry is the maximum delay of a run whose writes fail.
const longestRetry = 30 * time.Second

// retry returns when to look again after a write failed. It is sooner if other work is due, such as
// a ledger write that is deferred for wait (zero: none is).
func (g *group) retry(d *protocol.Decision, wait time.Duration) time.Duration {
	g.failures++
	d.Wake(min(time.Second<<min(g.failures-1, 10), longestRetry))
	if d.Ledger != nil && wait > 0 {
		d.Wake(wait)
	}
	return d.RequeueAfter
}

// waiting returns the calls that wait now, by claim id.
func (g *group) waiting() map[string][]chan outcome {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.waiters)
}

// awaited reports whether calls wait for a result.
func (g *group) awaited() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiters) > 0
}

// overtaken reports whether calls wait whose claims the snapshot does not have yet. Entering them
// takes precedence over writes that no call waits for. It returns true only a few times in a run,
// so that a stream of calls does not starve the other writes.
func (g *group) overtaken(s *protocol.Snapshot, yields *int) bool {
	if *yields >= maxYields {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for id := range g.waiters {
		if s.Claim(id) == nil {
			*yields++
			return true
		}
	}
	return false
}

// commit writes the ledger and answers the calls whose claims it enters.
func (g *group) commit(ctx context.Context, s *protocol.Snapshot, d *protocol.Decision, further ...operation) error {
	written, err := g.engine.writeLedger(ctx, s, d, further...)
	if err != nil {
		return err
	}
	g.engine.written.note(written)
	if s.Ledger == nil || s.Seq() != g.wrote || s.Ledger.By != g.engine.id {
		g.writtenFrom = s.Seq() + 1
	}
	g.wanted, g.wrote = time.Time{}, s.Seq()+1
	switch {
	case d.Urgent:
	case d.Finishes(s.Ledger):
		g.lastQuiet, g.unfinished = g.engine.Clock.Now(), 0
	case d.Unusable > 0: // it was not deferred
		g.lastQuiet = g.engine.Clock.Now()
	default:
		g.lastQuiet, g.unfinished = g.engine.Clock.Now(), g.unfinished+1
	}
	g.answerFrom(s, d, d.Ledger)
	return nil
}

// markNewlyAdmitted marks the claims that a ledger write has entered. They were read before that
// write, and the API server refuses the mark on a claim that has changed since, so nothing needs to
// be read again.
func (g *group) markNewlyAdmitted(ctx context.Context, s *protocol.Snapshot, d *protocol.Decision) error {
	var marks []protocol.Action
	for _, c := range s.Claims {
		id := c.Spec.ClaimID
		if s.Ledger != nil {
			if _, before := s.Ledger.Pending[id]; before {
				continue
			}
		}
		// A claim that was assigned a Machine is bound by the next step.
		if entry, entered := d.Ledger.Pending[id]; entered && entry == (protocol.Assignment{}) && c.Status.Phase == "" {
			marks = append(marks, s.Admitted(c))
		}
	}
	if len(marks) == 0 {
		return nil
	}
	_, err := g.engine.perform(ctx, s, marks[:min(len(marks), maxActions)])
	return err
}

// restartWaits performs the restarts of waits of a decision whose ledger is about to be written. If
// that orders Machines for other claims, no agent decides on the restarts again until these
// Machines are made, and these claims might fail. A restart that fails is left to that decision.
func (g *group) restartWaits(ctx context.Context, s *protocol.Snapshot, d *protocol.Decision) {
	restarts := lo.Filter(d.Actions, func(a protocol.Action, _ int) bool { return a.Kind == protocol.WaitAnew })
	if _, err := g.engine.perform(ctx, s, restarts); err != nil {
		log.FromContext(ctx).V(1).Info("could not restart the wait of a claim", "cause", err.Error())
	}
}

// refuse answers the calls in asked whose claims were refused. These are the calls that waited
// before anything was read that the refusals follow from. A later call may have been made by a
// caller who already saw a change of the MachineDeployment that the step did not read. The run that
// the call has asked for answers it.
func (g *group) refuse(asked map[string][]chan outcome, refused map[string]eligibility.Refusal) {
	for id, refusal := range refused {
		g.answerThese(id, asked[id], outcome{refusal: &refusal})
	}
}

// leaveToCalls drops the actions that move claims on whose calls wait, or waited before the step
// began to read. A call does that itself, if it is refused by what was read after it began.
func (g *group) leaveToCalls(asked map[string][]chan outcome, d *protocol.Decision) {
	waiting := g.waiting()
	d.Actions = slices.DeleteFunc(d.Actions, func(a protocol.Action) bool {
		if a.Kind != protocol.MoveOn || len(asked[a.Claim.Spec.ClaimID])+len(waiting[a.Claim.Spec.ClaimID]) == 0 {
			return false
		}
		d.Wake(protocol.AbandonedAfter) // the call may be gone then
		return true
	})
}

// answerFrom answers the waiting calls whose claims are in the given ledger or have a Machine.
func (g *group) answerFrom(s *protocol.Snapshot, d *protocol.Decision, in *protocol.Ledger) {
	if in == nil {
		return
	}
	for _, c := range s.Claims {
		id := c.Spec.ClaimID
		if _, refused := d.Refused[id]; refused {
			continue
		}
		if _, entered := in.Pending[id]; entered || c.Status.Machine != nil {
			g.answer(id, outcome{})
		}
	}
}

// answerAdmitted answers the waiting calls whose claims are in the ledger, whichever agent entered
// them.
func (g *group) answerAdmitted(s *protocol.Snapshot) {
	if s.Ledger == nil {
		return
	}
	for id := range s.Ledger.Pending {
		g.answer(id, outcome{})
	}
}

// slowest is the maximum delay of a ledger write, in multiples of [Config.Coalesce].
const slowest = 32

// coalesce returns how long a ledger write that no call waits for is deferred; zero means write
// now. Writes that will be followed by another back off exponentially, because each makes Cluster
// API reconcile every Machine of the group. Assigning a Machine that has its provider ID is
// deferred only briefly: once its Node has joined, no claim can have it. If that has already
// happened in this group, every assignment is written at once. No write is deferred for longer
// because the clock is set back to that of another API server.
func (g *group) coalesce(s *protocol.Snapshot, d *protocol.Decision) time.Duration {
	clock := g.engine.Clock
	switch {
	case d.Ledger == nil:
		g.wanted = time.Time{}
		return 0
	case d.Urgent, d.Unmet > 0: // at the max size no further Machine will come that the same write could assign
		return 0
	case d.Unusable > 0 && s.NewlyAssigned(d.Ledger, false): // Machines join before they are assigned: leave none to the next write
		return 0
	case g.wanted.IsZero():
		g.wanted = clock.Now()
	}
	if d.Finishes(s.Ledger) {
		return lo.Clamp(g.engine.Coalesce-clock.Since(g.lastQuiet), 0, g.engine.Coalesce)
	}
	gather := g.engine.Coalesce
	if !s.NewlyAssigned(d.Ledger, true) {
		gather *= time.Duration(min(1<<min(g.unfinished, 16), slowest))
	}
	return lo.Clamp(gather-clock.Since(g.wanted), 0, gather)
}

// warnOfLabels records an event on each Machine whose label names no claim that can exist.
func (g *group) warnOfLabels(s *protocol.Snapshot) {
	var present map[types.UID]bool
	for _, m := range s.Machines {
		value := m.Labels[v1alpha1.ClaimLabel]
		if value == "" || protocol.ClaimOf(m) != "" {
			continue
		}
		if present == nil {
			present = map[types.UID]bool{}
		}
		present[m.UID] = true
		if !g.mislabelled[m.UID] {
			g.engine.warn(m, "InvalidClaimLabel", "ReadLabel",
				fmt.Sprintf("the label %s=%s is ignored: no claim can have this id; remove the label, which only the agent writes", v1alpha1.ClaimLabel, value))
		}
	}
	g.mislabelled = present
}

func (g *group) noteSpare(s *protocol.Snapshot, d *protocol.Decision) {
	switch {
	case !d.HasSpare:
		g.spareSince = time.Time{}
	case g.spareSince.IsZero():
		g.spareSince, g.spareSeq = g.engine.Clock.Now(), s.Seq()
	}
}

// readOrSettle reads the group. If the group is gone, it settles it, and returns nil and when to
// look again. The calls in asked waited before that.
func (g *group) readOrSettle(ctx context.Context, asked map[string][]chan outcome) (*protocol.Snapshot, time.Duration, error) {
	for range maxConflicts {
		s, err := g.engine.read(ctx, uncached, g.key)
		if s != nil || err != nil {
			return s, 0, err
		}
		requeueAfter, gone, err := g.settleGone(ctx, asked)
		if gone || err != nil {
			return nil, requeueAfter, err
		}
	}
	return nil, 0, ErrConflict // it is deleted and created again and again
}

// settleGone ends the claims of a MachineDeployment that no longer exists, and returns when to look
// again. Cluster API removes its Machines. The calls in asked waited before it was read. If it was
// created meanwhile, settleGone does nothing and reports that it is not gone.
func (g *group) settleGone(ctx context.Context, asked map[string][]chan outcome) (requeueAfter time.Duration, gone bool, err error) {
	e := g.engine
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: g.key.Namespace, Name: g.key.Name}}
	s := &protocol.Snapshot{Deployment: md, Now: e.Clock.Now()}
	if err := e.readParts(ctx, uncached, g.key, s); err != nil {
		return 0, false, err
	}
	held, err := g.holdMoved(ctx, s)
	if err != nil {
		return 0, false, err
	}
	// Rule R2: the claims may be those of one that was created after it was looked for.
	if gone, err := e.sameLedger(ctx, md); !gone || err != nil {
		return 0, false, err
	}
	d := protocol.DecideGone(s)
	g.refuse(asked, d.Refused)
	g.leaveToCalls(asked, d)
	if held {
		d.Wake(protocol.SuspendedDelay)
	}
	_, err = e.perform(ctx, s, d.Actions)
	return d.RequeueAfter, true, err
}

// holdMoved removes from the snapshot the claims whose Cluster is paused or does not exist, and
// reports whether there were any. Their MachineDeployment may have moved to another hub, so its
// absence proves nothing. The Cluster owns these claims, and they are deleted with it.
func (g *group) holdMoved(ctx context.Context, s *protocol.Snapshot) (bool, error) {
	held := map[string]error{} // by Cluster; nil for one that is there
	var left []*v1alpha1.MachineClaim
	for _, c := range s.Claims {
		name := c.Spec.ClusterName
		if _, asked := held[name]; !asked {
			cluster, err := g.engine.UnpausedCluster(ctx, types.NamespacedName{Namespace: g.key.Namespace, Name: name})
			switch {
			case errors.Is(err, ErrUnknownCluster), errors.Is(err, ErrClusterPaused):
			case err != nil:
				return false, err
			default:
				s.ClusterUID = cluster.UID
			}
			held[name] = err
		}
		if err := held[name]; err != nil {
			g.answer(c.Spec.ClaimID, outcome{err: err})
			continue
		}
		left = append(left, c)
	}
	if len(held) > 1 {
		s.ClusterUID = "" // a name that several Clusters used identifies none of them
	}
	all := len(s.Claims)
	s.Claims = left
	return len(left) < all, nil
}
