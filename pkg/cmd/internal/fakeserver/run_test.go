package fakeserver_test

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/fakeserver"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent/scenario"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var serving = regexp.MustCompile(`"serving" "address"="([^"]+)"`)

// start runs the command until the test ends. It returns the address that the command serves on.
func start(t *testing.T, arguments ...string) string {
	t.Helper()
	read, write := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		err := fakeserver.Run(ctx, append(arguments, "--listen-address=127.0.0.1:0"), io.Discard, write)
		_ = write.Close() // The reader sees the end.
		ended <- err
	}()
	addresses, read1 := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(read1)
		lines := bufio.NewScanner(read)
		for lines.Scan() {
			if found := serving.FindStringSubmatch(lines.Text()); found != nil {
				addresses <- found[1]
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
		<-read1
	})
	select {
	case address := <-addresses:
		return address
	case err := <-ended:
		ended <- err
		t.Fatalf("it ended: %v", err)
	case <-time.After(10 * time.Second):
		t.Fatal("it does not serve")
	}
	return ""
}

func dial(t *testing.T, o client.Options) *client.Client {
	t.Helper()
	c, err := client.New(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func spoke() *agentv1alpha1.ClusterRef {
	return &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}
}

func create(t *testing.T, c *client.Client, id, holder string) error {
	t.Helper()
	_, err := c.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: spoke(), ClaimId: id, Holder: holder, Candidates: []string{"fleet/standard"},
	})
	return err
}

func TestTheExampleIsServedInPlaintext(t *testing.T) {
	c := dial(t, client.Options{Address: start(t, "--plaintext-loopback"), PlaintextLoopback: true})
	listed, err := c.NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: spoke()})
	require.NoError(t, err)
	require.Len(t, listed.GetNodeGroups(), 4)
	require.NoError(t, create(t, c, "a-claim", "me"))

	stream, err := grpc_reflection_v1.NewServerReflectionClient(c.Conn()).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	require.NoError(t, stream.Send(&grpc_reflection_v1.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{},
	}))
	services, err := stream.Recv()
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(services.GetListServicesResponse().GetService()), 6)
}

