// Package section5 is the first model of the claim protocol, of the rules as the design states them: one MachineDeployment
// with one MachineSet, agents with stale caches, callers, somebody who deletes Machines and somebody who raises replicas.
//
// Every transition is one API write. An agent acts on a cache of three kinds (ledger, Machines, MachineClaims), each read
// again at any time and in any order; a write succeeds only if its object is unchanged since it was read. Agents have no
// other memory, so that a crash is a new reading and a lost reply a success that the cache does not show. Rules can be left
// out one at a time, to show what each is for.
package section5

import (
	"hash/maphash"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Bounds of the model: what an array holds. Runs with fewer claims use fewer; the unused ones cost only memory.
const (
	maxMachines = 5
	maxClaims   = 2
)

// phase is how far a Machine is.
type phase uint8

const (
	absent   phase = iota // never made
	fresh                 // made, no Node yet
	joined                // has a Node
	deleting              // has a deletion timestamp
	held                  // torn down; our finalizer is what is left
	gone
)

// machine is a phase (3 bits), a claim's label (2 bits) and whether it has our finalizer and the delete annotation (1 bit).
type machine uint8

const finalized machine = 1 << 5

func (m machine) phase() phase              { return phase(m & 7) }
func (m machine) label() int                { return int(m>>3) & 3 }
func (m machine) finalized() bool           { return m&finalized != 0 }
func (m machine) in(p phase) machine        { return m&^7 | machine(p) }
func (m machine) labelled(c int) machine    { return m&^24 | machine(c<<3) }
func (m machine) alive() bool               { return m.phase() == fresh || m.phase() == joined }
func (m machine) exists() bool              { return m.phase() >= fresh && m.phase() <= held }
func (m machine) asControllersSee() machine { return m &^ 24 }

// claim is a phase (3 bits) and the number of its Machine, from 1 (0 for none).
type claim uint8

const (
	unmade claim = iota
	pending
	bound
	releasing
	ended
)

func (c claim) phase() claim          { return c & 7 }
func (c claim) machine() int          { return int(c>>3) - 1 }
func (c claim) in(p claim) claim      { return c&^7 | p }
func boundTo(machineNumber int) claim { return bound | claim(machineNumber+1)<<3 }

// Entries of pending claims in the ledger.
const (
	noEntry = 0
	unnamed = 1
	named   = 2 // plus the Machine's number
)

type ledger struct {
	replicas, lastReplicas, floor, spare uint8
	pending                              [maxClaims]uint8
	releasing, givenBack                 uint8 // masks of Machines
}

// fold takes a human's change of replicas into the floor.
func (l *ledger) fold() {
	l.floor += l.replicas - l.lastReplicas
	l.lastReplicas = l.replicas
}

func (l *ledger) names(m int) bool {
	for _, entry := range l.pending {
		if int(entry) == named+m {
			return true
		}
	}
	return false
}

// cache is what one agent believes, with the freshness that each compare-and-swap tests.
type cache struct {
	ledger        ledger
	machines      [maxMachines]machine
	claims        [maxClaims]claim
	ledgerFresh   uint8 // the ledger's seq is as it was read
	machinesFresh uint8 // mask: the Machine's resourceVersion is as it was read
	claimsFresh   uint8
	machinesAfter uint8 // the Machines were read after the ledger, else before
	claimsAfter   uint8
}

// State is one of the model. It holds nothing but bytes, so that it can be hashed as they are.
type State struct {
	ledger   ledger
	set, saw uint8 // the MachineSet's replicas, and those that its controller acts on
	machines [maxMachines]machine
	seen     [maxMachines]machine // Cluster API's cache
	fence    [maxMachines]uint8   // 1 lowered, 2 carried to the MachineSet, 3 observed there
	claims   [maxClaims]claim
	first    [maxClaims]uint8 // the first Machine that was labelled for a claim, for the check alone
	outside  uint8            // deletions by others that are left
	raises   uint8            // raises by humans that are left
	raised   uint8
	agents   [2]cache
}

func bit(i int) uint8 { return 1 << uint(i) }

// live is the cache of an agent that reads everything in the instant in which it writes.
func (s *State) live() cache {
	return cache{
		ledger: s.ledger, machines: s.machines, claims: s.claims,
		ledgerFresh: 1, machinesFresh: 1<<maxMachines - 1, claimsFresh: 1<<maxClaims - 1, machinesAfter: 1, claimsAfter: 1,
	}
}

var seed = maphash.MakeSeed()

// Key is the same for two states that differ only in which claim, or which stale agent, is which.
func (p *Protocol) Key(s *State) uint64 {
	h := maphash.Comparable(seed, *s)
	if p.Claims != 2 {
		return h
	}
	t := *s
	swap(&t.ledger, &t.machines, &t.claims)
	t.first[0], t.first[1] = t.first[1], t.first[0]
	for a := range p.StaleAgents {
		v := &t.agents[a]
		swap(&v.ledger, &v.machines, &v.claims)
		v.claimsFresh = v.claimsFresh&^3 | v.claimsFresh&1<<1 | v.claimsFresh>>1&1
	}
	p.order(&t)
	return min(h, maphash.Comparable(seed, t))
}

// swap exchanges the two claims.
func swap(l *ledger, machines *[maxMachines]machine, claims *[maxClaims]claim) {
	l.pending[0], l.pending[1] = l.pending[1], l.pending[0]
	claims[0], claims[1] = claims[1], claims[0]
	for i, m := range machines {
		if m.label() != 0 {
			machines[i] = m.labelled(3 - m.label())
		}
	}
}

// order puts two stale agents into an order that does not depend on which is which.
func (p *Protocol) order(s *State) {
	if p.StaleAgents == 2 && maphash.Comparable(seed, s.agents[0]) > maphash.Comparable(seed, s.agents[1]) {
		s.agents[0], s.agents[1] = s.agents[1], s.agents[0]
	}
}

// Initial is a MachineDeployment at rest, of its floor alone.
func (p *Protocol) Initial() State {
	var s State
	floor := uint8(p.Floor)
	s.ledger = ledger{replicas: floor, lastReplicas: floor, floor: floor}
	s.set, s.saw = floor, floor
	for i := range p.Floor {
		s.machines[i], s.seen[i] = machine(joined), machine(joined)
	}
	s.outside, s.raises = uint8(p.Outsiders), uint8(p.Raises)
	for a := range p.StaleAgents {
		s.agents[a] = s.live()
	}
	return s
}

// Exhausted reports that the run has used all the Machines that it may make.
func (p *Protocol) Exhausted(s *State) bool {
	for _, m := range s.machines {
		if m.phase() == absent {
			return false
		}
	}
	return true
}

// Moves emits the transitions of one mover.
func (p *Protocol) Moves(who explore.Mover, s *State, emit explore.Emit[State]) {
	after := func(next *State, act explore.Act, violation string) {
		p.refute(s, next)
		emit(next, act, violation)
	}
	switch who {
	case explore.Outside:
		p.outside(s, after)
	case explore.Controllers:
		p.controllers(s, after)
	case explore.Live, explore.Patient:
		v := s.live()
		(&agent{p, s, &v, liveAgent, after}).moves()
	case explore.Stale:
		for a := range p.StaleAgents {
			v := s.agents[a]
			(&agent{p, s, &v, a, after}).moves()
		}
	default:
		p.reads(s, after)
	}
}

// refute makes the stale agents' readings of objects that just changed unfit for a compare-and-swap.
func (p *Protocol) refute(before, after *State) {
	for a := range p.StaleAgents {
		v := &after.agents[a]
		if after.ledger != before.ledger {
			v.ledgerFresh = 0
		}
		if p.NoSeq && after.ledger == v.ledger {
			v.ledgerFresh = 1
		}
		for i := range after.machines {
			if after.machines[i] != before.machines[i] {
				v.machinesFresh &^= bit(i)
			}
		}
		for c := range after.claims {
			if after.claims[c] != before.claims[c] {
				v.claimsFresh &^= bit(c)
			}
		}
	}
	p.order(after)
}

// reads emits what a stale agent can read again.
func (p *Protocol) reads(s *State, emit explore.Emit[State]) {
	for a := range p.StaleAgents {
		v := &s.agents[a]
		if v.ledger != s.ledger || v.ledgerFresh == 0 || v.machinesAfter == 1 || v.claimsAfter == 1 {
			next := *s
			w := &next.agents[a]
			w.ledger, w.ledgerFresh, w.machinesAfter, w.claimsAfter = s.ledger, 1, 0, 0
			emit(&next, act(a, readLedger, 0, 0), "")
		}
		if v.machines != s.machines || v.machinesFresh != 1<<maxMachines-1 || v.machinesAfter == 0 {
			next := *s
			w := &next.agents[a]
			w.machines, w.machinesFresh, w.machinesAfter = s.machines, 1<<maxMachines-1, 1
			emit(&next, act(a, readMachines, 0, 0), "")
		}
		if v.claims != s.claims || v.claimsFresh != 1<<maxClaims-1 || v.claimsAfter == 0 {
			next := *s
			w := &next.agents[a]
			w.claims, w.claimsFresh, w.claimsAfter = s.claims, 1<<maxClaims-1, 1
			emit(&next, act(a, readClaims, 0, 0), "")
		}
	}
}
