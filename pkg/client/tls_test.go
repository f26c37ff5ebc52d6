package client_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const serverName = "capi-agent.hub.svc"

// authority is a certificate authority for the test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	life time.Duration // of the certificates that it issues
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &authority{t: t, cert: cert, key: key, life: time.Hour}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// issue returns a certificate and its key, as PEM. With a name it is a server's certificate,
// without one a client's.
func (a *authority) issue(serial int64, name string) (certificate, key []byte) {
	a.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		NotBefore:    time.Now().Add(-time.Hour), NotAfter: time.Now().Add(a.life),
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
	if name != "" {
		template.DNSNames, template.ExtKeyUsage = []string{name}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	} else {
		template.URIs = []*url.URL{{Scheme: "spiffe", Host: "karpenter-capi", Path: "/cluster/default/workload"}}
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, private.Public(), a.key)
	require.NoError(a.t, err)
	encoded, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(a.t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded})
}

// tlsAgent is a fake agent behind mutual TLS on loopback.
type tlsAgent struct {
	address string

	mu     sync.Mutex
	config *tls.Config
	seen   []int64 // serial numbers of the clients' certificates
	conns  []net.Conn
	closed int
}

func serveTLS(t *testing.T, a *authority) *tlsAgent {
	t.Helper()
	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := &tlsAgent{address: inner.Addr().String()}
	served.identify(t, a)
	agent.Serve(tls.NewListener(tracked{Listener: inner, agent: served}, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			served.mu.Lock()
			defer served.mu.Unlock()
			return served.config, nil
		},
	}))
	return served
}

// identify gives the agent a certificate of the authority, and makes it trust the authority for
// clients.
func (s *tlsAgent) identify(t *testing.T, a *authority) {
	t.Helper()
	certificate, key := a.issue(100, serverName)
	pair, err := tls.X509KeyPair(certificate, key)
	require.NoError(t, err)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.config = &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{pair},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: a.pool(),
		VerifyConnection: func(state tls.ConnectionState) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.seen = append(s.seen, state.PeerCertificates[0].SerialNumber.Int64())
			return nil
		},
	}
}

func (s *tlsAgent) lastSeen() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.seen) == 0 {
		return 0
	}
	return s.seen[len(s.seen)-1]
}

// accepted returns how many client certificates have been accepted.
func (s *tlsAgent) accepted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.seen)
}

// disconnect closes every connection.
func (s *tlsAgent) disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
	s.conns = nil
}

// tries returns how many connections there have been.
func (s *tlsAgent) tries() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

func (s *tlsAgent) open() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns) - s.closed
}

// counted is a connection whose end is counted.
type counted struct {
	net.Conn

	once  sync.Once
	agent *tlsAgent
}

func (c *counted) Close() error {
	c.once.Do(func() {
		c.agent.mu.Lock()
		defer c.agent.mu.Unlock()
		c.agent.closed++
	})
	return c.Conn.Close()
}

type tracked struct {
	net.Listener

	agent *tlsAgent
}

func (l tracked) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.agent.mu.Lock()
	defer l.agent.mu.Unlock()
	l.agent.conns = append(l.agent.conns, conn)
	return &counted{Conn: conn, agent: l.agent}, nil
}

// write replaces a file atomically.
func write(t *testing.T, file string, content []byte) {
	t.Helper()
	next := file + ".next"
	require.NoError(t, os.WriteFile(next, content, 0o600))
	require.NoError(t, os.Rename(next, file))
}

func install(t *testing.T, a *authority, files *client.TLS, serial int64) {
	t.Helper()
	certificate, key := a.issue(serial, "")
	write(t, files.CAFile, a.pem())
	write(t, files.KeyFile, key)
	write(t, files.CertFile, certificate)
}

