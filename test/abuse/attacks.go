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
	"sync"
	"sync/atomic"
	"time"

	"github.com/samber/lo"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/health/grpc_health_v1"
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

// holder is the holder that a Cluster's own identity may act as.
const holder = "karpenter"

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
	// run attacks as one tenant until the context ends. It runs in the attacker process, for each
	// tenant at once.
	run func(ctx context.Context, a *attacker) error
	// must lists the answers that are required, and may those that are allowed. Any other answer is
	// a defect.
	must, may []string
	// holds is how much the attack may make the agent hold, by the number of tenants. The agent's
	// resident memory may grow by twice as much: see [heapShare].
	holds amount
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
	// canceled is the answer to a request that took too long to arrive, as any can of an attacker
	// that only gets the processor time that others leave.
	canceled = codes.Canceled.String()
)

// attacks are in order: those that fill the attacker's Cluster precede those that list its content.
var attacks = []attack{
	{
		name: "decode bombs",
		about: "requests that take a hundred times their size in memory: millions of empty elements, the worst legal request, ones " +
			"that are too large, and the same by an identity without a right",
		run:  decodeBombs,
		must: []string{invalid, denied}, may: []string{refused, late, cut, canceled},
		holds: syncsHeld,
	},
	{
		name:  "large syncs",
		about: "the worst legal SyncClaims of 4 MiB, over and over, with a valid token: each is decoded and handled",
		run:   largeSyncs,
		must:  []string{ok}, may: []string{refused, late, canceled, cut},
		holds: syncsHeld,
	},
	{
		name: "half-sent messages",
		about: "16 connections with a thousand calls each that announce 4 MiB, send what a stream's window takes, " +
			"and never the rest",
		run:  halfSent,
		must: []string{refused}, may: []string{canceled, late, closedByAgent, notConnected, "reset"},
		// Each call has a stream's window.
		holds: sum(callsHeld, openCalls.each(queued), readHeld),
	},
	{
		name:  "half-open calls",
		about: "eight GetStatus calls that send only their headers; each is opened again when it is cut off",
		run:   halfOpen,
		must:  []string{canceled}, may: []string{refused, late, closedByAgent, notConnected, "reset"},
		holds: callsHeld,
	},
	{
		name:  "requests in small frames",
		about: "16 connections with a thousand calls each, whose requests come in frames of one byte",
		run:   smallFrames,
		// What the agent reads before it slows the connections down never becomes a whole request.
		may: []string{refused, canceled, late, closedByAgent, notConnected, "reset"},
		// Few calls are open, because the frames of each take minutes to be read.
		holds: perIdentity(framesRead*perFrame + 64*(perCall+queued)),
	},
	{
		name:  "fat claims",
		about: "claims with a thousand candidates of 250 characters, made and released with a long reason, in loops",
		run:   fatClaims,
		// Aborted means a lost race. NotFound does not occur, because the first candidate exists.
		must: []string{ok}, may: []string{refused, late, cut, codes.Aborted.String(), canceled},
		// The requests, and the claims that are stored.
		holds: sum(requestsHeld, endedHeld), writes: true,
	},
	{
		name:  "tombstones",
		about: "releases of claims that never were, each with a reason of 4 KiB",
		run:   tombstones,
		must:  []string{ok}, may: []string{refused, late, cut, canceled},
		holds: sum(requestsHeld, endedHeld), writes: true,
	},
	{
		name:  "invented candidates",
		about: "200 at a time: may a claim be made of a thousand node groups that do not exist",
		run:   inventedCandidates,
		// Unavailable: the agent looks up the first few unknown names in the hub, and cannot tell
		// about the others.
		must: []string{cut}, may: []string{codes.NotFound.String(), refused, late, canceled},
		holds: requestsHeld,
	},
	{
		name:  "lists",
		about: "200 at a time: a list of all claims, ended ones included",
		run:   listFlood,
		must:  []string{ok}, may: []string{refused, late, cut, canceled},
		holds: listsHeld,
	},
	{
		name:  "missing machines",
		about: "200 at a time: a Machine that does not exist, which the agent then asks the hub about, and lists of claims and Machines",
		run:   missingMachines,
		must:  []string{codes.NotFound.String(), ok}, may: []string{refused, late, cut, canceled},
		holds: listsHeld,
	},
	{
		name:  "streams",
		about: "hundreds of watches of all claims, Machines and node groups, held, or opened and closed over and over",
		run:   streams,
		must:  []string{heldStream, ok}, may: []string{refused, late, cut, notConnected, canceled},
		holds: sum(unreadHeld, callsHeld, watchedHeld),
	},
	{
		name:  "padded watches",
		about: "64 watches that are held, each with a request of 256 KiB, nearly all of it unknown fields",
		run:   paddedWatches,
		must:  []string{heldStream}, may: []string{refused, late, canceled, cut},
		holds: sum(requestsHeld, callsHeld),
	},
	{
		name: "health watches",
		about: "64 health watches of services with invented names as long as they may be, most of them held, the others opened and " +
			"closed over and over, or with names of 256 KiB",
		run:  healthWatches,
		must: []string{heldStream, ok, refused}, may: []string{late, canceled, cut},
		holds: sum(requestsHeld, callsHeld),
	},
	{
		name:  "slow readers",
		about: "lists and watches, of which nothing is read: the windows of 16 connections stay closed",
		run:   slowReaders,
		must:  []string{refused}, may: []string{closedByAgent, notConnected, late, "reset", canceled},
		holds: sum(listsHeld, callsHeld, watchedHeld),
	},
	{
		name:  "readers that come back",
		about: "the same, but each connection is closed after a second, and another one made: what waits on it must go with it",
		run:   returningReaders,
		must:  []string{refused}, may: []string{closedByAgent, notConnected, late, "reset", canceled},
		holds: sum(listsHeld, callsHeld, watchedHeld),
	},
	{
		name:  "tombstones read slowly",
		about: "releases of claims that never were, each with a reason of 1 KiB, then lists of them, which are read slowly",
		run:   slowTombstones,
		must:  []string{ok}, may: []string{refused, late, canceled, cut, closedByAgent, notConnected, "reset"},
		holds: sum(requestsHeld, endedHeld, listsHeld, callsHeld), writes: true,
	},
	{
		name:  "compressed answers",
		about: "requests for compressed lists on 16 connections whose windows stay closed, so that no answer is read",
		run:   compressedAnswers,
		must:  []string{codes.Unimplemented.String()}, may: []string{refused, closedByAgent, notConnected, "reset"},
		// None is answered.
		holds: callsHeld,
	},
	{
		name:  "connections",
		about: "connections by the hundred, each with the tenant's certificate",
		run:   manyConnections,
		must:  []string{kept, closedByAgent}, may: []string{notConnected},
		holds: sum(openConnections.each(perConnection), inTotal(handshakes*perHandshake)),
	},
	{
		name:  "handshakes",
		about: "2,000 connections that say nothing, or begin a handshake and never end it",
		run:   unfinishedHandshakes,
		must:  []string{closedByAgent}, may: []string{kept, notConnected},
		holds: inTotal(handshakes * perHandshake),
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
func worstSync(cluster *agentv1alpha1.ClusterRef, token string) []byte {
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
	request := &agentv1alpha1.SyncClaimsRequest{Cluster: cluster, Holder: holder, Token: token}
	for size := proto.Size(request); size+proto.Size(node)+4 <= 4*mebibyte; size += proto.Size(node) + 4 {
		request.Nodes = append(request.Nodes, node)
	}
	return encode(request)
}

func decodeBombs(ctx context.Context, a *attacker) error {
	tenant, err := a.connect(a.identity)
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
	empty, worst := emptyReports(a.Cluster, 3*mebibyte), worstSync(a.Cluster, "token")
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

// largeSyncs has two requests on the way, because the agent reads and handles one at a time.
func largeSyncs(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.identity)
	if err != nil {
		return err
	}
	token, err := a.token(ctx, conn)
	if err != nil {
		return err
	}
	request := worstSync(a.Cluster, token)
	several(ctx, 2, func(ctx context.Context, _ int) {
		if a.call(ctx, conn, agentv1alpha1.ClaimService_SyncClaims_FullMethodName, request) == codes.OK {
			a.ready()
		}
	})
	return nil
}

// token returns a token for SyncClaims.
func (a *attacker) token(ctx context.Context, conn *grpc.ClientConn) (string, error) {
	list := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, Holder: holder})
	var answer received
	err := conn.Invoke(ctx, agentv1alpha1.ClaimService_ListClaims_FullMethodName, encoded(list), &answer, grpc.WaitForReady(true))
	if err != nil {
		return "", err
	}
	var claims agentv1alpha1.ListClaimsResponse
	err = proto.Unmarshal(answer, &claims)
	return claims.GetToken(), err
}

