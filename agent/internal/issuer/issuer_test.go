package issuer_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
)

var id = spiffeid.RequireFromString("spiffe://karpenter-capi/cluster/fleet/spoke/abc")

func open(t *testing.T, authority *testpki.Authority, clock *clocktesting.FakePassiveClock) (*issuer.Authority, issuer.Files) {
	t.Helper()
	files := filesOf(t, authority)
	a, err := issuer.Open(files, clock)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
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
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(os.WriteFile(to, content, 0o600)).To(Succeed())
}

func key(t *testing.T) crypto.PublicKey {
	t.Helper()
	k, err := issuer.ParseRequest(testpki.SigningRequest(t))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return k
}

func parse(t *testing.T, chain []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(chain)
	NewWithT(t).Expect(block).NotTo(BeNil())
	certificate, err := x509.ParseCertificate(block.Bytes)
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return certificate
}

func TestACertificateIsForClientsAndHasOneName(t *testing.T) {
	g := NewWithT(t)
	now := time.Now().Truncate(time.Second)
	authority := testpki.New(t)
	a, _ := open(t, authority, clocktesting.NewFakePassiveClock(now))
	signed, err := a.Issue(key(t), id, 20*time.Minute)
	g.Expect(err).NotTo(HaveOccurred())
	certificate := parse(t, signed.Chain)
	_, err = certificate.Verify(x509.VerifyOptions{Roots: authority.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	g.Expect(err).NotTo(HaveOccurred())
	_, err = certificate.Verify(x509.VerifyOptions{Roots: authority.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	g.Expect(err).To(HaveOccurred(), "it must not serve in the agent's place")
	g.Expect(certificate.URIs).To(HaveLen(1))
	g.Expect(certificate.URIs[0].String()).To(Equal(id.String()))
	g.Expect(certificate.Subject.String()).To(BeEmpty())
	g.Expect(certificate.DNSNames).To(BeEmpty())
	g.Expect(certificate.IsCA).To(BeFalse())
	g.Expect(certificate.NotAfter).To(BeTemporally("==", now.Add(20*time.Minute)))
	g.Expect(signed.NotAfter).To(BeTemporally("==", certificate.NotAfter))
	g.Expect(signed.RenewAt).To(BeTemporally("==", now.Add(10*time.Minute)))
	g.Expect(certificate.NotBefore).To(BeTemporally("<=", now.Add(-time.Minute)), "the clocks of two agents differ")
	g.Expect(x509.NewCertPool().AppendCertsFromPEM(signed.ServerAuthorities)).To(BeTrue())

	again, err := a.Issue(key(t), id, 20*time.Minute)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(again.Serial).NotTo(Equal(signed.Serial))
}

func TestACertificateEndsWithItsAuthority(t *testing.T) {
	g := NewWithT(t)
	authority := testpki.New(t) // valid for an hour
	clock := clocktesting.NewFakePassiveClock(time.Now())
	a, _ := open(t, authority, clock)
	signed, err := a.Issue(key(t), id, 24*time.Hour)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(signed.NotAfter).To(BeTemporally("<=", clock.Now().Add(time.Hour)))
	g.Expect(signed.RenewAt).To(BeTemporally("<", clock.Now().Add(31*time.Minute)))
	clock.SetTime(clock.Now().Add(2 * time.Hour))
	_, err = a.Issue(key(t), id, 24*time.Hour)
	g.Expect(err).To(MatchError(ContainSubstring("issuer's certificate has expired at")))
}

// A caller replaces its certificate by the issued one. Nothing may therefore be issued while the
// callers' authorities would reject it.
func TestARotatedAuthorityIsFollowedOnceTheAgentAcceptsIt(t *testing.T) {
	g := NewWithT(t)
	before, after := testpki.New(t), testpki.New(t)
	a, files := open(t, before, clocktesting.NewFakePassiveClock(time.Now()))
	certFile, keyFile := after.Write(t, t.TempDir())
	copyFile(t, certFile, files.CertFile)
	copyFile(t, keyFile, files.KeyFile)
	g.Eventually(func() error {
		_, err := a.Issue(key(t), id, time.Minute)
		return err
	}, 20*time.Second).Should(MatchError(ContainSubstring("put the issuer there (--client-ca-file)")))
	g.Consistently(func() error {
		_, err := a.Issue(key(t), id, time.Minute)
		return err
	}, 50*time.Millisecond).Should(HaveOccurred())

	copyFile(t, certFile, files.ClientCAFile)
	g.Eventually(func(g Gomega) {
		signed, err := a.Issue(key(t), id, time.Minute)
		g.Expect(err).NotTo(HaveOccurred())
		_, err = parse(t, signed.Chain).Verify(x509.VerifyOptions{Roots: after.Pool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		g.Expect(err).NotTo(HaveOccurred())
	}, 20*time.Second).Should(Succeed())
}

// A caller that trusts only the authorities in the response could no longer reach the agent.
func TestAuthoritiesThatDoNotAcceptTheAgentAreNotTold(t *testing.T) {
	g := NewWithT(t)
	authority := testpki.New(t)
	a, files := open(t, authority, clocktesting.NewFakePassiveClock(time.Now()))
	other, _ := testpki.New(t).Write(t, t.TempDir())
	copyFile(t, other, files.ServerCAFile)
	_, err := a.Issue(key(t), id, time.Minute)
	g.Expect(err).To(MatchError(ContainSubstring("do not accept the agent's own certificate")))
	g.Expect(err).To(MatchError(ContainSubstring("--server-ca-file")))
	_, err = issuer.Open(files, clocktesting.NewFakePassiveClock(time.Now()))
	g.Expect(err).To(MatchError(ContainSubstring("--server-ca-file")))
}

func TestWhatIsNoAuthorityIsRefused(t *testing.T) {
	g := NewWithT(t)
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
		g.Expect(err).To(MatchError(ContainSubstring(says)))
		g.Expect(err.Error()).NotTo(ContainSubstring("PRIVATE"))
	}
}

// Callers receive only certificates, whatever else the file contains.
func TestKeysDoNotGoAlong(t *testing.T) {
	g := NewWithT(t)
	authority := testpki.New(t)
	a, files := open(t, authority, clocktesting.NewFakePassiveClock(time.Now()))
	for _, name := range []string{files.KeyFile, files.CertFile} {
		content, err := os.ReadFile(name)
		g.Expect(err).NotTo(HaveOccurred())
		file, err := os.OpenFile(files.ServerCAFile, os.O_APPEND|os.O_WRONLY, 0o600)
		g.Expect(err).NotTo(HaveOccurred())
		_, err = file.Write(content)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(file.Close()).To(Succeed())
	}
	signed, err := a.Issue(key(t), id, time.Minute)
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(string(signed.ServerAuthorities)).NotTo(ContainSubstring("PRIVATE"))
	g.Expect(string(signed.Chain)).NotTo(ContainSubstring("PRIVATE"))
}

func TestRequestsAreOfKeysThatAreStrongEnough(t *testing.T) {
	g := NewWithT(t)
	request := func(signer crypto.Signer) []byte {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, signer)
		g.Expect(err).NotTo(HaveOccurred())
		return der
	}
	ec := func(curve elliptic.Curve) crypto.Signer {
		k, err := ecdsa.GenerateKey(curve, rand.Reader)
		g.Expect(err).NotTo(HaveOccurred())
		return k
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	g.Expect(err).NotTo(HaveOccurred())
	rsaKey := func(bits int) crypto.Signer {
		k, err := rsa.GenerateKey(rand.Reader, bits)
		g.Expect(err).NotTo(HaveOccurred())
		return k
	}
	forged := request(ec(elliptic.P256()))
	forged[len(forged)-1] ^= 1
	for name, c := range map[string]struct {
		der  []byte
		says string
	}{
		"P-256":    {request(ec(elliptic.P256())), ""},
		"P-384":    {request(ec(elliptic.P384())), ""},
		"Ed25519":  {request(ed), ""},
		"RSA":      {request(rsaKey(2048)), ""},
		"P-224":    {request(ec(elliptic.P224())), "P-224"},
		"RSA 1024": {request(rsaKey(1024)), "1024 bits"},
		"RSA 5120": {request(rsaKey(5120)), "5120 bits"},
		"nothing":  {nil, "is not a PKCS #10 signing request"},
		"noise":    {[]byte("noise"), "is not a PKCS #10 signing request"},
		"forged":   {forged, "is not signed with its own key"},
		"trailing": {append(request(ed), 0), "is not a PKCS #10 signing request"},
	} {
		_, err := issuer.ParseRequest(c.der)
		if c.says == "" {
			g.Expect(err).NotTo(HaveOccurred(), name)
		} else {
			g.Expect(err).To(MatchError(ContainSubstring(c.says)), name)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte("noise"))
	f.Fuzz(func(_ *testing.T, der []byte) { _, _ = issuer.ParseRequest(der) })
}
