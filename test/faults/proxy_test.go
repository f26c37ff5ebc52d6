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

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// scene is an API server behind a proxy, and a caller that can be killed.
type scene struct {
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

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{events: make(chan string, 10)}
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

func (s *scene) serve(w http.ResponseWriter, r *http.Request) {
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
func (s *scene) kill() error {
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
func (s *scene) write(t *testing.T) (code int, header http.Header, body []byte, err error) {
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
			g := NewWithT(t)
			s := newScene(t)
			happened := make(chan struct{}, 1)
			s.fault.Store(&faults.Fault{Kind: tc.kind, Done: func() { happened <- struct{}{} }})
			code, header, body, err := s.write(t)
			if tc.code == 0 {
				g.Expect(err).To(HaveOccurred())
			} else {
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(code).To(Equal(tc.code))
			}
			if tc.code >= http.StatusBadRequest {
				var status metav1.Status
				g.Expect(json.Unmarshal(body, &status)).To(Succeed())
				g.Expect(status.Code).To(BeEquivalentTo(tc.code))
			}
			if tc.code == http.StatusTooManyRequests {
				g.Expect(header.Get("Retry-After")).To(Equal("1"))
			}
			if tc.kind != faults.None {
				g.Eventually(happened).WithTimeout(soon).Should(Receive())
			}
			if tc.arrives {
				g.Eventually(s.arrived.Load).WithTimeout(soon).Should(BeEquivalentTo(1))
			} else {
				g.Expect(s.arrived.Load()).To(BeZero())
			}
			g.Expect(s.killed.Load()).To(BeEquivalentTo(lo.Ternary(tc.kills, 1, 0)))
		})
	}
}

func TestAWriteThatIsRefusedIsAnswered(t *testing.T) {
	for _, kind := range []faults.Kind{faults.KillAfter, faults.Cut, faults.TimeoutAfter} {
		t.Run(kind.String(), func(t *testing.T) {
			g := NewWithT(t)
			s := newScene(t)
			s.answer.Store(http.StatusConflict)
			s.fault.Store(&faults.Fault{Kind: kind, Done: func() { t.Error("nothing was applied") }})
			code, _, _, err := s.write(t)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(code).To(Equal(http.StatusConflict))
			g.Expect(s.killed.Load()).To(BeZero())
		})
	}
}

