package kubectl

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/planning"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
)

func adoptCommand(access *Access) *cobra.Command {
	return &cobra.Command{
		Use:   "adopt",
		Short: "Show which existing machines Karpenter would adopt, and the obstacles; adopts nothing",
		Long: "Show what `karpenter plan-adoption` shows: which machines Karpenter would adopt with the current NodePools and NodeClasses, and " +
			"what prevents it from adopting the others. It changes nothing: NodeClaims are created as dry runs, to validate them.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), planning.Within)
			defer cancel()
			access.setUpCore(ctx)
			config, err := access.SpokeConfig()
			if err != nil {
				return err
			}
			kube, err := client.New(config, client.Options{Scheme: scheme.Scheme})
			if err != nil {
				return spokeProblem(err, "reaching the spoke")
			}
			agent, err := access.Agent(ctx)
			if err != nil {
				return err
			}
			defer func() { _ = agent.Close() }()
			plan, err := planning.Make(ctx, planning.Config{
				Kube: kube, Agent: agent.Client, Cluster: agent.Cluster, Timeout: access.Timeout, UnavailableOfferingTTL: planning.Within,
			})
			if err != nil {
				return fmt.Errorf("planning: %w", err)
			}
			if structured(access.Output) {
				return writeValue(cmd.OutOrStdout(), access.Output, plan)
			}
			return plan.Write(cmd.OutOrStdout())
		},
	}
}

// setUpCore sets the globals of Karpenter core as the shim does.
func (a *Access) setUpCore(ctx context.Context) {
	instancetype.Reservations()
	registration.ExpectTaints()
	if !a.needsShim() {
		return
	}
	if s, err := a.deployment(ctx); err == nil {
		for key := range strings.SplitSeq(s.labelKeys, ",") {
			if key = strings.TrimSpace(key); key != "" {
				karpv1.WellKnownLabels.Insert(key)
			}
		}
	}
}
