package engine

import "github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"

type emitter func(next *State, what, x, y int, violation string)

// controllers emits the moves of Cluster API and the infrastructure for one group.
func (p *Protocol) controllers(s *State, g int, emit explore.Emit[State]) {
	move := func(next *State, what, x, y int, violation string) {
		emit(next, act(environment, g, what, x, y), violation)
	}
	p.deployment(s, g, move)
	for i := range maxSets {
		if s.groups[g].sets[i].exists != 0 {
			p.machineSet(s, g, i, move)
		}
	}
	for i := range p.machines() {
		p.machine(s, g, i, move)
	}
}

// deployment performs one reconcile of the MachineDeployment.
func (p *Protocol) deployment(s *State, g int, move emitter) {
	at := &s.groups[g]
	if paused := b(at.md.paused != notPaused); paused != at.md.isPaused {
		next := *s
		next.groups[g].md.isPaused = paused
		move(&next, deploymentPaused, int(paused), 0, "")
		return
	} else if paused != 0 {
		return
	}
	newest := int(at.md.template)
	if at.sets[newest].exists == 0 {
		next := *s
		next.groups[g].sets[newest] = machineSet{exists: 1, observed: 1}
		move(&next, setMade, newest, 0, "")
		return
	}
	plan := p.planOf(s, g)
	if p.RollingUpdate {
		p.scale(s, g, plan.rollingUpdate(), move)
	} else {
		p.scale(s, g, plan.onDelete(), move)
	}
}

// scale applies the writes of a reconcile of the MachineDeployment, which overwrite the current
// values.
func (p *Protocol) scale(s *State, g int, to [maxSets]int, move emitter) {
	next := *s
	at := &next.groups[g]
	changed, x := false, int(at.md.template)
	for i := range to {
		set := &at.sets[i]
		if set.exists != 0 && int(set.replicas) != to[i] {
			set.replicas, set.observed, set.foreign = uint8(to[i]), 0, 0
			changed, x = true, i
		}
	}
	observes := at.md.observed == 0 || at.md.carried != at.ledger.decremented
	at.md.observed, at.md.carried = 1, at.ledger.decremented
	switch {
	case changed:
		move(&next, deploymentScales, x, to[x], "")
	case observes:
		move(&next, deploymentObserves, 0, 0, "")
	}
}

// eager emits additional moves of the MachineDeployment, which may see an old state of its
// MachineSets: a rollout removes any Machine of an old template, whether or not the new ones are
// available.
func (p *Protocol) eager(s *State, g int, emit explore.Emit[State]) {
	at := &s.groups[g]
	plan := p.planOf(s, g)
	if !p.RollingUpdate || at.md.paused != notPaused || at.md.isPaused != 0 || at.sets[plan.newest].exists == 0 ||
		sum(plan.spec) <= plan.replicas || plan.spec[plan.newest] > plan.replicas {
		return
	}
	for i, n := range plan.spec {
		if i != plan.newest && n > 0 {
			to := plan.spec
			to[i]--
			p.scale(s, g, to, func(next *State, what, x, y int, violation string) {
				emit(next, act(environment, g, what, x, y), violation)
			})
		}
	}
}

// seenOf returns the number of Machines of a MachineSet in Cluster API's cache. A paused MachineSet
// does not update it.
func (at *group) seenOf(set int) int {
	if at.sets[set].isPaused != 0 {
		return int(at.sets[set].counted)
	}
	n := 0
	for i, m := range at.seen {
		if int(at.machines[i].set) == set && m.phase >= fresh && m.phase <= held {
			n++
		}
	}
	return n
}

// machineSet performs one step of a MachineSet's controller.
func (p *Protocol) machineSet(s *State, g, i int, move emitter) {
	at := &s.groups[g]
	set := at.sets[i]
	if set.saw != set.replicas || set.observed == 0 && set.isPaused == 0 || set.foreign != 0 {
		next := *s
		to := &next.groups[g].sets[i]
		to.saw, to.foreign = set.replicas, 0
		if set.isPaused == 0 { // a paused one does not update its status
			to.observed = 1
		}
		move(&next, setObserves, i, int(set.replicas), "")
	}
	if paused := b(set.paused != notPaused); paused != set.isPaused {
		next := *s
		to := &next.groups[g].sets[i]
		to.counted = 0
		if paused != 0 {
			to.counted = uint8(at.seenOf(i))
		}
		to.isPaused = paused
		to.saw, to.foreign = set.replicas, 0 // fields of the same object: they are seen together
		move(&next, setPaused, i, int(paused), "")
	}
	if set.isPaused != 0 {
		return
	}
	total, going := 0, 0
	for j, m := range at.seen {
		if int(at.machines[j].set) == i && m.phase >= fresh && m.phase <= held {
			total++
			if m.phase > joined {
				going++
			}
		}
	}
	creates := p.RollingUpdate || i == int(at.md.template)
	if total < int(set.saw) && creates && at.blocked == 0 {
		for j := range p.machines() {
			if at.machines[j].phase != absent {
				continue
			}
			next := *s
			next.groups[g].machines[j] = machine{phase: fresh, set: uint8(i)}
			next.groups[g].seen[j] = seenMachine{phase: fresh}
			move(&next, setCreates, i, j, "")
			break
		}
	}
	if total-int(set.saw) > going && total > going {
		p.victims(s, g, i, move)
	}
}

