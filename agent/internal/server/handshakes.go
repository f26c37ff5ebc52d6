package server

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"
)

// These are the reasons why a handshake failed. They are the values of a metric's label.
const (
	// failedExpired means that the client's certificate, or one of its chain, is not valid now.
	failedExpired = "expired"
	// failedUnknownAuthority means that no authority of the agent has signed the certificate.
	failedUnknownAuthority = "unknown-authority"
	failedNoCertificate    = "no-certificate"
	// failedBadCertificate means that the certificate cannot be used for another reason.
	failedBadCertificate = "bad-certificate"
	// failedRejected means that the client rejected the agent: it sent a TLS alert. Most often
	// it does not trust the agent's certificate, or that has expired.
	failedRejected = "rejected-by-client"
	// failedNotTLS means that the client does not speak TLS 1.3 with HTTP/2.
	failedNotTLS  = "protocol"
	failedTimeout = "timeout"
	// failedClosed means that the connection ended: the client closed it, as TCP probes do, or
	// too many connections had no identity.
	failedClosed = "closed"
	failedOther  = "other"
)

func failures() []string {
	return []string{
		failedExpired, failedUnknownAuthority, failedNoCertificate, failedBadCertificate, failedRejected,
		failedNotTLS, failedTimeout, failedClosed, failedOther,
	}
}

// failureOf returns the reason why a handshake failed.
func failureOf(err error) string {
	var (
		verification *tls.CertificateVerificationError
		record       tls.RecordHeaderError
		operation    *net.OpError
		network      net.Error
	)
	switch {
	case errors.As(err, &verification):
		return failureOfCertificate(verification.Err)
	case errors.As(err, &record):
		return failedNotTLS
	case errors.As(err, &operation) && operation.Op == "remote error":
		return failedRejected
	case errors.As(err, &network) && network.Timeout():
		return failedTimeout
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.As(err, &operation):
		return failedClosed
	}
	// crypto/tls has no types for these.
	text := err.Error()
	for _, known := range []struct{ text, reason string }{
		{"didn't provide a certificate", failedNoCertificate},
		{"invalid signature by the client certificate", failedBadCertificate},
		{"failed to parse client certificate", failedBadCertificate},
		{"unsupported certificate", failedBadCertificate},
		{"unsupported versions", failedNotTLS},
		{"application protocol", failedNotTLS},
		{"ALPN", failedNotTLS},
	} {
		if strings.Contains(text, known.text) {
			return known.reason
		}
	}
	return failedOther
}

// failureOfCertificate returns the reason why a client's certificate was not verified.
func failureOfCertificate(err error) string {
	var (
		invalid   x509.CertificateInvalidError
		authority x509.UnknownAuthorityError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return failedExpired
	case errors.As(err, &authority):
		return failedUnknownAuthority
	}
	return failedBadCertificate
}

// counting counts the handshakes that fail.
type counting struct {
	credentials.TransportCredentials

	failed *failedHandshakes
}

// ServerHandshake implements [credentials.TransportCredentials].
func (c counting) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secured, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		c.failed.add(raw.RemoteAddr(), err)
	}
	return secured, info, err
}

// Clone implements [credentials.TransportCredentials].
func (c counting) Clone() credentials.TransportCredentials {
	return counting{c.TransportCredentials.Clone(), c.failed}
}

// failedHandshakes counts and logs handshakes that failed, by reason.
type failedHandshakes struct {
	*prometheus.CounterVec

	log    logr.Logger
	seldom map[string]*rate.Sometimes
}

func newFailedHandshakes(log logr.Logger) *failedHandshakes {
	f := &failedHandshakes{
		CounterVec: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capi_agent_handshake_errors_total", Help: "TLS handshakes that failed, by reason.",
		}, []string{"reason"}),
		log: log, seldom: map[string]*rate.Sometimes{},
	}
	for _, reason := range failures() {
		f.WithLabelValues(reason)
		f.seldom[reason] = &rate.Sometimes{Interval: time.Minute}
	}
	return f
}

// HandshakeMetric returns the metric of failed handshakes, for its description. [ListenTLS]
// registers the one that counts.
func HandshakeMetric() prometheus.Collector { return newFailedHandshakes(logr.Discard()) }

// maxCause is how many bytes of an error are logged. It may quote the client's certificate.
const maxCause = 256

// add counts a failure. Every client that reaches the port can cause one, so few are logged.
func (f *failedHandshakes) add(from net.Addr, err error) {
	reason := failureOf(err)
	f.WithLabelValues(reason).Inc()
	if reason == failedClosed {
		return
	}
	cause := err.Error()
	f.seldom[reason].Do(func() {
		f.log.Info("a TLS handshake failed; further ones with this reason are logged once a minute at most",
			"reason", reason, "address", from.String(), "cause", cause[:min(len(cause), maxCause)])
	})
}
