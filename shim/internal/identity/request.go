package identity

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	// refusedDelay is the wait after the agent has refused a certificate for good: it will refuse
	// again until a user acts.
	refusedDelay = 10 * time.Minute
	// early is the maximum fraction by which a renewal precedes the time that the agent requested,
	// relative to the time until then, so that a fleet that was onboarded together does not renew
	// together.
	early = 0.1
)

// Waits after failed requests. Without a first certificate, nothing tells the shim that the agent
// can be reached.
var (
	enrollmentRetries = wait.Backoff{Duration: interval, Factor: 2, Jitter: jitter, Steps: 10, Cap: time.Minute}
	renewalRetries    = wait.Backoff{Duration: interval, Factor: 2, Jitter: jitter, Steps: 10, Cap: 5 * time.Minute}
)

// attempts determines when the next attempt is due.
type attempts struct {
	of      string // hash of the certificate that the attempts use
	backoff wait.Backoff
	next    time.Time
}

// due reports whether an attempt may be made with a certificate. For a certificate that has not
// been tried yet it is due at once, and retries defines the waits after that.
func (a *attempts) due(with *x509.Certificate, now time.Time, retries wait.Backoff) bool {
	sum := sha256.Sum256(with.Raw)
	if of := hex.EncodeToString(sum[:]); a.of != of {
		*a = attempts{of: of, backoff: retries}
	}
	return !now.Before(a.next)
}

func (a *attempts) failed(err error, now time.Time) {
	delay := a.backoff.Step()
	if refused(err) && !passes(err) {
		delay = wait.Jitter(refusedDelay, jitter)
	}
	if asked, ok := agenterrors.RetryDelay(err); ok {
		delay = max(delay, wait.Jitter(asked, jitter))
	}
	a.next = now.Add(delay)
}

// refused reports whether the agent will refuse again until a user acts.
func refused(err error) bool {
	return agenterrors.IsUnauthenticated(err) || agenterrors.IsPermissionDenied(err) || agenterrors.IsRefused(err) ||
		agenterrors.IsInvalidArgument(err) || passes(err)
}

// passes reports whether a refusal may end without a new bootstrap certificate: the hub lacks the
// Cluster, or the agent is too old, or issues no certificates yet.
func passes(err error) bool {
	return agenterrors.IsNotFound(err) || agenterrors.IsCertificatesNotIssued(err) || status.Code(err) == codes.Unimplemented
}

// tryEnroll requests the first certificate of an onboarding if an attempt is due. done reports
// whether it was obtained.
func (k *Keeper) tryEnroll(ctx context.Context, s *stored, b *onboarding) (done bool, err error) {
	if b.unusable != nil {
		k.report(ctx, reasonInvalid, fmt.Sprintf("The secret %s cannot be used to get a client certificate: %v. %s", k.Bootstrap, b.unusable, k.remedy()))
		return false, nil //nolint:nilerr // It is reported.
	}
	if !k.enrollment.due(b.certificate, k.Clock.Now(), enrollmentRetries) {
		return false, nil
	}
	err = k.enroll(ctx, s, b)
	return err == nil, k.conclude(ctx, &k.enrollment, enrolling, fmt.Sprintf("with the bootstrap certificate in the secret %s", k.Bootstrap), err)
}

func (k *Keeper) enroll(ctx context.Context, s *stored, b *onboarding) error {
	key, encoded, err := k.enrollmentKey(ctx, s, b.onboarding)
	if err != nil {
		return err
	}
	agent, err := k.Connect(b.source)
	if err != nil {
		return fmt.Errorf("making the client for the bootstrap certificate: %w", err)
	}
	defer func() { _ = agent.Close() }()
	issued, err := k.request(ctx, agent.Issuer, key, encoded)
	if err != nil {
		return err
	}
	if n := nameIn(issued.certificate); n.onboarding != b.onboarding {
		return fmt.Errorf("the agent has issued a certificate of the onboarding %q for a bootstrap certificate of %q", n.onboarding, b.onboarding)
	}
	return k.store(ctx, s, issued, func(secret *corev1.Secret) {
		delete(secret.Data, EnrollmentKey)
		delete(secret.Annotations, EnrollmentAnnotation)
	})
}

// enrollmentKey returns the key for the first certificate of an onboarding. The key has been stored
// when it returns without an error.
func (k *Keeper) enrollmentKey(ctx context.Context, s *stored, onboarding string) (crypto.Signer, []byte, error) {
	if encoded := s.secret.Data[EnrollmentKey]; s.secret.Annotations[EnrollmentAnnotation] == onboarding {
		if key, err := decodeKey(encoded); err == nil {
			return key, encoded, nil
		}
	}
	key, encoded, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	return key, encoded, k.change(ctx, s, k.take, func(secret *corev1.Secret) {
		secret.Data[EnrollmentKey] = encoded
		secret.Annotations[EnrollmentAnnotation] = onboarding
	})
}

