package section5

import "github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"

// agent generates every write that an agent can attempt from its cache.
type agent struct {
	p    *Protocol
	s    *State
	v    *cache
	id   int
	emit explore.Emit[State]
}

func (a *agent) live() bool           { return a.id == liveAgent }
func (a *agent) ledgerFresh() bool    { return a.v.ledgerFresh == 1 }
func (a *agent) machinesAfter() bool  { return a.live() || a.v.machinesAfter == 1 }
func (a *agent) machinesBefore() bool { return a.live() || a.v.machinesAfter == 0 }
func (a *agent) claimsAfter() bool    { return a.live() || a.v.claimsAfter == 1 }
func (a *agent) claimsBefore() bool   { return a.live() || a.v.claimsAfter == 0 }

func (a *agent) write(l ledger, what, x, y int, violation string) {
	next := *a.s
	next.ledger = l
	a.emit(&next, act(a.id, what, x, y), violation)
}

func (a *agent) writeClaim(c int, to claim, what, x, y int, violation string) {
	next := *a.s
	next.claims[c] = to
	a.emit(&next, act(a.id, what, x, y), violation)
}

func (a *agent) writeMachine(i int, to machine, what, x, y int, violation string) {
	next := *a.s
	next.machines[i] = to
	a.emit(&next, act(a.id, what, x, y), violation)
}

// free reports whether the Machine is nobody's.
func free(m machine, i int, l *ledger) bool {
	return m.alive() && m.label() == 0 && !m.finalized() && !l.names(i) && l.releasing&bit(i) == 0
}

func countFree(machines *[maxMachines]machine, l *ledger) int {
	n := 0
	for i, m := range machines {
		if free(m, i, l) {
			n++
		}
	}
	return n
}

// gone reports whether the agent takes a Machine for gone.
func (a *agent) gone(i int) bool {
	if a.p.Rules.Absent {
		return a.s.machines[i].phase() == gone
	}
	return a.v.machines[i].phase() == absent || a.v.machines[i].phase() == gone
}

func (a *agent) moves() {
	var base ledger
	if a.ledgerFresh() {
		base = a.v.ledger
		base.fold()
	}
	for c := range a.p.Claims {
		a.claim(c, base)
	}
	if a.ledgerFresh() {
		a.account(base)
		a.spares(base)
	}
	for i := range a.v.machines {
		a.release(i, base)
	}
}

func (a *agent) labelledMachine(c int) int {
	found := -1
	for i, m := range a.v.machines {
		if m.label() == c+1 && m.exists() {
			found = i
		}
	}
	return found
}

func (a *agent) claim(c int, base ledger) {
	v, rules := a.v, &a.p.Rules
	at, entry, mine := v.claims[c].phase(), v.ledger.pending[c], a.labelledMachine(c)
	if a.ledgerFresh() {
		a.claimInLedger(c, base, mine)
	}
	if entry >= named {
		i := int(entry) - named
		m := v.machines[i]
		mayLabel := !rules.MCFirst || (at == bound || at == releasing) && v.claims[c].machine() == i
		if v.machinesFresh&bit(i) != 0 && m.alive() && !m.finalized() && m.label() == 0 && (!rules.Label || a.machinesBefore()) && mayLabel {
			a.label(c, i)
		}
	}
	if v.claimsFresh&bit(c) != 0 {
		a.claimPhase(c, mine)
	}
	if mine >= 0 && at >= releasing && v.machines[mine].phase() == fresh && !v.machines[mine].finalized() &&
		v.machinesFresh&bit(mine) != 0 && v.ledger.releasing&bit(mine) == 0 && (!rules.Hand || a.machinesBefore() && entry == noEntry) {
		a.writeMachine(mine, v.machines[mine].labelled(0), unbind, c+1, mine, "")
	}
}

func (a *agent) claimInLedger(c int, base ledger, mine int) {
	v, rules := a.v, &a.p.Rules
	at, entry := v.claims[c].phase(), v.ledger.pending[c]
	if at == pending && entry == noEntry && mine < 0 && (!rules.Enter || a.claimsAfter() && a.machinesAfter()) {
		l := base
		if l.spare > 0 {
			l.spare--
		} else {
			l.replicas++
			l.lastReplicas = l.replicas
		}
		l.pending[c] = unnamed
		a.write(l, enter, c+1, 0, "")
	}
	if entry == unnamed && at == pending && (!rules.Name || a.machinesAfter()) && (!rules.NameMC || a.claimsAfter()) &&
		countFree(&v.machines, &base) > int(base.floor) {
		for i, m := range v.machines {
			if free(m, i, &base) {
				l := base
				l.pending[c] = uint8(named + i)
				a.write(l, name, c+1, i, a.takesFloor(&l))
			}
		}
	}
	if entry == unnamed && at >= releasing {
		l := base
		l.pending[c] = noEntry
		l.spare++
		a.write(l, cancel, c+1, 0, "")
	}
	if entry >= named {
		a.namedInLedger(c, int(entry)-named, base)
	}
	if mine >= 0 && at >= releasing && v.machines[mine].phase() == joined && base.releasing&bit(mine) == 0 && (!rules.Release || a.machinesAfter()) {
		l := base
		l.releasing |= bit(mine)
		if int(entry) == named+mine {
			l.pending[c] = noEntry
		}
		a.write(l, release, c+1, mine, "")
	}
}

