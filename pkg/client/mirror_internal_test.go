package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

type (
	machine      = *agentv1alpha1.Machine
	machineEvent = event[machine]
)

const (
	patience = 10 * time.Second
	// interval is that of heartbeats. Backoffs are much shorter, so that they pass without a
	// stream becoming silent.
	interval = time.Hour
)

// scripted is a mirror whose streams are played by the test.
type scripted struct {
	*Mirror[machine]

	t       *testing.T
	clock   *clocktesting.FakeClock
	streams chan *stream // opened by the mirror

	mu     sync.Mutex
	moving chan struct{}
}

// move has all open streams move to another connection.
func (s *scripted) move() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.moving)
	s.moving = make(chan struct{})
}

type stream struct {
	events chan machineEvent
	end    chan error
	ctx    context.Context //nolint:containedctx // The length of the stream, as the mirror gave it.
}

func newScripted(t *testing.T) *scripted {
	t.Helper()
	s := &scripted{
		t: t, clock: clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)), streams: make(chan *stream), moving: make(chan struct{}),
	}
	c := FromConn(nil, Options{Clock: s.clock, HeartbeatInterval: interval})
	s.Mirror = newMirror(c, "test", machine.GetName, func(ctx context.Context) (func() (machineEvent, error), error) {
		opened := &stream{events: make(chan machineEvent), end: make(chan error), ctx: ctx}
		select {
		case s.streams <- opened:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return func() (machineEvent, error) {
			select {
			case e := <-opened.events:
				return e, nil
			case err := <-opened.end:
				return machineEvent{}, err
			case <-ctx.Done():
				return machineEvent{}, ctx.Err()
			}
		}, nil
	})
	s.providerID = machine.GetProviderId
	s.moves = func() <-chan struct{} {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.moving
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return s
}

// open waits for the next stream, and lets the backoff pass.
func (s *scripted) open() *stream {
	s.t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case opened := <-s.streams:
			return opened
		case <-deadline:
			s.t.Fatal("no stream was opened")
		case <-time.After(time.Millisecond):
			// Only the backoff passes. Its length is unknown because of the jitter.
			s.clock.Step(100 * time.Millisecond)
		}
	}
}

func (s *scripted) send(to *stream, events ...machineEvent) {
	s.t.Helper()
	for _, e := range events {
		select {
		case to.events <- e:
		case <-time.After(patience):
			s.t.Fatal("the mirror does not read")
		}
	}
}

func (s *scripted) eventually(check func() bool) {
	s.t.Helper()
	require.Eventually(s.t, check, patience, time.Millisecond)
}

func (s *scripted) names() []string {
	var names []string
	objects, _ := s.List()
	for _, m := range objects {
		names = append(names, m.GetName())
	}
	return names
}

func upserted(name, phase string) machineEvent {
	return machineEvent{kind: upsert, object: &agentv1alpha1.Machine{Name: name, Phase: phase}}
}

func gone(name string) machineEvent { return machineEvent{kind: removed, key: name} }

var marker = machineEvent{kind: synced}

func TestMirrorShowsNothingBeforeTheSnapshotIsComplete(t *testing.T) {
	s := newScripted(t)
	stream := s.open()
	s.send(stream, upserted("b", ""), upserted("a", ""), upserted("c", ""), gone("c"))
	require.Empty(t, s.names())
	require.False(t, s.State().Synced)
	require.False(t, s.State().Connected)
	select {
	case <-s.Synced():
		t.Fatal("synced too early")
	default:
	}

	s.send(stream, marker, machineEvent{kind: heartbeat})
	require.NoError(t, s.WaitForSync(t.Context()))
	require.Equal(t, []string{"a", "b"}, s.names())
	require.True(t, s.State().Connected)
	require.Equal(t, s.clock.Now(), s.State().LastEvent)
}

