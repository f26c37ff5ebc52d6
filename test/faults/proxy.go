package faults

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/cert"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// Kind is a kind of fault.
type Kind int

// The kinds.
const (
	// None: no fault.
	None Kind = iota
	// KillBefore: the caller is killed, and the request is never sent.
	KillBefore
	// KillAfter: the request is executed, and the caller is killed before it gets the answer. A
	// refused request is answered instead.
	KillAfter
	// KillLate: the caller is killed, and the request is sent once the caller's successor is
	// working.
	KillLate
	// TooMany: refused with 429 and a retry delay of one second.
	TooMany
	// InternalError: refused with 500.
	InternalError
	// Unavailable: refused with 503.
	Unavailable
	// Reset: the connection is reset before the request is sent, along with all other requests on
	// it.
	Reset
	// Cut: the request is executed, and the connection is reset before the answer.
	Cut
	// TimeoutAfter: the request is executed, and answered with 504.
	TimeoutAfter
	// Expired: refused with 410, as if the requested version had been compacted.
	Expired
	// Slow: the request is delayed.
	Slow
)

var kinds = [...]string{
	"none", "kill before", "kill after", "kill, then late", "429", "500", "503", "reset", "answer cut", "504 after", "410", "slow",
}

func (k Kind) String() string { return kinds[k] }

// Kills reports whether the fault kills the caller.
func (k Kind) Kills() bool { return k == KillBefore || k == KillAfter || k == KillLate }

// Fault is the fault of one request.
type Fault struct {
	Kind Kind
	// Delay is the delay of [Slow].
	Delay time.Duration
	// Done, if set, is called once the fault has occurred.
	Done func()
}

// Options configures a [Proxy].
type Options struct {
	// Server is the API server behind the proxy.
	Server sandbox.Endpoint
	// Memory is shared by the proxies of one server. REQUIRED.
	Memory *Memory
	// Kill kills the caller at once.
	Kill func() error
	// Succeeded returns once the successor of a killed caller is working.
	Succeeded func()
	// Plan returns the fault of a request. Nil means no faults. It must not block.
	Plan func(*Request) Fault
	// Seen is called for each write before it is sent on.
	Seen func(*Request)
	// Strange is called for writes of unknown class.
	Strange func(error)
}

// Proxy is an API server that fails on demand. It serves until [Proxy.Close].
type Proxy struct {
	options   Options
	endpoint  sandbox.Endpoint
	server    *http.Server
	transport *http.Transport
	ended     sync.WaitGroup

	mu      sync.Mutex
	thawed  chan struct{}   // closed while watches flow
	expired chan struct{}   // closed and replaced when watches expire
	hiding  map[string]bool // resources whose next event is hidden
	hidden  int
	conns   map[net.Conn]struct{}
}

var (
	// errAbort ends a request without an answer, and errReset also resets its connection.
	errAbort = errors.New("no answer")
	errReset = errors.New("connection reset")
)

// killPatience bounds the wait for a killed caller's connection to close.
const killPatience = 10 * time.Second

type connKey struct{}

// NewProxy starts a proxy on loopback.
func NewProxy(options Options) (*Proxy, error) {
	target, err := url.Parse(options.Server.URL)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(options.Server.CA) {
		return nil, errors.New("the server's CA holds no certificate")
	}
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, err
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		options:  options,
		endpoint: sandbox.Endpoint{URL: "https://" + listener.Addr().String(), CA: certificate},
		transport: &http.Transport{
			TLSClientConfig:     &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:   true,
			DisableCompression:  true, // compressed content is passed on unchanged
			MaxIdleConnsPerHost: 100,
		},
		thawed:  make(chan struct{}),
		expired: make(chan struct{}),
		hiding:  map[string]bool{},
		conns:   map[net.Conn]struct{}{},
	}
	close(p.thawed)
	forward := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     roundTripper(p.roundTrip),
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		ErrorHandler:  p.fail,
	}
	p.server = &http.Server{
		Handler:           forward,
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
		ErrorLog:          log.New(io.Discard, "", 0), // aborted requests are its purpose
		ReadHeaderTimeout: time.Minute,
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState:         p.track,
	}
	p.ended.Go(func() { _ = p.server.ServeTLS(listener, "", "") })
	return p, nil
}

