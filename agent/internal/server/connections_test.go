package server_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// rawPeer is a client whose HTTP/2 flow control the test decides. It acknowledges pings and
// settings.
type rawPeer struct {
	*testing.T

	conn     *tls.Conn
	received chan http2.Frame // closed when the connection has ended
	ended    error            // why it ended, once received is closed

	mu      sync.Mutex // guards the fields below
	framer  *http2.Framer
	headers bytes.Buffer
	encoder *hpack.Encoder
	calls   uint32
}

// dialRaw connects with a certificate for the URI name. The server closes the connection if the
// identity already has too many.
func (f *fixture) dialRaw(uri string) *tls.Conn {
	f.Helper()
	files := f.authority.Issue(f, f.TempDir(), f.authority, uri)
	pair, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(f, err)
	dialer := tls.Dialer{Config: &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: f.authority.Pool(), NextProtos: []string{"h2"},
	}}
	conn, err := dialer.DialContext(f.ctx(), "tcp", f.address)
	require.NoError(f, err)
	f.Cleanup(func() { _ = conn.Close() })
	secured, ok := conn.(*tls.Conn)
	require.True(f, ok)
	return secured
}

func (f *fixture) rawPeer(settings ...http2.Setting) *rawPeer {
	return f.rawPeerOf(spokeURI, settings...)
}

func (f *fixture) rawPeerOf(uri string, settings ...http2.Setting) *rawPeer {
	f.Helper()
	conn := f.dialRaw(uri)
	p := &rawPeer{T: f.T, conn: conn, received: make(chan http2.Frame, 1<<16), framer: http2.NewFramer(conn, conn)}
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	p.encoder = hpack.NewEncoder(&p.headers)
	_, err := conn.Write([]byte(http2.ClientPreface))
	require.NoError(f, err)
	require.NoError(f, p.framer.WriteSettings(settings...))
	require.NoError(f, conn.SetReadDeadline(time.Now().Add(patience)))
	go p.read()
	return p
}

func (p *rawPeer) read() {
	defer close(p.received)
	for {
		frame, err := p.framer.ReadFrame()
		if err != nil {
			p.ended = err
			return
		}
		p.mu.Lock()
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				_ = p.framer.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !frame.IsAck() {
				_ = p.framer.WritePing(true, frame.Data)
			}
		case *http2.MetaHeadersFrame, *http2.GoAwayFrame:
			p.received <- frame
		}
		p.mu.Unlock()
	}
}

// write ignores errors, which occur when the server has ended the connection.
func (p *rawPeer) write(f func(*http2.Framer) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = f(p.framer)
}

// encodeCall encodes the headers of a call.
func encodeCall(encoder *hpack.Encoder, method string) error {
	for _, h := range [][2]string{
		{":method", "POST"},
		{":scheme", "https"},
		{":path", method},
		{":authority", "agent"},
		{"content-type", "application/grpc"},
		{"te", "trailers"},
	} {
		if err := encoder.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}); err != nil {
			return err
		}
	}
	return nil
}

// call sends a call without waiting for its response.
func (p *rawPeer) call(method string, request proto.Message) {
	p.Helper()
	message, err := proto.Marshal(request)
	require.NoError(p, err)
	p.send(method, len(message), message, true)
}

// announce begins a call whose request has the size, and sends nothing of it.
func (p *rawPeer) announce(method string, size int) { p.send(method, size, nil, false) }

func (p *rawPeer) send(method string, size int, message []byte, whole bool) {
	p.write(func(framer *http2.Framer) error {
		p.headers.Reset()
		if err := encodeCall(p.encoder, method); err != nil {
			return err
		}
		stream := 2*p.calls + 1
		p.calls++
		return errors.Join(
			framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: p.headers.Bytes(), EndHeaders: true}),
			framer.WriteData(stream, whole, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(size)), message...)))
	})
}

// await counts the completed and the rejected calls, and returns both numbers once enough accepts
// them.
func (p *rawPeer) await(enough func(answered, refused int) bool) (answered, refused int) {
	p.Helper()
	for !enough(answered, refused) {
		frame, ok := <-p.received
		// ended may be read once received is closed.
		if !ok {
			require.NoError(p, p.ended, "%d answered, %d refused", answered, refused)
			p.FailNow()
		}
		headers, ok := frame.(*http2.MetaHeadersFrame)
		require.True(p, ok, "%v", frame)
		for _, field := range headers.Fields {
			switch {
			case field.Name != "grpc-status":
			case field.Value == "0":
				answered++
			case field.Value == "8":
				refused++
			}
		}
	}
	return answered, refused
}