func halfSent(ctx context.Context, a *attacker) error {
	begun := make([]byte, streamWindow-prefix)
	copy(begun, emptyReports(a.Cluster, streamWindow))
	return a.hold(ctx, held{connections: 16, calls: 1000, readyAt: a.manyCalls(), begin: func(p *peer) error {
		p.part = 4097 // just above a size of gRPC's default buffers
		return p.call(agentv1alpha1.ClaimService_SyncClaims_FullMethodName, largeRequest, begun)
	}})
}

// halfOpen has as many calls as the agent reads of one caller at once.
func halfOpen(ctx context.Context, a *attacker) error {
	return a.hold(ctx, held{connections: 1, calls: readAtOnce, readyAt: readAtOnce, begin: func(p *peer) error {
		return p.begin(agentv1alpha1.StatusService_GetStatus_FullMethodName)
	}})
}

// smallFrames is ready once the connections together have begun calls with twenty times the frames
// that the agent reads of one caller at once.
func smallFrames(ctx context.Context, a *attacker) error {
	begun := make([]byte, streamWindow-prefix)
	return a.hold(ctx, held{connections: 16, calls: 1000, readyAt: 2 * 16, begin: func(p *peer) error {
		p.part = 1
		return p.call(agentv1alpha1.ClaimService_SyncClaims_FullMethodName, largeRequest, begun)
	}})
}

