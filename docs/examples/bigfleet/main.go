// Command bigfleet-bridge presents an agent to BigFleet, as a capacity provider. It is an example of a bridge to another autoscaler;
// docs/bigfleet.md explains it.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/bridge"
	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := start(ctx, os.Args[1:], logr.FromSlogHandler(slog.NewTextHandler(os.Stderr, nil)))
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bigfleet-bridge:", err)
		os.Exit(1)
	}
}

func start(ctx context.Context, args []string, logger logr.Logger) error {
	flags := flag.NewFlagSet("bigfleet-bridge", flag.ContinueOnError)
	address := flags.String("address", "127.0.0.1:8443", "the agent's `host:port`")
	files := flags.String("certificates", "", "the `folder` with tls.crt, tls.key and ca.crt for the agent; empty for an agent on loopback without TLS")
	listen := flags.String("listen", "127.0.0.1:9000", "the `host:port` that BigFleet's shards call")
	serving := flags.String("serving-certificates", "", "the `folder` with tls.crt, tls.key and ca.crt for the shards; empty only on loopback")
	cluster := flags.String("cluster", "", "the `namespace/name` of the Cluster")
	clusterID := flags.String("cluster-id", "", "what BigFleet calls the Cluster; * accepts any name, which is safe only if the shards serve no other")
	holder := flags.String("holder", "cluster-autoscaler-bigfleet", "the `name` that the claims are kept under, which no other tool may use")
	state := flags.String("state", "bigfleet-bridge.db", "the `file` with what must survive a restart")
	slots := flags.Int("slots", 10, "how many machines of each node group BigFleet may have")
	interruption := flags.Float64("spot-interruption", 0.05, "the `probability` that a spot machine is interrupted within an hour")
	if err := flags.Parse(args); err != nil {
		return err
	}
	namespace, name, found := strings.Cut(*cluster, "/")
	if !found || *clusterID == "" {
		return errors.New("-cluster and -cluster-id are required")
	}

	agent, err := connect(*address, *files)
	if err != nil {
		return err
	}
	defer agent.Close() //nolint:errcheck // Nothing is left to lose.
	listener, server, err := serve(ctx, *listen, *serving, logger)
	if err != nil {
		return err
	}
	b, err := bridge.New(bridge.Options{
		Agent: agent, Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name}, Holder: *holder, StateFile: *state,
		ClusterID: strings.TrimPrefix(*clusterID, "*"), Slots: *slots, SpotInterruption: *interruption, Logger: logger,
	})
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	protocol.Register(server, b)
	ctx, stop := context.WithCancelCause(ctx)
	go func() { stop(server.Serve(listener)) }()
	logger.Info("serving", "address", listener.Addr().String())
	err = b.Run(ctx)
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		err = errors.Join(err, cause)
	}
	server.GracefulStop()
	return errors.Join(err, b.Close())
}

func connect(address, folder string) (*client.Client, error) {
	options := client.Options{Address: address, UserAgent: "bigfleet-bridge/v1", PlaintextLoopback: folder == ""}
	if folder != "" {
		options.TLS = &client.TLS{CertFile: folder + "/tls.crt", KeyFile: folder + "/tls.key", CAFile: folder + "/ca.crt"}
	}
	return client.New(options)
}

// serve listens. With a folder, callers need a certificate of its authority; the files may be replaced at any time.
func serve(ctx context.Context, address, folder string, logger logr.Logger) (net.Listener, *grpc.Server, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, nil, err
	}
	if folder == "" {
		if at, ok := listener.Addr().(*net.TCPAddr); !ok || !at.IP.IsLoopback() {
			return nil, nil, errors.Join(errors.New("-serving-certificates is required, except on loopback"), listener.Close())
		}
		return listener, grpc.NewServer(grpc.Creds(insecure.NewCredentials())), nil
	}
	source := certificates.Follow(certificates.Files{
		CertFile: folder + "/tls.crt", KeyFile: folder + "/tls.key", CAFile: folder + "/ca.crt", Refresh: 10 * time.Second, Logger: logger,
	})
	credential := &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		certificate, err := source.Certificate()
		if err != nil {
			return nil, err
		}
		authorities, err := source.Authorities()
		if err != nil {
			return nil, err
		}
		return &tls.Config{
			MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{*certificate},
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: authorities,
		}, nil
	}}
	return listener, grpc.NewServer(grpc.Creds(credentials.NewTLS(credential))), nil
}
