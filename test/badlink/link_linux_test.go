package badlink_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/karpenter-capi/karpenter-capi/test/badlink"
)

const (
	// soon bounds what is immediate on a good link, even on a machine that is busy with other work.
	soon = 30 * time.Second
	// quiet is how long the tests wait to verify that nothing arrives.
	quiet = 500 * time.Millisecond
	// holding is the environment variable that makes the program create a link and wait to be
	// killed.
	holding = "BADLINK_TEST_HOLD"
)

// link is shared by all tests; each leaves it good. Nil if there can be none.
var (
	link      *badlink.Link
	errNoLink error
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if errNoLink = badlink.Apart(); errNoLink == nil {
		link, errNoLink = badlink.New()
	}
	if os.Getenv(holding) != "" {
		namespace, err := os.Readlink("/proc/self/ns/net")
		fmt.Fprintln(os.Stdout, lo.Ternary(errors.Join(err, errNoLink) == nil, namespace, fmt.Sprint(err, errNoLink)))
		_, _ = io.ReadAll(os.Stdin)
		return 1
	}
	code := m.Run()
	if link != nil {
		if err := link.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// needsLink skips the test if there can be no link: without the permissions, without a tun device,
// or on a kernel that lacks what a link needs.
func needsLink(t *testing.T) {
	t.Helper()
	_, errNoTun := os.Stat("/dev/net/tun")
	switch {
	case errNoLink == nil:
	case errNoTun != nil:
		t.Skip(errNoTun)
	case lo.ContainsBy([]error{unix.EPERM, unix.EACCES, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT}, func(missing error) bool {
		return errors.Is(errNoLink, missing)
	}):
		t.Skip(errNoLink)
	default:
		t.Fatal(errNoLink)
	}
	t.Cleanup(func() {
		if err := link.Set(badlink.Conditions{}); err != nil {
			t.Error(err)
		}
	})
}

// server echoes every line, and reports what it has read.
type server struct {
	address netip.Addr
	read    chan string
	// ended receives the error of each connection that has ended.
	ended chan error
}

func serve(t *testing.T) *server {
	t.Helper()
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	s := &server{read: make(chan string, 100), ended: make(chan error, 100)}
	if s.address, err = link.Serve(netip.MustParseAddrPort(listener.Addr().String()).Port()); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = conn.Close() }()
				lines := bufio.NewScanner(conn)
				for lines.Scan() {
					s.read <- lines.Text()
					_, _ = fmt.Fprintln(conn, lines.Text())
				}
				s.ended <- lines.Err()
			}()
		}
	}()
	return s
}

// client is a connection to a server.
type client struct {
	net.Conn

	answers *bufio.Reader
}

