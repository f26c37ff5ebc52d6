package fakeagent_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestAnOnboardedClusterGetsCertificates(t *testing.T) {
	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	cluster := fakeagent.DefaultCluster()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	signing, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	require.NoError(t, err)
	request := &agentv1alpha1.IssueCertificateRequest{Cluster: cluster, SigningRequest: signing}
	own := agent.ClientFor(cluster)

	_, err = own.Issuer.IssueCertificate(t.Context(), request)
	assert.True(t, agenterrors.IsCertificatesNotIssued(err), "%v", err)

	agent.Onboard(cluster, "first")
	issued, err := own.Issuer.IssueCertificate(t.Context(), request)
	require.NoError(t, err)
	block, _ := pem.Decode(issued.GetCertificateChain())
	require.NotNil(t, block)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	assert.True(t, key.PublicKey.Equal(certificate.PublicKey))
	require.Len(t, certificate.URIs, 1)
	assert.Equal(t, "spiffe://karpenter-capi/cluster/default/workload/first", certificate.URIs[0].String())
	assert.WithinDuration(t, certificate.NotAfter, issued.GetNotAfter().AsTime(), time.Second)
	assert.True(t, issued.GetRenewAt().AsTime().Before(issued.GetNotAfter().AsTime()))
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(issued.GetServerAuthorities()))
	_, err = certificate.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	require.NoError(t, err)

	weak, err := rsa.GenerateKey(rand.Reader, 1024)
	require.NoError(t, err)
	request.SigningRequest, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, weak)
	require.NoError(t, err)
	_, err = own.Issuer.IssueCertificate(t.Context(), request)
	assert.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
	require.ErrorContains(t, err, "has an RSA key of 1024 bits")
	request.SigningRequest = []byte("nonsense")
	_, err = own.Issuer.IssueCertificate(t.Context(), request)
	assert.True(t, agenterrors.IsInvalidArgument(err), "%v", err)
	request.SigningRequest = signing
	_, err = agent.AutoscalerFor(cluster).Issuer.IssueCertificate(t.Context(), request)
	assert.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
	_, err = agent.ClientFor(&agentv1alpha1.ClusterRef{Namespace: "default", Name: "other"}).Issuer.IssueCertificate(t.Context(), request)
	assert.True(t, agenterrors.IsPermissionDenied(err), "%v", err)
}
