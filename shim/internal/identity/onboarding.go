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

// First segments of the paths of a Cluster's identities, which are followed by its namespace, its name, and the id of its onboarding.
const (
	clusterPath   = "cluster"
	bootstrapPath = "bootstrap"
)

// name is what a certificate's URI says.
type name struct {
	kind, cluster, onboarding string
}

// nameIn returns the zero name if the certificate is not one of a Cluster.
func nameIn(certificate *x509.Certificate) name {
	if len(certificate.URIs) != 1 {
		return name{}
	}
	parts := strings.Split(strings.TrimPrefix(certificate.URIs[0].Path, "/"), "/")
	switch {
	case parts[0] == clusterPath && len(parts) == 3: // issued elsewhere
		return name{kind: clusterPath, cluster: parts[1] + "/" + parts[2]}
	case (parts[0] == clusterPath || parts[0] == bootstrapPath) && len(parts) == 4:
		return name{kind: parts[0], cluster: parts[1] + "/" + parts[2], onboarding: parts[3]}
	}
	return name{}
}

func onboardingOf(certificate *x509.Certificate) string { return nameIn(certificate).onboarding }

// present returns the certificate that is in force, which may have ended. Nil if there is none.
func (k *Keeper) present() *x509.Certificate {
	certificate, err := k.Held.Certificate()
	if err != nil {
		return nil
	}
	return certificate.Leaf
}

// onboarding is what a bootstrap secret holds.
type onboarding struct {
	// onboarding is its id, empty if it is not known.
	onboarding string
	// certificate identifies it. Nil if unusable.
	certificate *x509.Certificate
	source      *certificates.Held
	// unusable is why it cannot be used.
	unusable error
}

// bootstrap reads the bootstrap secret. It is nil if there is none.
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
		return "", errors.New("its certificate is not one of an onboarding, whose URI is spiffe://<trust domain>/bootstrap/<namespace>/<name>/<id>")
	case n.cluster != nameOf(cluster):
		return n.onboarding, fmt.Errorf("its certificate is for the Cluster %s, and --cluster-namespace and --cluster-name name %s", n.cluster,
			nameOf(cluster))
	case !now.Before(certificate.NotAfter):
		return n.onboarding, fmt.Errorf("its certificate has ended at %s", certificate.NotAfter.UTC().Format(time.RFC3339))
	default:
		return n.onboarding, nil
	}
}
