package certificates_test

import (
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
)

// A TLS configuration that asks the source in every handshake, so that a renewed certificate is
// used without a restart.
func ExampleHeld() {
	source := certificates.NewHeld(errors.New("no certificate has been issued yet; onboard the Cluster"))
	config := &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return source.Certificate() },
	}

	_, err := config.GetClientCertificate(nil)
	fmt.Println(err)

	err = source.Hold(certificates.PEM{Certificate: []byte("unusable"), Key: []byte("secret"), Authorities: []byte("unusable")})
	fmt.Println("held:", err == nil, "errors:", source.Stats().CertificateErrors)
	// Output:
	// no certificate has been issued yet; onboard the Cluster
	// held: false errors: 1
}

// Formatting key material reveals nothing.
func ExamplePEM() {
	fmt.Println(certificates.PEM{Key: []byte("secret")})
	// Output: certificates.PEM{hidden}
}
