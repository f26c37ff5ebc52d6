package faults_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/faults"
)

// soon bounds what takes milliseconds, on a machine that is busy with other work.
const soon = 20 * time.Second

// fixture is an API server behind a proxy, and a caller that can be killed.
type fixture struct {
	proxy  *faults.Proxy
	caller *http.Client
	// arrived counts the requests that have reached the server.
	arrived atomic.Int32
	// answer is the server's status code for writes.
	answer atomic.Int32
	// events are sent to all watchers.
	events chan string
	fault  atomic.Pointer[faults.Fault]
	killed atomic.Int32

	mu    sync.Mutex
	conns []net.Conn
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	s := &fixture{events: make(chan string, 10)}
	s.answer.Store(http.StatusOK)
	server := httptest.NewTLSServer(http.HandlerFunc(s.serve))
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	var err error
	s.proxy, err = faults.NewProxy(faults.Options{
		Server: sandbox.Endpoint{URL: server.URL, CA: ca}, Memory: &faults.Memory{}, Kill: s.kill, Succeeded: func() {},
		Plan: func(*faults.Request) faults.Fault {
			if f := s.fault.Load(); f != nil {
				return *f
			}
			return faults.Fault{}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.proxy.Close)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(s.proxy.Endpoint().CA)
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, address)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.conns = append(s.conns, c)
			return c, err
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	s.caller = &http.Client{Transport: transport}
	return s
}

func (s *fixture) serve(w http.ResponseWriter, r *http.Request) {
	s.arrived.Add(1)
	if r.URL.Query().Get("watch") == "" {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(int(s.answer.Load()))
		_, _ = io.WriteString(w, `{"kind":"Status"}`)
		return
	}
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush()
	for {
		select {
		case e := <-s.events:
			_, _ = io.WriteString(w, e+"\n")
			_ = http.NewResponseController(w).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// kill closes the caller's connections, as the kernel does when a process dies.
func (s *fixture) kill() error {
	s.killed.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		_ = c.Close()
	}
	s.conns = nil
	return nil
}

// write makes a claim, and returns the answer's status code, header and body.
func (s *fixture) write(t *testing.T) (code int, header http.Header, body []byte, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	t.Cleanup(cancel)
	const path = "/apis/agent.karpenter.cluster.x-k8s.io/v1alpha1/namespaces/fleet/machineclaims"
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.proxy.Endpoint().URL+path,
		strings.NewReader(`{"metadata":{"name":"spoke.c"},"spec":{"nodeGroup":"small"}}`))
	if err != nil {
		t.Fatal(err)
	}
	response, err := s.caller.Do(r)
	if err != nil {
		return 0, nil, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err = io.ReadAll(response.Body)
	return response.StatusCode, response.Header, body, err
}

func TestFaultsOfWrites(t *testing.T) {
	for _, tc := range []struct {
		kind faults.Kind
		// code is the status code of the answer, 0 for none.
		code           int
		arrives, kills bool
	}{
		{kind: faults.None, code: http.StatusOK, arrives: true},
		{kind: faults.KillBefore, kills: true},
		{kind: faults.KillAfter, arrives: true, kills: true},
		{kind: faults.KillLate, arrives: true, kills: true},
		{kind: faults.TooMany, code: http.StatusTooManyRequests},
		{kind: faults.InternalError, code: http.StatusInternalServerError},
		{kind: faults.Unavailable, code: http.StatusServiceUnavailable},
		{kind: faults.Expired, code: http.StatusGone},
		{kind: faults.Reset},
		{kind: faults.Cut, arrives: true},
		{kind: faults.TimeoutAfter, code: http.StatusGatewayTimeout, arrives: true},
		{kind: faults.Slow, code: http.StatusOK, arrives: true},
	} {
		t.Run(tc.kind.String(), func(t *testing.T) {
			s := newFixture(t)
			happened := make(chan struct{}, 1)
			s.fault.Store(&faults.Fault{Kind: tc.kind, Done: func() { happened <- struct{}{} }})
			code, header, body, err := s.write(t)
			if tc.code == 0 {
				require.Error(t, err)
			} else {
				require.NoError(t, err)
				require.Equal(t, tc.code, code)
			}
			if tc.code >= http.StatusBadRequest {
				var status metav1.Status
				require.NoError(t, json.Unmarshal(body, &status))
				require.EqualValues(t, tc.code, status.Code)
			}
			if tc.code == http.StatusTooManyRequests {
				require.Equal(t, "1", header.Get("Retry-After"))
			}
			if tc.kind != faults.None {
				next(t, happened)
			}
			if tc.arrives {
				require.EventuallyWithT(t, func(c *assert.CollectT) { require.EqualValues(c, 1, s.arrived.Load()) }, soon, 10*time.Millisecond)
			} else {
				require.Zero(t, s.arrived.Load())
			}
			require.EqualValues(t, lo.Ternary(tc.kills, 1, 0), s.killed.Load())
		})
	}
}

func TestAWriteThatIsRefusedIsAnswered(t *testing.T) {
	for _, kind := range []faults.Kind{faults.KillAfter, faults.Cut, faults.TimeoutAfter} {
		t.Run(kind.String(), func(t *testing.T) {
			s := newFixture(t)
			s.answer.Store(http.StatusConflict)
			s.fault.Store(&faults.Fault{Kind: kind, Done: func() { t.Error("nothing was applied") }})
			code, _, _, err := s.write(t)
			require.NoError(t, err)
			require.Equal(t, http.StatusConflict, code)
			require.Zero(t, s.killed.Load())
		})
	}
}

// watch opens a watch and returns its lines. The channel is closed when the watch ends.
func (s *fixture) watch(t *testing.T, parameters ...string) <-chan string {
	t.Helper()
	query := strings.Join(append([]string{"watch=true"}, parameters...), "&")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.proxy.Endpoint().URL+"/api/v1/nodes?"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := s.caller.Do(r) //nolint:bodyclose // the reader closes it
	if err != nil {
		t.Fatal(err)
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		defer func() { _ = response.Body.Close() }()
		scanner := bufio.NewScanner(response.Body)
		for scanner.Scan() {
			lines <- scanner.Text()
		}
	}()
	return lines
}

// next waits for a channel's next value.
func next[T any](t *testing.T, channel <-chan T) (value T) {
	t.Helper()
	select {
	case received, open := <-channel:
		require.True(t, open, "the channel is closed")
		value = received
	case <-time.After(soon):
		require.Fail(t, "nothing is sent")
	}
	return value
}

// closes waits until a channel is closed.
func closes[T any](t *testing.T, channel <-chan T) {
	t.Helper()
	select {
	case value, open := <-channel:
		require.False(t, open, "%v is sent", value)
	case <-time.After(soon):
		require.Fail(t, "the channel stays open")
	}
}

func TestWatchesStallAndGoOn(t *testing.T) {
	s := newFixture(t)
	lines := s.watch(t)
	s.events <- "one"
	require.Equal(t, "one", next(t, lines))
	s.proxy.Freeze()
	s.events <- "two"
	s.events <- "three"
	select {
	case line := <-lines:
		require.Fail(t, "the watch goes on", line)
	case <-time.After(300 * time.Millisecond):
	}
	s.proxy.Thaw()
	require.Equal(t, "two", next(t, lines))
	require.Equal(t, "three", next(t, lines))
}

func TestWatchesExpire(t *testing.T) {
	s := newFixture(t)
	lines := s.watch(t)
	s.events <- "one"
	require.Equal(t, "one", next(t, lines))
	s.proxy.ExpireWatches()
	last := next(t, lines)
	var event struct {
		Type   string        `json:"type"`
		Object metav1.Status `json:"object"`
	}
	require.NoError(t, json.Unmarshal([]byte(last), &event))
	require.Equal(t, "ERROR", event.Type)
	require.EqualValues(t, http.StatusGone, event.Object.Code)
	require.Equal(t, metav1.StatusReasonExpired, event.Object.Reason)
	closes(t, lines)
}

// An event of a built-in kind must not be held back until the next one arrives: a cache would never
// be filled.
func TestBuiltInKindsAreWatchedThroughTheProxy(t *testing.T) {
	watching := make(chan struct{})
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		const mediaType = "application/vnd.kubernetes.protobuf"
		info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), mediaType)
		configMap := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "prices", ResourceVersion: "7"}}
		body, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, corev1.SchemeGroupVersion), configMap)
		if err != nil {
			t.Error(err)
		}
		event, err := (&metav1.WatchEvent{Type: "ADDED", Object: runtime.RawExtension{Raw: body}}).Marshal()
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", mediaType+";stream=watch")
		_, _ = w.Write(binary.BigEndian.AppendUint32(nil, uint32(len(event))))
		_, _ = w.Write(event)
		_ = http.NewResponseController(w).Flush()
		close(watching)
		<-r.Context().Done()
	}))
	t.Cleanup(server.Close)
	proxy, err := faults.NewProxy(faults.Options{
		Server: sandbox.Endpoint{URL: server.URL, CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})},
		Memory: &faults.Memory{},
	})
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	clients, err := kubernetes.NewForConfig(&rest.Config{
		Host: proxy.Endpoint().URL, TLSClientConfig: rest.TLSClientConfig{CAData: proxy.Endpoint().CA},
	})
	require.NoError(t, err)
	watcher, err := clients.CoreV1().ConfigMaps("fleet").Watch(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	t.Cleanup(watcher.Stop)
	closes(t, watching)

	event := next(t, watcher.ResultChan())
	require.Equal(t, watch.Added, event.Type)
	object, err := meta.Accessor(event.Object)
	require.NoError(t, err)
	require.Equal(t, "prices", object.GetName())
	proxy.ExpireWatches()
	event = next(t, watcher.ResultChan())
	require.Equal(t, watch.Error, event.Type)
	require.True(t, apierrors.IsResourceExpired(apierrors.FromObject(event.Object)), "%v", event.Object)
}

