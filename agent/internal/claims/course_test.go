package claims

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// course is a history without randomness: a script, two agents that act on events or at times that
// they asked for, and one trouble. The caches follow the hub at once, event by event, unless the
// trouble is that they do not.
type course struct {
	*world
	trouble   trouble
	followers []*follower
	// ticks bounds how long an expected result may take.
	ticks int
	// given is the number of revisions at the start.
	given int
	// acts are all acts so far. writes holds the index of its act for each write of an agent.
	acts   []act
	writes []int
	// troubled are the acts before the trouble was over.
	troubled []act
	// trusting makes agents read from their caches only, and never from the API server.
	trusting bool
	// idle is the number of ticks in a row that changed nothing in the hub.
	idle int
	// met means that the trouble has occurred.
	met bool
	// patience is how often the caches may still be listed again when nothing happens, because of a
	// trouble that no agent can detect.
	patience int
}

// act is one call or reconciliation of an agent.
type act struct {
	agent int
	// known is the number of revisions that the hub had made before it.
	known int
}

// follower is the state of one agent's caches.
type follower struct {
	read   int           // revisions of the hub's history that they have received
	behind map[kind]bool // kinds that they receive nothing about
	dirty  bool          // an event requests a reconcile
	due    time.Time     // when the agent asked to be called again; zero means never
}

// trouble is the one thing that goes wrong in a course. The zero value is nothing.
type trouble struct {
	// fault is what happens to a write, counted from 1. A late write arrives before the act with
	// that number, counted from 0.
	fault        fault
	write, lands int

	// past makes the agent of an act restart with caches of these kinds as the hub was after so
	// many revisions. They stay so for the rest of the course or, with once, until its next act.
	// Kinds that are not in past are up to date.
	past     []kind
	act, was int
	once     bool
	// running does not restart the process: its caches stay behind from now on.
	running bool

	// hidden is the number, counted from 1, of a revision that these agents' caches never receive.
	// They see the object again with its next revision.
	hidden int
	blind  []int
}

func (t trouble) String() string {
	switch {
	case t.write > 0:
		return fmt.Sprintf("write %d: %s (lands before act %d)", t.write, t.fault, t.lands)
	case t.hidden > 0:
		return fmt.Sprintf("revision %d is hidden from agents %v", t.hidden, t.blind)
	case len(t.past) > 0:
		return fmt.Sprintf("act %d: the agent's caches of %v are as after revision %d (once: %t, still running: %t)",
			t.act, t.past, t.was, t.once, t.running)
	}
	return "no trouble"
}

const (
	// mostTicks is how many ticks an expected result may take.
	mostTicks = 600
	// stuckAfter is how long an expected result may take, in the course's own time.
	stuckAfter = 20 * time.Minute
	// restsFor is how long nothing may change before a course is at rest. It is longer than every
	// grace period.
	restsFor = protocol.AbandonedAfter + 90*time.Second
)

func newCourse(t failer, o worldOptions, trouble trouble) *course {
	c := &course{world: newFairWorld(t, o), trouble: trouble, ticks: mostTicks}
	c.hub.recorded = true
	for _, k := range allKinds {
		for _, o := range c.hub.objects[k] {
			c.hub.record(revision{kind: k, name: o.GetName(), after: o})
		}
	}
	c.given = len(c.hub.history)
	c.chosen = c.fate
	for e := range c.agents {
		c.agents[e] = c.newProcess(e)
		c.followers = append(c.followers, &follower{})
		c.relist(e)
	}
	if len(trouble.blind) == len(c.agents) {
		c.patience = 1
	}
	return c
}

// fate returns what happens to the write that an agent is about to make.
func (c *course) fate() fault {
	c.writes = append(c.writes, len(c.acts)-1)
	if len(c.writes) != c.trouble.write {
		return none
	}
	c.met = true
	return c.trouble.fault
}

