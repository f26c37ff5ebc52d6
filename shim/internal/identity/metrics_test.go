package identity

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
)

// scraped returns these metrics as the shim serves them.
func (r *replica) scraped() scrapes.Scrape {
	r.w.t.Helper()
	registry := prometheus.NewRegistry()
	require.NoError(r.w.t, connectivity.RegisterCertificates(registry, r.client.Certificates))
	return scrapes.Take(r.w.t, promhttp.HandlerFor(registry, promhttp.HandlerOpts{}), r.w.clock.Now())
}

// metrics returns a function that reads the metrics of the certificates with which the replica
// calls the agent, by name and the label certificate.
func (r *replica) metrics() func(name, certificate string) float64 {
	r.w.t.Helper()
	registry := prometheus.NewRegistry()
	require.NoError(r.w.t, connectivity.RegisterCertificates(registry, r.client.Certificates))
	return func(name, certificate string) float64 {
		r.w.t.Helper()
		families, err := registry.Gather()
		require.NoError(r.w.t, err)
		for _, family := range families {
			for _, m := range family.GetMetric() {
				if family.GetName() == name && m.GetLabel()[0].GetValue() == certificate {
					return m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
		require.Fail(r.w.t, "there is no series", "%s of %s", name, certificate)
		return 0
	}
}

func TestACertificateThatIsNotRenewedIsShownBeforeItExpires(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	metric := r.metrics()
	expires := func() bool {
		from := metric("karpenter_capi_agent_certificate_not_before_seconds", "client")
		until := metric("karpenter_capi_agent_certificate_not_after_seconds", "client")
		return until-float64(w.clock.Now().Unix()) < min((until-from)/4, (14*24*time.Hour).Seconds())
	}
	w.agent.answers(lost, nil)
	w.clock.Step(lifetime * 7 / 10)
	require.ErrorIs(t, r.round(w.ctx), lost)
	require.False(t, expires())
	earlier := r.scraped()
	w.clock.Step(lifetime / 10)
	require.ErrorIs(t, r.round(w.ctx), lost)
	require.True(t, expires())
	scrapes.Record(t, "KarpenterCapiCertificateExpiring", earlier, r.scraped(), scrapes.Only("certificate", "client"))

	w.agent.answers(nil, nil)
	w.clock.Step(10 * time.Minute) // longer than the pause between two requests
	r.looks()
	require.False(t, expires())
}

// The shim renews its own certificate, and has no influence on the agent's authority.
func TestAnAuthorityThatEndsIsShownBeforeItExpires(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	metric := r.metrics()
	expires := func() bool {
		from := metric("karpenter_capi_agent_certificate_not_before_seconds", "agent-ca")
		until := metric("karpenter_capi_agent_certificate_not_after_seconds", "agent-ca")
		return until-float64(w.clock.Now().Unix()) < min((until-from)/4, (7*24*time.Hour).Seconds())
	}
	w.clock.SetTime(w.agent.authority.certificate.NotAfter.Add(-8 * 24 * time.Hour))
	w.put(bootstrapSecret, w.agent.onboard("second")) // the certificate of the first has expired
	r.looks()
	r.works()
	require.False(t, expires())
	earlier := r.scraped()
	for range 2 {
		w.clock.Step(lifetime * 6 / 10)
		r.looks()
		r.works()
	}
	require.True(t, expires())
	scrapes.Record(t, "KarpenterCapiAuthorityExpiring", earlier, r.scraped(), scrapes.Only("certificate", "agent-ca"))
}

func TestAStoredCertificateThatCannotBeUsedIsCountedWithEachReading(t *testing.T) {
	w := newEnvironment(t)
	r := w.enrolled()
	metric := r.metrics()
	unusable := func() float64 { return metric("karpenter_capi_agent_certificate_reload_errors_total", "client") }
	require.Zero(t, unusable(), "it increases from zero")
	usable := r.scraped()
	_, another, err := newKey()
	require.NoError(t, err)
	data := w.secret(identitySecret).Data
	data[corev1.TLSPrivateKeyKey] = another
	w.put(identitySecret, data)
	for range 3 {
		before := unusable()
		_, err := r.read(w.ctx)
		require.NoError(t, err)
		require.Greater(t, unusable(), before)
	}
	scrapes.Record(t, "KarpenterCapiCertificateUnusable", usable, r.scraped())
	require.NoError(t, r.calls(), "the last usable one stays in use")
}
