package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

const (
	// stepTimeout bounds one run of steps; the calls that wait for it have deadlines of their own.
	stepTimeout = time.Minute
	// maxSteps bounds one run; a group that has more to do is looked at again at once.
	maxSteps = 24
	// maxYields is how often a run puts other writes off for calls that arrived meanwhile.
	maxYields = 4
	// maxActions is how many writes on other objects one step does before it looks at the ledger, and at who waits, again.
	maxActions = 64
	// maxConflicts is how many lost races in a row end a run.
	maxConflicts = 8
)

// group is what the process holds about one MachineDeployment: a lock, the calls that wait, and times. All of it can be lost.
type group struct {
	engine *Engine
	key    types.NamespacedName
	lock   chan struct{} // held during a run

	mu      sync.Mutex
	kicked  bool
	waiters map[string][]chan outcome

	// Used under lock only.
	spareSince time.Time
	lastQuiet  time.Time // when the ledger was last written for nobody in particular
	wanted     time.Time // since when such a write is put off; zero when none is
	unfinished int       // how many such writes in a row left something for another one
	failures   int       // how many runs in a row ended because a write failed
	spareSeq   int64     // the ledger's, when the spare was first seen
	panics     int       // how many runs in a row panicked
	resting    time.Time // until when the group is left alone because of that
	panicked   *panicError
	// skip is how many actions of a decision come behind the others, as some of them failed.
	skip int
	// queued are the ids of the claims that the last step found no room in the ledger for.
	queued map[string]bool
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

// enter waits until the claim is in the ledger (nil, nil) or was refused. While the ledger has no room for the claim it waits as
// long as ctx allows: until then nothing is promised, and a repeated call waits again.
func (g *group) enter(ctx context.Context, claimID string) (*eligibility.Refusal, error) {
	done := make(chan outcome, 1)
	g.mu.Lock()
	g.waiters[claimID] = append(g.waiters[claimID], done)
	g.mu.Unlock()
	g.kick()
	select {
	case o := <-done:
		return o.refusal, o.err
	default:
	}
	select {
	case o := <-done:
		return o.refusal, o.err
	case <-ctx.Done():
		err := fmt.Errorf("waiting for the claim to be entered: %w", ctx.Err())
		g.giveUp(claimID, []chan outcome{done}, outcome{err: err})
		return nil, err
	}
}

// kick starts a run, or makes sure that one starts when the present one ends.
func (g *group) kick() { //nolint:contextcheck // a run serves many calls and outlives each of them
	g.mu.Lock()
	already := g.kicked
	g.kicked = true
	g.mu.Unlock()
	if already {
		return
	}
	g.engine.spawn(func() {
		// Not the caller's context: others' claims are in the same run.
		ctx := log.IntoContext(context.Background(), log.Log.WithName("claims").WithValues("nodeGroup", g.key))
		if _, err := g.run(ctx); err != nil {
			log.FromContext(ctx).V(1).Info("node group not brought forward; it is tried again", "cause", err.Error())
		}
	})
}

// run brings the group forward until there is nothing to do, and returns when to look again (zero for not).
func (g *group) run(ctx context.Context) (time.Duration, error) {
	if err := g.acquire(ctx); err != nil {
		return 0, err
	}
	defer func() { <-g.lock }()
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	g.mu.Lock()
	g.kicked = false
	waiting := maps.Clone(g.waiters)
	g.mu.Unlock()

	again, err := g.guardedSteps(ctx)
	unanswered := err
	if unanswered == nil {
		unanswered = ErrConflict // the claim went elsewhere while the run was under way
	}
	for id, waiters := range waiting {
		if err == nil && g.queued[id] {
			continue // the run that finds room for it answers
		}
		g.giveUp(id, waiters, outcome{err: unanswered})
	}
	return again, err
}

// guardedSteps is [group.steps], from which a panic is an error that leaves this group alone for a while. lock is held.
func (g *group) guardedSteps(ctx context.Context) (again time.Duration, err error) {
	if left, err := g.rest(); left > 0 {
		return left, err
	}
	err = recovered(ctx, func() (err error) {
		again, err = g.steps(ctx)
		return err
	})
	if bug, panicked := errors.AsType[*panicError](err); panicked {
		return g.notePanic(bug), err
	}
	g.panics = 0
	return again, err
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

// giveUp answers those of the waiters that have had no answer yet.
func (g *group) giveUp(claimID string, waiters []chan outcome, o outcome) {
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
	for range maxSteps {
		s, err := e.read(ctx, live, g.key)
		if err != nil {
			return 0, err
		}
		if s == nil {
			return g.settleGone(ctx)
		}
		s.spareSince = g.spareSince
		d := e.decide(s)
		g.noteSpare(s, d)
		g.queued = d.queued

		wait := g.coalesce(s, d)
		var refused error
		if d.ledger != nil && wait == 0 {
			err := g.commit(ctx, s, d)
			switch {
			case err == nil:
				conflicts = 0
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
		g.answerFrom(s, d, s.ledger)
		if len(d.actions) == 0 {
			if refused != nil {
				return g.retry(d, 0), refused
			}
			if d.ledger != nil {
				d.wake(wait)
			}
			return d.again, nil
		}
		if g.overtaken(s, &yields) {
			continue
		}
		// Rule R2: the ledger is read again after the objects that the actions change.
		if same, err := e.sameLedger(ctx, s.md); err != nil {
			return 0, err
		} else if !same {
			continue
		}
		progress, err := e.perform(ctx, s, g.batch(d.actions))
		if err != nil {
			g.skip += maxActions
			// What is due at a time of its own is not put off by a write that may fail for ever.
			return g.retry(d, wait), errors.Join(refused, err)
		}
		if refused != nil {
			return g.retry(d, 0), refused
		}
		g.failures = 0
		if !progress {
			// Every write lost its race: the events of the winners' writes bring us back, at the latest this does.
			return time.Second, nil
		}
	}
	return 10 * time.Millisecond, nil
}

// batch returns the actions that come next: as many as one step does, others after some of those before failed.
func (g *group) batch(actions []action) []action {
	if len(actions) <= maxActions {
		return actions
	}
	at := g.skip % len(actions)
	return slices.Concat(actions[at:], actions[:at])[:maxActions]
}

// longestRetry is how long a run is put off at most whose writes fail.
const longestRetry = 30 * time.Second

// retry returns when to look again after a write failed: sooner if something else is due, among it a ledger write that is put off
// for that long (zero: for nothing).
func (g *group) retry(d *decision, wait time.Duration) time.Duration {
	g.failures++
	d.wake(min(time.Second<<min(g.failures-1, 10), longestRetry))
	if d.ledger != nil && wait > 0 {
		d.wake(wait)
	}
	return d.again
}

// overtaken reports whether calls wait whose claims the snapshot does not hold yet: entering them comes before what nobody
// waits for. It says so only a few times in a run, so that a stream of calls does not keep the rest from being done.
func (g *group) overtaken(s *snapshot, yields *int) bool {
	if *yields >= maxYields {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for id := range g.waiters {
		if s.claim(id) == nil {
			*yields++
			return true
		}
	}
	return false
}

// commit writes the ledger and answers the calls whose claims it enters.
func (g *group) commit(ctx context.Context, s *snapshot, d *decision) error {
	if err := g.engine.writeLedger(ctx, s, d); err != nil {
		return err
	}
	g.wanted = time.Time{}
	switch {
	case d.urgent:
	case d.finishes(s.ledger):
		g.lastQuiet, g.unfinished = g.engine.Clock.Now(), 0
	case s.unusable(d.ledger) > 0: // it did not gather
		g.lastQuiet = g.engine.Clock.Now()
	default:
		g.lastQuiet, g.unfinished = g.engine.Clock.Now(), g.unfinished+1
	}
	g.answerFrom(s, d, d.ledger)
	return nil
}

// answerFrom tells the calls that wait what became of their claims.
func (g *group) answerFrom(s *snapshot, d *decision, in *Ledger) {
	for _, c := range s.claims {
		id := c.Spec.ClaimID
		if refusal, refused := d.refused[id]; refused {
			g.answer(id, outcome{refusal: &refusal})
			continue
		}
		if in == nil {
			continue
		}
		if _, entered := in.Pending[id]; entered || c.Status.Machine != nil {
			g.answer(id, outcome{})
		}
	}
}

// slowest is how many times [Config.Coalesce] a ledger write gathers at most.
const slowest = 32

// coalesce returns how long a ledger write that nobody waits for is put off; zero means write now. One that will be followed
// by another gathers the longer, the more such there were before it: each makes Cluster API look at all Machines of the group
// again. But a Machine that has its provider ID is named soon: once its Node has joined, no claim can have it. Where that came about,
// each is named at once.
func (g *group) coalesce(s *snapshot, d *decision) time.Duration {
	clock := g.engine.Clock
	switch {
	case d.ledger == nil:
		g.wanted = time.Time{}
		return 0
	case d.urgent, d.unmet > 0: // at the max size no further Machine is coming that could be named in the same write
		return 0
	case s.unusable(d.ledger) > 0 && s.newlyNamed(d.ledger, false): // Machines join before they are named: none is left to the next write
		return 0
	case g.wanted.IsZero():
		g.wanted = clock.Now()
	}
	if d.finishes(s.ledger) {
		return max(0, g.engine.Coalesce-clock.Since(g.lastQuiet))
	}
	gather := g.engine.Coalesce
	if !s.newlyNamed(d.ledger, true) {
		gather *= time.Duration(min(1<<min(g.unfinished, 16), slowest))
	}
	return max(0, gather-clock.Since(g.wanted))
}

// finishes reports whether no further write of pending entries follows soon: all claims have their Machine's name now, or
// their label. Changes of releases are not put off for it.
func (d *decision) finishes(before *Ledger) bool {
	if before == nil || len(d.ledger.Pending) == 0 || !maps.Equal(d.ledger.Releasing, before.Releasing) {
		return true
	}
	if d.ledger.unnamed() > 0 {
		return false
	}
	for id, named := range d.ledger.Pending {
		if before.Pending[id] != named {
			return true
		}
	}
	return false
}

// newlyNamed reports whether the ledger names a Machine that the snapshot's does not name: any, or one that has its provider ID.
func (s *snapshot) newlyNamed(next *Ledger, ready bool) bool {
	for id, named := range next.Pending {
		m := s.machine(named.UID)
		if m != nil && (!ready || m.Spec.ProviderID != "") && (s.ledger == nil || s.ledger.Pending[id] != named) {
			return true
		}
	}
	return false
}

func (g *group) noteSpare(s *snapshot, d *decision) {
	switch {
	case !d.spare:
		g.spareSince = time.Time{}
	case g.spareSince.IsZero():
		g.spareSince, g.spareSeq = g.engine.Clock.Now(), s.seq()
	}
}

// settleGone ends the claims of a MachineDeployment that no longer exists, and returns when to look again. Cluster API removes
// its Machines.
func (g *group) settleGone(ctx context.Context) (time.Duration, error) {
	e := g.engine
	now := e.Clock.Now()
	md := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{
		Namespace: g.key.Namespace, Name: g.key.Name, DeletionTimestamp: new(metav1.NewTime(now)),
	}}
	s := &snapshot{md: md, now: now}
	if err := e.readParts(ctx, live, g.key, s); err != nil {
		return 0, err
	}
	s.prepare()
	d := &decision{}
	for _, c := range s.claims {
		switch c.CurrentPhase() {
		case v1alpha1.PhasePending:
			g.answer(c.Spec.ClaimID, outcome{refusal: &eligibility.Refusal{
				NodeGroup: g.key.Name, Reason: eligibility.Gone, Message: "the MachineDeployment was deleted",
			}})
			// A call that was just refused moves its claim on; the agent does it for one whose caller is gone.
			if c.Status.Phase == v1alpha1.PhasePending {
				d.end(c, ReasonNodeGroupGone, "its MachineDeployment was deleted")
			} else {
				s.moveOn(d, c, ReasonNodeGroupGone, "its MachineDeployment was deleted")
			}
		case v1alpha1.PhaseBound, v1alpha1.PhaseReleasing:
			var m *clusterv1.Machine
			if c.Status.Machine != nil {
				m = s.machine(c.Status.Machine.UID)
			}
			switch {
			case m == nil || deletionCompleted(m):
				d.end(c, ReasonNodeGroupGone, "its MachineDeployment was deleted, and its Machine with it")
			case c.Status.Phase == v1alpha1.PhaseReleasing && alive(m):
				// The Machine was left behind (deleted with cascade=orphan). There are no replicas to give back.
				d.actions = append(d.actions, action{kind: hold, machine: m, release: Release{Drained: c.Status.Drained}})
			}
		case v1alpha1.PhaseEnded:
		}
	}
	s.actOnMachines(d)
	for _, set := range s.sets { // left behind as well
		if set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {
			d.actions = append(d.actions, action{kind: unpauseMachineSet, set: set})
		}
	}
	_, err := e.perform(ctx, s, d.actions)
	return d.again, err
}

// view says where a snapshot is read from.
type view int

const (
	// cached is quick and may lag behind: good for finding out whether there is something to do, and for nothing else.
	cached view = iota
	// live is the API server's own, consistent word.
	live
)

func (e *Engine) reader(from view) client.Reader {
	if from == cached {
		return e.Client
	}
	return e.Reader
}

// read takes a snapshot from the given view: the MachineDeployment first, then the rest (rule R1). It returns nil when
// the MachineDeployment does not exist.
func (e *Engine) read(ctx context.Context, from view, key types.NamespacedName) (*snapshot, error) {
	var md clusterv1.MachineDeployment
	if err := e.reader(from).Get(ctx, key, &md); apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	cluster, err := e.cluster(ctx, key.Namespace, md.Spec.ClusterName)
	if err != nil {
		return nil, err
	}
	s := &snapshot{
		md:           &md,
		group:        eligibility.Of(&md, cluster),
		now:          e.Clock.Now(),
		unregistered: e.unregisteredIn(key.Namespace, md.Spec.ClusterName),
		spareGrace:   e.SpareGrace,
		failure:      e.Failure,
		started:      e.started,
		ledgerBudget: e.ledgerBudget,
	}
	if s.ledger, err = ledgerOf(&md); errors.Is(err, ErrNewerLedger) {
		return nil, fmt.Errorf("MachineDeployment %s: %w", key, err)
	} else if err != nil {
		// Edited by hand into something else, or copied with a MachineDeployment: rebuilt, like one that was wiped.
		log.FromContext(ctx).Error(err, "the ledger cannot be used; it is rebuilt", "machineDeployment", key)
		s.ledger = nil
	}
	if err := e.readParts(ctx, from, key, s); err != nil {
		return nil, err
	}
	if s.madeAgain() {
		log.FromContext(ctx).Info("the MachineDeployment was made again with the ledger of the one before it; it is rebuilt", "machineDeployment", key)
		s.ledger = nil
	}
	cooling, err := e.CoolingDown(ctx, key)
	if err != nil {
		return nil, err
	}
	s.group = s.group.With(cooling)
	return s, nil
}

func (e *Engine) readParts(ctx context.Context, from view, key types.NamespacedName, s *snapshot) error {
	options := []client.ListOption{client.InNamespace(key.Namespace), e.inGroup(from, v1alpha1.NodeGroupLabel, key.Name)}
	if from == live {
		options = e.liveOnly(options)
	}
	var claims v1alpha1.MachineClaimList
	if err := e.reader(from).List(ctx, &claims, options...); err != nil {
		return fmt.Errorf("listing claims: %w", err)
	}
	for i := range claims.Items {
		c := &claims.Items[i]
		switch {
		case c.Spec.NodeGroup != key.Name, c.CurrentPhase() == v1alpha1.PhaseEnded:
		case s.md.Spec.ClusterName != "" && c.Spec.ClusterName != s.md.Spec.ClusterName:
			s.foreign = append(s.foreign, c) // the name was used before, for another Cluster
		default:
			s.claims = append(s.claims, c)
		}
	}
	selector := e.inGroup(from, clusterv1.MachineDeploymentNameLabel, key.Name)
	// Before the Machines: what a paused MachineSet has made is seen then. Also without a ledger: a pause of ours may outlive it.
	var sets clusterv1.MachineSetList
	if err := e.reader(from).List(ctx, &sets, client.InNamespace(key.Namespace), selector); err != nil {
		return fmt.Errorf("listing MachineSets: %w", err)
	}
	ofAnother := func(clusterName string) bool { // which had this MachineDeployment's name before
		return s.md.Spec.ClusterName != "" && clusterName != s.md.Spec.ClusterName
	}
	for i := range sets.Items {
		if !ofAnother(sets.Items[i].Spec.ClusterName) {
			s.sets = append(s.sets, &sets.Items[i])
		}
	}
	var machines clusterv1.MachineList
	if err := e.reader(from).List(ctx, &machines, client.InNamespace(key.Namespace), selector); err != nil {
		return fmt.Errorf("listing Machines: %w", err)
	}
	for i := range machines.Items {
		if !ofAnother(machines.Items[i].Spec.ClusterName) {
			s.machines = append(s.machines, &machines.Items[i])
		}
	}
	return e.readStrays(ctx, key, s)
}

// inGroup selects what belongs to a node group: from the caches by index, from the API server by label.
func (e *Engine) inGroup(from view, label, name string) client.ListOption {
	if e.Index != "" && from == cached {
		return client.MatchingFields{e.Index: name}
	}
	return client.MatchingLabels{label: name}
}

// readStrays looks at what the lists leave out, before anything is concluded from its absence (rule R3): claims that Machines
// are labelled with and that have ended or belong to another group, and Machines of claims that left the group.
func (e *Engine) readStrays(ctx context.Context, key types.NamespacedName, s *snapshot) error {
	known := make(map[string]bool, len(s.claims))
	for _, c := range s.claims {
		known[c.Spec.ClaimID] = true
	}
	for _, m := range s.machines {
		id := claimOf(m)
		if id == "" || known[id] {
			continue
		}
		c, err := e.claimNamed(ctx, Key{Namespace: key.Namespace, Cluster: m.Spec.ClusterName, ID: id})
		switch {
		case errors.Is(err, ErrNotFound):
			if s.lost == nil {
				s.lost = map[string]*clusterv1.Machine{}
			}
			s.lost[id] = m
		case err != nil:
			return err
		case c.Spec.NodeGroup == key.Name || c.CurrentPhase() == v1alpha1.PhaseEnded:
			s.claims = append(s.claims, c) // its label was edited, or it is only remembered
			known[id] = true
		}
	}
	if s.ledger != nil {
		for id := range s.ledger.Pending {
			if known[id] {
				continue
			}
			c, err := e.claimNamed(ctx, Key{Namespace: key.Namespace, Cluster: s.md.Spec.ClusterName, ID: id})
			if err == nil && c.Spec.NodeGroup == key.Name && c.CurrentPhase() != v1alpha1.PhaseEnded {
				s.claims = append(s.claims, c) // its label was edited
			} else if err != nil && !errors.Is(err, ErrNotFound) {
				return err
			}
		}
	}
	var err error
	if s.machines, err = e.readUnlisted(ctx, key, s.claims, s.machines); err != nil {
		return err
	}
	s.strays, err = e.readUnlisted(ctx, key, s.foreign, nil)
	return err
}

// readUnlisted adds to the listed Machines those that claims say they have.
func (e *Engine) readUnlisted(
	ctx context.Context, key types.NamespacedName, claims []*v1alpha1.MachineClaim, listed []*clusterv1.Machine,
) ([]*clusterv1.Machine, error) {
	known := make(map[types.UID]bool, len(listed))
	for _, m := range listed {
		known[m.UID] = true
	}
	for _, c := range claims {
		ref := c.Status.Machine
		if ref == nil || c.Status.Phase == v1alpha1.PhaseEnded || known[ref.UID] {
			continue
		}
		var m clusterv1.Machine
		err := e.Reader.Get(ctx, types.NamespacedName{Namespace: key.Namespace, Name: ref.Name}, &m)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("reading Machine %s: %w", ref.Name, err)
		}
		if err == nil && m.UID == ref.UID {
			listed = append(listed, &m)
		}
	}
	return listed, nil
}

// claimNamed returns a claim: from the cache where it has ended there, as that is for good, else as the API server has it.
func (e *Engine) claimNamed(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	var c v1alpha1.MachineClaim
	if err := e.Client.Get(ctx, key.object(), &c); err == nil && c.Status.Phase == v1alpha1.PhaseEnded {
		return &c, nil
	}
	return e.stored(ctx, key)
}

// sameLedger asks the API server whether the MachineDeployment still is the one that was read, with the ledger that was read; none is
// a ledger as well.
func (e *Engine) sameLedger(ctx context.Context, read *clusterv1.MachineDeployment) (bool, error) {
	var md clusterv1.MachineDeployment
	if err := e.Reader.Get(ctx, client.ObjectKeyFromObject(read), &md); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("reading the ledger: %w", err)
	} else if err == nil && md.UID != read.UID {
		return false, nil
	}
	return md.Annotations[v1alpha1.LedgerAnnotation] == read.Annotations[v1alpha1.LedgerAnnotation], nil
}

func compareNames(a, b string) int { return cmp.Compare(a, b) }

func splitUIDs(text string) []types.UID {
	var uids []types.UID
	for part := range strings.SplitSeq(text, ",") {
		if part != "" {
			uids = append(uids, types.UID(part))
		}
	}
	return uids
}

func joinUIDs(uids []types.UID) string {
	parts := make([]string, 0, len(uids))
	for _, uid := range uids {
		parts = append(parts, string(uid))
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}
