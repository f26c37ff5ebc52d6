package agentstate

import (
	"context"
	"fmt"
	"time"

	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

const (
	// expiryLook is how often the certificate is looked at, and expiryRepeat how often a warning is repeated: Kubernetes keeps events for an hour.
	expiryLook   = time.Minute
	expiryRepeat = 30 * time.Minute
	// A certificate is about to expire when this part of its life is left, and no more than longestExpiring.
	expiringPart    = 4
	longestExpiring = 14 * 24 * time.Hour

	// ReasonExpiring is the reason of the warning.
	ReasonExpiring = "AgentCertificateExpiring"
)

// Expiring warns when the client certificate is about to expire and has not been renewed. As a runnable of a manager it does so in the leader
// alone.
type Expiring struct {
	// Stats are those of the certificate. REQUIRED.
	Stats func() certificates.Stats
	// Announce publishes a warning. REQUIRED.
	Announce func(ctx context.Context, reason, message string)
	// Remedy says, as a sentence, what to do. REQUIRED.
	Remedy string
	// Clock is the time. REQUIRED.
	Clock clock.WithTicker
}

// NeedLeaderElection makes the manager run it in the leader alone.
func (*Expiring) NeedLeaderElection() bool { return true }

// Start looks until ctx is done.
func (e *Expiring) Start(ctx context.Context) error {
	ticker := e.Clock.NewTicker(expiryLook)
	defer ticker.Stop()
	var warned time.Time
	for {
		if message, _ := e.Warning(); message == "" {
			warned = time.Time{}
		} else if e.Clock.Since(warned) >= expiryRepeat {
			warned = e.Clock.Now()
			e.Announce(ctx, ReasonExpiring, message)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

// Warning says, as sentences, that the certificate has ended or soon will, and what to do; it is empty while there is nothing to warn of. It
// reports false if there is no certificate: the agent is called without one, or the connection says that there is none yet.
func (e *Expiring) Warning() (message string, found bool) {
	stats := e.Stats()
	end := stats.CertificateNotAfter
	if end.IsZero() {
		return "", false
	}
	left := end.Sub(e.Clock.Now())
	if left >= min(end.Sub(stats.CertificateNotBefore)/expiringPart, longestExpiring) {
		return "", true
	}
	what := "ends"
	if left <= 0 {
		what = "has ended"
	}
	return fmt.Sprintf("The client certificate that the agent is called with %s at %s, and has not been renewed. %s",
		what, end.UTC().Format(time.RFC3339), e.Remedy), true
}
