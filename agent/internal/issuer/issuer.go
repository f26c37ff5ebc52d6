// Package issuer signs the client certificates of Clusters with an authority whose certificate and key are in files.
package issuer

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

const (
	// backdated is how much earlier than now certificates begin: the clocks of a hub's agents differ.
	backdated = 2 * time.Minute
	// minRSABits is the least size of an RSA key, as of NIST SP 800-57 for the years up to 2030.
	minRSABits = 2048
	// maxRSABits bounds what a signature costs to check.
	maxRSABits = 4096
	serialBits = 127
)

// Files are PEM files, which are read again when they change.
type Files struct {
	// CertFile holds the authority's certificate, followed by those above it if there are any, KeyFile its key. REQUIRED.
	CertFile, KeyFile string
	// ClientCAFile holds the authorities of the callers, which have to accept what is issued. REQUIRED.
	ClientCAFile string
	// ServerCertFile holds the agent's own certificate chain. REQUIRED.
	ServerCertFile string
	// ServerCAFile holds the authorities that callers are told to trust. The agent's own certificate must verify against them. REQUIRED.
	ServerCAFile string
	// Refresh is how often they are read. Zero means every five seconds.
	Refresh time.Duration
	// Log takes a line when they cannot be used. Zero discards it.
	Log logr.Logger
}

// Authority signs with what is in the files. It is safe for concurrent use.
type Authority struct {
	files    Files
	followed *certificates.Follower
	clock    clock.PassiveClock
}

// Certificate is one that was issued.
type Certificate struct {
	// Chain is the certificate, followed by its intermediate authorities, PEM.
	Chain []byte
	// ServerAuthorities are those that sign the agent's certificate, PEM.
	ServerAuthorities []byte
	// NotAfter is when it ends, and RenewAt when it should be renewed at the latest.
	NotAfter, RenewAt time.Time
	// Serial is its serial number, in hexadecimal digits.
	Serial string

	leaf *x509.Certificate
}

// Open reads the files, which must be usable together now. Later, nothing is issued while they are not. Call [Authority.Close].
func Open(files Files, c clock.PassiveClock) (*Authority, error) {
	if files.Refresh == 0 {
		files.Refresh = 5 * time.Second
	}
	a := &Authority{files: files, clock: c, followed: certificates.Follow(certificates.Files{
		CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.ClientCAFile, Refresh: files.Refresh, Logger: files.Log,
	})}
	if err := a.check(); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// Close stops reading the files.
func (a *Authority) Close() { a.followed.Close() }

// Stats returns when the authority's certificate ends, and how often its files could not be used.
func (a *Authority) Stats() (notAfter time.Time, errors int64) {
	stats := a.followed.Stats()
	return stats.CertificateNotAfter, stats.CertificateErrors
}

// signer returns the authority's certificate, those above it, and its key.
func (a *Authority) signer() ([]*x509.Certificate, crypto.Signer, error) {
	pair, err := a.followed.Certificate()
	if err != nil {
		return nil, nil, fmt.Errorf("the issuer's %w", err)
	}
	chain := make([]*x509.Certificate, 0, len(pair.Certificate))
	for _, der := range pair.Certificate {
		certificate, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, nil, fmt.Errorf("the issuer's certificate %s: %w", a.files.CertFile, err)
		}
		chain = append(chain, certificate)
	}
	if !chain[0].IsCA {
		return nil, nil, fmt.Errorf("the issuer's certificate %s is not one of an authority (CA:TRUE is missing)", a.files.CertFile)
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, nil, fmt.Errorf("the issuer's key %s cannot sign", a.files.KeyFile)
	}
	return chain, signer, nil
}

// serverAuthorities returns the certificates in the file, and nothing else that is in it. They have to accept the agent's own certificate: a caller
// that trusts them alone would be lost otherwise.
func (a *Authority) serverAuthorities() ([]byte, error) {
	trusted, err := cert.CertsFromFile(a.files.ServerCAFile)
	if err != nil {
		return nil, fmt.Errorf("the authorities of the agent's own certificate: %w", err)
	}
	own, err := cert.CertsFromFile(a.files.ServerCertFile)
	if err != nil {
		return nil, fmt.Errorf("the agent's own certificate: %w", err)
	}
	if err := a.verify(own, pool(trusted), x509.ExtKeyUsageServerAuth); err != nil {
		return nil, fmt.Errorf("the authorities in %s do not accept the agent's own certificate %s: %w; put its authority there (--server-ca-file)",
			a.files.ServerCAFile, a.files.ServerCertFile, err)
	}
	only, err := cert.EncodeCertificates(trusted...)
	if err != nil {
		return nil, fmt.Errorf("the authorities of the agent's own certificate: %w", err)
	}
	return only, nil
}

