package abuse

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	kibibyte = 1 << 10
	mebibyte = 1 << 20
)

// How much an identity may make the agent hold, see docs/limits.md.
const (
	// openStreams covers the streams and calls that an identity may have open, with their
	// goroutines and metadata.
	openStreams = 2100 * 40 * kibibyte
	// watched covers what its streams keep of the objects that they show: a Cluster has at most
	// 30,000 claims, ended ones included.
	watched = 100 * 30000 * 50
	// requestsHandled covers its requests being handled (encoded, decoded, and the results) and
	// those being read.
	requestsHandled = 3*16*mebibyte + 8*mebibyte
)

// holder is the holder that a Cluster's own identity may act as.
const holder = "karpenter"

// framesRead are read of one identity before its connections are closed: its burst, a TLS record of
// each connection, and what is read slowly in ten seconds.
const framesRead = 100_000 + 16*16*kibibyte/10 + 10*2000

// Outcomes of connections, in addition to the codes of calls.
const (
	closedByAgent = "connection closed"
	notConnected  = "no connection"
	kept          = "connection kept"
	heldStream    = "stream held"
)

// attack is one kind of attack.
type attack struct {
	name string
	// about describes the attack in one sentence.
	about string
	// run attacks until the context ends. It runs in the attacker process.
	run func(ctx context.Context, a *attacker) error
	// must lists the answers that are required, and may those that are allowed. Any other answer is
	// a defect.
	must, may []string
	// holds is how much the attack may make the agent hold, see docs/limits.md. The agent's
	// resident memory may grow by twice as much: see [heapShare].
	holds int64
	// writes is set if the attacker's calls write to the hub.
	writes bool
}

var (
	refused = codes.ResourceExhausted.String()
	invalid = codes.InvalidArgument.String()
	denied  = codes.PermissionDenied.String()
	ok      = codes.OK.String()
	late    = codes.DeadlineExceeded.String()
	// cut is the answer to a call whose connection broke, as happens to a caller that continues
	// although it is refused.
	cut = codes.Unavailable.String()
	// canceled is the answer to a request that took too long to arrive.
	canceled = codes.Canceled.String()
)