// Endpoint returns the endpoint for callers.
func (p *Proxy) Endpoint() sandbox.Endpoint { return p.endpoint }

// Close closes the proxy and all connections.
func (p *Proxy) Close() {
	p.Thaw()
	_ = p.server.Close()
	p.ended.Wait()
	p.transport.CloseIdleConnections()
}

// Freeze holds back all watch events until [Proxy.Thaw], so that the caller's caches become stale
// without its knowledge.
func (p *Proxy) Freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.thawed:
		p.thawed = make(chan struct{})
	default:
	}
}

// Thaw reverts [Proxy.Freeze].
func (p *Proxy) Thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.thawed:
	default:
		close(p.thawed)
	}
}

// ExpireWatches ends every open watch as the API server does when its next version has been
// compacted.
func (p *Proxy) ExpireWatches() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.expired)
	p.expired = make(chan struct{})
}

// Hide drops the next event of an object of the resource, other than one of an initial list. Until
// the object changes again or its watch expires, the caller's cache shows its old state.
func (p *Proxy) Hide(resource string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hiding[resource] = true
}

// Show cancels every [Proxy.Hide] that has not dropped an event yet.
func (p *Proxy) Show() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.hiding)
}

// Hidden returns the number of events dropped.
func (p *Proxy) Hidden() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hidden
}

// hides reports whether the event must be dropped.
func (p *Proxy) hides(resource string, framing framing, event []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.hiding[resource] || !framing.ofObject(event) {
		return false
	}
	delete(p.hiding, resource)
	p.hidden++
	return true
}

// ResetConnections resets all connections of the caller, with requests in flight.
func (p *Proxy) ResetConnections() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		reset(c)
	}
}

func (p *Proxy) track(c net.Conn, state http.ConnState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch state {
	case http.StateNew, http.StateActive, http.StateIdle:
		p.conns[c] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(p.conns, c)
	}
}