// status returns the status code of the next call that ends.
func (p *rawPeer) status() string {
	p.Helper()
	status, _ := p.ending()
	return status
}

// ending returns the status code and the message of the next call that ends.
func (p *rawPeer) ending() (status, message string) {
	p.Helper()
	for frame := range p.received {
		headers, ok := frame.(*http2.MetaHeadersFrame)
		require.True(p, ok, "%v", frame)
		for _, field := range headers.Fields {
			switch field.Name {
			case "grpc-status":
				status = field.Value
			case "grpc-message":
				message = field.Value
			}
		}
		if status != "" {
			return status, message
		}
	}
	require.NoError(p, p.ended)
	return "", ""
}

// The transport keeps a hundred bytes for each frame, whatever the frame contains.
func TestARequestInFramesOfOneByteIsReadSlowly(t *testing.T) {
	// The frame limits are ten times as high as the call limits.
	f := start(t, limited(func(o *limits.Options) { o.CallsPerSecond, o.CallBurst = 10, 100 }))
	conn := f.dialRaw(spokeURI)
	var sent bytes.Buffer
	sent.WriteString(http2.ClientPreface)
	framer := http2.NewFramer(&sent, conn)
	require.NoError(t, framer.WriteSettings())
	var headers bytes.Buffer
	require.NoError(t, encodeCall(hpack.NewEncoder(&headers), agentv1alpha1.ClaimService_SyncClaims_FullMethodName))
	require.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers.Bytes(), EndHeaders: true}))
	for range 1150 {
		require.NoError(t, framer.WriteData(1, false, []byte{0}))
	}
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	began := time.Now()
	_, err := sent.WriteTo(conn)
	require.NoError(t, err)
	require.NoError(t, framer.WritePing(false, [8]byte{1}))
	// It is written as a separate TLS record, so that it is read separately.
	_, err = sent.WriteTo(conn)
	require.NoError(t, err)
	for {
		frame, err := framer.ReadFrame()
		require.NoError(t, err)
		if frame.Header().Type == http2.FramePing && frame.Header().Flags.Has(http2.FlagPingAck) {
			break
		}
	}
	require.Greater(t, time.Since(began), 400*time.Millisecond, "what came after too many frames was read at once")
}

// requireEnded waits until the server has ended the connection.
func (p *rawPeer) requireEnded() {
	p.Helper()
	for range p.received {
		continue
	}
	require.NotErrorIs(p, p.ended, os.ErrDeadlineExceeded, "the server keeps the connection")
}

const spokeURI = "spiffe://karpenter-capi/cluster/fleet/spoke"

// withMachines makes the response of ListMachines a mebibyte long.
func withMachines(f *fixture) {
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		f.machines.Set(spoke, name, &agentv1alpha1.Machine{Name: name, ProviderId: strings.Repeat("x", mebibyte/8)})
	}
}

var listMachines = &agentv1alpha1.ListMachinesRequest{Cluster: spokeRef}

