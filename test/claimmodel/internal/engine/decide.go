package engine

import "slices"

// decision is what the protocol asks for in a snapshot.
type decision struct {
	write    bool
	ledger   ledger
	replicas uint8
	pause    pauseChange
	urgent   bool
	refused  uint8 // mask of claims
	spare    bool
	unmet    int

	actions [maxClaims + maxMachines + 2*maxSets]action
	n       int
}

type pauseChange uint8

const (
	pauseKeep pauseChange = iota
	pauseSet
	pauseRemove
)

type actionKind uint8

const (
	markEntered actionKind = iota + 1
	bind
	restore
	label
	unbind
	end
	hold
	hook
	letGo
	pauseMachineSet
	unpauseMachineSet
	lowerSet
)

// action is one write on one object. Which of its numbers count depends on its kind.
type action struct {
	kind                actionKind
	claim, machine, set uint8
	uids                uint8 // mask of Machines
	lost                bool  // of end: the claim is said to have lost its Machine
	released            bool  // of end: the release is said to be complete
}

func (d *decision) do(a action) {
	d.actions[d.n] = a
	d.n++
}

// step is one run of decide: the snapshot, the next ledger and the decision.
type step struct {
	p    *Protocol
	s    *snapshot
	next ledger
	d    decision
	over bool // the spare has been there for the grace period
	// had is the snapshot's ledger, empty when there is none.
	had ledger
}

// decide computes the next step of the protocol, in the order of the engine's function of that name.
func (p *Protocol) decide(s *snapshot, graceOver bool) decision {
	t := &step{p: p, s: s, over: graceOver, had: s.ledger}
	t.d.replicas = s.md.replicas
	t.fold()

	t.dropEntries()
	t.unname()
	t.startReleases()
	t.giveBack()
	spare := t.account()
	spare = t.adopt(spare)
	spare = t.enter(spare)
	t.name()
	t.coverShortage()
	t.d.spare = spare > 0
	spare = t.releaseSpare(spare)
	t.shrink(spare)

	t.next.lastReplicas = t.d.replicas
	t.decideWrite()
	t.actOnClaims()
	t.actOnMachines()
	return t.d
}

func (t *step) fold() {
	if t.s.ledger.present == 0 {
		t.rebuild()
		return
	}
	t.next = t.s.ledger
	floor := int(t.next.floor) + int(t.s.md.replicas) - int(t.next.lastReplicas)
	if t.p.without(FloorFromDifference) {
		floor = int(t.next.floor)
	}
	t.next.floor = uint8(max(0, floor))
	t.next.lastReplicas = t.s.md.replicas
}

func (t *step) rebuild() {
	l := ledger{}
	ours := 0
	for i, m := range t.s.machines {
		ofAgent := m.exists() && (m.has(finalized) || m.has(hooked))
		switch {
		case ofAgent && !t.p.without(RebuildReleases) && (m.alive() || m.phase == deleting || m.phase == terminating):
			// Its replica cannot have been given back yet.
			l.releasing |= bit(i)
			if !m.has(finalized) {
				l.hook |= bit(i)
			}
			ours++
		case ofAgent && (m.phase == waiting || m.phase == held) && !t.p.without(RebuildSafely):
			// Its replica may have been given back: that is taken for done.
			l.releasing |= bit(i)
			l.givenBack |= bit(i)
			if !m.has(finalized) {
				l.hook |= bit(i)
			}
		case m.alive() && t.orphaned(m.label), m.label == 0:
			// Nobody's, or the user's.
		case m.exists() && !m.alive() && !t.s.claims[m.label-1].live() && !t.p.without(RebuildSafely):
			// The same: our hook may have been taken off it since.
			l.releasing |= bit(i)
			l.givenBack |= bit(i)
		default:
			ours++
		}
	}
	for c, x := range t.s.claims {
		entered := x.phase == pending || (x.phase == bound || x.phase == releasing) && x.machine != 0
		if !entered || t.labelled(c) >= 0 {
			continue
		}
		l.pending[c] = unnamed
		if x.machine != 0 {
			i := int(x.machine) - 1
			counted := t.s.machines[i].label != 0 || l.releasing&bit(i) != 0
			handedOver := counted || x.phase == releasing // perhaps: to a claim that is counted itself
			if !t.s.machines[i].alive() || handedOver && !t.p.without(RebuildSafely) {
				l.pending[c] = noEntry
				continue
			}
			l.pending[c] = named + uint8(i)
		} else if i := int(x.adopt) - 1; i >= 0 && t.s.machines[i].exists() {
			l.pending[c] = named + uint8(i)
			l.adopted |= bit(c)
		}
		ours++
	}
	if t.p.without(RebuildFromClaims) {
		ours, l.pending, l.adopted = 0, [maxClaims]uint8{}, 0
	}
	l.floor = uint8(max(0, int(t.s.md.replicas)-ours))
	l.lastReplicas = t.s.md.replicas
	t.next = l
}

