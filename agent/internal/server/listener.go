package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/credentials"
	grpclocal "google.golang.org/grpc/credentials/local"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

// Listener accepts connections, and identifies the caller on the other side.
type Listener struct {
	net.Listener

	// Credentials performs the handshake.
	Credentials credentials.TransportCredentials
	// Security describes the credentials, for the log.
	Security string
	// NotAfter returns when the certificate that clients are shown expires. Nil means that there is
	// none.
	NotAfter func() time.Time
	// Authorities returns those that clients' certificates must lead to. It returns the same pool
	// until they change. Nil means that clients have no certificates.
	Authorities func() (*x509.CertPool, error)
}

// TLSFiles are PEM files, which are reloaded when they change.
type TLSFiles struct {
	CertFile, KeyFile, ClientCAFile string
	// Refresh is how often the files are read. Zero means every five seconds.
	Refresh time.Duration
	// Log receives a line if the files cannot be used. Zero discards it.
	Log logr.Logger
	// Registerer registers metrics about the expiry of the certificates, and about handshakes that
	// fail. Nil registers none.
	Registerer prometheus.Registerer
}

// ListenTLS listens on a TCP address, with TLS 1.3 and client certificates. The files are read now,
// and must be usable. If they become unusable later, the last usable ones stay in force. The
// returned function stops following the files.
func ListenTLS(ctx context.Context, address string, files TLSFiles) (Listener, func(), error) {
	followed, err := follow(files)
	if err != nil {
		return Listener{}, nil, err
	}
	failed := newFailedHandshakes(files.Log)
	if files.Registerer != nil {
		for _, collector := range append(certificateMetrics(followed), failed) {
			if err := files.Registerer.Register(collector); err != nil {
				followed.Close()
				return Listener{}, nil, fmt.Errorf("registering the certificates' metrics: %w", err)
			}
		}
	}
	listener, err := listen(ctx, "tcp", address)
	if err != nil {
		followed.Close()
		return Listener{}, nil, err
	}
	return Listener{
		Listener: listener, Credentials: counting{credentials.NewTLS(mutualTLS(followed)), failed}, Security: "mutual TLS",
		NotAfter:    func() time.Time { return followed.Stats().CertificateNotAfter },
		Authorities: followed.Authorities,
	}, followed.Close, nil
}

// local performs the handshake of a listener that is reachable from this machine only. Every
// connection has the same caller.
type local struct {
	credentials.TransportCredentials

	caller authz.Caller
}

func listensLocally(caller authz.Caller) credentials.TransportCredentials {
	return local{grpclocal.NewCredentials(), caller}
}

// ServerHandshake implements [credentials.TransportCredentials].
func (l local) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := l.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	return conn, localInfo{info, l.caller}, nil
}

// Clone implements [credentials.TransportCredentials].
func (l local) Clone() credentials.TransportCredentials {
	return local{l.TransportCredentials.Clone(), l.caller}
}

// localInfo is the result of a handshake, with the caller.
type localInfo struct {
	credentials.AuthInfo

	caller authz.Caller
}

// ListenLoopback listens on a loopback TCP address, without TLS. Every process that can connect is
// an administrator.
func ListenLoopback(ctx context.Context, address string) (Listener, error) {
	listener, err := listen(ctx, "tcp", address)
	if err != nil {
		return Listener{}, err
	}
	if tcp, ok := listener.Addr().(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
		return Listener{}, errors.Join(fmt.Errorf("%s is not a loopback address", address), listener.Close())
	}
	callers := authz.Caller{Identity: authz.Loopback, Grants: []authz.Grant{authz.Everything()}}
	return Listener{Listener: listener, Credentials: listensLocally(callers), Security: "none, loopback only"}, nil
}

// ListenUnix listens on a unix socket that only the agent's user and group can open, in a folder
// that not every user can write. Every connection has the given grant. A socket left behind by an
// earlier process is replaced; a socket that is being served is not. The process's umask changes
// while the socket is created, so files and directories that other goroutines create at that moment
// may get a stricter mode.
func ListenUnix(ctx context.Context, path string, grant authz.Grant) (Listener, error) {
	if err := protectedFolder(filepath.Dir(path), "/proc/self/mountinfo"); err != nil {
		return Listener{}, err
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != fs.ModeSocket {
			return Listener{}, fmt.Errorf("%s exists and is not a socket", path)
		}
		dialer := net.Dialer{Timeout: time.Second}
		if conn, err := dialer.DialContext(ctx, "unix", path); err == nil {
			return Listener{}, errors.Join(fmt.Errorf("another process serves %s", path), conn.Close())
		}
		if err := os.Remove(path); err != nil {
			return Listener{}, fmt.Errorf("removing an old socket: %w", err)
		}
	}
	// The umask keeps other users out before the mode is set. The group may connect: a sidecar can
	// run as another user.
	before := syscall.Umask(0o117)
	listener, err := listen(ctx, "unix", path)
	syscall.Umask(before)
	if err != nil {
		return Listener{}, err
	}
	// A default ACL of the directory takes precedence over the umask.
	if err := os.Chmod(path, 0o660); err != nil { //nolint:gosec // see above
		return Listener{}, errors.Join(fmt.Errorf("protecting the socket: %w", err), listener.Close())
	}
	callers := authz.Caller{Identity: authz.UnixSocket, Grants: []authz.Grant{grant}}
	return Listener{Listener: listener, Credentials: listensLocally(callers), Security: "none, unix socket: " + grant.String()}, nil
}

