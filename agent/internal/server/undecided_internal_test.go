package server

import (
	"bytes"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
)

// flooded returns a connection on which thousands of calls arrive, and a function that reads what
// it may of them and returns how many are undecided then.
func flooded(t *testing.T) (c *connection, read func() int) {
	t.Helper()
	near, far := net.Pipe()
	c = newConnection(near, time.Minute)
	p := paced{Conn: c, below: c, counted: newFrames(), pause: func() (time.Duration, bool) { return 0, false }, spent: func(int) {}}
	var sent bytes.Buffer
	sent.WriteString(http2.ClientPreface)
	framer := http2.NewFramer(&sent, nil)
	for range 5000 {
		require.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: make([]byte, 60)}))
	}
	go func() { _, _ = far.Write(sent.Bytes()) }()
	results := make(chan error)
	go func() {
		for {
			_, err := p.Read(make([]byte, 32<<10))
			results <- err
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = c.Close()
		_ = far.Close()
		for err := range results {
			if err != nil {
				return
			}
		}
	})
	return c, func() int {
		for {
			synctest.Wait()
			select {
			case err := <-results:
				require.NoError(t, err)
			default:
				c.undecided.mu.Lock()
				defer c.undecided.mu.Unlock()
				return c.undecided.calls
			}
		}
	}
}

// A connection is read no faster than its calls are decided, however many its caller sends at once.
func TestAConnectionIsNotReadFasterThanItsCallsAreDecided(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = undecidedCalls + readAtOnce/(60+frameHeader) + 1
		c, read := flooded(t)
		for range 20 {
			calls := read()
			require.Greater(t, calls, undecidedCalls)
			require.LessOrEqual(t, calls, most)
			for range calls - undecidedCalls {
				require.Equal(t, calls, read(), "it is not read while there are as many")
				c.undecided.decide()
				calls--
			}
		}
	})
}

// No interceptor sees the calls of unknown methods.
func TestAConnectionIsReadThoughCallsAreNeverDecided(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, read := flooded(t)
		began := time.Now()
		for range 3 {
			require.Greater(t, read(), undecidedCalls)
			<-time.After(undecidedWithin)
		}
		require.Greater(t, read(), undecidedCalls)
		require.Equal(t, 3*undecidedWithin, time.Since(began))
		for range 1000 {
			c.undecided.decide() // late
		}
		require.Positive(t, read(), "late decisions leave no credit")
	})
}

// The end of a connection ends the wait.
func TestAConnectionThatEndsIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, read := flooded(t)
		read()
		began := time.Now()
		require.NoError(t, c.Close())
		synctest.Wait()
		require.Zero(t, time.Since(began))
	})
}