// labelled returns the Machine that carries the claim's label, or -1.
func (t *step) labelled(c int) int {
	for i, m := range t.s.machines {
		if m.exists() && int(m.label) == c+1 {
			return i
		}
	}
	return -1
}

// dropEntry takes a pending entry away.
func (t *step) dropEntry(c int) {
	if t.next.adopted&bit(c) != 0 && t.labelled(c) < 0 {
		t.next.floor++
	}
	t.next.adopted &^= bit(c)
	t.next.pending[c] = noEntry
}

func (t *step) dropEntries() {
	for c, entry := range t.next.pending {
		if entry == noEntry {
			continue
		}
		x := t.s.claims[c]
		switch x.current() {
		case unmade, ended:
			t.dropEntry(c)
		case bound, releasing:
			i := int(x.machine) - 1
			switch {
			case i < 0 || !t.s.machines[i].exists(), entry != named+uint8(i):
				t.dropEntry(c)
			case int(t.s.machines[i].label) == c+1:
				t.dropEntry(c)
			case t.s.machines[i].label != 0 || !t.s.machines[i].alive() || t.s.machines[i].has(finalized):
				t.dropEntry(c)
			}
		default: // still waiting
		}
	}
}

func (t *step) unname() {
	for c, entry := range t.next.pending {
		if entry < named || t.s.claims[c].current() != pending {
			continue
		}
		m := t.s.machines[entry-named]
		if !m.alive() || m.has(finalized) || m.label != 0 && int(m.label) != c+1 {
			t.next.pending[c] = unnamed
		}
	}
}

// orphaned reports whether a label, possibly none, names no claim that has a right to a Machine.
func (t *step) orphaned(label uint8) bool {
	return label == 0 || t.s.claims[label-1].phase == ended
}

// isHad reports whether a claim that lives says that it has the Machine.
func (t *step) isHad(i uint8) bool {
	return slices.ContainsFunc(t.s.claims[:], func(x claim) bool { return x.machine == i+1 && x.phase != ended })
}

func (t *step) startReleases() {
	for i, m := range t.s.machines {
		if t.next.releasing&bit(i) == 0 || !m.exists() || t.next.givenBack&bit(i) != 0 {
			continue
		}
		if !m.alive() {
			t.overtake(i, m)
			continue
		}
		if t.orphaned(m.label) {
			continue
		}
		if t.s.claims[m.label-1].current() != releasing {
			t.next.drop(i)
		}
	}
	for c, x := range t.s.claims {
		if x.phase != releasing || x.machine == 0 {
			continue
		}
		i := int(x.machine) - 1
		m := t.s.machines[i]
		if !m.exists() || int(m.label) != c+1 || t.handsOver(m) || t.next.releasing&bit(i) != 0 {
			continue
		}
		if m.alive() || t.p.Hooks && stoppable(m) && !m.has(finalized) {
			t.next.releasing |= bit(i)
			if !m.alive() {
				t.next.hook |= bit(i)
			}
		}
	}
	for i, m := range t.s.machines {
		if m.exists() && m.alive() && m.has(finalized) && t.orphaned(m.label) && !t.refuses() && !t.p.without(RebuildReleases) {
			t.next.releasing |= bit(i)
		}
	}
}