// relist gives an agent's caches all present objects.
func (c *course) relist(e int) {
	for _, k := range allKinds {
		c.agents[e].caches[k] = c.hub.snapshot(k)
	}
	*c.followers[e] = follower{read: len(c.hub.history), dirty: true}
}

// tell brings an agent's caches up to date, as far as the trouble allows.
func (c *course) tell(e int) {
	f := c.followers[e]
	for ; f.read < len(c.hub.history); f.read++ {
		r := c.hub.history[f.read]
		if f.behind[r.kind] {
			continue
		}
		if f.read+1 == c.trouble.hidden && slices.Contains(c.trouble.blind, e) {
			c.met = true
			continue
		}
		r.apply(c.agents[e].caches)
		f.dirty = f.dirty || r.kind != clusters // Clusters cause no events
	}
}

// at returns the hub's objects of a kind as they were after so many revisions.
func (c *course) at(k kind, revisions int) objects {
	cache := map[kind]objects{k: {}}
	for _, r := range c.hub.history[:revisions] {
		if r.kind == k {
			r.apply(cache)
		}
	}
	return cache[k]
}

// do makes an agent act.
func (c *course) do(e int, what func()) {
	n := len(c.acts)
	if c.trouble.write > 0 && len(c.late) > 0 && n >= c.trouble.lands {
		c.landOne()
		c.tell(e)
	}
	if f := c.followers[e]; c.trouble.once && f.behind != nil {
		c.relist(e)
	}
	if len(c.trouble.past) > 0 && n == c.trouble.act {
		c.goBack(e)
	}
	c.acts = append(c.acts, act{agent: e, known: len(c.hub.history)})
	c.events++
	process := c.agents[e]
	what()
	if c.agents[e] != process { // it was killed
		c.relist(e)
	}
	for e := range c.agents {
		c.tell(e)
	}
}

func (c *course) restarted() *process {
	p := c.newProcess(0)
	if c.trusting {
		p.engine.Reader = p.engine.Client
	}
	return p
}

// goBack gives the agent caches of the past.
func (c *course) goBack(e int) {
	c.met = true
	f := c.followers[e]
	if !c.trouble.running {
		c.agents[e] = c.restarted()
		*f = follower{read: len(c.hub.history), dirty: true}
	}
	f.behind = map[kind]bool{}
	for _, k := range c.trouble.past {
		f.behind[k] = true
		c.agents[e].caches[k] = c.at(k, c.trouble.was)
	}
}

// tick does everything that is due once, and advances the time.
func (c *course) tick() {
	before, acted := c.hub.version, false
	for e, f := range c.followers {
		c.tell(e)
		if !f.dirty && (f.due.IsZero() || c.clock.Now().Before(f.due)) {
			continue
		}
		f.dirty, f.due, acted = false, time.Time{}, true
		c.do(e, func() { c.reconcileAs(e) })
	}
	if c.idle < 3 { // agents keep state themselves, so once is not enough
		c.controllers(c.groups[0])
	}
	c.idle++
	if c.hub.version != before {
		c.idle = 0
	}
	step := 100 * time.Millisecond
	if !acted && c.hub.version == before {
		step = time.Minute
		for _, f := range c.followers {
			if !f.due.IsZero() {
				step = min(step, f.due.Sub(c.clock.Now()))
			}
		}
	}
	c.clock.Step(max(step, 100*time.Millisecond))
}

func (c *course) reconcileAs(e int) {
	f := c.followers[e]
	c.asAgent(e, func(ctx context.Context, agent *Engine) error {
		result, err := agent.Reconcile(ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: c.groups[0]}})
		switch {
		case err != nil:
			f.due = c.clock.Now().Add(time.Second)
		case result.RequeueAfter > 0:
			f.due = c.clock.Now().Add(result.RequeueAfter)
		}
		return err
	})
}

// --- what scripts are made of ---

