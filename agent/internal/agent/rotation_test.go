package agent_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// shim calls both agents with a certificate that the test renews.
type shim struct {
	*onboarded

	held    *certificates.Held
	clients []*client.Client
}

func (o *onboarded) shim() *shim {
	o.Helper()
	s := &shim{onboarded: o, held: certificates.NewHeld(errors.New("none yet"))}
	key := o.key()
	first, err := o.issue(o.with(0, o.onboard(false)), key)
	require.NoError(o, err)
	s.hold(first, key)
	for _, a := range o.agents {
		c, err := client.New(client.Options{Address: a.address, TLS: &client.TLS{Source: s.held}})
		require.NoError(o, err)
		o.Cleanup(func() { require.NoError(o, c.Close()) })
		s.clients = append(s.clients, c)
	}
	return s
}

func (s *shim) hold(issued *agentv1alpha1.IssueCertificateResponse, key *ecdsa.PrivateKey) {
	s.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(s, err)
	require.NoError(s, s.held.Hold(certificates.PEM{
		Certificate: issued.GetCertificateChain(), Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		Authorities: issued.GetServerAuthorities(),
	}))
}

// renews makes each agent renew the certificate until the issued one is signed by the authority,
// and comes with the given number of trusted authorities.
func (s *shim) renews(by *testpki.Authority, trusting int) {
	s.Helper()
	for _, c := range s.clients {
		eventually(s.T, "the agent issues by what its files hold now", func(context.Context) (bool, error) {
			key := s.key()
			issued, err := s.issue(c, key)
			if err != nil {
				return false, err
			}
			block, _ := pem.Decode(issued.GetCertificateChain())
			certificate, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return false, err
			}
			if !signedBy(certificate, by) || certificatesIn(issued.GetServerAuthorities()) != trusting {
				return false, nil
			}
			s.hold(issued, key)
			return true, nil
		})
	}
}

func signedBy(certificate *x509.Certificate, authority *testpki.Authority) bool {
	_, err := certificate.Verify(x509.VerifyOptions{Roots: authority.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err == nil
}

func certificatesIn(content []byte) int {
	n := 0
	for block, rest := pem.Decode(content); block != nil; block, rest = pem.Decode(rest) {
		n++
	}
	return n
}

// trusts replaces the authorities that each agent accepts, and those that it sends to the shim as
// trusted.
func (s *shim) trusts(authorities ...*testpki.Authority) {
	s.Helper()
	for i, a := range s.agents {
		testpki.WriteBundle(s, a.files.CAFile, authorities...)
		testpki.WriteBundle(s, s.own[i].CAFile, authorities...)
	}
}

// signs replaces the issuer and each agent's own certificate. The authority signs both.
func (s *shim) signs(authority *testpki.Authority) {
	s.Helper()
	move := func(from, to string) { require.NoError(s, os.Rename(from, to)) }
	certFile, keyFile := authority.Write(s, s.TempDir())
	move(keyFile, s.issuer.KeyFile)
	move(certFile, s.issuer.CertFile)
	for i, a := range s.agents {
		for _, files := range []testpki.Files{a.files, s.own[i]} {
			fresh := authority.Issue(s, s.TempDir(), authority)
			move(fresh.KeyFile, files.KeyFile)
			move(fresh.CertFile, files.CertFile)
		}
	}
}

// The steps are those of "Replace the authority" in docs/operations.md.
func TestTheAuthorityIsReplacedTwiceWithoutAFailedCall(t *testing.T) {
	s := newOnboarded(t).shim()
	ctx, stop := context.WithCancel(t.Context())
	var (
		calling sync.WaitGroup
		calls   [2]atomic.Int64
		gaps    atomic.Int64
	)
	for i, c := range s.clients {
		calling.Go(func() {
			pace := rate.NewLimiter(20, 1) // below what one identity may do, together with the other's
			for pace.Wait(ctx) == nil {
				if err := s.list(c); err != nil {
					t.Errorf("a call failed: %v", err)
					return
				}
				calls[i].Add(1)
			}
		})
		mirror := c.MirrorNodeGroups(s.ref())
		calling.Go(func() { _ = mirror.Run(ctx) })
		<-mirror.Synced()
		changes, done := mirror.StateChanges()
		calling.Go(func() {
			defer done()
			for {
				select {
				case <-ctx.Done():
					return
				case <-changes:
					if state := mirror.State(); !state.Connected && ctx.Err() == nil {
						gaps.Add(1)
						t.Logf("a view has a gap: %v", state.LastError)
					}
				}
			}
		})
	}
	former := s.authority
	for range 2 {
		next := testpki.New(t)
		s.trusts(former, next)
		s.renews(former, 2)
		s.signs(next)
		s.renews(next, 2)
		s.trusts(next)
		s.renews(next, 1)
		for i := range calls {
			before := calls[i].Load()
			eventually(t, "calls go on", func(context.Context) (bool, error) { return t.Failed() || calls[i].Load() > before+10, nil })
		}
		// A caller that trusts only the new authority, with a certificate issued by it, can
		// connect.
		key := s.key()
		issued, err := s.issue(s.clients[0], key)
		require.NoError(t, err)
		for agent := range s.agents {
			require.NoError(t, s.list(s.issued(agent, issued, key)))
		}
		former = next
	}
	stop()
	calling.Wait()
	assert.Zero(t, gaps.Load(), "gaps in views")
}