// held describes calls that an attack keeps open, and opens again when they end.
type held struct {
	// connections is the number of connections, and calls that of the open calls of each.
	connections, calls int
	// begin begins a call.
	begin func(*peer) error
	// readyAt is the number of begun calls with which the attack is at full strength.
	readyAt int64
	// again is how long after the end of a call the next one is begun.
	again time.Duration
	// settings are those of the connections. readPerSecond is how many bytes of each are read, once
	// HTTP/2's first window is used up.
	settings      []http2.Setting
	readPerSecond int
	// stays is how long each connection is kept. Zero means until the agent closes it.
	stays time.Duration
}

// closed is the setting with which the agent may send no answer.
func closed() []http2.Setting { return []http2.Setting{{ID: http2.SettingInitialWindowSize, Val: 0}} }

// manyCalls is the number of calls that an attacker begins to have all that it can, alone or as one
// of several.
func (a *attacker) manyCalls() int64 { return min(openCalls.own, int64(a.part(2*int(openCalls.all)))) }

// hold keeps calls open until the context ends.
func (a *attacker) hold(ctx context.Context, h held) error {
	var begun atomic.Int64
	begin := h.begin
	h.begin = func(p *peer) error {
		a.calls.Add(1)
		if begun.Add(1) == h.readyAt {
			a.ready()
		}
		return begin(p)
	}
	several(ctx, h.connections, func(ctx context.Context, _ int) {
		if h.stays > 0 {
			var left context.CancelFunc
			ctx, left = context.WithTimeout(ctx, h.stays)
			defer left()
		}
		if err := a.holdOn(ctx, h); err != nil && ctx.Err() == nil {
			a.came(notConnected)
			pause(ctx)
		}
	})
	return nil
}

// holdOn is [attacker.hold] for one connection, until that ends.
func (a *attacker) holdOn(ctx context.Context, h held) error {
	raw, err := a.dial(ctx)
	if err != nil {
		return err
	}
	conn, err := a.secure(ctx, raw, a.identity)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	// Each open call occupies a place.
	places := make(chan struct{}, h.calls)
	free := func() {
		select {
		case <-places:
		default:
		}
	}
	p, err := newPeer(conn, func(_ uint32, answer string) {
		if ctx.Err() == nil {
			a.came(answer)
		}
		if h.again == 0 {
			free()
			return
		}
		time.AfterFunc(h.again, free)
	}, h.settings...)
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
	if h.readPerSecond > 0 {
		go p.readSlowly(lost, h.readPerSecond)
	}
	for {
		select {
		case places <- struct{}{}:
			if err := h.begin(p); err != nil {
				_ = conn.Close()
				<-lost
				return nil // the connection has ended as expected
			}
		case <-lost:
			return nil
		}
	}
}

const (
	// briefly is how soon an attack repeats what has failed, unless it waits for as long as a
	// RetryInfo demands. Then its connections are not closed, see docs/limits.md.
	briefly = 10 * time.Millisecond
	patient = time.Second
)

