package engine

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

// Case is one snapshot and what the model decides from it, in words that the agent's own tests can read.
type Case struct {
	Replicas, Template int
	RollingUpdate      bool
	Max                int // 0 for none
	PausedBy           int // 0 nobody, 1 the agent, 2 a human
	Paused, Observed   bool
	Ledger             *CaseLedger
	Claims             []CaseClaim
	Sets               []CaseSet
	Machines           []CaseMachine
	Gone               []CaseGone
	GraceOver          bool
	Want               CaseDecision
}

// CaseLedger is a ledger. Pending is by claim: the Machine named for it, or -1. Releasing is by Machine.
type CaseLedger struct {
	Floor, LastReplicas int
	Pending             map[int]int
	Adopted             map[int]bool
	Releasing           map[int]CaseRelease
	Shrinks             int // the MachineSet that is paused to give spares back, -1 for none
	Shrunk              bool
}

// CaseRelease is an entry of a release. Carried is not in the ledger: Cluster API has observed its lowering.
type CaseRelease struct{ GivenBack, UnderPause, Hook, Carried bool }

// CaseClaim is a claim; numbers of Machines are -1 for none. The lower id is the older claim.
type CaseClaim struct {
	ID             int
	Phase          string // "", Pending, Bound, Releasing, Ended
	Machine, Adopt int
}

// CaseSet is a MachineSet.
type CaseSet struct {
	ID, Replicas, PausedBy int
	Paused, Observed       bool
	Released               []int
}

// CaseMachine is a Machine; Claim is -1 for no label. The lower id is the older one.
type CaseMachine struct {
	ID, Set, Claim              int
	Phase                       string // fresh, joined, deleting, waiting, terminating, held
	Finalized, Hooked, Outdated bool
}

// CaseGone is a Machine that is gone and that the ledger still knows.
type CaseGone struct{ ID, Set int }

// CaseDecision is a decision. Actions are words and numbers, for example "bind 0 2" for claim 0 and Machine 2.
type CaseDecision struct {
	Write    bool
	Replicas int         // of a write
	Pause    int         // of a write: 0 keep, 1 set, 2 remove
	Ledger   *CaseLedger // of a write
	Refused  []int
	Actions  []string
}

// Cases returns up to n different snapshots that random runs of the world reach, each with what the model decides.
func (p *Protocol) Cases(n int, seed uint64) []Case {
	random := rand.New(rand.NewPCG(seed, 1))
	type question struct {
		s    snapshot
		over bool
	}
	asked := map[question]bool{}
	var cases []Case
	ask := func(s snapshot) {
		for i := range s.sets { // which a snapshot does not show
			s.sets[i].saw, s.sets[i].foreign = 0, 0
		}
		for _, over := range []bool{false, true} {
			if q := (question{s, over}); !asked[q] && len(cases) < n {
				asked[q] = true
				cases = append(cases, p.caseOf(&s, over))
			}
		}
	}
	for walk := 0; len(cases) < n && walk < 10*n; walk++ {
		s := p.Initial()
		for range 150 {
			var options []State
			emit := func(next *State, _ explore.Act, violation string) {
				if violation == "" {
					options = append(options, *next)
				}
			}
			for _, who := range []explore.Mover{explore.Outside, explore.Controllers, explore.Live, explore.Stale, explore.Reads} {
				if random.IntN(3) > 0 {
					p.Moves(who, &s, emit)
				}
			}
			if len(options) == 0 {
				continue
			}
			s = options[random.IntN(len(options))]
			if random.IntN(10) > 0 {
				continue // rather from many runs than all from a few
			}
			for g := range p.Groups {
				ask(s.of(g))
			}
			for a := range p.StaleAgents {
				if v := &s.agents[a]; v.step == allRead {
					ask(v.s)
				}
			}
		}
	}
	return cases
}

var phaseWords = [...]string{
	fresh: "fresh", joined: "joined", deleting: "deleting", waiting: "waiting", terminating: "terminating", held: "held",
}