// verify checks that the authorities accept the first of the certificates, which the others lead to.
func (a *Authority) verify(chain []*x509.Certificate, authorities *x509.CertPool, usage x509.ExtKeyUsage) error {
	_, err := chain[0].Verify(x509.VerifyOptions{
		Roots: authorities, Intermediates: pool(chain[1:]), CurrentTime: a.clock.Now(), KeyUsages: []x509.ExtKeyUsage{usage},
	})
	return err
}

func pool(of []*x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	for _, certificate := range of {
		p.AddCert(certificate)
	}
	return p
}

// check says why nothing can be issued, nil when it can.
func (a *Authority) check() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making a key: %w", err)
	}
	_, err = a.Issue(key.Public(), spiffeid.RequireFromString("spiffe://check/check"), time.Minute)
	return err
}

// Issue signs a client certificate whose only name is the identity. It ends after the lifetime, or with its authority. Nothing is issued that the
// agent would refuse, or with authorities that would refuse the agent, as while only one of the files has been replaced.
func (a *Authority) Issue(key crypto.PublicKey, id spiffeid.ID, lifetime time.Duration) (Certificate, error) {
	chain, signer, err := a.signer()
	if err != nil {
		return Certificate{}, err
	}
	signed, err := Sign(chain[0], signer, key, id, a.clock.Now(), lifetime)
	if err != nil {
		return Certificate{}, err
	}
	if signed.ServerAuthorities, err = a.serverAuthorities(); err != nil {
		return Certificate{}, err
	}
	for _, above := range chain {
		if !bytes.Equal(above.RawIssuer, above.RawSubject) { // who verifies it has the root
			signed.Chain = append(signed.Chain, pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: above.Raw})...)
		}
	}
	// A caller that has given up its certificate for one that is refused would be lost.
	callers, err := a.followed.Authorities()
	if err != nil {
		return Certificate{}, fmt.Errorf("the client %w", err)
	}
	if err := a.verify(append([]*x509.Certificate{signed.leaf}, chain...), callers, x509.ExtKeyUsageClientAuth); err != nil {
		return Certificate{}, fmt.Errorf("the authorities in %s do not accept what the issuer %s signs: %w; put the issuer there (--client-ca-file)",
			a.files.ClientCAFile, a.files.CertFile, err)
	}
	return signed, nil
}

// Sign signs a client certificate with an authority, as [Authority.Issue] does. The chain is the certificate alone.
func Sign(
	authority *x509.Certificate, signer crypto.Signer, key crypto.PublicKey, id spiffeid.ID, now time.Time, lifetime time.Duration,
) (Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	if err != nil {
		return Certificate{}, fmt.Errorf("drawing a serial number: %w", err)
	}
	end := now.Add(lifetime)
	if authority.NotAfter.Before(end) {
		end = authority.NotAfter
	}
	if !end.After(now) {
		return Certificate{}, fmt.Errorf("the issuer's certificate has expired at %s", authority.NotAfter.UTC().Format(time.RFC3339))
	}
	template := &x509.Certificate{
		SerialNumber:          serial,
		NotBefore:             now.Add(-backdated),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{id.URL()},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, authority, key, signer)
	if err != nil {
		return Certificate{}, fmt.Errorf("signing a certificate for %s: %w", id, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return Certificate{}, fmt.Errorf("signing a certificate for %s: %w", id, err)
	}
	return Certificate{
		leaf:     leaf,
		Chain:    pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: der}),
		NotAfter: end.Truncate(time.Second),
		// Half of its life is left to reach the agent in.
		RenewAt: now.Add(end.Sub(now) / 2).Truncate(time.Second),
		Serial:  serial.Text(16),
	}, nil
}

// ParseRequest returns the public key of a PKCS #10 signing request, whose signature proves that the sender has the private one. An error
// says what to do about the request.
func ParseRequest(der []byte) (crypto.PublicKey, error) {
	request, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("is not a PKCS #10 signing request in DER; `openssl req -new -outform DER` makes one")
	}
	// Before the signature is checked: what that costs grows with the key.
	if err := checkKey(request); err != nil {
		return nil, err
	}
	if err := request.CheckSignature(); err != nil {
		return nil, errors.New("is not signed with its own key")
	}
	return request.PublicKey, nil
}

func checkKey(request *x509.CertificateRequest) error {
	switch key := request.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if !slices.Contains([]elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()}, key.Curve) {
			return fmt.Errorf("has a key on the curve %s; use P-256", key.Curve.Params().Name)
		}
	case ed25519.PublicKey:
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Errorf("has an RSA key of %d bits; use %d to %d, or ECDSA P-256", bits, minRSABits, maxRSABits)
		}
	default:
		return fmt.Errorf("has a key of the kind %s; use ECDSA P-256", request.PublicKeyAlgorithm)
	}
	return nil
}

// Fingerprint returns the SHA-256 of a public key as hexadecimal digits.
func Fingerprint(key crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return "", fmt.Errorf("encoding a public key: %w", err)
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), nil
}