func TestMirrorAppliesChanges(t *testing.T) {
	s := newScripted(t)
	stream := s.open()
	s.send(stream, upserted("a", "Pending"), marker, upserted("b", "Pending"), upserted("a", "Running"), machineEvent{kind: heartbeat})
	a, ok := s.Get("a")
	require.True(t, ok)
	require.Equal(t, "Running", a.GetPhase())
	s.send(stream, gone("a"), gone("never"), machineEvent{kind: heartbeat})
	_, ok = s.Get("a")
	require.False(t, ok)
	require.Equal(t, []string{"b"}, s.names())
}

func TestMirrorFindsByProviderID(t *testing.T) {
	s := newScripted(t)
	with := func(name, id string) machineEvent {
		return machineEvent{kind: upsert, object: &agentv1alpha1.Machine{Name: name, ProviderId: id}}
	}
	names := func(id string) []string {
		return lo.Map(s.WithProviderID(id), func(m machine, _ int) string { return m.GetName() })
	}
	stream := s.open()
	s.send(stream, with("a", "1"), with("b", ""), marker, with("c", "1"), machineEvent{kind: heartbeat})
	require.ElementsMatch(t, []string{"a", "c"}, names("1"))
	require.Empty(t, names(""))
	s.send(stream, with("b", "2"), with("a", "2"), gone("c"), machineEvent{kind: heartbeat})
	require.Empty(t, names("1"))
	require.ElementsMatch(t, []string{"a", "b"}, names("2"))

	s.send(stream, machineEvent{kind: resync}, with("b", "3"), machineEvent{kind: heartbeat})
	require.ElementsMatch(t, []string{"a", "b"}, names("2"), "until the new view is complete")
	s.send(stream, marker, machineEvent{kind: heartbeat})
	require.Empty(t, names("2"))
	require.Equal(t, []string{"b"}, names("3"))
	require.Empty(t, names("4"))
}

func TestMirrorCountsOnlyChanges(t *testing.T) {
	s := newScripted(t)
	stream := s.open()
	s.send(stream, upserted("a", ""), marker, machineEvent{kind: heartbeat})
	generation := s.Generation()
	s.send(stream, upserted("a", ""), machineEvent{}, marker, machineEvent{kind: heartbeat})
	require.Equal(t, generation, s.Generation())
	s.send(stream, upserted("a", "Running"), machineEvent{kind: heartbeat})
	require.Greater(t, s.Generation(), generation)

	before, at := s.List()
	again, atAgain := s.List()
	require.Equal(t, at, atAgain)
	require.Same(t, &before[0], &again[0], "an unchanged list is not made again")
}

func TestMirrorKeepsItsViewOverReconnection(t *testing.T) {
	s := newScripted(t)
	first := s.open()
	s.send(first, upserted("a", ""), upserted("b", ""), marker)
	broken := errors.New("connection reset")
	first.end <- broken
	s.eventually(func() bool { return !s.State().Connected })
	require.Equal(t, []string{"a", "b"}, s.names())
	require.True(t, s.State().Synced)
	require.ErrorIs(t, s.State().LastError, broken)

	second := s.open()
	subscription := s.Subscribe()
	defer subscription.Close()
	require.Equal(t, []string{"a", "b"}, subscription.Take(), "what is there counts as changed")
	s.send(second, upserted("b", ""), upserted("c", ""))
	require.Equal(t, []string{"a", "b"}, s.names(), "the old view stays until SYNCED")
	s.send(second, marker, machineEvent{kind: heartbeat})
	require.Equal(t, []string{"b", "c"}, s.names())
	require.True(t, s.State().Connected)
	require.Equal(t, []string{"a", "c"}, subscription.Take(), "what differs between the snapshots, and nothing else")
}

func TestMirrorTellsChangesOfItsState(t *testing.T) {
	s := newScripted(t)
	changes, stop := s.StateChanges()
	told := func() bool {
		select {
		case <-changes:
			return true
		case <-time.After(patience):
			return false
		}
	}
	first := s.open()
	s.send(first, upserted("a", ""), marker)
	require.True(t, told(), "it is complete")
	s.send(first, upserted("a", "Running"), machineEvent{kind: heartbeat})
	require.Empty(t, changes, "what it holds is not its state")
	first.end <- io.EOF
	require.True(t, told(), "it is disconnected")
	s.send(s.open(), marker, machineEvent{kind: heartbeat})
	require.True(t, told(), "it is back")

	stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(t, s.stateWatchers)
}

