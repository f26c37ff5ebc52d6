package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"

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
	return secured, info, nil
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
