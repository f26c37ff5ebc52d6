// Package certificates manages a certificate, its key and the certificate authorities of the other
// side, all of which may be replaced at any time. A [Source] provides them: a [Follower] from PEM
// files, and [Held] from PEM data that the program obtains by other means. [ParseRequest] checks
// the signing requests for such certificates.
//
// The content is never logged and never part of an error. grpc-go's own provider logs both files,
// including the private key, if they do not match, which happens while they are being replaced.
// controller-runtime's certwatcher follows a certificate and its key, but not the authorities.
package certificates

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

// Source provides a certificate and the authorities of the other side. Its methods are called for
// every handshake. They must be safe for concurrent use, and must not wait for the network.
type Source interface {
	// Certificate returns the last usable certificate, with its key and leaf. It may have expired
	// since. An error reports why there has never been one, and what to do. It contains no key
	// material.
	Certificate() (*tls.Certificate, error)
	// Authorities returns the last usable authorities, and errors like Certificate. The pool must
	// not be modified.
	Authorities() (*x509.CertPool, error)
	// Stats returns the current numbers.
	Stats() Stats
}

var (
	_ Source = (*Follower)(nil)
	_ Source = (*Held)(nil)
)

// Files are the files to follow.
type Files struct {
	// CertFile holds the certificate chain, KeyFile its private key, and CAFile the authorities of
	// the other side. REQUIRED.
	CertFile, KeyFile, CAFile string
	// Refresh is how often the files are read. REQUIRED, positive.
	Refresh time.Duration
	// Logger receives a line when files cannot be used, and when they can be used again. The zero
	// Logger discards it.
	Logger logr.Logger
}

// Stats are numbers for metrics.
type Stats struct {
	// CertificateNotAfter and AuthoritiesNotAfter are when the current certificate and the first of
	// the current authorities expire. They are zero if there are none.
	CertificateNotAfter, AuthoritiesNotAfter time.Time
	// CertificateNotBefore and AuthoritiesNotBefore are when the validity of these two certificates
	// begins. They are zero if there are none.
	CertificateNotBefore, AuthoritiesNotBefore time.Time
	// CertificateErrors and AuthoritiesErrors count how often the content could not be read or
	// used.
	CertificateErrors, AuthoritiesErrors int64
}

// Follower provides the last usable content of files. It is safe for concurrent use.
type Follower struct {
	files Files
	stop  chan struct{}
	done  chan struct{}
	close sync.Once

	// reading is held while files are read.
	reading sync.Mutex

	// mu is never held while files are read: a server may need what it guards for every call.
	mu               sync.Mutex
	certificate      *tls.Certificate
	authorities      *x509.CertPool
	certificateError error // of the last read; nil if it succeeded
	authoritiesError error
	stats            Stats
}

// Follow reads the files, which may still be unusable, and keeps reading them until
// [Follower.Close].
func Follow(files Files) *Follower {
	if files.Logger.GetSink() == nil {
		files.Logger = logr.Discard()
	}
	f := &Follower{files: files, stop: make(chan struct{}), done: make(chan struct{})}
	f.Read()
	go func() {
		defer close(f.done)
		ticker := time.NewTicker(files.Refresh)
		defer ticker.Stop()
		for {
			select {
			case <-f.stop:
				return
			case <-ticker.C:
				f.Read()
			}
		}
	}()
	return f
}

// Close stops following the files. It may be called more than once.
func (f *Follower) Close() {
	f.close.Do(func() { close(f.stop) })
	<-f.done
}

// Certificate returns the last usable certificate. An error reports why there has never been one.
func (f *Follower) Certificate() (*tls.Certificate, error) {
	last := func() (*tls.Certificate, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.certificate == nil {
			return nil, f.certificateError
		}
		return f.certificate, nil
	}
	if certificate, err := last(); err == nil {
		return certificate, nil
	}
	f.readCertificate() // the files may be usable by now
	return last()
}

// Authorities returns the last usable authorities. The pool is the same one until they change. An
// error reports why there have never been any.
func (f *Follower) Authorities() (*x509.CertPool, error) {
	last := func() (*x509.CertPool, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.authorities == nil {
			return nil, f.authoritiesError
		}
		return f.authorities, nil
	}
	if authorities, err := last(); err == nil {
		return authorities, nil
	}
	f.readAuthorities()
	return last()
}

// Stats returns the current numbers.
func (f *Follower) Stats() Stats {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stats
}

// Read reads the files now.
func (f *Follower) Read() {
	f.readCertificate()
	f.readAuthorities()
}

func (f *Follower) readCertificate() {
	f.reading.Lock()
	defer f.reading.Unlock()
	certificate, err := loadCertificate(f.files.CertFile, f.files.KeyFile)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log(err, f.certificateError, "certificate", f.files.CertFile, "key", f.files.KeyFile)
	if f.certificateError = err; err != nil {
		f.stats.CertificateErrors++
		return
	}
	f.certificate = certificate
	f.stats.CertificateNotBefore, f.stats.CertificateNotAfter = certificate.Leaf.NotBefore, certificate.Leaf.NotAfter
}

func (f *Follower) readAuthorities() {
	f.reading.Lock()
	defer f.reading.Unlock()
	pool, first, err := loadAuthorities(f.files.CAFile)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log(err, f.authoritiesError, "authorities", f.files.CAFile)
	if f.authoritiesError = err; err != nil {
		f.stats.AuthoritiesErrors++
		return
	}
	if f.authorities == nil || !f.authorities.Equal(pool) {
		f.authorities = pool
	}
	f.stats.AuthoritiesNotBefore, f.stats.AuthoritiesNotAfter = first.NotBefore, first.NotAfter
}

// log reports when files become unusable, or usable again.
func (f *Follower) log(err, before error, about ...any) {
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		f.files.Logger.Error(err, "files cannot be used; the last usable ones stay in use", about...)
	case err == nil && before != nil:
		f.files.Logger.Info("files can be used again", about...)
	}
}

// loadCertificate returns errors without any content of the files.
func loadCertificate(certFile, keyFile string) (*tls.Certificate, error) {
	certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("certificate %s and key %s cannot be used: %w", certFile, keyFile, err)
	}
	return &certificate, nil
}

func loadAuthorities(file string) (*x509.CertPool, *x509.Certificate, error) {
	content, err := os.ReadFile(file) //nolint:gosec // The operator names the file.
	if err != nil {
		return nil, nil, fmt.Errorf("certificate authorities %s cannot be used: %w", file, err)
	}
	pool, first, err := parseAuthorities(content)
	if err != nil {
		return nil, nil, fmt.Errorf("certificate authorities %s cannot be used: %w", file, err)
	}
	return pool, first, nil
}

// parseAuthorities returns the certificates in PEM data, and the first of them to expire. Other PEM
// blocks are skipped.
func parseAuthorities(content []byte) (*x509.CertPool, *x509.Certificate, error) {
	pool := x509.NewCertPool()
	var first *x509.Certificate
	for block, rest := pem.Decode(content); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" {
			continue
		}
		certificate, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, nil, err
		}
		pool.AddCert(certificate)
		if first == nil || certificate.NotAfter.Before(first.NotAfter) {
			first = certificate
		}
	}
	if first == nil {
		return nil, nil, errors.New("there is no certificate in it")
	}
	return pool, first, nil
}