func TestMirrorKeepsItsViewDuringResync(t *testing.T) {
	s := newScripted(t)
	stream := s.open()
	s.send(stream, upserted("a", ""), upserted("b", ""), marker)
	s.send(stream, machineEvent{kind: resync}, upserted("c", ""), upserted("a", "Running"), machineEvent{kind: heartbeat})
	require.Equal(t, []string{"a", "b"}, s.names())
	a, _ := s.Get("a")
	require.Empty(t, a.GetPhase())
	require.True(t, s.State().Connected)
	s.send(stream, marker, machineEvent{kind: heartbeat})
	require.Equal(t, []string{"a", "c"}, s.names())
}

func TestMirrorDiscardsASnapshotThatBreaksOff(t *testing.T) {
	s := newScripted(t)
	stream := s.open()
	s.send(stream, upserted("a", ""), marker)
	stream.end <- io.EOF
	second := s.open()
	require.ErrorIs(t, s.State().LastError, errEnded)
	s.send(second, upserted("x", ""))
	second.end <- io.EOF
	third := s.open()
	s.send(third, upserted("b", ""))
	require.Equal(t, []string{"a"}, s.names())
	s.send(third, marker, machineEvent{kind: heartbeat})
	require.Equal(t, []string{"b"}, s.names(), "nothing of the broken snapshot remains")
}

func TestMirrorLeavesASilentStream(t *testing.T) {
	s := newScripted(t)
	stream := s.open()
	s.send(stream, marker)
	for range 5 {
		// Two of three intervals pass each time: heartbeats keep the stream alive.
		s.clock.Step(2 * interval)
		s.send(stream, machineEvent{kind: heartbeat}, machineEvent{kind: heartbeat})
		require.NoError(t, stream.ctx.Err())
	}
	s.eventually(func() bool {
		// This is repeated, because the watchdog may not have set its timer yet.
		s.clock.Step(interval)
		return stream.ctx.Err() != nil
	})
	s.eventually(func() bool { return errors.Is(s.State().LastError, errSilent) })
	require.False(t, s.State().Connected)
	s.send(s.open(), upserted("a", ""), marker, machineEvent{kind: heartbeat})
	require.Equal(t, []string{"a"}, s.names())
}