// attacks are in order: those that fill the attacker's Cluster precede those that list its content.
var attacks = []attack{
	{
		name: "decode bombs",
		about: "requests that take a hundred times their size in memory: millions of empty elements, the worst legal request, ones " +
			"that are too large, and the same by an identity without a right",
		run:  decodeBombs,
		must: []string{invalid, denied}, may: []string{refused, late, cut},
		// The worst legal request, the requests being read, and those being handled.
		holds: (193 + 8*4 + 16) * mebibyte,
	},
	{
		name: "half-sent messages",
		about: "16 connections with a thousand calls each that announce 4 MiB, send what a stream's window takes, " +
			"and never the rest",
		run:  halfSent,
		must: []string{refused}, may: []string{canceled, late, closedByAgent, notConnected, "reset"},
		// The calls that may be open, each with a stream's window, and the requests being read.
		holds: 2000*64*kibibyte + 8*4*mebibyte + openStreams,
	},
	{
		name:  "requests in small frames",
		about: "16 connections with a thousand calls each, whose requests come in frames of one byte",
		run:   smallFrames,
		// What the agent reads before it slows the connections down never becomes a whole request.
		may: []string{refused, canceled, late, closedByAgent, notConnected, "reset"},
		// Few calls are open, because the frames of each take minutes to be read.
		holds: framesRead*350 + 64*(30+8+64)*kibibyte,
	},
	{
		name:  "fat claims",
		about: "claims with a thousand candidates of 250 characters, made and released with a long reason, in loops",
		run:   fatClaims,
		// Aborted means a lost race. NotFound does not occur, because the first candidate exists.
		must: []string{ok}, may: []string{refused, late, cut, codes.Aborted.String()},
		// The requests, and the claims that are stored.
		holds: requestsHandled + 10000*4*kibibyte, writes: true,
	},
	{
		name:  "tombstones",
		about: "releases of claims that never were, each with a reason of 4 KiB",
		run:   tombstones,
		must:  []string{ok}, may: []string{refused, late, cut},
		holds: requestsHandled + 10000*4*kibibyte, writes: true,
	},
	{
		name:  "invented candidates",
		about: "200 at a time: may a claim be made of a thousand node groups that do not exist",
		run:   inventedCandidates,
		// Unavailable: the agent looks up the first few unknown names in the hub, and cannot tell about
		// the others.
		must: []string{cut}, may: []string{codes.NotFound.String(), refused, late},
		holds: requestsHandled,
	},
	{
		name:  "lists",
		about: "200 at a time: a list of all claims, ended ones included",
		run:   listFlood,
		must:  []string{ok}, may: []string{refused, late, cut},
		// Answers that have not been read yet, and two lists.
		holds: (32 + 2*64) * mebibyte,
	},
	{
		name:  "streams",
		about: "hundreds of watches of all claims, Machines and node groups, held, or opened and closed over and over",
		run:   streams,
		must:  []string{heldStream, ok}, may: []string{refused, late, cut, notConnected},
		// Answers that have not been read yet, the streams, and what they keep.
		holds: 32*mebibyte + openStreams + watched,
	},
	{
		name:  "slow readers",
		about: "lists and watches, of which nothing is read: the windows of 16 connections stay closed",
		run:   slowReaders,
		must:  []string{refused}, may: []string{closedByAgent, notConnected, late, "reset"},
		// Answers that are not read, two more lists, the calls, and what the streams keep.
		holds: (32+2*64)*mebibyte + openStreams + watched,
	},
	{
		name:  "compressed answers",
		about: "requests for compressed lists on 16 connections whose windows stay closed, so that no answer is read",
		run:   compressedAnswers,
		must:  []string{codes.Unimplemented.String()}, may: []string{refused, closedByAgent, notConnected, "reset"},
		// None is answered.
		holds: openStreams,
	},
	{
		name:  "connections",
		about: "connections by the hundred, each with the tenant's certificate",
		run:   manyConnections,
		must:  []string{kept, closedByAgent}, may: []string{notConnected},
		holds: 512 * 100 * kibibyte,
	},
	{
		name:  "handshakes",
		about: "2,000 connections that say nothing, or begin a handshake and never end it",
		run:   unfinishedHandshakes,
		must:  []string{closedByAgent}, may: []string{kept, notConnected},
		holds: 512 * 100 * kibibyte,
	},
}

func attackOf(name string) (*attack, error) {
	for i := range attacks {
		if attacks[i].name == name {
			return &attacks[i], nil
		}
	}
	return nil, fmt.Errorf("there is no attack %q", name)
}

func encode(message proto.Message) []byte {
	request, err := proto.Marshal(message)
	if err != nil {
		panic(err) // a string that is not UTF-8, in this case
	}
	return request
}

// emptyReports returns a request with this many bytes of empty Node reports: each takes two bytes
// on the wire and a hundred in memory.
func emptyReports(cluster *agentv1alpha1.ClusterRef, size int) []byte {
	request := encode(&agentv1alpha1.SyncClaimsRequest{Cluster: cluster, Holder: holder, Token: "token"})
	report := protowire.AppendBytes(protowire.AppendTag(nil, 5, protowire.BytesType), nil)
	return append(request, bytes.Repeat(report, size/len(report))...)
}

