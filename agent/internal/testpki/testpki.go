// Package testpki creates certificates for tests.
package testpki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Authority signs certificates.
type Authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// Files are the PEM files of one party.
type Files struct {
	// CertFile and KeyFile are the party's own certificate and key. CAFile holds the authority that
	// it trusts.
	CertFile, KeyFile, CAFile string
}

// New creates an authority.
func New(tb testing.TB) *Authority {
	tb.Helper()
	return certify(tb, newKey(tb), 1)
}

// Renewed returns the authority with another certificate for the same name and key, as cert-manager
// renews one with the rotation policy Never.
func (a *Authority) Renewed(tb testing.TB) *Authority {
	tb.Helper()
	return certify(tb, a.key, a.certificate.SerialNumber.Int64()+1)
}

func certify(tb testing.TB, key *ecdsa.PrivateKey, serial int64) *Authority {
	tb.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		tb.Fatalf("signing the authority: %v", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatalf("parsing the authority: %v", err)
	}
	return &Authority{certificate: certificate, key: key}
}

// Issue writes files for a party at 127.0.0.1 to a directory: a certificate with the given URI
// names, its key, and the certificate of the trusted authority. Existing files are replaced, as in
// a rotation.
func (a *Authority) Issue(tb testing.TB, folder string, trusted *Authority, uris ...string) Files {
	tb.Helper()
	return a.IssueFor(tb, time.Hour, folder, trusted, uris...)
}

// IssueFor is like [Authority.Issue], for a certificate that is valid for the given time.
func (a *Authority) IssueFor(tb testing.TB, life time.Duration, folder string, trusted *Authority, uris ...string) Files {
	tb.Helper()
	key := newKey(tb)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(life),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	for _, text := range uris {
		uri, err := url.Parse(text)
		if err != nil {
			tb.Fatalf("parsing %s: %v", text, err)
		}
		template.URIs = append(template.URIs, uri)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		tb.Fatalf("signing a certificate: %v", err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		tb.Fatalf("encoding a key: %v", err)
	}
	files := Files{
		CertFile: filepath.Join(folder, "tls.crt"), KeyFile: filepath.Join(folder, "tls.key"), CAFile: filepath.Join(folder, "ca.crt"),
	}
	write(tb, files.KeyFile, "EC PRIVATE KEY", keyDER)
	write(tb, files.CertFile, "CERTIFICATE", der)
	write(tb, files.CAFile, "CERTIFICATE", trusted.certificate.Raw)
	return files
}

// WriteBundle atomically replaces a file of authorities.
func WriteBundle(tb testing.TB, path string, authorities ...*Authority) {
	tb.Helper()
	var content []byte
	for _, a := range authorities {
		content = append(content, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.certificate.Raw})...)
	}
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		tb.Fatalf("writing %s: %v", path, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		tb.Fatalf("replacing %s: %v", path, err)
	}
}

// Write writes the certificate and key of the authority itself to a directory, for use by an
// issuer.
func (a *Authority) Write(tb testing.TB, folder string) (certFile, keyFile string) {
	tb.Helper()
	keyDER, err := x509.MarshalECPrivateKey(a.key)
	if err != nil {
		tb.Fatalf("encoding a key: %v", err)
	}
	certFile, keyFile = filepath.Join(folder, "issuer.crt"), filepath.Join(folder, "issuer.key")
	write(tb, certFile, "CERTIFICATE", a.certificate.Raw)
	write(tb, keyFile, "EC PRIVATE KEY", keyDER)
	return certFile, keyFile
}

// SigningRequest returns a signing request in DER, for a new key.
func SigningRequest(tb testing.TB) []byte {
	tb.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, newKey(tb))
	if err != nil {
		tb.Fatalf("making a signing request: %v", err)
	}
	return der
}

func newKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatalf("making a key: %v", err)
	}
	return key
}

func write(tb testing.TB, path, kind string, der []byte) {
	tb.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		tb.Fatalf("writing %s: %v", path, err)
	}
}

// Pool returns a pool with the authority's certificate.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}
