package onboarding_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/onboarding"
)

// authority returns a new authority. Without one above, it signs itself.
func authority(t *testing.T, name string, above *x509.Certificate, signer *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	if above == nil {
		above, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, above, key.Public(), signer)
	require.NoError(t, err)
	certificate, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return certificate, key
}

// The agent trusts the root alone, as cert-manager's ca.crt has it.
func TestTheBootstrapCertificateHasTheIntermediatesOfItsIssuer(t *testing.T) {
	root, rootKey := authority(t, "root", nil, nil)
	middle, middleKey := authority(t, "middle", root, rootKey)
	issuing, issuingKey := authority(t, "issuing", middle, middleKey)
	pair, err := cert.EncodeCertificates(issuing, middle, root)
	require.NoError(t, err)
	key, err := keyutil.MarshalPrivateKeyToPEM(issuingKey)
	require.NoError(t, err)
	ca, err := cert.EncodeCertificates(root)
	require.NoError(t, err)
	scheme, err := onboarding.Scheme()
	require.NoError(t, err)
	hub := fake.NewClientBuilder().WithScheme(scheme).WithObjects(
		&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}},
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "agent", Name: "issuer"},
			Data:       map[string][]byte{corev1.TLSCertKey: pair, corev1.TLSPrivateKeyKey: key, onboarding.CAKey: ca},
		},
	).Build()
	prepared, err := onboarding.Prepare(t.Context(), hub, onboarding.Options{
		Cluster: types.NamespacedName{Namespace: "fleet", Name: "spoke"}, Issuer: types.NamespacedName{Namespace: "agent", Name: "issuer"},
		TrustDomain: "karpenter-capi", ValidFor: time.Hour, Secret: types.NamespacedName{Namespace: "karpenter", Name: "bootstrap"},
	}, clock.RealClock{})
	require.NoError(t, err)
	chain, err := cert.ParseCertsPEM(prepared.Secret.Data[corev1.TLSCertKey])
	require.NoError(t, err)
	require.Len(t, chain, 3, "without the root")
	roots, intermediates := x509.NewCertPool(), x509.NewCertPool()
	roots.AddCert(root)
	for _, above := range chain[1:] {
		intermediates.AddCert(above)
	}
	_, err = chain[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	require.NoError(t, err)
}
