package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
)

// Reasons for which a TLS handshake fails.
const (
	handshakeNoCertificate = "no_certificate"
	handshakeExpired       = "expired"
	handshakeUnknownIssuer = "unknown_issuer"
	handshakeInvalid       = "invalid_certificate"
	handshakeRefusedUs     = "refused_by_client"
	handshakeNoTLS         = "no_tls"
	handshakeBroken        = "broken_off"
	handshakeOther         = "other"
)

// handshakeFailures counts the handshakes that fail, which no call and no client's error reports:
// the client sees a connection that ends. It also logs some of them. Anyone who can reach the port
// can cause them.
type handshakeFailures struct {
	total *prometheus.CounterVec
	log   logr.Logger
	every rate.Sometimes
}

func newHandshakeFailures(log logr.Logger) *handshakeFailures {
	f := &handshakeFailures{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "capi_agent_tls_handshake_errors_total",
			Help: "TLS handshakes that failed, by reason: the client has no_certificate, one that is expired (or not valid yet), or one of an " +
				"unknown_issuer, or one that is an invalid_certificate otherwise; refused_by_client: it does not trust the agent's; no_tls: it does not " +
				"speak TLS; broken_off: the connection ended or was too slow, as that of a probe does; other.",
		}, []string{"reason"}),
		log: log, every: rate.Sometimes{First: 10, Interval: 10 * time.Second},
	}
	for _, reason := range []string{
		handshakeNoCertificate, handshakeExpired, handshakeUnknownIssuer, handshakeInvalid, handshakeRefusedUs, handshakeNoTLS, handshakeBroken,
		handshakeOther,
	} {
		f.total.WithLabelValues(reason)
	}
	return f
}

func (f *handshakeFailures) note(from net.Addr, err error) {
	reason := handshakeFailure(err)
	f.total.WithLabelValues(reason).Inc()
	if reason == handshakeBroken {
		return
	}
	f.every.Do(func() {
		f.log.Info("a TLS handshake failed", "address", from.String(), "reason", reason, "cause", err.Error())
	})
}

// handshakeFailure returns the reason of a failed handshake.
func handshakeFailure(err error) string {
	var (
		invalid x509.CertificateInvalidError
		unknown x509.UnknownAuthorityError
		checked *tls.CertificateVerificationError
		header  tls.RecordHeaderError
		timeout net.Error
		remote  *net.OpError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return handshakeExpired
	case errors.As(err, &unknown):
		return handshakeUnknownIssuer
	case errors.As(err, &invalid), errors.As(err, &checked):
		return handshakeInvalid
	case errors.As(err, &header):
		return handshakeNoTLS
	case strings.Contains(err.Error(), "client didn't provide a certificate"): // crypto/tls has no type for it
		return handshakeNoCertificate
	case errors.As(err, &remote) && remote.Op == "remote error": // crypto/tls's word for an alert of the other side
		return handshakeRefusedUs
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.Canceled), errors.As(err, &timeout) && timeout.Timeout():
		return handshakeBroken
	default:
		return handshakeOther
	}
}
