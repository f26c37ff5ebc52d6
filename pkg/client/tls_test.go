package client_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
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

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
)

const serverName = "capi-agent.hub.svc"

// authority is a certificate authority of the test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
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
	return &authority{t: t, cert: cert, key: key}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// issue returns a certificate and its key, PEM. A name makes it a server's, none a client's.
func (a *authority) issue(serial int64, name string) (certificate, key []byte) {
	a.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial),
		NotBefore:    time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
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

// identify gives the agent a certificate of the authority, which it also trusts for clients.
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

// disconnect breaks every connection.
func (s *tlsAgent) disconnect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
	s.conns = nil
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
	return conn, nil
}

// write replaces a file in one step.
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
	// The key is there already, its certificate is not.
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
