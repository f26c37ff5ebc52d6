package server

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Issuing holds what is needed to issue certificates.
type Issuing struct {
	// Issue signs a certificate. REQUIRED.
	Issue func(key crypto.PublicKey, id spiffeid.ID, lifetime time.Duration) (issuer.Certificate, error)
	// Enroll records the key that a bootstrap certificate is used for. It returns
	// [spokes.ErrOtherKey] for a second key, [spokes.ErrNotExpected] if an earlier use may have
	// been forgotten, and [spokes.ErrEnded] if the onboarding is not the Cluster's current one.
	// REQUIRED.
	Enroll func(ctx context.Context, of authz.Onboarding, publicKey string) error
	// TrustDomain is the trust domain of the issued identities. Lifetime is how long the
	// certificates are valid. REQUIRED.
	TrustDomain string
	Lifetime    time.Duration
	// Issued is called when a certificate was issued. It must not block for long. Nil calls
	// nothing.
	Issued func(ctx context.Context, cluster types.NamespacedName, issued spokes.Issued)
}

// Values of the labels of [newCertificateRequests].
const (
	enrollment = "enrollment"
	renewal    = "renewal"

	resultIssued    = "issued"
	resultRefused   = "refused"
	resultSecondKey = "second-key"
	resultFailed    = "failed"
)

func newCertificateRequests() *prometheus.CounterVec {
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "capi_agent_certificate_requests_total",
		Help: "Requests for certificates by callers that may make them, by purpose (enrollment: with a bootstrap certificate; renewal) and result " +
			"(issued; refused; second-key: refused, because the bootstrap certificate was used for another key before; failed: an error of the " +
			"agent or the hub).",
	}, []string{"purpose", "result"})
	// A counter that appears with its first increment has no increase that a rule could see.
	for _, purpose := range []string{enrollment, renewal} {
		for _, result := range []string{resultIssued, resultRefused, resultSecondKey, resultFailed} {
			requests.WithLabelValues(purpose, result)
		}
	}
	return requests
}

// resultOf returns the value of the label result for the outcome of a request.
func resultOf(err error) string {
	if errors.As(err, new(*secondKeyError)) {
		return resultSecondKey
	}
	switch grpcstatus.Code(err) {
	case codes.OK:
		return resultIssued
	case codes.InvalidArgument, codes.NotFound, codes.FailedPrecondition, codes.PermissionDenied, codes.Unauthenticated:
		return resultRefused
	default:
		return resultFailed
	}
}

// secondKeyError wraps the error that a caller receives who used a bootstrap certificate with a
// second key.
type secondKeyError struct{ error }

func (e *secondKeyError) Unwrap() error { return e.error }

type certificateService struct {
	agentv1alpha1.UnimplementedCertificateServiceServer
	*Server
}

func (s *certificateService) IssueCertificate(
	ctx context.Context, request *agentv1alpha1.IssueCertificateRequest,
) (*agentv1alpha1.IssueCertificateResponse, error) {
	purpose := renewal
	if c := callerOf(ctx); c.Onboarding != nil && c.MayCallFor(bootstrapRule, c.Onboarding.Cluster) {
		purpose = enrollment
	}
	response, err := s.issue(ctx, request, purpose)
	s.certificateRequests.WithLabelValues(purpose, resultOf(err)).Inc()
	if second := (*secondKeyError)(nil); errors.As(err, &second) {
		return nil, second.error
	}
	return response, err
}

