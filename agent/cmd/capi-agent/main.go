// Command capi-agent runs in a Cluster API management cluster and serves its node groups, claims
// and Machines over gRPC.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/zap/zapcore"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/version"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing"
)

func main() {
	// A closed pipe is an error of a write. It must not end an onboarding in the middle without a
	// word.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newCommand().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "capi-agent:", err)
		os.Exit(1)
	}
}

// newCommand returns the command that serves, with the subcommands.
func newCommand() *cobra.Command {
	o := options.New()
	flags := newFlags()
	o.AddFlags(flags)
	command := &cobra.Command{
		Use:   "capi-agent",
		Short: "Serve the node groups, claims and Machines of Cluster API clusters over gRPC",
		Long: "Serve the node groups, claims and Machines of Cluster API clusters over gRPC. It runs in the hub, their management cluster. " +
			"Every flag can also be set by an environment variable, such as CAPI_AGENT_LISTEN_ADDRESS; the flag takes precedence.",
		Version: version.Version() + " " + version.Commit(),
		Args:    cobra.NoArgs,
		// main reports errors, and a usage of sixty flags would hide them.
		SilenceErrors: true, SilenceUsage: true,
		RunE: func(command *cobra.Command, _ []string) error {
			if err := options.FromEnvironment(flags); err != nil {
				return err
			}
			if err := o.Validate(); err != nil {
				return err
			}
			return serve(command.Context(), o)
		},
	}
	command.SetVersionTemplate("{{.Version}}\n")
	command.Flags().SortFlags = false
	command.Flags().AddFlagSet(flags)
	command.AddCommand(newUninstall(), newPolicy(), newPrices(), newOnboard(), newOffboard(), newMetricsDocs())
	return command
}

// newFlags returns a set of flags that are shown in the order of their definition.
func newFlags() *pflag.FlagSet {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.SortFlags = false
	return flags
}

// memoryLimitShare is the share of the container's memory that Go may use.
const memoryLimitShare = 0.9

func serve(ctx context.Context, o *options.Options) error {
	if o.MemoryLimit > 0 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(int64(float64(o.MemoryLimit) * memoryLimitShare))
	}
	logger := newLogger(o, os.Stderr)
	log.SetLogger(logger)
	klog.SetLogger(logger)
	if o.InstanceName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("reading the host name (or set --instance-name): %w", err)
		}
		o.InstanceName = name
	}
	hub, err := hubConfig(o)
	if err != nil {
		return err
	}
	traces, err := tracing.FromEnvironment(ctx, tracing.Config{
		Service: "capi-agent", Version: version.Version(), Instance: o.InstanceName, Log: logger.WithName("tracing"),
	})
	if err != nil {
		return err
	}
	defer traces.Shutdown()
	a, err := agent.New(ctx, agent.Config{
		Options: o, Hub: hub, Log: logger, Registerer: metrics.Registry, TracerProvider: traces.Provider(),
	})
	if err != nil {
		return err
	}
	listeners, release, err := listen(ctx, o)
	if err != nil {
		return err
	}
	defer release()
	logger.Info("starting", "version", version.Version(), "commit", version.Commit(), "hub", hub.Host)
	return a.Run(ctx, listeners...)
}

func listen(ctx context.Context, o *options.Options) (listeners []server.Listener, release func(), err error) {
	release = func() {}
	switch {
	case o.ListenAddress == "":
	case o.PlaintextLoopback:
		listener, err := server.ListenLoopback(ctx, o.ListenAddress)
		if err != nil {
			return nil, nil, fmt.Errorf("--listen-address: %w", err)
		}
		listeners = append(listeners, listener)
	default:
		listener, stop, err := server.ListenTLS(ctx, o.ListenAddress, server.TLSFiles{
			CertFile: o.TLSCertFile, KeyFile: o.TLSKeyFile, ClientCAFile: o.ClientCAFile,
			Log: log.Log.WithName("tls"), Registerer: metrics.Registry,
		})
		if err != nil {
			return nil, nil, err
		}
		listeners, release = append(listeners, listener), stop
	}
	if o.ListenUnixSocket != "" {
		listener, err := server.ListenUnix(ctx, o.ListenUnixSocket, o.UnixSocketGrant())
		if err != nil {
			release()
			return nil, nil, fmt.Errorf("--listen-unix-socket: %w", err)
		}
		listeners = append(listeners, listener)
	}
	return listeners, release, nil
}

// hubConfig returns the client configuration for the hub. See [loadConfig].
func hubConfig(o *options.Options) (*rest.Config, error) {
	config, err := loadConfig(o.Kubeconfig, "")
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig: %w", err)
	}
	config.UserAgent = "capi-agent/" + version.Version()
	return config, nil
}

// loadConfig loads a context of a kubeconfig. An empty file name means the KUBECONFIG variable,
// ~/.kube/config or the pod's service account. An empty context means the current one.
func loadConfig(kubeconfig, kubeContext string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: kubeContext}).ClientConfig()
}

var levels = map[string]zapcore.Level{
	options.LogError: zapcore.ErrorLevel,
	options.LogInfo:  zapcore.InfoLevel,
	options.LogDebug: zapcore.DebugLevel,
	options.LogTrace: zapcore.Level(-4),
}

// newLogger returns a logger that writes to to, which must be safe for concurrent use.
func newLogger(o *options.Options, to io.Writer) logr.Logger {
	times := func(c *zapcore.EncoderConfig) { c.EncodeTime = zapcore.RFC3339NanoTimeEncoder }
	encoder := zap.JSONEncoder(times)
	if o.LogFormat == options.LogConsole {
		encoder = zap.ConsoleEncoder(times)
	}
	// A stack only shows where the error was logged, and is many times as long as the line. Panics
	// log their own.
	return zap.New(zap.Level(levels[o.LogLevel]), encoder, zap.WriteTo(to), zap.StacktraceLevel(zapcore.PanicLevel))
}
