package issuer_test

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

var id = spiffeid.RequireFromString("spiffe://karpenter-capi/cluster/fleet/spoke/abc")

func open(t *testing.T, authority *testpki.Authority, clock *clocktesting.FakePassiveClock) (*issuer.Authority, issuer.Files) {
	t.Helper()
	files := filesOf(t, authority)
	a, err := issuer.Open(files, clock)
	require.NoError(t, err)
	t.Cleanup(a.Close)
	return a, files
}

// filesOf returns the files of an agent where one authority signs the certificates of the agent and
// of its callers.
func filesOf(t *testing.T, authority *testpki.Authority) issuer.Files {
	t.Helper()
	own := authority.Issue(t, t.TempDir(), authority)
	server := filepath.Join(t.TempDir(), "server-ca.crt")
	copyFile(t, own.CAFile, server)
	files := issuer.Files{ClientCAFile: own.CAFile, ServerCAFile: server, ServerCertFile: own.CertFile, Refresh: 5 * time.Millisecond}
	files.CertFile, files.KeyFile = authority.Write(t, t.TempDir())
	return files
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	content, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, content, 0o600))
}

func key(t *testing.T) crypto.PublicKey {
	t.Helper()
	k, err := certificates.ParseRequest(testpki.SigningRequest(t))
	require.NoError(t, err)
	return k
}

func parse(t require.TestingT, chain []byte) *x509.Certificate {
	block, _ := pem.Decode(chain)
	require.NotNil(t, block)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	return certificate
}

