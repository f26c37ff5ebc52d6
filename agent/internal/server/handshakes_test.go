package server_test

import (
	"crypto/tls"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// handshakeErrors returns the number of failed handshakes by reason.
func handshakeErrors(t *testing.T, registry *prometheus.Registry) map[string]int {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	counted := map[string]int{}
	for _, family := range families {
		if family.GetName() != "capi_agent_handshake_errors_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			counted[metric.GetLabel()[0].GetValue()] = int(metric.GetCounter().GetValue())
		}
	}
	return counted
}

func TestFailedHandshakesAreCountedByReason(t *testing.T) {
	authority, another, registry, log := testpki.New(t), testpki.New(t), prometheus.NewRegistry(), &lines{}
	files := authority.Issue(t, t.TempDir(), authority)
	listener, release, err := server.ListenTLS(t.Context(), "127.0.0.1:0", server.TLSFiles{
		CertFile: files.CertFile, KeyFile: files.KeyFile, ClientCAFile: files.CAFile, Registerer: registry, Log: funcr.New(log.add, funcr.Options{}),
	})
	require.NoError(t, err)
	defer release()
	defer func() { require.NoError(t, listener.Close()) }()

	issued := func(by *testpki.Authority, life time.Duration) *tls.Certificate {
		own := by.IssueFor(t, life, t.TempDir(), authority, "spiffe://karpenter-capi/cluster/fleet/spoke")
		certificate, err := tls.LoadX509KeyPair(own.CertFile, own.KeyFile)
		require.NoError(t, err)
		return &certificate
	}
	good := issued(authority, time.Hour)
	// speaking returns a client that presents the certificate, whatever the server asks for.
	speaking := func(certificate *tls.Certificate, changes ...func(*tls.Config)) func(net.Conn) {
		config := &tls.Config{
			RootCAs: authority.Pool(), ServerName: "127.0.0.1", MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return certificate, nil },
		}
		for _, change := range changes {
			change(config)
		}
		return func(conn net.Conn) {
			secured := tls.Client(conn, config)
			_ = secured.Handshake() // the server's result is what matters
			// With TLS 1.3 the client is done before the server has looked at its certificate.
			_, _ = io.Copy(io.Discard, secured)
		}
	}
	handshake := func(client func(net.Conn)) error {
		below, above := net.Pipe()
		go func() {
			client(above)
			_ = above.Close()
		}()
		secured, _, err := listener.Credentials.ServerHandshake(below)
		if err == nil {
			require.NoError(t, below.Close())
			require.NotNil(t, secured)
		}
		return err
	}
	want := map[string]int{
		"expired": 0, "unknown-authority": 0, "no-certificate": 0, "bad-certificate": 0, "rejected-by-client": 0, "protocol": 0, "timeout": 0,
		"closed": 0, "other": 0,
	}
	require.NoError(t, handshake(speaking(good)))
	require.Equal(t, want, handshakeErrors(t, registry), "every reason is there before it occurs")

	for _, c := range []struct {
		name, reason string
		client       func(net.Conn)
	}{
		{"an expired certificate", "expired", speaking(issued(authority, -time.Second))},
		{"another authority's", "unknown-authority", speaking(issued(another, time.Hour))},
		{"none", "no-certificate", speaking(&tls.Certificate{})},
		{"one that is none", "bad-certificate", speaking(&tls.Certificate{Certificate: [][]byte{[]byte("nonsense")}, PrivateKey: good.PrivateKey})},
		{"another's, without its key", "bad-certificate", speaking(&tls.Certificate{
			Certificate: good.Certificate, PrivateKey: issued(authority, time.Hour).PrivateKey,
		})},
		{"a client that does not trust the agent", "rejected-by-client", speaking(good, func(c *tls.Config) { c.RootCAs = another.Pool() })},
		{"plain HTTP/2", "protocol", func(conn net.Conn) { _, _ = io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") }},
		{"TLS 1.2", "protocol", speaking(good, func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 })},
		{"no HTTP/2", "protocol", speaking(good, func(c *tls.Config) { c.NextProtos = nil })},
		{"HTTP/1.1", "protocol", speaking(good, func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} })},
		{"a probe of the port", "closed", func(net.Conn) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			require.Error(t, handshake(c.client))
			want[c.reason]++
			require.Equal(t, want, handshakeErrors(t, registry))
		})
	}
	t.Run("silence", func(t *testing.T) {
		below, above := net.Pipe()
		defer func() { require.NoError(t, above.Close()) }()
		require.NoError(t, below.SetDeadline(time.Now()))
		_, _, err := listener.Credentials.ServerHandshake(below)
		require.Error(t, err)
		want["timeout"]++
		require.Equal(t, want, handshakeErrors(t, registry))
	})
	// Every client that reaches the port can cause these lines.
	require.Equal(t, 1, strings.Count(log.String(), `"reason"="protocol"`), "%s", log)
	require.NotContains(t, log.String(), `"reason"="closed"`, "probes are frequent and harmless")
}

