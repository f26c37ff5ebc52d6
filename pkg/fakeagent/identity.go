package fakeagent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// TrustDomain is the trust domain of the identities that [Agent.ClientFor] uses, unless
// [WithTrustDomain] sets another one.
const TrustDomain = "karpenter-capi"

// identity is the identity of the other side of a connection. It determines what the connection may
// do.
type identity struct {
	credentials.CommonAuthInfo

	name   string
	grants []Grant
	// own is set if the client certificate is a Cluster's own. It is nil for every other identity.
	own *ownIdentity
	// until is when the client certificate expires. It is zero without one.
	until time.Time
	// problem is why the client certificate gives no identity. It is empty if it gives one.
	problem string
}

// ownIdentity is a Cluster, and the onboarding of its certificate, which may be empty.
type ownIdentity struct {
	cluster    clusterKey
	onboarding string
}

func everyRight() []Grant { return []Grant{{Role: RoleAdmin, AllClusters: true}} }

func localIdentity() identity { return identity{name: "loopback", grants: everyRight()} }

// clusterIdentity returns the own identity of a Cluster.
func clusterIdentity(domain string, key clusterKey) Identity {
	return Identity{
		ID:     fmt.Sprintf("spiffe://%s/cluster/%s", domain, key),
		Grants: []Grant{{Role: RoleCluster, Clusters: []string{key.String()}}},
	}
}

func (identity) AuthType() string { return "fake" }

func callerOf(ctx context.Context) (identity, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return identity{}, agenterrors.Unauthenticated("the connection has no identity")
	}
	i, ok := p.AuthInfo.(identity)
	switch {
	case !ok:
		return identity{}, agenterrors.Unauthenticated("the connection has no identity")
	case i.problem != "":
		return identity{}, agenterrors.Unauthenticated(i.problem)
	}
	return i, nil
}

// admit rejects callers that may not call the method for any Cluster.
func (a *Agent) admit(ctx context.Context, method string) error {
	rule, known := a.rules[method]
	if !known {
		return agenterrors.PermissionDenied("no role may call this method")
	}
	if rule.Anyone {
		return nil
	}
	caller, err := callerOf(ctx)
	switch {
	case err != nil:
		return err
	case !caller.until.IsZero() && a.now().After(caller.until):
		return agenterrors.Unauthenticated("the client certificate has expired at " + caller.until.UTC().Format(time.RFC3339))
	case !caller.mayCall(rule):
		return agenterrors.PermissionDenied("this identity may not call this method")
	}
	return nil
}

// authorize rejects requests for Clusters that the caller may not call the method for, whether or
// not they exist.
func (a *Agent) authorize(ctx context.Context, method string, request any) error {
	rule := a.rules[method]
	if !rule.OfCluster() && !rule.OfAnyCluster {
		return nil
	}
	caller, err := callerOf(ctx)
	if err != nil {
		return err
	}
	if rule.OfAnyCluster {
		return a.onboarded(caller)
	}
	scoped, ok := request.(interface {
		GetCluster() *agentv1alpha1.ClusterRef
	})
	if !ok || scoped.GetCluster() == nil {
		return agenterrors.PermissionDenied("the request names no Cluster")
	}
	cluster := keyOf(scoped.GetCluster())
	if !caller.mayCallFor(rule, cluster) {
		return errNotYours()
	}
	if err := a.onboarded(caller); err != nil {
		return err
	}
	if held, ok := request.(interface{ GetHolder() string }); rule.AsHolder && (!ok || !caller.mayActAs(cluster, held.GetHolder())) {
		return errNotYourHolder(held.GetHolder())
	}
	return nil
}

// onboarded returns an error if the caller's certificate is of an onboarding that is not its
// Cluster's current one.
func (a *Agent) onboarded(caller identity) error {
	if caller.own == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.onboardings[caller.own.cluster] != caller.own.onboarding {
		return agenterrors.Unauthenticated("the client certificate does not belong to the Cluster's current onboarding")
	}
	return nil
}

func errNotYours() error {
	return agenterrors.PermissionDenied("the identity may not call this method for this Cluster")
}

func errNotYourHolder(holder string) error {
	return agenterrors.PermissionDenied(fmt.Sprintf("the identity may not act as the holder %q", holder))
}

func (a *Agent) admitUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := a.admit(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

func (a *Agent) admitStream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := a.admit(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return handler(server, stream)
}

// authorizeUnary runs after the validation: only a valid request is known to name its Cluster.
func (a *Agent) authorizeUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := a.authorize(ctx, info.FullMethod, request); err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

func (a *Agent) authorizeStream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return handler(server, &authorizedStream{ServerStream: stream, agent: a, method: info.FullMethod})
}

type authorizedStream struct {
	grpc.ServerStream

	agent  *Agent
	method string
}

func (s *authorizedStream) RecvMsg(message any) error {
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	return s.agent.authorize(s.Context(), s.method, message)
}

