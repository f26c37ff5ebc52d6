package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// These are the defaults of [Options] and the fixed parameters of connections.
const (
	// DefaultTimeout is the deadline of a unary call that has none.
	DefaultTimeout = 10 * time.Second
	// DefaultHeartbeatInterval is the agent's default heartbeat interval.
	DefaultHeartbeatInterval = 10 * time.Second
	// DefaultTLSRefresh is how often certificate files are read.
	DefaultTLSRefresh = 10 * time.Second

	// KeepaliveTime is how long a connection may be idle before it is probed. An agent must allow
	// probes at this rate: the MinTime of its keepalive enforcement policy must be lower, and
	// PermitWithoutStream set.
	KeepaliveTime = 20 * time.Second
	// KeepaliveTimeout is how long a probe may stay unanswered before the connection is closed.
	KeepaliveTimeout = 10 * time.Second

	// MaxReceiveBytes is the size limit of a message that a client accepts.
	MaxReceiveBytes = 64 << 20
)

// Options configure a [Client].
type Options struct {
	// Address is the agent's address: `host:port`, `dns:///host:port` or `unix:///path/to/socket`.
	// REQUIRED.
	Address string
	// TLS is the client's certificate and its trusted authorities. REQUIRED, except with a unix
	// socket or PlaintextLoopback.
	TLS *TLS
	// PlaintextLoopback disables TLS. It is only accepted if Address is a loopback address.
	PlaintextLoopback bool

	// Timeout is the deadline of a unary call whose context has none. Zero means [DefaultTimeout];
	// a negative value means none.
	Timeout time.Duration
	// HeartbeatInterval is the agent's heartbeat interval. A mirror reconnects if its stream is
	// silent for three intervals. Zero means [DefaultHeartbeatInterval].
	HeartbeatInterval time.Duration
	// UserAgent identifies the calling program in the agent's logs, for example `karpenter/v0.1.0`.
	// OPTIONAL.
	UserAgent string
	// Logger receives a line for each failed call at verbosity 1, and for every other call at
	// verbosity 4. Callers log relevant errors themselves; the text of an error includes the
	// request ID. The zero Logger discards everything.
	Logger logr.Logger
	// TraceID returns the ID of the trace that a call with this context belongs to, or "". It is
	// added to log lines and errors with the request ID. OPTIONAL.
	TraceID func(ctx context.Context) string
	// DialOptions are added to the client's own options for what the client does not cover:
	// statistics, tracing, a dialer. The client's own settings take precedence: credentials, user
	// agent, keepalive, backoff, retries and message size. The options are used for several
	// concurrent connections while certificates are being replaced. OPTIONAL.
	DialOptions []grpc.DialOption
	// Clock provides the time for silence and backoff of mirrors, and for the expiry of
	// certificates. Nil means the system clock.
	Clock clock.Clock
}

// TLS configures mutual TLS with files or a Source. Both may change at any time, and may still be
// empty when the client is created. New calls use a new connection as soon as the agent has
// accepted the new certificate; calls in flight end on the old one. While the agent rejects the new
// certificate, the previous one stays in use until it has expired.
type TLS struct {
	// CertFile holds the client's certificate chain. PEM. REQUIRED without a Source.
	CertFile string
	// KeyFile holds the certificate's private key. PEM. REQUIRED without a Source.
	KeyFile string
	// CAFile holds the authorities of the agent's certificate. PEM. REQUIRED without a Source.
	CAFile string
	// Refresh is how often the files are read. Zero means [DefaultTLSRefresh]. It has no effect
	// with a Source.
	Refresh time.Duration
	// Source provides the certificate and the authorities instead of the files. The client does not
	// close it. OPTIONAL.
	Source certificates.Source
	// ServerName is the name that the agent's certificate must have. Empty means the host of the
	// address.
	ServerName string
	// Cluster is the Cluster that the client calls for. If it is set, a new certificate whose
	// identity may not act for that Cluster does not replace the previous one. The agent itself
	// accepts the certificates of other Clusters, too. OPTIONAL.
	Cluster *agentv1alpha1.ClusterRef
}

func (o Options) withDefaults() Options {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if o.HeartbeatInterval == 0 {
		o.HeartbeatInterval = DefaultHeartbeatInterval
	}
	if o.Logger.GetSink() == nil {
		o.Logger = logr.Discard()
	}
	if o.TraceID == nil {
		o.TraceID = func(context.Context) string { return "" }
	}
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if o.TLS != nil {
		t := *o.TLS
		if t.Refresh == 0 {
			t.Refresh = DefaultTLSRefresh
		}
		o.TLS = &t
	}
	return o
}

func (o Options) validate() error {
	if o.Address == "" {
		return errors.New("no agent address")
	}
	if o.HeartbeatInterval < 0 {
		return errors.New("the heartbeat interval is negative")
	}
	switch {
	case isUnix(o.Address):
		if strings.HasPrefix(o.Address, "unix://") && !strings.HasPrefix(o.Address, "unix:///") {
			return fmt.Errorf("address %s is not a unix socket: write unix:///path/to/socket", o.Address)
		}
		if o.TLS != nil {
			return fmt.Errorf("address %s is a unix socket, which is used without TLS, but TLS is set", o.Address)
		}
		return nil
	case o.PlaintextLoopback:
		if o.TLS != nil {
			return errors.New("plaintext was requested, but TLS is set")
		}
		if !isLoopback(o.Address) {
			return fmt.Errorf("plaintext is only for loopback addresses, and %s is not one", o.Address)
		}
		return nil
	case o.TLS == nil:
		return fmt.Errorf("address %s needs TLS: give a certificate, its key and a CA", o.Address)
	}
	return o.TLS.validate()
}

func (t *TLS) validate() error {
	var missing []string
	for name, value := range map[string]string{"certificate": t.CertFile, "key": t.KeyFile, "CA": t.CAFile} {
		if value == "" {
			missing = append(missing, name)
		}
	}
	switch {
	case t.Source != nil && len(missing) < 3:
		return errors.New("TLS takes either a source or files: drop one of the two")
	case t.Source == nil && len(missing) > 0:
		slices.Sort(missing)
		return fmt.Errorf("TLS needs a source, or a certificate, key and CA file; missing: %s", strings.Join(missing, ", "))
	}
	if t.Refresh < 0 {
		return errors.New("the refresh interval of TLS files is negative")
	}
	return nil
}

func isUnix(address string) bool {
	return strings.HasPrefix(address, "unix:") || strings.HasPrefix(address, "unix-abstract:")
}

// isLoopback reports whether every connection to the address stays on this machine. Of names it
// accepts only localhost, because others may resolve differently later.
func isLoopback(address string) bool {
	for _, scheme := range []string{"dns:///", "passthrough:///", "dns:"} {
		if rest, ok := strings.CutPrefix(address, scheme); ok {
			address = rest
			break
		}
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}