// pause waits briefly, or until the context ends.
func pause(ctx context.Context) { wait(ctx, briefly) }

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
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
	conn, err := a.connect(a.identity)
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

func tombstones(ctx context.Context, a *attacker) error { return a.bury(ctx, longReason, a.ready) }

// bury releases claims that never were until the context ends. It calls made after each.
func (a *attacker) bury(ctx context.Context, reason string, made func()) error {
	conn, err := a.connect(a.identity)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // another attack may need all connections
	several(ctx, 64, func(ctx context.Context, _ int) {
		release := encode(&agentv1alpha1.ReleaseClaimRequest{Cluster: a.Cluster, ClaimId: a.id(), Reason: reason})
		if a.call(ctx, conn, agentv1alpha1.ClaimService_ReleaseClaim_FullMethodName, release) == codes.OK {
			made()
		}
	})
	return nil
}

// slowTombstones reads 64 KiB per second of each connection, so that an answer of a few MiB takes
// nearly as long as it may.
func slowTombstones(ctx context.Context, a *attacker) error {
	const graves, connections, calls = 200, 16, 4
	var made atomic.Int64
	burying, enough := context.WithCancel(ctx)
	defer enough()
	err := a.bury(burying, strings.Repeat("r", kibibyte), func() {
		if made.Add(1) == graves {
			enough()
		}
	})
	if err != nil {
		return err
	}
	list := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, IncludeEnded: true})
	return a.hold(ctx, held{
		connections: connections, calls: calls, readyAt: connections * calls, again: patient, readPerSecond: 64 * kibibyte,
		// Only the window of the connection closes.
		settings: []http2.Setting{{ID: http2.SettingInitialWindowSize, Val: 1 << 30}},
		begin: func(p *peer) error {
			return p.call(agentv1alpha1.ClaimService_ListClaims_FullMethodName, len(list), list)
		},
	})
}

func inventedCandidates(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.identity)
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
	conn, err := a.connect(a.identity)
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

