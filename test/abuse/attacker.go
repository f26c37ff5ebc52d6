package abuse

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	// orderVariable is the environment variable that holds the orders of an attacker process.
	orderVariable = "ABUSE_ORDER"
	// ready is the line with which the process reports that the attack has reached its full
	// strength.
	ready = "ready"
	// lowest is the priority of a process that only gets what others leave.
	lowest = 19
	// readyWithin bounds how long an attack takes to reach its full strength, and stopWithin how
	// long it takes to end.
	readyWithin, stopWithin = 5 * time.Minute, time.Minute
	// settledWithin is how long after the first of several tenants the attack is at full strength
	// at the latest: tenants may also keep each other from what they need.
	settledWithin = time.Minute
)

// order holds the orders of an attacker process.
type order struct {
	Attack  string `json:"attack"`
	Address string `json:"address"`
	CAFile  string `json:"caFile"`
	// Tenants are the Clusters that attack at once.
	Tenants []tenant `json:"tenants"`
	// Run is part of every id that the attackers invent.
	Run string `json:"run"`
}

// tenant is one of the Clusters that attack.
type tenant struct {
	// Identity and Stranger are the certificates of the Cluster and of an identity without any
	// rights.
	Identity keyPair `json:"identity"`
	Stranger keyPair `json:"stranger"`
	// Cluster is in the same namespace as the victim's, and Group is the id of its node group.
	Cluster *agentv1alpha1.ClusterRef `json:"cluster"`
	Group   string                    `json:"group"`
}

type keyPair struct {
	Certificate string `json:"certificate"`
	Key         string `json:"key"`
}

// Figures are the totals of an attack.
type Figures struct {
	// Calls and Connections count what was begun.
	Calls       int64 `json:"calls"`
	Connections int64 `json:"connections"`
	// Bytes counts the bytes sent, including TLS.
	Bytes int64 `json:"bytes"`
	// Processor is the CPU time that the attacker itself used.
	Processor time.Duration `json:"processor"`
	// Answers counts the answers by name of the code or by outcome of the connection.
	Answers map[string]int64 `json:"answers"`
}

func (f *Figures) add(other Figures) {
	f.Calls += other.Calls
	f.Connections += other.Connections
	f.Bytes += other.Bytes
	f.Processor += other.Processor
	if f.Answers == nil {
		f.Answers = map[string]int64{}
	}
	for answer, n := range other.Answers {
		f.Answers[answer] += n
	}
}

// assault is a running attacker process.
type assault struct {
	command *exec.Cmd
	stop    io.Closer
	out     *bufio.Reader
}

// launch starts an attacker and returns once the attack has reached its full strength. The program
// must call [Attacker] before anything else.
func launch(ctx context.Context, o order, log io.Writer) (*assault, error) {
	text, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	a := &assault{command: exec.CommandContext(ctx, self)}
	a.command.Env = append(os.Environ(), orderVariable+"="+string(text))
	a.command.Stderr = log
	a.command.WaitDelay = stopWithin
	if a.stop, err = a.command.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := a.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := a.command.Start(); err != nil {
		return nil, err
	}
	a.out = bufio.NewReader(out)
	late := time.AfterFunc(readyWithin, func() { _ = a.command.Process.Kill() })
	line, err := a.out.ReadString('\n')
	late.Stop()
	if err != nil || line != ready+"\n" {
		_ = a.command.Process.Kill()
		return nil, fmt.Errorf("the attacker did not get going: %q: %w", line, errors.Join(err, a.command.Wait()))
	}
	return a, nil
}

// end stops the attacker and returns its figures.
func (a *assault) end() (Figures, error) {
	var f Figures
	_ = a.stop.Close() // the signal to stop
	late := time.AfterFunc(stopWithin, func() { _ = a.command.Process.Kill() })
	defer late.Stop()
	err := json.NewDecoder(a.out).Decode(&f)
	if err := errors.Join(err, a.command.Wait()); err != nil {
		return f, fmt.Errorf("the attacker: %w", err)
	}
	return f, nil
}

