package certificates_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

func TestRequestsAreOfKeysThatAreStrongEnough(t *testing.T) {
	request := func(signer crypto.Signer) []byte {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, signer)
		require.NoError(t, err)
		return der
	}
	ec := func(curve elliptic.Curve) crypto.Signer {
		k, err := ecdsa.GenerateKey(curve, rand.Reader)
		require.NoError(t, err)
		return k
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	rsaKey := func(bits int) crypto.Signer {
		k, err := rsa.GenerateKey(rand.Reader, bits)
		require.NoError(t, err)
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
		_, err := certificates.ParseRequest(c.der)
		if c.says == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.says, name)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte("noise"))
	f.Fuzz(func(_ *testing.T, der []byte) { _, _ = certificates.ParseRequest(der) })
}
