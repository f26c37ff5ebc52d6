package server

import (
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	clocktesting "k8s.io/utils/clock/testing"
)

// Keepalive does not detect a client that sends but never reads.
func TestAWriteThatTheOtherSideDoesNotTakeEnds(t *testing.T) {
	near, far := net.Pipe()
	defer func() { require.NoError(t, far.Close()) }()
	ended := make(chan struct{})
	c := newConnection(near, 10*time.Millisecond)
	c.until(func() { close(ended) })
	_, err := c.Write([]byte("x"))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	<-ended // whether or not anyone reads it
}

// A caller may connect again and again.
func TestANewConnectionOfACallerThatIsShutOutIsKeptForAMoment(t *testing.T) {
	near, far := net.Pipe()
	defer func() { require.NoError(t, far.Close()) }()
	c := newConnection(near, time.Minute)
	p := paced{Conn: c, below: c, counted: newFrames(), pause: func() (time.Duration, bool) { return 0, true }, spent: func(int) {}}
	began := time.Now()
	_, err := p.Read(make([]byte, 1))
	require.ErrorIs(t, err, errOver)
	require.GreaterOrEqual(t, time.Since(began), lingers)
	require.NoError(t, c.Close())
	_, err = p.Read(make([]byte, 1))
	require.ErrorIs(t, err, errOver, "one that has ended is not waited for")
}

func TestAConnectionOfACallerThatIsRefusedIsReadSlowly(t *testing.T) {
	near, far := net.Pipe()
	c := newConnection(near, time.Minute)
	pause, over := time.Duration(0), false
	sent := 0
	p := paced{
		Conn: c, below: c, counted: newFrames(),
		pause: func() (time.Duration, bool) { return pause, over }, spent: func(frames int) { sent += frames },
	}
	go func() {
		for {
			if _, err := far.Write(make([]byte, 4*readAtOnce)); err != nil {
				return
			}
		}
	}()
	n, err := p.Read(make([]byte, 4*readAtOnce))
	require.NoError(t, err)
	require.Equal(t, readAtOnce, n)
	require.Equal(t, (n-len(http2.ClientPreface))/frameHeader, sent, "zeros are frames without a payload")
	pause = time.Millisecond
	began := time.Now()
	n, err = p.Read(make([]byte, 4*readAtOnce))
	require.NoError(t, err)
	require.Equal(t, readAtOnce, n)
	require.GreaterOrEqual(t, time.Since(began), pause)

	over = true
	_, err = p.Read(make([]byte, 1))
	require.ErrorIs(t, err, errOver)

	pause, over = time.Hour, false
	ended := make(chan error)
	go func() {
		_, err := p.Read(make([]byte, 1))
		ended <- err
	}()
	c.end() // as Close does, before it closes what could still be read
	require.ErrorIs(t, <-ended, net.ErrClosed)
	require.NoError(t, c.Close())
	require.NoError(t, far.Close())
}

type addressed struct {
	net.Conn

	remote string
}

func (a addressed) RemoteAddr() net.Addr { return address(a.remote) }

type address string

func (address) Network() string  { return "tcp" }
func (a address) String() string { return string(a) }

// One host may use any address of its IPv6 network.
func TestTheSourceOfAConnectionIsAHostOrAnIPv6Network(t *testing.T) {
	for remote, want := range map[string]string{
		"192.0.2.1:443":              "192.0.2.1",
		"[::ffff:192.0.2.1]:443":     "192.0.2.1",
		"[2001:db8:1:2:a:b:c:d]:443": "2001:db8:1:2::/64",
		"[2001:db8:1:2::1]:80":       "2001:db8:1:2::/64",
		"[2001:db8:1:3::1]:80":       "2001:db8:1:3::/64",
		"[fe80::1%eth0]:80":          "fe80::/64",
		"@":                          "@", // a Unix socket
		"a peer without a host":      "a peer without a host",
	} {
		require.Equal(t, want, sourceOf(addressed{remote: remote}), remote)
	}
}

func TestAnIdentityIsLoggedOnceAMinute(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	s, logged := newSeldom(clk), []string{}
	connect := func() {
		for range 1000 {
			for _, identity := range []string{"a", "b"} {
				s.log(identity, func() { logged = append(logged, identity) })
			}
		}
	}
	connect()
	clk.Step(seldomInterval - time.Nanosecond)
	connect()
	require.Equal(t, []string{"a", "b"}, logged)
	clk.Step(time.Nanosecond)
	connect()
	require.Equal(t, []string{"a", "b", "a", "b"}, logged)
}