func inFolder(t *testing.T) *client.TLS {
	t.Helper()
	folder := t.TempDir()
	return &client.TLS{
		CertFile: filepath.Join(folder, "tls.crt"), KeyFile: filepath.Join(folder, "tls.key"),
		CAFile: filepath.Join(folder, "ca.crt"), ServerName: serverName, Refresh: 10 * time.Millisecond,
	}
}

func TestMutualTLS(t *testing.T) {
	ca := newAuthority(t)
	agent, files := serveTLS(t, ca), inFolder(t)
	install(t, ca, files, 7)
	require.NoError(t, getStatus(t.Context(), connect(t, client.Options{Address: agent.address, TLS: files})))
	require.EqualValues(t, 7, agent.lastSeen())
}

func TestAgentOfAnotherNameOrAuthorityIsNotTrusted(t *testing.T) {
	ca := newAuthority(t)
	agent, files := serveTLS(t, ca), inFolder(t)
	install(t, ca, files, 7)

	misnamed := *files
	misnamed.ServerName = "other.hub.svc"
	err := getStatus(t.Context(), connect(t, client.Options{Address: agent.address, TLS: &misnamed}))
	require.True(t, agenterrors.IsUnavailable(err))
	require.ErrorContains(t, err, "other.hub.svc")

	unnamed := *files
	unnamed.ServerName = ""
	err = getStatus(t.Context(), connect(t, client.Options{Address: agent.address, TLS: &unnamed}))
	require.True(t, agenterrors.IsUnavailable(err), "the certificate does not carry the address: %v", err)

	strange := *files
	strange.CAFile = filepath.Join(t.TempDir(), "ca.crt")
	write(t, strange.CAFile, newAuthority(t).pem())
	err = getStatus(t.Context(), connect(t, client.Options{Address: agent.address, TLS: &strange}))
	require.True(t, agenterrors.IsUnavailable(err))
}

func TestRotatedFilesAreUsedWithoutRestart(t *testing.T) {
	first := newAuthority(t)
	agent, files := serveTLS(t, first), inFolder(t)
	install(t, first, files, 7)
	c := connect(t, client.Options{Address: agent.address, TLS: files})
	require.NoError(t, getStatus(t.Context(), c))
	require.EqualValues(t, 7, agent.lastSeen())

	second := newAuthority(t)
	agent.identify(t, second)
	install(t, second, files, 8)
	agent.disconnect()
	require.Eventually(t, func() bool {
		return getStatus(t.Context(), c) == nil && agent.lastSeen() == 8
	}, patience, 10*time.Millisecond)
}

func TestFilesMayComeLater(t *testing.T) {
	ca := newAuthority(t)
	agent, files := serveTLS(t, ca), inFolder(t)
	c := connect(t, client.Options{Address: agent.address, TLS: files})
	err := getStatus(t.Context(), c)
	require.True(t, agenterrors.IsUnavailable(err), "%v", err)
	require.ErrorContains(t, err, filepath.Dir(files.CAFile), "the error names the file")

	install(t, ca, files, 9)
	require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, 10*time.Millisecond)
}

func TestFilesThatAreReplacedAreLoggedWithoutTheirContent(t *testing.T) {
	ca := newAuthority(t)
	agent, files := serveTLS(t, ca), inFolder(t)
	install(t, ca, files, 7)
	var lines logged
	c := connect(t, client.Options{Address: agent.address, TLS: files, Logger: funcr.New(func(_, line string) {
		_, _ = lines.Write([]byte(line))
	}, funcr.Options{Verbosity: 9})})
	require.NoError(t, getStatus(t.Context(), c))
	require.WithinDuration(t, time.Now().Add(time.Hour), c.Certificates().CertificateNotAfter, time.Minute)
	require.WithinDuration(t, time.Now().Add(time.Hour), c.Certificates().AuthoritiesNotAfter, time.Minute)
	// The key has already been replaced, but not its certificate.
	_, key := ca.issue(8, "")
	write(t, files.KeyFile, key)
	require.Eventually(t, func() bool { return c.Certificates().CertificateErrors > 0 }, patience, time.Millisecond)
	agent.disconnect()
	require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, 10*time.Millisecond)
	require.EqualValues(t, 7, agent.lastSeen(), "the last usable ones stay in force")
	require.Contains(t, lines.String(), files.KeyFile, "which files cannot be used is logged")
	secret := strings.Split(string(key), "\n")[1]
	require.NotContains(t, lines.String(), secret)
	require.NotContains(t, grpcLog.String(), secret)
	require.NotContains(t, grpcLog.String(), "PRIVATE KEY-")
}

