package identity

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	trustDomain = "karpenter-capi"
	serverName  = "capi-agent.hub.svc"
	lifetime    = 24 * time.Hour
)

// authority is a certificate authority.
type authority struct {
	t           *testing.T
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	clock       clock.PassiveClock
}

func newAuthority(t *testing.T, clk clock.PassiveClock) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: clk.Now().Add(-time.Hour), NotAfter: clk.Now().Add(1000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	certificate, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &authority{t: t, certificate: certificate, key: key, clock: clk}
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw})
}

// sign returns a client certificate, PEM.
func (a *authority) sign(key crypto.PublicKey, path string, lifetime time.Duration) []byte {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(a.t, err)
	template := &x509.Certificate{
		SerialNumber: serial, NotBefore: a.clock.Now().Add(-time.Minute), NotAfter: a.clock.Now().Add(lifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		URIs: []*url.URL{{Scheme: "spiffe", Host: trustDomain, Path: path}},
	}
	if path == "" {
		template.URIs, template.DNSNames, template.ExtKeyUsage = nil, []string{serverName}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key, a.key)
	require.NoError(a.t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// agent issues certificates over TLS like a real agent.
type agent struct {
	agentv1alpha1.UnimplementedCertificateServiceServer
	agentv1alpha1.UnimplementedNodeGroupServiceServer

	t         *testing.T
	authority *authority
	clock     clock.PassiveClock
	address   string
	server    *grpc.Server

	mu         sync.Mutex
	onboarding string
	enrolled   map[string]string // fingerprint of the key, by onboarding
	requests   []request
	last       *x509.Certificate // with which node groups were last listed
	// before and after are called for each request, before and after it takes effect. An error
	// becomes the answer.
	before, after func() error
	issue         func(of string) string // returns the path of the certificate to issue; nil issues the Cluster's
}

// request is a served request.
type request struct {
	by, key string // the caller's path, and the key's fingerprint
}

func serve(t *testing.T, clk clock.PassiveClock) *agent {
	t.Helper()
	a := &agent{t: t, authority: newAuthority(t, clk), clock: clk, enrolled: map[string]string{}}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(a.authority.sign(key.Public(), "", 900*time.Hour),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}))
	require.NoError(t, err)
	clients := x509.NewCertPool()
	clients.AddCert(a.authority.certificate)
	a.server = grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients, Time: clk.Now,
	})))
	agentv1alpha1.RegisterCertificateServiceServer(a.server, a)
	agentv1alpha1.RegisterNodeGroupServiceServer(a.server, a)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	a.address = listener.Addr().String()
	served := make(chan struct{})
	go func() { defer close(served); _ = a.server.Serve(listener) }()
	t.Cleanup(func() { a.server.Stop(); <-served })
	return a
}

// caller returns the path of the caller's identity, or none if its certificate has expired since
// the handshake.
func (a *agent) caller(ctx context.Context) (string, *x509.Certificate) {
	p, _ := peer.FromContext(ctx)
	certificate := p.AuthInfo.(credentials.TLSInfo).State.PeerCertificates[0] //nolint:forcetypeassert // it is served over TLS only
	if a.clock.Now().After(certificate.NotAfter) {
		return "expired", certificate
	}
	return certificate.URIs[0].Path, certificate
}

func fingerprint(t *testing.T, key crypto.PublicKey) string {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key)
	require.NoError(t, err)
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// ListNodeGroups is a call for a Cluster, and therefore refuses every onboarding but the present
// one.
func (a *agent) ListNodeGroups(
	ctx context.Context, r *agentv1alpha1.ListNodeGroupsRequest,
) (*agentv1alpha1.ListNodeGroupsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	by, certificate := a.caller(ctx)
	if by != "/cluster/"+nameOf(r.GetCluster())+"/"+a.onboarding {
		return nil, agenterrors.Unauthenticated("of another onboarding, or expired")
	}
	a.last = certificate
	return &agentv1alpha1.ListNodeGroupsResponse{}, nil
}

func (a *agent) IssueCertificate(
	ctx context.Context, r *agentv1alpha1.IssueCertificateRequest,
) (*agentv1alpha1.IssueCertificateResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	signing, err := x509.ParseCertificateRequest(r.GetSigningRequest())
	if err != nil || signing.CheckSignature() != nil {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: "unusable"})
	}
	by, _ := a.caller(ctx)
	key := fingerprint(a.t, signing.PublicKey)
	a.requests = append(a.requests, request{by: by, key: key})
	if a.before != nil {
		if err := a.before(); err != nil {
			return nil, err
		}
	}
	switch by {
	case "/cluster/team-a/production/" + a.onboarding:
	case "/bootstrap/team-a/production/" + a.onboarding:
		if first := a.enrolled[a.onboarding]; first != "" && first != key {
			return nil, agenterrors.PermissionDenied("the bootstrap certificate has been used for another key")
		}
		a.enrolled[a.onboarding] = key
	default:
		return nil, agenterrors.Unauthenticated("the client certificate does not belong to the Cluster's current onboarding")
	}
	path := "/cluster/team-a/production/" + a.onboarding
	if a.issue != nil {
		path = a.issue(a.onboarding)
	}
	issued := a.authority.sign(signing.PublicKey, path, lifetime)
	if a.after != nil {
		if err := a.after(); err != nil {
			return nil, err
		}
	}
	now := a.clock.Now()
	return &agentv1alpha1.IssueCertificateResponse{
		CertificateChain: issued, ServerAuthorities: a.authority.pem(),
		NotAfter: timestamppb.New(now.Add(lifetime)), RenewAt: timestamppb.New(now.Add(lifetime / 2)),
	}, nil
}

// onboard starts a new onboarding of the Cluster, and returns the content of the bootstrap secret.
func (a *agent) onboard(id string) map[string][]byte {
	a.t.Helper()
	a.mu.Lock()
	a.onboarding = id
	a.mu.Unlock()
	return a.certified("/bootstrap/team-a/production/"+id, time.Hour)
}

// certified returns the content of a secret with a certificate and its key.
func (a *agent) certified(path string, lifetime time.Duration) map[string][]byte {
	a.t.Helper()
	key, encoded, err := newKey()
	require.NoError(a.t, err)
	return map[string][]byte{"tls.crt": a.authority.sign(key.Public(), path, lifetime), "tls.key": encoded, "ca.crt": a.authority.pem()}
}

// answers makes each request fail before or after it takes effect. Nil errors revert that.
func (a *agent) answers(before, after error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.before, a.after = func() error { return before }, func() error { return after }
}

func (a *agent) served() []request {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]request(nil), a.requests...)
}

// lost stands for an answer lost in the network. It is not UNAVAILABLE, which the client would
// retry itself.
var lost = status.Error(codes.DeadlineExceeded, "lost")

// seen returns the certificate with which node groups were last listed.
func (a *agent) seen() *x509.Certificate {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.last
}
