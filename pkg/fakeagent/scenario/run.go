package scenario

import (
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
)

// Options are what a scenario is played with.
type Options struct {
	// Clock is what every time in the scenario follows. Nil means the real one.
	Clock clock.WithTickerAndDelayedExecution
	// Logger takes a line when an outage begins and when it ends. The zero Logger logs nothing.
	Logger logr.Logger
	// Authority signs the certificates of onboarded Clusters. Nil stands for one of the agent's own.
	Authority *fakeagent.Authority
	// Version is what GetStatus reports. Empty means devel.
	Version string
}

// Play is a scenario under way.
type Play struct {
	// Agent plays it.
	Agent *fakeagent.Agent

	grants map[string][]fakeagent.Grant
	clock  clock.WithTickerAndDelayedExecution
	logger logr.Logger

	mu     sync.Mutex
	closed bool
	under  map[string]int // how many outages of the kind are under way
	gates  []*gate
}

// Start starts an agent that plays the scenario, whose times begin now. Close it. An error names every field that cannot be used.
func (s *Scenario) Start(o Options) (*Play, error) {
	c, err := s.compile()
	if err != nil {
		return nil, err
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.Logger.GetSink() == nil {
		o.Logger = logr.Discard()
	}
	options := append(slices.Clip(c.options), fakeagent.WithClock(o.Clock), fakeagent.WithLogger(o.Logger), fakeagent.WithAuthority(o.Authority))
	if o.Version != "" {
		options = append(options, fakeagent.WithVersion(o.Version))
	}
	p := &Play{Agent: fakeagent.New(options...), grants: c.grants, clock: o.Clock, logger: o.Logger, under: map[string]int{}}
	for _, cluster := range c.paused {
		p.Agent.SetPaused(cluster, true)
	}
	for _, id := range slices.Sorted(maps.Keys(c.onboarded)) {
		p.Agent.Onboard(c.onboarded[id], id)
	}
	for _, group := range c.nodeGroups {
		id := p.Agent.AddNodeGroup(group.described)
		p.Agent.SetGroupInfrastructure(id, group.pace)
		p.Agent.FailMachines(id, group.failures...)
	}
	for _, call := range c.calls {
		p.Agent.Delay(call.method, call.delay)
		switch {
		case call.err == nil:
		case call.lost:
			p.Agent.FailAfter(call.method, call.times, call.err)
		default:
			p.Agent.Fail(call.method, call.times, call.err)
		}
	}
	for _, one := range c.outages {
		p.schedule(one)
	}
	return p, nil
}

// Grants returns what an identity may do besides what its id says.
func (p *Play) Grants(id string) []fakeagent.Grant { return p.grants[id] }

// Listener returns the listener with connections that end with each outage of the kind disconnected.
func (p *Play) Listener(listener net.Listener) net.Listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := newGate(listener)
	g.shut(p.under[disconnected] > 0)
	p.gates = append(p.gates, g)
	return g
}

// Close ends the agent.
func (p *Play) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.Agent.Close()
}

// schedule has the outage begin and end, again and again if it repeats.
func (p *Play) schedule(o outage) {
	p.afterwards(o.after, func() {
		if !p.change(o, true) {
			return
		}
		p.afterwards(o.lasts, func() {
			if p.change(o, false) && o.every > 0 {
				next := o
				next.after = o.every - o.lasts
				p.schedule(next)
			}
		})
	})
}

// afterwards calls f after the delay.
func (p *Play) afterwards(delay time.Duration, f func()) {
	// In a goroutine of its own: a fake clock calls with its lock held, and f asks for timers.
	p.clock.AfterFunc(delay, func() { go f() })
}

// change begins or ends an outage, and reports whether the play goes on.
func (p *Play) change(o outage, begins bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	if begins {
		p.under[o.kind]++
		p.logger.Info("an outage begins", "kind", o.kind, "lasts", o.lasts.String())
	} else {
		p.under[o.kind]--
		p.logger.Info("an outage ends", "kind", o.kind)
	}
	out := p.under[o.kind] > 0
	switch o.kind {
	case unavailable:
		p.Agent.SetSynced(!out)
		if begins {
			p.Agent.DropStreams()
		}
	case silent:
		p.Agent.Silence(out)
	default:
		for _, g := range p.gates {
			g.shut(out)
		}
	}
	return true
}
