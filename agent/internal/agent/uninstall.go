package agent

import (
	"context"
	"fmt"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Uninstall removes everything that agents wrote from the part of the hub that the options name. See [claims.Engine.Uninstall].
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
	engine := claims.New(claims.Config{Client: direct, Reader: direct, Live: hub.LiveClaims(), Failure: protocol.Failure{}})
	scope := hub.NewScope(o.Namespaces, o.ClusterNames())
	return engine.Uninstall(ctx, claims.UninstallOptions{Serves: scope.Contains, Force: force, Report: report})
}
