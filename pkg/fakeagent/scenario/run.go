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

// Options are the options of [Scenario.Start].
type Options struct {
	// Clock is the clock of every time in the scenario. Nil means the real one.
	Clock clock.WithTickerAndDelayedExecution
	// Logger logs when an outage begins and ends. The zero Logger logs nothing.
	Logger logr.Logger
	// Authority signs the certificates of onboarded Clusters. Nil means one of the agent's own.
	Authority *fakeagent.Authority
	// Version is the version that GetStatus reports. Empty means devel.
	Version string
}

// Play is a running scenario.
type Play struct {
	// Agent is the agent that plays the scenario.
	Agent *fakeagent.Agent

	grants map[string][]fakeagent.Grant
	clock  clock.WithTickerAndDelayedExecution
	logger logr.Logger

	mu     sync.Mutex
	closed bool
	under  map[string]int // number of current outages of the kind
	gates  []*gate
}

// Start starts an agent that plays the scenario. Its times begin now. The caller must close it. The
// error names every invalid field.
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
	for _, set := range c.nodePoolSets {
		p.Agent.ApplyNodePoolSet(set)
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

// Grants returns the grants of an identity, in addition to those implied by its ID.
func (p *Play) Grants(id string) []fakeagent.Grant { return p.grants[id] }

// Listener wraps the listener. Its connections are closed by each outage of the kind disconnected.
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

// schedule begins and ends the outage, repeatedly if it repeats.
func (p *Play) schedule(o outage) {
	p.afterwards(o.after, func() {
		// Its end is certain before anybody sees it begin: a test's clock may step at once.
		begun := make(chan bool, 1)
		p.afterwards(o.lasts, func() {
			if <-begun && p.change(o, false) && o.every > 0 {
				next := o
				next.after = o.every - o.lasts
				p.schedule(next)
			}
		})
		begun <- p.change(o, true)
	})
}

// afterwards calls f after the delay.
func (p *Play) afterwards(delay time.Duration, f func()) {
	// It runs in its own goroutine: a fake clock calls with its lock held, and f requests timers.
	p.clock.AfterFunc(delay, func() { go f() })
}

// change begins or ends an outage. It reports whether the play goes on.
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
