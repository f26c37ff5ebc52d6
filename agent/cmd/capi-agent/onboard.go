package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/onboarding"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
)

// onboardFlags are the flags of onboard whose values must be parsed or read.
type onboardFlags struct {
	onboarding.Options

	kubeconfig, issuer, serverCA, secret string
	spokeKubeconfig, spokeContext        string
	resourceSet, dryRun                  bool
}

func newOnboard() *cobra.Command {
	var f onboardFlags
	command := &cobra.Command{
		Use:   "onboard [flags] NAMESPACE/CLUSTER",
		Short: "Onboard a Cluster, so that its shim gets its certificates from the agent",
		Long: `Onboard a Cluster: label it with a new onboarding id (agent.karpenter.cluster.x-k8s.io/onboarding), and create the secret with
which its shim obtains its first certificate. The shim generates its own key in the spoke, and renews its certificate from then on.
Without --spoke-kubeconfig and --cluster-resource-set the secret is printed, to be applied to the spoke:

  capi-agent onboard team-a/production | kubectl --context spoke apply -f -

If the Cluster's shim uses a certificate that was issued by other means, that certificate is revoked at once; --dry-run says so.

The secret serves one key, and no longer than --valid-for. The caller needs to read the issuer's secret, to get and patch Clusters, and
to get, create and update Spokes.`,
		Args: exactly(1, "onboard NAMESPACE/CLUSTER"),
		RunE: func(command *cobra.Command, args []string) error {
			return onboard(command.Context(), args[0], f, command.OutOrStdout(), command.ErrOrStderr())
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	addHubFlag(flags, &f.kubeconfig)
	flags.StringVar(&f.issuer, "issuer-secret", "capi-agent-system/capi-agent-ca",
		"Secret in the hub, as `namespace/name`, with the certificate and key that the agent has as --issuer-cert-file and --issuer-key-file.")
	flags.StringVar(&f.serverCA, "server-ca-file", "",
		"PEM `file` with the authorities of the agent's own certificate. Defaults to ca.crt of the issuer's secret, else to the issuer itself.")
	flags.StringVar(&f.secret, "secret", "karpenter/karpenter-agent-bootstrap", "Secret to create in the spoke, as `namespace/name`.")
	flags.StringVar(&f.TrustDomain, "trust-domain", options.New().TrustDomain, "Trust domain of the agent: its own --trust-domain.")
	flags.DurationVar(&f.ValidFor, "valid-for", time.Hour, "How long the shim has to get its first certificate.")
	flags.BoolVar(&f.Again, "again", false, "Onboard a Cluster that is already onboarded. The current certificate of its shim is revoked at once.")
	flags.StringVar(&f.spokeKubeconfig, "spoke-kubeconfig", "", "Write the secret into the spoke, with this kubeconfig `file`, instead of printing it.")
	flags.StringVar(&f.spokeContext, "spoke-context", "", "Context of --spoke-kubeconfig. Defaults to its current context.")
	flags.BoolVar(&f.resourceSet, "cluster-resource-set", false,
		"Have Cluster API deliver the secret to the spoke, with a ClusterResourceSet for this onboarding, instead of printing it.")
	addDryRunFlag(flags, &f.dryRun)
	return command
}

// onboard assigns an onboarding to a Cluster, and reports on out. The secret for the spoke is
// written to manifest, unless it is delivered directly.
func onboard(ctx context.Context, cluster string, f onboardFlags, manifest, out io.Writer) error {
	o := f.Options
	var err error
	if o.Cluster, err = parseCluster(cluster); err != nil {
		return err
	}
	if o.Issuer, err = namedSecret(f.issuer); err != nil {
		return fmt.Errorf("--issuer-secret: %w", err)
	}
	if o.Secret, err = namedSecret(f.secret); err != nil {
		return fmt.Errorf("--secret: %w", err)
	}
	switch {
	case f.resourceSet && f.spokeKubeconfig != "":
		return errors.New("--cluster-resource-set: excludes --spoke-kubeconfig; leave one of them out")
	case f.spokeContext != "" && f.spokeKubeconfig == "":
		return errors.New("--spoke-context: has no effect without --spoke-kubeconfig")
	case o.ValidFor < time.Minute:
		return fmt.Errorf("--valid-for: %s is below 1m", o.ValidFor)
	}
	if f.serverCA != "" {
		if o.ServerCA, err = os.ReadFile(f.serverCA); err != nil {
			return fmt.Errorf("--server-ca-file: %w", err)
		}
	}
	hub, err := reach(f.kubeconfig, "")
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	prepared, err := onboarding.Prepare(ctx, hub, o, clock.RealClock{})
	if err != nil {
		return fmt.Errorf("onboard: %w", err)
	}
	var spoke client.Client
	if f.spokeKubeconfig != "" {
		if spoke, err = reach(f.spokeKubeconfig, f.spokeContext); err != nil {
			return fmt.Errorf("--spoke-kubeconfig: %w", err)
		}
	}
	return carryOut(ctx, hub, spoke, o, prepared, delivery{resourceSet: f.resourceSet, dryRun: f.dryRun}, manifest, out)
}

// delivery is how the secret is delivered to the spoke.
type delivery struct{ resourceSet, dryRun bool }

// carryOut performs the prepared onboarding. It first tries whether the spoke can be written to,
// because Begin ends the current certificate.
func carryOut(
	ctx context.Context, hub, spoke client.Client, o onboarding.Options, prepared *onboarding.Onboarding, by delivery, manifest, out io.Writer,
) error {
	wrap := func(err error) error { return fmt.Errorf("onboard: %w", err) }
	if spoke != nil {
		if err := prepared.Deliver(ctx, spoke, true); err != nil {
			return wrap(err)
		}
	}
	if by.resourceSet {
		if err := prepared.Dispatch(ctx, hub, true); err != nil {
			return wrap(err)
		}
	}
	way := "printed, to be applied to the spoke"
	switch {
	case spoke != nil:
		way = "written into the spoke"
	case by.resourceSet:
		way = "delivered to the spoke by a ClusterResourceSet"
	}
	if by.dryRun {
		fmt.Fprintf(out, "would onboard %s\n", o.Cluster)
		if prepared.Before != "" {
			fmt.Fprintf(out, "would end its current onboarding and revoke the certificate of its shim\n")
		} else if prepared.Connected {
			fmt.Fprintf(out, "would revoke the certificate that its shim uses now, which was issued by other means\n")
		}
		fmt.Fprintf(out, "the secret %s, valid for %s, would be %s\n", o.Secret, o.ValidFor, way)
		return nil
	}
	// The ClusterResourceSet waits for the label.
	if by.resourceSet {
		if err := prepared.Dispatch(ctx, hub, false); err != nil {
			return wrap(err)
		}
	}
	if err := prepared.Begin(ctx, hub); err != nil {
		return wrap(err)
	}
	if err := deliver(ctx, hub, spoke, prepared, by, manifest); err != nil {
		return wrap(fmt.Errorf("%w. The onboarding has begun: repeat the command with --again", err))
	}
	fmt.Fprintf(out, "%s is onboarded; the secret %s is %s. Its shim has until %s to get its first certificate\n",
		o.Cluster, o.Secret, way, prepared.NotAfter.Format(time.RFC3339))
	return nil
}

// deliver delivers the secret of an onboarding that has begun.
func deliver(ctx context.Context, hub, spoke client.Client, prepared *onboarding.Onboarding, by delivery, manifest io.Writer) error {
	switch {
	case spoke != nil:
		return prepared.Deliver(ctx, spoke, false)
	case by.resourceSet:
		return prepared.Recall(ctx, hub)
	}
	text, err := prepared.Manifest()
	if err != nil {
		return err
	}
	if _, err := manifest.Write(text); err != nil {
		return fmt.Errorf("printing the secret: %w", err)
	}
	return nil
}

func newOffboard() *cobra.Command {
	var (
		kubeconfig string
		dryRun     bool
	)
	command := &cobra.Command{
		Use:   "offboard [flags] NAMESPACE/CLUSTER",
		Short: "End the onboarding of a Cluster",
		Long: `End the onboarding of a Cluster. The agent then refuses every certificate of the Cluster's identity, including those that were
issued elsewhere. Its claims and Machines are not changed. To onboard it again, use capi-agent onboard.`,
		Args: exactly(1, "offboard NAMESPACE/CLUSTER"),
		RunE: func(command *cobra.Command, args []string) error {
			return offboard(command.Context(), args[0], kubeconfig, dryRun, command.OutOrStdout())
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	addHubFlag(flags, &kubeconfig)
	addDryRunFlag(flags, &dryRun)
	return command
}

// offboard ends the onboarding of a Cluster, and reports on out.
func offboard(ctx context.Context, name, kubeconfig string, dryRun bool, out io.Writer) error {
	cluster, err := parseCluster(name)
	if err != nil {
		return err
	}
	hub, err := reach(kubeconfig, "")
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	was, err := onboarding.Offboard(ctx, hub, cluster, dryRun)
	switch {
	case err != nil:
		return fmt.Errorf("offboard: %w", err)
	case !was:
		fmt.Fprintf(out, "%s is already offboarded\n", cluster)
	case dryRun:
		fmt.Fprintf(out, "would offboard %s: its certificates would be refused within seconds\n", cluster)
	default:
		fmt.Fprintf(out, "%s is offboarded: its certificates are refused within seconds. Its claims and Machines stay\n", cluster)
	}
	return nil
}

func addHubFlag(flags *pflag.FlagSet, kubeconfig *string) {
	flags.StringVar(kubeconfig, "kubeconfig", "", "Kubeconfig `file` of the hub. Defaults to the KUBECONFIG variable, else ~/.kube/config.")
}

func addDryRunFlag(flags *pflag.FlagSet, dryRun *bool) {
	flags.BoolVar(dryRun, "dry-run", false, "Print what would be done, and change nothing.")
}

func parseCluster(text string) (types.NamespacedName, error) {
	cluster, err := options.ParseName(text)
	if err != nil {
		return types.NamespacedName{}, fmt.Errorf("%w of a Cluster", err)
	}
	return cluster, nil
}

func namedSecret(text string) (types.NamespacedName, error) {
	name, err := options.ParseName(text)
	if err != nil {
		return types.NamespacedName{}, fmt.Errorf("%w of a secret", err)
	}
	return name, nil
}

// reach returns a client for the cluster of a kubeconfig.
func reach(kubeconfig, kubeContext string) (client.Client, error) {
	log.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
	config, err := loadConfig(kubeconfig, kubeContext)
	if err != nil {
		return nil, err
	}
	scheme, err := onboarding.Scheme()
	if err != nil {
		return nil, err
	}
	return client.New(config, client.Options{Scheme: scheme})
}