// protectedFolder returns an error if every user may write a folder: another process could serve a
// socket in the place of the agent's, and clients would believe it. The volume of a pod, such as an
// emptyDir, is writable for every user of the containers that mount it, and for no other. Unlike a
// shared folder such as /tmp, it is a mount of its own without the sticky bit.
func protectedFolder(folder, mountinfo string) error {
	info, err := os.Stat(folder)
	if err != nil {
		return fmt.Errorf("the socket's folder: %w", err)
	}
	if info.Mode().Perm()&0o002 == 0 || info.Mode()&fs.ModeSticky == 0 && mounted(folder, mountinfo) {
		return nil
	}
	return fmt.Errorf("the socket's folder %s has the mode %s, so every user could replace the socket by another; use a folder of its own with the "+
		"mode 0750, or take the right to write from others", folder, info.Mode())
}

// mounted reports whether a folder is a mount point, according to a file as proc_pid_mountinfo(5)
// describes it.
func mounted(folder, mountinfo string) bool {
	resolved, err := filepath.EvalSymlinks(folder)
	if err != nil {
		return false
	}
	content, err := os.ReadFile(mountinfo) //nolint:gosec // not a caller's: the process's own
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(content)) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] == resolved {
			return true
		}
	}
	return false
}

func listen(ctx context.Context, network, address string) (net.Listener, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return listener, nil
}

// follow follows the files, which must be usable now.
func follow(files TLSFiles) (*certificates.Follower, error) {
	if files.Refresh == 0 {
		files.Refresh = 5 * time.Second
	}
	followed := certificates.Follow(certificates.Files{
		CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.ClientCAFile, Refresh: files.Refresh, Logger: files.Log,
	})
	if _, err := followed.Certificate(); err != nil {
		followed.Close()
		return nil, fmt.Errorf("the server's %w", err)
	}
	if _, err := followed.Authorities(); err != nil {
		followed.Close()
		return nil, fmt.Errorf("the client %w", err)
	}
	return followed, nil
}

// mutualTLS returns a configuration whose certificate and client authorities are the last usable
// ones.
func mutualTLS(followed *certificates.Follower) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			own, err := followed.Certificate()
			if err != nil {
				return nil, fmt.Errorf("the server's %w", err)
			}
			callers, err := followed.Authorities()
			if err != nil {
				return nil, fmt.Errorf("the client %w", err)
			}
			return &tls.Config{
				MinVersion:   tls.VersionTLS13,
				NextProtos:   []string{"h2"},
				Certificates: []tls.Certificate{*own},
				ClientAuth:   tls.RequireAndVerifyClientCert,
				ClientCAs:    callers,
				// Every connection must present its certificate.
				SessionTicketsDisabled: true,
			}, nil
		},
	}
}

func certificateMetrics(followed *certificates.Follower) []prometheus.Collector {
	return append(
		CertificateMetrics("server", func() (notBefore, notAfter time.Time, errors int64) {
			stats := followed.Stats()
			return stats.CertificateNotBefore, stats.CertificateNotAfter, stats.CertificateErrors
		}),
		CertificateMetrics("client-ca", func() (notBefore, notAfter time.Time, errors int64) {
			stats := followed.Stats()
			return stats.AuthoritiesNotBefore, stats.AuthoritiesNotAfter, stats.AuthoritiesErrors
		})...)
}

// CertificateMetrics returns metrics of a followed certificate: when its validity begins and ends,
// and how often its files could not be used.
func CertificateMetrics(name string, stats func() (notBefore, notAfter time.Time, errors int64)) []prometheus.Collector {
	labels := prometheus.Labels{"certificate": name}
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "capi_agent_certificate_not_before_seconds", ConstLabels: labels,
			Help: "Start of the validity of the certificate in use, or of the first to expire if there are several, in seconds since 1970.",
		}, func() float64 {
			notBefore, _, _ := stats()
			return float64(notBefore.Unix())
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "capi_agent_certificate_not_after_seconds", ConstLabels: labels,
			Help: "Expiry of the certificate in use, or of the first to expire if there are several, in seconds since 1970.",
		}, func() float64 {
			_, notAfter, _ := stats()
			return float64(notAfter.Unix())
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "capi_agent_certificate_reload_errors_total", ConstLabels: labels,
			Help: "Number of times unusable files were read. The last usable files stay in use.",
		}, func() float64 {
			_, _, errors := stats()
			return float64(errors)
		}),
	}
}