// identifiedListener assigns an identity to every accepted connection.
type identifiedListener struct {
	net.Listener

	identity identity
}

func (l identifiedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return identifiedConn{Conn: conn, handshake: func(conn net.Conn) (net.Conn, identity, error) { return conn, l.identity, nil }}, nil
}

// certifiedListener accepts connections with TLS. The identity of each is that of its client
// certificate.
type certifiedListener struct {
	net.Listener

	credentials credentials.TransportCredentials
	domain      string
	grants      func(id string) []Grant
}

func newCertifiedListener(listener net.Listener, config *tls.Config, domain string, grants func(id string) []Grant) certifiedListener {
	config = config.Clone()
	config.MinVersion, config.ClientAuth = tls.VersionTLS13, tls.RequireAndVerifyClientCert
	return certifiedListener{Listener: listener, credentials: credentials.NewTLS(config), domain: domain, grants: grants}
}

func (l certifiedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return identifiedConn{Conn: conn, handshake: l.handshake}, nil
}

func (l certifiedListener) handshake(conn net.Conn) (net.Conn, identity, error) {
	secured, info, err := l.credentials.ServerHandshake(conn)
	if err != nil {
		return nil, identity{}, err
	}
	handshake, ok := info.(credentials.TLSInfo)
	if !ok || len(handshake.State.PeerCertificates) == 0 {
		return secured, identity{problem: "the connection has no verified client certificate"}, nil
	}
	return secured, l.identify(handshake.State.PeerCertificates[0]), nil
}

// identify returns the identity of a verified client certificate, from the single URI in it. The
// URI is a Cluster's own, or has been granted roles.
//
//	spiffe://<trust domain>/cluster/<namespace>/<name>[/<onboarding>]
//	spiffe://<trust domain>/bootstrap/<namespace>/<name>/<onboarding>
func (l certifiedListener) identify(certificate *x509.Certificate) identity {
	wrong := func(format string, args ...any) identity { return identity{problem: fmt.Sprintf(format, args...)} }
	if len(certificate.URIs) != 1 {
		return wrong("the client certificate has %d URI names; exactly one, a SPIFFE id, is needed", len(certificate.URIs))
	}
	id := certificate.URIs[0]
	if err := checkSPIFFE(id); err != nil {
		return wrong("the client certificate's URI is not a SPIFFE id: %v", err)
	}
	if id.Host != l.domain {
		return wrong("the client certificate's trust domain is %q, not %q", id.Host, l.domain)
	}
	i := identity{name: id.String(), until: certificate.NotAfter}
	parts := strings.Split(strings.TrimPrefix(id.Path, "/"), "/")
	role := map[string]Role{"cluster": RoleCluster, "bootstrap": RoleBootstrap}[parts[0]]
	if role == RoleCluster && len(parts) == 3 || role != "" && len(parts) == 4 {
		i.own = &ownIdentity{cluster: clusterKey{namespace: parts[1], name: parts[2]}}
		if len(parts) == 4 {
			i.own.onboarding, i.name = parts[3], strings.TrimSuffix(i.name, "/"+parts[3])
		}
		i.grants = append(i.grants, Grant{Role: role, Clusters: []string{i.own.cluster.String()}})
	}
	i.grants = append(i.grants, l.grants(i.name)...)
	return i
}

func checkSPIFFE(id *url.URL) error {
	switch {
	case id.Scheme != "spiffe":
		return fmt.Errorf("its scheme is %q", id.Scheme)
	case id.Host == "" || id.User != nil || id.Port() != "":
		return errors.New("it needs a trust domain, without user and port")
	case id.RawQuery != "" || id.Fragment != "":
		return errors.New("it has a query or a fragment")
	}
	for part := range strings.SplitSeq(strings.TrimPrefix(id.Path, "/"), "/") {
		if part == "" || part == "." || part == ".." {
			return fmt.Errorf("its path %q has an empty or relative segment", id.Path)
		}
	}
	return nil
}

type identifiedConn struct {
	net.Conn

	handshake func(net.Conn) (net.Conn, identity, error)
}

// identityCredentials takes the identity of a connection from its listener. Any other connection is
// local.
type identityCredentials struct{}

func (identityCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if identified, ok := conn.(identifiedConn); ok {
		return identified.handshake(identified.Conn)
	}
	return conn, localIdentity(), nil
}

func (identityCredentials) ClientHandshake(
	_ context.Context, _ string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	return conn, localIdentity(), nil
}

func (identityCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "fake"}
}

func (c identityCredentials) Clone() credentials.TransportCredentials { return c }

func (identityCredentials) OverrideServerName(string) error { return nil }

// clusterKey is a comparable ClusterRef.
type clusterKey struct{ namespace, name string }

func keyOf(ref *agentv1alpha1.ClusterRef) clusterKey {
	return clusterKey{namespace: ref.GetNamespace(), name: ref.GetName()}
}

func (k clusterKey) String() string { return k.namespace + "/" + k.name }

func (k clusterKey) ref() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: k.namespace, Name: k.name}
}
