package identity

import (
	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/prometheus/client_golang/prometheus"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/metrics"
)

// Values of the metric's labels.
const (
	enrolling = "enrollment"
	renewing  = "renewal"

	resultIssued  = "issued"
	resultRefused = "refused"
	resultFailed  = "failed"
)

var requestsTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
	Namespace: metrics.Namespace, Subsystem: "capi_agent", Name: "certificate_requests_total",
	Help: "Requests for client certificates to the agent, by purpose and result. A refused request requires manual action; " +
		"a failed one is retried.",
}, []opmetrics.Label{
	{Name: "purpose", Help: "enrollment or renewal."}, {Name: "result", Help: "issued, refused or failed."},
}, opmetrics.Alpha)

func count(purpose, result string) {
	requestsTotal.Inc(map[string]string{"purpose": purpose, "result": result})
}

// A counter that appears with its first increment has no increase that a rule could see.
func init() { //nolint:gochecknoinits // the registry is a global, too
	for _, purpose := range []string{enrolling, renewing} {
		for _, result := range []string{resultIssued, resultRefused, resultFailed} {
			requestsTotal.Add(0, map[string]string{"purpose": purpose, "result": result})
		}
	}
}
