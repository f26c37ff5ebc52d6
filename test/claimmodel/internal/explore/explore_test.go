package explore_test

import (
	"hash/maphash"
	"strconv"
	"testing"

	"github.com/karpenter-capi/karpenter-capi/test/claimmodel/internal/explore"
)

var seed = maphash.MakeSeed()

// jug is the puzzle of the jugs of 3 and 5 litres. 4 litres in the larger one count as a violation.
type jug struct{ small, large uint8 }

type jugs struct{ forbidden uint8 }

func (jugs) Initial() jug                  { return jug{} }
func (jugs) Key(s *jug) uint64             { return maphash.Comparable(seed, *s) }
func (jugs) CheckAtRest(*jug) string       { return "" }
func (jugs) Exhausted(*jug) bool           { return true }
func (jugs) Describe(a explore.Act) string { return strconv.Itoa(int(a)) }

func (j jugs) Check(s *jug) string {
	if s.large == j.forbidden {
		return "V1 forbidden"
	}
	return ""
}

func (jugs) Moves(who explore.Mover, s *jug, emit explore.Emit[jug]) {
	if who != explore.Controllers {
		return
	}
	toLarge, toSmall := min(s.small, 5-s.large), min(s.large, 3-s.small)
	for i, next := range []jug{
		{3, s.large},
		{s.small, 5},
		{0, s.large},
		{s.small, 0},
		{s.small - toLarge, s.large + toLarge},
		{s.small + toSmall, s.large - toSmall},
	} {
		emit(&next, explore.Act(i+1), "")
	}
}

func TestSearchFindsTheShortestWay(t *testing.T) {
	r := explore.Search(jugs{forbidden: 4}, explore.Options{States: 1000})
	if len(r.Violations) != 1 || len(r.Violations[0].Trace) != 6 {
		t.Fatalf("want one violation after 6 steps, got %+v", r.Violations)
	}
}

func TestSearchVisitsEveryState(t *testing.T) {
	r := explore.Search(jugs{forbidden: 9}, explore.Options{States: 1000})
	if !r.Complete || r.States != 16 || len(r.Violations) != 0 {
		t.Fatalf("want all 16 states and no violation, got %+v", r)
	}
	if r := explore.Search(jugs{forbidden: 9}, explore.Options{States: 10}); r.Complete {
		t.Fatal("a search that was cut short says that it is complete")
	}
}

func TestWalksFindWhatASearchFinds(t *testing.T) {
	r := explore.Walk(jugs{forbidden: 4}, explore.Options{Walks: 1000, Depth: 50, Seed: 1})
	if len(r.Violations) != 1 || r.Violations[0].Count == 0 {
		t.Fatalf("want the violation, got %+v", r.Violations)
	}
}
