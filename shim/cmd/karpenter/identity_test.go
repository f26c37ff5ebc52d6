package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/options"
)

// issuer issues certificates of the onboarding "first" to clients that present its bootstrap
// certificate.
type issuer struct {
	agentv1alpha1.UnimplementedCertificateServiceServer

	s         *spoke
	authority *x509.Certificate
	key       *ecdsa.PrivateKey
	issued    atomic.Int32
}

// listenTLS makes the agent reachable with client certificates only: the issuer with a bootstrap
// certificate, everything else with another.
func (s *spoke) listenTLS() *issuer {
	s.t.Helper()
	i := &issuer{s: s}
	i.authority, i.key = s.sign(nil, nil, func(c *x509.Certificate) {
		c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, x509.KeyUsageCertSign
	})
	server, serverKey := s.sign(i.authority, i.key, func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} })
	clients := x509.NewCertPool()
	clients.AddCert(i.authority)
	listener, err := net.Listen("tcp", s.address)
	require.NoError(s.t, err)
	ended := s.t.Context().Done()
	bootstraps, others := &handed{listener, make(chan net.Conn), ended}, &handed{listener, make(chan net.Conn), ended}
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
		Certificates: []tls.Certificate{{Certificate: [][]byte{server.Raw}, PrivateKey: serverKey}},
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			raw, err := listener.Accept()
			if err != nil {
				return
			}
			accepting.Go(func() {
				conn := tls.Server(raw, config)
				if conn.HandshakeContext(s.t.Context()) != nil {
					_ = conn.Close()
					return
				}
				to := others
				if strings.HasPrefix(conn.ConnectionState().PeerCertificates[0].URIs[0].Path, "/bootstrap/") {
					to = bootstraps
				}
				select {
				case to.conns <- conn:
				case <-ended:
					_ = conn.Close()
				}
			})
		}
	})
	issuing := grpc.NewServer()
	agentv1alpha1.RegisterCertificateServiceServer(issuing, i)
	accepting.Go(func() { _ = issuing.Serve(bootstraps) })
	s.agent.Serve(others)
	s.t.Cleanup(func() {
		issuing.Stop()
		_ = listener.Close()
		accepting.Wait()
	})
	return i
}

// handed is a listener whose connections are passed to it.
type handed struct {
	net.Listener

	conns chan net.Conn
	ended <-chan struct{}
}

func (h *handed) Accept() (net.Conn, error) {
	select {
	case conn := <-h.conns:
		return conn, nil
	case <-h.ended:
		return nil, net.ErrClosed
	}
}

// secret returns the content of a secret with a client certificate for the path.
func (i *issuer) secret(path string) map[string][]byte {
	i.s.t.Helper()
	certificate, private := i.s.sign(i.authority, i.key, func(c *x509.Certificate) { forClient(c, path) })
	key, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(i.s.t, err)
	return map[string][]byte{
		"tls.crt": encode("CERTIFICATE", certificate.Raw), "tls.key": encode("PRIVATE KEY", key), "ca.crt": encode("CERTIFICATE", i.authority.Raw),
	}
}

func (i *issuer) IssueCertificate(
	_ context.Context, r *agentv1alpha1.IssueCertificateRequest,
) (*agentv1alpha1.IssueCertificateResponse, error) {
	request, err := x509.ParseCertificateRequest(r.GetSigningRequest())
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(int64(i.issued.Add(1))), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
	}
	forClient(template, "/cluster/default/workload/first")
	der, err := x509.CreateCertificate(rand.Reader, template, i.authority, request.PublicKey, i.key)
	if err != nil {
		return nil, err
	}
	return &agentv1alpha1.IssueCertificateResponse{
		CertificateChain: encode("CERTIFICATE", der), ServerAuthorities: encode("CERTIFICATE", i.authority.Raw),
		NotAfter: timestamppb.New(template.NotAfter), RenewAt: timestamppb.New(time.Now().Add(30 * time.Minute)),
	}, nil
}

