package client

import (
	"context"
	"errors"
	"fmt"
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
	// NodePools serves what the hub publishes to a Cluster, and receives the status of its NodePools.
	NodePools agentv1alpha1.NodePoolServiceClient
	// Status describes the agent and the rights of the client's identity.
	Status agentv1alpha1.StatusServiceClient
	// Issuer issues certificates for a Cluster's own identity.
	Issuer agentv1alpha1.CertificateServiceClient

	options Options
	conn    grpc.ClientConnInterface
	close   []func() error
	closed  chan struct{} // closed by end
	end     func()
	source  certificates.Source // nil without TLS
	refused func() error
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
	conn, err := newConnection(func() (*line, error) {
		creds, outdated, accepted := insecure.NewCredentials(), func() bool { return false }, func() {}
		if source != nil {
			mutual := newMutualTLS(source, options.TLS.ServerName, options.Clock)
			creds, outdated, accepted = mutual, mutual.outdated, mutual.accept
		}
		conn, err := grpc.NewClient(options.Address, append(slices.Clip(dialOptions), grpc.WithTransportCredentials(creds))...)
		if err != nil {
			return nil, err
		}
		return &line{ClientConn: conn, outdated: outdated, accepted: accepted}, nil
	}, checkIdentity, options.Clock)
	if err != nil {
		stopReading()
		return nil, fmt.Errorf("agent address %s: %w", options.Address, err)
	}
	c := fromConn(conn, options)
	c.source, c.refused = source, conn.refusal
	c.close = []func() error{conn.Close, func() error { stopReading(); return nil }}
	return c, nil
}

// checkIdentity returns an error if the agent does not accept the connection's identity. An identity without a
// role may call GetStatus, too, and nothing else.
func checkIdentity(ctx context.Context, conn *grpc.ClientConn) error {
	status, err := agentv1alpha1.NewStatusServiceClient(conn).GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	if err == nil && len(status.GetRoles()) == 0 {
		return agenterrors.Unauthenticated("the identity has no role")
	}
	return err
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

// Close ends the client's mirrors. It also closes the connection, which ends every call, unless that
// was passed to [FromConn].
func (c *Client) Close() error {
	c.end()
	var errs []error
	for _, f := range c.close {
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// Certificates returns when the client's certificate and its trusted authorities expire, and how
// often they could not be read or used, for metrics. It is zero without TLS.
func (c *Client) Certificates() certificates.Stats {
	if c.source == nil {
		return certificates.Stats{}
	}
	return c.source.Stats()
}

// CertificateRefused returns why the agent refuses the client certificate that was read last, which replaces
// one that it accepts. Calls use the former one meanwhile. It is nil if the agent is not known to refuse it, and for
// a client that was made with [FromConn].
func (c *Client) CertificateRefused() error {
	if c.refused == nil {
		return nil
	}
	return c.refused()
}