// claim makes a holder call an agent for a Machine, and the other agent if that fails, until it has
// an answer.
func (c *course) claim(id string, e int, adopt string) {
	c.order = append(c.order, id)
	c.owners[id] = &owner{candidates: c.groups, adopt: adopt, alive: true, born: c.clock.Now()}
	c.repeat("claim "+id+" is made", e, func(e int) bool {
		c.createFrom(e, id, c.groups, spoke)
		return c.owners[id].made
	})
}

// releaseClaim makes a holder release a claim in the same way.
func (c *course) releaseClaim(id string, e int) {
	c.repeat("claim "+id+" is released", e, func(e int) bool {
		c.release(e, id)
		return c.owners[id].released
	})
}

// leave makes a holder return the claim's Machine to the user. The call may have succeeded even if
// its answer is lost.
func (c *course) leave(id string, e int) {
	c.repeat("claim "+id+" returns its Machine", e, func(e int) bool {
		c.returnMachine(e, id)
		claim := c.claims()[id]
		return claim != nil && (claim.Status.Returned || claim.CurrentPhase() == v1alpha1.PhaseEnded)
	})
}

func (c *course) repeat(what string, e int, call func(e int) bool) {
	for range 20 {
		done := false
		c.do(e, func() { done = call(e) })
		if done {
			return
		}
		c.tick()
		e = (e + 1) % len(c.agents)
	}
	c.t.Fatalf("no agent answers: %s\n%s", what, c.describe())
}

// until ticks until the condition holds.
func (c *course) until(what string, is func() bool) {
	began := c.clock.Now()
	for range c.ticks {
		if is() {
			return
		}
		if c.clock.Since(began) > stuckAfter {
			break
		}
		c.tick()
	}
	if c.patience > 0 {
		c.patience--
		for e := range c.agents {
			c.relist(e)
		}
		c.until(what, is)
		return
	}
	c.t.Fatalf("I4: stuck before: %s\n%s", what, c.describe())
}

// rests ticks until nothing changes any more.
func (c *course) rests() {
	version, since := c.hub.version, c.clock.Now()
	c.until("everything is at rest", func() bool {
		if c.hub.version != version {
			version, since = c.hub.version, c.clock.Now()
		}
		return c.clock.Since(since) > restsFor
	})
}

// machineOf returns the claim's Machine, nil when none carries its label.
func (c *course) machineOf(id string) *clusterv1.Machine {
	for _, m := range c.machines(c.groups[0]) {
		if protocol.ClaimOf(m) == id {
			return m
		}
	}
	return nil
}

func (c *course) untilJoined(id string) {
	c.until("claim "+id+" has its Node", func() bool {
		m := c.machineOf(id)
		return m != nil && protocol.HasNode(m)
	})
}

// untilPromised waits until the claim has a Machine; hold keeps such Machines from joining.
func (c *course) untilPromised(id string) {
	c.until("claim "+id+" has its Machine", func() bool { return c.machineOf(id) != nil })
}

func (c *course) untilEnded(id string) {
	c.until("claim "+id+" has ended", func() bool {
		claim := c.claims()[id]
		return claim != nil && claim.CurrentPhase() == v1alpha1.PhaseEnded
	})
}

// hold keeps claimed Machines from getting a Node, or stops doing so.
func (c *course) hold(held bool) {
	c.slow = nil
	if held {
		c.slow = func(m *clusterv1.Machine) bool { return m.Spec.ProviderID != "" }
	}
	c.idle = 0
}

// finish brings everything to rest, first with the trouble and then without it, and checks what
// must hold then.
func (c *course) finish() {
	c.rests()
	if len(c.late) > 0 {
		c.landOne()
		c.rests()
	}
	if len(c.trouble.blind) == len(c.agents) { // neither knows what has to be done
		for e := range c.agents {
			c.relist(e)
		}
		c.rests()
	}
	c.checkRest()
	c.troubled = c.acts
	if c.trouble.fault != "" {
		return
	}
	c.trouble = trouble{}
	for e := range c.agents {
		c.relist(e)
	}
	c.rests()
	c.checkRest()
}