// forClient makes the certificate a client's.
func forClient(c *x509.Certificate, path string) {
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	c.URIs = []*url.URL{{Scheme: "spiffe", Host: "karpenter-capi", Path: path}}
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// sign returns a certificate and its key. Without an authority it is self-signed.
func (s *spoke) sign(authority *x509.Certificate, by *ecdsa.PrivateKey, change func(*x509.Certificate)) (*x509.Certificate, *ecdsa.PrivateKey) {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(s.t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(s.t, err)
	template := &x509.Certificate{SerialNumber: serial, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	change(template)
	if authority == nil {
		authority, by = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, authority, key.Public(), by)
	require.NoError(s.t, err)
	certificate, err := x509.ParseCertificate(der)
	require.NoError(s.t, err)
	return certificate, key
}

func TestTheIdentityComesFromASecret(t *testing.T) {
	s := newSpoke(t, group("a"))
	issuer := s.listenTLS()
	s.pool()

	t.Log("without a certificate the process waits, and reports for what")
	s.start("--agent-plaintext-loopback=false", "--agent-identity-secret=default/identity")
	s.ready(metav1.ConditionFalse)
	reachable := s.nodeClass().StatusConditions().Get(v1alpha1.ConditionAgentReachable)
	assert.Contains(t, reachable.Message, "waiting for the secret default/karpenter-agent-bootstrap, which `capi-agent onboard` writes for the Cluster "+
		"default/workload")

	t.Log("it goes on with the one that is there then")
	s.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "identity"}, Data: issuer.secret("/cluster/default/workload/first"),
	})
	s.ready(metav1.ConditionTrue)
	assert.Zero(t, issuer.issued.Load())
}

// This is the chart's setup: the Job is installed instead of Karpenter, and the identity secret
// exists and is empty.
func TestThePlanNeedsNoKarpenterThatHasRun(t *testing.T) {
	s := newSpoke(t, group("b"))
	issuer := s.listenTLS()
	s.pool()
	t.Setenv("KUBECONFIG", s.kubeconfig)
	identity := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "identity"}}
	s.create(identity)
	bootstrap := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "karpenter-agent-bootstrap"},
		Data:       issuer.secret("/bootstrap/default/workload/first"),
	}
	s.create(bootstrap)
	planned := func() error {
		var text bytes.Buffer
		err := plan(t.Context(), []string{
			"--agent-address=" + s.address, "--agent-identity-secret=default/identity", "--cluster-namespace=default", "--cluster-name=workload",
		}, &text)
		assert.Equal(t, err == nil, text.Len() > 0)
		return err
	}
	require.NoError(t, planned())
	require.NoError(t, s.get(identity))
	assert.NotEmpty(t, identity.Data["tls.crt"])
	first := identity.ResourceVersion

	t.Log("the next one, and Karpenter, go on with the certificate")
	require.NoError(t, planned())
	s.start("--agent-plaintext-loopback=false", "--agent-identity-secret=default/identity")
	s.ready(metav1.ConditionTrue)
	require.NoError(t, s.get(identity))
	assert.Equal(t, first, identity.ResourceVersion)
	assert.EqualValues(t, 1, issuer.issued.Load())

	t.Log("a bootstrap certificate that cannot be used is reported at once")
	require.NoError(t, s.Delete(t.Context(), identity))
	bootstrap.Data = issuer.secret("/bootstrap/default/another/first")
	require.NoError(t, s.Update(t.Context(), bootstrap))
	require.ErrorContains(t, planned(), "its certificate is for the Cluster default/another")
}

// The agent accepts the certificates of other Clusters, too.
func TestANewCertificateHasToBeForTheCluster(t *testing.T) {
	for name, opts := range map[string]*options.Options{
		"from files":    {AgentTLSCertFile: "tls.crt", AgentTLSKeyFile: "tls.key", AgentCAFile: "ca.crt"},
		"from a secret": {AgentIdentitySecret: types.NamespacedName{Namespace: "karpenter", Name: "identity"}},
	} {
		t.Run(name, func(t *testing.T) {
			opts.ClusterNamespace, opts.ClusterName = "team-a", "production"
			cluster := agentOptions(t.Context(), opts, certificates.NewHeld(nil)).TLS.Cluster
			require.Equal(t, "team-a", cluster.GetNamespace())
			require.Equal(t, "production", cluster.GetName())
		})
	}
}
