package identity

import (
	"context"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

const (
	// RenewAtAnnotation on the identity secret is when its certificate should be renewed, RFC 3339.
	RenewAtAnnotation = v1alpha1.Group + "/renew-at"
	// EnrollmentAnnotation on the identity secret is the id of the onboarding that [EnrollmentKey]
	// was generated for.
	EnrollmentAnnotation = v1alpha1.Group + "/enrollment"

	// EnrollmentKey is the entry of the identity secret with the private key for a pending request
	// of a first certificate. PKCS #8, PEM.
	EnrollmentKey = "enrollment.key"
	// authoritiesEntry is the entry with the authorities of the agent's certificate.
	authoritiesEntry = "ca.crt"
)

// stored is the content of a secret.
type stored struct {
	// secret has no resource version if it does not exist.
	secret *corev1.Secret
	// unusable is why its certificate cannot be used, or nil.
	unusable error
}

func get(ctx context.Context, reader client.Reader, name types.NamespacedName) (stored, error) {
	ctx, cancel := quietly(ctx)
	defer cancel()
	secret := &corev1.Secret{}
	switch err := reader.Get(ctx, name, secret); {
	case apierrors.IsNotFound(err):
		secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}, Type: corev1.SecretTypeOpaque}
	case err != nil:
		return stored{}, fmt.Errorf("reading the secret %s: %w", name, err)
	}
	return stored{secret: secret}, nil
}

// quietly returns a context for a call to the spoke's API server. It has a timeout, and no logger,
// because at its highest verbosity client-go logs the content of requests and responses.
func quietly(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(log.IntoContext(ctx, logr.Discard()), callTimeout)
}

func (s stored) exists() bool { return s.secret.ResourceVersion != "" }

// empty reports whether the secret has neither certificate nor key.
func (s stored) empty() bool {
	return len(s.secret.Data[corev1.TLSCertKey]) == 0 && len(s.secret.Data[corev1.TLSPrivateKeyKey]) == 0
}

func (s stored) pem() certificates.PEM {
	data := s.secret.Data
	return certificates.PEM{
		Certificate: data[corev1.TLSCertKey], Key: data[corev1.TLSPrivateKeyKey], Authorities: data[authoritiesEntry],
	}
}

// renewAt returns when the present certificate should be renewed: at once if the secret has lost it
// or holds an unusable one.
func (s stored) renewAt(present *x509.Certificate) time.Time {
	if s.empty() || s.unusable != nil {
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339, s.secret.Annotations[RenewAtAnnotation])
	if err != nil || at.Before(present.NotBefore) || at.After(present.NotAfter) { // missing, or of another certificate
		return present.NotBefore.Add(present.NotAfter.Sub(present.NotBefore) / 2)
	}
	return at
}

// write creates or updates the identity secret. The API server refuses the write if another replica
// has written since it was read.
func (k *Keeper) write(ctx context.Context, secret *corev1.Secret) error {
	ctx, cancel := quietly(ctx)
	defer cancel()
	var err error
	exists := stored{secret: secret}.exists()
	if exists {
		err = k.Writer.Update(ctx, secret)
	} else {
		err = k.Writer.Create(ctx, secret)
	}
	switch {
	case err == nil:
		return nil
	case !exists && apierrors.IsForbidden(err):
		return fmt.Errorf("the secret %s does not exist, and Karpenter may not create it: `helm upgrade` makes it again, or, where Karpenter does not run "+
			"in this cluster, grant it the right to create secrets there: %w", k.Identity, err)
	}
	return fmt.Errorf("writing the secret %s: %w", k.Identity, err)
}

// change applies a change to the identity secret, writes it, and returns the result in s. use puts
// the resulting certificate into use: [Keeper.take], or hold for one that the agent has just
// issued.
func (k *Keeper) change(ctx context.Context, s *stored, use func(stored) error, change func(*corev1.Secret)) error {
	k.reading.Lock()
	defer k.reading.Unlock()
	next := s.secret.DeepCopy()
	if next.Data == nil {
		next.Data = map[string][]byte{}
	}
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	change(next)
	if err := k.write(ctx, next); err != nil {
		return err
	}
	*s = stored{secret: next}
	if s.empty() {
		return nil
	}
	s.unusable = use(*s)
	return nil
}

func (k *Keeper) hold(s stored) error { return k.Held.Hold(s.pem()) }
