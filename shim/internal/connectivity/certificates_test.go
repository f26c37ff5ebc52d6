package connectivity_test

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
)

func TestTheEndOfCertificatesIsAMetric(t *testing.T) {
	registry := prometheus.NewRegistry()
	require.NoError(t, connectivity.RegisterCertificates(registry, func() certificates.Stats {
		return certificates.Stats{
			CertificateNotBefore: time.Unix(1500, 0), CertificateNotAfter: time.Unix(1700, 0), AuthoritiesNotBefore: time.Unix(100, 0),
			AuthoritiesErrors: 3,
		}
	}))
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP karpenter_capi_agent_certificate_not_after_seconds Expiry of the certificate in use, or of the first to expire if there are several, in seconds since 1970. 0 if there is none.
# TYPE karpenter_capi_agent_certificate_not_after_seconds gauge
karpenter_capi_agent_certificate_not_after_seconds{certificate="agent-ca"} 0
karpenter_capi_agent_certificate_not_after_seconds{certificate="client"} 1700
# HELP karpenter_capi_agent_certificate_not_before_seconds Start of the validity of the certificate in use, or of the first to expire if there are several, in seconds since 1970. 0 if there is none.
# TYPE karpenter_capi_agent_certificate_not_before_seconds gauge
karpenter_capi_agent_certificate_not_before_seconds{certificate="agent-ca"} 100
karpenter_capi_agent_certificate_not_before_seconds{certificate="client"} 1500
# HELP karpenter_capi_agent_certificate_reload_errors_total Number of times unusable files were read. The last usable files stay in use.
# TYPE karpenter_capi_agent_certificate_reload_errors_total counter
karpenter_capi_agent_certificate_reload_errors_total{certificate="agent-ca"} 3
karpenter_capi_agent_certificate_reload_errors_total{certificate="client"} 0
`)))
}
