package server_test

import (
	"context"
	"crypto"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// startIssuing starts an agent that issues certificates for the Cluster's onboarding named first,
// until offboarded is set.
func startIssuing(t *testing.T, now clock.PassiveClock, offboarded *atomic.Bool) (f *fixture, issued *atomic.Int32) {
	t.Helper()
	issued = &atomic.Int32{}
	policy := &atomic.Pointer[authz.Policy]{}
	return start(t, withRights(t, policy.Load, now), func(_ *fixture, c *server.Config) {
		c.Clock = now
		c.RightsInterval = time.Hour // no connection is closed
		c.Onboarded = func(context.Context, types.NamespacedName) (string, bool, error) {
			return lo.Ternary(offboarded.Load(), v1alpha1.Offboarded, "first"), true, nil
		}
		c.OnboardedLive = c.Onboarded
		c.Issuing = &server.Issuing{
			TrustDomain: "karpenter-capi", Lifetime: time.Hour,
			Issue: func(crypto.PublicKey, spiffeid.ID, time.Duration) (issuer.Certificate, error) {
				return issuer.Certificate{Chain: []byte("chain"), NotAfter: now.Now().Add(time.Hour)}, nil
			},
			Issued: func(context.Context, types.NamespacedName, spokes.Issued) { issued.Add(1) },
		}
	}), issued
}

// Each certificate is a signature, and an event in the hub's etcd.
func TestCertificatesAreIssuedToOneIdentityOnlySoOften(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Now())
	f, issued := startIssuing(t, now, &atomic.Bool{})
	c := f.as(spokeURI + "/first")
	request := &agentv1alpha1.IssueCertificateRequest{Cluster: spokeRef, SigningRequest: testpki.SigningRequest(t)}
	issue := func() error {
		// A deadline that leaves no time for a retry.
		ctx, cancel := context.WithTimeout(f.ctx(), 5*time.Second)
		defer cancel()
		_, err := c.Issuer.IssueCertificate(ctx, request)
		return err
	}
	for range 100 {
		require.NoError(t, issue())
	}
	err := issue()
	require.True(t, agenterrors.IsThrottled(err), "%v", err)
	require.ErrorContains(t, err, "gets another one every 30s")
	after, known := agenterrors.RetryDelay(err)
	require.True(t, known)
	require.Equal(t, 30*time.Second, after)
	require.EqualValues(t, 100, issued.Load())
	require.Equal(t, 1, int(sum(t, f.registry, "capi_agent_calls_refused_total", "reason", "certificates")))

	now.SetTime(now.Now().Add(30 * time.Second))
	require.NoError(t, issue())
	require.True(t, agenterrors.IsThrottled(issue()))
}

// Whether its onboarding has ended is asked only once its request has been read.
func TestACallerWhoseOnboardingHasEndedIsReadSlowly(t *testing.T) {
	offboarded := &atomic.Bool{}
	f, issued := startIssuing(t, clocktesting.NewFakePassiveClock(time.Now()), offboarded)
	p := f.rawPeerOf(spokeURI + "/first")
	request := &agentv1alpha1.IssueCertificateRequest{Cluster: spokeRef, SigningRequest: testpki.SigningRequest(t)}
	offboarded.Store(true)
	f.requireSlowed(p, func() {
		p.call(agentv1alpha1.CertificateService_IssueCertificate_FullMethodName, request)
		require.Equal(t, "16", p.status())
	})
	require.Zero(t, issued.Load())
}
