package fakeagent

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"fmt"
	"net/url"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// issuedLifetime is how long issued certificates are valid: the agent's default.
const issuedLifetime = 24 * time.Hour

// Onboard makes the agent issue certificates for the Cluster, with the ID of the onboarding. An
// empty ID ends that.
func (a *Agent) Onboard(cluster *agentv1alpha1.ClusterRef, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.onboardings[keyOf(cluster)] = id
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
	if a.onboardings[cluster] == "" {
		return nil, agenterrors.CertificatesNotIssued("the Cluster is not onboarded")
	}
	signing, err := x509.ParseCertificateRequest(request.GetSigningRequest())
	if err == nil {
		err = checkKey(signing)
	}
	if err == nil {
		err = signing.CheckSignature()
	}
	if err != nil {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: err.Error()})
	}
	now := a.now()
	if a.authority == nil {
		if a.authority, err = NewAuthority(now); err != nil {
			return nil, err
		}
	}
	id := &url.URL{Scheme: "spiffe", Host: a.settings.trustDomain, Path: fmt.Sprintf("/cluster/%s/%s", cluster, a.onboardings[cluster])}
	chain, err := a.authority.sign(signing.PublicKey, &x509.Certificate{
		NotBefore: now, NotAfter: now.Add(issuedLifetime), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, URIs: []*url.URL{id},
	})
	if err != nil {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: err.Error()})
	}
	return &agentv1alpha1.IssueCertificateResponse{
		CertificateChain: chain, ServerAuthorities: a.authority.PEM(),
		NotAfter: timestamppb.New(now.Add(issuedLifetime)), RenewAt: timestamppb.New(now.Add(issuedLifetime / 2)),
	}, nil
}

// minRSABits and maxRSABits are the sizes of RSA keys that the agent accepts.
const minRSABits, maxRSABits = 2048, 4096

// checkKey returns why the agent does not certify the key of a request.
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