// Attacker attacks and then exits, if [Run] has started this process as an attacker. Otherwise it
// does nothing.
func Attacker() {
	text := os.Getenv(orderVariable)
	if text == "" {
		return
	}
	if err := obey([]byte(text)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// obey attacks until standard input is closed.
func obey(text []byte) error {
	runtime.GOMAXPROCS(1)
	if err := stepBack(); err != nil {
		return fmt.Errorf("lowering the attacker's priority: %w", err)
	}
	var o order
	if err := json.Unmarshal(text, &o); err != nil {
		return err
	}
	attack, err := attackOf(o.Attack)
	if err != nil {
		return err
	}
	t, err := assemble(o, lo.Without(attack.must, kept), sync.OnceFunc(func() { fmt.Fprintln(os.Stdout, ready) }))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, os.Stdin) // it stops on any end of input
	}()
	defer t.close()
	all, attacking := errgroup.WithContext(ctx)
	for _, a := range t.attackers {
		all.Go(func() error { return attack.run(attacking, a) })
	}
	if err := all.Wait(); err != nil && ctx.Err() == nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(t.figures())
}

// stepBack gives the lowest priority to every thread of the process, and therefore to the threads
// that they start.
func stepBack() error {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil { // another system, where the priority applies to the process
		return syscall.Setpriority(syscall.PRIO_PROCESS, 0, lowest)
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			return err
		}
		if err := syscall.Setpriority(syscall.PRIO_PROCESS, id, lowest); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

// team is the attackers of all tenants. It is safe for concurrent use.
type team struct {
	attackers []*attacker
	// say tells [Run] that the attack is at full strength.
	say func()

	mu sync.Mutex
	// awaited are the answers that must come before the attack is measured. On a busy machine its
	// calls can take seconds to be sent and answered.
	awaited []string
	// ready counts the attackers that have sent what they need to be at full strength. settled is
	// set when the others are not waited for any more.
	ready   int
	settled bool
}

func assemble(o order, awaited []string, say func()) (*team, error) {
	t := &team{say: say, awaited: awaited}
	ca, err := os.ReadFile(o.CAFile)
	if err != nil {
		return nil, err
	}
	trust := x509.NewCertPool()
	trust.AppendCertsFromPEM(ca)
	for i, of := range o.Tenants {
		a := &attacker{
			tenant: of, address: o.Address, run: fmt.Sprintf("%s-%d", o.Run, i+1), trust: trust, team: t,
			answers: map[string]int64{}, ready: sync.OnceFunc(t.oneMore),
			source: net.IPv4(127, 0, byte((i+2)>>8), byte(i+2)), // 127.0.0.1 is that of the victim
		}
		if a.identity, err = tls.LoadX509KeyPair(of.Identity.Certificate, of.Identity.Key); err != nil {
			return nil, err
		}
		if a.stranger, err = tls.LoadX509KeyPair(of.Stranger.Certificate, of.Stranger.Key); err != nil {
			return nil, err
		}
		t.attackers = append(t.attackers, a)
	}
	return t, nil
}

func (t *team) close() {
	for _, a := range t.attackers {
		a.close()
	}
}

func (t *team) figures() Figures {
	var f Figures
	for _, a := range t.attackers {
		f.add(a.figures())
	}
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) == nil {
		f.Processor = time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	return f
}

// oneMore records that an attacker has sent what it needs to be at full strength.
func (t *team) oneMore() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ready++; t.ready == 1 {
		time.AfterFunc(settledWithin, t.settle)
	}
	t.sayIfReady()
}

func (t *team) settle() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.settled = true
	t.sayIfReady()
}

// came records that one of the attackers has received an answer.
func (t *team) came(answer string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if lo.Contains(t.awaited, answer) {
		t.awaited = lo.Without(t.awaited, answer)
		t.sayIfReady()
	}
}

// sayIfReady requires t.mu.
func (t *team) sayIfReady() {
	if len(t.awaited) == 0 && (t.settled || t.ready == len(t.attackers)) {
		t.say()
	}
}

// attacker attacks as one tenant. It is safe for concurrent use.
type attacker struct {
	tenant

	team    *team
	address string
	// source is the loopback address that it connects from, on systems that have all of
	// 127.0.0.0/8.
	source net.IP
	// run is part of every id that it invents.
	run   string
	trust *x509.CertPool
	// stranger has no rights.
	identity, stranger tls.Certificate
	// ready reports that the attacker has sent what it needs to be at full strength.
	ready func()

	calls, connections, bytes, ids atomic.Int64

	mu      sync.Mutex
	answers map[string]int64
	open    []io.Closer
}