// watch opens a watch and returns its lines. The channel is closed when the watch ends.
func (s *scene) watch(t *testing.T, parameters ...string) <-chan string {
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

func TestWatchesStallAndGoOn(t *testing.T) {
	g := NewWithT(t)
	s := newScene(t)
	lines := s.watch(t)
	s.events <- "one"
	g.Eventually(lines).WithTimeout(soon).Should(Receive(Equal("one")))
	s.proxy.Freeze()
	s.events <- "two"
	s.events <- "three"
	g.Consistently(lines).WithTimeout(300 * time.Millisecond).ShouldNot(Receive())
	s.proxy.Thaw()
	g.Eventually(lines).WithTimeout(soon).Should(Receive(Equal("two")))
	g.Eventually(lines).WithTimeout(soon).Should(Receive(Equal("three")))
}

func TestWatchesExpire(t *testing.T) {
	g := NewWithT(t)
	s := newScene(t)
	lines := s.watch(t)
	s.events <- "one"
	g.Eventually(lines).WithTimeout(soon).Should(Receive(Equal("one")))
	s.proxy.ExpireWatches()
	var last string
	g.Eventually(lines).WithTimeout(soon).Should(Receive(&last))
	var event struct {
		Type   string        `json:"type"`
		Object metav1.Status `json:"object"`
	}
	g.Expect(json.Unmarshal([]byte(last), &event)).To(Succeed())
	g.Expect(event.Type).To(Equal("ERROR"))
	g.Expect(event.Object.Code).To(BeEquivalentTo(http.StatusGone))
	g.Expect(event.Object.Reason).To(Equal(metav1.StatusReasonExpired))
	g.Eventually(lines).WithTimeout(soon).Should(BeClosed())
}

// An event of a built-in kind must not be held back until the next one arrives: a cache would never
// be filled.
func TestBuiltInKindsAreWatchedThroughTheProxy(t *testing.T) {
	g := NewWithT(t)
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
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(proxy.Close)
	clients, err := kubernetes.NewForConfig(&rest.Config{
		Host: proxy.Endpoint().URL, TLSClientConfig: rest.TLSClientConfig{CAData: proxy.Endpoint().CA},
	})
	g.Expect(err).NotTo(HaveOccurred())
	watcher, err := clients.CoreV1().ConfigMaps("fleet").Watch(t.Context(), metav1.ListOptions{})
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(watcher.Stop)
	g.Eventually(watching).WithTimeout(soon).Should(BeClosed())

	var event watch.Event
	g.Eventually(watcher.ResultChan()).WithTimeout(soon).Should(Receive(&event))
	g.Expect(event.Type).To(Equal(watch.Added))
	g.Expect(event.Object).To(HaveField("Name", "prices"))
	proxy.ExpireWatches()
	g.Eventually(watcher.ResultChan()).WithTimeout(soon).Should(Receive(&event))
	g.Expect(event.Type).To(Equal(watch.Error))
	g.Expect(apierrors.FromObject(event.Object)).To(Satisfy(apierrors.IsResourceExpired))
}

func TestOneEventIsHidden(t *testing.T) {
	g := NewWithT(t)
	s := newScene(t)
	lines := s.watch(t)
	event := func(kind, name string) string {
		return fmt.Sprintf(`{"type":%q,"object":{"kind":"Machine","metadata":{"name":%q}}}`, kind, name)
	}
	told := func(kind, name string) {
		s.events <- event(kind, name)
		g.Eventually(lines).WithTimeout(soon).Should(Receive(Equal(event(kind, name))))
	}
	told("ADDED", "a")
	s.proxy.Hide("nodes")
	told("BOOKMARK", "")
	s.events <- event("MODIFIED", "a")
	told("MODIFIED", "b")
	g.Expect(s.proxy.Hidden()).To(Equal(1))
	s.proxy.Hide("others")
	told("DELETED", "a")
}

func TestNothingOfAListIsHidden(t *testing.T) {
	g := NewWithT(t)
	s := newScene(t)
	s.proxy.Hide("nodes")
	lines := s.watch(t, "sendInitialEvents=true")
	event := func(kind, metadata string) string {
		return fmt.Sprintf(`{"type":%q,"object":{"kind":"Machine","metadata":{%s}}}`, kind, metadata)
	}
	told := func(event string) {
		s.events <- event
		g.Eventually(lines).WithTimeout(soon).Should(Receive(Equal(event)))
	}
	told(event("ADDED", `"name":"a"`))
	told(event("BOOKMARK", `"annotations":{"k8s.io/initial-events-end":"true"}`))
	g.Expect(s.proxy.Hidden()).To(BeZero())
	s.events <- event("ADDED", `"name":"b"`)
	told(event("ADDED", `"name":"c"`))
	g.Expect(s.proxy.Hidden()).To(Equal(1))
}

func TestConnectionsAreReset(t *testing.T) {
	g := NewWithT(t)
	s := newScene(t)
	lines := s.watch(t)
	s.proxy.ResetConnections()
	g.Eventually(lines).WithTimeout(soon).Should(BeClosed())
	code, _, _, err := s.write(t)
	g.Expect(err).NotTo(HaveOccurred(), "a new connection serves")
	g.Expect(code).To(Equal(http.StatusOK))
}

func TestFailPoints(t *testing.T) {
	g := NewWithT(t)
	p := faults.NewPoints(0)
	write := &faults.Request{Verb: "create", Class: faults.ClaimCreated}
	g.Expect(p.Plan("agent", write).Kind).To(Equal(faults.None), "nothing is armed")

	p.Arm(faults.PointsOf(faults.ClaimCreated)...)
	g.Expect(p.Plan("agent", &faults.Request{Verb: "create", Class: faults.ClaimEnded}).Kind).To(Equal(faults.None), "another step")
	var kinds []faults.Kind
	for range 3 {
		fault := p.Plan("agent", write)
		kinds = append(kinds, fault.Kind)
		fault.Done()
	}
	g.Expect(kinds).To(ConsistOf(faults.KillBefore, faults.KillAfter, faults.KillLate))
	g.Expect(p.Plan("agent", write).Kind).To(Equal(faults.None), "each was hit once")
	g.Expect(p.Left()).To(BeEmpty())
	g.Expect(p.Seen(faults.ClaimCreated)).To(Equal(5))
	for _, point := range faults.PointsOf(faults.ClaimCreated) {
		g.Expect(p.Hits(point)).To(Equal(1), fmt.Sprint(point))
	}
}

func TestAFailPointThatDoesNotComeAboutIsNotHit(t *testing.T) {
	g := NewWithT(t)
	p := faults.NewPoints(0)
	point := faults.Point{Class: faults.ClaimCreated, When: faults.After}
	p.Arm(point)
	write := &faults.Request{Verb: "create", Class: faults.ClaimCreated}
	g.Expect(p.Plan("agent", write).Kind).To(Equal(faults.KillAfter))
	g.Expect(p.Plan("agent", write).Kind).To(Equal(faults.None), "it is under way")
	g.Expect(p.Hits(point)).To(BeZero())
	g.Expect(p.Left()).To(ConsistOf(point))
}
