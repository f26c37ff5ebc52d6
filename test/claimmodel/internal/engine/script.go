package engine

import (
	"errors"
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Script is a list of writes to one MachineDeployment and what belongs to it, with nobody about but Cluster API: no agent and no
// claims. It is there to be done to the real controllers too.
type Script struct {
	Name string
	// RollingUpdate replaces Machines of old templates by itself, with one Machine of surge; else nothing happens to them
	// (OnDelete).
	RollingUpdate bool
	// Machines is how many there are at first in each MachineSet, the oldest MachineSet first. All of them have a Node.
	// They are numbered in that order, over all MachineSets.
	Machines []int
	// Phases are the writes. Those of one phase follow each other at once; after each, the controllers come to rest.
	Phases [][]Write
}

// Write is one write of a script.
type Write struct {
	Verb Verb
	// N is what the verb says: replicas, or the number of a Machine or a MachineSet.
	N int
}

// Verb is what a write does.
type Verb uint8

// The verbs.
const (
	// SetReplicas of the MachineDeployment to N.
	SetReplicas Verb = iota
	// ChangeTemplate of the MachineDeployment, to one that there was not yet.
	ChangeTemplate
	// Pause the MachineDeployment.
	Pause
	// Unpause the MachineDeployment.
	Unpause
	// UnpauseWith replicas N, in the same write.
	UnpauseWith
	// PauseSet N.
	PauseSet
	// UnpauseSet N.
	UnpauseSet
	// LowerSet N by one replica.
	LowerSet
	// Mark Machine N with Cluster API's delete annotation.
	Mark
	// Hold Machine N: the delete annotation and a finalizer of ours.
	Hold
	// Delete Machine N.
	Delete
	// LetGo takes the finalizer off Machine N.
	LetGo
	// KeepFromBooting lets no instance come into being any more, of whatever Machine.
	KeepFromBooting
)

var verbs = [...]string{
	SetReplicas: "replicas %d", ChangeTemplate: "change the template", Pause: "pause", Unpause: "un-pause",
	UnpauseWith: "un-pause with replicas %d", PauseSet: "pause set %d", UnpauseSet: "un-pause set %d", LowerSet: "lower set %d",
	Mark: "mark m%d", Hold: "hold m%d", Delete: "delete m%d", LetGo: "let m%d go",
	KeepFromBooting: "keep new instances from booting",
}

// String says the write in words.
func (w Write) String() string {
	if text := verbs[w.Verb]; strings.Contains(text, "%") {
		return fmt.Sprintf(text, w.N)
	}
	return verbs[w.Verb]
}

// Outcome is what there is of a script's MachineDeployment when the controllers are at rest.
type Outcome struct {
	// Sets are the MachineSets, the oldest first. One that is not there, or no more, is as one without replicas.
	Sets [maxSets]SetOutcome
	// Machines are those that the script began with.
	Machines [maxMachines]Stage
}

// SetOutcome is what there is of a MachineSet.
type SetOutcome struct {
	Replicas int
	// Paused says that it carries Cluster API's pause annotation.
	Paused bool
	// New and Young count its Machines that were not there at first: those with a Node and those without.
	New, Young int
}

// Stage is how far a Machine is, as far as a script's end can find it.
type Stage uint8

// The stages.
const (
	// None: there is no Machine of that number.
	None Stage = iota
	// Alive, with a Node.
	Alive
	// Held is torn down but for our finalizer.
	Held
	// Gone altogether.
	Gone
	// Unsettled is anything else, which is no rest.
	Unsettled
)

var stages = [...]string{None: "none", Alive: "alive", Held: "held", Gone: "gone", Unsettled: "UNSETTLED"}

// String says the stage in a word.
func (s Stage) String() string { return stages[s] }

// String says the outcome in a line.
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

// Situation is the model's world at one point of a script.
type Situation struct {
	state   State
	first   uint8 // how many Machines the script began with
	settled uint8 // the Machines of before the phase, which every status counts
	lagged  uint8 // a status has not counted the others once in this phase, which is as often as the model has it
	kept    uint8 // no instance comes into being any more
	written uint8 // how many writes of the phase are done, plus one; 0 before it
}

// Begin is the script's situation before its first phase.
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

// ErrTooLarge says that the model has not enough room for a script, so that it cannot say what is allowed.
var ErrTooLarge = errors.New("too large for the model")

// mostStates of one phase; the scripts stay far below.
const mostStates = 1 << 20

// Allowed explores one phase from all the situations that it may begin in, and returns all the outcomes that it may have, each
// with the situations that have it.
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

// Initial is before the first of the situations: Moves leads to each of them.
func (m *scripted) Initial() Situation { return Situation{} }

// Moves emits the script's next write, and whatever the controllers may do.
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
				emit(&next, act(nobody, 0, 0, 0, 0), "")
			}
		}
	case who == explore.Outside:
		if int(s.written) <= len(m.writes) {
			next := *s
			next.do(m.writes[s.written-1])
			next.written++
			emit(&next, act(nobody, 0, 0, int(s.written), 0), "")
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

// lagging is what the MachineDeployment does besides while the status of a MachineSet of an old template does not count the Machines yet that the
// MachineSet has just made: it cuts the MachineSet down to fewer than there are. Searches do not have it, as they know no status.
func (p *Protocol) lagging(s *State, settled uint8, emit explore.Emit[State]) {
	at := &s.groups[0]
	if p.RollingUpdate || at.md.paused != notPaused || at.md.isPaused != 0 || at.sets[at.md.template].exists == 0 {
		return
	}
	plan := p.planOf(s, 0)
	for j, m := range at.seen {
		set := int(at.machines[j].set)
		if settled&bit(j) != 0 || m.phase < fresh || m.phase > held || set == plan.newest || at.sets[set].isPaused != 0 {
			continue
		}
		plan.status[set]--
		p.scale(s, 0, plan.onDelete(), func(next *State, what, x, y int, violation string) {
			emit(next, act(nobody, 0, what, x, y), violation)
		})
	}
}

// with puts what Cluster API does into the situation. What the agent's protocol forbids is not asked here.
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

// Key tells situations apart.
func (m *scripted) Key(s *Situation) uint64 { return maphash.Comparable(seed, *s) }

// Check finds nothing: there is no protocol.
func (m *scripted) Check(*Situation) string { return "" }

// CheckAtRest notes the outcome of a phase that is over.
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

// Exhausted is noted by CheckAtRest.
func (m *scripted) Exhausted(*Situation) bool { return false }

// Describe says a transition in words.
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

// do is one write.
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
	case Mark, Hold, Delete, LetGo:
		at.machines[w.N] = at.machines[w.N].done(w.Verb)
	case KeepFromBooting:
		s.kept = 1
	}
}

// done is the machine after a write to it.
func (m machine) done(verb Verb) machine {
	switch {
	case !m.exists():
	case verb == Mark:
		m.flags |= marked
	case verb == Hold:
		m.flags |= finalized
	case verb == Delete && m.alive():
		m.phase = deleting
	case verb == LetGo:
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
