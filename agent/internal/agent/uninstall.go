package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/onboarding"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Uninstall removes everything that agents have written from the part of the hub that the options
// select, which replaces how.Serves. See [claims.Engine.Uninstall].
func Uninstall(ctx context.Context, config *rest.Config, o *options.Options, how claims.UninstallOptions) error {
	connect := func(scheme *runtime.Scheme, err error) (client.Client, error) {
		if err != nil {
			return nil, err
		}
		config := rest.CopyConfig(config)
		config.QPS, config.Burst = o.KubeAPIQPS, o.KubeAPIBurst
		c, err := client.New(config, client.Options{Scheme: scheme})
		if err != nil {
			return nil, fmt.Errorf("connecting to the hub: %w", err)
		}
		if how.DryRun {
			c = client.NewDryRunClient(c)
		}
		return c, nil
	}
	direct, err := connect(hub.Scheme())
	if err != nil {
		return err
	}
	if err := selected(ctx, direct, o); err != nil {
		return err
	}
	engine := claims.New(claims.Config{Client: direct, Reader: direct, NotEnded: hub.NotEndedClaims(), Failure: protocol.FailurePolicy{}})
	scope := hub.NewScope(o.Namespaces, o.ClusterNames())
	how.Serves = scope.Contains
	if err := engine.Uninstall(ctx, how); err != nil {
		return err
	}
	report := func(removed int, did, would string) {
		if removed > 0 && how.Report != nil {
			how.Report("%d "+lo.Ternary(how.DryRun, would, did), removed)
		}
	}
	removed, err := spokes.Remove(ctx, direct, scope.Namespaces(), scope.Contains)
	if err != nil {
		return err
	}
	report(removed, "Spokes removed", "Spokes would be removed")
	if direct, err = connect(onboarding.Scheme()); err != nil {
		return err
	}
	removed, err = onboarding.Remove(ctx, direct, scope.Namespaces(), scope.Contains)
	report(removed, "Clusters are no longer onboarded", "Clusters would no longer be onboarded")
	return err
}

// selected reports what the options select by name and the hub does not have: that is a mistake,
// and would look like success.
func selected(ctx context.Context, hub client.Client, o *options.Options) error {
	var errs []error
	for _, name := range o.Namespaces {
		err := hub.Get(ctx, client.ObjectKey{Name: name}, &corev1.Namespace{})
		if apierrors.IsNotFound(err) {
			err = fmt.Errorf("the hub has no namespace %s", name)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("--namespaces: %w", err))
		}
	}
	for _, name := range o.ClusterNames() {
		if err := anythingOf(ctx, hub, name); err != nil {
			errs = append(errs, fmt.Errorf("--clusters: %w", err))
		}
	}
	return errors.Join(errs...)
}

// anythingOf reports that the hub has no such Cluster, and nothing of a Cluster that was deleted.
func anythingOf(ctx context.Context, hub client.Client, name types.NamespacedName) error {
	err := hub.Get(ctx, name, &clusterv1.Cluster{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	for label, list := range map[string]client.ObjectList{
		v1alpha1.ClusterLabel: &v1alpha1.MachineClaimList{}, clusterv1.ClusterNameLabel: &clusterv1.MachineList{},
	} {
		err := hub.List(ctx, list, client.InNamespace(name.Namespace), client.MatchingLabels{label: name.Name}, client.Limit(1))
		if err != nil {
			return err
		}
		if meta.LenList(list) > 0 {
			return nil
		}
	}
	return fmt.Errorf("the hub has no Cluster %s, and no MachineClaim or Machine of one", name)
}