func TestMirrorLeavesAStreamThatDoesNotOpen(t *testing.T) {
	s := newScripted(t) // its streams are never accepted
	s.eventually(func() bool {
		s.clock.Step(interval)
		return errors.Is(s.State().LastError, errSilent)
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := s.WaitForSync(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, errSilent, "the wait says what was wrong")
}

func TestSubscriptionCollectsKeysWithoutHoldingTheStreamUp(t *testing.T) {
	s := newScripted(t)
	subscription := s.Subscribe()
	stream := s.open()
	s.send(stream, marker)
	for range 100 {
		s.send(stream, upserted("a", "x"), upserted("a", "y"), upserted("b", ""))
	}
	s.send(stream, gone("b"), machineEvent{kind: heartbeat})
	<-subscription.Changed()
	require.Equal(t, []string{"a", "b"}, subscription.Take())
	require.Empty(t, subscription.Take())

	subscription.Close()
	s.send(stream, upserted("c", ""), machineEvent{kind: heartbeat})
	require.Empty(t, subscription.Take())
}

// A connection ends with its certificate, and after some hours in any case.
func TestMirrorMovesToAnotherConnectionWithoutAGap(t *testing.T) {
	s := newScripted(t)
	first := s.open()
	s.send(first, upserted("a", ""), upserted("b", ""), marker)
	require.NoError(t, s.WaitForSync(t.Context()))
	since := s.State().Since
	changes, stop := s.StateChanges()
	defer stop()

	s.move()
	second := s.open()
	s.send(second, upserted("a", ""), upserted("c", ""))
	s.send(first, upserted("d", ""), machineEvent{kind: heartbeat})
	require.Equal(t, []string{"a", "b", "d"}, s.names(), "the first one is followed meanwhile")
	require.NoError(t, first.ctx.Err())
	s.send(second, upserted("d", ""), marker)
	s.eventually(func() bool { return first.ctx.Err() != nil })
	require.Equal(t, []string{"a", "c", "d"}, s.names())
	s.send(second, gone("a"), machineEvent{kind: heartbeat})
	require.Equal(t, []string{"c", "d"}, s.names())
	require.True(t, s.State().Connected)
	require.Equal(t, since, s.State().Since, "it was connected all the time")
	require.NoError(t, s.State().LastError)
	require.Empty(t, changes)
}

func TestMirrorTriesToMoveUntilItCan(t *testing.T) {
	s := newScripted(t)
	first := s.open()
	s.send(first, upserted("a", ""), marker)
	require.NoError(t, s.WaitForSync(t.Context()))
	s.move()
	refused := s.open()
	s.send(refused, upserted("half", ""))
	refused.end <- errors.New("refused")
	s.send(first, machineEvent{kind: heartbeat}, upserted("b", ""), machineEvent{kind: heartbeat})
	require.Equal(t, []string{"a", "b"}, s.names())
	require.True(t, s.State().Connected)

	var again *stream
	for again == nil { // the first one is not silent meanwhile
		select {
		case again = <-s.streams:
		case first.events <- machineEvent{kind: heartbeat}:
			s.clock.Step(100 * time.Millisecond)
		case <-time.After(patience):
			t.Fatal("it does not try again")
		}
	}
	require.NoError(t, first.ctx.Err())
	s.send(again, upserted("c", ""), marker)
	s.eventually(func() bool { return first.ctx.Err() != nil })
	require.Equal(t, []string{"c"}, s.names())
}

// The connection may end before the next one is complete.
func TestMirrorIsNotConnectedWhileNoStreamIsComplete(t *testing.T) {
	s := newScripted(t)
	first := s.open()
	s.send(first, upserted("a", ""), marker)
	require.NoError(t, s.WaitForSync(t.Context()))
	s.move()
	second := s.open()
	s.send(second, upserted("b", ""))
	first.end <- io.EOF
	s.eventually(func() bool { return !s.State().Connected })
	require.ErrorIs(t, s.State().LastError, errEnded)
	require.Equal(t, []string{"a"}, s.names())
	s.send(second, marker)
	s.eventually(func() bool { return s.State().Connected })
	require.Equal(t, []string{"b"}, s.names(), "no third one is needed")
	s.move()
	third := s.open()
	s.send(third, marker)
	s.eventually(func() bool { return second.ctx.Err() != nil })
	require.Empty(t, s.names())
}

// Both streams may complete their snapshot before the earlier one is left.
func TestMirrorNeverGoesBackToAnEarlierStream(t *testing.T) {
	m := newMirror(FromConn(nil, Options{}), "test", machine.GetName, nil)
	earlier := &following{number: 1, synced: make(chan struct{})}
	later := &following{number: 2, synced: make(chan struct{})}
	objects := func(names ...string) map[string]machine {
		return lo.SliceToMap(names, func(name string) (string, machine) { return name, &agentv1alpha1.Machine{Name: name} })
	}
	shown := func() []string {
		view, _ := m.List()
		return lo.Map(view, func(m machine, _ int) string { return m.GetName() })
	}
	m.replace(later, objects("new"))
	m.replace(earlier, objects("old"))
	require.Equal(t, []string{"new"}, shown())
	m.put(earlier, "old", &agentv1alpha1.Machine{Name: "old"})
	m.put(later, "newer", &agentv1alpha1.Machine{Name: "newer"})
	require.Equal(t, []string{"new", "newer"}, shown())
	m.replace(later, objects("again"))
	require.Equal(t, []string{"again"}, shown(), "a resync of the stream that is shown")
	require.True(t, m.State().Connected)
}