// stoppable reports whether the instance of a Machine that is being deleted is still there.
func stoppable(m machine) bool { return m.phase == deleting || m.phase == waiting }

func (t *step) overtake(i int, m machine) {
	if !t.p.Hooks {
		return
	}
	switch {
	case m.has(finalized) || t.next.underPause&bit(i) != 0:
	case t.next.hook&bit(i) == 0 && stoppable(m):
		t.next.hook |= bit(i)
	case !m.has(hooked) && !stoppable(m):
		t.next.drop(i)
	}
}

func (t *step) handsOver(m machine) bool {
	return m.alive() && !m.has(finalized) && m.phase != joined && !m.has(outdated)
}

func (t *step) active() (sets uint8) {
	for i, set := range t.s.sets {
		if set.exists != 0 && set.replicas > 0 {
			sets |= bit(i)
		}
	}
	return sets
}

func (t *step) giveBack() {
	ready := uint8(0)
	for i, m := range t.s.machines {
		if t.next.releasing&bit(i) == 0 {
			continue
		}
		back := t.next.givenBack&bit(i) != 0
		switch {
		case !m.exists():
			if back || t.next.underPause&bit(i) == 0 {
				t.next.drop(i)
			} else {
				ready |= bit(i)
			}
		case back:
		case m.phase == held || t.next.hook&bit(i) != 0 && m.phase == waiting && m.has(hooked):
			ready |= bit(i)
		case t.p.without(DeletionComplete) && !m.alive() && m.has(finalized):
			ready |= bit(i)
		}
	}
	if ready == 0 {
		t.unpauseLeftOver()
		return
	}
	active := t.active()
	sole := count(active) == 1
	for i, m := range t.s.machines {
		if ready&bit(i) != 0 && (!m.exists() || t.next.underPause&bit(i) != 0 || active != bit(int(m.set))) {
			sole = false
		}
	}
	if t.p.without(PauseForSeveralSets) {
		sole = true
	}
	if !sole {
		t.giveBackPaused(ready)
		t.unpauseLeftOver()
		return
	}
	t.unpauseLeftOver()
	if t.s.md.observed == 0 && !t.p.without(ObserveTemplate) {
		return
	}
	// Those beyond the MachineSet's replicas a human's lowering has taken already.
	taken := 0
	for i, set := range t.s.sets {
		if active == bit(i) && !t.p.without(SlotTaken) {
			taken = t.machinesOf(i) - int(set.replicas)
		}
	}
	t.d.replicas -= uint8(min(max(0, int(count(ready))-max(0, taken)), int(t.d.replicas)))
	t.next.givenBack |= ready
	t.d.urgent = true
}

// machinesOf counts the Machines of a MachineSet whose replica was not given back.
func (t *step) machinesOf(set int) int {
	n := 0
	for i, m := range t.s.machines {
		if int(m.set) == set && m.exists() && t.next.givenBack&bit(i) == 0 {
			n++
		}
	}
	return n
}

// unpauseLeftOver takes off our pause where no release needs it: the ledger that did is lost.
func (t *step) unpauseLeftOver() {
	if t.s.md.paused == byAgent && !t.lowersUnderPause() && t.d.pause == pauseKeep && !t.p.without(UnpauseLeftOver) {
		t.d.pause, t.d.urgent = pauseRemove, true
	}
}

// lowersUnderPause reports whether a release has, or is to have, the MachineDeployment paused.
func (t *step) lowersUnderPause() bool {
	return t.next.releasing&t.next.underPause&^t.next.givenBack != 0
}

