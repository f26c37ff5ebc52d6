package scrapes_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// at is the time of every scrape.
var at = time.Unix(1_900_000_000, 0)

const rules = `
groups:
  - rules:
      - {alert: Errors, expr: 'increase(capi_agent_errors_total{of="server"}[15m]) > 0'}
      - {alert: Again, expr: 'increase(capi_agent_errors_total{of="server"}[15m]) > 0'}
      - {alert: Synced, expr: capi_agent_synced == 0}
      - {alert: Expiring, expr: capi_agent_spoke_certificate_not_after_seconds - time() < 0}
      - {alert: Slow, expr: 'histogram_quantile(0.9, rate(karpenter_capi_seconds_bucket[15m])) > 1'}
      - {alert: Down, expr: absent(karpenter_build_info)}
`

// These are scrapes of a component. Another test of the process has counted before.
const (
	without = `# HELP capi_agent_errors_total Help.
# TYPE capi_agent_errors_total counter
capi_agent_errors_total{of="server"} 5
capi_agent_errors_total{of="other"} 5
capi_agent_errors_total{of="none"} 5
# TYPE capi_agent_synced gauge
capi_agent_synced 1
# TYPE capi_agent_spoke_certificate_not_after_seconds gauge
capi_agent_spoke_certificate_not_after_seconds{cluster="a",namespace="random-1"} 1.900003599e+09
capi_agent_spoke_certificate_not_after_seconds{cluster="none",namespace="random-1"} 0
# TYPE karpenter_capi_seconds histogram
karpenter_capi_seconds_bucket{le="1"} 1
karpenter_capi_seconds_bucket{le="+Inf"} 1
karpenter_capi_seconds_sum 0.5
# TYPE karpenter_build_info gauge
karpenter_build_info{goarch="arm64"} 1
`
	with = `# TYPE capi_agent_errors_total counter
capi_agent_errors_total{of="new"} 1
capi_agent_errors_total{of="other"} 6
capi_agent_errors_total{of="none"} 5
capi_agent_errors_total{of="server"} 8
# TYPE capi_agent_synced gauge
capi_agent_synced 0
# TYPE capi_agent_spoke_certificate_not_after_seconds gauge
capi_agent_spoke_certificate_not_after_seconds{cluster="a",namespace="random-1"} 1.899999999e+09
# TYPE karpenter_capi_seconds histogram
karpenter_capi_seconds_bucket{le="1"} 1
karpenter_capi_seconds_bucket{le="+Inf"} 3
`
)

// take scrapes a component that serves a text.
func take(t *testing.T, text string) scrapes.Scrape {
	t.Helper()
	return scrapes.Take(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(text)) }), at)
}

// repository makes the package of the test one of a repository with the alerts, and returns a
// function that reads the recording of an alert.
func repository(t *testing.T) func(alert string) scrapes.Recording {
	t.Helper()
	root := t.TempDir()
	for path, content := range map[string]string{"go.work": "", "deploy/charts/agent/alerts.yaml": rules, "agent/package/go.go": ""} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, path), []byte(content), 0o644))
	}
	t.Chdir(filepath.Join(root, "agent/package"))
	return func(alert string) scrapes.Recording {
		recording, err := scrapes.Read("testdata/alerts/" + alert + ".txt")
		require.NoError(t, err)
		return recording
	}
}

