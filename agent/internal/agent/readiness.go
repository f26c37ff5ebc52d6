package agent

import (
	"net/http"
	"sync"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
)

// logged returns a check that logs each new reason for its failure, and its recovery. The combined
// readiness endpoint, which the kubelet queries, does not reveal the reason.
func logged(logger logr.Logger, check func() error) healthz.Checker {
	var (
		mu     sync.Mutex
		failed string
	)
	return func(*http.Request) error {
		err := check()
		why := ""
		if err != nil {
			why = err.Error()
		}
		mu.Lock()
		defer mu.Unlock()
		switch {
		case why == failed:
		case err != nil:
			logger.Info("not ready", "reason", why)
		default:
			logger.Info("ready again")
		}
		failed = why
		return err
	}
}
