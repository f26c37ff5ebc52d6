package agent

import (
	"crypto/tls"
	"fmt"
	"path/filepath"

	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

// metricsOptions say how metrics are served. An error says that there is a certificate for them that cannot be used.
func metricsOptions(o *options.Options) (metricsserver.Options, error) {
	served := metricsserver.Options{BindAddress: o.MetricsBindAddress}
	if !o.MetricsSecure {
		return served, nil
	}
	served.SecureServing = true
	served.FilterProvider = filters.WithAuthenticationAndAuthorization
	served.TLSOpts = []func(*tls.Config){func(config *tls.Config) { config.MinVersion = tls.VersionTLS13 }}
	certFile, keyFile := o.MetricsTLS()
	if certFile == "" {
		return served, nil // controller-runtime makes one
	}
	// It would make one in place of files that are not there, too.
	if _, err := tls.LoadX509KeyPair(certFile, keyFile); err != nil {
		return served, fmt.Errorf("the certificate of the metrics: %w", err)
	}
	served.CertDir, served.CertName = filepath.Split(certFile)
	keyName, err := filepath.Rel(served.CertDir, keyFile)
	if err != nil {
		return served, fmt.Errorf("--metrics-tls-key-file: %w", err)
	}
	served.KeyName = keyName
	return served, nil
}
