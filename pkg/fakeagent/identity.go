package fakeagent

import (
	"context"
	"fmt"
	"net"
	"strings"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/test/bufconn"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// TrustDomain is the trust domain of the identities that [Agent.ClientFor] uses.
const TrustDomain = "karpenter-capi"

// identity determines what a connection may do: everything if cluster is nil.
type identity struct {
	credentials.CommonAuthInfo

	name       string
	cluster    *clusterKey
	autoscaler bool // rather than the Cluster's own
}

func localIdentity() identity { return identity{name: "loopback"} }

func clusterIdentity(key clusterKey) identity {
	return identity{
		name:    fmt.Sprintf("spiffe://%s/cluster/%s/%s", TrustDomain, key.namespace, key.name),
		cluster: &key,
	}
}

func autoscalerIdentity(key clusterKey) identity {
	return identity{
		name:    fmt.Sprintf("spiffe://%s/cluster-autoscaler/%s/%s", TrustDomain, key.namespace, key.name),
		cluster: &key, autoscaler: true,
	}
}

func (identity) AuthType() string { return "fake" }

// shimHolder is the holder of the Cluster's own identity. Only it reports Nodes.
const shimHolder = "karpenter"

// mayActAs reports whether the identity may create, collect and release claims of the holder.
func (i identity) mayActAs(holder string) bool {
	switch {
	case i.cluster == nil:
		return true
	case i.autoscaler:
		return holder == "cluster-autoscaler" || strings.HasPrefix(holder, "cluster-autoscaler-")
	default:
		return holder == shimHolder || holder == unknownHolder
	}
}

func (i identity) mayActFor(key clusterKey) bool { return i.cluster == nil || *i.cluster == key }

func callerOf(ctx context.Context) (identity, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if i, ok := p.AuthInfo.(identity); ok {
			return i, nil
		}
	}
	return identity{}, agenterrors.Unauthenticated("the connection has no identity")
}

// identifiedListener assigns an identity to every accepted connection.
type identifiedListener struct {
	*bufconn.Listener

	identity identity
}

func (l identifiedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return identifiedConn{Conn: conn, identity: l.identity}, nil
}

type identifiedConn struct {
	net.Conn

	identity identity
}

// identityCredentials takes the identity of a connection from its listener. Any other connection is
// local. Nothing is sent for the handshake.
type identityCredentials struct{}

func (identityCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if identified, ok := conn.(identifiedConn); ok {
		return conn, identified.identity, nil
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

func (k clusterKey) ref() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: k.namespace, Name: k.name}
}
