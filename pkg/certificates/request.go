package certificates

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
)

const (
	// minRSABits is the lowest size of an RSA key according to NIST SP 800-57 for the years up to
	// 2030.
	minRSABits = 2048
	// maxRSABits limits the cost of verifying a signature.
	maxRSABits = 4096
)

// ParseRequest returns the public key of a PKCS #10 signing request in DER: ECDSA on P-256, P-384
// or P-521, Ed25519, or RSA of 2,048 to 4,096 bits. The request's signature proves that the sender
// has the private key. An error states what is wrong with the request.
func ParseRequest(der []byte) (crypto.PublicKey, error) {
	request, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("is not a PKCS #10 signing request in DER; `openssl req -new -outform DER` makes one")
	}
	// The key is checked before the signature, because the cost of verifying it grows with the key.
	if err := checkKey(request); err != nil {
		return nil, err
	}
	if err := request.CheckSignature(); err != nil {
		return nil, errors.New("is not signed with its own key")
	}
	return request.PublicKey, nil
}

func checkKey(request *x509.CertificateRequest) error {
	switch key := request.PublicKey.(type) {
	case *ecdsa.PublicKey:
		if !slices.Contains([]elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()}, key.Curve) {
			return fmt.Errorf("has a key on the curve %s; use P-256", key.Curve.Params().Name)
		}
	case ed25519.PublicKey:
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Errorf("has an RSA key of %d bits; use %d to %d, or ECDSA P-256", bits, minRSABits, maxRSABits)
		}
	default:
		return fmt.Errorf("has a key of the kind %s; use ECDSA P-256", request.PublicKeyAlgorithm)
	}
	return nil
}
