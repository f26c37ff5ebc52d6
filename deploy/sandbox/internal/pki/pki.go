// Package pki issues the certificates of a sandbox. The keys are stored in its folder without
// further protection. The agent's tests have an authority of their own, package testpki,
// which also makes invalid certificates.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// validity exceeds the lifetime of any sandbox.
const validity = 365 * 24 * time.Hour

// CA is a certificate authority.
type CA struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	// PEM is the authority's certificate.
	PEM []byte
}

// Pair is a certificate with its private key, both PEM.
type Pair struct {
	Certificate, Key []byte
}

// NewCA makes an authority of the given name.
func NewCA(name string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	if err := complete(template); err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing the authority %q: %w", name, err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &CA{certificate: certificate, key: key, PEM: encode("CERTIFICATE", der)}, nil
}

// ReadCA returns the authority of a pair that [CA.Pair] returned.
func ReadCA(pair Pair) (*CA, error) {
	both, err := tls.X509KeyPair(pair.Certificate, pair.Key)
	if err != nil {
		return nil, err
	}
	key, ok := both.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the authority has a %T, not an ECDSA key", both.PrivateKey)
	}
	return &CA{certificate: both.Leaf, key: key, PEM: pair.Certificate}, nil
}

// Pair returns the authority's own certificate and key, for other signers.
func (ca *CA) Pair() (Pair, error) {
	der, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		return Pair{}, err
	}
	return Pair{Certificate: ca.PEM, Key: encode("PRIVATE KEY", der)}, nil
}

// Server issues a serving certificate for loopback.
func (ca *CA) Server(name string) (Pair, error) {
	return ca.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	})
}

// User issues a client certificate for a Kubernetes user in the given groups.
func (ca *CA) User(name string, groups ...string) (Pair, error) {
	return ca.issue(&x509.Certificate{
		Subject:     pkix.Name{CommonName: name, Organization: groups},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// Workload issues a client certificate whose only identity is a SPIFFE ID.
func (ca *CA) Workload(id string) (Pair, error) {
	uri, err := url.Parse(id)
	if err != nil {
		return Pair{}, err
	}
	return ca.issue(&x509.Certificate{
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		URIs:        []*url.URL{uri},
	})
}

func (ca *CA) issue(template *x509.Certificate) (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, err
	}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	if err := complete(template); err != nil {
		return Pair{}, err
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.certificate, key.Public(), ca.key)
	if err != nil {
		return Pair{}, fmt.Errorf("signing %q: %w", template.Subject.CommonName, err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Pair{}, err
	}
	return Pair{Certificate: encode("CERTIFICATE", der), Key: encode("PRIVATE KEY", keyDER)}, nil
}

// Write stores the pair as <dir>/<name>.crt and <dir>/<name>.key and returns the two paths.
func (p Pair) Write(dir, name string) (certificate, key string, err error) {
	certificate, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if err := os.WriteFile(certificate, p.Certificate, 0o600); err != nil {
		return "", "", err
	}
	return certificate, key, os.WriteFile(key, p.Key, 0o600)
}

// ServiceAccountKey generates the key with which an API server signs ServiceAccount tokens.
func ServiceAccountKey() ([]byte, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	return encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)), nil
}

// complete sets the fields that all certificates have in common.
func complete(template *x509.Certificate) error {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return err
	}
	template.SerialNumber = serial
	// Backdated by an hour, for clocks that were just set.
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(validity)
	return nil
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
