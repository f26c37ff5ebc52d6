package faults

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/samber/lo"
)

// When says where in a write the agent dies.
type When int

// The places.
const (
	// Before the API server has the write.
	Before When = iota
	// After it was applied, before the answer is there.
	After
	// Late is before, and the write arrives when the successor is at work.
	Late
)

func (w When) String() string { return [...]string{"before", "after", "late"}[w] }

// Point is a fail point: a place in a step of the protocol.
type Point struct {
	Class Class
	When  When
}

// PointsOf are all fail points of the given steps.
func PointsOf(classes ...Class) []Point { return PointsAt([]When{Before, After, Late}, classes...) }

// PointsAt are the fail points at the given places of the given steps.
func PointsAt(places []When, classes ...Class) []Point {
	return lo.FlatMap(classes, func(c Class, _ int) []Point {
		return lo.Map(places, func(w When, _ int) Point { return Point{c, w} })
	})
}

// attemptPatience is how long a fail point may take to come about; a late one waits for an agent to start.
const attemptPatience = 45 * time.Second

// Points kills agents at fail points, a given number of times at each. Safe for concurrent use.
type Points struct {
	mu    sync.Mutex
	left  map[Point]int
	hits  map[Point]int
	seen  map[Class]int
	taken map[Point]int        // about to be hit
	next  map[string]time.Time // by agent: not before
	gap   time.Duration
}

// NewPoints has no fail point armed. An agent is left alone for up to gap after it was killed.
func NewPoints(gap time.Duration) *Points {
	return &Points{
		left: map[Point]int{}, hits: map[Point]int{}, seen: map[Class]int{}, taken: map[Point]int{}, next: map[string]time.Time{}, gap: gap,
	}
}

// Arm makes each of the points kill once more.
func (p *Points) Arm(points ...Point) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, point := range points {
		p.left[point]++
	}
}

// Disarm takes back whatever was armed and not hit.
func (p *Points) Disarm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.left)
}

// Left are the points that are armed and were not hit, in the order of [Classes].
func (p *Points) Left() []Point {
	p.mu.Lock()
	defer p.mu.Unlock()
	return lo.Filter(PointsOf(Classes...), func(point Point, _ int) bool { return p.left[point] > 0 })
}

// Hits is how often the point has killed.
func (p *Points) Hits(point Point) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits[point]
}

// Seen is how often a write of the class was made, killed or not.
func (p *Points) Seen(class Class) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen[class]
}

// Plan is the [Options].Plan of an agent. Its writes count as seen whether or not something is armed.
func (p *Points) Plan(agent string, r *Request) Fault {
	if !r.Write() || r.Class == Ignored {
		return Fault{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen[r.Class]++
	now := time.Now()
	if now.Before(p.next[agent]) {
		return Fault{}
	}
	armed := lo.Filter([]When{Before, After, Late}, func(w When, _ int) bool {
		point := Point{r.Class, w}
		return p.left[point] > p.taken[point]
	})
	if len(armed) == 0 {
		return Fault{}
	}
	point := Point{r.Class, lo.Sample(armed)}
	p.taken[point]++
	p.next[agent] = now.Add(time.Duration(rand.Int64N(int64(p.gap) + 1)))
	over := false
	finish := func(hit bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if hit {
			p.hits[point]++
			p.left[point] = max(0, p.left[point]-1)
		}
		if !over {
			over = true
			p.taken[point]--
		}
	}
	// What does not come about (the write was refused, or the agent was dead already) is tried again.
	time.AfterFunc(attemptPatience, func() { finish(false) })
	return Fault{
		Kind: map[When]Kind{Before: KillBefore, After: KillAfter, Late: KillLate}[point.When],
		Done: func() { finish(true) },
	}
}