func (p *Protocol) caseOf(s *snapshot, over bool) Case {
	c := Case{
		Replicas: int(s.md.replicas), Template: int(s.md.template), RollingUpdate: p.RollingUpdate, Max: p.Max,
		PausedBy: int(s.md.paused), Paused: s.md.isPaused != 0, Observed: s.md.observed != 0, GraceOver: over,
	}
	if s.ledger.present != 0 {
		c.Ledger = caseLedger(&s.ledger, s.md.carried)
	}
	for i, x := range s.claims {
		if x.phase != unmade {
			c.Claims = append(c.Claims, CaseClaim{
				ID: i, Phase: [...]string{made: "", pending: "Pending", bound: "Bound", releasing: "Releasing", ended: "Ended"}[x.phase],
				Machine: int(x.machine) - 1, Adopt: int(x.adopt) - 1,
			})
		}
	}
	for i, x := range s.sets {
		if x.exists != 0 {
			c.Sets = append(c.Sets, CaseSet{
				ID: i, Replicas: int(x.replicas), PausedBy: int(x.paused), Paused: x.isPaused != 0, Observed: x.observed != 0,
				Released: numbers(x.released),
			})
		}
	}
	for i, m := range s.machines {
		if !m.exists() && s.ledger.releasing&bit(i) != 0 {
			c.Gone = append(c.Gone, CaseGone{ID: i, Set: int(m.set)})
		}
		if m.exists() {
			c.Machines = append(c.Machines, CaseMachine{
				ID: i, Set: int(m.set), Claim: int(m.label) - 1,
				Phase:     phaseWords[m.phase],
				Finalized: m.has(finalized), Hooked: m.has(hooked), Outdated: m.has(outdated),
			})
		}
	}
	d := p.decide(s, over)
	c.Want = CaseDecision{Write: d.write, Refused: numbers(d.refused)}
	if d.write {
		c.Want.Replicas, c.Want.Pause, c.Want.Ledger = int(d.replicas), int(d.pause), caseLedger(&d.ledger, 0)
	}
	for _, a := range d.actions[:d.n] {
		c.Want.Actions = append(c.Want.Actions, a.words())
	}
	slices.Sort(c.Want.Actions)
	return c
}

func caseLedger(l *ledger, carried uint8) *CaseLedger {
	out := &CaseLedger{
		Floor: int(l.floor), LastReplicas: int(l.lastReplicas),
		Pending: map[int]int{}, Adopted: map[int]bool{}, Releasing: map[int]CaseRelease{},
		Shrinks: int(l.shrinks) - 1, Shrunk: l.shrunk != 0,
	}
	for c, entry := range l.pending {
		if entry != noEntry {
			out.Pending[c] = int(entry) - int(named)
			if l.adopted&bit(c) != 0 {
				out.Adopted[c] = true
			}
		}
	}
	for _, i := range numbers(l.releasing) {
		out.Releasing[i] = CaseRelease{
			GivenBack: l.givenBack&bit(i) != 0, UnderPause: l.underPause&bit(i) != 0, Hook: l.hook&bit(i) != 0, Carried: carried&bit(i) != 0,
		}
	}
	return out
}

func numbers(mask uint8) []int {
	list := []int{}
	for i := range 8 {
		if mask&bit(i) != 0 {
			list = append(list, i)
		}
	}
	return list
}

// words says an action with the numbers that it is about.
func (a action) words() string {
	switch a.kind {
	case markEntered:
		return fmt.Sprintf("mark-entered %d", a.claim)
	case bind:
		return fmt.Sprintf("bind %d %d", a.claim, a.machine)
	case restore:
		return fmt.Sprintf("restore %d %d", a.claim, a.machine)
	case label:
		return fmt.Sprintf("label %d %d", a.claim, a.machine)
	case unbind:
		return fmt.Sprintf("unbind %d %d", a.claim, a.machine)
	case end:
		return fmt.Sprintf("end %d", a.claim)
	case hold:
		return fmt.Sprintf("hold %d", a.machine)
	case hook:
		return fmt.Sprintf("hook %d", a.machine)
	case letGo:
		return fmt.Sprintf("let-go %d", a.machine)
	case pauseMachineSet:
		return fmt.Sprintf("pause-machine-set %d", a.set)
	case unpauseMachineSet:
		return fmt.Sprintf("unpause-machine-set %d", a.set)
	case lowerSet:
		return fmt.Sprintf("lower-set %d %v", a.set, numbers(a.uids))
	}
	panic("an action without a kind")
}
