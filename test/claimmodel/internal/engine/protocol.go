package engine

import (
	"fmt"
	"strings"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Protocol is the protocol in one world. The zero value has nothing in it; each field adds something that can happen.
type Protocol struct {
	// Groups is 1 or 2. Claims is at most 3. Each claim's candidates are the groups in order.
	Groups, Claims int
	// Floor is each group's at first; Max its max size, 0 for none.
	Floor, Max int
	// StaleAgents is 0 to 2, beside one that reads, decides and writes in one instant.
	StaleAgents int
	// Young says that the floor's Machines have no Node yet at first.
	Young bool
	// Machines bounds how many one group makes in a run; 0 means the most that there can be.
	Machines int

	// Sets is how many MachineSets, each with one Machine of the floor, there are at first, from older templates; 0 means 1.
	Sets int
	// RollingUpdate replaces Machines of old templates by itself; else nothing happens to them (OnDelete).
	RollingUpdate bool
	// Adopt lets the last claim take over the first Machine.
	Adopt bool
	// Return lets a claim that is Bound return its Machine to the user.
	Return bool
	// Repeat lets the call that makes a claim arrive a second time, at any time, and calls that release one arrive before it.
	Repeat bool
	// Forget lets ended claims be forgotten once no call for them is under way.
	Forget bool

	// How often things happen from outside.
	Outsiders int // somebody deletes a Machine
	Raises    int // a human raises replicas
	Lowers    int // a human lowers replicas, never below what is claimed
	Rollouts  int // the template changes
	Wipes     int // the ledger is wiped
	Pauses    int // a human pauses a MachineDeployment, and un-pauses it at any time
	Blocks    int // the MachineSets of a group can make no Machines, and can again at any time
	Sizes     int // a human sets the max or the min size to another number, or to none that can be read, and back at any time
	// AtOnce has the stale agents do nothing but enter claims at once, on what their caches show.
	AtOnce bool
	// BlockedForGood keeps what is blocked so.
	BlockedForGood bool

	// Without leaves a rule out: each must bring a violation.
	Without Rule

	// What is remembered of the agent's decisions, and what they are made from.
	decisions  map[question]decision
	claims     map[keyed[claim]]*v1alpha1.MachineClaim
	sets       map[keyed[machineSet]]*clusterv1.MachineSet
	machinesOf map[keyed[machine]]*clusterv1.Machine
}

// Rule is one of those that the process around [protocol.Decide] keeps, and that can be left out. Several are joined by |. The rules of
// the decision itself are left out as mutants of the agent's source are, see package mutants there.
type Rule uint32

// The rules.
const (
	// Seq tells two ledgers of the same content apart.
	Seq Rule = 1 << iota
	// ReleasedTogether notes the released Machine in the same write that lowers its MachineSet.
	ReleasedTogether
	// TestTemplate writes what depends on the template only while that is as it was read: a release that is given back, a choice of
	// spares, and spares that never came.
	TestTemplate
	// Anchor: a claim is one object, created once. Without it each group has its own, and claims 0 and 1 are the same one.
	Anchor
	// TestPause pauses a MachineDeployment only as it was read.
	TestPause
	// LateForget keeps ended claims until no call for them can arrive any more.
	LateForget
	// Tombstone remembers the release of a claim that is unknown.
	Tombstone
	// LiveAfterLedger (R1) reads claims and Machines after the ledger that the write tests.
	LiveAfterLedger
	// CheckLedger (R2) reads the ledger again after the objects that the writes change.
	CheckLedger
	// TestMachine labels a Machine only as it was read.
	TestMachine
	// TestSizes raises replicas only while the max size is as it was read, and lowers them only while the min size is.
	TestSizes
	// TestEntry enters a claim at once only while the MachineDeployment, and its ledger, are as they were read.
	TestEntry
)

var ruleNames = strings.Fields(`seq released-together test-template anchor test-pause late-forget tombstone live-after-ledger check-ledger
	test-machine test-sizes test-entry`)

// RuleNames are the names of all rules.
func RuleNames() []string { return ruleNames }

// ParseRules reads names of rules, separated by commas.
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

// String names the rules.
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

// Initial is every group at rest, of its floor alone, and without a ledger.
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
		if p.AtOnce { // which begins no ledger
			at.ledger = ledger{present: 1, floor: floor, lastReplicas: floor, written: floor + 1}
		}
	}
	s.left = counters{
		outsiders: uint8(p.Outsiders), raises: uint8(p.Raises), lowers: uint8(p.Lowers), rollouts: uint8(p.Rollouts),
		wipes: uint8(p.Wipes), pauses: uint8(p.Pauses), blocks: uint8(p.Blocks), sizes: uint8(p.Sizes),
	}
	return s
}

// Exhausted reports that a group has used all the Machines that it may make.
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

// refute makes the stale agents' readings of objects that just changed unfit for a compare-and-swap.
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
				// Of no use but for the rest, which caches may show beside a newer one, as long as another claim may come.
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

// changed reports whether the object changed, and not only what Cluster API's cache shows of it.
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
	buryClaim
	outsiderDeletes
	humanRaises
	humanLowers
	humanRollsOut
	somebodyWipes
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
	doLetGo
	doPauseSet
	doUnpauseSet
	doLowerSet
	doNoteReleased
	doReturn
)

// wording says a transition; %g is the group, %x and %y its numbers, counted from 0.
var wording = [...]string{
	createClaim: "CreateClaim c%x (group %g)", repeatCreate: "CreateClaim c%x once more (group %g)", releaseClaim: "ReleaseClaim c%x",
	returnMachine: "ReturnMachine c%x",
	buryClaim:     "ReleaseClaim c%x, unknown: a tombstone", outsiderDeletes: "somebody deletes m%x", humanRaises: "a human raises replicas to %x",
	humanLowers: "a human lowers replicas to %x", humanRollsOut: "a human changes the template to %x", somebodyWipes: "somebody wipes the ledger",
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
	doEnd: "c%x Ended", doFinalizer: "finalizer on m%x", doDelete: "DELETE m%x", doKeep: "keeps m%x: finalizer off", doLetGo: "lets m%x go",
	doPauseSet: "pauses set %x", doUnpauseSet: "un-pauses set %x", doLowerSet: "lowers set %x to %y",
	doNoteReleased: "notes on set %x what it was lowered for", doReturn: "returns m%x: label off",
}

const (
	liveAgentID = 2
	nobody      = 3
)

func act(who, group, what, x, y int) explore.Act {
	return explore.Act(who<<28 | group<<24 | what<<16 | x<<8 | y)
}

// Describe says a transition in words. The rest of a ledger write is in the numbers: replicas and the entries.
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

// describeLedger packs what a ledger write says into a transition.
func describeLedger(who, g int, d *decision) explore.Act {
	entries, names := 0, 0
	for _, entry := range d.ledger.pending {
		entries += int(b(entry != noEntry))
		names += int(b(entry >= named))
	}
	x := int(d.replicas)&15<<12 | int(d.ledger.floor)&7<<9 | min(entries, 3)<<7 | min(names, 3)<<5 |
		min(int(count(d.ledger.releasing)), 3)<<3 | min(int(count(d.ledger.givenBack)), 3)<<1 | int(b(d.pause != protocol.PauseKeep))
	return explore.Act(who<<28 | g<<24 | writeLedger<<16 | x)
}