func (a *attacker) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.open {
		_ = c.Close() // the process ends anyway
	}
}

func (a *attacker) figures() Figures {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Figures{Calls: a.calls.Load(), Connections: a.connections.Load(), Bytes: a.bytes.Load(), Answers: maps.Clone(a.answers)}
}

// came counts an answer and returns how often it has been received.
func (a *attacker) came(answer string) int64 {
	a.team.came(answer)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answers[answer]++
	return a.answers[answer]
}

// part returns the attacker's part of what all of them have together.
func (a *attacker) part(whole int) int {
	attackers := len(a.team.attackers)
	return (whole + attackers - 1) / attackers
}

// id returns a new claim id.
func (a *attacker) id() string { return fmt.Sprintf("%s-%d", a.run, a.ids.Add(1)) }

// dial opens a TCP connection.
func (a *attacker) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	if runtime.GOOS == "linux" {
		d.LocalAddr = &net.TCPAddr{IP: a.source}
	}
	conn, err := d.DialContext(ctx, "tcp", a.address)
	if err != nil {
		return nil, err
	}
	a.connections.Add(1)
	return counted{conn, &a.bytes}, nil
}

// secure performs the TLS handshake on a connection.
func (a *attacker) secure(ctx context.Context, conn net.Conn, as tls.Certificate) (net.Conn, error) {
	c := tls.Client(conn, a.config(as))
	if err := c.HandshakeContext(ctx); err != nil {
		_ = conn.Close() // it is unusable
		return nil, err
	}
	return c, nil
}

func (a *attacker) config(as tls.Certificate) *tls.Config {
	host, _, err := net.SplitHostPort(a.address)
	if err != nil {
		host = a.address
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: a.trust, ServerName: host, Certificates: []tls.Certificate{as}, NextProtos: []string{"h2"},
	}
}

// connect returns a gRPC connection that sends encoded requests unchanged.
func (a *attacker) connect(as tls.Certificate) (*grpc.ClientConn, error) {
	again := backoff.DefaultConfig
	again.BaseDelay, again.MaxDelay = 10*time.Millisecond, 100*time.Millisecond
	conn, err := grpc.NewClient("passthrough:///"+a.address,
		grpc.WithTransportCredentials(credentials.NewTLS(a.config(as))),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return a.dial(ctx) }),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(asItIs{}), grpc.MaxCallRecvMsgSize(1<<30)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: time.Second}),
	)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.open = append(a.open, conn)
	return conn, nil
}

// call makes a unary call with an encoded request, and returns the code of the answer.
func (a *attacker) call(ctx context.Context, conn *grpc.ClientConn, method string, request []byte) codes.Code {
	a.calls.Add(1)
	err := conn.Invoke(ctx, method, encoded(request), &ignored{})
	code := status.Code(err)
	if ctx.Err() == nil {
		a.came(code.String())
	}
	return code
}

// several runs again in n goroutines, repeatedly until the context ends.
func several(ctx context.Context, n int, again func(ctx context.Context, i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			for ctx.Err() == nil {
				again(ctx, i)
			}
		})
	}
	all.Wait()
}

// counted counts the bytes written.
type counted struct {
	net.Conn

	bytes *atomic.Int64
}

func (c counted) Write(data []byte) (int, error) {
	n, err := c.Conn.Write(data)
	c.bytes.Add(int64(n))
	return n, err
}

// encoded is a message that is sent unchanged.
type encoded []byte

// ignored is a message that is not decoded.
type ignored struct{}

// received is an encoded answer.
type received []byte

// asItIs is a codec that sends [encoded] unchanged, and decodes no answer.
type asItIs struct{}

func (asItIs) Name() string { return "proto" }

func (asItIs) Marshal(message any) (mem.BufferSlice, error) {
	request, ok := message.(encoded)
	if !ok {
		return nil, fmt.Errorf("%T is not encoded", message)
	}
	return mem.BufferSlice{mem.SliceBuffer(request)}, nil
}

func (asItIs) Unmarshal(data mem.BufferSlice, into any) error {
	if answer, ok := into.(*received); ok {
		*answer = data.Materialize()
	}
	return nil
}