func (t *step) giveBackPaused(ready uint8) {
	paused := t.s.md.paused != notPaused
	ours := t.s.md.paused == byAgent
	begun := ready & t.next.underPause
	if begun == 0 {
		if !paused && (t.next.shrinks == 0 || t.p.without(OnePauseAtATime)) {
			t.beginPause(ready)
		}
		return
	}
	if t.p.without(CompletePause) { // recovery that only un-pauses
		if ours {
			t.d.pause, t.d.urgent = pauseRemove, true
		}
		t.next.underPause &^= begun
		return
	}
	for i, m := range t.s.machines {
		if begun&bit(i) != 0 && !m.exists() && !t.lowered(i) {
			begun &^= bit(i)
			t.next.drop(i)
		}
	}
	if ours && t.s.md.isPaused != 0 && !t.p.without(SlotTaken) {
		begun &^= t.replaced(begun)
	}
	switch {
	case begun == 0:
		if ours {
			t.d.pause, t.d.urgent = pauseRemove, true
		}
	case !paused:
		t.d.pause, t.d.urgent = pauseSet, true
	case ours && t.s.md.isPaused != 0 && t.setsLowered(begun):
		t.d.replicas -= min(count(begun), t.d.replicas)
		t.next.givenBack |= begun
		t.d.pause, t.d.urgent = pauseRemove, true
	}
}

// replaced counts replicas as given back that are taken already, by a rollout or by a human's lowering: nothing is lowered for
// those Machines, and what replaces them is a spare. It returns them.
func (t *step) replaced(begun uint8) (skipped uint8) {
	skip := func(i int) {
		skipped |= bit(i)
		t.next.givenBack |= bit(i)
	}
	var after [maxSets]int // replicas, once all of it is lowered
	for set := range t.s.sets {
		after[set] = int(t.s.sets[set].replicas)
		excess := -after[set]
		for i, m := range t.s.machines {
			if int(m.set) == set && m.exists() && t.next.givenBack&bit(i) == 0 && (begun&bit(i) == 0 || !t.lowered(i)) {
				excess++
			}
		}
		for i, m := range t.s.machines {
			if int(m.set) != set || begun&bit(i) == 0 || t.lowered(i) {
				continue
			}
			if excess > 0 && m.exists() {
				skip(i)
				excess--
				continue
			}
			after[set]--
		}
	}
	// A MachineSet with more replicas than the MachineDeployment is cut down to them, whoever's Machines it has: a rollout has
	// made the replacements already.
	for i := range maxMachines {
		left := begun &^ skipped
		if left&bit(i) != 0 && !t.lowered(i) && slices.Max(after[:]) > int(t.d.replicas)-int(count(left)) {
			skip(i)
			after[t.setOf(i)]++
		}
	}
	return skipped
}

func (t *step) beginPause(ready uint8) {
	for i, m := range t.s.machines {
		if ready&bit(i) != 0 && m.exists() {
			t.next.underPause |= bit(i)
			t.d.pause, t.d.urgent = pauseSet, true
		}
	}
}

// setOf returns the number of the MachineSet of a Machine that may be gone: the ledger remembers it.
func (t *step) setOf(i int) uint8 { return t.s.machines[i].set }

func (t *step) lowered(i int) bool {
	set := t.s.sets[t.setOf(i)]
	return set.exists == 0 || set.released&bit(i) != 0
}

func (t *step) setsLowered(begun uint8) bool {
	var missing [maxSets]uint8
	done := true
	for i := range maxMachines {
		if begun&bit(i) == 0 {
			continue
		}
		set := t.setOf(i)
		switch {
		case !t.lowered(i):
			missing[set] |= bit(i)
			done = false
		case t.s.sets[set].exists != 0 && t.s.sets[set].observed == 0 && !t.p.without(ObserveLoweredSet):
			done = false
		}
	}
	for set, uids := range missing {
		if uids != 0 && t.s.sets[set].exists != 0 {
			t.d.do(action{kind: lowerSet, set: uint8(set), uids: uids})
		}
	}
	return done
}