// victims emits the deletion of every Machine that a MachineSet may delete, by priority.
func (p *Protocol) victims(s *State, g, set int, move emitter) {
	at := &s.groups[g]
	priority := func(j int) int {
		m := at.seen[j]
		switch {
		case int(at.machines[j].set) != set || m.phase != fresh && m.phase != joined:
			return 0
		case m.flags&(finalized|marked) != 0: // with the delete annotation
			return 3
		case m.phase == fresh:
			return 2
		}
		return 1
	}
	best := 0
	for j := range at.seen {
		best = max(best, priority(j))
	}
	for j := range at.seen {
		if best == 0 || priority(j) != best {
			continue
		}
		next := *s
		to := &next.groups[g]
		violation := ""
		if at.machines[j].alive() {
			to.machines[j].phase = deleting
			switch {
			case at.ledger.releasing&bit(j) != 0:
			case p.RollingUpdate && set != int(at.md.template):
			case at.mercy > 0:
				to.mercy--
			default:
				violation = "I3 a MachineSet deletes a Machine that was not released"
			}
		}
		to.seen[j].phase = deleting
		move(&next, setDeletes, set, j, violation)
	}
}

// machine performs one step of the Machine's controller, its infrastructure, and Cluster API's
// cache.
func (p *Protocol) machine(s *State, g, i int, move emitter) {
	at := &s.groups[g]
	m := at.machines[i]
	if m.phase == absent {
		return
	}
	want := seenMachine{phase: m.phase, flags: m.flags & (finalized | marked)}
	if at.seen[i] != want {
		next := *s
		next.groups[g].seen[i] = want
		move(&next, setSees, i, 0, "")
	}
	if !m.exists() {
		return
	}
	to := func(phase phase, what int) {
		next := *s
		x := &next.groups[g].machines[i]
		x.phase = phase
		if phase == gone {
			x.flags, x.label = 0, 0
		}
		move(&next, what, i, 0, "")
	}
	if m.alive() && (m.set != at.md.template) != m.has(outdated) && p.Rollouts > 0 {
		next := *s
		next.groups[g].machines[i].flags ^= outdated
		move(&next, machineOutdated, i, 0, "")
	}
	last := held
	if !m.has(finalized) {
		last = gone
	}
	switch known := at.seen[i].phase >= deleting; {
	case m.phase == fresh:
		to(joined, nodeJoins)
	case m.phase == deleting && known:
		to(last, tornDown)
	}
}

// outside emits the moves of callers, users and failures.
func (p *Protocol) outside(s *State, emit explore.Emit[State]) {
	move := func(next *State, g, what, x, y int) { emit(next, act(environment, g, what, x, y), "") }
	p.calls(s, move)
	for g := range p.Groups {
		p.eager(s, g, emit)
		at := &s.groups[g]
		if s.left.outsiders > 0 {
			for i, m := range at.machines {
				if m.alive() {
					next := *s
					next.groups[g].machines[i].phase = deleting
					next.left.outsiders--
					move(&next, g, outsiderDeletes, i, 0)
				}
			}
		}
		if s.left.raises > 0 {
			next := *s
			to := &next.groups[g]
			to.md.replicas++
			to.owned++
			to.peak = max(to.peak, to.md.replicas)
			to.md.observed = 0
			next.left.raises--
			move(&next, g, humanRaises, int(to.md.replicas), 0)
		}
		if s.left.lowers > 0 && at.owned > 0 && at.md.replicas > 0 && int(at.md.replicas) > s.claimed(g) {
			next := *s
			to := &next.groups[g]
			to.md.replicas--
			to.owned--
			to.mercy++
			to.md.observed = 0
			next.left.lowers--
			move(&next, g, humanLowers, int(to.md.replicas), 0)
		}
		if s.left.rollouts > 0 && int(at.md.template) < maxSets-1 {
			next := *s
			next.groups[g].md.template++
			next.groups[g].md.observed = 0
			next.left.rollouts--
			move(&next, g, humanRollsOut, int(at.md.template)+1, 0)
		}
		if s.left.wipes > 0 && at.ledger.present != 0 {
			next := *s
			next.groups[g].ledger = ledger{}
			next.groups[g].md.carried = 0
			next.left.wipes--
			move(&next, g, userWipes, 0, 0)
		}
		if at.md.frozen != 0 {
			next := *s
			next.groups[g].md.frozen = 0
			move(&next, g, humanThaws, 0, 0)
		}
		switch {
		case at.md.paused == byHuman:
			next := *s
			next.groups[g].md.paused = notPaused
			move(&next, g, humanUnpauses, 0, 0)
		case s.left.pauses > 0 && at.md.paused == notPaused:
			next := *s
			next.groups[g].md.paused = byHuman
			next.left.pauses--
			move(&next, g, humanPauses, 0, 0)
		}
		p.resize(s, g, move)
		switch {
		case at.blocked != 0 && !p.BlockedForGood:
			next := *s
			next.groups[g].blocked = 0
			move(&next, g, somethingUnblocks, 0, 0)
		case s.left.blocks > 0 && at.blocked == 0:
			next := *s
			next.groups[g].blocked = 1
			next.left.blocks--
			move(&next, g, somethingBlocks, 0, 0)
		}
	}
}

