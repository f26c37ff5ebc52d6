package engine

import (
	"errors"
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Script is a list of writes to one MachineDeployment and its objects, with only Cluster API
// running: no agent and no claims. It can also be run against the real controllers.
type Script struct {
	Name string
	// RollingUpdate replaces Machines of old templates automatically, with a surge of one Machine.
	// Otherwise they are left alone (OnDelete).
	RollingUpdate bool
	// Machines is the initial number of Machines in each MachineSet, oldest MachineSet first. All
	// of them have a Node. They are numbered in that order, over all MachineSets.
	Machines []int
	// Phases are the writes. The writes of one phase follow each other without a pause; after each
	// phase the controllers come to rest.
	Phases [][]Write
}

// Write is one write of a script.
type Write struct {
	Verb Verb
	// N is the argument of the verb: replicas, or the number of a Machine or a MachineSet.
	N int
}

// Verb is the kind of a write.
type Verb uint8

// The verbs.
const (
	// SetReplicas sets the MachineDeployment's replicas to N.
	SetReplicas Verb = iota
	// ChangeTemplate sets a new template of the MachineDeployment.
	ChangeTemplate
	// Pause pauses the MachineDeployment.
	Pause
	// Unpause unpauses the MachineDeployment.
	Unpause
	// UnpauseWith unpauses it and sets replicas to N in the same write.
	UnpauseWith
	// PauseSet pauses MachineSet N.
	PauseSet
	// UnpauseSet unpauses MachineSet N.
	UnpauseSet
	// LowerSet lowers MachineSet N by one replica.
	LowerSet
	// Mark adds Cluster API's delete annotation to Machine N.
	Mark
	// AddFinalizer adds the delete annotation and our finalizer to Machine N.
	AddFinalizer
	// Delete deletes Machine N.
	Delete
	// RemoveFinalizer removes the finalizer from Machine N.
	RemoveFinalizer
	// KeepFromBooting keeps all further instances from booting, of any Machine.
	KeepFromBooting
)

var verbs = [...]string{
	SetReplicas: "replicas %d", ChangeTemplate: "change the template", Pause: "pause", Unpause: "un-pause",
	UnpauseWith: "un-pause with replicas %d", PauseSet: "pause set %d", UnpauseSet: "un-pause set %d", LowerSet: "lower set %d",
	Mark: "mark m%d", AddFinalizer: "finalizer on m%d", Delete: "delete m%d", RemoveFinalizer: "finalizer off m%d",
	KeepFromBooting: "keep new instances from booting",
}

// String describes the write in words.
func (w Write) String() string {
	if text := verbs[w.Verb]; strings.Contains(text, "%") {
		return fmt.Sprintf(text, w.N)
	}
	return verbs[w.Verb]
}

// Outcome is the state of a script's MachineDeployment once the controllers are at rest.
type Outcome struct {
	// Sets are the MachineSets, oldest first. A missing MachineSet equals one without replicas.
	Sets [maxSets]SetOutcome
	// Machines are the script's initial Machines.
	Machines [maxMachines]Stage
}

// SetOutcome is the state of a MachineSet.
type SetOutcome struct {
	Replicas int
	// Paused is set if it has Cluster API's pause annotation.
	Paused bool
	// New and Young count its Machines other than the initial ones: those with a Node and those
	// without.
	New, Young int
}

// Stage is a Machine's stage, as far as it can be determined at the end of a script.
type Stage uint8

// The stages.
const (
	// None: there is no Machine of that number.
	None Stage = iota
	// Alive: it exists and has a Node.
	Alive
	// Held: it is torn down, and only our finalizer remains.
	Held
	// Gone: it no longer exists.
	Gone
	// Unsettled is any other stage, in which the world is not at rest.
	Unsettled
)

var stages = [...]string{None: "none", Alive: "alive", Held: "held", Gone: "gone", Unsettled: "UNSETTLED"}

// String returns the stage as a word.
func (s Stage) String() string { return stages[s] }

// String formats the outcome on one line.
func (o Outcome) String() string {
	var b strings.Builder
	for i, set := range o.Sets {
		if set == (SetOutcome{}) {
			continue
		}
		fmt.Fprintf(&b, "set %d: %d", i, set.Replicas)
		if set.Paused {
			b.WriteString(" paused")
		}
		if set.New > 0 {
			fmt.Fprintf(&b, " +%d new", set.New)
		}
		if set.Young > 0 {
			fmt.Fprintf(&b, " +%d young", set.Young)
		}
		b.WriteString("; ")
	}
	for i, stage := range o.Machines {
		if stage != None {
			fmt.Fprintf(&b, "m%d %s ", i, stage)
		}
	}
	return strings.TrimSpace(b.String())
}

// Situation is the state of the model at one point of a script.
type Situation struct {
	state   State
	first   uint8 // number of the script's initial Machines
	settled uint8 // the Machines from before the phase, which every status counts
	lagged  uint8 // a status did not count the other Machines once in this phase, which is the model's limit
	kept    uint8 // no further instance boots
	written uint8 // number of completed writes of the phase, plus one; 0 before it
}

// Begin returns the script's situation before its first phase.
func (s *Script) Begin() Situation {
	var out Situation
	at := &out.state.groups[0]
	for i, n := range s.Machines {
		at.sets[i] = machineSet{exists: 1, observed: 1, replicas: uint8(n), saw: uint8(n)}
		at.md.replicas += uint8(n)
		for range n {
			at.machines[out.first] = machine{phase: joined, set: uint8(i)}
			at.seen[out.first] = seenMachine{phase: joined}
			out.first++
		}
	}
	at.md.template, at.md.observed = uint8(len(s.Machines)-1), 1
	return out
}

// ErrTooLarge means that the model is too small for a script and cannot determine what is allowed.
var ErrTooLarge = errors.New("too large for the model")

// mostStates limits the states of one phase. The scripts stay far below it.
const mostStates = 1 << 20

// Allowed explores one phase from all of its possible initial situations, and returns all of its
// possible outcomes, each with the situations that have it.
func (s *Script) Allowed(phase int, from []Situation) (map[Outcome][]Situation, error) {
	m := &scripted{
		p:    &Protocol{Groups: 1, RollingUpdate: s.RollingUpdate},
		from: from, writes: s.Phases[phase], allowed: map[Outcome][]Situation{}, met: map[uint64]bool{},
	}
	result := explore.Search(m, explore.Options{States: mostStates})
	for _, v := range result.Violations {
		return nil, fmt.Errorf("phase %d: %s\n  %s", phase, v.Kind, strings.Join(v.Trace, "\n  "))
	}
	if !result.Complete || m.exhausted {
		return nil, fmt.Errorf("phase %d: %w", phase, ErrTooLarge)
	}
	return m.allowed, nil
}

// scripted is the model of one phase.
type scripted struct {
	p         *Protocol
	from      []Situation
	writes    []Write
	allowed   map[Outcome][]Situation
	met       map[uint64]bool
	exhausted bool
}

// Initial precedes the first of the situations: Moves leads to each of them.
func (m *scripted) Initial() Situation { return Situation{} }

// Moves emits the script's next write, and the possible moves of the controllers.
func (m *scripted) Moves(who explore.Mover, s *Situation, emit explore.Emit[Situation]) {
	switch {
	case s.written == 0:
		if who == explore.Outside {
			for i := range m.from {
				next := m.from[i]
				next.written, next.settled, next.lagged = 1, 0, 0
				for j, x := range next.state.groups[0].machines {
					next.settled |= b(x.exists()) << j
				}
				emit(&next, act(environment, 0, 0, 0, 0), "")
			}
		}
	case who == explore.Outside:
		if int(s.written) <= len(m.writes) {
			next := *s
			next.do(m.writes[s.written-1])
			next.written++
			emit(&next, act(environment, 0, 0, int(s.written), 0), "")
		}
		m.p.eager(&s.state, 0, s.with(emit))
		if s.lagged == 0 {
			late := *s
			late.lagged = 1
			m.p.lagging(&s.state, s.settled, late.with(emit))
		}
	case who == explore.Controllers:
		m.p.controllers(&s.state, 0, s.with(emit))
	}
}

// lagging emits an additional move of the MachineDeployment. If the status of a MachineSet of an
// old template does not count the Machines yet that it has just made, the MachineDeployment scales
// it down below their number. Searches omit this move, because they do not model that status.
func (p *Protocol) lagging(s *State, settled uint8, emit explore.Emit[State]) {
	at := &s.groups[0]
	if p.RollingUpdate || at.md.paused != notPaused || at.md.isPaused != 0 || at.sets[at.md.template].exists == 0 {
		return
	}
	plan := p.planOf(s, 0)
	for set := range at.sets {
		if set == plan.newest || at.sets[set].isPaused != 0 {
			continue
		}
		lags := plan
		for j, m := range at.seen {
			if int(at.machines[j].set) != set || settled&bit(j) != 0 || m.phase < fresh || m.phase > held {
				continue
			}
			lags.status[set]--
			p.scale(s, 0, lags.onDelete(), func(next *State, what, x, y int, violation string) {
				emit(next, act(environment, 0, what, x, y), violation)
			})
		}
	}
}

// with applies moves of Cluster API to the situation. It does not check the rules of the agent's
// protocol.
func (s *Situation) with(emit explore.Emit[Situation]) explore.Emit[State] {
	return func(state *State, a explore.Act, _ string) {
		if s.kept != 0 && a>>16&255 == nodeJoins {
			return
		}
		next := *s
		next.state = *state
		emit(&next, a, "")
	}
}

// Key distinguishes situations.
func (m *scripted) Key(s *Situation) uint64 { return maphash.Comparable(seed, *s) }

// Check returns no violation: there is no protocol.
func (m *scripted) Check(*Situation) string { return "" }

// CheckAtRest records the outcome of a phase that is over.
func (m *scripted) CheckAtRest(s *Situation) string {
	key := m.Key(s)
	if int(s.written) != len(m.writes)+1 || m.met[key] {
		return ""
	}
	m.met[key] = true
	m.exhausted = m.exhausted || m.p.Exhausted(&s.state)
	outcome := s.outcome()
	m.allowed[outcome] = append(m.allowed[outcome], *s)
	return ""
}

// Exhausted returns false: CheckAtRest records it instead.
func (m *scripted) Exhausted(*Situation) bool { return false }

// Describe describes a transition in words.
func (m *scripted) Describe(a explore.Act) string {
	switch x := int(a >> 8 & 255); {
	case a>>16&255 != 0:
		return m.p.Describe(a)
	case x == 0:
		return "the phase begins"
	default:
		return "script: " + m.writes[x-1].String()
	}
}

// do applies one write.
func (s *Situation) do(w Write) {
	at := &s.state.groups[0]
	switch w.Verb {
	case SetReplicas:
		at.md.replicas, at.md.observed = uint8(w.N), 0
	case ChangeTemplate:
		at.md.template++
		at.md.observed = 0
	case Pause:
		at.md.paused = byHuman
	case Unpause:
		at.md.paused = notPaused
	case UnpauseWith:
		at.md.paused, at.md.replicas, at.md.observed = notPaused, uint8(w.N), 0
	case PauseSet:
		at.sets[w.N].paused = byHuman
	case UnpauseSet:
		at.sets[w.N].paused = notPaused
	case LowerSet:
		set := &at.sets[w.N]
		set.replicas--
		set.observed, set.foreign = 0, 1
	case Mark, AddFinalizer, Delete, RemoveFinalizer:
		at.machines[w.N] = at.machines[w.N].done(w.Verb)
	case KeepFromBooting:
		s.kept = 1
	}
}

// done returns the machine after a write to it.
func (m machine) done(verb Verb) machine {
	switch {
	case !m.exists():
	case verb == Mark:
		m.flags |= marked
	case verb == AddFinalizer:
		m.flags |= finalized
	case verb == Delete && m.alive():
		m.phase = deleting
	case verb == RemoveFinalizer:
		m.flags &^= finalized
		if m.phase == held {
			return machine{phase: gone, set: m.set}
		}
	}
	return m
}

func (s *Situation) outcome() Outcome {
	var out Outcome
	at := &s.state.groups[0]
	for i, set := range at.sets {
		out.Sets[i].Replicas, out.Sets[i].Paused = int(set.replicas), set.paused != notPaused
	}
	for i, m := range at.machines {
		stage := [...]Stage{absent: None, fresh: Unsettled, joined: Alive, deleting: Unsettled, held: Held, gone: Gone}[m.phase]
		set := &out.Sets[m.set]
		switch {
		case i < int(s.first):
			out.Machines[i] = stage
		case m.phase == joined:
			set.New++
		case m.phase == fresh:
			set.Young++
		}
	}
	return out
}