func (s *certificateService) issue(
	ctx context.Context, request *agentv1alpha1.IssueCertificateRequest, purpose string,
) (*agentv1alpha1.IssueCertificateResponse, error) {
	if err := s.usable(request.GetCluster()); err != nil {
		return nil, err
	}
	c, issuing := callerOf(ctx), s.config.Issuing
	if issuing == nil {
		return nil, agenterrors.CertificatesNotIssued("this agent issues no certificates: --issuer-cert-file is not set")
	}
	if c.Onboarding == nil {
		return nil, agenterrors.CertificatesNotIssued("the caller has no certificate that could be renewed")
	}
	key, err := certificates.ParseRequest(request.GetSigningRequest())
	if err != nil {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: err.Error()})
	}
	of := *c.Onboarding
	// Reads live: the cache may not show a new onboarding yet, and a certificate issued now is
	// valid for hours.
	switch id, exists, err := s.config.OnboardedLive(ctx, of.Cluster); {
	case err != nil:
		return nil, answerOther(ctx, err)
	case !exists:
		return nil, agenterrors.ClusterNotFound(request.GetCluster())
	case id != of.ID:
		// It is asked here, and not when the call was admitted. It slows the caller down as any
		// other that is shut out.
		s.limits.Denied(c.limitedAs)
		return nil, otherOnboarding(of)
	case of.ID == "":
		return nil, agenterrors.CertificatesNotIssued("the Cluster is not onboarded; `capi-agent onboard` makes a bootstrap certificate for it")
	}
	if purpose == enrollment {
		// A move would leave the record of the use behind, and the bootstrap certificate could be
		// used again.
		if _, err := s.config.Engine.UnpausedCluster(ctx, of.Cluster); err != nil {
			return nil, s.answer(ctx, err, keyOf(request.GetCluster(), ""))
		}
		if err := issuing.enroll(ctx, of, key); err != nil {
			return nil, err
		}
	}
	if err := s.limits.Issue(c.limitedAs, agentv1alpha1.CertificateService_IssueCertificate_FullMethodName); err != nil {
		return nil, throttled(ctx, err)
	}
	id, err := authz.ClusterIdentity(issuing.TrustDomain, of)
	if err != nil {
		return nil, agenterrors.Unauthenticated(err.Error())
	}
	issued, err := issuing.Issue(key, id, issuing.Lifetime)
	if err != nil {
		return nil, answerOther(ctx, err)
	}
	log.FromContext(ctx).Info("a certificate is issued", "cluster", of.Cluster.String(), "serial", issued.Serial, "notAfter", issued.NotAfter)
	if issuing.Issued != nil {
		issuing.Issued(ctx, of.Cluster, spokes.Issued{Serial: issued.Serial, NotAfter: issued.NotAfter, Enrolled: purpose == enrollment})
	}
	return &agentv1alpha1.IssueCertificateResponse{
		CertificateChain: issued.Chain, ServerAuthorities: issued.ServerAuthorities,
		NotAfter: timestamppb.New(issued.NotAfter), RenewAt: timestamppb.New(issued.RenewAt),
	}, nil
}

// enroll records the key that a bootstrap certificate is used for. It returns the caller's error.
func (i *Issuing) enroll(ctx context.Context, of authz.Onboarding, key crypto.PublicKey) error {
	fingerprint, err := issuer.Fingerprint(key)
	if err != nil {
		return agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "signing_request", Description: err.Error()})
	}
	switch err := i.Enroll(ctx, of, fingerprint); {
	case errors.Is(err, spokes.ErrOtherKey):
		log.FromContext(ctx).Info("a bootstrap certificate was used with a second key: it may have been stolen", "cluster", of.Cluster.String())
		return &secondKeyError{agenterrors.PermissionDenied(spokes.ErrOtherKey.Error() + onboardAgain)}
	case errors.Is(err, spokes.ErrNotExpected):
		return agenterrors.PermissionDenied(spokes.ErrNotExpected.Error() + onboardAgain)
	case errors.Is(err, spokes.ErrEnded):
		return otherOnboarding(of)
	case meta.IsNoMatchError(err):
		return agenterrors.CertificatesNotIssued("the hub lacks the CustomResourceDefinition of Spokes: its administrator has to install it")
	case apierrors.IsForbidden(err):
		log.FromContext(ctx).Error(err, "the agent may not write Spokes: upgrade the release, with its roles")
		return agenterrors.CertificatesNotIssued("the agent lacks a permission in the hub, which its log names")
	case err != nil:
		return answerOther(ctx, err)
	}
	return nil
}