// tryRenew renews the present certificate if an attempt is due.
func (k *Keeper) tryRenew(ctx context.Context, s *stored, present *x509.Certificate) error {
	if !k.renewal.due(present, k.Clock.Now(), renewalRetries) {
		return nil
	}
	return k.conclude(ctx, &k.renewal, renewing, "in place of the present one", k.renew(ctx, s))
}

func (k *Keeper) renew(ctx context.Context, s *stored) error {
	if !s.exists() {
		if err := k.change(ctx, s, k.take, func(*corev1.Secret) {}); err != nil {
			return err
		}
	}
	key, encoded, err := newKey()
	if err != nil {
		return err
	}
	issued, err := k.request(ctx, k.Agent, key, encoded)
	if err != nil {
		return err
	}
	return k.store(ctx, s, issued, func(*corev1.Secret) {})
}

// conclude counts an attempt, and determines when the next one is due. It returns an error that
// must be logged, or one that restarts the round.
func (k *Keeper) conclude(ctx context.Context, a *attempts, purpose, what string, err error) error {
	switch {
	case err == nil:
		clear(k.reported)
		count(purpose, resultIssued)
		return nil
	case raced(err):
		return err
	case ctx.Err() != nil:
		return nil //nolint:nilerr // The process ends, or another one leads.
	}
	a.failed(err, k.Clock.Now())
	if !refused(err) {
		count(purpose, resultFailed)
		k.Held.Explain(fmt.Errorf("there is no client certificate yet: %s", agenterrors.Describe(err)))
		return fmt.Errorf("getting a client certificate %s: %w", what, err)
	}
	count(purpose, resultRefused)
	k.report(ctx, reasonRefused, fmt.Sprintf("The agent issues no client certificate %s: %s. %s", what, agenterrors.Describe(err), k.remedy()))
	return nil
}

// certificate is an issued certificate.
type certificate struct {
	certificates.PEM

	certificate *x509.Certificate
	renewAt     time.Time
}

// request requests a certificate for the key, and validates it.
func (k *Keeper) request(
	ctx context.Context, from agentv1alpha1.CertificateServiceClient, key crypto.Signer, encoded []byte,
) (certificate, error) {
	signingRequest, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return certificate{}, fmt.Errorf("making the signing request: %w", err)
	}
	answer, err := from.IssueCertificate(ctx, &agentv1alpha1.IssueCertificateRequest{Cluster: k.Cluster, SigningRequest: signingRequest})
	if err != nil {
		return certificate{}, err
	}
	issued := certificate{PEM: certificates.PEM{
		Certificate: answer.GetCertificateChain(), Key: encoded, Authorities: answer.GetServerAuthorities(),
	}}
	parsed, _, err := issued.Parse()
	if err != nil {
		return certificate{}, fmt.Errorf("the certificate that the agent has issued: %w", err)
	}
	issued.certificate = parsed.Leaf
	now := k.Clock.Now()
	switch n := nameIn(parsed.Leaf); {
	case n.kind != clusterPath || n.cluster != nameOf(k.Cluster):
		return certificate{}, fmt.Errorf("the agent has issued a certificate that is not one of the Cluster %s", nameOf(k.Cluster))
	case !now.Before(parsed.Leaf.NotAfter):
		return certificate{}, fmt.Errorf("the agent has issued a certificate that expired at %s: compare the clocks of hub and spoke",
			parsed.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	until := parsed.Leaf.NotAfter.Sub(now) / 2
	if at := answer.GetRenewAt().AsTime(); at.After(now) && at.Before(parsed.Leaf.NotAfter) {
		until = at.Sub(now)
	}
	issued.renewAt = now.Add(until - (wait.Jitter(until, early) - until))
	return issued, nil
}

// store writes an issued certificate to the identity secret, and puts it into use.
func (k *Keeper) store(ctx context.Context, s *stored, issued certificate, more func(*corev1.Secret)) error {
	err := k.change(ctx, s, k.hold, func(secret *corev1.Secret) {
		secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey] = issued.Certificate, issued.Key
		secret.Data[authoritiesEntry] = issued.Authorities
		secret.Annotations[RenewAtAnnotation] = issued.renewAt.UTC().Format(time.RFC3339)
		more(secret)
	})
	if err != nil {
		return err
	}
	log.FromContext(ctx).Info("the agent has issued a client certificate", "serial", issued.certificate.SerialNumber.Text(16),
		"notAfter", issued.certificate.NotAfter, "renewAt", s.renewAt(issued.certificate))
	return s.unusable
}

func newKey() (crypto.Signer, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding a key: %w", err)
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// decodeKey is the inverse of [newKey].
func decodeKey(encoded []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(encoded)
	if block == nil {
		return nil, errors.New("the key is not PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("the key is not PKCS #8")
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("the key cannot sign")
	}
	return signer, nil
}