// worstSync returns the legal request that takes the most memory: as many map entries as fit into 4
// MiB.
func worstSync(cluster *agentv1alpha1.ClusterRef) []byte {
	entries := func(n int, value string) map[string]string {
		all := map[string]string{}
		for i := range n {
			all[strconv.FormatInt(int64(i), 36)] = value
		}
		return all
	}
	node := &agentv1alpha1.NodeReport{
		ProviderId: "a", Capacity: entries(128, "1"), Allocatable: entries(128, "1"), Labels: entries(64, ""),
	}
	request := &agentv1alpha1.SyncClaimsRequest{Cluster: cluster, Holder: holder, Token: "token"}
	for size := proto.Size(request); size+proto.Size(node)+4 <= 4*mebibyte; size += proto.Size(node) + 4 {
		request.Nodes = append(request.Nodes, node)
	}
	return encode(request)
}

func decodeBombs(ctx context.Context, a *attacker) error {
	tenant, err := a.connect(a.tenant)
	if err != nil {
		return err
	}
	stranger, err := a.connect(a.stranger)
	if err != nil {
		return err
	}
	type bomb struct {
		by      *grpc.ClientConn
		method  string
		request []byte
	}
	const syncClaims = agentv1alpha1.ClaimService_SyncClaims_FullMethodName
	empty, worst := emptyReports(a.Cluster, 3*mebibyte), worstSync(a.Cluster)
	bombs := []bomb{
		{tenant, syncClaims, empty},
		{tenant, syncClaims, worst},
		{tenant, syncClaims, emptyReports(a.Cluster, 8*mebibyte)},
		{tenant, agentv1alpha1.ClaimService_CreateClaim_FullMethodName, empty[:mebibyte]},
		{stranger, syncClaims, empty},
	}
	several(ctx, 4*len(bombs), func(ctx context.Context, i int) {
		b := bombs[i%len(bombs)]
		if a.call(ctx, b.by, b.method, b.request) == codes.InvalidArgument {
			a.ready()
		}
	})
	return nil
}

func halfSent(ctx context.Context, a *attacker) error {
	begun := make([]byte, streamWindow-prefix)
	copy(begun, emptyReports(a.Cluster, streamWindow))
	return a.hold(ctx, func(p *peer) error {
		p.part = 4097 // just above a size of gRPC's default buffers
		return p.call(agentv1alpha1.ClaimService_SyncClaims_FullMethodName, 4*mebibyte, begun)
	}, 2000)
}

// smallFrames is ready once the connections together have begun calls with twenty times the frames
// that the agent reads of one caller at once.
func smallFrames(ctx context.Context, a *attacker) error {
	begun := make([]byte, streamWindow-prefix)
	return a.hold(ctx, func(p *peer) error {
		p.part = 1
		return p.call(agentv1alpha1.ClaimService_SyncClaims_FullMethodName, 4*mebibyte, begun)
	}, 2*16)
}

// hold keeps a thousand calls open on each of 16 connections. It is ready once readyAt calls have
// been begun.
func (a *attacker) hold(ctx context.Context, begin func(*peer) error, readyAt int64, settings ...http2.Setting) error {
	several(ctx, 16, func(ctx context.Context, _ int) {
		if err := a.holdOn(ctx, begin, readyAt, settings); err != nil && ctx.Err() == nil {
			a.came(notConnected)
			pause(ctx)
		}
	})
	return nil
}

// holdOn is [attacker.hold] for one connection, until that ends.
func (a *attacker) holdOn(ctx context.Context, begin func(*peer) error, readyAt int64, settings []http2.Setting) error {
	raw, err := a.dial(ctx)
	if err != nil {
		return err
	}
	conn, err := a.secure(ctx, raw, a.tenant)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	// Each open call occupies a place.
	places := make(chan struct{}, 1000)
	p, err := newPeer(conn, func(_ uint32, answer string) {
		if ctx.Err() == nil {
			a.came(answer)
		}
		select {
		case <-places:
		default:
		}
	}, settings...)
	if err != nil {
		return err
	}
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		_ = p.read() // the reason does not matter
		if ctx.Err() == nil {
			a.came(closedByAgent)
		}
	}()
	for {
		select {
		case places <- struct{}{}:
			if a.calls.Add(1) == readyAt {
				a.ready()
			}
			if err := begin(p); err != nil {
				_ = conn.Close()
				<-lost
				return nil // the connection has ended as expected
			}
		case <-lost:
			return nil
		}
	}
}