// resize emits users' changes of the sizes.
func (p *Protocol) resize(s *State, g int, move func(next *State, g, what, x, y int)) {
	md := &s.groups[g].md
	set := func(largest, smallest, left uint8) {
		if largest == md.max && smallest == md.min {
			return
		}
		next := *s
		to := &next.groups[g].md
		to.max, to.min, next.left.sizes = largest, smallest, left
		move(&next, g, humanSetsSizes, int(largest), int(smallest))
	}
	set(uint8(p.Max), 0, s.left.sizes)
	if s.left.sizes == 0 {
		return
	}
	left := s.left.sizes - 1
	set(unreadable, md.min, left)
	set(uint8(p.Max)+1, md.min, left)
	if p.Max > 0 {
		set(uint8(p.Max)-1, md.min, left)
	}
	set(md.max, unreadable, left)
	set(md.max, uint8(p.Floor)+1, left)
}

// calls emits CreateClaim and ReleaseClaim, and what a call does after a group refused its claim.
func (p *Protocol) calls(s *State, move func(next *State, g, what, x, y int)) {
	for c := range p.Claims {
		x := s.claims[c]
		switch {
		case x.phase == unmade && s.used&bit(c) == 0 && (c == 0 || s.used&bit(c-1) != 0):
			// Claims are distinguished by age: the lower number is the older one.
			p.make(s, c, createClaim, move)
			if p.Repeat && s.asked&bit(c) == 0 {
				next := *s
				next.asked |= bit(c)
				if !p.without(Tombstone) {
					next.claims[c].phase = ended
				}
				move(&next, 0, makeTombstone, c, 0)
			}
		case x.phase == unmade && s.repeat&bit(c) != 0:
			p.make(s, c, repeatCreate, move)
		case x.live() && x.returns == 0: // after a return, a release has no effect
			next := *s
			next.claims[c].phase = releasing
			next.asked |= bit(c)
			next.refused[c] = 0
			move(&next, int(x.group), releaseClaim, c, 0)
			if p.Return && x.phase == bound && x.returns == 0 {
				next := *s
				next.claims[c].returns = 1
				move(&next, int(x.group), returnMachine, c, 0)
			}
		}
		if x.phase == ended && s.used&bit(c) == 0 && (c == 0 || s.used&bit(c-1) != 0) { // the call finds the tombstone
			next := *s
			next.used |= bit(c)
			move(&next, 0, createClaim, c, 0)
		}
		if s.repeat&bit(c) != 0 && x.phase != unmade { // the call finds the claim, or was lost on the way
			next := *s
			next.repeat &^= bit(c)
			move(&next, 0, repeatCreate, c, 0)
		}
		if p.Forget && x.phase == ended && (s.used&bit(c) != 0 && s.repeat&bit(c) == 0 || p.without(LateForget)) && !s.carries(c) {
			next := *s
			next.claims[c] = claim{}
			move(&next, 0, forgetClaim, c, 0)
		}
		g := int(x.group)
		if x.phase == made && s.refused[c]&bit(g) != 0 {
			next := *s
			next.claims[c].phase = ended
			next.refused[c] = 0
			move(&next, g, callEnds, c, 0)
			if g+1 < p.Groups {
				next := *s
				next.claims[c].group++
				next.refused[c] &^= bit(g)
				move(&next, g+1, callMoves, c, 0)
			}
		}
	}
}

// claimed returns the number of claims for which the group has a replica.
func (s *State) claimed(g int) int {
	n := 0
	for c, x := range s.claims {
		if int(x.group) == g && s.given&bit(c) == 0 && (x.phase == bound || x.live() && s.groups[g].ledger.pending[c] != noEntry) {
			n++
		}
	}
	return n
}

// carries reports whether a Machine has the claim's label.
func (s *State) carries(c int) bool {
	for g := range s.groups {
		for _, m := range s.groups[g].machines {
			if m.exists() && int(m.label) == c+1 {
				return true
			}
		}
	}
	return false
}

// make is a CreateClaim that finds no claim. Any of the candidates may appear to have room.
func (p *Protocol) make(s *State, c, what int, move func(next *State, g, what, x, y int)) {
	for g := range p.Groups {
		next := *s
		next.claims[c] = claim{phase: made, group: uint8(g)}
		if p.Adopt && c == p.Claims-1 {
			next.claims[c].adopt = 1
		}
		next.used |= bit(c)
		if p.Repeat && what == createClaim {
			next.repeat |= bit(c)
		} else {
			next.repeat &^= bit(c)
		}
		move(&next, g, what, c, 0)
	}
}