// A client that never opens its flow control window makes the transport keep every response.
func TestACallerThatDoesNotReadItsAnswersLosesItsConnection(t *testing.T) {
	f := start(t, limited(func(o *limits.Options) { o.SendTimeout = time.Second }))
	withMachines(f)
	for name, call := range map[string]func(*rawPeer){
		"large answers": func(p *rawPeer) { p.call(agentv1alpha1.MachineService_ListMachines_FullMethodName, listMachines) },
		"small answers": func(p *rawPeer) {
			p.call(agentv1alpha1.StatusService_GetStatus_FullMethodName, &agentv1alpha1.GetStatusRequest{})
		},
		"events": func(p *rawPeer) {
			p.call(agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName, &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := f.rawPeer(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			p.T = t
			call(p)
			p.requireEnded()
		})
	}
	require.NoError(t, f.list(f.cluster()))
}

func TestUnreadAnswersOfACallerAreBounded(t *testing.T) {
	f := start(t)
	withMachines(f)
	p := f.rawPeer(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	const calls = 100
	for range calls {
		p.call(agentv1alpha1.MachineService_ListMachines_FullMethodName, listMachines)
	}
	// Two more may be in flight when the limit is reached.
	const most = limits.UnreadOfCaller/mebibyte + 2
	answered, refused := p.await(func(_, refused int) bool { return refused >= calls-most })
	require.Zero(t, answered)
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")), "others are not concerned")
	err := f.send(f.raw(spokeURI), agentv1alpha1.StatusService_GetStatus_FullMethodName, nil)
	require.True(t, agenterrors.IsThrottled(err), "%v", err)

	p.write(func(framer *http2.Framer) error {
		return errors.Join(framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: math.MaxInt32}),
			framer.WriteWindowUpdate(0, math.MaxInt32-1<<16))
	})
	answered, refused = p.await(func(answered, late int) bool { return answered+late == calls-refused })
	require.LessOrEqual(t, answered, most)
	require.Positive(t, answered, "what was let in is answered in full")
	require.LessOrEqual(t, refused, 2)
	require.NoError(t, f.list(f.cluster()), "what has been read does not count")
}

// What waits on a connection goes with it, and a call that is cancelled has no answer.
func TestListsCostTheirCallerWhetherOrNotTheyAreRead(t *testing.T) {
	f := start(t)
	for i := range 60_000 {
		f.machines.Set(spoke, strconv.Itoa(i), &agentv1alpha1.Machine{Name: strconv.Itoa(i)})
	}
	list := func(ctx context.Context, c *client.Client) error {
		_, err := c.Machines.ListMachines(ctx, listMachines)
		return err
	}
	require.NoError(t, list(f.ctx(), f.cluster()))
	// The second sixty thousand would take fifteen seconds, less those since the first.
	short, cancel := context.WithTimeout(f.ctx(), 5*time.Second)
	defer cancel()
	err := list(short, f.cluster())
	require.True(t, agenterrors.IsThrottled(err), "%v", err)
	require.NoError(t, list(f.ctx(), f.as("spiffe://karpenter-capi/reader")), "others are not concerned")
}

func TestConnectionsOfACallerAreBounded(t *testing.T) {
	f := start(t)
	ended := func(conn net.Conn) bool {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
		_, err := conn.Read(make([]byte, 1)) // the server's settings, if it accepts the connection
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		return err != nil
	}
	connect := func() *tls.Conn {
		conn := f.dialRaw(spokeURI)
		// The connection may already be closed.
		_, _ = conn.Write([]byte(http2.ClientPreface))
		_ = http2.NewFramer(conn, conn).WriteSettings()
		return conn
	}
	open := make([]*tls.Conn, 0, limits.ConnectionsOfCaller)
	for range limits.ConnectionsOfCaller {
		open = append(open, connect())
		require.False(t, ended(open[len(open)-1]))
	}
	began := time.Now()
	require.True(t, ended(connect()), "one too many")
	require.Greater(t, time.Since(began), 900*time.Millisecond, "a client that connects again at once does so once a second")
	require.NoError(t, f.list(f.as("spiffe://karpenter-capi/reader")), "others are not concerned")
	require.NoError(t, open[0].Close())
	require.Eventually(t, func() bool { return !ended(connect()) }, patience, time.Millisecond)
}

// A caller may have had thousands of certificates issued before its identity was denied.
func TestConnectionsOfADeniedIdentityAreBoundedWhateverItsCertificates(t *testing.T) {
	const denied = "spiffe://karpenter-capi/cluster/fleet/spoke"
	f := start(t, func(_ *fixture, c *server.Config) {
		policy := policyOf(t, "identities: []\ndeny:\n- id: "+denied+"\n")
		var err error
		c.Authorizer, err = authz.New("karpenter-capi", func() *authz.Policy { return policy }, clock.RealClock{})
		require.NoError(t, err)
	})
	connected := 0
	for i := range limits.ConnectionsOfCaller + 4 {
		conn := f.dialRaw(denied + "/" + strconv.Itoa(i%3)) // of several onboardings
		_, _ = conn.Write([]byte(http2.ClientPreface))
		_ = http2.NewFramer(conn, conn).WriteSettings()
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
		_, err := conn.Read(make([]byte, 1))
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
		if err == nil {
			connected++
		}
	}
	require.Equal(t, limits.ConnectionsOfCaller, connected)
	_, err := f.as("spiffe://karpenter-capi/cluster/fleet/other").Status.GetStatus(f.ctx(), &agentv1alpha1.GetStatusRequest{})
	require.NoError(t, err, "others are not concerned")
}