func (t *step) account() int {
	used := int(t.next.floor)
	for _, entry := range t.next.pending {
		if entry != noEntry {
			used++
		}
	}
	used += int(count(t.next.releasing &^ t.next.givenBack))
	for i, m := range t.s.machines {
		switch {
		case !m.exists() || m.label == 0 || t.next.releasing&bit(i) != 0 || t.next.pending[m.label-1] != noEntry:
		case m.alive() && t.orphaned(m.label):
		default:
			used++
		}
	}
	spare := int(t.d.replicas) - used
	if spare < 0 {
		raised := used
		if t.p.Max > 0 {
			raised = min(raised, max(int(t.d.replicas), t.p.Max))
		}
		if raised > int(t.d.replicas) {
			t.d.replicas, t.d.urgent = uint8(raised), true
		}
		spare = int(t.d.replicas) - used
	}
	return spare
}

// refuses reports whether the group takes no claims at all.
func (t *step) refuses() bool { return t.s.md.paused == byHuman }

func (t *step) room() bool {
	return t.p.Max == 0 || int(t.d.replicas) < t.p.Max || t.p.without(MaxSize)
}

func (t *step) adopt(spare int) int {
	for c, x := range t.s.claims {
		if x.current() != pending || x.adopt == 0 || t.next.pending[c] != noEntry || t.labelled(c) >= 0 {
			continue
		}
		i := int(x.adopt) - 1
		m := t.s.machines[i]
		if t.refuses() || !m.alive() || m.has(finalized) || m.label != 0 || t.next.names(i) || t.next.releasing&bit(i) != 0 {
			t.d.refused |= bit(c)
			continue
		}
		switch {
		case spare > 0:
			spare--
		case t.next.floor > 0:
			t.next.adopted |= bit(c)
			t.next.floor--
		case t.room():
			t.d.replicas++
		default:
			t.d.refused |= bit(c)
			continue
		}
		t.next.pending[c] = named + uint8(i)
		t.d.urgent = true
	}
	return spare
}

func (t *step) enter(spare int) int {
	spendable := spare - t.unusable()
	for c, x := range t.s.claims {
		if x.current() != pending || x.adopt != 0 || t.next.pending[c] != noEntry || t.labelled(c) >= 0 {
			continue
		}
		switch {
		case t.refuses():
			t.d.refused |= bit(c)
			continue
		case spendable > 0:
			spendable--
			spare--
		case t.room():
			t.d.replicas++
		default:
			t.d.refused |= bit(c)
			continue
		}
		t.next.pending[c] = unnamed
		t.d.urgent = true
	}
	return spare
}

// free returns the Machines that nobody has.
func (t *step) free() (machines uint8) {
	for i, m := range t.s.machines {
		if m.alive() && !m.has(finalized) && !t.next.names(i) && t.orphaned(m.label) && t.next.releasing&bit(i) == 0 {
			machines |= bit(i)
		}
	}
	return machines
}

// usable reports whether a free Machine may be given to a claim: nothing can run on it yet.
func (t *step) usable(i int) bool {
	m := t.s.machines[i]
	return m.label == 0 && !m.has(outdated) && m.phase != joined
}

func (t *step) unusable() int {
	n := 0
	free := t.free()
	for i := range maxMachines {
		if free&bit(i) != 0 && !t.usable(i) {
			n++
		}
	}
	return max(0, n-int(t.next.floor))
}

func (t *step) name() {
	free := t.free()
	give := int(count(free)) - int(t.next.floor)
	if t.p.without(KeepFloor) {
		give = maxMachines
	}
	i := 0
	for c, x := range t.s.claims {
		if give <= 0 {
			return
		}
		if t.next.pending[c] != unnamed || x.current() != pending || x.adopt != 0 {
			continue
		}
		for i < maxMachines && (free&bit(i) == 0 || !t.usable(i)) {
			i++
		}
		if i == maxMachines {
			return
		}
		t.next.pending[c] = named + uint8(i)
		give--
		i++
	}
}

// waiting counts the claims that a Machine is still to be named for.
func (t *step) waiting() int {
	n := 0
	for c, entry := range t.next.pending {
		if x := t.s.claims[c]; entry == unnamed && x.phase != unmade && x.adopt == 0 {
			n++
		}
	}
	return n
}

