package fakeagent

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/url"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	// issuedLifetime is how long issued certificates are valid: the agent's default.
	issuedLifetime = 24 * time.Hour
	// authorityLifetime is longer than any test.
	authorityLifetime = 1000 * time.Hour
)

// Onboard makes the agent issue certificates for the Cluster, with the ID of the onboarding. An
// empty ID ends that.
func (a *Agent) Onboard(cluster *agentv1alpha1.ClusterRef, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.onboardings[keyOf(cluster)] = id
}

// authority signs the issued certificates.
type authority struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

func newAuthority(now time.Time) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "fake agent"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(authorityLifetime),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	return &authority{certificate: certificate, key: key}, err
}

func (a *authority) pem() []byte { return encodeCertificate(a.certificate.Raw) }

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func (a *authority) sign(key crypto.PublicKey, id *url.URL, serial int64, now time.Time) ([]byte, error) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), NotBefore: now, NotAfter: now.Add(issuedLifetime),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		URIs: []*url.URL{id},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key, a.key)
	if err != nil {
		return nil, err
	}
	return encodeCertificate(der), nil
}

type certificateService struct {
	agentv1alpha1.UnimplementedCertificateServiceServer

	agent *Agent
}

func (s certificateService) IssueCertificate(
	ctx context.Context, request *agentv1alpha1.IssueCertificateRequest,
) (*agentv1alpha1.IssueCertificateResponse, error) {
	a, cluster := s.agent, keyOf(request.GetCluster())
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.existing(ctx, cluster); err != nil {
		return nil, err
	}
	caller, err := callerOf(ctx)
	switch {
	case err != nil:
		return nil, err
	case caller.autoscaler:
		return nil, errNotYours()
	case a.onboardings[cluster] == "":
		return nil, agenterrors.CertificatesNotIssued("the Cluster is not onboarded")
	}
	signing, err := x509.ParseCertificateRequest(request.GetSigningRequest())
	if err == nil {
		err = signing.CheckSignature()
	}
	if err != nil {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: err.Error()})
	}
	now := a.now()
	if a.authority == nil {
		if a.authority, err = newAuthority(now); err != nil {
			return nil, fmt.Errorf("making the authority: %w", err)
		}
	}
	a.issued++
	id := &url.URL{Scheme: "spiffe", Host: TrustDomain, Path: fmt.Sprintf("/cluster/%s/%s/%s", cluster.namespace, cluster.name, a.onboardings[cluster])}
	chain, err := a.authority.sign(signing.PublicKey, id, a.issued, now)
	if err != nil {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: err.Error()})
	}
	return &agentv1alpha1.IssueCertificateResponse{
		CertificateChain: chain, ServerAuthorities: a.authority.pem(),
		NotAfter: timestamppb.New(now.Add(issuedLifetime)), RenewAt: timestamppb.New(now.Add(issuedLifetime / 2)),
	}, nil
}
