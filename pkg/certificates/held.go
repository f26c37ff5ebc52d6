package certificates

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"sync"
)

// PEM is a certificate chain, its private key, and the authorities of the other side, each PEM. Formatting or logging it shows none of them.
type PEM struct {
	Certificate, Key, Authorities []byte
}

const hidden = "certificates.PEM{hidden}"

// Format is [fmt.Formatter]'s.
func (PEM) Format(to fmt.State, _ rune) { _, _ = io.WriteString(to, hidden) }

// MarshalLog is [github.com/go-logr/logr.Marshaler]'s.
func (PEM) MarshalLog() any { return hidden }

// MarshalText is [encoding.TextMarshaler]'s.
func (PEM) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// Parse returns the certificate and the authorities, and an error if they cannot be used: the key is not the certificate's, or there are no
// authorities. An expired certificate can. The error contains nothing of the PEM.
func (p PEM) Parse() (*tls.Certificate, *x509.CertPool, error) {
	certificate, err := p.certificate()
	if err != nil {
		return nil, nil, err
	}
	authorities, _, err := parseAuthorities(p.Authorities)
	if err != nil {
		return nil, nil, authoritiesError(err)
	}
	return certificate, authorities, nil
}

func (p PEM) certificate() (*tls.Certificate, error) {
	certificate, err := tls.X509KeyPair(p.Certificate, p.Key)
	if err != nil {
		return nil, fmt.Errorf("the certificate and its key cannot be used: %w", err)
	}
	return &certificate, nil
}

func authoritiesError(err error) error {
	return fmt.Errorf("the certificate authorities cannot be used: %w", err)
}

// Held is a [Source] of what it was given last.
type Held struct {
	mu          sync.Mutex
	certificate *tls.Certificate
	authorities *x509.CertPool
	absent      error
	stats       Stats
}

// NewHeld returns a source that holds nothing yet. absent is its answer for as long as that is so: it should say what to do.
func NewHeld(absent error) *Held {
	if absent == nil {
		absent = errors.New("there is no certificate yet")
	}
	return &Held{absent: absent}
}

// Hold replaces certificate and authorities, both at once. After an error, which contains nothing of the PEM, those of before stay in force.
func (h *Held) Hold(p PEM) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	certificate, err := p.certificate()
	if err != nil {
		h.stats.CertificateErrors++
		return err
	}
	authorities, first, err := parseAuthorities(p.Authorities)
	if err != nil {
		h.stats.AuthoritiesErrors++
		return authoritiesError(err)
	}
	h.certificate, h.authorities = certificate, authorities
	h.stats.CertificateNotBefore, h.stats.CertificateNotAfter = certificate.Leaf.NotBefore, certificate.Leaf.NotAfter
	h.stats.AuthoritiesNotAfter = first
	return nil
}

// Explain replaces the answer for as long as nothing is held.
func (h *Held) Explain(absent error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.absent = absent
}

// Certificate is [Source]'s.
func (h *Held) Certificate() (*tls.Certificate, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.certificate == nil {
		return nil, h.absent
	}
	return h.certificate, nil
}

// Authorities is [Source]'s.
func (h *Held) Authorities() (*x509.CertPool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.authorities == nil {
		return nil, h.absent
	}
	return h.authorities, nil
}

// Stats is [Source]'s.
func (h *Held) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stats
}