func (t *step) coverShortage() {
	waiting := t.waiting()
	if waiting == 0 || t.d.replicas != t.s.md.replicas || !t.settled() || t.refuses() {
		return
	}
	free := t.free()
	usable := 0
	for i := range maxMachines {
		if free&bit(i) != 0 && t.usable(i) {
			usable++
		}
	}
	floorNeeds := max(0, int(t.next.floor)-(int(count(free))-usable))
	short := waiting - (usable - floorNeeds)
	room := short
	if t.p.Max > 0 {
		room = min(short, max(0, t.p.Max-int(t.d.replicas)))
	}
	if room > 0 {
		t.d.replicas += uint8(room)
		t.d.urgent = true
	}
	t.d.unmet = max(0, short-room)
}

func (t *step) carriedThrough() bool {
	if t.p.without(Fence) {
		return true
	}
	for _, set := range t.s.sets {
		if set.exists != 0 && set.observed == 0 {
			return false
		}
	}
	return true
}

func (t *step) sum() (sum int) {
	for _, set := range t.s.sets {
		if set.exists != 0 {
			sum += int(set.replicas)
		}
	}
	return sum
}

// observed reports whether Cluster API has carried the present generation through to all MachineSets.
func (t *step) observed() bool {
	return t.carriedThrough() && t.assigned()
}

// assigned reports whether the MachineSets have been told all of the MachineDeployment's replicas.
func (t *step) assigned() bool { return t.allLowered() && t.sum() == int(t.s.md.replicas) }

func (t *step) allLowered() bool { return t.s.md.observed != 0 && t.sum() <= int(t.s.md.replicas) }

func (t *step) newest() int {
	for i := maxSets - 1; i >= 0; i-- {
		if t.s.sets[i].exists != 0 {
			return i
		}
	}
	return -1
}

func (t *step) rollingOut() bool {
	if !t.p.RollingUpdate || t.p.without(WaitForRollout) {
		return false
	}
	if count(t.active()) > 1 {
		return true
	}
	for _, m := range t.s.machines {
		if m.has(outdated) {
			return true
		}
	}
	return false
}

func (t *step) settled() bool {
	exist := 0
	for _, m := range t.s.machines {
		if m.exists() {
			if !m.alive() {
				return false
			}
			exist++
		}
	}
	return t.observed() && !t.rollingOut() && exist == int(t.s.md.replicas)
}

func (t *step) unnamed() bool {
	for _, entry := range t.next.pending {
		if entry == unnamed {
			return true
		}
	}
	return false
}

func (t *step) releaseSpare(spare int) int {
	if spare <= 0 || t.unnamed() && t.d.unmet == 0 || !t.over || t.rollingOut() || !t.observed() && !t.p.without(WaitForRollout) || t.refuses() {
		return spare
	}
	free := t.free()
	surplus := min(int(count(free))-int(t.next.floor), spare)
	for i := range t.s.machines {
		if t.d.unmet > 0 && free&bit(i) != 0 && t.usable(i) {
			free &^= bit(i)
		}
	}
	// Those of claims that ended first; then those without a Node, then the newest.
	for _, of := range []struct {
		labelled bool
		at       phase
	}{{true, fresh}, {true, joined}, {false, fresh}, {false, joined}} {
		for i := maxMachines - 1; i >= 0; i-- {
			m := t.s.machines[i]
			if surplus > 0 && free&bit(i) != 0 && m.phase == of.at && (m.label != 0) == of.labelled {
				t.next.releasing |= bit(i)
				surplus--
				spare--
			}
		}
	}
	return spare
}