// namedInLedger is about a pending entry that names Machine i.
func (a *agent) namedInLedger(c, i int, base ledger) {
	v, rules := a.v, &a.p.Rules
	at, m := v.claims[c].phase(), v.machines[i]
	lost := a.gone(i) || m.exists() && (m.label() != c+1 && (m.label() != 0 || !m.alive() || m.finalized()))
	switch {
	case rules.MCFirst:
		l := base
		switch {
		case lost && at == pending && a.machinesAfter() && a.claimsAfter():
			l.pending[c] = unnamed
			a.write(l, unName, c+1, i, "")
		case at >= releasing && v.claims[c].machine() != i:
			l.pending[c] = noEntry
			l.spare++
			a.write(l, cancelNamed, c+1, i, "")
		case at >= releasing && (lost && m.label() == 0 || a.gone(i)) && a.machinesAfter():
			l.pending[c] = noEntry
			a.write(l, dropLost, c+1, i, "")
		}
	case lost && (!rules.UnName || a.machinesAfter() && a.claimsAfter() && at != bound):
		l := base
		l.pending[c] = unnamed
		if rules.UnName && at >= releasing {
			l.pending[c] = noEntry // the slot becomes a spare by accounting
		}
		a.write(l, unName, c+1, i, "")
	}
	if m.label() == c+1 && m.exists() && (!rules.Drop || a.machinesAfter() && a.claimsAfter() && at != pending) {
		l := base
		l.pending[c] = noEntry
		a.write(l, drop, c+1, 0, "")
	}
}

// takesFloor is I6, where nobody else deletes Machines.
func (a *agent) takesFloor(l *ledger) string {
	if a.p.Outsiders == 0 && countFree(&a.s.machines, l) < int(l.floor)-int(a.s.raised) {
		return "I6 a Machine of the floor is named for a claim"
	}
	return ""
}

func (a *agent) label(c, i int) {
	next := *a.s
	next.machines[i] = a.v.machines[i].labelled(c + 1)
	violation := ""
	if !a.p.Rules.Report {
		if next.first[c] != 0 && int(next.first[c]) != i+1 {
			violation = "I1t a claim is labelled on a second Machine over time"
		}
		next.first[c] = uint8(i + 1)
	}
	if a.s.claims[c].phase() == ended {
		violation = "E1 a Machine is labelled for an ended claim"
	}
	a.emit(&next, act(a.id, label, c+1, i), violation)
}

// claimPhase moves the MachineClaim.
func (a *agent) claimPhase(c, mine int) {
	v, rules := a.v, &a.p.Rules
	at, entry := v.claims[c].phase(), v.ledger.pending[c]
	switch i := int(entry) - named; {
	case rules.MCFirst:
		if at == pending && i >= 0 && v.machines[i].alive() && v.machines[i].label() == 0 && !v.machines[i].finalized() {
			a.writeClaim(c, boundTo(i), bind, c+1, i, "")
		}
	case at == pending && mine >= 0 && v.machines[mine].alive():
		a.writeClaim(c, boundTo(mine), bind, c+1, mine, "")
	}
	lost := false
	if at == bound {
		m := v.claims[c].machine()
		lost = a.gone(m) || v.machines[m].phase() == deleting || v.machines[m].phase() == held
	}
	if !rules.MCFirst && at == pending && mine >= 0 && !v.machines[mine].alive() {
		lost = true
	}
	if lost {
		violation := ""
		if at == bound && a.s.machines[v.claims[c].machine()].alive() {
			violation = "E2 a claim ends as lost and its Machine lives"
		}
		a.writeClaim(c, v.claims[c].in(ended), endLost, c+1, 0, violation)
	}
	if at == releasing && entry == noEntry && (mine < 0 || v.machines[mine].phase() == held) && (!rules.End || a.machinesAfter() && a.claimsBefore()) {
		violation := ""
		for _, m := range a.s.machines {
			if m.label() == c+1 && m.phase() >= fresh && m.phase() <= deleting {
				violation = "E3 a release is reported done and the Machine is there"
			}
		}
		if a.s.ledger.pending[c] != noEntry {
			violation = "E4 a release is reported done and the claim is in the ledger"
		}
		a.writeClaim(c, v.claims[c].in(ended), endReleased, c+1, 0, violation)
	}
}

