package client

import (
	"context"
	"crypto/tls"
	"net"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/credentials"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

// mutualTLS is TLS 1.3 with what the files hold at each handshake.
type mutualTLS struct {
	credentials.TransportCredentials // for what does not depend on the files

	files *certificates.Follower
	name  string
}

func newMutualTLS(files TLS, logger logr.Logger) mutualTLS {
	return mutualTLS{
		TransportCredentials: credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}),
		files: certificates.Follow(certificates.Files{
			CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile, Refresh: files.Refresh, Logger: logger,
		}),
		name: files.ServerName,
	}
}

func (m mutualTLS) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	certificate, err := m.files.Certificate()
	if err != nil {
		return nil, nil, err
	}
	authorities, err := m.files.Authorities()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: m.name, RootCAs: authorities, Certificates: []tls.Certificate{*certificate},
	}).ClientHandshake(ctx, authority, conn)
}

func (m mutualTLS) Clone() credentials.TransportCredentials { return m }
