package connectivity_test

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
)

func TestACertificateThatIsAboutToExpireIsWarnedOf(t *testing.T) {
	const day = 24 * time.Hour
	for name, c := range map[string]struct {
		life, left time.Duration
		says       string // empty for no warning
	}{
		"a day's, at half of its life":      {day, 12 * time.Hour, ""},
		"a day's, above a quarter":          {day, 6*time.Hour + time.Minute, ""},
		"a day's, below a quarter":          {day, 6*time.Hour - time.Minute, "expires at"},
		"a quarter's, when others renew it": {90 * day, 30 * day, ""},
		"a quarter's, two weeks before":     {90 * day, 14*day - time.Minute, "expires at"},
		"a year's, a month before":          {365 * day, 30 * day, ""},
		"one that has ended":                {day, -time.Minute, "expired at"},
	} {
		t.Run(name, func(t *testing.T) {
			clk := clocktesting.NewFakeClock(time.Now())
			end := clk.Now().Add(c.left)
			assert.ElementsMatch(t, expected(c.says, end), warnings(t, clk, certificates.Stats{
				CertificateNotBefore: end.Add(-c.life), CertificateNotAfter: end,
			}, 0))
		})
	}
	assert.Empty(t, warnings(t, clocktesting.NewFakeClock(time.Now()), certificates.Stats{}, 0), "there is none yet")
}

func TestACertificateThatTheAgentRefusesIsWarnedOf(t *testing.T) {
	for name, c := range map[string]struct {
		err     error
		message string
	}{
		"by its policy": {
			agenterrors.Unauthenticated("the issuer has no right to this identity"),
			"The agent refuses the shim's new client certificate, and calls use the former one until it expires: " +
				"Unauthenticated: the issuer has no right to this identity. Renew it.",
		},
		"in the handshake": {
			status.Error(codes.Unavailable, "remote error: tls: unknown certificate authority"),
			"No connection to the agent can be made with the shim's new client certificate, and calls use the former one until it expires: " +
				"Unavailable: remote error: tls: unknown certificate authority. Renew it.",
		},
	} {
		t.Run(name, func(t *testing.T) {
			clk := clocktesting.NewFakeClock(time.Now())
			e := &connectivity.Expiring{
				Stats: func() certificates.Stats {
					return certificates.Stats{CertificateNotBefore: clk.Now(), CertificateNotAfter: clk.Now().Add(24 * time.Hour)}
				},
				Refused: func() error { return c.err },
				Remedy:  "Renew it.", Clock: clk,
			}
			reason, message, found := e.Warning()
			require.True(t, found)
			require.Equal(t, "AgentCertificateRefused", reason)
			require.Equal(t, c.message, message)
		})
	}
}

// The certificate that was read last is far from its end, but the agent does not accept it.
func TestTheEndOfTheCertificateInUseIsWarnedOf(t *testing.T) {
	const name = "capi-agent.hub.svc"
	used, err := fakeagent.NewAuthority(time.Now().Add(-990 * time.Hour)) // its certificates end in ten hours
	require.NoError(t, err)
	unknown, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	certificate, key, err := used.IssueServer(name)
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	agent.ServeTLS(listener, &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: used.Pool()}, func(string) []fakeagent.Grant { return nil })
	held := certificates.NewHeld(nil)
	hold := func(by *fakeagent.Authority) {
		t.Helper()
		certificate, key, err := by.IssueClient("spiffe://karpenter-capi/cluster/default/workload")
		require.NoError(t, err)
		require.NoError(t, held.Hold(certificates.PEM{Certificate: certificate, Key: key, Authorities: used.PEM()}))
	}
	hold(used)
	c, err := agentclient.New(agentclient.Options{
		Address: listener.Addr().String(), TLS: &agentclient.TLS{Source: held, ServerName: name},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	called := func() {
		t.Helper()
		_, err := c.Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
	}
	called()
	end := held.Stats().CertificateNotAfter

	hold(unknown)
	called()
	require.True(t, held.Stats().CertificateNotAfter.After(end.Add(900*time.Hour)))
	e := &connectivity.Expiring{Stats: c.Certificates, Refused: c.CertificateRefused, Remedy: "Renew it.", Clock: clock.RealClock{}}
	reason, message, found := e.Warning()
	require.True(t, found)
	require.Equal(t, connectivity.ReasonExpiring, reason)
	require.Contains(t, message, "expires at "+end.UTC().Format(time.RFC3339))
}

func expected(says string, end time.Time) []string {
	if says == "" {
		return nil
	}
	return []string{"AgentCertificateExpiring: The shim's client certificate " + says + " " + end.UTC().Format(time.RFC3339) +
		", and has not been renewed. Renew it."}
}

func TestTheWarningIsRepeatedBeforeItsEventIsForgotten(t *testing.T) {
	clk := clocktesting.NewFakeClock(time.Now())
	end := clk.Now().Add(5 * time.Hour)
	stats := certificates.Stats{CertificateNotBefore: end.Add(-24 * time.Hour), CertificateNotAfter: end}
	assert.Len(t, warnings(t, clk, stats, 20), 1)
	assert.Len(t, warnings(t, clk, stats, 70), 3)
}

// warnings returns the warnings of this many minutes.
func warnings(t *testing.T, clk *clocktesting.FakeClock, stats certificates.Stats, minutes int) []string {
	t.Helper()
	looked := make(chan struct{})
	var warned []string
	e := &connectivity.Expiring{
		Stats:    func() certificates.Stats { looked <- struct{}{}; return stats },
		Announce: func(_ context.Context, reason, message string) { warned = append(warned, reason+": "+message) },
		Refused:  func() error { return nil },
		Remedy:   "Renew it.", Clock: clk,
	}
	require.True(t, e.NeedLeaderElection())
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(t, e.Start(ctx)) })
	<-looked
	for range minutes {
		require.Eventually(t, clk.HasWaiters, 10*time.Second, time.Millisecond)
		clk.Step(time.Minute)
		<-looked
	}
	cancel()
	running.Wait()
	return warned
}
