package engine

import (
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// writer executes the decision that one agent made on a snapshot.
type writer struct {
	p    *Protocol
	s    *State
	g    int
	id   int
	from *snapshot
	v    *reader // nil for the agent that reads and writes in one instant
	emit explore.Emit[State]
}

// liveAgent reads, decides and performs one write in one instant.
func (p *Protocol) liveAgent(s *State, g int, graceOver bool, emit explore.Emit[State]) {
	from := s.of(g)
	w := &writer{p: p, s: s, g: g, id: liveAgentID, from: &from, emit: emit}
	d := p.decide(&from, graceOver)
	w.follow(&d, true)
}

// staleAgent continues from what it read earlier.
func (p *Protocol) staleAgent(s *State, a int, emit explore.Emit[State]) {
	v := &s.agents[a]
	w := &writer{p: p, s: s, g: int(v.group), id: a, from: &v.s, v: v, emit: emit}
	if p.AtOnce {
		for c := range p.Claims {
			w.enterAtOnce(c)
		}
		return
	}
	if v.step >= allRead {
		checked := v.step == ledgerChecked || p.without(CheckLedger)
		early, late := p.decide(w.from, false), p.decide(w.from, true)
		w.follow(&early, checked)
		if late != early {
			w.follow(&late, checked)
		}
	}
	// The second writes of a binding and of a deletion, which follow the first without another
	// reading.
	for c := range p.Claims {
		if v.labels&bit(c) != 0 {
			w.label(c, int(s.claims[c].machine)-1, true)
		}
	}
	for i := range p.machines() {
		if v.deletes&bit(i) != 0 {
			w.delete(i)
		}
	}
}

// enterAtOnce enters a claim that was made since the MachineDeployment was read, based on the
// caches' view of everything else. If the caches do not show the claim, its object is the one that
// the call created, whatever has happened to it since.
func (w *writer) enterAtOnce(c int) {
	at := &w.s.groups[w.g]
	if w.v.step < allRead || w.v.unmade&bit(c) == 0 || w.s.claims[c].phase == unmade || w.from.ledger.present == 0 {
		return
	}
	seen := *w.from
	if seen.claims[c].phase == unmade {
		seen.claims[c] = claim{phase: made, group: uint8(w.g)}
	}
	d := w.p.decide(&seen, false)
	if d.enters&bit(c) == 0 {
		return
	}
	was, is := w.from.md, at.md
	was.observed, was.isPaused, was.carried = is.observed, is.isPaused, is.carried // the status is not tested
	if (w.v.ledgerFresh == 0 || was != is) && !w.p.without(TestEntry) {
		return
	}
	stale := *w.v
	stale.ledgerFresh, stale.generationFresh = 1, 1
	entry := *w
	entry.v, entry.from = &stale, &seen
	entry.commit(&d)
}

// follow emits the transitions of a decision.
func (w *writer) follow(d *decision, checked bool) {
	for c := range w.p.Claims {
		if d.refused&bit(c) != 0 && w.s.refused[c]&bit(w.g) == 0 && w.s.claims[c].phase == made {
			next := *w.s
			next.refused[c] |= bit(w.g)
			w.emit(&next, act(w.id, w.g, refuse, c, 0), "")
		}
	}
	if d.write {
		w.commit(d)
		if d.urgent {
			return // the actions are not reached
		}
	}
	if !checked {
		return
	}
	for _, a := range d.actions[:d.n] {
		w.perform(a)
	}
}

// done clears the reader after a ledger write, so that everything is read again.
func (w *writer) done(next *State) {
	if w.v != nil {
		next.agents[w.id] = reader{}
	}
}

// commit writes ledger, replicas and pause, if what the write tests is unchanged since it was read.
func (w *writer) commit(d *decision) {
	at := &w.s.groups[w.g]
	if w.v != nil {
		fresh := w.v.ledgerFresh != 0
		if w.from.ledger.present == 0 { // there must still be none, as when it was read
			fresh = at.ledger.present == 0
		}
		template := w.from.ledger.present == 0 || d.removes && !w.p.without(TestTemplate)
		if !fresh || at.md.replicas != w.from.md.replicas || template && w.v.generationFresh == 0 {
			return
		}
		resized := d.replicas > at.md.replicas && at.md.max != w.from.md.max || d.replicas < at.md.replicas && at.md.min != w.from.md.min
		if resized && !w.p.without(TestSizes) {
			return
		}
		if d.pause == protocol.PauseSet && w.v.objectFresh == 0 && !w.p.without(TestPause) {
			return
		}
		if d.pause == protocol.PauseRemove && w.from.md.paused == byAgent && at.md.paused != byAgent {
			return
		}
	}
	next := *w.s
	to := &next.groups[w.g]
	to.ledger = d.ledger
	to.md.frozen |= b(d.lowered)
	if d.lowered && w.from.ledger.present != 0 { // the change that froze the group belongs to no one: the floor stays unchanged
		to.owned += w.from.ledger.lastReplicas - w.from.md.replicas
	}
	for c := range maxClaims { // an adopted Machine is no longer the user's once the claim has it
		if w.from.ledger.adopted&^d.ledger.adopted&bit(c) != 0 && carriedBy(w.from, c) && to.owned > 0 {
			to.owned--
		}
	}
	violation := ""
	for c, of := range d.ledger.returned {
		if of != 0 && next.given&bit(c) == 0 { // the user has one more, even if the ledger is lost and records it again
			next.given |= bit(c)
			to.owned++
			if w.p.Sizes > 0 { // the min size may have given the user more
				to.owned = d.ledger.floor
				if int(to.owned)+next.claimed(w.g) > int(d.replicas) {
					violation = "I6 the user is given more with a returned Machine than there is"
				}
			}
		}
	}
	if d.replicas != at.md.replicas {
		to.md.replicas = d.replicas
		to.md.observed = 0
		switch largest := at.md.max; {
		case d.replicas < w.from.md.replicas && at.md.min != unreadable && d.replicas < at.md.min:
			violation = "I6 replicas are lowered below the min size"
		case d.replicas > w.from.md.replicas && largest != 0 && (largest == unreadable || d.replicas > max(largest, at.peak)):
			violation = "I6 replicas are raised above the max size"
		}
	}
	for i := range maxMachines {
		switch {
		case d.ledger.decremented&^w.from.ledger.decremented&bit(i) != 0:
			to.md.carried &^= bit(i)
			if d.replicas == at.md.replicas && at.md.observed != 0 {
				to.md.carried |= bit(i)
			}
		case d.ledger.releasing&bit(i) == 0:
			to.md.carried &^= bit(i)
		}
	}
	switch d.pause {
	case protocol.PauseSet:
		if at.md.paused == byHuman {
			violation = "P2 a human's pause is taken over"
		}
		to.md.paused = byAgent
	case protocol.PauseRemove:
		if w.from.md.paused == byAgent {
			to.md.paused = notPaused
		}
	case protocol.PauseKeep:
	}
	if violation == "" {
		violation = w.takesFloor(d)
	}
	w.done(&next)
	w.emit(&next, describeLedger(w.id, w.g, d), violation)
}

// carriedBy reports whether a Machine in the snapshot has the claim's label.
func carriedBy(s *snapshot, c int) bool {
	for _, m := range s.machines {
		if m.exists() && int(m.label) == c+1 {
			return true
		}
	}
	return false
}

// takesFloor checks I6 for the Machines that a ledger write names, in worlds where no one else
// deletes Machines or changes replicas.
func (w *writer) takesFloor(d *decision) string {
	p := w.p
	if p.Outsiders+p.Raises+p.Lowers+p.Rollouts+p.Wipes > 0 || p.Adopt {
		return ""
	}
	at := &w.s.groups[w.g]
	names := false
	free := 0
	for c, entry := range d.ledger.pending {
		names = names || entry >= assigned && at.ledger.pending[c] != entry
	}
	for i, m := range at.machines {
		unclaimed := m.label == 0 || int(at.ledger.returned[m.label-1]) == i+1
		if m.alive() && unclaimed && !m.has(finalized) && !d.ledger.names(i) && d.ledger.releasing&bit(i) == 0 {
			free++
		}
	}
	if names && free < int(at.owned) {
		return "I6 a Machine of the floor is named for a claim"
	}
	return ""
}

// perform performs one action, if the object is unchanged since it was read.
func (w *writer) perform(a action) {
	c, i := int(a.claim), int(a.machine)
	switch a.kind {
	case markAdmitted, bind, restore, end:
		w.changeClaim(a, c, i)
	case label:
		w.label(c, i, false)
	case unbind:
		if w.v == nil || w.v.machinesSame&bit(i) != 0 {
			next := *w.s
			next.groups[w.g].machines[i].label = 0
			w.emit(&next, act(w.id, w.g, doUnbind, c, i), "")
		}
	case markReturned:
		if w.machineFresh(i) {
			next := *w.s
			m := &next.groups[w.g].machines[i]
			m.label, m.flags = 0, m.flags|floors
			w.emit(&next, act(w.id, w.g, doReturn, i, 0), "")
		}
	case beginDelete:
		w.beginDelete(i)
	case keep:
		if w.machineFresh(i) {
			next := *w.s
			next.groups[w.g].machines[i].flags &^= finalized
			w.emit(&next, act(w.id, w.g, doKeep, i, 0), "")
		}
	case removeFinalizer:
		w.removeFinalizer(i)
	case pauseMachineSet, unpauseMachineSet, lowerSet:
		w.changeSet(a)
	}
}

func (w *writer) claimFresh(c int) bool   { return w.v == nil || w.v.claimsFresh&bit(c) != 0 }
func (w *writer) machineFresh(i int) bool { return w.v == nil || w.v.machinesFresh&bit(i) != 0 }

func (w *writer) changeClaim(a action, c, i int) {
	if !w.claimFresh(c) {
		return
	}
	next := *w.s
	to := &next.claims[c]
	what, violation := doEnd, ""
	switch a.kind {
	case markAdmitted:
		to.phase, what, i = pending, doMark, 0
	case bind:
		to.phase, to.machine, what = bound, uint8(i+1), doBind
		if w.v != nil {
			next.agents[w.id].labels |= bit(c)
		}
	case restore:
		if to.phase != releasing {
			to.phase = bound
		}
		to.machine, what = uint8(i+1), doRestore
	default:
		i = 0
		violation = w.ends(a, c)
		to.phase = ended
		next.asked |= bit(c) // no further call needs to request it
	}
	if to.phase == ended {
		to.adopt, to.returns = 0, 0
		next.refused[c] = 0
	}
	w.emit(&next, act(w.id, w.g, what, c, i), violation)
}

// ends checks what must be true when a claim ends, given the reason recorded.
func (w *writer) ends(a action, c int) string {
	at := &w.s.groups[w.g]
	x := w.s.claims[c]
	if a.lost && x.machine != 0 {
		if m := at.machines[x.machine-1]; m.alive() {
			return "E2 a claim ends as lost and its Machine lives"
		}
	}
	if a.released {
		for i, m := range at.machines {
			its := int(m.label) == c+1 || x.machine == uint8(i+1) && m.label == 0 && m.phase == deleting // its label was never written
			if its && m.exists() && m.phase != held {
				return "E3 a release is reported done and the Machine is there"
			}
		}
	}
	return ""
}

// label writes the label. The second write of a binding knows that the claim is Bound; a later one
// has read it.
func (w *writer) label(c, i int, second bool) {
	if i < 0 || !w.machineFresh(i) && !w.p.without(TestMachine) {
		return
	}
	next := *w.s
	m := &next.groups[w.g].machines[i]
	if !m.exists() || int(m.label) == c+1 {
		return
	}
	m.label = uint8(c + 1)
	if second {
		next.agents[w.id].labels &^= bit(c)
	}
	violation := ""
	if w.s.claims[c].phase == ended {
		violation = "E1 a Machine is labelled for an ended claim"
	}
	w.emit(&next, act(w.id, w.g, doLabel, c, i), violation)
}

func (w *writer) beginDelete(i int) {
	m := w.s.groups[w.g].machines[i]
	if !w.machineFresh(i) {
		return
	}
	if !m.has(finalized) {
		next := *w.s
		next.groups[w.g].machines[i].flags |= finalized
		if w.v != nil {
			next.agents[w.id].deletes |= bit(i)
		}
		w.emit(&next, act(w.id, w.g, doFinalizer, i, 0), "")
		return
	}
	w.delete(i)
}

// delete is the second write of a deletion. Its only precondition is the UID.
func (w *writer) delete(i int) {
	at := &w.s.groups[w.g]
	m := at.machines[i]
	if !m.alive() {
		return
	}
	next := *w.s
	next.groups[w.g].machines[i].phase = deleting
	if w.v != nil {
		next.agents[w.id].deletes &^= bit(i)
	}
	w.emit(&next, act(w.id, w.g, doDelete, i, 0), w.deletesOthers(i))
}

// deletesOthers checks I3 for the Machines that the agent deletes.
func (w *writer) deletesOthers(i int) string {
	p, at := w.p, &w.s.groups[w.g]
	m := at.machines[i]
	if m.label != 0 {
		if w.s.given&bit(int(m.label)-1) != 0 {
			return "I3 the agent deletes a Machine that was returned"
		}
		if w.s.claims[m.label-1].live() {
			return "I3 the agent deletes a claimed Machine"
		}
		return ""
	}
	for _, x := range w.s.claims {
		if x.phase == bound && int(x.group) == w.g && int(x.machine) == i+1 {
			return "I3 the agent deletes a Machine that a claim is bound to"
		}
	}
	if at.ledger.names(i) {
		return "I3 the agent deletes a named Machine"
	}
	if p.Outsiders+p.Lowers+p.Rollouts+p.Wipes > 0 || p.Adopt {
		return ""
	}
	free := 0
	for j, x := range at.machines {
		if j != i && x.alive() && x.label == 0 && !at.ledger.names(j) && at.ledger.releasing&bit(j) == 0 {
			free++
		}
	}
	if free < p.Floor {
		return "I3 the agent deletes a Machine of the floor"
	}
	return ""
}

func (w *writer) removeFinalizer(i int) {
	if !w.machineFresh(i) {
		return
	}
	next := *w.s
	m := &next.groups[w.g].machines[i]
	m.flags &^= finalized
	if m.phase == held {
		*m = machine{phase: gone, set: m.set}
	}
	w.emit(&next, act(w.id, w.g, doFinalizerOff, i, 0), "")
}

func (w *writer) changeSet(a action) {
	i := int(a.set)
	if w.v != nil && w.v.setsFresh&bit(i) == 0 {
		return
	}
	next := *w.s
	set := &next.groups[w.g].sets[i]
	switch a.kind {
	case pauseMachineSet:
		set.paused = byAgent
		w.emit(&next, act(w.id, w.g, doPauseSet, i, 0), "")
	case unpauseMachineSet:
		set.paused = notPaused
		w.emit(&next, act(w.id, w.g, doUnpauseSet, i, 0), "")
	default:
		n := min(count(a.uids), set.replicas)
		set.replicas -= n
		if !w.p.without(ReleasedTogether) {
			set.released |= a.uids
		}
		if n > 0 {
			set.observed, set.foreign = 0, 1
		}
		w.emit(&next, act(w.id, w.g, doLowerSet, i, int(set.replicas)), "")
		if w.p.without(ReleasedTogether) { // the note is a separate write, and a crash may precede it
			noted := *w.s
			noted.groups[w.g].sets[i].released |= a.uids
			noted.groups[w.g].sets[i].replicas -= n
			if n > 0 {
				noted.groups[w.g].sets[i].observed, noted.groups[w.g].sets[i].foreign = 0, 1
			}
			w.emit(&noted, act(w.id, w.g, doNoteReleased, i, 0), "")
		}
	}
}

// reads emits what a stale agent can read next. It can start over at any time, as after a crash.
func (p *Protocol) reads(s *State, a int, emit explore.Emit[State]) {
	v := &s.agents[a]
	for g := range p.Groups {
		at := &s.groups[g]
		next := *s
		next.agents[a] = reader{
			step: deploymentRead, group: uint8(g), ledgerFresh: 1, generationFresh: 1, objectFresh: 1,
			s: snapshot{md: at.md, ledger: at.ledger},
		}
		if p.AtOnce {
			if next.agents[a].unmade = s.unmade(p.Claims); next.agents[a].unmade == 0 {
				continue // there will be nothing to enter
			}
			next.agents[a].generationFresh, next.agents[a].objectFresh = 0, 0 // it compares the objects themselves
		}
		if next.agents[a] != *v {
			emit(&next, act(a, g, readDeployment, 0, 0), "")
		}
	}
	if v.step == nothingRead {
		return
	}
	g := int(v.group)
	next := *s
	w := &next.agents[a]
	switch {
	case v.step == deploymentRead:
		w.s.claims, w.claimsFresh, w.step = s.claimsOf(g), 1<<maxClaims-1, claimsRead
		emit(&next, act(a, g, readClaims, 0, 0), "")
	case v.step == claimsRead && p.AtOnce:
		w.s.sets, w.claimsFresh, w.step = s.groups[g].sets, 0, allRead
		for i := range w.s.sets {
			w.s.sets[i].saw, w.s.sets[i].foreign, w.s.sets[i].counted = 0, 0, 0
		}
		s.readMachines(g, &w.s)
		emit(&next, act(a, g, readMachines, 0, 0), "")
	case v.step == claimsRead:
		w.s.sets, w.setsFresh, w.step = s.groups[g].sets, 1<<maxSets-1, setsRead
		for i := range w.s.sets { // the state of Cluster API's cache is not on the object
			w.s.sets[i].saw, w.s.sets[i].foreign = 0, 0
		}
		emit(&next, act(a, g, readSets, 0, 0), "")
	case v.step == setsRead:
		s.readMachines(g, &w.s)
		w.machinesFresh, w.machinesSame, w.step = 1<<maxMachines-1, 1<<maxMachines-1, allRead
		emit(&next, act(a, g, readMachines, 0, 0), "")
	case v.step == allRead && p.AtOnce:
		at := &s.groups[g]
		w.s.md, w.s.ledger, w.unmade, w.ledgerFresh = at.md, at.ledger, s.unmade(p.Claims), 1
		if w.unmade != 0 && *w != *v {
			emit(&next, act(a, g, showDeployment, 0, 0), "")
		}
	case v.step == allRead && v.ledgerFresh != 0:
		w.step = ledgerChecked
		emit(&next, act(a, g, checkLedger, 0, 0), "")
	}
	if p.without(LiveAfterLedger) && v.step >= allRead { // only the ledger is read again, and the rest stays old
		at := &s.groups[g]
		next := *s
		w := &next.agents[a]
		w.s.md, w.s.ledger = at.md, at.ledger
		w.ledgerFresh, w.generationFresh, w.objectFresh = 1, 1, 1
		if *w != *v {
			emit(&next, act(a, g, readDeployment, 0, 0), "")
		}
	}
}
