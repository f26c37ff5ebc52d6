// Package engine models the world around the claim protocol, small enough to be explored: the code
// around [protocol.Decide], Cluster API, callers and users. The decisions are the agent's own. The
// model includes the order of the reads, what each write tests, calls that move a claim to its next
// candidate, and a second agent that acts late on all of it.
package engine

import (
	"hash/maphash"
	"math/bits"
)

// Limits of the model: the sizes of arrays. Unused elements only cost memory.
const (
	maxGroups   = 2
	maxMachines = 6 // in one group
	maxClaims   = 3
	maxSets     = 3
)

// phase is the phase of a Machine.
type phase uint8

const (
	absent   phase = iota // never made
	fresh                 // made, no Node yet
	joined                // has a Node
	deleting              // has a deletion timestamp; its instance is still to be stopped
	held                  // torn down; only our finalizer remains
	gone
)

// Flags of a Machine.
const (
	finalized uint8 = 1 << iota // our finalizer and the delete annotation, written together
	outdated                    // Cluster API reports it as not up to date
	marked                      // the delete annotation alone
	floors                      // marked as the floor's
)

type machine struct {
	phase phase
	set   uint8 // the number of its MachineSet
	label uint8 // the claim in its label, from 1
	flags uint8
}

func (m machine) has(flag uint8) bool { return m.flags&flag != 0 }
func (m machine) alive() bool         { return m.phase == fresh || m.phase == joined }
func (m machine) exists() bool        { return m.phase >= fresh && m.phase <= held }

// tested returns what the agent's patches of a Machine test, which excludes what Cluster API
// reports about it.
func (m machine) tested() machine {
	if m.phase == joined {
		m.phase = fresh
	}
	m.flags &= finalized | marked | floors
	return m
}

// Phases of a claim. New objects have no status yet.
type claimPhase uint8

const (
	unmade claimPhase = iota
	made              // the object exists, and no agent has marked it as entered
	pending
	bound
	releasing
	ended
)

type claim struct {
	phase   claimPhase
	machine uint8 // its Machine, from 1
	group   uint8
	adopt   uint8 // the Machine that it adopts, from 1
	returns uint8 // it returns its Machine to the user
}

// live reports whether the claim has a right to a Machine.
func (c claim) live() bool { return c.phase >= made && c.phase <= bound }

// The actor that paused an object.
const (
	notPaused uint8 = iota
	byAgent
	byHuman
)

type machineSet struct {
	exists   uint8
	replicas uint8
	saw      uint8 // the replicas that its controller acts on
	observed uint8 // its status reports the present spec as observed
	foreign  uint8 // an agent wrote the present spec, and Cluster API's cache does not show it yet
	paused   uint8
	isPaused uint8 // its status reports it as paused
	counted  uint8 // while isPaused: the number of Machines in its status
	released uint8 // mask: Machines that it was lowered for under pause
}

// deployment is a MachineDeployment without its ledger.
type deployment struct {
	replicas uint8
	template uint8 // the number of the MachineSet of the present template
	paused   uint8
	isPaused uint8
	observed uint8 // its status reports the present generation as observed
	carried  uint8 // mask: releases whose decrement it has observed
	frozen   uint8 // it has the annotation that marks the group as frozen
	max, min uint8 // the sizes; a max size of 0 means none
}

// unreadable is an invalid size.
const unreadable = 255

// sizesUsable reports whether the agent can read the sizes.
func (d *deployment) sizesUsable() bool {
	return d.max != unreadable && d.min != unreadable && (d.max == 0 || d.min <= d.max)
}

// Entries of pending claims in the ledger.
const (
	noEntry    uint8 = 0
	unassigned uint8 = 1
	assigned   uint8 = 2 // plus the Machine's number
)

// ledger is the ledger annotation. Everything about a release, except its Machine and whether
// replicas were decremented, is in masks.
type ledger struct {
	present             uint8
	floor, lastReplicas uint8
	pending             [maxClaims]uint8
	adopted             uint8 // mask of claims: the floor was lowered for them
	releasing           uint8 // masks of Machines
	decremented         uint8
	underPause          uint8 // its MachineSet is lowered under pause
	lowered             uint8 // the group is frozen
	shrinks             uint8 // the MachineSet, from 1, that is paused while the replicas of spares that never came are decremented
	shrunk              uint8 // that was done, or is no longer to be done
	min                 uint8 // the min size in force
	written, restored   uint8 // the replicas that another writer set last, from 1, and how often they were set again
	// returned is, for each claim, the Machine, from 1, that it has returned and that still has its
	// label.
	returned [maxClaims]uint8
}

func bit(i int) uint8 { return 1 << uint(i) }

