package batchread

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// server answers reads when it is told to, and records their keys.
type server struct {
	mu      sync.Mutex
	asked   [][]string
	answers chan error
}

func newServer() *server { return &server{answers: make(chan error)} }

func (s *server) read(ctx context.Context, keys []string) (map[string]string, error) {
	s.mu.Lock()
	s.asked = append(s.asked, slices.Clone(keys))
	number := len(s.asked)
	s.mu.Unlock()
	select {
	case err := <-s.answers:
		values := map[string]string{}
		for _, key := range keys {
			values[key] = fmt.Sprintf("%s of request %d", key, number)
		}
		return values, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// requests returns the keys of all requests so far.
func (s *server) requests() [][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

// result is what a call returned.
type result struct {
	value string
	err   error
}

// begin starts a call, which has found its place or its queue when begin returns.
func begin(ctx context.Context, reads *Reads[string, string, string], s *server, group, key string) <-chan result {
	returned := make(chan result, 1)
	go func() {
		value, err := reads.Do(ctx, group, key, s.read)
		returned <- result{value, err}
	}()
	synctest.Wait()
	return returned
}

func TestReadsThatWaitShareTheNextRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, reads := newServer(), Reads[string, string, string]{}
		first, second := begin(t.Context(), &reads, s, "g", "a"), begin(t.Context(), &reads, s, "g", "b")
		require.Equal(t, [][]string{{"a"}, {"b"}}, s.requests(), "none of them waits")

		again := begin(t.Context(), &reads, s, "g", "a")
		third, twice := begin(t.Context(), &reads, s, "g", "c"), begin(t.Context(), &reads, s, "g", "a")
		other := begin(t.Context(), &reads, s, "another", "a")
		require.Equal(t, []string{"a"}, s.requests()[2], "another group does not wait")
		require.Len(t, s.requests(), 3)

		for range 3 {
			s.answers <- nil
			synctest.Wait()
		}
		requests := s.requests()
		require.Equal(t, []string{"a", "c"}, requests[3], "in the order of the calls, each key once")
		require.Equal(t, []string{"a"}, requests[4], "a value belongs to one call")
		for range 2 {
			s.answers <- nil
		}
		for want, returned := range map[string]<-chan result{
			"a of request 1": first, "b of request 2": second, "a of request 3": other,
			"a of request 4": again, "c of request 4": third, "a of request 5": twice,
		} {
			require.Equal(t, result{value: want}, <-returned)
		}
		synctest.Wait()
		require.Empty(t, reads.groups, "nothing is kept")
	})
}

func TestARequestNamesNoMoreKeysThanFit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, reads := newServer(), Reads[string, string, string]{}
		var calls []<-chan result
		for i := range places + mostKeys + 1 {
			calls = append(calls, begin(t.Context(), &reads, s, "g", strconv.Itoa(i)))
		}
		for range places + 2 {
			s.answers <- nil
			synctest.Wait()
		}
		requests := s.requests()
		require.Len(t, requests, places+2)
		require.Len(t, requests[places], mostKeys)
		require.Len(t, requests[places+1], 1)
		for _, returned := range calls {
			require.NoError(t, (<-returned).err)
		}
	})
}

func TestTheErrorOfARequestIsThatOfItsCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, reads := newServer(), Reads[string, string, string]{}
		busy := []<-chan result{begin(t.Context(), &reads, s, "g", "a"), begin(t.Context(), &reads, s, "g", "b")}
		waiting := []<-chan result{begin(t.Context(), &reads, s, "g", "c"), begin(t.Context(), &reads, s, "g", "d")}
		s.answers <- nil
		synctest.Wait()
		refused := errors.New("too many requests")
		s.answers <- nil // the other one of the first two
		s.answers <- refused
		for _, returned := range busy {
			require.NoError(t, (<-returned).err)
		}
		for _, returned := range waiting {
			require.ErrorIs(t, (<-returned).err, refused)
		}
	})
}

func TestACallLeavesAndTheOthersAreAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, reads := newServer(), Reads[string, string, string]{}
		begin(t.Context(), &reads, s, "g", "a")
		begin(t.Context(), &reads, s, "g", "b")
		cause := errors.New("the caller has gone")
		queued, leaveQueue := context.WithCancelCause(t.Context())
		served, leaveRequest := context.WithCancelCause(t.Context())
		gone := begin(queued, &reads, s, "g", "c")
		leaving, staying := begin(served, &reads, s, "g", "d"), begin(t.Context(), &reads, s, "g", "e")

		leaveQueue(cause)
		require.ErrorIs(t, (<-gone).err, cause)
		s.answers <- nil
		synctest.Wait()
		require.Equal(t, []string{"d", "e"}, s.requests()[2])
		leaveRequest(cause)
		require.ErrorIs(t, (<-leaving).err, cause)
		s.answers <- nil
		s.answers <- nil
		require.Equal(t, result{value: "e of request 3"}, <-staying)
	})
}

