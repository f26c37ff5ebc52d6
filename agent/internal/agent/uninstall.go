package agent

import (
	"context"
	"fmt"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/onboarding"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/spokes"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Uninstall removes everything that agents have written from the part of the hub that the options
// select. See [claims.Engine.Uninstall].
func Uninstall(ctx context.Context, config *rest.Config, o *options.Options, force bool, report func(format string, arguments ...any)) error {
	scheme, err := hub.Scheme()
	if err != nil {
		return err
	}
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = o.KubeAPIQPS, o.KubeAPIBurst
	direct, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("connecting to the hub: %w", err)
	}
	engine := claims.New(claims.Config{Client: direct, Reader: direct, NotEnded: hub.NotEndedClaims(), Failure: protocol.FailurePolicy{}})
	scope := hub.NewScope(o.Namespaces, o.ClusterNames())
	if err := engine.Uninstall(ctx, claims.UninstallOptions{Serves: scope.Contains, Force: force, Report: report}); err != nil {
		return err
	}
	removed, err := spokes.Remove(ctx, direct, scope.Namespaces(), scope.Contains)
	if err != nil {
		return err
	}
	if removed > 0 {
		report("%d Spokes removed", removed)
	}
	if scheme, err = onboarding.Scheme(); err != nil {
		return err
	}
	if direct, err = client.New(config, client.Options{Scheme: scheme}); err != nil {
		return fmt.Errorf("connecting to the hub: %w", err)
	}
	if removed, err = onboarding.Remove(ctx, direct, scope.Namespaces(), scope.Contains); removed > 0 {
		report("%d Clusters are no longer onboarded", removed)
	}
	return err
}
