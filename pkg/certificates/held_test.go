package certificates_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

// issued returns a certificate that is its own authority.
func issued(t *testing.T, serial int64, notAfter time.Time) certificates.PEM {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), NotBefore: notAfter.Add(-time.Hour), NotAfter: notAfter, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	encoded, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	certificate := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return certificates.PEM{
		Certificate: certificate, Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), Authorities: certificate,
	}
}

func TestHeldAnswersWhatToDoUntilItHoldsSomething(t *testing.T) {
	h := certificates.NewHeld(errors.New("run the command"))
	_, err := h.Certificate()
	require.EqualError(t, err, "run the command")
	h.Explain(errors.New("run the other command"))
	_, err = h.Authorities()
	require.EqualError(t, err, "run the other command")
	require.Equal(t, certificates.Stats{}, h.Stats())

	end := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
	require.NoError(t, h.Hold(issued(t, 7, end)))
	certificate, err := h.Certificate()
	require.NoError(t, err)
	require.EqualValues(t, 7, certificate.Leaf.SerialNumber.Int64())
	authorities, err := h.Authorities()
	require.NoError(t, err)
	require.NotNil(t, authorities)
	require.Equal(t, certificates.Stats{
		CertificateNotBefore: end.Add(-time.Hour), CertificateNotAfter: end, AuthoritiesNotBefore: end.Add(-time.Hour), AuthoritiesNotAfter: end,
	}, h.Stats())

	_, err = certificates.NewHeld(nil).Certificate()
	require.Error(t, err)
}

func TestHeldKeepsWhatItHasWhenGivenWhatCannotBeUsed(t *testing.T) {
	h := certificates.NewHeld(nil)
	end := time.Now().Add(time.Hour)
	first, second := issued(t, 1, end), issued(t, 2, end)
	require.NoError(t, h.Hold(first))
	for name, unusable := range map[string]certificates.PEM{
		"another's key":      {Certificate: second.Certificate, Key: first.Key, Authorities: second.Authorities},
		"no key":             {Certificate: second.Certificate, Authorities: second.Authorities},
		"no certificate":     {Key: second.Key, Authorities: second.Authorities},
		"no authorities":     {Certificate: second.Certificate, Key: second.Key},
		"keys for authority": {Certificate: second.Certificate, Key: second.Key, Authorities: second.Key},
	} {
		t.Run(name, func(t *testing.T) {
			before := h.Stats()
			err := h.Hold(unusable)
			require.Error(t, err)
			requireNoKey(t, err.Error(), first, second)
			certificate, err := h.Certificate()
			require.NoError(t, err)
			require.EqualValues(t, 1, certificate.Leaf.SerialNumber.Int64())
			after := h.Stats()
			require.EqualValues(t, 1, after.CertificateErrors+after.AuthoritiesErrors-before.CertificateErrors-before.AuthoritiesErrors)
		})
	}
	require.NoError(t, h.Hold(second))
	expired := issued(t, 3, time.Now().Add(-time.Minute))
	require.NoError(t, h.Hold(expired), "an expired certificate is held: its users decide")
}

func TestNothingThatIsPrintedOrLoggedHasTheKey(t *testing.T) {
	p := issued(t, 1, time.Now().Add(time.Hour))
	var lines strings.Builder
	funcr.New(func(_, line string) { lines.WriteString(line) }, funcr.Options{Verbosity: 9}).Info("a line", "pem", p, "pointer", &p)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		lines.WriteString(fmt.Sprintf(verb, p) + fmt.Sprintf(verb, &p))
	}
	requireNoKey(t, lines.String(), p)
	encoded, err := json.Marshal(p)
	require.NoError(t, err)
	requireNoKey(t, string(encoded), p)
}

func requireNoKey(t *testing.T, text string, of ...certificates.PEM) {
	t.Helper()
	require.NotContains(t, text, "PRIVATE KEY-")
	for _, p := range of {
		block, _ := pem.Decode(p.Key)
		require.NotNil(t, block)
		require.NotContains(t, text, strings.Split(string(p.Key), "\n")[1])
		require.NotContains(t, text, hex.EncodeToString(block.Bytes))
		encoded, err := json.Marshal(p.Key)
		require.NoError(t, err)
		require.NotContains(t, text, strings.Trim(string(encoded), `"`))
	}
}