func TestARequestEndsWhenAllOfItsCallsHaveLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, reads := newServer(), Reads[string, string, string]{}
		ctx, leave := context.WithCancel(t.Context())
		var calls []<-chan result
		for _, key := range []string{"a", "b", "c", "d"} {
			calls = append(calls, begin(ctx, &reads, s, "g", key))
		}
		s.answers <- nil
		synctest.Wait()
		require.Equal(t, []string{"c", "d"}, s.requests()[2])
		after := begin(t.Context(), &reads, s, "g", "e")
		leave()
		synctest.Wait()
		require.Equal(t, []string{"e"}, s.requests()[3], "their places are free, without an answer of the server")
		s.answers <- nil
		require.NoError(t, (<-after).err)
		failed := 0
		for _, returned := range calls {
			if (<-returned).err != nil {
				failed++
			}
		}
		require.Equal(t, 3, failed)
	})
}

func TestAPanicCostsItsCallsAndNoPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, reads := newServer(), Reads[string, string, string]{}
		bad := func(context.Context, []string) (map[string]string, error) { panic("a bug") }
		require.Panics(t, func() { _, _ = reads.Do(t.Context(), "g", "a", bad) })
		busy := []<-chan result{begin(t.Context(), &reads, s, "g", "a"), begin(t.Context(), &reads, s, "g", "b")}
		waiting := make(chan error, 1)
		go func() {
			_, err := reads.Do(t.Context(), "g", "c", bad)
			waiting <- err
		}()
		synctest.Wait()
		s.answers <- nil
		require.ErrorContains(t, <-waiting, "internal error")
		s.answers <- nil
		for _, returned := range busy {
			require.NoError(t, (<-returned).err)
		}
		synctest.Wait()
		require.Empty(t, reads.groups)
	})
}

// Every call gets the value of its key that the server had after the call began.
func TestManyCallsAtOnce(t *testing.T) {
	var (
		reads   Reads[int, int, int64]
		version atomic.Int64
		calls   sync.WaitGroup
	)
	read := func(ctx context.Context, keys []int) (map[int]int64, error) {
		now := version.Load()
		return maps.Collect(func(yield func(int, int64) bool) {
			for _, key := range keys {
				if !yield(key, now) {
					return
				}
			}
		}), ctx.Err()
	}
	for caller := range 64 {
		calls.Go(func() {
			for range 200 {
				before := version.Add(1)
				got, err := reads.Do(t.Context(), caller%3, caller%16, read)
				if err != nil || got < before {
					t.Errorf("got %d, %v, after %d", got, err, before)
				}
			}
		})
	}
	calls.Wait()
}

// A request for one call carries that call's values. A request that several calls share has none by
// which it would be charged to one of them, and ends by the latest of their deadlines.
func TestTheContextOfARequest(t *testing.T) {
	type key struct{}
	synctest.Test(t, func(t *testing.T) {
		var reads Reads[string, string, string]
		type seen struct {
			caller   any
			deadline time.Duration
		}
		began, answers, contexts := time.Now(), make(chan struct{}), make(chan seen, 10)
		read := func(ctx context.Context, keys []string) (map[string]string, error) {
			of := seen{caller: ctx.Value(key{})}
			if deadline, has := ctx.Deadline(); has {
				of.deadline = deadline.Sub(began)
			}
			contexts <- of
			<-answers
			return map[string]string{keys[0]: "x"}, ctx.Err()
		}
		var calls sync.WaitGroup
		call := func(name string, within time.Duration) {
			calls.Go(func() {
				ctx := context.WithValue(t.Context(), key{}, name)
				if within > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, within)
					defer cancel()
				}
				_, err := reads.Do(ctx, "g", name, read)
				assert.NoError(t, err)
			})
			synctest.Wait()
		}
		call("a", time.Second)
		call("b", 2*time.Second)
		require.Equal(t, []seen{{"a", time.Second}, {"b", 2 * time.Second}}, []seen{<-contexts, <-contexts})
		call("c", 3*time.Second)
		answers <- struct{}{}
		require.Equal(t, seen{"c", 3 * time.Second}, <-contexts, "it waited alone")
		call("d", 5*time.Second)
		call("e", 4*time.Second)
		answers <- struct{}{}
		require.Equal(t, seen{nil, 5 * time.Second}, <-contexts)
		call("f", time.Second)
		call("g", 0)
		answers <- struct{}{}
		require.Equal(t, seen{}, <-contexts, "one of them has no deadline")
		answers <- struct{}{}
		answers <- struct{}{}
		calls.Wait()
	})
}
