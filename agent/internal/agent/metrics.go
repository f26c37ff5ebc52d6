package agent

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"path/filepath"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

// These limit the requests that authenticate and authorize readers of metrics, per second and at
// once. Anyone who can connect causes such requests.
const (
	reviewQPS   = 5
	reviewBurst = 10
)

// metricsOptions returns the options for serving metrics, and an error if the configured
// certificate cannot be used.
func metricsOptions(o *options.Options) (metricsserver.Options, error) {
	served := metricsserver.Options{BindAddress: o.MetricsBindAddress}
	if !o.MetricsSecure || o.MetricsBindAddress == "0" {
		return served, nil
	}
	served.SecureServing = true
	served.FilterProvider = func(config *rest.Config, client *http.Client) (metricsserver.Filter, error) {
		config = rest.CopyConfig(config)
		config.QPS, config.Burst = reviewQPS, reviewBurst
		return filters.WithAuthenticationAndAuthorization(config, client)
	}
	served.TLSOpts = []func(*tls.Config){func(config *tls.Config) { config.MinVersion = tls.VersionTLS13 }}
	certFile, keyFile := o.MetricsTLS()
	if certFile == "" {
		return served, nil // controller-runtime generates one
	}
	// controller-runtime would also generate one if the files were missing, so their absence is
	// reported here.
	if _, err := tls.LoadX509KeyPair(certFile, keyFile); err != nil {
		return served, fmt.Errorf("the certificate of the metrics (--metrics-tls-cert-file, else --tls-cert-file): %w", err)
	}
	certFile, err := filepath.Abs(certFile)
	if err != nil {
		return served, fmt.Errorf("the certificate of the metrics: %w", err)
	}
	if keyFile, err = filepath.Abs(keyFile); err != nil {
		return served, fmt.Errorf("the key of the metrics: %w", err)
	}
	// controller-runtime joins both names to one directory, but the two files may be in different
	// ones.
	served.CertDir, served.CertName, served.KeyName = "/", certFile, keyFile
	return served, nil
}
