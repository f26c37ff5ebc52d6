package contact

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	testclock "k8s.io/utils/clock/testing"
)

var errAway = errors.New("connection refused")

// asked is a probe whose requests the test answers.
type asked struct {
	*Probe

	clock  *testclock.FakeClock
	answer error
}

func newAsked() *asked {
	a := &asked{clock: testclock.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))}
	a.Probe = New(Config{
		Ask: func(context.Context) error { return a.answer }, Interval: 2 * time.Second, Timeout: 2 * time.Second, Patience: 5 * time.Second,
		Clock: a.clock,
	})
	return a
}

// after advances the time and sends one request.
func (a *asked) after(t *testing.T, d time.Duration, answer error) error {
	t.Helper()
	a.clock.Step(d)
	a.answer = answer
	a.ask(t.Context())
	return a.Lost()
}

func TestContactIsLostOnlyWhenThereWasNoAnswerForLong(t *testing.T) {
	a := newAsked()
	require.NoError(t, a.after(t, 2*time.Second, nil))
	require.NoError(t, a.after(t, 4*time.Second, errAway), "one slow answer")
	require.NoError(t, a.after(t, 2*time.Second, nil))
	require.NoError(t, a.after(t, 4*time.Second, errAway), "the answers between count")
	changed, _ := a.State()
	lost := a.after(t, time.Second, errAway)
	require.ErrorIs(t, lost, errAway)
	require.ErrorContains(t, lost, "2026-01-01T00:00:08Z", "since when")
	require.NotContains(t, lost.Error(), errAway.Error(), "which names the hub's address")
	select {
	case <-changed:
	default:
		t.Error("who waits for it is not told")
	}
}

func TestContactIsBackWithTheFirstAnswer(t *testing.T) {
	a := newAsked()
	require.Error(t, a.after(t, time.Minute, errAway))
	changed, _ := a.State()
	require.Error(t, a.after(t, time.Minute, errAway))
	select {
	case <-changed:
		t.Error("nothing has changed")
	default:
	}
	require.NoError(t, a.after(t, time.Second, nil))
	select {
	case <-changed:
	default:
		t.Error("who waits for it is not told")
	}
	require.NoError(t, a.after(t, 4*time.Second, errAway), "the patience starts again")
}

// A shutdown of the agent must not be mistaken for an outage of the hub.
func TestTheEndIsNoLossOfContact(t *testing.T) {
	a := newAsked()
	a.answer = context.Canceled
	a.clock.Step(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, a.Run(ctx))
	require.NoError(t, a.Lost())
}

// A request without a deadline would prevent the next one.
func TestAQuestionIsBounded(t *testing.T) {
	probe := New(Config{
		Ask:      func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		Interval: time.Hour, Timeout: time.Millisecond, Patience: 0,
	})
	probe.ask(t.Context())
	require.ErrorIs(t, probe.Lost(), context.DeadlineExceeded)
}