func (t *step) shrink(spare int) {
	exist := 0
	for _, m := range t.s.machines {
		if m.exists() {
			exist++
		}
	}
	missing := min(int(t.s.md.replicas)-exist, spare-max(0, int(count(t.free()))-int(t.next.floor)))
	active := t.active()
	may := missing > 0 && count(active) == 1 && !t.rollingOut() && !t.refuses()
	if t.p.without(ShrinkInLedger) {
		t.shrinkUnrecorded(missing, active, may)
		return
	}
	if may && t.over && t.p.without(PauseToShrink) {
		t.d.replicas -= uint8(missing)
		t.d.urgent = true
		return
	}
	if t.next.shrinks == 0 {
		for i, set := range t.s.sets {
			switch {
			case set.exists == 0:
			case set.paused == byAgent: // nobody knows why
				t.next.shrinks, t.next.shrunk = uint8(i+1), 1
				return
			case may && t.over && active == bit(i) && set.paused == notPaused && t.observed() &&
				(!t.lowersUnderPause() || t.p.without(OnePauseAtATime)):
				t.next.shrinks, t.next.shrunk = uint8(i+1), 0
				return
			}
		}
		return
	}
	i := int(t.next.shrinks) - 1
	set := t.s.sets[i]
	switch {
	case t.next.shrunk == 0 && may && active == bit(i) && set.paused == notPaused:
		if t.s.ledger.shrinks != 0 && t.observed() {
			t.d.do(action{kind: pauseMachineSet, set: uint8(i)})
		}
	case t.next.shrunk == 0 && may && active == bit(i) && set.paused == byAgent:
		if set.isPaused != 0 && (t.assigned() || t.p.without(ShrinkAsObserved)) {
			t.d.replicas -= uint8(missing)
			t.d.urgent = true
			t.next.shrunk = 1
		}
	case t.next.shrunk == 0:
		t.next.shrunk = 1 // the spare found another use
	case set.exists == 0 || set.paused != byAgent:
		t.next.shrinks, t.next.shrunk = 0, 0
	case t.s.ledger.shrunk != 0 && (active != bit(i) || t.p.RollingUpdate && t.newest() != i ||
		t.allLowered() && t.d.replicas == t.s.md.replicas):
		t.d.do(action{kind: unpauseMachineSet, set: uint8(i)})
	}
}

// shrinkUnrecorded is what the rule ShrinkInLedger replaces.
func (t *step) shrinkUnrecorded(missing int, active uint8, may bool) {
	if may && (t.over || !t.p.without(KeepPaused)) {
		for i, set := range t.s.sets {
			if active != bit(i) {
				continue
			}
			switch {
			case !t.over && set.paused != byAgent:
				// Not yet.
			case t.p.without(PauseToShrink):
				t.d.replicas -= uint8(missing)
				t.d.urgent = true
			case set.paused == notPaused && t.observed():
				t.d.do(action{kind: pauseMachineSet, set: uint8(i)})
			case set.paused == byAgent && set.isPaused != 0:
				t.d.replicas -= uint8(missing)
				t.d.urgent = true
			}
		}
		return
	}
	if t.s.md.observed == 0 || t.sum() != int(t.s.md.replicas) || t.d.replicas != t.s.md.replicas {
		return
	}
	for i, set := range t.s.sets {
		if set.exists != 0 && set.paused == byAgent {
			t.d.do(action{kind: unpauseMachineSet, set: uint8(i)})
		}
	}
}

func (t *step) decideWrite() {
	if t.s.ledger.present == 0 {
		quiet := t.next.pending == [maxClaims]uint8{} && t.next.releasing == 0 && t.next.shrunk == 0
		for _, x := range t.s.claims {
			if x.machine != 0 && x.phase != ended {
				quiet = false
			}
		}
		if quiet && t.d.pause == pauseKeep {
			t.d.replicas = t.s.md.replicas
			return
		}
	}
	t.next.present = 1
	t.d.ledger = t.next
	t.d.write = t.d.replicas != t.s.md.replicas || t.d.pause != pauseKeep || t.next != t.s.ledger
}