func rolling(floor int32) worldOptions {
	return worldOptions{groups: 1, floor: floor, strategy: clusterv1.RollingUpdateMachineDeploymentStrategyType}
}

func onDelete(floor int32) worldOptions {
	return worldOptions{groups: 1, floor: floor, strategy: clusterv1.OnDeleteMachineDeploymentStrategyType}
}

// scripts are the courses. Each goes through different writes.
var scripts = []struct {
	name  string
	world worldOptions
	run   func(*course)
}{
	{"a claim is made, bound and released", rolling(1), func(c *course) {
		c.claim("c0", 0, "")
		c.untilJoined("c0")
		c.releaseClaim("c0", 1)
		c.untilEnded("c0")
	}},
	{"a Machine is handed over", rolling(0), func(c *course) {
		c.hold(true)
		c.claim("c0", 0, "")
		c.untilPromised("c0")
		c.releaseClaim("c0", 1)
		c.claim("c1", 1, "")
		c.untilPromised("c1")
		c.hold(false)
		c.untilJoined("c1")
		c.releaseClaim("c1", 0)
		c.untilEnded("c1")
	}},
	{"a spare is given back", rolling(1), func(c *course) {
		c.hold(true)
		c.claim("c0", 1, "")
		c.untilPromised("c0")
		c.releaseClaim("c0", 0)
		c.untilEnded("c0")
		c.rests()
		c.hold(false)
	}},
	{"a release beside an old MachineSet", onDelete(1), func(c *course) {
		c.claim("c0", 0, "")
		c.untilJoined("c0")
		c.rollout(c.groups[0])
		c.claim("c1", 1, "")
		c.untilJoined("c1")
		c.releaseClaim("c0", 1)
		c.untilEnded("c0")
		c.releaseClaim("c1", 0)
		c.untilEnded("c1")
	}},
	{"another actor deletes a claim's Machine", rolling(1), func(c *course) {
		c.claim("c0", 0, "")
		c.claim("c1", 1, "")
		c.untilJoined("c0")
		c.untilJoined("c1")
		c.outsider(c.machineOf("c0"))
		c.untilEnded("c0")
		c.outsider(c.machineOf("c1"))
		c.releaseClaim("c1", 0)
		c.untilEnded("c1")
	}},
	{"a Machine is adopted", rolling(2), func(c *course) {
		joined := func() bool {
			machines := c.machines(c.groups[0])
			return len(machines) == 2 && !slices.ContainsFunc(machines, func(m *clusterv1.Machine) bool { return !protocol.HasNode(m) })
		}
		c.until("the user's Machines have joined", joined)
		c.peaceful = false
		c.claim("c0", 0, c.machines(c.groups[0])[0].Name)
		c.untilJoined("c0")
		c.releaseClaim("c0", 1)
		c.untilEnded("c0")
	}},
	{"a Machine is returned", rolling(1), func(c *course) {
		c.claim("c0", 0, "")
		c.untilJoined("c0")
		c.leave("c0", 1)
		c.untilEnded("c0")
	}},
}

// wrong is the failure of a course.
type wrong struct{ text string }

// noting turns a failure in a course into the panic that ends it.
type noting struct{}

func (noting) Fatalf(format string, args ...any) { panic(wrong{fmt.Sprintf(format, args...)}) }

// play runs a script with a trouble. It returns the violation, "" for none.
func play(o worldOptions, run func(*course), t trouble, change func(*course)) (c *course, violation string) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case wrong:
			violation = r.text
		default:
			panic(r)
		}
	}()
	c = newCourse(noting{}, o, t)
	if change != nil {
		change(c)
	}
	run(c)
	c.finish()
	return c, ""
}