// reset makes the caller see ECONNRESET instead of an orderly close.
func reset(c net.Conn) {
	if wrapped, ok := c.(*tls.Conn); ok {
		c = wrapped.NetConn()
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

func (p *Proxy) fail(_ http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, errReset) {
		if c, ok := r.Context().Value(connKey{}).(net.Conn); ok {
			reset(c)
		}
	}
	// Also if the API server itself does not answer: the proxy must not send an answer that a real
	// server would not send.
	panic(http.ErrAbortHandler)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (p *Proxy) roundTrip(r *http.Request) (*http.Response, error) {
	q := parse(r)
	if q.Write() {
		if err := p.inspect(r, q); err != nil {
			return nil, err
		}
	}
	var fault Fault
	if p.options.Plan != nil {
		fault = p.options.Plan(q)
	}
	done := func() {
		if fault.Done != nil {
			fault.Done()
		}
	}
	switch fault.Kind {
	case KillBefore:
		if err := p.kill(r.Context()); err == nil {
			done()
		}
		return nil, errAbort
	case KillLate:
		if err := p.kill(r.Context()); err == nil {
			p.options.Succeeded() // the request stays in flight until then
			done()
		}
		return p.drop(p.send(detached(r)))
	case TooMany:
		done()
		return refusal(r, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests), nil
	case InternalError:
		done()
		return refusal(r, http.StatusInternalServerError, metav1.StatusReasonInternalError), nil
	case Unavailable:
		done()
		return refusal(r, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable), nil
	case Expired:
		done()
		return refusal(r, http.StatusGone, metav1.StatusReasonExpired), nil
	case Reset:
		done()
		return nil, errReset
	case Slow:
		done()
		select {
		case <-time.After(fault.Delay):
		case <-r.Context().Done():
			return nil, errAbort
		}
	case KillAfter, Cut, TimeoutAfter:
		return p.after(r, fault.Kind, done)
	case None:
	}
	response, err := p.send(r)
	if err == nil && q.Verb == "watch" && response.StatusCode == http.StatusOK {
		listing, _ := strconv.ParseBool(r.URL.Query().Get("sendInitialEvents"))
		response.Body = p.watched(r.Context(), q.Resource, listing, framingOf(response.Header), response.Body)
	}
	return response, err
}

// inspect reads the body of a write and classifies it.
func (p *Proxy) inspect(r *http.Request, q *Request) error {
	if r.Body != nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
		q.Body = body
	}
	var err error
	if q.Class, err = p.options.Memory.Classify(q); err != nil && p.options.Strange != nil {
		p.options.Strange(err)
	}
	if p.options.Seen != nil {
		p.options.Seen(q)
	}
	return nil
}

// after executes the request and loses its answer. A refused write is answered, because nothing was
// applied.
func (p *Proxy) after(r *http.Request, kind Kind, done func()) (*http.Response, error) {
	response, err := p.send(detached(r))
	if err != nil || response.StatusCode >= http.StatusBadRequest {
		return response, err
	}
	switch kind {
	case KillAfter:
		if err := p.kill(r.Context()); err == nil {
			done()
		}
		return p.drop(response, nil)
	case TimeoutAfter:
		done()
		_, _ = p.drop(response, nil)
		return refusal(r, http.StatusGatewayTimeout, metav1.StatusReasonTimeout), nil
	default:
		done()
		_, _ = p.drop(response, nil)
		return nil, errReset
	}
}

// send sends the request on.
func (p *Proxy) send(r *http.Request) (*http.Response, error) { return p.transport.RoundTrip(r) }

// drop discards an answer.
func (p *Proxy) drop(response *http.Response, err error) (*http.Response, error) {
	if err == nil {
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
	}
	return nil, errAbort
}

// detached returns the request with a context that outlives its caller.
func detached(r *http.Request) *http.Request {
	return r.WithContext(context.WithoutCancel(r.Context()))
}

// kill kills the caller and returns once its connections are closed. It fails if the caller was
// already dead.
func (p *Proxy) kill(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := p.options.Kill(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(killPatience):
		return errors.New("the caller did not die")
	}
}

// refusal returns an error answer in the API server's format.
func refusal(r *http.Request, code int, reason metav1.StatusReason) *http.Response {
	status := metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "injected by the test",
	}
	header := http.Header{"Content-Type": {"application/json"}}
	if code == http.StatusTooManyRequests {
		header.Set("Retry-After", "1")
		status.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	}
	body, err := json.Marshal(status)
	if err != nil {
		panic(err) // a struct of strings and numbers always encodes
	}
	header.Set("Content-Length", strconv.Itoa(len(body)))
	return &http.Response{
		Status: fmt.Sprintf("%d %s", code, http.StatusText(code)), StatusCode: code,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header, ContentLength: int64(len(body)), Body: io.NopCloser(bytes.NewReader(body)), Request: r,
	}
}

// watched passes on the events of a watch in order, except while frozen, until it expires. listing
// is set if the watch begins with a list. Nothing of that is hidden: an object missing in a list is
// not an unseen event.
func (p *Proxy) watched(ctx context.Context, resource string, listing bool, framing framing, body io.ReadCloser) io.ReadCloser {
	out, in := io.Pipe()
	events := make(chan []byte)
	ended := make(chan struct{})
	p.ended.Go(func() {
		defer close(events)
		reader := bufio.NewReader(body)
		for {
			event, err := framing.next(reader)
			if len(event) > 0 {
				select {
				case events <- event:
				case <-ended:
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	p.ended.Go(func() {
		defer func() {
			close(ended)
			_ = body.Close()
			_ = in.Close()
		}()
		for {
			p.mu.Lock()
			thawed, expired := p.thawed, p.expired
			p.mu.Unlock()
			select {
			case <-thawed:
			case <-ctx.Done():
				return
			}
			select {
			case event, more := <-events:
				if !more {
					return
				}
				if p.frozen() {
					p.awaitThaw(ctx)
				}
				if !listing && p.hides(resource, framing, event) {
					continue
				}
				listing = listing && !bytes.Contains(event, []byte(metav1.InitialEventsAnnotationKey))
				if _, err := in.Write(event); err != nil {
					return
				}
			case <-expired:
				_, _ = in.Write(framing.gone)
				return
			case <-ctx.Done():
				return
			}
		}
	})
	return out
}

func (p *Proxy) frozen() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.thawed:
		return false
	default:
		return true
	}
}

func (p *Proxy) awaitThaw(ctx context.Context) {
	p.mu.Lock()
	thawed := p.thawed
	p.mu.Unlock()
	select {
	case <-thawed:
	case <-ctx.Done():
	}
}