func (a *agent) account(base ledger) {
	if a.p.Rules.Account && !a.machinesAfter() {
		return
	}
	used := int(base.floor)
	for _, entry := range base.pending {
		if entry != noEntry {
			used++
		}
	}
	for i, m := range a.v.machines {
		switch {
		case base.releasing&bit(i) != 0:
			if base.givenBack&bit(i) == 0 {
				used++
			}
		case m.exists() && m.label() != 0 && base.pending[m.label()-1] == noEntry:
			used++
		}
	}
	l := base
	switch spare := int(base.replicas) - used; {
	case spare >= 0 && spare != int(base.spare):
		l.spare = uint8(spare)
		a.write(l, account, spare-1, 0, "")
	case spare < 0 && a.p.Heal:
		l.replicas += uint8(-spare)
		l.lastReplicas, l.spare = l.replicas, 0
		a.write(l, accountRaise, -spare, 0, "")
	case spare < 0:
		if a.p.Rules.Account {
			next := *a.s
			a.emit(&next, act(a.id, accountNegative, 0, 0), "A1 the accounting is negative")
		}
	case a.v.ledger.lastReplicas != a.v.ledger.replicas:
		a.write(base, accountFold, 0, 0, "")
	}
}

// spares releases Machines that nobody claims.
func (a *agent) spares(base ledger) {
	for c := range maxClaims {
		if base.pending[c] == unnamed {
			return
		}
	}
	if base.spare == 0 || a.p.Rules.Release && !a.machinesAfter() || countFree(&a.v.machines, &base) <= int(base.floor) {
		return
	}
	for i, m := range a.v.machines {
		if free(m, i, &base) {
			l := base
			l.spare--
			l.releasing |= bit(i)
			a.write(l, releaseSpare, i, 0, "")
		}
	}
}

// release does the steps of releasing Machine i. Whether it is gone, or torn down, is read live.
func (a *agent) release(i int, base ledger) {
	v, s := a.v, a.s
	if v.ledger.releasing&bit(i) == 0 {
		return
	}
	m := v.machines[i]
	if v.ledger.givenBack&bit(i) != 0 {
		if (s.fence[i] == 3 || a.p.NoFence) && s.machines[i].phase() == held {
			a.writeMachine(i, s.machines[i].in(gone), letGo, i, 0, "")
		}
		if a.ledgerFresh() && s.machines[i].phase() == gone {
			next := *s
			next.ledger = base
			next.ledger.releasing &^= bit(i)
			next.ledger.givenBack &^= bit(i)
			next.fence[i] = 0
			a.emit(&next, act(a.id, dropRelease, i, 0), "")
		}
		return
	}
	if m.alive() && !m.finalized() && v.machinesFresh&bit(i) != 0 {
		a.writeMachine(i, m|finalized, finalize, i, 0, "")
	}
	if m.alive() && m.finalized() && s.machines[i].alive() {
		a.writeMachine(i, s.machines[i].in(deleting), deleteMachine, i, 0, a.deletesOthers(i))
	}
	if at := s.machines[i].phase(); a.ledgerFresh() && s.machines[i].finalized() && (at == held || a.p.Early && at == deleting) {
		next := *s
		next.ledger = base
		next.ledger.replicas--
		next.ledger.lastReplicas = next.ledger.replicas
		next.ledger.givenBack |= bit(i)
		next.fence[i] = 1
		a.emit(&next, act(a.id, lower, i, 0), "")
	}
	if a.ledgerFresh() && s.machines[i].phase() == gone { // somebody else deleted it, and we did not hold it
		l := base
		l.releasing &^= bit(i)
		a.write(l, forget, i, 0, "")
	}
}

// deletesOthers is I3 for what the agent deletes.
func (a *agent) deletesOthers(i int) string {
	s := a.s
	l := s.machines[i].label()
	switch {
	case l != 0:
		if at := s.claims[l-1].phase(); at == pending || at == bound {
			return "I3 the agent deletes a claimed Machine"
		}
	case s.ledger.names(i):
		return "I3 the agent deletes a named Machine"
	case a.p.Outsiders == 0:
		n := 0
		for j, x := range s.machines {
			if j != i && x.alive() && x.label() == 0 && !s.ledger.names(j) && s.ledger.releasing&bit(j) == 0 {
				n++
			}
		}
		if n < a.p.Floor {
			return "I3 the agent deletes a Machine of the floor"
		}
	}
	return ""
}