const onboardAgain = "; onboard the Cluster again: `capi-agent onboard --again`"

// bootstrapRule matches callers with a bootstrap certificate.
var bootstrapRule = authz.Rule{Roles: []authz.Role{authz.RoleBootstrap}}

// onboarded returns nil if the caller may use its Cluster's certificate, and the reason as an error
// otherwise. The certificate must belong to the Cluster's current onboarding.
func (s *Server) onboarded(ctx context.Context, c caller) error {
	if c.Onboarding == nil {
		return nil
	}
	select {
	case <-s.config.NodeGroups.Ready():
	default:
		return agenterrors.NotSynced("the agent's view of the hub is not complete yet")
	}
	if !s.config.Scope.Contains(c.Onboarding.Cluster) {
		// The caches do not contain this Cluster. A grant of the policy allowed the call, for
		// another Cluster.
		if c.Onboarding.ID != "" {
			return agenterrors.Unauthenticated("the client certificate belongs to an onboarding of a Cluster that this agent does not serve, so the agent " +
				"cannot check whether the onboarding has ended; give the caller another identity")
		}
		return nil
	}
	id, exists, err := s.config.Onboarded(ctx, c.Onboarding.Cluster)
	switch {
	case err != nil:
		return answerOther(ctx, err)
	case id != c.Onboarding.ID, !exists && c.Onboarding.ID != "":
		return otherOnboarding(*c.Onboarding)
	}
	return nil
}

func otherOnboarding(of authz.Onboarding) error {
	if of.ID == "" {
		return agenterrors.Unauthenticated("the Cluster is onboarded, but the client certificate does not belong to an onboarding: another authority " +
			"issued it, or it is older. Use the certificate that the shim gets after `capi-agent onboard`")
	}
	return agenterrors.Unauthenticated("the client certificate does not belong to the Cluster's current onboarding; onboard the Cluster again: " +
		"`capi-agent onboard`")
}

// OnboardingOf returns the ID of a Cluster's onboarding, which is empty if it has none, and whether
// the Cluster exists.
type OnboardingOf func(ctx context.Context, cluster types.NamespacedName) (id string, exists bool, err error)

// note passes on details of the shim that has just synchronized its Cluster's claims. matched
// reports that its live set has an existing one. Callers with another role may synchronize claims
// too, but they are not shims and are ignored.
func (s *Server) note(ctx context.Context, request *agentv1alpha1.SyncClaimsRequest, matched bool) {
	cluster, by := clusterName(request.GetCluster()), callerOf(ctx)
	if s.config.Note == nil || !by.MayCallFor(authz.Rule{Roles: []authz.Role{authz.RoleCluster}}, cluster) {
		return
	}
	contact := spokes.Contact{SpokeID: request.GetSpokeId(), Matched: matched}
	if by.Onboarding != nil {
		contact.Onboarding = by.Onboarding.ID
	}
	if said := metadata.ValueFromIncomingContext(ctx, "user-agent"); len(said) > 0 {
		// gRPC appends its own name and version.
		if name, _, _ := strings.Cut(said[0], " "); printable(name) {
			contact.Version = name
		}
	}
	if chains := chainsOf(ctx); len(chains) > 0 {
		certificate := chains[0][0]
		contact.Serial, contact.NotBefore, contact.NotAfter = certificate.SerialNumber.Text(16), certificate.NotBefore, authz.ValidUntil(chains)
	}
	s.config.Note(ctx, cluster, contact)
}

// chainsOf returns the verified chains of the caller's certificate, or nil if it has none.
func chainsOf(ctx context.Context) [][]*x509.Certificate {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	handshake := p.AuthInfo
	if of, ok := handshake.(connectionInfo); ok {
		handshake = of.AuthInfo
	}
	if info, ok := handshake.(credentials.TLSInfo); ok {
		return info.State.VerifiedChains
	}
	return nil
}
