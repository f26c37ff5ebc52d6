package engine

// Check checks I1, and that every label belongs to a claim.
func (p *Protocol) Check(s *State) string {
	var labelled uint8
	for g := range p.Groups {
		for _, m := range s.groups[g].machines {
			if m.label == 0 || !m.exists() {
				continue
			}
			if labelled&bit(int(m.label)) != 0 {
				return "I1 two Machines are labelled with one claim"
			}
			labelled |= bit(int(m.label))
		}
	}
	if x, y := s.claims[0], s.claims[1]; p.without(Anchor) && x.phase == bound && y.phase == bound && x.group != y.group {
		return "I1 one claim has a Machine in each of two groups"
	}
	for c, x := range s.claims {
		if x.phase != bound {
			continue
		}
		for _, y := range s.claims[c+1:] {
			if y.phase == bound && x.group == y.group && x.machine == y.machine && s.groups[x.group].machines[x.machine-1].alive() {
				return "I1 two claims are bound to one Machine"
			}
		}
	}
	return ""
}

// CheckAtRest checks I2.
func (p *Protocol) CheckAtRest(s *State) string {
	for c, x := range s.claims {
		if x.live() && s.asked&bit(c) != 0 {
			return "T1 a claim lives whose release was asked for"
		}
	}
	for g := range p.Groups {
		if kind := p.groupAtRest(s, g); kind != "" {
			return kind
		}
	}
	return ""
}

func (p *Protocol) groupAtRest(s *State, g int) string {
	at := &s.groups[g]
	if at.md.paused == byHuman || at.md.frozen != 0 || !at.md.sizesUsable() || at.blocked != 0 && !p.BlockedForGood {
		return "" // nothing needs to come to an end meanwhile
	}
	live := 0
	for c, x := range s.claims {
		if int(x.group) != g {
			continue
		}
		switch x.phase {
		case made, pending:
			if at.blocked != 0 || s.refused[c]&bit(g) != 0 || at.md.max > 0 && at.md.replicas >= at.md.max {
				return "" // it waits for a Machine or for room, until its deadline or its caller ends it
			}
			return "I2 a pending claim is stuck"
		case releasing:
			return "I2 a release is stuck"
		case bound:
			if x.returns != 0 {
				return "I2 a return is stuck"
			}
			live++
			if m := at.machines[x.machine-1]; int(m.label) != c+1 || !m.alive() {
				return "I2 a bound claim is without its Machine"
			}
		default:
		}
	}
	exist := 0
	for _, m := range at.machines {
		if !m.exists() {
			continue
		}
		exist++
		if m.has(finalized) {
			return "I4 a Machine keeps our finalizer"
		}
	}
	if at.md.paused == byAgent {
		return "I4 the MachineDeployment is left paused"
	}
	for _, set := range at.sets {
		if set.paused == byAgent {
			return "I4 a MachineSet is left paused"
		}
	}
	l := &at.ledger
	want := int(max(at.owned, at.md.min)) + live
	if p.Wipes > 0 { // what can no longer be explained is the floor's, and never the reverse
		if l.present == 0 {
			return ""
		}
		if l.floor < at.owned {
			return "I6 the floor is lower than what the user owns"
		}
		want = int(l.floor) + live
	}
	if n := int(at.md.replicas); at.md.max > 0 && want > int(at.md.max) && n < want {
		want = max(n, int(at.owned)+live, int(at.md.max)) // the max size leaves no room for more
	}
	switch {
	case int(at.md.replicas) != want:
		return "I2 replicas are not floor and claims"
	case exist != want && at.blocked == 0:
		return "I2 Machines are not floor and claims"
	case l.present != 0 && l.floor != at.owned && p.Wipes == 0:
		return "I2 the floor is wrong"
	case l.releasing != 0 || l.shrinks != 0 || l.returned != [maxClaims]uint8{} || l.pending != [maxClaims]uint8{} && at.blocked == 0:
		return "I2 the ledger holds on to something"
	}
	return ""
}