func (t *step) actOnClaims() {
	for c, x := range t.s.claims {
		entry := t.had.pending[c]
		var m machine
		if x.machine != 0 {
			m = t.s.machines[x.machine-1]
		}
		its := action{claim: uint8(c), machine: x.machine - 1}
		switch x.phase {
		case made, pending:
			if i := t.labelled(c); i >= 0 && t.s.machines[i].alive() {
				t.d.do(action{kind: restore, claim: uint8(c), machine: uint8(i)})
			} else if entry != noEntry {
				t.actOnPending(c, x, entry)
			} else if t.d.refused&bit(c) != 0 {
				t.d.do(action{kind: end, claim: uint8(c)})
			}
		case bound:
			switch i := t.labelled(c); {
			case !m.exists() && i >= 0 && t.s.machines[i].alive():
				its.kind, its.machine = restore, uint8(i)
				t.d.do(its)
			case !m.exists() || m.phase == held:
				its.kind, its.lost = end, true
				t.d.do(its)
			case !m.alive():
			case m.label == 0 && entry == named+x.machine-1 && !m.has(finalized):
				its.kind = label
				t.d.do(its)
			case m.label == 0 && entry == noEntry && t.s.ledger.present != 0, m.label != 0 && int(m.label) != c+1:
				its.kind, its.lost = end, true
				t.d.do(its)
			}
		case releasing:
			t.actOnReleasing(c, x, m, entry)
		default:
		}
	}
}

func (t *step) actOnPending(c int, x claim, entry uint8) {
	if entry >= named {
		m := t.s.machines[entry-named]
		if m.alive() && !m.has(finalized) && m.label == 0 && !t.isHad(entry-named) {
			t.d.do(action{kind: bind, claim: uint8(c), machine: entry - named})
			return
		}
	}
	switch {
	case x.adopt != 0 && entry == unnamed:
		t.d.do(action{kind: end, claim: uint8(c), lost: true})
	case x.phase == made:
		t.d.do(action{kind: markEntered, claim: uint8(c)})
	}
}

func (t *step) actOnReleasing(c int, x claim, m machine, entry uint8) {
	i := t.labelled(c)
	its := action{claim: uint8(c), machine: x.machine - 1}
	switch {
	case x.machine == 0 && i >= 0, x.machine != 0 && !m.exists() && i >= 0 && t.s.machines[i].alive():
		its.kind, its.machine = restore, uint8(i)
	case x.machine == 0:
		if entry != noEntry {
			return
		}
		its.kind, its.released = end, true
	case m.alive() && entry == named+x.machine-1 && m.label == 0 && !m.has(finalized):
		its.kind = label
	case m.alive() && entry == noEntry && int(m.label) == c+1 && t.handsOver(m) && t.had.releasing&bit(int(x.machine)-1) == 0:
		its.kind = unbind
	case entry == noEntry && (i < 0 || t.s.machines[i].phase == held) && (!m.exists() || m.alive() || m.phase == held):
		its.kind, its.released = end, true
	default:
		return
	}
	t.d.do(its)
}

func (t *step) actOnMachines() {
	for i, m := range t.s.machines {
		if !m.exists() {
			continue
		}
		recorded := t.had.releasing&bit(i) != 0
		back := t.had.givenBack&bit(i) != 0
		a := action{machine: uint8(i)}
		ours := m.has(finalized) || m.has(hooked)
		stopped := m.phase == held || m.has(hooked) && !m.has(finalized)
		switch {
		case recorded && !back && m.alive() && t.mayDelete(m):
			a.kind = hold
		case recorded && !back && t.had.hook&bit(i) != 0 && !ours && stoppable(m):
			a.kind = hook
		case recorded && back && ours && t.let(i):
			a.kind = letGo
		case !recorded && stopped && (t.s.md.observed != 0 && t.carriedThrough() || t.p.without(FenceLost)):
			a.kind = letGo
		default:
			continue
		}
		t.d.do(a)
	}
}

// let reports whether the Machine's replica is given back as far as Cluster API can tell.
func (t *step) let(i int) bool {
	return (t.s.md.carried&bit(i) != 0 || t.p.without(Fence)) && t.carriedThrough()
}

func (t *step) mayDelete(m machine) bool {
	return t.orphaned(m.label) || t.s.claims[m.label-1].current() == releasing
}