func TestOneEventIsHidden(t *testing.T) {
	s := newFixture(t)
	lines := s.watch(t)
	event := func(kind, name string) string {
		return fmt.Sprintf(`{"type":%q,"object":{"kind":"Machine","metadata":{"name":%q}}}`, kind, name)
	}
	told := func(kind, name string) {
		s.events <- event(kind, name)
		require.Equal(t, event(kind, name), next(t, lines))
	}
	told("ADDED", "a")
	s.proxy.Hide("nodes")
	told("BOOKMARK", "")
	s.events <- event("MODIFIED", "a")
	told("MODIFIED", "b")
	require.Equal(t, 1, s.proxy.Hidden())
	s.proxy.Hide("others")
	told("DELETED", "a")
}

func TestNothingOfAListIsHidden(t *testing.T) {
	s := newFixture(t)
	s.proxy.Hide("nodes")
	lines := s.watch(t, "sendInitialEvents=true")
	event := func(kind, metadata string) string {
		return fmt.Sprintf(`{"type":%q,"object":{"kind":"Machine","metadata":{%s}}}`, kind, metadata)
	}
	told := func(event string) {
		s.events <- event
		require.Equal(t, event, next(t, lines))
	}
	told(event("ADDED", `"name":"a"`))
	told(event("BOOKMARK", `"annotations":{"k8s.io/initial-events-end":"true"}`))
	require.Zero(t, s.proxy.Hidden())
	s.events <- event("ADDED", `"name":"b"`)
	told(event("ADDED", `"name":"c"`))
	require.Equal(t, 1, s.proxy.Hidden())
}

