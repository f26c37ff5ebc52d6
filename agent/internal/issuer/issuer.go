// Package issuer signs the client certificates of Clusters with an authority whose certificate and
// key are read from files.
package issuer

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"

	"github.com/go-logr/logr"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

const (
	// backdated is how far the validity of certificates begins in the past, because the clocks of a
	// hub's agents differ.
	backdated  = 2 * time.Minute
	serialBits = 127
)

// Files are PEM files, which are reloaded when they change.
type Files struct {
	// CertFile holds the authority's certificate, followed by the certificates above it, if any.
	// KeyFile holds its key. REQUIRED.
	CertFile, KeyFile string
	// ClientCAFile holds the authorities that the agent accepts for callers. They must accept the
	// issued certificates. REQUIRED.
	ClientCAFile string
	// ServerCertFile holds the agent's own certificate chain. REQUIRED.
	ServerCertFile string
	// ServerCAFile holds the authorities that are sent to callers as trusted. The agent's own
	// certificate must verify against them. REQUIRED.
	ServerCAFile string
	// Refresh is how often the files are read. Zero means every five seconds.
	Refresh time.Duration
	// Log receives a line if the files cannot be used. Zero discards it.
	Log logr.Logger
}

// Authority signs certificates with the authority in the files. It is safe for concurrent use.
type Authority struct {
	files    Files
	followed *certificates.Follower
	clock    clock.PassiveClock
}

// Certificate is an issued certificate.
type Certificate struct {
	// Chain is the certificate followed by its intermediate authorities. PEM.
	Chain []byte
	// ServerAuthorities are the authorities of the agent's own certificate. PEM.
	ServerAuthorities []byte
	// NotAfter is when the certificate expires, and RenewAt when it should be renewed at the
	// latest.
	NotAfter, RenewAt time.Time
	// Serial is the serial number in hexadecimal digits.
	Serial string

	leaf *x509.Certificate
}

// Open reads the files, which must be usable together. If they become unusable later, or a
// certificate has expired, nothing is issued until they are usable again: the agent has other
// callers and other work. The caller must call [Authority.Close].
func Open(files Files, c clock.PassiveClock) (*Authority, error) {
	if files.Refresh == 0 {
		files.Refresh = 5 * time.Second
	}
	a := &Authority{files: files, clock: c, followed: certificates.Follow(certificates.Files{
		CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.ClientCAFile, Refresh: files.Refresh, Logger: files.Log,
	})}
	switch err := a.check(); {
	case expired(err):
		files.Log.Error(err, "no certificates are issued until the expired one is replaced")
	case err != nil:
		a.Close()
		return nil, err
	}
	return a, nil
}

// errExpired is wrapped if the authority's certificate has expired.
var errExpired = errors.New("the issuer's certificate has expired")

// expired reports whether an error of [Authority.Issue] is due to a certificate that has expired.
func expired(err error) bool {
	invalid, is := errors.AsType[x509.CertificateInvalidError](err)
	return errors.Is(err, errExpired) || is && invalid.Reason == x509.Expired
}

// Close stops following the files.
func (a *Authority) Close() { a.followed.Close() }

// Stats returns when the validity of the authority's certificate begins and ends, and how often its
// files could not be used.
func (a *Authority) Stats() (notBefore, notAfter time.Time, errors int64) {
	stats := a.followed.Stats()
	return stats.CertificateNotBefore, stats.CertificateNotAfter, stats.CertificateErrors
}

// signer returns the chain of the authority's certificate, and its key.
func (a *Authority) signer() ([]*x509.Certificate, crypto.Signer, error) {
	pair, err := a.followed.Certificate()
	if err != nil {
		return nil, nil, fmt.Errorf("the issuer's %w", err)
	}
	chain, err := Chain(pair)
	if err != nil {
		return nil, nil, fmt.Errorf("the issuer's certificate %s: %w", a.files.CertFile, err)
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

// Chain returns a pair's certificates: its own, and those above it.
func Chain(pair *tls.Certificate) ([]*x509.Certificate, error) {
	chain := make([]*x509.Certificate, 0, len(pair.Certificate))
	for _, der := range pair.Certificate {
		certificate, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, err
		}
		chain = append(chain, certificate)
	}
	return chain, nil
}

// serverAuthorities returns only the certificates of the file, without any other content. They must
// accept the agent's own certificate: a caller that trusts only them could not reach the agent
// otherwise.
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
		return nil, fmt.Errorf("the authorities in %s (--server-ca-file) do not accept the agent's own certificate %s: %w; add its CA to that file",
			a.files.ServerCAFile, a.files.ServerCertFile, err)
	}
	only, err := cert.EncodeCertificates(trusted...)
	if err != nil {
		return nil, fmt.Errorf("the authorities of the agent's own certificate: %w", err)
	}
	return only, nil
}

// verify checks that the authorities accept the first certificate. The others are its
// intermediates.
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

// check returns nil if certificates can be issued, and the reason as an error otherwise.
func (a *Authority) check() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making a key: %w", err)
	}
	_, err = a.Issue(key.Public(), spiffeid.RequireFromString("spiffe://check/check"), time.Minute)
	return err
}

// Issue signs a client certificate whose only name is the identity. The certificate expires after
// the lifetime, or with its authority if that is earlier. Issue fails rather than return a
// certificate that the agent would reject, or authorities that would reject the agent. This can
// happen while only some of the files have been replaced.
func (a *Authority) Issue(key crypto.PublicKey, id spiffeid.ID, lifetime time.Duration) (Certificate, error) {
	chain, signer, err := a.signer()
	if err != nil {
		return Certificate{}, err
	}
	signed, err := Sign(chain, signer, key, id, a.clock.Now(), lifetime)
	if err != nil {
		return Certificate{}, err
	}
	if signed.ServerAuthorities, err = a.serverAuthorities(); err != nil {
		return Certificate{}, err
	}
	// A caller that replaces its certificate by one that the agent rejects could no longer call.
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

// Sign signs a client certificate like [Authority.Issue], with the authority that is the first
// certificate of its chain. The others are intermediates, which the new certificate's chain has as
// well.
func Sign(
	chain []*x509.Certificate, signer crypto.Signer, key crypto.PublicKey, id spiffeid.ID, now time.Time, lifetime time.Duration,
) (Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), serialBits))
	if err != nil {
		return Certificate{}, fmt.Errorf("generating a serial number: %w", err)
	}
	authority := chain[0]
	end := now.Add(lifetime)
	if authority.NotAfter.Before(end) {
		end = authority.NotAfter
	}
	if !end.After(now) {
		return Certificate{}, fmt.Errorf("%w at %s", errExpired, authority.NotAfter.UTC().Format(time.RFC3339))
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
	encoded := pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: der})
	for _, above := range chain {
		// The verifying side has the root.
		if !bytes.Equal(above.RawIssuer, above.RawSubject) {
			encoded = append(encoded, pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: above.Raw})...)
		}
	}
	return Certificate{
		leaf:     leaf,
		Chain:    encoded,
		NotAfter: end.Truncate(time.Second),
		// The second half of its lifetime is left to reach the agent.
		RenewAt: now.Add(end.Sub(now) / 2).Truncate(time.Second),
		Serial:  serial.Text(16),
	}, nil
}

// Fingerprint returns the SHA-256 hash of a public key in hexadecimal digits.
func Fingerprint(key crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return "", fmt.Errorf("encoding a public key: %w", err)
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), nil
}
