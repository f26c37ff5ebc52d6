package claims

import (
	"flag"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// allPoints is set by `make points`.
var allPoints = flag.Bool("points", false, "play every course with every trouble, which takes minutes")

// Without the flag, one in oneInFirst troubles is played with the first script, and one in
// oneInOthers with each of the others.
const (
	oneInFirst  = 7
	oneInOthers = 61
)

// troubles are all troubles that can occur in one course, in three categories.
var troubles = map[string]func(calm *course) []trouble{
	"interrupted at a write": interruptions,
	"reading the past":       pasts,
	"an event is never seen": gaps,
}

// interruptions are all outcomes of all writes, and all places where a delayed write can arrive.
func interruptions(calm *course) []trouble {
	var all []trouble
	for i, begun := range calm.writes {
		for _, f := range []fault{crashBefore, crashAfter, refuse, loseReply} {
			all = append(all, trouble{fault: f, write: i + 1})
		}
		for lands := begun + 1; lands <= len(calm.troubled); lands++ {
			all = append(all, trouble{fault: crashLate, write: i + 1, lands: lands}, trouble{fault: delay, write: i + 1, lands: lands})
		}
	}
	return all
}

// pasts are all earlier states of the caches, of one kind and of all kinds, with which each act of
// a restarting agent can begin, or at which the caches of a running agent can stop.
func pasts(calm *course) []trouble {
	var all []trouble
	for n, act := range calm.troubled {
		for _, once := range []bool{false, true} {
			for was := range act.known {
				all = append(all, trouble{past: allKinds, act: n, was: was, once: once})
			}
		}
		all = append(all, trouble{past: allKinds, act: n, was: act.known, running: true})
		for _, k := range allKinds {
			was := 0
			for i, r := range calm.hub.history[:act.known] {
				if r.kind == k {
					all = append(all, trouble{past: []kind{k}, act: n, was: was})
					was = i + 1
				}
			}
			all = append(all, trouble{past: []kind{k}, act: n, was: was, running: true})
		}
	}
	return all
}

// gaps are all events, each hidden from either agent and from both.
func gaps(calm *course) []trouble {
	var all []trouble
	for hidden := calm.given + 1; hidden <= len(calm.hub.history); hidden++ {
		for _, blind := range [][]int{{0}, {1}, {0, 1}} {
			all = append(all, trouble{hidden: hidden, blind: blind})
		}
	}
	return all
}

// TestEveryPointOfACourse plays each course with one trouble at every point. Nothing is leaked,
// given twice or taken from its owner, and the course runs to its end.
func TestEveryPointOfACourse(t *testing.T) {
	inOneGoroutine(t)
	t.Parallel()
	for i, script := range scripts {
		oneIn := oneInOthers
		if i == 0 {
			oneIn = oneInFirst
		}
		t.Run(script.name, func(t *testing.T) {
			t.Parallel()
			calm, violation := play(script.world, script.run, trouble{}, nil)
			require.Empty(t, violation, "without any trouble")
			t.Logf("%d acts, %d writes, %d revisions", len(calm.troubled), len(calm.writes), len(calm.hub.history))
			for name, of := range troubles {
				t.Run(name, func(t *testing.T) {
					played, failed := 0, 0
					for n, trouble := range of(calm) {
						if !*allPoints && n%oneIn != 0 {
							continue
						}
						played++
						c, violation := play(script.world, script.run, trouble, nil)
						if violation != "" {
							failed++
							if failed <= 5 {
								t.Errorf("%s: %s", trouble, violation)
							}
							continue
						}
						assert.True(t, c.met, "%s did not come about", trouble)
					}
					t.Logf("%d courses, %d failed", played, failed)
				})
			}
		})
	}
}

// TestThePointsFindAnEngineThatTrustsItsCaches shows that these troubles matter: an engine that
// decides from its caches alone deletes a Machine that has an owner, and continues what another
// agent has done already.
func TestThePointsFindAnEngineThatTrustsItsCaches(t *testing.T) {
	trusting := func(c *course) {
		c.trusting, c.ticks = true, 60
		for _, p := range c.agents {
			p.engine.Reader = p.engine.Client
		}
	}
	script := scripts[0]
	calm, violation := play(script.world, script.run, trouble{}, trusting)
	require.Empty(t, violation, "caches that are told everything at once are as good as the API server")
	machines := slices.DeleteFunc(pasts(calm), func(t trouble) bool { return !slices.Equal(t.past, []kind{allMachines}) })
	late := gaps(calm)
	slices.Reverse(late)
	for expected, some := range map[string][]trouble{"I3": machines, "I4: stuck": late} { // where it is found soon
		t.Run(expected, func(t *testing.T) {
			for _, trouble := range some {
				if _, violation := play(script.world, script.run, trouble, trusting); strings.HasPrefix(violation, expected) {
					first, _, _ := strings.Cut(violation, "\n")
					t.Logf("%s: %s", trouble, first)
					return
				}
			}
			t.Errorf("no course violates %s", expected)
		})
	}
}
