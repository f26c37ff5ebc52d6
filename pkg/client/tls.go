package client

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/tls/certprovider"
	"google.golang.org/grpc/credentials/tls/certprovider/pemfile"
	"google.golang.org/grpc/security/advancedtls"
)

// keyMaterialWait bounds how long a handshake waits for files that cannot be used yet, so that it fails with a message that
// names them instead of timing out.
const keyMaterialWait = 2 * time.Second

// mutualTLS returns credentials that follow the files, and a function that stops reading them.
func mutualTLS(files TLS) (credentials.TransportCredentials, func(), error) {
	identity, err := pemfile.NewProvider(pemfile.Options{
		CertFile: files.CertFile, KeyFile: files.KeyFile, RefreshDuration: files.Refresh,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("watching the client certificate: %w", err)
	}
	roots, err := pemfile.NewProvider(pemfile.Options{RootFile: files.CAFile, RefreshDuration: files.Refresh})
	if err != nil {
		identity.Close()
		return nil, nil, fmt.Errorf("watching the CA: %w", err)
	}
	stop := func() {
		identity.Close()
		roots.Close()
	}
	creds, err := advancedtls.NewClientCreds(&advancedtls.Options{
		MinTLSVersion: tls.VersionTLS12,
		MaxTLSVersion: tls.VersionTLS13,
		IdentityOptions: advancedtls.IdentityCertificateOptions{
			GetIdentityCertificatesForClient: func(request *tls.CertificateRequestInfo) (*tls.Certificate, error) {
				material, err := read(request.Context(), identity, files.CertFile, files.KeyFile)
				if err != nil {
					return nil, err
				}
				return &material.Certs[0], nil
			},
		},
		RootOptions: advancedtls.RootCertificateOptions{
			GetRootCertificates: func(*advancedtls.ConnectionInfo) (*advancedtls.RootCertificates, error) {
				material, err := read(context.Background(), roots, files.CAFile)
				if err != nil {
					return nil, err
				}
				return &advancedtls.RootCertificates{TrustCerts: material.Roots}, nil
			},
		},
		VerificationType: advancedtls.CertAndHostVerification,
	})
	if err != nil {
		stop()
		return nil, nil, fmt.Errorf("configuring TLS: %w", err)
	}
	return creds, stop, nil
}

func read(ctx context.Context, provider certprovider.Provider, files ...string) (*certprovider.KeyMaterial, error) {
	ctx, cancel := context.WithTimeout(ctx, keyMaterialWait)
	defer cancel()
	material, err := provider.KeyMaterial(ctx)
	if err != nil {
		return nil, fmt.Errorf("cannot use %v, which may be missing or malformed: %w", files, err)
	}
	return material, nil
}
