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
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/wait"

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
		c, err := client.New(client.Options{Address: a.address, Timeout: patience, TLS: &client.TLS{Source: s.held}})
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
	var hold func() // once, so that it is one renewal for the connections
	for _, c := range s.clients {
		// An agent reads its files every five seconds, and issues one identity only so many
		// certificates.
		err := wait.PollUntilContextTimeout(s.Context(), time.Second, patience, true, func(context.Context) (bool, error) {
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
			hold = func() { s.hold(issued, key) }
			return true, nil
		})
		require.NoError(s, err, "the agent issues by what its files hold now")
	}
	hold()
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
func (o *onboarded) trusts(authorities ...*testpki.Authority) {
	o.Helper()
	for i, a := range o.agents {
		testpki.WriteBundle(o, a.files.CAFile, authorities...)
		testpki.WriteBundle(o, o.own[i].CAFile, authorities...)
	}
}

// signs replaces the issuer and each agent's own certificate. The authority signs both.
func (o *onboarded) signs(authority *testpki.Authority) {
	o.Helper()
	certFile, keyFile := authority.Write(o, o.TempDir())
	o.replace(keyFile, o.issuer.KeyFile)
	o.replace(certFile, o.issuer.CertFile)
	for i, a := range o.agents {
		for _, files := range []testpki.Files{a.files, o.own[i]} {
			fresh := authority.Issue(o, o.TempDir(), authority)
			o.replace(fresh.KeyFile, files.KeyFile)
			o.replace(fresh.CertFile, files.CertFile)
		}
	}
}

// replace moves a file over another one.
func (o *onboarded) replace(fresh, file string) {
	o.Helper()
	require.NoError(o, os.Rename(fresh, file))
}

// load is what a shim does without a break: calls and a view.
type load struct {
	*onboarded

	clients []*client.Client
	stop    context.CancelFunc
	running sync.WaitGroup
	calls   []atomic.Int64
	gaps    atomic.Int64
	// close ends the views.
	close func()
}

// load begins to call each client's agent. The test fails with the first call that fails.
func (o *onboarded) load(clients []*client.Client) *load {
	for _, c := range clients {
		o.serves(c)
	}
	ctx, stop := context.WithCancel(o.Context())
	l := &load{onboarded: o, clients: clients, stop: stop, calls: make([]atomic.Int64, len(clients))}
	for i, c := range clients {
		l.running.Go(func() {
			pace := rate.NewLimiter(20, 1) // below what one identity may do, together with the other's
			for pace.Wait(ctx) == nil {
				if err := o.list(c); err != nil {
					o.Errorf("a call failed: %v", err)
					return
				}
				l.calls[i].Add(1)
			}
		})
	}
	l.open()
	return l
}

// open opens a view of each agent.
func (l *load) open() {
	ctx, stop := context.WithCancel(l.Context())
	var running sync.WaitGroup
	for _, c := range l.clients {
		mirror := c.MirrorNodeGroups(l.ref())
		running.Go(func() { _ = mirror.Run(ctx) })
		<-mirror.Synced()
		changes, done := mirror.StateChanges()
		running.Go(func() {
			defer done()
			for {
				select {
				case <-ctx.Done():
					return
				case <-changes:
					if state := mirror.State(); !state.Connected && ctx.Err() == nil {
						l.gaps.Add(1)
						l.Logf("a view has a gap: %v", state.LastError)
					}
				}
			}
		})
	}
	l.close = func() {
		stop()
		running.Wait()
	}
}

// over waits until the views have moved to connections with the certificate that the renewal
// brings. What those before it were made with may be rejected from then on.
func (l *load) over(renewal func()) {
	l.Helper()
	opened := func(agent int) float64 { return l.streams(agent, "grpc_server_started_total") }
	var before []float64
	for i := range l.clients {
		before = append(before, opened(i))
	}
	renewal()
	for i := range l.clients {
		eventually(l.T, "the view moves", func(context.Context) (bool, error) {
			ended := l.streams(i, "grpc_server_handled_total")
			return l.Failed() || opened(i) > before[i] && opened(i)-ended == 1, nil
		})
	}
	l.goesOn()
}

// streams returns the sum of an agent's metric for the views.
func (l *load) streams(agent int, name string) (sum float64) {
	l.Helper()
	families, err := l.metrics[agent].Gather()
	require.NoError(l, err)
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetValue() == "WatchNodeGroups" {
					sum += metric.GetCounter().GetValue()
				}
			}
		}
	}
	return sum
}