func TestCallersHaveTheRolesOfTheScenario(t *testing.T) {
	dir := t.TempDir()
	address := start(t, "--certificates-dir="+dir)
	as := func(folder string) *client.Client {
		return dial(t, client.Options{Address: address, TLS: &client.TLS{
			CertFile: filepath.Join(dir, folder, "tls.crt"), KeyFile: filepath.Join(dir, folder, "tls.key"), CAFile: filepath.Join(dir, "ca.crt"),
		}})
	}
	for folder, want := range map[string]struct {
		holder, role string
		may          bool
	}{
		"cluster/fleet/spoke":  {"karpenter", "cluster", true},
		"cluster/fleet/moving": {"karpenter", "cluster", false},
		"reader":               {"karpenter", "reader", false},
		"autoscaler":           {"cluster-autoscaler", "autoscaler", true},
		"admin":                {"me", "admin", true},
	} {
		c := as(folder)
		status, err := c.Status.GetStatus(t.Context(), &agentv1alpha1.GetStatusRequest{})
		require.NoError(t, err)
		require.Equal(t, []string{want.role}, status.GetRoles(), folder)
		err = create(t, c, "of-"+strings.ReplaceAll(folder, "/", "-"), want.holder)
		if want.may {
			require.NoError(t, err, folder)
		} else {
			require.True(t, agenterrors.IsPermissionDenied(err), "%s: %v", folder, err)
		}
	}
	_, err := as("cluster/fleet/onboarded").NodeGroups.ListNodeGroups(t.Context(),
		&agentv1alpha1.ListNodeGroupsRequest{Cluster: &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "onboarded"}})
	require.NoError(t, err, "its certificate is of the onboarding")
	info, err := os.Stat(filepath.Join(dir, "admin", "tls.key"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
}

func TestCertificatesMayComeFromElsewhere(t *testing.T) {
	dir := t.TempDir()
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	path := func(name string) string { return filepath.Join(dir, name) }
	certificate, key, err := authority.IssueServer("127.0.0.1")
	require.NoError(t, err)
	own, ownKey, err := authority.IssueClient("spiffe://karpenter-capi/cluster/fleet/spoke")
	require.NoError(t, err)
	for name, content := range map[string][]byte{
		"ca.crt": authority.PEM(), "tls.crt": certificate, "tls.key": key, "own.crt": own, "own.key": ownKey,
	} {
		require.NoError(t, os.WriteFile(path(name), content, 0o600))
	}
	address := start(t, "--tls-cert-file="+path("tls.crt"), "--tls-key-file="+path("tls.key"), "--client-ca-file="+path("ca.crt"))
	c := dial(t, client.Options{Address: address, TLS: &client.TLS{CertFile: path("own.crt"), KeyFile: path("own.key"), CAFile: path("ca.crt")}})
	require.NoError(t, create(t, c, "a-claim", "karpenter"))
}

// Its clients would not trust the new certificates.
func TestASecondOneLeavesTheCertificatesOfTheFirst(t *testing.T) {
	dir := t.TempDir()
	address := start(t, "--certificates-dir="+dir)
	before, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(t, err)
	err = fakeserver.Run(t.Context(), []string{"--certificates-dir=" + dir, "--listen-address=" + address}, io.Discard, io.Discard)
	require.ErrorContains(t, err, "--listen-address")
	after, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(t, err)
	require.Equal(t, before, after)
}

func TestMistakesNameTheirFlag(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	require.NoError(t, os.WriteFile(bad, []byte("nodeGroups:\n- {name: a, size: 1}\n"), 0o600))
	for want, arguments := range map[string][]string{
		"set --plaintext-loopback":                           {},
		"--listen-address: \"here\" is not host:port":        {"--plaintext-loopback", "--listen-address=here"},
		"is not a loopback address":                          {"--plaintext-loopback", "--listen-address=0.0.0.0:1"},
		"belong together":                                    {"--tls-cert-file=a"},
		"--tls-key-file: there is another way":               {"--plaintext-loopback", "--tls-key-file=a"},
		"--certificates-dir: without TLS":                    {"--plaintext-loopback", "--certificates-dir=a"},
		"--server-names: the server's":                       {"--certificates-dir=a", "--server-names="},
		"--control-address: \"0.0.0.0:1\" is not a loopback": {"--certificates-dir=a", "--control-address=0.0.0.0:1"},
		"--control-address: it issues certificates":          {"--plaintext-loopback", "--control-address=127.0.0.1:1"},
		"--scenario: open":                                   {"--plaintext-loopback", "--scenario=missing.yaml"},
		`unknown field "nodeGroups[0].size"`:                 {"--plaintext-loopback", "--scenario=" + bad},
		"unknown flag: --nonsense":                           {"--nonsense"},
		`"file.yaml" is not a flag`:                          {"file.yaml"},
		"certificate missing.crt and key":                    {"--tls-cert-file=missing.crt", "--tls-key-file=a", "--client-ca-file=b"},
	} {
		require.ErrorContains(t, fakeserver.Run(t.Context(), arguments, io.Discard, io.Discard), want, "%v", arguments)
	}
}

func TestSettingsMayComeFromTheEnvironment(t *testing.T) {
	t.Setenv("FAKE_AGENT_PLAINTEXT_LOOPBACK", "true")
	require.NoError(t, fakeserver.Run(t.Context(), []string{"--check"}, io.Discard, io.Discard))
	t.Setenv("FAKE_AGENT_PLAINTEXT_LOOPBACK", "perhaps")
	require.ErrorContains(t, fakeserver.Run(t.Context(), []string{"--check"}, io.Discard, io.Discard), "FAKE_AGENT_PLAINTEXT_LOOPBACK")
}

func TestTheExampleIsPrinted(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, fakeserver.Run(t.Context(), []string{"--print-example"}, &out, io.Discard))
	_, err := scenario.Parse(out.Bytes())
	require.NoError(t, err)
}