func TestARecordingHasWhatTheAlertReads(t *testing.T) {
	read := repository(t)
	t.Setenv("WRITE_SCRAPES", "1")
	value := func(n float64) scrapes.Value { return scrapes.Value{Found: true, Number: n} }
	fromNow := func(n float64) scrapes.Value { return scrapes.Value{Found: true, FromNow: true, Number: n} }
	none := scrapes.Value{}
	for alert, test := range map[string]struct {
		options []scrapes.Option
		want    []scrapes.Series
	}{
		"Errors": {nil, []scrapes.Series{
			{scrapes.Counter, `capi_agent_errors_total{of="new"}`, none, value(1)},
			{scrapes.Counter, `capi_agent_errors_total{of="other"}`, value(0), value(1)},
			{scrapes.Counter, `capi_agent_errors_total{of="server"}`, value(0), value(3)},
		}},
		"Again": {[]scrapes.Option{scrapes.Once(), scrapes.Only("of", "server")}, []scrapes.Series{
			{scrapes.Counter, `capi_agent_errors_total{of="server"}`, value(0), value(1)},
		}},
		"Synced": {nil, []scrapes.Series{{scrapes.Gauge, "capi_agent_synced", value(1), value(0)}}},
		"Expiring": {[]scrapes.Option{scrapes.Renamed("namespace", "random-1", "fleet")}, []scrapes.Series{
			{scrapes.Gauge, `capi_agent_spoke_certificate_not_after_seconds{cluster="a",namespace="fleet"}`, fromNow(3599), fromNow(-1)},
			{scrapes.Gauge, `capi_agent_spoke_certificate_not_after_seconds{cluster="none",namespace="fleet"}`, value(0), none},
		}},
		"Slow": {nil, []scrapes.Series{
			{scrapes.Counter, `karpenter_capi_seconds_bucket{le="+Inf"}`, value(0), value(2)},
			{scrapes.Counter, `karpenter_capi_seconds_bucket{le="1"}`, value(0), value(0)},
		}},
		"Down": {nil, []scrapes.Series{{scrapes.Gauge, `karpenter_build_info{goarch="any"}`, value(1), none}}},
	} {
		scrapes.Record(t, alert, take(t, without), take(t, with), test.options...)
		assert.Equal(t, scrapes.Recording{Test: t.Name(), Series: test.want}, read(alert), alert)
	}
}

// failing is a test that does not end the real one if it fails.
type failing struct {
	testing.TB

	name, message string
}

func (f *failing) Name() string                   { return f.name }
func (f *failing) Helper()                        {}
func (f *failing) Errorf(format string, _ ...any) { f.message = format }
func (f *failing) FailNow()                       { runtime.Goexit() }

func TestARunThatDiffersFromItsRecordingFails(t *testing.T) {
	repository(t)
	t.Setenv("WRITE_SCRAPES", "1")
	const recorded = "TestOfTheComponent"
	for _, alert := range []string{"Errors", "Synced", "Expiring"} {
		scrapes.Record(&failing{TB: t, name: recorded}, alert, take(t, without), take(t, with))
	}
	t.Setenv("WRITE_SCRAPES", "")
	less := func(text string) string {
		return strings.NewReplacer("} 5", "} 4", "} 8", "} 7", "} 6", "} 5").Replace(text)
	}
	for name, test := range map[string]struct {
		alert, test   string
		without, with string
		passes        bool
	}{
		"the same":                              {"Errors", recorded, without, with, true},
		"the counter began elsewhere":           {"Errors", recorded, less(without), less(with), true},
		"a minute later":                        {"Expiring", recorded, without, strings.Replace(with, "1.899999999e+09", "1.900000040e+09", 1), true},
		"an hour later":                         {"Expiring", recorded, without, strings.Replace(with, "1.899999999e+09", "1.900003600e+09", 1), false},
		"another value":                         {"Synced", recorded, without, without, false},
		"another difference":                    {"Errors", recorded, without, strings.Replace(with, "} 8", "} 9", 1), false},
		"another label":                         {"Errors", recorded, without, strings.Replace(with, "new", "newer", 1), false},
		"a series that is there from the start": {"Errors", recorded, without + "capi_agent_errors_total{of=\"new\"} 0\n", with, false},
		"another test":                          {"Synced", "TestOfAnother", without, with, false},
		"no recording":                          {"Slow", recorded, without, with, false},
		"no such alert":                         {"Unknown", recorded, without, with, false},
		"no metric":                             {"Synced", recorded, "", "", false},
	} {
		f := &failing{TB: t, name: test.test}
		before, after := take(t, test.without), take(t, test.with)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			scrapes.Record(f, test.alert, before, after)
		}()
		<-ended
		assert.Equal(t, test.passes, f.message == "", name)
	}
}

func TestAComponentThatDoesNotAnswerIsAnError(t *testing.T) {
	status := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write([]byte(without))
	}))
	_, err := scrapes.Get(t, server.URL)
	require.NoError(t, err)
	status = http.StatusInternalServerError
	_, err = scrapes.Get(t, server.URL)
	require.ErrorContains(t, err, "500")
	server.Close()
	_, err = scrapes.Get(t, server.URL)
	require.Error(t, err)
}
