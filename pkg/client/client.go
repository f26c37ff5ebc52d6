package client

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"path"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Client calls one agent. It is safe for concurrent use.
type Client struct {
	// NodeGroups serves the node groups that can be claimed from.
	NodeGroups agentv1alpha1.NodeGroupServiceClient
	// Claims creates and releases claims.
	Claims agentv1alpha1.ClaimServiceClient
	// Machines serves the Machines of the node groups.
	Machines agentv1alpha1.MachineServiceClient
	// Clusters serves the Clusters that the client's identity may read.
	Clusters agentv1alpha1.ClusterServiceClient
	// NodePools serves what the hub publishes to a Cluster, and receives the status of its
	// NodePools.
	NodePools agentv1alpha1.NodePoolServiceClient
	// Status describes the agent and the rights of the client's identity.
	Status agentv1alpha1.StatusServiceClient
	// Issuer issues certificates for a Cluster's own identity.
	Issuer agentv1alpha1.CertificateServiceClient

	options  Options
	conn     grpc.ClientConnInterface
	close    []func() error
	closed   chan struct{} // closed by end
	end      func()
	source   certificates.Source // nil without TLS
	refused  func() error
	replaced func() *x509.Certificate
	// moves is that of the connection, nil for a client that was made with [FromConn].
	moves func() <-chan struct{}
}

// New returns a client of the agent at options.Address. It never waits for the network: while the
// agent cannot be reached, calls fail with UNAVAILABLE. An error means that the options are
// invalid.
func New(options Options) (*Client, error) {
	options = options.withDefaults()
	if err := options.validate(); err != nil {
		return nil, err
	}

	dialOptions := append(slices.Clip(options.DialOptions),
		WithRetry(),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time:                KeepaliveTime,
			Timeout:             KeepaliveTimeout,
			PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxReceiveBytes)),
	)
	if options.UserAgent != "" {
		dialOptions = append(dialOptions, grpc.WithUserAgent(options.UserAgent))
	}
	source, stopReading := options.TLS.source(options.Logger)
	if source != nil && options.TLS.ServerName != "" {
		dialOptions = append(dialOptions, grpc.WithAuthority(options.TLS.ServerName))
	}
	var cluster *agentv1alpha1.ClusterRef
	if options.TLS != nil {
		cluster = options.TLS.Cluster
	}
	conn, err := newConnection(func() (*line, error) {
		l, creds := &line{outdated: func() bool { return false }, accepted: func() {}}, insecure.NewCredentials()
		if source != nil {
			mutual := newMutualTLS(source, options.TLS.ServerName, options.Clock)
			creds, l.certificate, l.outdated, l.accepted = mutual, mutual.presented, mutual.outdated, mutual.accept
		}
		var err error
		l.ClientConn, err = grpc.NewClient(options.Address, append(slices.Clip(dialOptions), grpc.WithTransportCredentials(creds))...)
		return l, err
	}, checkIdentity(cluster), options.Clock)
	if err != nil {
		stopReading()
		return nil, fmt.Errorf("agent address %s: %w", options.Address, err)
	}
	c := fromConn(conn, options)
	c.source, c.refused, c.replaced = source, conn.refusal, conn.replaced
	c.moves = conn.moves
	c.close = []func() error{conn.Close, func() error { stopReading(); return nil }}
	return c, nil
}

// roleBootstrap is the role of an identity that may only request the certificate of a Cluster.
const roleBootstrap = "bootstrap"

// checkIdentity returns a check of a connection. The check fails if the agent does not accept the
// connection's identity, or if the identity may not act for the Cluster, unless that is nil. Every
// identity may call GetStatus; one without a role may call nothing else.
func checkIdentity(cluster *agentv1alpha1.ClusterRef) func(context.Context, *grpc.ClientConn) error {
	return func(ctx context.Context, conn *grpc.ClientConn) error {
		status, err := agentv1alpha1.NewStatusServiceClient(conn).GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
		switch {
		case err != nil:
			return err
		case len(status.GetRoles()) == 0:
			return agenterrors.Unauthenticated("the identity has no role")
		case cluster != nil && !actsFor(status, cluster):
			return agenterrors.PermissionDenied(fmt.Sprintf(
				"the identity %s may not act for the Cluster %s/%s", status.GetIdentity(), cluster.GetNamespace(), cluster.GetName()))
		}
		return nil
	}
}