func TestTLSBefore13IsRefused(t *testing.T) {
	ca := newAuthority(t)
	agent, files := serveTLS(t, ca), inFolder(t)
	agent.config.MaxVersion = tls.VersionTLS12
	install(t, ca, files, 7)
	err := getStatus(t.Context(), connect(t, client.Options{Address: agent.address, TLS: files}))
	require.ErrorContains(t, err, "protocol version")
	require.True(t, agenterrors.IsUnavailable(err))
}

// held returns the PEM data of a client.
func (a *authority) held(serial int64) certificates.PEM {
	a.t.Helper()
	certificate, key := a.issue(serial, "")
	return certificates.PEM{Certificate: certificate, Key: key, Authorities: a.pem()}
}

func TestASourceStandsInForFiles(t *testing.T) {
	ca := newAuthority(t)
	agent, source := serveTLS(t, ca), certificates.NewHeld(errors.New("onboard the Cluster"))
	c := connect(t, client.Options{Address: agent.address, TLS: &client.TLS{Source: source, ServerName: serverName}})
	err := getStatus(t.Context(), c)
	require.True(t, agenterrors.IsUnavailable(err), "%v", err)
	require.ErrorContains(t, err, "onboard the Cluster")

	require.NoError(t, source.Hold(ca.held(7)))
	require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, 10*time.Millisecond)
	require.EqualValues(t, 7, agent.lastSeen())
	require.Equal(t, source.Stats(), c.Certificates())
}

