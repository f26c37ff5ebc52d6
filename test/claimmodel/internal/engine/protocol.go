package engine

import (
	"fmt"
	"strings"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Protocol is the protocol in one world. The zero value is an empty world; each field adds
// something that can happen.
type Protocol struct {
	// Groups is 1 or 2. Claims is at most 3. Each claim's candidates are the groups in order.
	Groups, Claims int
	// Floor is the initial floor of each group. Max is its max size, 0 for none.
	Floor, Max int
	// StaleAgents is 0 to 2, in addition to one agent that reads, decides and writes in one
	// instant.
	StaleAgents int
	// Young means that the floor's Machines initially have no Node.
	Young bool
	// Machines limits the number of Machines that one group makes in a run; 0 means the model's
	// maximum.
	Machines int

	// Sets is the initial number of MachineSets, each with one Machine of the floor, from older
	// templates; 0 means 1.
	Sets int
	// RollingUpdate replaces Machines of old templates automatically. Otherwise they are left alone
	// (OnDelete).
	RollingUpdate bool
	// Adopt lets the last claim adopt the first Machine.
	Adopt bool
	// Return lets a Bound claim return its Machine to the user.
	Return bool
	// Repeat lets the call that makes a claim arrive a second time, at any time, and lets calls
	// that release a claim arrive before it.
	Repeat bool
	// Forget drops ended claims once no call for them is in flight.
	Forget bool

	// Number of external events.
	Outsiders int // another actor deletes a Machine
	Raises    int // a user raises replicas
	Lowers    int // a user lowers replicas, never below what is claimed
	Rollouts  int // the template changes
	Wipes     int // the ledger is wiped
	Pauses    int // a user pauses a MachineDeployment, and unpauses it at any time
	Blocks    int // the MachineSets of a group cannot make Machines, until any later time
	Sizes     int // a user sets the max or the min size to another number, or to an unreadable one, and back at any time
	// AtOnce restricts the stale agents to entering claims at once, based on their caches.
	AtOnce bool
	// BlockedForGood makes blocks permanent.
	BlockedForGood bool

	// Without leaves out rules. Leaving out any rule must cause a violation.
	Without Rule

	// Caches of the agent's decisions, and of the objects in their input.
	decisions  map[question]decision
	claims     map[keyed[claim]]*v1alpha1.MachineClaim
	sets       map[keyed[machineSet]]*clusterv1.MachineSet
	machinesOf map[keyed[machine]]*clusterv1.Machine
}

// Rule is a rule that the code around [protocol.Decide] follows and that can be left out. Several
// are joined by |. The rules of the decision itself are left out by mutants of the agent's source,
// see package mutants there.
type Rule uint32

// The rules.
const (
	// Seq distinguishes two ledgers of the same content.
	Seq Rule = 1 << iota
	// ReleasedTogether records the released Machine in the same write that lowers its MachineSet.
	ReleasedTogether
	// TestTemplate performs a write that depends on the template only if the template is unchanged
	// since it was read: the decrement after a release, a choice of spares, and the removal of
	// spares that never came.
	TestTemplate
	// Anchor: a claim is one object, created once. Without it each group has its own object, and
	// claims 0 and 1 are the same claim.
	Anchor
	// TestPause pauses a MachineDeployment only if it is unchanged since it was read.
	TestPause
	// LateForget retains ended claims until no call for them can arrive.
	LateForget
	// Tombstone records the release of an unknown claim.
	Tombstone
	// LiveAfterLedger (R1) reads claims and Machines after the ledger that the write tests.
	LiveAfterLedger
	// CheckLedger (R2) reads the ledger again after the objects to be written.
	CheckLedger
	// TestMachine labels a Machine only if it is unchanged since it was read.
	TestMachine
	// TestSizes raises replicas only if the max size is unchanged since it was read, and lowers
	// them only if the min size is.
	TestSizes
	// TestEntry enters a claim at once only if the MachineDeployment and its ledger are unchanged
	// since they were read.
	TestEntry
)

var ruleNames = strings.Fields(`seq released-together test-template anchor test-pause late-forget tombstone live-after-ledger check-ledger
	test-machine test-sizes test-entry`)

// ParseRules parses comma-separated names of rules.
func ParseRules(text string) (Rule, error) {
	var r Rule
next:
	for name := range strings.SplitSeq(text, ",") {
		if name == "" {
			continue
		}
		for i, known := range ruleNames {
			if known == name {
				r |= 1 << i
				continue next
			}
		}
		return 0, fmt.Errorf("no rule %q; there are %s", name, strings.Join(ruleNames, ", "))
	}
	return r, nil
}

// String returns the names of the rules.
func (r Rule) String() string {
	var names []string
	for i, name := range ruleNames {
		if r&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

func (p *Protocol) without(r Rule) bool { return p.Without&r != 0 }

func (p *Protocol) machines() int {
	if p.Machines == 0 {
		return maxMachines
	}
	return p.Machines
}

// Initial returns the initial state: every group at rest, with only its floor and without a ledger.
func (p *Protocol) Initial() State {
	var s State
	sets := max(1, p.Sets)
	for g := range p.Groups {
		at := &s.groups[g]
		floor := uint8(p.Floor)
		at.md = deployment{replicas: floor, template: uint8(sets - 1), observed: 1, max: uint8(p.Max)}
		at.owned, at.peak = floor, floor
		for i := range sets {
			at.sets[i] = machineSet{exists: 1, observed: 1}
		}
		for i := range p.Floor {
			set := min(i, sets-1)
			at.machines[i] = machine{phase: joined, set: uint8(set)}
			if p.RollingUpdate {
				at.machines[i].set = uint8(sets - 1)
				set = sets - 1
			}
			if p.Young {
				at.machines[i].phase = fresh
			}
			at.seen[i] = seenMachine{phase: at.machines[i].phase}
			at.sets[set].replicas++
			at.sets[set].saw++
		}
		if p.AtOnce { // which does not begin a ledger
			at.ledger = ledger{present: 1, floor: floor, lastReplicas: floor, written: floor + 1}
		}
	}
	s.left = counters{
		outsiders: uint8(p.Outsiders), raises: uint8(p.Raises), lowers: uint8(p.Lowers), rollouts: uint8(p.Rollouts),
		wipes: uint8(p.Wipes), pauses: uint8(p.Pauses), blocks: uint8(p.Blocks), sizes: uint8(p.Sizes),
	}
	return s
}

// Exhausted reports whether a group has made as many Machines as it may.
func (p *Protocol) Exhausted(s *State) bool {
	for g := range p.Groups {
		if s.groups[g].machines[p.machines()-1].phase != absent {
			return true
		}
	}
	return false
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
		for g := range p.Groups {
			p.controllers(s, g, after)
		}
	case explore.Live:
		for g := range p.Groups {
			p.liveAgent(s, g, false, after)
			p.liveAgent(s, g, true, after)
		}
	case explore.Patient:
		for g := range p.Groups {
			p.liveAgent(s, g, true, after)
		}
	case explore.Stale:
		for a := range p.StaleAgents {
			p.staleAgent(s, a, after)
		}
	default:
		for a := range p.StaleAgents {
			p.reads(s, a, after)
		}
	}
}

// refute marks the stale agents' readings of objects that just changed as outdated, so that a
// compare-and-swap fails.
func (p *Protocol) refute(before, after *State) {
	for a := range p.StaleAgents {
		v := &after.agents[a]
		if v.step == nothingRead {
			continue
		}
		was, is := &before.groups[v.group], &after.groups[v.group]
		if was.ledger != is.ledger {
			v.ledgerFresh, v.objectFresh = 0, 0
			if p.AtOnce && !p.without(TestEntry) {
				// Only the rest is still useful: caches may show it beside a newer ledger, as long
				// as another claim may come.
				v.s.md, v.s.ledger, v.unmade = deployment{}, ledger{}, 0
				if after.unmade(p.Claims) == 0 {
					*v = reader{}
					continue
				}
			}
		}
		if p.without(Seq) && is.ledger == v.s.ledger {
			v.ledgerFresh = 1
		}
		if was.md != is.md {
			v.objectFresh = 0
		}
		if was.md.replicas != is.md.replicas || was.md.template != is.md.template {
			v.generationFresh = 0
		}
		for i := range is.machines {
			if was.machines[i] != is.machines[i] {
				v.machinesSame &^= bit(i)
			}
			if was.machines[i].tested() != is.machines[i].tested() {
				v.machinesFresh &^= bit(i)
			}
		}
		for i := range is.sets {
			if set := is.sets[i]; was.sets[i] != set && changed(was.sets[i], set) {
				v.setsFresh &^= bit(i)
			}
		}
		for c := range after.claims {
			if before.claims[c] != after.claims[c] {
				v.claimsFresh &^= bit(c)
			}
		}
	}
}

// changed reports whether the object changed, apart from what Cluster API's cache shows of it.
func changed(before, after machineSet) bool {
	before.saw, before.foreign = after.saw, after.foreign
	return before != after
}

// The verbs of transitions.
const (
	createClaim = iota + 1
	repeatCreate
	releaseClaim
	returnMachine
	makeTombstone
	outsiderDeletes
	humanRaises
	humanLowers
	humanRollsOut
	userWipes
	humanThaws
	humanPauses
	humanUnpauses
	humanSetsSizes
	somethingBlocks
	somethingUnblocks
	callMoves
	callEnds
	forgetClaim
	setMade
	deploymentPaused
	deploymentScales
	deploymentObserves
	setPaused
	setObserves
	setSees
	setCreates
	setDeletes
	nodeJoins
	machineOutdated
	tornDown
	readDeployment
	readClaims
	readSets
	readMachines
	checkLedger
	showDeployment
	writeLedger
	refuse
	doMark
	doBind
	doRestore
	doLabel
	doUnbind
	doEnd
	doFinalizer
	doDelete
	doKeep
	doFinalizerOff
	doPauseSet
	doUnpauseSet
	doLowerSet
	doNoteReleased
	doReturn
)

// wording describes transitions. %g is the group, and %x and %y are the numbers, counted from 0.
var wording = [...]string{
	createClaim: "CreateClaim c%x (group %g)", repeatCreate: "CreateClaim c%x once more (group %g)", releaseClaim: "ReleaseClaim c%x",
	returnMachine: "ReturnMachine c%x",
	makeTombstone: "ReleaseClaim c%x, unknown: a tombstone", outsiderDeletes: "another actor deletes m%x", humanRaises: "a human raises replicas to %x",
	humanLowers: "a human lowers replicas to %x", humanRollsOut: "a human changes the template to %x", userWipes: "a user wipes the ledger",
	humanThaws:  "a human clears the freeze",
	humanPauses: "a human pauses the MachineDeployment", humanUnpauses: "the human un-pauses it",
	humanSetsSizes:    "a human sets the max size to %x and the min size to %y (255: no number)",
	somethingBlocks:   "creation is blocked",
	somethingUnblocks: "creation is possible again", callMoves: "call: c%x moves to group %g", callEnds: "call: c%x Ended (no room)",
	forgetClaim: "the tombstone of c%x is forgotten", setMade: "MachineDeployment: makes set %x",
	deploymentPaused: "MachineDeployment: condition Paused=%x", deploymentScales: "MachineDeployment: set %x to %y replicas",
	deploymentObserves: "MachineDeployment: observes its generation", setPaused: "set %x: condition Paused=%y",
	setObserves: "set %x: observes replicas=%y", setSees: "Cluster API's cache shows m%x", setCreates: "set %x: creates m%y",
	setDeletes: "set %x: DELETES m%y", nodeJoins: "m%x has a Node", machineOutdated: "m%x: condition UpToDate changes",
	tornDown:       "m%x is torn down",
	readDeployment: "reads MachineDeployment and ledger", readClaims: "reads claims", readSets: "reads MachineSets", readMachines: "reads Machines",
	checkLedger: "reads the ledger again, unchanged", writeLedger: "writes the ledger", showDeployment: "its cache shows a newer MachineDeployment",
	refuse: "refuses c%x", doMark: "c%x Pending",
	doBind: "c%x Bound to m%y", doRestore: "c%x restored to m%y", doLabel: "labels m%y for c%x", doUnbind: "takes the label of c%x off m%y",
	doEnd: "c%x Ended", doFinalizer: "finalizer on m%x", doDelete: "DELETE m%x", doKeep: "keeps m%x: finalizer off", doFinalizerOff: "finalizer off m%x",
	doPauseSet: "pauses set %x", doUnpauseSet: "un-pauses set %x", doLowerSet: "lowers set %x to %y",
	doNoteReleased: "notes on set %x what it was lowered for", doReturn: "returns m%x: label off",
}

const (
	liveAgentID = 2
	environment = 3
)

func act(who, group, what, x, y int) explore.Act {
	return explore.Act(who<<28 | group<<24 | what<<16 | x<<8 | y)
}

// Describe describes a transition in words. A ledger write is reduced to its numbers: replicas and
// the entries.
func (p *Protocol) Describe(a explore.Act) string {
	who := [...]string{"agent 0: ", "agent 1: ", "live agent: ", ""}[a>>28]
	text := strings.NewReplacer(
		"%g", fmt.Sprint(a>>24&15), "%x", fmt.Sprint(a>>8&255), "%y", fmt.Sprint(a&255),
	).Replace(wording[a>>16&255])
	if p.Groups > 1 && !strings.Contains(wording[a>>16&255], "%g") {
		who = fmt.Sprintf("group %d: ", a>>24&15) + who
	}
	if what := a >> 16 & 255; what == writeLedger {
		text += fmt.Sprintf(" (replicas %d, floor %d, pending %d named %d, releasing %d given back %d%s)",
			a>>12&15, a>>9&7, a>>7&3, a>>5&3, a>>3&3, a>>1&3, map[bool]string{true: ", pause changed"}[a&1 == 1])
	}
	return who + text
}

// describeLedger encodes a ledger write as a transition.
func describeLedger(who, g int, d *decision) explore.Act {
	entries, names := 0, 0
	for _, entry := range d.ledger.pending {
		entries += int(b(entry != noEntry))
		names += int(b(entry >= assigned))
	}
	x := int(d.replicas)&15<<12 | int(d.ledger.floor)&7<<9 | min(entries, 3)<<7 | min(names, 3)<<5 |
		min(int(count(d.ledger.releasing)), 3)<<3 | min(int(count(d.ledger.decremented)), 3)<<1 | int(b(d.pause != protocol.PauseKeep))
	return explore.Act(who<<28 | g<<24 | writeLedger<<16 | x)
}
