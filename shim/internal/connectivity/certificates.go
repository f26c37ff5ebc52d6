package connectivity

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/karpenter/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

// RegisterCertificates registers metrics of the certificates for calls to the agent.
func RegisterCertificates(registerer prometheus.Registerer, stats func() certificates.Stats) error {
	var errs []error
	for _, of := range []struct {
		name                string
		notBefore, notAfter func(certificates.Stats) time.Time
		errors              func(certificates.Stats) int64
	}{
		{
			"client", func(s certificates.Stats) time.Time { return s.CertificateNotBefore },
			func(s certificates.Stats) time.Time { return s.CertificateNotAfter },
			func(s certificates.Stats) int64 { return s.CertificateErrors },
		},
		{
			"agent-ca", func(s certificates.Stats) time.Time { return s.AuthoritiesNotBefore },
			func(s certificates.Stats) time.Time { return s.AuthoritiesNotAfter },
			func(s certificates.Stats) int64 { return s.AuthoritiesErrors },
		},
	} {
		labels := prometheus.Labels{"certificate": of.name}
		errs = append(errs,
			registerer.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Namespace: metrics.Namespace, Subsystem: subsystem, Name: "certificate_not_before_seconds", ConstLabels: labels,
				Help: "Start of the validity of the certificate in use, or of the first to expire if there are several, in seconds since 1970. " +
					"0 if there is none.",
			}, func() float64 { return seconds(of.notBefore(stats())) })),
			registerer.Register(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
				Namespace: metrics.Namespace, Subsystem: subsystem, Name: "certificate_not_after_seconds", ConstLabels: labels,
				Help: "Expiry of the certificate in use, or of the first to expire if there are several, in seconds since 1970. 0 if there is none.",
			}, func() float64 { return seconds(of.notAfter(stats())) })),
			registerer.Register(prometheus.NewCounterFunc(prometheus.CounterOpts{
				Namespace: metrics.Namespace, Subsystem: subsystem, Name: "certificate_reload_errors_total", ConstLabels: labels,
				Help: "Number of times unusable files were read. The last usable files stay in use.",
			}, func() float64 { return float64(of.errors(stats())) })))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("registering the certificates' metrics: %w", err)
	}
	return nil
}

// seconds returns the seconds since 1970, or 0 for the zero time.
func seconds(at time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return float64(at.Unix())
}
