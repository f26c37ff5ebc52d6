package fakeagent

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/url"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
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
	key, err := certificates.ParseRequest(request.GetSigningRequest())
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
	chain, err := a.authority.sign(key, &x509.Certificate{
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