// The agent ends no connection here: the client switches by itself.
func TestANewCertificateIsUsedWithoutAFailedCall(t *testing.T) {
	ca := newAuthority(t)
	agent, source := serveTLS(t, ca), certificates.NewHeld(nil)
	require.NoError(t, source.Hold(ca.held(1)))
	c := connect(t, client.Options{Address: agent.address, TLS: &client.TLS{Source: source, ServerName: serverName}})
	require.NoError(t, getStatus(t.Context(), c))

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := c.NodeGroups.WatchNodeGroups(ctx, &agentv1alpha1.WatchNodeGroupsRequest{Cluster: fakeagent.DefaultCluster()})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)

	var calling errgroup
	for range 4 {
		calling.Go(func() error {
			for ctx.Err() == nil {
				if err := getStatus(t.Context(), c); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for serial := int64(2); serial <= 4; serial++ {
		require.NoError(t, source.Hold(ca.held(serial)))
		require.Eventually(t, func() bool { return agent.lastSeen() == serial }, patience, time.Millisecond)
	}
	require.Eventually(t, func() bool { return agent.open() == 2 }, patience, time.Millisecond, "those without calls are closed, and not the stream's")
	cancel()
	require.NoError(t, calling.Wait())
	require.Eventually(t, func() bool { return agent.open() == 1 }, patience, time.Millisecond, "the stream has ended")
}

func TestANewCertificateThatTheAgentDoesNotAcceptBreaksNothing(t *testing.T) {
	ca := newAuthority(t)
	agent, source := serveTLS(t, ca), certificates.NewHeld(nil)
	require.NoError(t, source.Hold(ca.held(1)))
	inUse := source.Stats()
	clk := clocktesting.NewFakeClock(time.Now())
	c := connect(t, client.Options{Address: agent.address, TLS: &client.TLS{Source: source, ServerName: serverName}, Clock: clk})
	require.NoError(t, getStatus(t.Context(), c))

	require.NoError(t, source.Hold(ca.strange(2)))
	before := agent.tries()
	require.Eventually(t, func() bool {
		require.NoError(t, getStatus(t.Context(), c))
		return agent.tries() > before+1
	}, patience, time.Millisecond)
	require.NoError(t, getStatus(t.Context(), c))
	require.EqualValues(t, 1, agent.lastSeen())
	require.NoError(t, c.CertificateRefused(), "a single attempt may fail for another reason")
	require.Greater(t, source.Stats().CertificateNotAfter, inUse.CertificateNotAfter.Add(time.Hour))
	require.Equal(t, inUse.CertificateNotAfter, c.Certificates().CertificateNotAfter, "of the certificate in use, which ends first")
	require.Equal(t, inUse.CertificateNotBefore, c.Certificates().CertificateNotBefore)

	isRefused(t, c, clk)
	require.EqualValues(t, 1, agent.lastSeen())

	require.NoError(t, source.Hold(ca.held(3)))
	require.Eventually(t, func() bool {
		require.NoError(t, getStatus(t.Context(), c))
		return agent.lastSeen() == 3
	}, patience, time.Millisecond)
	require.Eventually(t, func() bool {
		require.NoError(t, getStatus(t.Context(), c))
		return c.Certificates() == source.Stats()
	}, patience, time.Millisecond)
	require.NoError(t, c.CertificateRefused())
}

// isRefused makes calls, which must succeed, and advances the clock until the client reports that
// its new certificate is of an authority that the agent does not trust.
func isRefused(t *testing.T, c *client.Client, clk *clocktesting.FakeClock) {
	t.Helper()
	require.Eventually(t, func() bool {
		require.NoError(t, getStatus(t.Context(), c))
		clk.Step(time.Second)
		return c.CertificateRefused() != nil
	}, patience, 10*time.Millisecond)
	require.ErrorContains(t, c.CertificateRefused(), "unknown certificate authority")
}

// strange returns a client certificate of an authority that the agent does not trust.
func (a *authority) strange(serial int64) certificates.PEM {
	a.t.Helper()
	other := newAuthority(a.t)
	other.life = 3 * time.Hour
	strange := other.held(serial)
	strange.Authorities = a.pem()
	return strange
}

// The agent accepts the certificates of other Clusters, and of onboardings, too: they have the same
// authority.
func TestANewCertificateThatIsNotForTheClusterBreaksNothing(t *testing.T) {
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	issued := func(path string) certificates.PEM {
		certificate, key, err := authority.IssueClient("spiffe://karpenter-capi" + path)
		require.NoError(t, err)
		return certificates.PEM{Certificate: certificate, Key: key, Authorities: authority.PEM()}
	}
	certificate, key, err := authority.IssueServer(serverName)
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	require.NoError(t, err)
	for name, path := range map[string]string{
		"another Cluster's":   "/cluster/default/other",
		"for the first start": "/bootstrap/default/workload/4f2a",
	} {
		t.Run(name, func(t *testing.T) {
			agent, source := fakeagent.New(), certificates.NewHeld(nil)
			t.Cleanup(agent.Close)
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			agent.ServeTLS(listener, &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: authority.Pool()},
				func(string) []fakeagent.Grant { return nil })
			require.NoError(t, source.Hold(issued("/cluster/default/workload")))
			c := connect(t, client.Options{Address: listener.Addr().String(), TLS: &client.TLS{
				Source: source, ServerName: serverName, Cluster: fakeagent.DefaultCluster(),
			}})
			works := func() {
				t.Helper()
				_, err := c.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: fakeagent.DefaultCluster()})
				require.NoError(t, err)
			}
			works()
			require.NoError(t, source.Hold(issued(path)))
			require.Eventually(t, func() bool { works(); return c.CertificateRefused() != nil }, patience, time.Millisecond)
			works()
			require.ErrorContains(t, c.CertificateRefused(), "default/workload")
			require.True(t, agenterrors.IsPermissionDenied(c.CertificateRefused()))

			require.NoError(t, source.Hold(issued("/cluster/default/workload")))
			require.Eventually(t, func() bool { works(); return c.CertificateRefused() == nil }, patience, time.Millisecond)
		})
	}
}

