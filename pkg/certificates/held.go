package certificates

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"sync"
)

// PEM holds a certificate chain, its private key and the authorities of the other side, as PEM
// data. Formatting or logging it reveals nothing.
type PEM struct {
	Certificate, Key, Authorities []byte
}

const hidden = "certificates.PEM{hidden}"

// Format implements [fmt.Formatter].
func (PEM) Format(to fmt.State, _ rune) { _, _ = io.WriteString(to, hidden) }

// MarshalLog implements [github.com/go-logr/logr.Marshaler].
func (PEM) MarshalLog() any { return hidden }

// MarshalText implements [encoding.TextMarshaler].
func (PEM) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// Parse returns the certificate and the authorities. It returns an error if they cannot be used,
// for example because the key does not match or there are no authorities. An expired certificate is
// no error. The error contains no PEM content.
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

// Held is a [Source] of the data that it was last given.
type Held struct {
	mu          sync.Mutex
	certificate *tls.Certificate
	authorities *x509.CertPool
	absent      error
	stats       Stats
}

// NewHeld returns an empty source. Until it holds data, it returns the error absent, which should
// state what to do.
func NewHeld(absent error) *Held {
	if absent == nil {
		absent = errors.New("there is no certificate yet")
	}
	return &Held{absent: absent}
}

// Hold atomically replaces certificate and authorities. After an error the previous ones stay in
// force. The error contains no PEM content.
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
	h.stats.AuthoritiesNotBefore, h.stats.AuthoritiesNotAfter = first.NotBefore, first.NotAfter
	return nil
}

// Explain replaces the error that is returned while nothing is held.
func (h *Held) Explain(absent error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.absent = absent
}

// Certificate implements [Source].
func (h *Held) Certificate() (*tls.Certificate, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.certificate == nil {
		return nil, h.absent
	}
	return h.certificate, nil
}

// Authorities implements [Source].
func (h *Held) Authorities() (*x509.CertPool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.authorities == nil {
		return nil, h.absent
	}
	return h.authorities, nil
}

// Stats implements [Source].
func (h *Held) Stats() Stats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stats
}
