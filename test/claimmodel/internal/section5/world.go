package section5

import (
	"slices"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// controllers are Cluster API's and the infrastructure's: the MachineDeployment copies replicas to the MachineSet, which sees
// them later; its view of Machines lags except for its own writes; it deletes by priority, and ties are free.
func (p *Protocol) controllers(s *State, emit explore.Emit[State]) {
	move := func(next *State, what, x int, violation string) { emit(next, act(nobody, what, x, 0), violation) }
	if s.set != s.ledger.replicas || slices.Contains(s.fence[:], 1) {
		next := *s
		next.set = s.ledger.replicas
		advance(&next.fence, 1)
		move(&next, deploymentScales, int(next.set), "")
	}
	if s.saw != s.set || slices.Contains(s.fence[:], 2) {
		next := *s
		next.saw = s.set
		advance(&next.fence, 2)
		move(&next, setObserves, int(next.saw), "")
	}
	total, going := 0, 0
	for i, m := range s.machines {
		if want := m.asControllersSee(); s.seen[i] != want {
			next := *s
			next.seen[i] = want
			move(&next, setSees, i, "")
		}
		if m.phase() == fresh {
			next := *s
			next.machines[i] = m.in(joined)
			move(&next, nodeJoins, i, "")
		}
		if m.phase() == deleting && s.seen[i].phase() == deleting {
			next := *s
			if m.finalized() {
				next.machines[i] = m.in(held)
			} else {
				next.machines[i] = machine(gone).labelled(m.label())
			}
			move(&next, tornDown, i, "")
		}
		if s.seen[i].exists() {
			total++
			if !s.seen[i].alive() {
				going++
			}
		}
	}
	if total < int(s.saw) {
		if k := slices.Index(s.machines[:], machine(absent)); k >= 0 {
			next := *s
			next.machines[k], next.seen[k] = machine(fresh), machine(fresh)
			move(&next, setCreates, k, "")
		}
	}
	if total > going && total-int(s.saw) > going {
		p.victims(s, move)
	}
}

func advance(fence *[maxMachines]uint8, from uint8) {
	for i := range fence {
		if fence[i] == from {
			fence[i]++
		}
	}
}

// victims emits every Machine that the MachineSet may delete.
func (p *Protocol) victims(s *State, move func(next *State, what, x int, violation string)) {
	priority := func(m machine) int {
		switch {
		case !m.alive():
			return 0
		case m.finalized():
			return 3
		case m.phase() == fresh:
			return 2
		}
		return 1
	}
	best := 0
	for _, m := range s.seen {
		best = max(best, priority(m))
	}
	for i, m := range s.seen {
		if !m.alive() || priority(m) != best {
			continue
		}
		next := *s
		violation := ""
		if s.machines[i].alive() {
			next.machines[i] = s.machines[i].in(deleting)
			if s.ledger.releasing&bit(i) == 0 {
				violation = "I3 the MachineSet deletes a Machine that nobody released"
			}
		}
		next.seen[i] = next.seen[i].in(deleting)
		move(&next, setDeletes, i, violation)
	}
}

// outside are callers, people and failures.
func (p *Protocol) outside(s *State, emit explore.Emit[State]) {
	for c := range p.Claims {
		next := *s
		switch s.claims[c].phase() {
		case unmade:
			next.claims[c] = pending
			emit(&next, act(nobody, createClaim, c+1, 0), "")
		case pending, bound:
			next.claims[c] = s.claims[c].in(releasing)
			emit(&next, act(nobody, releaseClaim, c+1, 0), "")
		default:
		}
	}
	if s.outside > 0 {
		for i, m := range s.machines {
			if m.alive() && m.label() != 0 {
				next := *s
				next.machines[i] = m.in(deleting)
				next.outside--
				emit(&next, act(nobody, outsiderDeletes, i, 0), "")
			}
		}
	}
	if s.raises > 0 {
		next := *s
		next.ledger.replicas++
		next.raises--
		next.raised++
		emit(&next, act(nobody, humanRaises, 0, 0), "")
	}
}

// Check is I1.
func (p *Protocol) Check(s *State) string {
	for i := range s.machines {
		for j := i + 1; j < maxMachines; j++ {
			if l := s.machines[i].label(); l != 0 && l == s.machines[j].label() && s.machines[i].exists() && s.machines[j].exists() {
				return "I1 two Machines are labelled with one claim"
			}
		}
	}
	for c := range s.claims {
		for d := c + 1; d < maxClaims; d++ {
			if s.claims[c].phase() == bound && s.claims[c] == s.claims[d] && s.machines[s.claims[c].machine()].alive() {
				return "I1 two claims are bound to one Machine"
			}
		}
	}
	return ""
}

// CheckAtRest is I2.
func (p *Protocol) CheckAtRest(s *State) string {
	exist := 0
	for _, m := range s.machines {
		if m.exists() {
			exist++
		}
	}
	live := 0
	for c := range s.claims {
		switch s.claims[c].phase() {
		case pending:
			return "I2 a pending claim is stuck"
		case releasing:
			return "I2 a release is stuck"
		case bound:
			live++
			if m := s.machines[s.claims[c].machine()]; m.label() != c+1 || !m.alive() {
				return "I2 a bound claim is without its Machine"
			}
		default:
		}
	}
	floor := p.Floor + int(s.raised)
	switch {
	case int(s.ledger.replicas) != exist:
		return "I2 replicas are not the Machines"
	case int(s.ledger.floor) != floor:
		return "I2 the floor is wrong"
	case int(s.ledger.replicas) != floor+live:
		return "I2 a leak: replicas are not floor and claims"
	case s.ledger.spare != 0 || s.ledger.releasing != 0 || s.ledger.pending != [maxClaims]uint8{}:
		return "I2 the ledger holds on to something"
	}
	return ""
}
