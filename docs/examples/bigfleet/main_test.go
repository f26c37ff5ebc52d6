package main

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	identity = "spiffe://" + fakeagent.TrustDomain + "/bigfleet"
	within   = 20 * time.Second
)

// The agent and BigFleet's shards are both reached with certificates, here of one authority.
func TestTheCommandServesBigFleet(t *testing.T) {
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	folder := func(certificate, key []byte, err error) (string, tls.Certificate) {
		require.NoError(t, err)
		dir := t.TempDir()
		for name, content := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": authority.PEM()} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), content, 0o600))
		}
		pair, err := tls.X509KeyPair(certificate, key)
		require.NoError(t, err)
		return dir, pair
	}
	client, pair := folder(authority.IssueClient(identity))
	server, serverPair := folder(authority.IssueServer("127.0.0.1"))

	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers", Holder: "cluster-autoscaler-bigfleet"})
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	agent.ServeTLS(listener, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{serverPair}, ClientCAs: authority.Pool()},
		func(string) []fakeagent.Grant {
			return []fakeagent.Grant{{Role: fakeagent.RoleAutoscaler, Clusters: []string{"default/workload"}}}
		})

	addresses, ended := make(chan string, 1), make(chan error, 1)
	logger := funcr.New(func(_, line string) {
		if found := regexp.MustCompile(`"serving" "address"="([^"]+)"`).FindStringSubmatch(line); found != nil {
			addresses <- found[1]
		}
	}, funcr.Options{})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		ended <- start(ctx, []string{
			"-address=" + listener.Addr().String(), "-certificates=" + client, "-serving-certificates=" + server, "-listen=127.0.0.1:0",
			"-cluster=default/workload", "-cluster-id=production", "-slots=4", "-state=" + filepath.Join(t.TempDir(), "state.db"),
		}, logger)
	}()
	address := receive(t, addresses)

	list := func(config *tls.Config) func() (int, error) {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return func() (int, error) {
			listed, err := protocol.NewClient(conn).List(t.Context(), &protocol.ListRequest{})
			return len(listed.GetMachines()), err
		}
	}
	shard := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: authority.Pool(), Certificates: []tls.Certificate{pair}}
	listed := list(shard)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		machines, err := listed()
		require.NoError(c, err)
		require.Equal(c, 4, machines)
	}, within, 10*time.Millisecond)
	_, err = list(&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: authority.Pool()})()
	require.Error(t, err, "without a certificate")
	stop()
	require.NoError(t, receive(t, ended))
}

func receive[T any](t *testing.T, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(within):
		require.Fail(t, "nothing was sent")
	}
	return value
}

func TestTheCommandRefusesToServeEveryone(t *testing.T) {
	cluster := []string{"-cluster=default/workload", "-cluster-id=*", "-state=" + filepath.Join(t.TempDir(), "state.db")}
	require.ErrorContains(t, start(t.Context(), append(cluster, "-listen=0.0.0.0:0"), logr.Discard()), "-serving-certificates")
	require.ErrorContains(t, start(t.Context(), nil, logr.Discard()), "-cluster")
	listener, server, err := serve(t.Context(), "127.0.0.1:0", "", logr.Discard())
	require.NoError(t, err)
	defer server.Stop()
	require.NoError(t, listener.Close())
}
