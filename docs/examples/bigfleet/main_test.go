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
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/karpenter-capi/karpenter-capi/docs/examples/bigfleet/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const identity = "spiffe://" + fakeagent.TrustDomain + "/bigfleet"

// The agent and BigFleet's shards are both reached with certificates, here of one authority.
func TestTheCommandServesBigFleet(t *testing.T) {
	g := NewWithT(t)
	g.SetDefaultEventuallyTimeout(20 * time.Second)
	authority, err := fakeagent.NewAuthority(time.Now())
	g.Expect(err).NotTo(HaveOccurred())
	folder := func(certificate, key []byte, err error) (string, tls.Certificate) {
		g.Expect(err).NotTo(HaveOccurred())
		dir := t.TempDir()
		for name, content := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": authority.PEM()} {
			g.Expect(os.WriteFile(filepath.Join(dir, name), content, 0o600)).To(Succeed())
		}
		pair, err := tls.X509KeyPair(certificate, key)
		g.Expect(err).NotTo(HaveOccurred())
		return dir, pair
	}
	client, pair := folder(authority.IssueClient(identity))
	server, serverPair := folder(authority.IssueServer("127.0.0.1"))

	agent := fakeagent.New()
	t.Cleanup(agent.Close)
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "workers", Holder: "cluster-autoscaler-bigfleet"})
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	g.Expect(err).NotTo(HaveOccurred())
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
	var address string
	g.Eventually(addresses).Should(Receive(&address))

	list := func(config *tls.Config) func() (int, error) {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
		g.Expect(err).NotTo(HaveOccurred())
		t.Cleanup(func() { _ = conn.Close() })
		return func() (int, error) {
			listed, err := protocol.NewClient(conn).List(t.Context(), &protocol.ListRequest{})
			return len(listed.GetMachines()), err
		}
	}
	shard := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: authority.Pool(), Certificates: []tls.Certificate{pair}}
	g.Eventually(list(shard)).Should(Equal(4))
	_, err = list(&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: authority.Pool()})()
	g.Expect(err).To(HaveOccurred(), "without a certificate")
	stop()
	g.Eventually(ended).Should(Receive(BeNil()))
}

func TestTheCommandRefusesToServeEveryone(t *testing.T) {
	g := NewWithT(t)
	cluster := []string{"-cluster=default/workload", "-cluster-id=*", "-state=" + filepath.Join(t.TempDir(), "state.db")}
	g.Expect(start(t.Context(), append(cluster, "-listen=0.0.0.0:0"), logr.Discard())).To(MatchError(ContainSubstring("-serving-certificates")))
	g.Expect(start(t.Context(), nil, logr.Discard())).To(MatchError(ContainSubstring("-cluster")))
	listener, server, err := serve(t.Context(), "127.0.0.1:0", "", logr.Discard())
	g.Expect(err).NotTo(HaveOccurred())
	defer server.Stop()
	g.Expect(listener.Close()).To(Succeed())
}