// pause waits briefly, or until the context ends.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(10 * time.Millisecond):
	}
}

// invented returns n ids of nonexistent node groups, as long as the size limit of requests allows.
func invented(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s/%s-%03d", sandbox.ClusterNamespace, strings.Repeat("x", 238), i)
	}
	return ids
}

func fatClaims(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.tenant)
	if err != nil {
		return err
	}
	candidates := append([]string{a.Group}, invented(999)...)
	several(ctx, 32, func(ctx context.Context, _ int) {
		id := a.id()
		create := encode(&agentv1alpha1.CreateClaimRequest{
			Cluster: a.Cluster, ClaimId: id, Holder: holder, Candidates: candidates, DisplayName: strings.Repeat("d", 253),
		})
		if a.call(ctx, conn, agentv1alpha1.ClaimService_CreateClaim_FullMethodName, create) != codes.OK {
			return
		}
		release := encode(&agentv1alpha1.ReleaseClaimRequest{Cluster: a.Cluster, ClaimId: id, Drained: true, Reason: longReason})
		for ctx.Err() == nil && a.call(ctx, conn, agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName, release) != codes.OK {
			pause(ctx)
		}
		a.ready()
	})
	return nil
}

// longReason has the maximum length of a reason, in characters and in bytes.
var longReason = strings.Repeat("\U0001F41A", 1024)

func tombstones(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.tenant)
	if err != nil {
		return err
	}
	several(ctx, 64, func(ctx context.Context, _ int) {
		release := encode(&agentv1alpha1.ReleaseClaimRequest{Cluster: a.Cluster, ClaimId: a.id(), Reason: longReason})
		if a.call(ctx, conn, agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName, release) == codes.OK {
			a.ready()
		}
	})
	return nil
}

func inventedCandidates(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.tenant)
	if err != nil {
		return err
	}
	request := encode(&agentv1alpha1.CreateClaimRequest{
		Cluster: a.Cluster, ClaimId: a.id(), Holder: holder, Candidates: invented(1000), ValidateOnly: true,
	})
	var begun atomic.Int64
	several(ctx, 200, func(ctx context.Context, _ int) {
		if begun.Add(1) == 200 {
			a.ready()
		}
		a.call(ctx, conn, agentv1alpha1.ClaimService_CreateClaim_FullMethodName, request)
	})
	return nil
}

func listFlood(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.tenant)
	if err != nil {
		return err
	}
	request := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, IncludeEnded: true})
	several(ctx, 200, func(ctx context.Context, _ int) {
		if a.call(ctx, conn, agentv1alpha1.ClaimService_ListClaims_FullMethodName, request) == codes.OK {
			a.ready()
		}
	})
	return nil
}

// watches returns the streaming methods, with a request for each.
func (a *attacker) watches() (methods []string, requests [][]byte) {
	methods = []string{
		agentv1alpha1.ClaimService_WatchClaims_FullMethodName, agentv1alpha1.MachineService_WatchMachines_FullMethodName,
		agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName,
	}
	return methods, [][]byte{
		encode(&agentv1alpha1.WatchClaimsRequest{Cluster: a.Cluster}), encode(&agentv1alpha1.WatchMachinesRequest{Cluster: a.Cluster}),
		encode(&agentv1alpha1.WatchNodeGroupsRequest{Cluster: a.Cluster}),
	}
}

