package fakeagent

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"time"
)

// authorityLifetime is longer than any test.
const authorityLifetime = 1000 * time.Hour

// Authority signs certificates of the fake agent and of its callers. It is safe for concurrent use.
type Authority struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

// NewAuthority returns a new authority that is valid from an hour before now.
func NewAuthority(now time.Time) (*Authority, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "fake agent"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(authorityLifetime),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("making the authority: %w", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("making the authority: %w", err)
	}
	return &Authority{certificate: certificate, key: key}, nil
}

// PEM returns the authority's certificate.
func (a *Authority) PEM() []byte { return encodeCertificate(a.certificate.Raw) }

// Pool returns a new pool with the authority's certificate alone.
func (a *Authority) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.certificate)
	return pool
}

// IssueServer returns a server certificate for the hosts, and its private key, both in PEM. Each
// host is a name or an IP address. The certificate is valid for as long as the authority.
func (a *Authority) IssueServer(hosts ...string) (certificate, key []byte, err error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "fake agent"}, NotBefore: a.certificate.NotBefore, NotAfter: a.certificate.NotAfter,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return a.issue(template)
}

// IssueClient returns a client certificate with the SPIFFE ID, and its private key, both in PEM.
// The certificate is valid for as long as the authority.
func (a *Authority) IssueClient(id string) (certificate, key []byte, err error) {
	uri, err := url.Parse(id)
	if err != nil {
		return nil, nil, fmt.Errorf("the id %q: %w", id, err)
	}
	if err := checkSPIFFE(uri); err != nil {
		return nil, nil, fmt.Errorf("the id %q is not a SPIFFE id: %w", id, err)
	}
	return a.issue(&x509.Certificate{
		NotBefore: a.certificate.NotBefore, NotAfter: a.certificate.NotAfter,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, URIs: []*url.URL{uri},
	})
}

// issue signs a certificate for a new key.
func (a *Authority) issue(template *x509.Certificate) (certificate, key []byte, err error) {
	signer, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	certificate, err = a.sign(signer.Public(), template)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(signer)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding a private key: %w", err)
	}
	return certificate, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// sign returns a certificate in PEM, with a random serial number.
func (a *Authority) sign(key crypto.PublicKey, template *x509.Certificate) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("choosing a serial number: %w", err)
	}
	template.SerialNumber, template.KeyUsage = serial, x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key, a.key)
	if err != nil {
		return nil, fmt.Errorf("signing a certificate: %w", err)
	}
	return encodeCertificate(der), nil
}

func newKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a private key: %w", err)
	}
	return key, nil
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
