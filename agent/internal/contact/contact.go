// Package contact detects whether the hub's API server responds. Without it, caches and the watch
// streams fed by them look alive, but silently become outdated.
package contact

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
)

// Config configures a [Probe].
type Config struct {
	// Ask sends small requests to the API server itself, not to a cache, until the context ends. It
	// returns an error if what is cached may be outdated: there is no response, or it refuses what
	// the caches need. REQUIRED.
	Ask func(ctx context.Context) error
	// Interval is the time between two requests, and Timeout limits each of them. REQUIRED.
	Interval, Timeout time.Duration
	// Patience is how long Ask may fail before contact is considered lost. It must be
	// longer than Interval and Timeout together, so that a single slow response has no effect.
	// REQUIRED.
	Patience time.Duration
	// Log receives a line when contact is lost or restored. Zero discards it.
	Log logr.Logger
	// Clock provides the time. Nil means the system clock.
	Clock clock.WithTicker
}

// lostError reports since when there has been no contact. Its text is sent to callers, so it does
// not include the cause, which contains the hub's address.
type lostError struct {
	since time.Time
	cause error
}

func (e *lostError) Error() string {
	return "the hub's API server has not answered this agent since " + e.since.UTC().Format(time.RFC3339)
}

func (e *lostError) Unwrap() error { return e.cause }

// Probe sends requests periodically. It is safe for concurrent use. Before the first request,
// contact is assumed.
type Probe struct {
	config Config

	mu       sync.Mutex
	answered time.Time // the last time that contact was certain
	cause    error     // nil while there is contact
	changed  chan struct{}
}

// New returns a probe. It sends requests while [Probe.Run] runs.
func New(c Config) *Probe {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.Log.GetSink() == nil {
		c.Log = logr.Discard()
	}
	return &Probe{config: c, answered: c.Clock.Now(), changed: make(chan struct{})}
}

// State returns a channel that is closed at the next change, and nil while there is contact.
// Otherwise it returns an error whose text may be sent to callers.
func (p *Probe) State() (changed <-chan struct{}, lost error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed, p.cause
}

// Lost returns nil while there is contact, and otherwise an error whose text may be sent to
// callers.
func (p *Probe) Lost() error {
	_, lost := p.State()
	return lost
}

// Run sends requests until the context ends, and then returns nil.
func (p *Probe) Run(ctx context.Context) error {
	p.mu.Lock()
	p.answered = p.config.Clock.Now()
	p.mu.Unlock()
	ticker := p.config.Clock.NewTicker(p.config.Interval)
	defer ticker.Stop()
	for {
		p.ask(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

func (p *Probe) ask(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, p.config.Timeout)
	err := p.config.Ask(bounded)
	cancel()
	if ctx.Err() != nil {
		return // the failure was caused by the shutdown
	}
	now := p.config.Clock.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err == nil:
		p.answered = now
		if p.cause != nil {
			p.turn(nil)
			p.config.Log.Info("the hub's API server answers again")
		}
	case p.cause == nil && now.Sub(p.answered) >= p.config.Patience:
		p.turn(&lostError{since: p.answered, cause: err})
		p.config.Log.Error(err, "the hub's API server does not answer, or refuses what the agent needs; watch streams end until it answers",
			"since", p.answered)
	}
}

// turn changes the state. p.mu must be held.
func (p *Probe) turn(cause error) {
	p.cause = cause
	close(p.changed)
	p.changed = make(chan struct{})
}