func streams(ctx context.Context, a *attacker) error {
	// An identity may have 100 at once.
	const held, fleeting = 80, 200
	conns := make([]*grpc.ClientConn, 16)
	for i := range conns {
		var err error
		if conns[i], err = a.connect(a.tenant); err != nil {
			return err
		}
	}
	methods, requests := a.watches()
	several(ctx, held+fleeting, func(ctx context.Context, i int) {
		one, cancel := context.WithCancel(ctx)
		defer cancel()
		a.calls.Add(1)
		stream, err := conns[i%len(conns)].NewStream(one, &grpc.StreamDesc{ServerStreams: true}, methods[i%len(methods)])
		if err == nil {
			_ = stream.SendMsg(encoded(requests[i%len(methods)])) // the status reports the failure
			_ = stream.CloseSend()
			err = stream.RecvMsg(&ignored{})
		}
		if err == nil && i >= held {
			a.came(ok)
			return
		}
		if err == nil && a.came(heldStream) == held/2 {
			a.ready()
		}
		for err == nil {
			err = stream.RecvMsg(&ignored{})
		}
		if ctx.Err() == nil {
			a.came(status.Code(err).String())
			pause(ctx)
		}
	})
	return nil
}

func slowReaders(ctx context.Context, a *attacker) error {
	list := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, IncludeEnded: true})
	methods, requests := a.watches()
	var n atomic.Int64
	return a.hold(ctx, func(p *peer) error {
		i := int(n.Add(1)) % (2 * len(methods))
		if i >= len(methods) {
			return p.call(agentv1alpha1.ClaimService_ListClaims_FullMethodName, len(list), list)
		}
		return p.call(methods[i], len(requests[i]), requests[i])
	}, 2000, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
}

func compressedAnswers(ctx context.Context, a *attacker) error {
	list := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, IncludeEnded: true})
	return a.hold(ctx, func(p *peer) error {
		return p.call(agentv1alpha1.ClaimService_ListClaims_FullMethodName, len(list), list,
			hpack.HeaderField{Name: "grpc-encoding", Value: gzip.Name})
	}, 2000, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
}

func manyConnections(ctx context.Context, a *attacker) error {
	several(ctx, 300, func(ctx context.Context, _ int) {
		raw, err := a.dial(ctx)
		if err != nil {
			a.missed(ctx)
			return
		}
		conn, err := a.secure(ctx, raw, a.tenant)
		if err != nil {
			a.missed(ctx)
			return
		}
		p, err := newPeer(conn, func(uint32, string) {})
		a.keep(ctx, conn, func() {
			if err == nil {
				_ = p.read()
			}
		})
	})
	return nil
}

// missed counts a connection that could not be opened.
func (a *attacker) missed(ctx context.Context) {
	if ctx.Err() == nil {
		a.came(notConnected)
		pause(ctx)
	}
}

// keep holds a connection until the agent closes it, at which point read returns, or until the
// context ends.
func (a *attacker) keep(ctx context.Context, conn net.Conn, read func()) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer func() { _ = conn.Close() }()
	read()
	if ctx.Err() != nil {
		a.came(kept)
		return
	}
	if a.came(closedByAgent) == 100 {
		a.ready()
	}
	pause(ctx)
}

func unfinishedHandshakes(ctx context.Context, a *attacker) error {
	hello, err := a.hello()
	if err != nil {
		return err
	}
	several(ctx, 2000, func(ctx context.Context, i int) {
		conn, err := a.dial(ctx)
		if err != nil {
			a.missed(ctx)
			return
		}
		if i%2 == 0 {
			_, _ = conn.Write(hello) // it may already be closed
		}
		a.keep(ctx, conn, func() { _, _ = io.Copy(io.Discard, conn) })
	})
	return nil
}

// hello returns the first record of a TLS client.
func (a *attacker) hello() ([]byte, error) {
	near, far := net.Pipe()
	client := tls.Client(near, a.config(a.tenant))
	go func() { _ = client.HandshakeContext(context.Background()) }() // ends with the pipe
	defer func() { _, _ = near.Close(), far.Close() }()
	record := make([]byte, 16*kibibyte)
	n, err := far.Read(record)
	return record[:n], err
}