func (l *ledger) names(m int) bool {
	for _, entry := range l.pending {
		if entry == assigned+uint8(m) {
			return true
		}
	}
	return false
}

// seenMachine is a Machine in Cluster API's cache.
type seenMachine struct {
	phase phase
	flags uint8
}

type group struct {
	md       deployment
	ledger   ledger
	sets     [maxSets]machineSet
	machines [maxMachines]machine
	seen     [maxMachines]seenMachine

	owned   uint8 // what the user owns, to the user's knowledge
	mercy   uint8 // how many Machines may still be removed because a user lowered replicas
	peak    uint8 // the largest number of replicas that a user requested
	blocked uint8 // its MachineSets cannot make Machines
}

// snapshot is one agent's reading of a group.
type snapshot struct {
	md       deployment
	ledger   ledger
	claims   [maxClaims]claim // of this group, not ended; and ended ones that are in a Machine's label
	sets     [maxSets]machineSet
	machines [maxMachines]machine
}

// Steps of one reading, in the order of the agent's.
const (
	nothingRead uint8 = iota
	deploymentRead
	claimsRead
	setsRead
	allRead
	ledgerChecked // after all of that, the ledger was read again and was unchanged
)

// reader is a stale agent: its reading, and which parts of it are still current.
type reader struct {
	step  uint8
	group uint8
	s     snapshot

	unmade uint8 // mask: claims that did not exist yet when the MachineDeployment was read

	ledgerFresh     uint8 // the seq is unchanged
	generationFresh uint8
	objectFresh     uint8 // the MachineDeployment's resourceVersion
	claimsFresh     uint8 // masks: the resourceVersions
	setsFresh       uint8
	machinesFresh   uint8 // masks: what the agent's patches test of them, and the resourceVersions
	machinesSame    uint8
	labels          uint8 // mask of claims: it has just bound them, and is about to label their Machines
	deletes         uint8 // mask of Machines: it has just added the finalizer to them, and is about to delete them
}

// State is a state of the model. It consists of bytes only, so that it can be hashed directly.
type State struct {
	groups [maxGroups]group
	claims [maxClaims]claim
	// refused holds, for each claim, the groups that refused it in a call that has not acted on the
	// refusal yet.
	refused [maxClaims]uint8
	agents  [2]reader

	used   uint8 // mask: claims that have been made
	asked  uint8 // mask: claims whose release was requested
	given  uint8 // mask: claims that have returned their Machine to the user
	repeat uint8 // mask: claims whose first call may still arrive once more
	left   counters
}

// counters are the remaining numbers of the limited moves.
type counters struct {
	outsiders, raises, lowers, rollouts, wipes, pauses, blocks, sizes uint8
}

var seed = maphash.MakeSeed()

// Key identifies the state. Claims and Machines are distinguished by their age, and two stale
// agents not at all.
func (p *Protocol) Key(s *State) uint64 {
	if p.StaleAgents == 2 {
		t := *s
		t.agents[0], t.agents[1] = t.agents[1], t.agents[0]
		return min(maphash.Comparable(seed, *s), maphash.Comparable(seed, t))
	}
	return maphash.Comparable(seed, *s)
}

// of returns the current snapshot of a group.
func (s *State) of(g int) snapshot {
	at := &s.groups[g]
	out := snapshot{md: at.md, ledger: at.ledger, sets: at.sets}
	out.claims = s.claimsOf(g)
	s.readMachines(g, &out)
	return out
}

// claimsOf returns the group's claims that have not ended.
func (s *State) claimsOf(g int) [maxClaims]claim {
	var list [maxClaims]claim
	for c, x := range s.claims {
		if int(x.group) == g && x.phase != ended {
			list[c] = x
		}
	}
	return list
}

// readMachines reads the Machines, and the claims in their labels that the list of claims does not
// contain.
func (s *State) readMachines(g int, into *snapshot) {
	for i, m := range s.groups[g].machines {
		if !m.exists() {
			into.machines[i] = machine{set: m.set} // the ledger knows the MachineSet of a Machine that is gone
			continue
		}
		into.machines[i] = m
		if m.label == 0 || into.claims[m.label-1].phase != unmade {
			continue
		}
		if c := s.claims[m.label-1]; c.phase == ended || c.phase != unmade && int(c.group) == g {
			into.claims[m.label-1] = c
		}
	}
}

// unmade returns the claims that no call has made yet.
func (s *State) unmade(claims int) uint8 {
	var mask uint8
	for c := range claims {
		if s.claims[c].phase == unmade && s.used&bit(c) == 0 {
			mask |= bit(c)
		}
	}
	return mask
}

func count(mask uint8) uint8 { return uint8(bits.OnesCount8(mask)) }

func b(yes bool) uint8 {
	if yes {
		return 1
	}
	return 0
}
