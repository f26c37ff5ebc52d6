package conformance

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
)

// attempt is a [testing.TB] that runs one case outside of a Go test. It does not support temporary
// folders, environment variables and attributes.
type attempt struct {
	testing.TB // It is nil: it only provides the unexported method of the interface.

	name string
	ctx  context.Context //nolint:containedctx // It lasts as long as the attempt, as in testing.TB.

	mu       sync.Mutex
	failed   bool
	skipped  bool
	messages []string
	cleanups []func()
}

// try runs f as a test. It returns the outcome after every cleanup function of f has run.
func try(ctx context.Context, name string, f func(testing.TB)) *attempt {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := &attempt{name: name, ctx: ctx}
	a.apart(func() { f(a) })
	cancel()
	for {
		a.mu.Lock()
		last := len(a.cleanups) - 1
		if last < 0 {
			a.mu.Unlock()
			return a
		}
		cleanup := a.cleanups[last]
		a.cleanups = a.cleanups[:last]
		a.mu.Unlock()
		a.apart(cleanup)
	}
}

// apart runs f in a new goroutine, which f may exit, and waits for it.
func (a *attempt) apart(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if cause := recover(); cause != nil {
				a.Errorf("panic: %v\n%s", cause, debug.Stack())
			}
		}()
		f()
	}()
	<-done
}

func (a *attempt) Context() context.Context { return a.ctx }

func (a *attempt) Name() string { return a.name }

func (a *attempt) Helper() {}

func (a *attempt) Cleanup(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cleanups = append(a.cleanups, f)
}

func (a *attempt) Fail() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed = true
}

func (a *attempt) FailNow() {
	a.Fail()
	runtime.Goexit()
}

func (a *attempt) Failed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.failed
}

func (a *attempt) SkipNow() {
	a.mu.Lock()
	a.skipped = true
	a.mu.Unlock()
	runtime.Goexit()
}

func (a *attempt) Skipped() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.skipped
}

func (a *attempt) say(text string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.messages = append(a.messages, text)
}

func (a *attempt) Log(args ...any) { a.say(fmt.Sprint(args...)) }

func (a *attempt) Logf(format string, args ...any) { a.say(fmt.Sprintf(format, args...)) }

func (a *attempt) Error(args ...any) {
	a.Log(args...)
	a.Fail()
}

func (a *attempt) Errorf(format string, args ...any) {
	a.Logf(format, args...)
	a.Fail()
}

func (a *attempt) Fatal(args ...any) {
	a.Log(args...)
	a.FailNow()
}

func (a *attempt) Fatalf(format string, args ...any) {
	a.Logf(format, args...)
	a.FailNow()
}

func (a *attempt) Skip(args ...any) {
	a.Log(args...)
	a.SkipNow()
}

func (a *attempt) Skipf(format string, args ...any) {
	a.Logf(format, args...)
	a.SkipNow()
}