func TestConnectionsAreReset(t *testing.T) {
	s := newFixture(t)
	lines := s.watch(t)
	s.proxy.ResetConnections()
	closes(t, lines)
	code, _, _, err := s.write(t)
	require.NoError(t, err, "a new connection serves")
	require.Equal(t, http.StatusOK, code)
}

func TestFailPoints(t *testing.T) {
	p := faults.NewPoints(0)
	write := &faults.Request{Verb: "create", Class: faults.ClaimCreated}
	require.Equal(t, faults.None, p.Plan("agent", write).Kind, "nothing is armed")

	p.Arm(faults.PointsOf(faults.ClaimCreated)...)
	require.Equal(t, faults.None, p.Plan("agent", &faults.Request{Verb: "create", Class: faults.ClaimEnded}).Kind, "another step")
	var kinds []faults.Kind
	for range 3 {
		fault := p.Plan("agent", write)
		kinds = append(kinds, fault.Kind)
		fault.Done()
	}
	require.ElementsMatch(t, []faults.Kind{faults.KillBefore, faults.KillAfter, faults.KillLate}, kinds)
	require.Equal(t, faults.None, p.Plan("agent", write).Kind, "each was hit once")
	require.Empty(t, p.Left())
	require.Equal(t, 5, p.Seen(faults.ClaimCreated))
	for _, point := range faults.PointsOf(faults.ClaimCreated) {
		require.Equal(t, 1, p.Hits(point), fmt.Sprint(point))
	}
}

func TestAFailPointThatDoesNotComeAboutIsNotHit(t *testing.T) {
	p := faults.NewPoints(0)
	point := faults.Point{Class: faults.ClaimCreated, When: faults.After}
	p.Arm(point)
	write := &faults.Request{Verb: "create", Class: faults.ClaimCreated}
	require.Equal(t, faults.KillAfter, p.Plan("agent", write).Kind)
	require.Equal(t, faults.None, p.Plan("agent", write).Kind, "it is under way")
	require.Zero(t, p.Hits(point))
	require.Equal(t, []faults.Point{point}, p.Left())
}
