package server

import (
	"context"
	"sync"
	"time"
)

const (
	// undecidedCalls is how many calls of a connection may be undecided before it is read further.
	// Its caller has up to sixteen connections.
	undecidedCalls = 16
	// undecidedWithin is how long a connection is left unread for them at most. A decision takes a
	// fraction of a millisecond, but no interceptor sees calls of unknown methods, or those that
	// the transport refuses.
	undecidedWithin = 50 * time.Millisecond
)

// undecided counts the calls of a connection that have been read, and that the limits have neither
// admitted nor refused yet. The transport starts a goroutine for each call that it reads. If a
// caller sends thousands of calls that will be refused, all of them would be read and started
// before the first refusal makes the agent read its connections slowly. It is safe for concurrent
// use.
type undecided struct {
	mu    sync.Mutex
	calls int
	// fewer is closed when calls has become small enough. It is nil unless someone waits for that.
	fewer chan struct{}
}

// add records that n calls have been read.
func (u *undecided) add(n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.calls += n
}

// decide records that a call is admitted or refused.
func (u *undecided) decide() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.set(max(0, u.calls-1))
}

// set must be called with u.mu held.
func (u *undecided) set(calls int) {
	u.calls = calls
	if u.calls <= undecidedCalls && u.fewer != nil {
		close(u.fewer)
		u.fewer = nil
	}
}

// wait returns when there are few undecided calls, when it has waited for long, or when ctx is
// done. There must not be two waits at a time.
func (u *undecided) wait(ctx context.Context) {
	u.mu.Lock()
	if u.calls <= undecidedCalls {
		u.mu.Unlock()
		return
	}
	fewer := make(chan struct{})
	u.fewer = fewer
	u.mu.Unlock()
	timer := time.NewTimer(undecidedWithin)
	defer timer.Stop()
	select {
	case <-fewer:
	case <-ctx.Done():
	case <-timer.C:
		u.mu.Lock()
		defer u.mu.Unlock()
		u.set(0)
	}
}
