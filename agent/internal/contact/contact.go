// Package contact knows whether the hub's API server answers. Caches, and the watch streams that they feed, look alive without it: what
// they show grows old in silence.
package contact

import (
	"context"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/utils/clock"
)

// Config is what a [Probe] needs.
type Config struct {
	// Ask asks the API server something small, itself and not a cache, until the context ends. Any answer is an answer. REQUIRED.
	Ask func(ctx context.Context) error
	// Interval is the time between two questions, and Timeout how long each may take. REQUIRED.
	Interval, Timeout time.Duration
	// Patience is how long there may be no answer before contact counts as lost. It must be longer than Interval and Timeout together,
	// so that one slow answer costs nothing. REQUIRED.
	Patience time.Duration
	// Log takes a line when contact is lost or back. Zero discards them.
	Log logr.Logger
	// Clock is the time. Nil means the real one.
	Clock clock.WithTicker
}

// lostError says since when there is no contact. Its text is for callers: the cause, which names the hub's address, is not in it.
type lostError struct {
	since time.Time
	cause error
}

func (e *lostError) Error() string {
	return "the hub's API server has not answered since " + e.since.UTC().Format(time.RFC3339)
}

func (e *lostError) Unwrap() error { return e.cause }

// Probe asks regularly. It is safe for concurrent use. Before the first question was asked there is contact.
type Probe struct {
	config Config

	mu       sync.Mutex
	answered time.Time // the last time that contact was certain
	cause    error     // nil while there is contact
	changed  chan struct{}
}

// New returns a probe that asks once [Probe.Run] runs.
func New(c Config) *Probe {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.Log.GetSink() == nil {
		c.Log = logr.Discard()
	}
	return &Probe{config: c, answered: c.Clock.Now(), changed: make(chan struct{})}
}

// State returns a channel that is closed at the next change, and nil while there is contact, else why there is none, in words that may be
// told to callers.
func (p *Probe) State() (changed <-chan struct{}, lost error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed, p.cause
}

// Lost returns nil while there is contact, else why there is none, in words that may be told to callers.
func (p *Probe) Lost() error {
	_, lost := p.State()
	return lost
}

// Run asks until the context ends, and then returns nil.
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
		return // the end is no sign
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
		p.config.Log.Error(err, "the hub's API server does not answer; watch streams end until it does", "since", p.answered)
	}
}

// turn changes the state. p.mu is held.
func (p *Probe) turn(cause error) {
	p.cause = cause
	close(p.changed)
	p.changed = make(chan struct{})
}