func dial(t *testing.T, to netip.Addr) *client {
	t.Helper()
	dialer := net.Dialer{Timeout: soon}
	conn, err := dialer.DialContext(t.Context(), "tcp", netip.AddrPortFrom(to, badlink.Port).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &client{conn, bufio.NewReader(conn)}
}

func (c *client) send(line string) error {
	_, err := fmt.Fprintln(c, line)
	return err
}

// answer returns the next line, or [os.ErrDeadlineExceeded] if none arrives in time.
func (c *client) answer(within time.Duration) (string, error) {
	if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
		return "", err
	}
	line, err := c.answers.ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

// ask sends a line and returns how long its answer took.
func (c *client) ask(t require.TestingT, line string) time.Duration {
	began := time.Now()
	require.NoError(t, c.send(line))
	answer, err := c.answer(soon)
	require.NoError(t, err)
	require.Equal(t, line, answer)
	return time.Since(began)
}

func TestARoundTripTakesItsTime(t *testing.T) {
	needsLink(t)
	c := dial(t, serve(t).address)
	good := c.ask(t, "good")
	require.NoError(t, link.Set(badlink.Conditions{RTT: 250 * time.Millisecond}))
	bad := lo.Times(3, func(int) time.Duration { return c.ask(t, "slow") })
	require.GreaterOrEqual(t, lo.Min(bad), 250*time.Millisecond)
	require.NoError(t, link.Set(badlink.Conditions{}))
	t.Logf("without delay %s, with 250 ms %v", good, bad)
	require.EventuallyWithT(t, func(collect *assert.CollectT) {
		require.Less(collect, c.ask(collect, "good again"), 125*time.Millisecond)
	}, soon, 10*time.Millisecond)
}

func TestLostPacketsAreSentAgain(t *testing.T) {
	needsLink(t)
	c := dial(t, serve(t).address)
	lost := func() int {
		n, err := link.Lost()
		require.NoError(t, err)
		return n
	}
	before := lost()
	c.ask(t, "on a good link")
	require.Equal(t, before, lost())
	require.NoError(t, link.Set(badlink.Conditions{Loss: 30}))
	// A loss of fewer than ten in a thousand packets is less likely than a hardware failure.
	asked := 0
	for ; asked < 500 && lost()-before < 10; asked++ {
		c.ask(t, "again")
	}
	require.GreaterOrEqual(t, lost()-before, 10)
	t.Logf("%d packets lost of %d requests and answers", lost()-before, asked)
	require.NoError(t, link.Set(badlink.Conditions{}))
	require.GreaterOrEqual(t, lost()-before, 10, "they are not forgotten")
}

func TestABitRateIsAnUpperBound(t *testing.T) {
	needsLink(t)
	c := dial(t, serve(t).address)
	require.NoError(t, link.Set(badlink.Conditions{Rate: 1_000_000}))
	const size = 250_000 // bytes: two seconds in each direction, half of that in both at once
	line := strings.Repeat("x", size/10)
	began := time.Now()
	go func() {
		for range 10 {
			_ = c.send(line)
		}
	}()
	for range 10 {
		answer, err := c.answer(2 * soon)
		require.NoError(t, err)
		require.Equal(t, line, answer)
	}
	took := time.Since(began)
	t.Logf("%d bytes there and back at 1 Mbit/s: %s", size, took)
	require.Greater(t, took, 1900*time.Millisecond)
}

func TestAPartitionLosesNothingThatTCPCanSendAgain(t *testing.T) {
	for _, test := range []struct {
		shows      string
		conditions badlink.Conditions
		heard      bool
	}{
		{"nothing passes", badlink.Down, false},
		{"clients are not heard", badlink.Conditions{Mute: true}, false},
		{"servers are not heard", badlink.Conditions{Deaf: true}, true},
	} {
		t.Run(test.shows, func(t *testing.T) {
			needsLink(t)
			s := serve(t)
			c := dial(t, s.address)
			c.ask(t, "before")
			require.Equal(t, "before", <-s.read)

			require.NoError(t, link.Set(test.conditions))
			require.NoError(t, c.send("meanwhile"))
			_, err := c.answer(quiet)
			require.ErrorIs(t, err, os.ErrDeadlineExceeded, "and neither an end nor a reset")
			if test.heard {
				select {
				case line := <-s.read:
					require.Equal(t, "meanwhile", line)
				case <-time.After(soon):
					require.Fail(t, "the server reads nothing")
				}
			} else {
				require.Empty(t, s.read)
			}

			require.NoError(t, link.Set(badlink.Conditions{}))
			answer, err := c.answer(soon)
			require.NoError(t, err)
			require.Equal(t, "meanwhile", answer)
		})
	}
}

func TestAForgottenConnectionIsHalfOpen(t *testing.T) {
	needsLink(t)
	s := serve(t)
	old := dial(t, s.address)
	old.ask(t, "before")

	require.NoError(t, link.Forget())
	require.NoError(t, old.send("into the void"))
	dial(t, s.address).ask(t, "of another connection")
	_, err := old.answer(quiet)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "and neither an end nor a reset")
	require.NoError(t, old.Close())
	select {
	case err := <-s.ended:
		require.Fail(t, "the server hears that it was closed", "%v", err)
	case <-time.After(quiet):
	}
	connections, err := link.Connections()
	require.NoError(t, err)
	require.GreaterOrEqual(t, connections, 2, "the server still holds it")
}

func TestALostAddressIsSilent(t *testing.T) {
	needsLink(t)
	s := serve(t)
	old := dial(t, s.address)
	old.ask(t, "before")
	require.NoError(t, link.Lose(s.address))

	dialer := net.Dialer{Timeout: quiet}
	_, err := dialer.DialContext(t.Context(), "tcp", netip.AddrPortFrom(s.address, badlink.Port).String())
	timeout, ok := errors.AsType[net.Error](err)
	require.True(t, ok && timeout.Timeout(), "nothing refuses a connection: %v", err)
	_, err = old.answer(quiet)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "and nothing ends the one that there is")
	dial(t, serve(t).address).ask(t, "by another address")
}

// A reboot is not tested.
func TestNothingIsLeftOfAProgramThatIsKilled(t *testing.T) {
	needsLink(t)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	program := exec.CommandContext(ctx, "/proc/self/exe")
	program.Env = append(os.Environ(), holding+"=yes")
	stdin, err := program.StdinPipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = stdin.Close() })
	stdout, err := program.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, program.Start())
	namespace, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	namespace = strings.TrimSpace(namespace)
	require.True(t, strings.HasPrefix(namespace, "net:["), namespace)
	require.NotEmpty(t, inUse(namespace), "the test has to see what it is looking for")

	require.NoError(t, program.Process.Kill())
	_ = program.Wait()
	require.Empty(t, inUse(namespace))
}

// inUse returns the processes in a network namespace.
func inUse(namespace string) []string {
	all, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*/ns/net")
	return lo.Filter(all, func(path string, _ int) bool {
		is, err := os.Readlink(path)
		return err == nil && is == namespace
	})
}

func TestNamesAreReplaced(t *testing.T) {
	needsLink(t)
	names, err := badlink.NewNames()
	require.NoError(t, err)
	ctx := t.Context()
	lookup := func(t require.TestingT) []string {
		found, err := (&net.Resolver{PreferGo: true}).LookupHost(ctx, "server.badlink.test")
		require.NoError(t, err)
		return found
	}
	require.NoError(t, names.Set("server.badlink.test", netip.MustParseAddr("192.0.2.1")))
	require.Equal(t, []string{"192.0.2.1"}, lookup(t))
	require.NoError(t, names.Set("server.badlink.test", netip.MustParseAddr("192.0.2.22")))
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.Equal(c, []string{"192.0.2.22"}, lookup(c)) }, soon, 10*time.Millisecond)
}