// actsFor reports whether the caller that an agent describes may act for the Cluster. The status
// does not contain which of the caller's roles is for which of its Clusters.
func actsFor(status *agentv1alpha1.GetStatusResponse, cluster *agentv1alpha1.ClusterRef) bool {
	if !slices.ContainsFunc(status.GetRoles(), func(role string) bool { return role != roleBootstrap }) {
		return false
	}
	return status.GetAllClusters() || slices.ContainsFunc(status.GetClusters(), func(named *agentv1alpha1.ClusterRef) bool {
		return like(named.GetNamespace(), cluster.GetNamespace()) && like(named.GetName(), cluster.GetName())
	})
}

// like reports whether the name matches the pattern, in which `*` matches any characters.
func like(pattern, name string) bool {
	matched, err := path.Match(pattern, name)
	return matched && err == nil
}

// FromConn returns a client that uses an existing connection. The caller closes the connection, and
// determines its TLS, keepalive, retries and message size. Of the options, only Timeout,
// HeartbeatInterval, Logger, TraceID and Clock are used.
func FromConn(conn grpc.ClientConnInterface, options Options) *Client {
	return fromConn(conn, options.withDefaults())
}

func fromConn(conn grpc.ClientConnInterface, options Options) *Client {
	wrapped := &caller{conn: conn, timeout: options.Timeout, logger: options.Logger, traceID: options.TraceID, clock: options.Clock}
	closed := make(chan struct{})
	return &Client{
		NodeGroups: agentv1alpha1.NewNodeGroupServiceClient(wrapped),
		Claims:     agentv1alpha1.NewClaimServiceClient(wrapped),
		Machines:   agentv1alpha1.NewMachineServiceClient(wrapped),
		Clusters:   agentv1alpha1.NewClusterServiceClient(wrapped),
		NodePools:  agentv1alpha1.NewNodePoolServiceClient(wrapped),
		Status:     agentv1alpha1.NewStatusServiceClient(wrapped),
		Issuer:     agentv1alpha1.NewCertificateServiceClient(wrapped),
		options:    options,
		conn:       wrapped,
		closed:     closed,
		end:        sync.OnceFunc(func() { close(closed) }),
	}
}

// Conn returns the underlying connection, with request IDs, deadlines and logging. It can be used
// for the agent's other services, such as health and reflection.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn }

// Close ends the client's mirrors. It also closes the connection, which ends every call, unless
// that was passed to [FromConn].
func (c *Client) Close() error {
	c.end()
	var errs []error
	for _, f := range c.close {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// Certificates returns when the client's certificate and its trusted authorities expire, and how
// often they could not be read or used, for metrics. While the agent has not accepted the
// certificate that was read last, and calls use the former one, it returns the validity of the one
// that expires first. It is zero without TLS.
func (c *Client) Certificates() certificates.Stats {
	if c.source == nil {
		return certificates.Stats{}
	}
	stats := c.source.Stats()
	if used := c.replaced(); used != nil && used.NotAfter.Before(stats.CertificateNotAfter) {
		stats.CertificateNotBefore, stats.CertificateNotAfter = used.NotBefore, used.NotAfter
	}
	return stats
}

// CertificateRefused returns why the agent refuses the client certificate that was read last, which
// replaces one that it accepts, or why no connection can be made with it although there is one with
// the former. Calls use the former one meanwhile. It is nil if neither is known, and for a client
// that was made with [FromConn].
func (c *Client) CertificateRefused() error {
	if c.refused == nil {
		return nil
	}
	return c.refused()
}
