package identity

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// First path segments of a Cluster's identities. The namespace, the name, and the id of the
// onboarding follow.
const (
	clusterPath   = "cluster"
	bootstrapPath = "bootstrap"
)

// name is the content of a certificate's URI.
type name struct {
	kind, cluster, onboarding string
}

// nameIn returns the name in a certificate, or the zero name if it is not a Cluster's.
func nameIn(certificate *x509.Certificate) name {
	if len(certificate.URIs) != 1 {
		return name{}
	}
	parts := strings.Split(strings.TrimPrefix(certificate.URIs[0].Path, "/"), "/")
	switch {
	case parts[0] == clusterPath && len(parts) == 3: // not issued by the agent
		return name{kind: clusterPath, cluster: parts[1] + "/" + parts[2]}
	case (parts[0] == clusterPath || parts[0] == bootstrapPath) && len(parts) == 4:
		return name{kind: parts[0], cluster: parts[1] + "/" + parts[2], onboarding: parts[3]}
	}
	return name{}
}

func onboardingOf(certificate *x509.Certificate) string { return nameIn(certificate).onboarding }

// present returns the certificate in use, which may have expired, or nil.
func (k *Keeper) present() *x509.Certificate {
	certificate, err := k.Held.Certificate()
	if err != nil {
		return nil
	}
	return certificate.Leaf
}

// onboarding is the content of a bootstrap secret.
type onboarding struct {
	// onboarding is the id. Empty if not known.
	onboarding string
	// certificate is the bootstrap certificate. Nil if it cannot be parsed.
	certificate *x509.Certificate
	source      *certificates.Held
	// unusable is why the secret cannot be used, or nil.
	unusable error
}

// bootstrap reads the bootstrap secret. It returns nil if there is none.
func (k *Keeper) bootstrap(ctx context.Context) (*onboarding, error) {
	s, err := get(ctx, k.Reader, k.Bootstrap)
	if err != nil || !s.exists() {
		return nil, err
	}
	b := &onboarding{source: certificates.NewHeld(nil)}
	if err := b.source.Hold(s.pem()); err != nil {
		b.unusable = err
		return b, nil //nolint:nilerr // The caller reports it.
	}
	certificate, err := b.source.Certificate()
	if err != nil {
		return nil, err
	}
	b.certificate = certificate.Leaf
	b.onboarding, b.unusable = checkBootstrap(certificate.Leaf, k.Cluster, k.Clock.Now())
	return b, nil
}

func checkBootstrap(certificate *x509.Certificate, cluster *agentv1alpha1.ClusterRef, now time.Time) (string, error) {
	switch n := nameIn(certificate); {
	case n.kind != bootstrapPath:
		return "", errors.New("its certificate is not a bootstrap certificate, whose URI is spiffe://<trust domain>/bootstrap/<namespace>/<name>/<id>")
	case n.cluster != nameOf(cluster):
		return n.onboarding, fmt.Errorf("its certificate is for the Cluster %s, and --cluster-namespace and --cluster-name name %s", n.cluster,
			nameOf(cluster))
	case !now.Before(certificate.NotAfter):
		return n.onboarding, fmt.Errorf("its certificate expired at %s", certificate.NotAfter.UTC().Format(time.RFC3339))
	default:
		return n.onboarding, nil
	}
}