func TestACertificateIsForClientsAndHasOneName(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	authority := testpki.New(t)
	a, _ := open(t, authority, clocktesting.NewFakePassiveClock(now))
	signed, err := a.Issue(key(t), id, 20*time.Minute)
	require.NoError(t, err)
	certificate := parse(t, signed.Chain)
	_, err = certificate.Verify(x509.VerifyOptions{Roots: authority.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	require.NoError(t, err)
	_, err = certificate.Verify(x509.VerifyOptions{Roots: authority.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	require.Error(t, err, "it must not serve in the agent's place")
	require.Len(t, certificate.URIs, 1)
	require.Equal(t, id.String(), certificate.URIs[0].String())
	require.Empty(t, certificate.Subject.String())
	require.Empty(t, certificate.DNSNames)
	require.False(t, certificate.IsCA)
	require.WithinDuration(t, now.Add(20*time.Minute), certificate.NotAfter, 0)
	require.WithinDuration(t, certificate.NotAfter, signed.NotAfter, 0)
	require.WithinDuration(t, now.Add(10*time.Minute), signed.RenewAt, 0)
	require.LessOrEqual(t, certificate.NotBefore, now.Add(-time.Minute), "the clocks of two agents differ")
	require.True(t, x509.NewCertPool().AppendCertsFromPEM(signed.ServerAuthorities))

	again, err := a.Issue(key(t), id, 20*time.Minute)
	require.NoError(t, err)
	require.NotEqual(t, signed.Serial, again.Serial)
}

func TestACertificateEndsWithItsAuthority(t *testing.T) {
	authority := testpki.New(t) // valid for an hour
	clock := clocktesting.NewFakePassiveClock(time.Now())
	a, _ := open(t, authority, clock)
	signed, err := a.Issue(key(t), id, 24*time.Hour)
	require.NoError(t, err)
	require.LessOrEqual(t, signed.NotAfter, clock.Now().Add(time.Hour))
	require.Less(t, signed.RenewAt, clock.Now().Add(31*time.Minute))
	clock.SetTime(clock.Now().Add(2 * time.Hour))
	_, err = a.Issue(key(t), id, 24*time.Hour)
	require.ErrorContains(t, err, "issuer's certificate has expired at")
}

// An agent that starts again must do its other work, whatever the state of its certificates.
func TestAnExpiredCertificateKeepsNoAgentFromStarting(t *testing.T) {
	authority := testpki.New(t) // valid for an hour
	for what, c := range map[string]struct {
		change func(*issuer.Files)
		late   time.Duration
		says   string
	}{
		"the issuer's": {func(*issuer.Files) {}, 2 * time.Hour, "the issuer's certificate has expired at"},
		"the agent's": {func(f *issuer.Files) {
			f.ServerCertFile = authority.IssueFor(t, time.Minute, t.TempDir(), authority).CertFile
		}, 2 * time.Minute, "certificate has expired or is not yet valid"},
	} {
		t.Run(what, func(t *testing.T) {
			files, now := filesOf(t, authority), clocktesting.NewFakePassiveClock(time.Now().Add(c.late))
			c.change(&files)
			a, err := issuer.Open(files, now)
			require.NoError(t, err)
			t.Cleanup(a.Close)
			_, err = a.Issue(key(t), id, time.Minute)
			require.ErrorContains(t, err, c.says)
			now.SetTime(time.Now())
			_, err = a.Issue(key(t), id, time.Minute)
			require.NoError(t, err)
		})
	}
}

// A caller replaces its certificate by the issued one. Nothing may therefore be issued while the
// callers' authorities would reject it.
func TestARotatedAuthorityIsFollowedOnceTheAgentAcceptsIt(t *testing.T) {
	before, after := testpki.New(t), testpki.New(t)
	a, files := open(t, before, clocktesting.NewFakePassiveClock(time.Now()))
	certFile, keyFile := after.Write(t, t.TempDir())
	copyFile(t, certFile, files.CertFile)
	copyFile(t, keyFile, files.KeyFile)
	of := key(t)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		_, err := a.Issue(of, id, time.Minute)
		require.ErrorContains(c, err, "put the issuer there (--client-ca-file)")
	}, 20*time.Second, 10*time.Millisecond)
	require.Never(t, func() bool {
		_, err := a.Issue(of, id, time.Minute)
		return err == nil
	}, 50*time.Millisecond, 10*time.Millisecond)

	copyFile(t, certFile, files.ClientCAFile)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		signed, err := a.Issue(of, id, time.Minute)
		require.NoError(c, err)
		_, err = parse(c, signed.Chain).Verify(x509.VerifyOptions{Roots: after.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		require.NoError(c, err)
	}, 20*time.Second, 10*time.Millisecond)
}

// A caller that trusts only the authorities in the response could no longer reach the agent.
func TestAuthoritiesThatDoNotAcceptTheAgentAreNotTold(t *testing.T) {
	authority := testpki.New(t)
	a, files := open(t, authority, clocktesting.NewFakePassiveClock(time.Now()))
	other, _ := testpki.New(t).Write(t, t.TempDir())
	copyFile(t, other, files.ServerCAFile)
	_, err := a.Issue(key(t), id, time.Minute)
	require.ErrorContains(t, err, "do not accept the agent's own certificate")
	require.ErrorContains(t, err, "--server-ca-file")
	_, err = issuer.Open(files, clocktesting.NewFakePassiveClock(time.Now()))
	require.ErrorContains(t, err, "--server-ca-file")
}

func TestWhatIsNoAuthorityIsRefused(t *testing.T) {
	authority := testpki.New(t)
	clock := clocktesting.NewFakePassiveClock(time.Now())
	for says, change := range map[string]func(*issuer.Files){
		"is not one of an authority": func(f *issuer.Files) {
			f.CertFile, f.KeyFile = f.ServerCertFile, filepath.Dir(f.ServerCertFile)+"/tls.key"
		},
		"the authorities of the agent's own":     func(f *issuer.Files) { f.ServerCAFile = f.KeyFile },
		"the agent's own certificate: ":          func(f *issuer.Files) { f.ServerCertFile = f.KeyFile },
		"the client certificate authorities":     func(f *issuer.Files) { f.ClientCAFile = f.KeyFile },
		"put the issuer there (--client-ca-file": func(f *issuer.Files) { f.ClientCAFile, _ = testpki.New(t).Write(t, t.TempDir()) },
	} {
		files := filesOf(t, authority)
		change(&files)
		_, err := issuer.Open(files, clock)
		require.ErrorContains(t, err, says)
		require.NotContains(t, err.Error(), "PRIVATE")
	}
}

// Callers receive only certificates, whatever else the file contains.
func TestKeysDoNotGoAlong(t *testing.T) {
	authority := testpki.New(t)
	a, files := open(t, authority, clocktesting.NewFakePassiveClock(time.Now()))
	for _, name := range []string{files.KeyFile, files.CertFile} {
		content, err := os.ReadFile(name)
		require.NoError(t, err)
		file, err := os.OpenFile(files.ServerCAFile, os.O_APPEND|os.O_WRONLY, 0o600)
		require.NoError(t, err)
		_, err = file.Write(content)
		require.NoError(t, err)
		require.NoError(t, file.Close())
	}
	signed, err := a.Issue(key(t), id, time.Minute)
	require.NoError(t, err)
	require.NotContains(t, string(signed.ServerAuthorities), "PRIVATE")
	require.NotContains(t, string(signed.Chain), "PRIVATE")
}
