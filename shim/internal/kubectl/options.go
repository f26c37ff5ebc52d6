// Package kubectl is the plugin kubectl-capi: it shows, from a terminal, what Karpenter and the
// agent are doing about pods and nodes. It only reads, except that `adopt` validates NodeClaims by
// dry runs.
package kubectl

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// environmentPrefix is the prefix of the environment variable of each flag.
const environmentPrefix = "KUBECTL_CAPI_"

// defaultTimeout bounds each call.
const defaultTimeout = 5 * time.Second

// Options are the flags that every command has.
type Options struct {
	Kubeconfig, Context, Namespace string
	HubKubeconfig, HubContext      string

	AgentAddress, ServerName, TLSDir string
	PlaintextLoopback                bool

	Cluster, Shim string
	Timeout       time.Duration
	Output        string
}

// The formats of --output.
const (
	formatText = ""
	formatWide = "wide"
	formatJSON = "json"
	formatYAML = "yaml"
)

func (o *Options) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.Kubeconfig, "kubeconfig", "", "Kubeconfig `file` of the spoke. Defaults to the one that kubectl uses.")
	flags.StringVar(&o.Context, "context", "", "Context of the spoke in its kubeconfig. Defaults to the current context.")
	flags.StringVarP(&o.Namespace, "namespace", "n", "", "Namespace of the pod. Defaults to that of the context.")
	flags.StringVar(&o.HubKubeconfig, "hub-kubeconfig", "",
		"Kubeconfig `file` of the hub, to read its own objects. Defaults to --kubeconfig, if --hub-context is set.")
	flags.StringVar(&o.HubContext, "hub-context", "",
		"Context of the hub in its kubeconfig. Defaults to the current context, if --hub-kubeconfig is set.")
	flags.StringVar(&o.AgentAddress, "agent-address", "",
		"Address of the agent: host:port, or unix:///path. Defaults to the address in Karpenter's Deployment.")
	flags.StringVar(&o.ServerName, "server-name", "", "Name expected in the agent's certificate. Defaults to the name that "+
		"Karpenter expects, or to the host of --agent-address if --tls-dir is set, too.")
	flags.StringVar(&o.TLSDir, "tls-dir", "",
		"Path of the `directory` with tls.crt, tls.key and ca.crt, with which the agent is called. Defaults to the secret that Karpenter uses.")
	flags.BoolVar(&o.PlaintextLoopback, "plaintext-loopback", false, "Connect to the agent without TLS. Only allowed with a loopback address.")
	flags.StringVar(&o.Cluster, "cluster", "",
		"The spoke's Cluster object in the hub, as `namespace/name`. Defaults to the Cluster of Karpenter's Deployment.")
	flags.StringVar(&o.Shim, "shim", "", "Karpenter's Deployment, as `namespace/name`. Defaults to the one that has the chart's labels.")
	flags.DurationVar(&o.Timeout, "timeout", defaultTimeout, "Deadline of each call.")
	flags.StringVarP(&o.Output, "output", "o", "", "Output `format`: wide, json or yaml. Defaults to human-readable text.")
}

// complete sets flags from the environment and checks them.
func (o *Options) complete(flags *pflag.FlagSet) error {
	var errs []error
	flags.VisitAll(func(flag *pflag.Flag) {
		variable := environmentPrefix + strings.ToUpper(strings.ReplaceAll(flag.Name, "-", "_"))
		value, present := os.LookupEnv(variable)
		if flag.Changed || !present || flag.Name == "help" {
			return
		}
		if err := flags.Set(flag.Name, value); err != nil {
			errs = append(errs, fmt.Errorf("%s=%q: %w", variable, value, err))
		}
	})
	switch o.Output {
	case formatText, formatWide, formatJSON, formatYAML:
	default:
		errs = append(errs, fmt.Errorf("--output must be wide, json or yaml, not %q", o.Output))
	}
	for name, value := range map[string]string{"cluster": o.Cluster, "shim": o.Shim} {
		if _, _, err := split(value); value != "" && err != nil {
			errs = append(errs, fmt.Errorf("--%s: %w", name, err))
		}
	}
	if o.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--timeout %s: must be more than 0", o.Timeout))
	}
	return errors.Join(errs...)
}

// split parses namespace/name.
func split(value string) (namespace, name string, err error) {
	namespace, name, found := strings.Cut(value, "/")
	if !found || namespace == "" || name == "" || strings.Contains(name, "/") {
		return "", "", fmt.Errorf("%q: write namespace/name", value)
	}
	return namespace, name, nil
}

// Command returns the plugin's root command.
func Command(version string) *cobra.Command {
	var options Options
	access := &Access{Options: &options}
	root := &cobra.Command{
		Use:   "kubectl capi",
		Short: "Explain the state of pods and nodes that Karpenter provisions from Cluster API",
		Long: "kubectl capi shows everything between a pod of a spoke (a workload cluster) and its machine: NodeClaim, claim, node group, " +
			"Machine, infrastructure and Node, in the spoke and in the hub (the management cluster). It asks the spoke's API server and the " +
			"agent, and changes nothing.",
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl capi"},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return options.complete(cmd.Flags())
		},
	}
	options.addFlags(root.PersistentFlags())
	root.PersistentFlags().SortFlags = false
	root.AddCommand(
		whyCommand(access), groupsCommand(access), claimsCommand(access), spokesCommand(access), adoptCommand(access), topCommand(access),
	)
	formats := cobra.FixedCompletions([]string{formatWide, formatJSON, formatYAML}, cobra.ShellCompDirectiveNoFileComp)
	_ = root.RegisterFlagCompletionFunc("output", formats) // fails only for a flag that is not there
	return root
}
