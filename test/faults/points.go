package faults

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/samber/lo"
)

// When is the moment in a write at which the agent is killed.
type When int

// The moments.
const (
	// Before the API server receives the write.
	Before When = iota
	// After the write was applied, before its answer arrives.
	After
	// Late is before, with the write arriving while the successor is working.
	Late
)

func (w When) String() string { return [...]string{"before", "after", "late"}[w] }

// Point is a fail point: a moment in a step of the protocol.
type Point struct {
	Class Class
	When  When
}

// PointsOf returns all fail points of the given steps.
func PointsOf(classes ...Class) []Point { return PointsAt([]When{Before, After, Late}, classes...) }

// PointsAt returns the fail points at the given moments of the given steps.
func PointsAt(places []When, classes ...Class) []Point {
	return lo.FlatMap(classes, func(c Class, _ int) []Point {
		return lo.Map(places, func(w When, _ int) Point { return Point{c, w} })
	})
}

// attemptPatience is how long a fail point may take to occur. A late one waits for an agent to
// start.
const attemptPatience = 45 * time.Second

// Points kills agents at fail points, a given number of times at each. It is safe for concurrent
// use.
type Points struct {
	mu    sync.Mutex
	left  map[Point]int
	hits  map[Point]int
	seen  map[Class]int
	taken map[Point]int        // about to be hit
	next  map[string]time.Time // earliest next kill, by agent
	gap   time.Duration
}

// NewPoints returns Points without an armed fail point. After a kill, an agent is spared for up to
// gap.
func NewPoints(gap time.Duration) *Points {
	return &Points{
		left: map[Point]int{}, hits: map[Point]int{}, seen: map[Class]int{}, taken: map[Point]int{}, next: map[string]time.Time{}, gap: gap,
	}
}

// Arm adds one kill at each of the points.
func (p *Points) Arm(points ...Point) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, point := range points {
		p.left[point]++
	}
}

// Disarm clears all armed points that were not hit.
func (p *Points) Disarm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.left)
}

// Left returns the armed points that were not hit, in the order of [Classes].
func (p *Points) Left() []Point {
	p.mu.Lock()
	defer p.mu.Unlock()
	return lo.Filter(PointsOf(Classes...), func(point Point, _ int) bool { return p.left[point] > 0 })
}

// Hits returns how often an agent was killed at the point.
func (p *Points) Hits(point Point) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits[point]
}

// Seen returns the number of writes of the class, with or without a kill.
func (p *Points) Seen(class Class) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen[class]
}

// Plan is the [Options].Plan of an agent. Its writes are counted whether or not a point is armed.
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
	// Retry a point that did not occur, because the write was refused or the agent was already
	// dead.
	time.AfterFunc(attemptPatience, func() { finish(false) })
	return Fault{
		Kind: map[When]Kind{Before: KillBefore, After: KillAfter, Late: KillLate}[point.When],
		Done: func() { finish(true) },
	}
}