// missingMachines is mostly calls for which the agent has to ask the hub, and a few of those whose
// turns all callers share.
func missingMachines(ctx context.Context, a *attacker) error {
	conn, err := a.connect(a.identity)
	if err != nil {
		return err
	}
	get := encode(&agentv1alpha1.GetMachineRequest{Cluster: a.Cluster, Name: "there-is-none"})
	list := encode(&agentv1alpha1.ListMachinesRequest{Cluster: a.Cluster})
	claims := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, Holder: holder})
	several(ctx, 200, func(ctx context.Context, i int) {
		switch i {
		case 0:
			a.call(ctx, conn, agentv1alpha1.MachineService_ListMachines_FullMethodName, list)
		case 1:
			a.call(ctx, conn, agentv1alpha1.ClaimService_ListClaims_FullMethodName, claims)
		default:
			if a.call(ctx, conn, agentv1alpha1.MachineService_GetMachine_FullMethodName, get) == codes.NotFound {
				a.ready()
			}
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
	methods, requests := a.watches()
	// An identity may have 100 at once.
	return a.watch(ctx, watching{held: 80, fleeting: 200, again: briefly, open: func(i int) (string, []byte) {
		return methods[i%len(methods)], requests[i%len(methods)]
	}})
}

// mostOfRequest is the maximum size of a request of most methods, and atOnce the number of requests
// of that size that one identity may have handled at once. mostOfHealth is the maximum size of a
// health check.
const mostOfRequest, atOnce, mostOfHealth = 256 * kibibyte, 64, 4 * kibibyte

func paddedWatches(ctx context.Context, a *attacker) error {
	request := padded(encode(&agentv1alpha1.WatchNodeGroupsRequest{Cluster: a.Cluster}))
	return a.watch(ctx, watching{held: atOnce, again: patient, open: func(int) (string, []byte) {
		return agentv1alpha1.NodeGroupService_WatchNodeGroups_FullMethodName, request
	}})
}

// padded appends an unknown field to a request, so that it has the maximum size.
func padded(request []byte) []byte {
	request = protowire.AppendTag(request, 1000, protowire.BytesType)
	const length = 3 // of the encoded length
	return protowire.AppendBytes(request, make([]byte, mostOfRequest-len(request)-length))
}

// healthWatches uses each name once, so that nothing may be kept of those of earlier watches. The
// last few of the fleeting watches have names that are too long.
func healthWatches(ctx context.Context, a *attacker) error {
	const (
		fleeting, tooLong = 8, 2
		around            = 4 // bytes of the field's tag and length
	)
	return a.watch(ctx, watching{held: atOnce - fleeting, fleeting: fleeting, again: patient, open: func(i int) (string, []byte) {
		size := lo.Ternary(i < atOnce-tooLong, mostOfHealth, mostOfRequest)
		id := a.id()
		name := id + strings.Repeat("-", size-around-len(id))
		return grpc_health_v1.Health_Watch_FullMethodName, encode(&grpc_health_v1.HealthCheckRequest{Service: name})
	}})
}

// watching describes the streams of an attack.
type watching struct {
	// held is the number of streams that are kept, and fleeting that of streams that are closed
	// after their first message and opened again.
	held, fleeting int
	// again is how long after a stream has failed it is opened again.
	again time.Duration
	// open returns the method and the request of the stream of that number. It is called each time
	// the stream is opened, from several goroutines.
	open func(i int) (method string, request []byte)
}

// watch opens streams until the context ends. It is ready once each of those to be held has been
// answered or refused.
func (a *attacker) watch(ctx context.Context, w watching) error {
	conns := make([]*grpc.ClientConn, 16)
	for i := range conns {
		var err error
		if conns[i], err = a.connect(a.identity); err != nil {
			return err
		}
	}
	var answered atomic.Int64
	first := make([]sync.Once, w.held)
	several(ctx, w.held+w.fleeting, func(ctx context.Context, i int) {
		one, cancel := context.WithCancel(ctx)
		defer cancel()
		a.calls.Add(1)
		method, request := w.open(i)
		stream, err := conns[i%len(conns)].NewStream(one, &grpc.StreamDesc{ServerStreams: true}, method)
		if err == nil {
			_ = stream.SendMsg(encoded(request)) // the status reports the failure
			_ = stream.CloseSend()
			err = stream.RecvMsg(&ignored{})
		}
		if err == nil && i >= w.held {
			a.came(ok)
			return
		}
		if err == nil {
			a.came(heldStream)
		}
		if i < w.held {
			first[i].Do(func() {
				if answered.Add(1) == int64(w.held) {
					a.ready()
				}
			})
		}
		for err == nil {
			err = stream.RecvMsg(&ignored{})
		}
		if ctx.Err() == nil {
			a.came(status.Code(err).String())
			wait(ctx, w.again)
		}
	})
	return nil
}

func slowReaders(ctx context.Context, a *attacker) error { return a.readNothing(ctx, 0) }

func returningReaders(ctx context.Context, a *attacker) error { return a.readNothing(ctx, time.Second) }

// readNothing asks for lists and watches on connections that stay for a time, and reads none of the
// answers.
func (a *attacker) readNothing(ctx context.Context, stays time.Duration) error {
	list := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, IncludeEnded: true})
	methods, requests := a.watches()
	var n atomic.Int64
	return a.hold(ctx, held{connections: 16, calls: 1000, readyAt: a.manyCalls(), settings: closed(), stays: stays, begin: func(p *peer) error {
		i := int(n.Add(1)) % (2 * len(methods))
		if i >= len(methods) {
			return p.call(agentv1alpha1.ClaimService_ListClaims_FullMethodName, len(list), list)
		}
		return p.call(methods[i], len(requests[i]), requests[i])
	}})
}

func compressedAnswers(ctx context.Context, a *attacker) error {
	list := encode(&agentv1alpha1.ListClaimsRequest{Cluster: a.Cluster, IncludeEnded: true})
	return a.hold(ctx, held{connections: 16, calls: 1000, readyAt: a.manyCalls(), settings: closed(), begin: func(p *peer) error {
		return p.call(agentv1alpha1.ClaimService_ListClaims_FullMethodName, len(list), list,
			hpack.HeaderField{Name: "grpc-encoding", Value: gzip.Name})
	}})
}

func manyConnections(ctx context.Context, a *attacker) error {
	several(ctx, 300, func(ctx context.Context, _ int) {
		raw, err := a.dial(ctx)
		if err != nil {
			a.missed(ctx)
			return
		}
		conn, err := a.secure(ctx, raw, a.identity)
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
	several(ctx, a.part(2000), func(ctx context.Context, i int) {
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
	client := tls.Client(near, a.config(a.identity))
	go func() { _ = client.HandshakeContext(context.Background()) }() // ends with the pipe
	defer func() { _, _ = near.Close(), far.Close() }()
	record := make([]byte, 16*kibibyte)
	n, err := far.Read(record)
	return record[:n], err
}
