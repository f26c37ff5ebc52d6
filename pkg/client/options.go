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
)

// Defaults of [Options].
const (
	// DefaultTimeout is the deadline of a unary call that has none.
	DefaultTimeout = 10 * time.Second
	// DefaultHeartbeatInterval is the agent's default heartbeat interval.
	DefaultHeartbeatInterval = 10 * time.Second
	// DefaultTLSRefresh is how often certificate files are read again.
	DefaultTLSRefresh = 10 * time.Second

	// KeepaliveTime is how long a connection may be silent before it is probed. An agent must allow probes this often: its
	// keepalive enforcement policy's MinTime must be less, with PermitWithoutStream.
	KeepaliveTime = 20 * time.Second
	// KeepaliveTimeout is how long a probe may go unanswered before the connection is given up.
	KeepaliveTimeout = 10 * time.Second

	// MaxReceiveBytes is the largest message a client accepts.
	MaxReceiveBytes = 64 << 20
)

// Options say where the agent is and how to talk to it.
type Options struct {
	// Address is where the agent listens: `host:port`, `dns:///host:port` or `unix:///path/to/socket`. REQUIRED.
	Address string
	// TLS is what the client identifies itself with and trusts. REQUIRED, except with a unix socket or PlaintextLoopback.
	TLS *TLS
	// PlaintextLoopback talks without TLS. Refused unless Address is a loopback address.
	PlaintextLoopback bool

	// Timeout is the deadline of a unary call whose context has none. Zero means [DefaultTimeout], negative none.
	Timeout time.Duration
	// HeartbeatInterval is the agent's heartbeat interval: a mirror whose stream is silent for three of them connects again.
	// Zero means [DefaultHeartbeatInterval].
	HeartbeatInterval time.Duration
	// UserAgent names the calling program in the agent's logs, for example `karpenter/v0.1.0`. OPTIONAL.
	UserAgent string
	// Logger gets a line for each failed call at verbosity 1, and for each other call at verbosity 4: callers log the errors
	// that matter to them, with the request id in their text. The zero Logger logs nothing.
	Logger logr.Logger
	// TraceID returns the id of the trace that a call with this context belongs to, or "". Log lines and errors that have the request id have it,
	// too. OPTIONAL.
	TraceID func(ctx context.Context) string
	// DialOptions are added to those with which connections are made, for what the client has no option for: statistics, tracing, a dialer. Where
	// they set what the client sets itself, the client's setting is in force: credentials, user agent, keepalive, backoff, repetition of calls and
	// the size of messages. They are used for several connections, at the same time, as certificates are replaced. OPTIONAL.
	DialOptions []grpc.DialOption
	// Clock is what mirrors measure silence and backoff with, and what the end of certificates is compared with. Nil means the real one.
	Clock clock.Clock
}

// TLS is what mutual TLS uses: files, or a Source. Either may be replaced by others at any time, and need not have anything yet when the client is
// made. Calls go over a new connection as soon as the agent has accepted one with the new certificate; those under way end on the old one. While the
// agent does not accept the new certificate, the one before stays in use until it has ended.
type TLS struct {
	// CertFile holds the client's certificate chain, PEM. REQUIRED without a Source.
	CertFile string
	// KeyFile holds the certificate's private key, PEM. REQUIRED without a Source.
	KeyFile string
	// CAFile holds the certificates that sign the agent's, PEM. REQUIRED without a Source.
	CAFile string
	// Refresh is how often the files are read again. Zero means [DefaultTLSRefresh]. It has no effect with a Source.
	Refresh time.Duration
	// Source provides certificate and authorities instead of the files. The client does not close it. OPTIONAL.
	Source certificates.Source
	// ServerName is the name that the agent's certificate must carry. Empty means the host of the address.
	ServerName string
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
			return fmt.Errorf("address %s is no unix socket: write unix:///path/to/socket", o.Address)
		}
		if o.TLS != nil {
			return fmt.Errorf("address %s is a unix socket, which is used without TLS, but TLS is set", o.Address)
		}
		return nil
	case o.PlaintextLoopback:
		if o.TLS != nil {
			return errors.New("plaintext was asked for, but TLS is set")
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

// isLoopback reports whether every connection to the address stays on this machine. Names other than localhost do not count:
// what they resolve to may change.
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
