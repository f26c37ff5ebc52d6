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

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
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
func (c *client) ask(g Gomega, line string) time.Duration {
	began := time.Now()
	g.Expect(c.send(line)).To(Succeed())
	g.Expect(c.answer(soon)).To(Equal(line))
	return time.Since(began)
}

func TestARoundTripTakesItsTime(t *testing.T) {
	needsLink(t)
	g := NewWithT(t)
	c := dial(t, serve(t).address)
	good := c.ask(g, "good")
	g.Expect(link.Set(badlink.Conditions{RTT: 250 * time.Millisecond})).To(Succeed())
	bad := lo.Times(3, func(int) time.Duration { return c.ask(g, "slow") })
	g.Expect(lo.Min(bad)).To(BeNumerically(">=", 250*time.Millisecond))
	g.Expect(link.Set(badlink.Conditions{})).To(Succeed())
	t.Logf("without delay %s, with 250 ms %v", good, bad)
	g.Eventually(func() time.Duration { return c.ask(g, "good again") }).WithTimeout(soon).Should(BeNumerically("<", 125*time.Millisecond))
}

func TestLostPacketsAreSentAgain(t *testing.T) {
	needsLink(t)
	g := NewWithT(t)
	c := dial(t, serve(t).address)
	lost := func() int {
		n, err := link.Lost()
		g.Expect(err).NotTo(HaveOccurred())
		return n
	}
	before := lost()
	c.ask(g, "on a good link")
	g.Expect(lost()).To(Equal(before))
	g.Expect(link.Set(badlink.Conditions{Loss: 30})).To(Succeed())
	// A loss of fewer than ten in a thousand packets is less likely than a hardware failure.
	asked := 0
	for ; asked < 500 && lost()-before < 10; asked++ {
		c.ask(g, "again")
	}
	g.Expect(lost() - before).To(BeNumerically(">=", 10))
	t.Logf("%d packets lost of %d requests and answers", lost()-before, asked)
	g.Expect(link.Set(badlink.Conditions{})).To(Succeed())
	g.Expect(lost()-before).To(BeNumerically(">=", 10), "they are not forgotten")
}

func TestABitRateIsAnUpperBound(t *testing.T) {
	needsLink(t)
	g := NewWithT(t)
	c := dial(t, serve(t).address)
	g.Expect(link.Set(badlink.Conditions{Rate: 1_000_000})).To(Succeed())
	const size = 250_000 // bytes: two seconds in each direction, half of that in both at once
	line := strings.Repeat("x", size/10)
	began := time.Now()
	go func() {
		for range 10 {
			_ = c.send(line)
		}
	}()
	for range 10 {
		g.Expect(c.answer(2 * soon)).To(Equal(line))
	}
	took := time.Since(began)
	t.Logf("%d bytes there and back at 1 Mbit/s: %s", size, took)
	g.Expect(took).To(BeNumerically(">", 1900*time.Millisecond))
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
			g := NewWithT(t)
			s := serve(t)
			c := dial(t, s.address)
			c.ask(g, "before")
			g.Expect(<-s.read).To(Equal("before"))

			g.Expect(link.Set(test.conditions)).To(Succeed())
			g.Expect(c.send("meanwhile")).To(Succeed())
			_, err := c.answer(quiet)
			g.Expect(err).To(MatchError(os.ErrDeadlineExceeded), "and neither an end nor a reset")
			if test.heard {
				g.Eventually(s.read).WithTimeout(soon).Should(Receive(Equal("meanwhile")))
			} else {
				g.Expect(s.read).NotTo(Receive())
			}

			g.Expect(link.Set(badlink.Conditions{})).To(Succeed())
			g.Expect(c.answer(soon)).To(Equal("meanwhile"))
		})
	}
}

func TestAForgottenConnectionIsHalfOpen(t *testing.T) {
	needsLink(t)
	g := NewWithT(t)
	s := serve(t)
	old := dial(t, s.address)
	old.ask(g, "before")

	g.Expect(link.Forget()).To(Succeed())
	g.Expect(old.send("into the void")).To(Succeed())
	dial(t, s.address).ask(g, "of another connection")
	_, err := old.answer(quiet)
	g.Expect(err).To(MatchError(os.ErrDeadlineExceeded), "and neither an end nor a reset")
	g.Expect(old.Close()).To(Succeed())
	g.Consistently(s.ended).WithTimeout(quiet).ShouldNot(Receive(), "the server does not hear that it was closed")
	g.Expect(link.Connections()).To(BeNumerically(">=", 2), "and still holds it")
}

func TestALostAddressIsSilent(t *testing.T) {
	needsLink(t)
	g := NewWithT(t)
	s := serve(t)
	old := dial(t, s.address)
	old.ask(g, "before")
	g.Expect(link.Lose(s.address)).To(Succeed())

	dialer := net.Dialer{Timeout: quiet}
	_, err := dialer.DialContext(t.Context(), "tcp", netip.AddrPortFrom(s.address, badlink.Port).String())
	timeout, ok := errors.AsType[net.Error](err)
	g.Expect(ok && timeout.Timeout()).To(BeTrue(), "nothing refuses a connection: %v", err)
	_, err = old.answer(quiet)
	g.Expect(err).To(MatchError(os.ErrDeadlineExceeded), "and nothing ends the one that there is")
	dial(t, serve(t).address).ask(g, "by another address")
}

// A reboot is not tested.
func TestNothingIsLeftOfAProgramThatIsKilled(t *testing.T) {
	needsLink(t)
	g := NewWithT(t)
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	program := exec.CommandContext(ctx, "/proc/self/exe")
	program.Env = append(os.Environ(), holding+"=yes")
	stdin, err := program.StdinPipe()
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() { _ = stdin.Close() })
	stdout, err := program.StdoutPipe()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(program.Start()).To(Succeed())
	namespace, err := bufio.NewReader(stdout).ReadString('\n')
	g.Expect(err).NotTo(HaveOccurred())
	namespace = strings.TrimSpace(namespace)
	g.Expect(namespace).To(HavePrefix("net:["))
	g.Expect(inUse(namespace)).NotTo(BeEmpty(), "the test has to see what it is looking for")

	g.Expect(program.Process.Kill()).To(Succeed())
	_ = program.Wait()
	g.Expect(inUse(namespace)).To(BeEmpty())
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
	g := NewWithT(t)
	names, err := badlink.NewNames()
	g.Expect(err).NotTo(HaveOccurred())
	lookup := func() []string {
		found, err := (&net.Resolver{PreferGo: true}).LookupHost(t.Context(), "server.badlink.test")
		g.Expect(err).NotTo(HaveOccurred())
		return found
	}
	g.Expect(names.Set("server.badlink.test", netip.MustParseAddr("192.0.2.1"))).To(Succeed())
	g.Expect(lookup()).To(ConsistOf("192.0.2.1"))
	g.Expect(names.Set("server.badlink.test", netip.MustParseAddr("192.0.2.22"))).To(Succeed())
	g.Eventually(lookup).WithTimeout(soon).Should(ConsistOf("192.0.2.22"))
}