// Anyone who can reach the port can open connections and send nothing on them.
func TestSilentConnectionsDoNotBlockOthers(t *testing.T) {
	f := start(t)
	silent := make([]net.Conn, 0, 600)
	for range cap(silent) {
		conn, err := (&net.Dialer{}).DialContext(f.ctx(), "tcp", f.address)
		require.NoError(t, err)
		silent = append(silent, conn)
	}
	require.NoError(t, f.list(f.cluster()))
	require.NoError(t, silent[0].SetReadDeadline(time.Now().Add(patience)))
	_, err := silent[0].Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the first of them has given way")
	for _, conn := range silent {
		require.NoError(t, conn.Close())
	}
}

// A buffer can be thirty times as large as its response. An event of ten bytes has its own buffer
// and timer.
func TestUnreadAnswersCountAsWhatIsKeptForThem(t *testing.T) {
	for name, c := range map[string]struct {
		machines, machineBytes, calls int
		method                        string
		request                       proto.Message
	}{
		"answers that are a little too large for a small buffer": {
			machines: 1, machineBytes: 40 << 10, calls: 900,
			method: agentv1alpha1.MachineService_ListMachines_FullMethodName, request: listMachines,
		},
		"events of a few bytes": {
			machines: 400, machineBytes: 10, calls: 150,
			method:  agentv1alpha1.MachineService_WatchMachines_FullMethodName,
			request: &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			for i := range c.machines {
				f.machines.Set(spoke, strconv.Itoa(i), &agentv1alpha1.Machine{Name: strconv.Itoa(i), ProviderId: strings.Repeat("x", c.machineBytes)})
			}
			p := f.rawPeer(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			another := f.raw(spokeURI)
			before := live()
			for range c.calls {
				p.call(c.method, c.request)
			}
			require.Eventually(t, func() bool {
				err := f.send(another, agentv1alpha1.StatusService_GetStatus_FullMethodName, nil)
				return agenterrors.IsThrottled(err) && strings.Contains(err.Error(), "not been read")
			}, patience, 10*time.Millisecond)
			kept := live() - before
			t.Logf("%.1f MiB are kept when calls are refused", float64(kept)/mebibyte)
			require.Less(t, kept, int64(2*limits.UnreadOfCaller))
		})
	}
}

// A caller that comes back leaves nothing behind of its earlier connections.
func TestUnreadAnswersOfAConnectionThatHasEndedAreNotKept(t *testing.T) {
	f := start(t)
	for i := range 400 {
		f.machines.Set(spoke, strconv.Itoa(i), &agentv1alpha1.Machine{Name: strconv.Itoa(i), ProviderId: "xxxxxxxxxx"})
	}
	another := f.raw(spokeURI)
	throttled := func() bool {
		err := f.send(another, agentv1alpha1.StatusService_GetStatus_FullMethodName, nil)
		return agenterrors.IsThrottled(err) && strings.Contains(err.Error(), "not been read")
	}
	before := live()
	for range 3 {
		p := f.rawPeer(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		require.Eventually(t, func() bool {
			p.call(agentv1alpha1.MachineService_WatchMachines_FullMethodName, &agentv1alpha1.WatchMachinesRequest{Cluster: spokeRef})
			return throttled()
		}, patience, time.Millisecond)
		require.NoError(t, p.conn.Close())
		require.Eventually(t, func() bool { return !throttled() }, patience, 10*time.Millisecond)
	}
	var kept int64
	require.Eventuallyf(t, func() bool {
		kept = live() - before
		return kept < limits.UnreadOfCaller/2
	}, patience, 100*time.Millisecond, "what is kept of three connections")
	t.Logf("%.1f MiB are kept of three connections", float64(kept)/mebibyte)
}

// live returns how many bytes of the heap are in use.
func live() int64 {
	var memory runtime.MemStats
	runtime.GC()
	runtime.GC() // the second collection frees what pools have kept
	runtime.ReadMemStats(&memory)
	return int64(memory.HeapAlloc)
}
