package agent

import (
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/issuer"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
)

// openIssuer loads the authority that signs certificates, if one is configured.
func (a *Agent) openIssuer(o *options.Options, registerer prometheus.Registerer) error {
	if o.IssuerCertFile == "" {
		return nil
	}
	files := issuer.Files{
		CertFile: o.IssuerCertFile, KeyFile: o.IssuerKeyFile, ClientCAFile: o.ClientCAFile, ServerCAFile: o.ServerCAFile, ServerCertFile: o.TLSCertFile,
		Log: a.log.WithName("issuer"),
	}
	if files.ServerCAFile == "" {
		files.ServerCAFile = o.ClientCAFile
	}
	var err error
	if a.issuer, err = issuer.Open(files, clock.RealClock{}); err != nil {
		return fmt.Errorf("--issuer-cert-file: %w", err)
	}
	if registerer == nil {
		return nil
	}
	for _, collector := range server.CertificateMetrics("issuer", a.issuer.Stats) {
		if err := registerer.Register(collector); err != nil {
			return fmt.Errorf("registering the issuer's metrics: %w", err)
		}
	}
	return nil
}

// issuing returns the configuration for issuing certificates, or nil without an issuer.
func (a *Agent) issuing(o *options.Options, keeper *spokes.Spokes) *server.Issuing {
	if a.issuer == nil {
		return nil
	}
	return &server.Issuing{
		Issue: a.issuer.Issue, TrustDomain: o.TrustDomain, Lifetime: o.CertificateLifetime, Issued: keeper.NoteIssued,
		Enroll: func(ctx context.Context, of authz.Onboarding, publicKey string) error {
			return keeper.Enroll(ctx, of.Cluster, of.ID, publicKey)
		},
	}
}

// noteOn returns a function that records in a Cluster's Spoke that its shim has synchronized.
func (a *Agent) noteOn(keeper *spokes.Spokes) func(ctx context.Context, name types.NamespacedName, contact spokes.Contact) {
	return func(ctx context.Context, name types.NamespacedName, contact spokes.Contact) {
		var cluster clusterv1.Cluster
		if err := a.manager.GetClient().Get(ctx, name, &cluster); err != nil {
			log.FromContext(ctx).V(1).Info("a shim's synchronization is not recorded", "cluster", name.String(), "cause", err.Error())
			return
		}
		keeper.Note(ctx, &cluster, contact)
	}
}

// onboardingIn returns a function that reads a Cluster's onboarding with the given reader.
func onboardingIn(reader client.Reader) server.OnboardingOf {
	return func(ctx context.Context, name types.NamespacedName) (id string, exists bool, err error) {
		var cluster clusterv1.Cluster
		err = reader.Get(ctx, name, &cluster)
		if apierrors.IsNotFound(err) {
			return "", false, nil
		}
		if err != nil {
			return "", false, fmt.Errorf("reading the Cluster: %w", err)
		}
		return cluster.Labels[v1alpha1.OnboardingLabel], true, nil
	}
}