// The new certificate is rejected by TLS, and the connection with the previous one is lost.
func TestALostConnectionIsMadeAgainWithTheCertificateThatWasAccepted(t *testing.T) {
	ca := newAuthority(t)
	agent, source := serveTLS(t, ca), certificates.NewHeld(nil)
	require.NoError(t, source.Hold(ca.held(1)))
	clk := clocktesting.NewFakeClock(time.Now())
	c := connect(t, client.Options{Address: agent.address, TLS: &client.TLS{Source: source, ServerName: serverName}, Clock: clk})
	require.NoError(t, getStatus(t.Context(), c))
	require.NoError(t, source.Hold(ca.strange(2)))
	require.NoError(t, getStatus(t.Context(), c))
	accepted := agent.accepted()

	for range 3 {
		agent.disconnect()
		require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, time.Millisecond)
		require.Greater(t, agent.accepted(), accepted, "it is another connection")
		accepted = agent.accepted()
		require.EqualValues(t, 1, agent.lastSeen())
	}
	isRefused(t, c, clk)

	t.Log("the former certificate ends: calls fail, and say why")
	clk.Step(2 * time.Hour)
	agent.disconnect()
	require.Eventually(t, func() bool {
		err := getStatus(t.Context(), c)
		return agenterrors.IsUnavailable(err) && strings.Contains(err.Error(), "unknown certificate authority")
	}, patience, time.Millisecond)
	require.Equal(t, accepted, agent.accepted())

	t.Log("one that is accepted is used at once")
	require.NoError(t, source.Hold(ca.held(3)))
	require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, time.Millisecond)
	require.EqualValues(t, 3, agent.lastSeen())
	require.NoError(t, c.CertificateRefused())
}

// The agent no longer trusts the authority of the previous certificate.
func TestALostConnectionIsReplacedByOneWithTheNewCertificate(t *testing.T) {
	first, second := newAuthority(t), newAuthority(t)
	agent, source := serveTLS(t, first), certificates.NewHeld(nil)
	require.NoError(t, source.Hold(first.held(1)))
	c := connect(t, client.Options{Address: agent.address, TLS: &client.TLS{Source: source, ServerName: serverName}})
	require.NoError(t, getStatus(t.Context(), c))
	require.NoError(t, getStatus(t.Context(), c))
	agent.identify(t, second)
	require.NoError(t, source.Hold(second.held(2)))
	agent.disconnect()
	require.Eventually(t, func() bool { return getStatus(t.Context(), c) == nil }, patience, time.Millisecond)
	require.EqualValues(t, 2, agent.lastSeen())
}

func TestAClosedClientAnswersThatItIs(t *testing.T) {
	ca := newAuthority(t)
	agent, source := serveTLS(t, ca), certificates.NewHeld(nil)
	require.NoError(t, source.Hold(ca.held(1)))
	c := connect(t, client.Options{Address: agent.address, TLS: &client.TLS{Source: source, ServerName: serverName}})
	require.NoError(t, getStatus(t.Context(), c))
	require.NoError(t, source.Hold(ca.held(2)))
	require.NoError(t, getStatus(t.Context(), c)) // another connection is being made
	require.NoError(t, c.Close())
	require.Error(t, getStatus(t.Context(), c))
}

// errgroup returns the first error of its functions.
type errgroup struct {
	running sync.WaitGroup
	once    sync.Once
	err     error
}

func (g *errgroup) Go(f func() error) {
	g.running.Go(func() {
		if err := f(); err != nil {
			g.once.Do(func() { g.err = err })
		}
	})
}

func (g *errgroup) Wait() error {
	g.running.Wait()
	return g.err
}