// goesOn waits until each client has made more calls.
func (l *load) goesOn() {
	l.Helper()
	for i := range l.calls {
		before := l.calls[i].Load()
		eventually(l.T, "calls go on", func(context.Context) (bool, error) { return l.Failed() || l.calls[i].Load() > before+10, nil })
	}
}

// end ends the load, and requires that no view had a gap.
func (l *load) end() {
	l.Helper()
	l.stop()
	l.running.Wait()
	l.close()
	require.Zero(l, l.gaps.Load(), "gaps in views")
}

// The steps are those of "Replace the authority" in docs/operations.md.
func TestTheAuthorityIsReplacedTwiceWithoutAFailedCall(t *testing.T) {
	s := newOnboarded(t).shim()
	load := s.load(s.clients)
	former := s.authority
	for range 2 {
		next := testpki.New(t)
		s.trusts(former, next)
		load.over(func() { s.renews(former, 2) })
		s.signs(next)
		load.over(func() { s.renews(next, 2) })
		s.trusts(next)
		load.over(func() { s.renews(next, 1) })
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
	load.end()
}

// fileShim calls both agents with a certificate from files, which another program renews.
type fileShim struct {
	*onboarded

	files   testpki.Files
	clients []*client.Client
	// renewals counts the renewals, each of which is valid for another time.
	renewals int
}

func (o *onboarded) fileShim() *fileShim {
	o.Helper()
	s := &fileShim{onboarded: o, files: o.authority.Issue(o, o.TempDir(), o.authority, o.uri())}
	for i := range o.agents {
		c := o.from(i, s.files)
		o.Cleanup(func() { require.NoError(o, c.Close()) })
		s.clients = append(s.clients, c)
	}
	return s
}

// uri is the identity of the Cluster.
func (o *onboarded) uri() string {
	return "spiffe://karpenter-capi/cluster/" + o.cluster.Namespace + "/" + o.cluster.Name
}

// from connects to an agent with files.
func (o *onboarded) from(agent int, files testpki.Files) *client.Client {
	o.Helper()
	c, err := client.New(client.Options{Address: o.agents[agent].address, Timeout: patience, TLS: &client.TLS{
		CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile, Refresh: 100 * time.Millisecond,
	}})
	require.NoError(o, err)
	return c
}

// renewed replaces the files, and waits until both clients have read them.
func (s *fileShim) renewed(by *testpki.Authority, trusting ...*testpki.Authority) {
	s.Helper()
	s.renewals++
	life := time.Hour - time.Duration(s.renewals)*time.Minute
	testpki.WriteBundle(s, s.files.CAFile, trusting...)
	fresh := by.IssueFor(s, life, s.TempDir(), by, s.uri())
	s.replace(fresh.KeyFile, s.files.KeyFile)
	s.replace(fresh.CertFile, s.files.CertFile)
	for _, c := range s.clients {
		eventually(s.T, "the files are read", func(context.Context) (bool, error) {
			left := time.Until(c.Certificates().CertificateNotAfter)
			return left > life-time.Minute && left <= life, nil
		})
	}
}

// connects waits until each agent accepts a new connection with a certificate of one authority by a
// caller that trusts another.
func (s *fileShim) connects(with, trusting *testpki.Authority) {
	s.Helper()
	s.connecting(with, trusting, "the agent accepts the authority", func(err error) bool { return err == nil })
}

// isShutOut waits until no agent accepts a new connection with a certificate of the authority.
func (s *fileShim) isShutOut(with, trusting *testpki.Authority) {
	s.Helper()
	s.connecting(with, trusting, "the agent does not accept the authority", func(err error) bool { return err != nil })
}

func (s *fileShim) connecting(with, trusting *testpki.Authority, what string, until func(error) bool) {
	s.Helper()
	files := with.Issue(s, s.TempDir(), trusting, s.uri())
	for i := range s.agents {
		eventually(s.T, what, func(context.Context) (bool, error) {
			c := s.from(i, files)
			defer func() { require.NoError(s, c.Close()) }() // an identity may have few connections
			return until(s.list(c)), nil
		})
	}
}

// The same for a shim that is not onboarded.
func TestTheAuthorityOfFilesIsReplacedTwiceWithoutAFailedCall(t *testing.T) {
	s := newOnboarded(t).fileShim()
	load := s.load(s.clients)
	former := s.authority
	for range 2 {
		next := testpki.New(t)
		s.trusts(former, next)
		load.over(func() { s.renewed(former, former, next) })
		s.connects(next, former)
		load.over(func() { s.renewed(next, former, next) })
		s.signs(next)
		s.connects(next, next)
		s.trusts(next)
		load.over(func() { s.renewed(next, next) })
		s.connects(next, next)
		s.isShutOut(former, next)
		former = next
	}
	load.end()
}
