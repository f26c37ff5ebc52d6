package connectivity

import (
	"context"
	"fmt"
	"time"

	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

const (
	// expiryLook is how often the certificate is checked, and expiryRepeat how often a warning is
	// repeated: Kubernetes keeps events for an hour.
	expiryLook   = time.Minute
	expiryRepeat = 30 * time.Minute
	// A certificate is about to expire once less than 1/expiringPart of its lifetime is left, but
	// not earlier than longestExpiring before its end.
	expiringPart    = 4
	longestExpiring = 14 * 24 * time.Hour

	// ReasonExpiring is the reason of a warning that a certificate is about to expire.
	ReasonExpiring = "AgentCertificateExpiring"
	// ReasonRefused is that of a warning that the agent refuses a certificate, or to issue one.
	ReasonRefused = "AgentCertificateRefused"
)

// Expiring warns if the client certificate is about to expire and has not been renewed, or if the
// agent refuses the new one. As a runnable of a manager it does so only in the leader.
type Expiring struct {
	// Stats returns the statistics of the certificate. While calls use a former one, they are those
	// of the one that expires first. REQUIRED.
	Stats func() certificates.Stats
	// Refused returns why the agent refuses the certificate that was read last, UNAVAILABLE if no
	// connection can be made with it, or nil. REQUIRED.
	Refused func() error
	// Announce publishes a warning. REQUIRED.
	Announce func(ctx context.Context, reason, message string)
	// Remedy is a sentence that states what to do. REQUIRED.
	Remedy string
	// Clock provides the time. REQUIRED.
	Clock clock.WithTicker
}

// NeedLeaderElection returns true, so that the manager runs it only in the leader.
func (*Expiring) NeedLeaderElection() bool { return true }

// Start checks the certificate until ctx is done.
func (e *Expiring) Start(ctx context.Context) error {
	ticker := e.Clock.NewTicker(expiryLook)
	defer ticker.Stop()
	var warned time.Time
	for {
		if reason, message, _ := e.Warning(); message == "" {
			warned = time.Time{}
		} else if e.Clock.Since(warned) >= expiryRepeat {
			warned = e.Clock.Now()
			e.Announce(ctx, reason, message)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

// Warning returns, in sentences, that the certificate has expired or soon will, or is refused, and
// the remedy, with the reason of such a condition. They are "" if there is no need to warn. found
// is false if there is no certificate: either the agent is called without one, or none has been
// obtained yet.
func (e *Expiring) Warning() (reason, message string, found bool) {
	stats := e.Stats()
	end := stats.CertificateNotAfter
	if end.IsZero() {
		return "", "", false
	}
	if err := e.Refused(); err != nil {
		what := "The agent refuses the shim's new client certificate"
		if agenterrors.IsUnavailable(err) {
			what = "No connection to the agent can be made with the shim's new client certificate"
		}
		return ReasonRefused, fmt.Sprintf("%s, and calls use the former one until it expires: %s. %s",
			what, agenterrors.Describe(err), e.Remedy), true
	}
	left := end.Sub(e.Clock.Now())
	if left >= min(end.Sub(stats.CertificateNotBefore)/expiringPart, longestExpiring) {
		return "", "", true
	}
	what := "expires"
	if left <= 0 {
		what = "expired"
	}
	return ReasonExpiring, fmt.Sprintf("The shim's client certificate %s at %s, and has not been renewed. %s",
		what, end.UTC().Format(time.RFC3339), e.Remedy), true
}