func TestHandshakesThatFailAreCountedWhileServing(t *testing.T) {
	f := start(t)
	none := f.scraped()
	// Ten in 15 minutes. The client would repeat a handshake with pauses.
	files := testpki.New(t).Issue(t, t.TempDir(), f.authority, spokeURI)
	stranger, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(t, err)
	for range 10 {
		conn, err := tls.Dial("tcp", f.address, &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{stranger}, RootCAs: f.authority.Pool(), NextProtos: []string{"h2"},
		})
		require.NoError(t, err, "the agent checks the certificate after the client has finished")
		_, err = conn.Read(make([]byte, 1))
		require.Error(t, err)
		require.NoError(t, conn.Close())
	}
	require.Eventually(t, func() bool { return handshakeErrors(t, f.registry)["unknown-authority"] == 10 }, patience, time.Millisecond)
	scrapes.Record(t, "CapiAgentHandshakesFail", none, f.scraped(), scrapes.Only("reason", "unknown-authority"))
	require.Contains(t, f.log.String(), `"reason"="unknown-authority"`)

	require.Error(t, f.list(f.signedBy(testpki.New(t), "spiffe://karpenter-capi/cluster/fleet/spoke")))
	require.Greater(t, handshakeErrors(t, f.registry)["unknown-authority"], 10, "capi_agent_handshake_errors_total")
	require.NoError(t, f.list(f.cluster()))
}

// No client accepts an expired certificate, so the agent must not look ready.
func TestAnAgentWithAnExpiredCertificateIsNotReady(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Now())
	f := start(t, func(_ *fixture, config *server.Config) { config.Clock = now })
	require.NoError(t, f.list(f.cluster()))
	require.NoError(t, f.server.CheckCertificates())
	now.SetTime(now.Now().Add(2 * time.Hour))
	require.ErrorContains(t, f.server.CheckCertificates(), "the certificate of "+f.address+" expired at ")
	require.NoError(t, f.server.Check(), "its view of the hub is not affected")

	f.authority.IssueFor(t, 4*time.Hour, f.serverPKI, f.authority)
	require.Eventually(t, func() bool { return f.server.CheckCertificates() == nil }, patience, time.Millisecond)
}

// sessions counts the sessions that a client could resume.
type sessions struct {
	tls.ClientSessionCache

	kept int
}

func (s *sessions) Put(key string, session *tls.ClientSessionState) {
	s.kept++
	s.ClientSessionCache.Put(key, session)
}

// A resumed session would do without the present authorities and policy.
func TestEveryConnectionIsVerifiedAnew(t *testing.T) {
	f := start(t)
	own := f.authority.Issue(t, t.TempDir(), f.authority, "spiffe://karpenter-capi/cluster/fleet/spoke")
	certificate, err := tls.LoadX509KeyPair(own.CertFile, own.KeyFile)
	require.NoError(t, err)
	cache := &sessions{ClientSessionCache: tls.NewLRUClientSessionCache(10)}
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, InsecureSkipVerify: true, NextProtos: []string{"h2"},
		Certificates: []tls.Certificate{certificate}, ClientSessionCache: cache,
	}
	// connect returns an error unless the server has accepted the certificate and sent its
	// settings, which come after the tickets.
	connect := func() error {
		dialer := tls.Dialer{Config: config}
		conn, err := dialer.DialContext(f.ctx(), "tcp", f.address)
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		if _, err := io.WriteString(conn, http2.ClientPreface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00"); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, make([]byte, 9)); err != nil {
			return err
		}
		secured, ok := conn.(*tls.Conn)
		require.True(t, ok)
		require.False(t, secured.ConnectionState().DidResume)
		return nil
	}
	for range 3 {
		require.NoError(t, connect())
	}
	require.Zero(t, cache.kept)

	testpki.WriteBundle(t, filepath.Join(f.serverPKI, "ca.crt"), testpki.New(t)) // the client's authority is withdrawn
	require.Eventually(t, func() bool { return connect() != nil }, patience, 20*time.Millisecond)
}
