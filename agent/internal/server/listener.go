package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/local"
	"google.golang.org/grpc/credentials/tls/certprovider"
	"google.golang.org/grpc/credentials/tls/certprovider/pemfile"
)

// Listener accepts connections, and knows who is on the other side.
type Listener struct {
	net.Listener

	// Credentials is the handshake.
	Credentials credentials.TransportCredentials
	// Security describes it, for the log.
	Security string
}

// TLSFiles are PEM files, which are read again when they change.
type TLSFiles struct {
	CertFile, KeyFile, ClientCAFile string
	// Refresh is how often they are read. Zero means every five seconds.
	Refresh time.Duration
}

// ListenTLS listens on a TCP address, with TLS 1.3 and client certificates. The files are read now, and must be usable; later
// ones that are not leave the last usable ones in force. The function that is returned stops reading them.
func ListenTLS(ctx context.Context, address string, files TLSFiles) (Listener, func(), error) {
	config, stop, err := mutualTLS(ctx, files)
	if err != nil {
		return Listener{}, nil, err
	}
	listener, err := listen(ctx, "tcp", address)
	if err != nil {
		stop()
		return Listener{}, nil, err
	}
	return Listener{Listener: listener, Credentials: credentials.NewTLS(config), Security: "mutual TLS"}, stop, nil
}

// ListenLoopback listens on a loopback TCP address, without TLS. Everybody who can connect is an administrator.
func ListenLoopback(ctx context.Context, address string) (Listener, error) {
	listener, err := listen(ctx, "tcp", address)
	if err != nil {
		return Listener{}, err
	}
	if tcp, ok := listener.Addr().(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
		return Listener{}, errors.Join(fmt.Errorf("%s is not a loopback address", address), listener.Close())
	}
	return Listener{Listener: listener, Credentials: local.NewCredentials(), Security: "none, loopback only"}, nil
}

// ListenUnix listens on a unix socket that only this user and its group can open. A socket that an earlier process left behind
// is replaced; one that somebody serves is not.
func ListenUnix(ctx context.Context, path string) (Listener, error) {
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
	listener, err := listen(ctx, "unix", path)
	if err != nil {
		return Listener{}, err
	}
	if err := os.Chmod(path, 0o660); err != nil { //nolint:gosec // The group is how a sidecar of another user gets in.
		return Listener{}, errors.Join(fmt.Errorf("protecting the socket: %w", err), listener.Close())
	}
	return Listener{Listener: listener, Credentials: local.NewCredentials(), Security: "none, unix socket"}, nil
}

func listen(ctx context.Context, network, address string) (net.Listener, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return listener, nil
}

// materialWait bounds how long a handshake waits for files that were never usable.
const materialWait = 2 * time.Second

// mutualTLS returns a configuration whose certificate and client authorities follow the files.
func mutualTLS(ctx context.Context, files TLSFiles) (*tls.Config, func(), error) {
	if files.Refresh == 0 {
		files.Refresh = 5 * time.Second
	}
	// Reading them here says what is wrong; the providers only log it.
	if _, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile); err != nil {
		return nil, nil, fmt.Errorf("the server's certificate %s and key %s cannot be used: %w", files.CertFile, files.KeyFile, err)
	}
	identity, err := pemfile.NewProvider(pemfile.Options{CertFile: files.CertFile, KeyFile: files.KeyFile, RefreshDuration: files.Refresh})
	if err != nil {
		return nil, nil, fmt.Errorf("following the server's certificate: %w", err)
	}
	roots, err := pemfile.NewProvider(pemfile.Options{RootFile: files.ClientCAFile, RefreshDuration: files.Refresh})
	if err != nil {
		identity.Close()
		return nil, nil, fmt.Errorf("following the client certificate authorities: %w", err)
	}
	stop := func() {
		identity.Close()
		roots.Close()
	}
	if _, err := material(ctx, roots); err != nil {
		stop()
		return nil, nil, fmt.Errorf("the client certificate authorities %s cannot be used: %w", files.ClientCAFile, err)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			own, err := material(hello.Context(), identity)
			if err != nil {
				return nil, fmt.Errorf("the server's certificate cannot be used: %w", err)
			}
			callers, err := material(hello.Context(), roots)
			if err != nil {
				return nil, fmt.Errorf("the client certificate authorities cannot be used: %w", err)
			}
			return &tls.Config{
				MinVersion:   tls.VersionTLS13,
				NextProtos:   []string{"h2"},
				Certificates: own.Certs,
				ClientAuth:   tls.RequireAndVerifyClientCert,
				ClientCAs:    callers.Roots,
			}, nil
		},
	}, stop, nil
}

func material(ctx context.Context, provider certprovider.Provider) (*certprovider.KeyMaterial, error) {
	ctx, cancel := context.WithTimeout(ctx, materialWait)
	defer cancel()
	return provider.KeyMaterial(ctx)
}
