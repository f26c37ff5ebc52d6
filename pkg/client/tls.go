package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/credentials"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

// source returns the source of the certificate, and a function that stops following files. The
// source is nil without TLS.
func (t *TLS) source(logger logr.Logger) (from certificates.Source, stop func()) {
	switch {
	case t == nil:
		return nil, func() {}
	case t.Source != nil:
		return t.Source, func() {}
	}
	followed := certificates.Follow(certificates.Files{
		CertFile: t.CertFile, KeyFile: t.KeyFile, CAFile: t.CAFile, Refresh: t.Refresh, Logger: logger,
	})
	return followed, followed.Close
}

// mutualTLS performs TLS 1.3 handshakes with the current content of the source. Once the agent has
// accepted a certificate, further handshakes use that certificate until it has expired:
// [connection] tries a new one on another line.
type mutualTLS struct {
	// TransportCredentials provides what does not depend on the source.
	credentials.TransportCredentials

	source certificates.Source
	name   string
	clock  clock.PassiveClock
	// last is the certificate of the last handshake, and accepted the one that the agent has last
	// accepted. They hold nil before the first.
	last, accepted *atomic.Pointer[tls.Certificate]
}

func newMutualTLS(source certificates.Source, serverName string, clk clock.PassiveClock) mutualTLS {
	return mutualTLS{
		TransportCredentials: credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}),
		source:               source,
		name:                 serverName,
		clock:                clk,
		last:                 &atomic.Pointer[tls.Certificate]{},
		accepted:             &atomic.Pointer[tls.Certificate]{},
	}
}

func (m mutualTLS) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	certificate, err := m.certificate()
	if err != nil {
		return nil, nil, err
	}
	authorities, err := m.source.Authorities()
	if err != nil {
		return nil, nil, err
	}
	secured, info, err := credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: m.name, RootCAs: authorities, Certificates: []tls.Certificate{*certificate},
	}).ClientHandshake(ctx, authority, conn)
	if err != nil {
		return nil, nil, err
	}
	m.last.Store(certificate)
	return &alertedConn{Conn: secured}, info, nil
}

// alertWithin limits the wait for the alert of a closed connection, which has usually arrived
// before.
const alertWithin = 100 * time.Millisecond

// alertedConn is a connection on which a write that fails before anything was received returns the
// server's alert, if there is one. In TLS 1.3, a client's handshake succeeds before the server has
// verified its certificate. If the server rejects it and closes the connection before the client's
// first write, the error of that write is only that the connection is closed.
type alertedConn struct {
	net.Conn

	received atomic.Bool
}

func (c *alertedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.received.Store(true)
	}
	return n, err
}

func (c *alertedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err == nil || c.received.Load() {
		return n, err
	}
	// The connection cannot be used any more, and no call was made on it, so this read takes
	// nothing away.
	_ = c.SetReadDeadline(time.Now().Add(alertWithin))
	_, readErr := c.Conn.Read(make([]byte, 1))
	if alert, ok := errors.AsType[*net.OpError](readErr); ok && alert.Op == "remote error" { // crypto/tls's name for an alert
		return n, readErr
	}
	return n, err
}

// certificate returns the certificate for the next handshake.
func (m mutualTLS) certificate() (*tls.Certificate, error) {
	present, err := m.source.Certificate()
	if err != nil {
		return nil, err
	}
	if accepted := m.accepted.Load(); accepted != nil && !same(accepted, present) && m.clock.Now().Before(accepted.Leaf.NotAfter) {
		return accepted, nil
	}
	return present, nil
}

// accept records that the agent has accepted the certificate of the last handshake.
func (m mutualTLS) accept() { m.accepted.Store(m.last.Load()) }

// presented returns the certificate of the last handshake, nil before the first.
func (m mutualTLS) presented() *x509.Certificate {
	if last := m.last.Load(); last != nil {
		return last.Leaf
	}
	return nil
}

func (m mutualTLS) Clone() credentials.TransportCredentials { return m }

// outdated reports whether the source has a different certificate than the last handshake.
func (m mutualTLS) outdated() bool {
	last := m.last.Load()
	if last == nil {
		return false
	}
	present, err := m.source.Certificate()
	return err == nil && !same(present, last)
}

// same reports whether two certificates are the same. Their chains may differ.
func same(a, b *tls.Certificate) bool {
	return a == b || bytes.Equal(a.Certificate[0], b.Certificate[0])
}
