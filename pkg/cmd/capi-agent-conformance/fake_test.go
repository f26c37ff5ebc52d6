package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/cmd/internal/fakeserver"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
)

// quick is a scenario without failures, whose machines appear at once.
const quick = `
heartbeatInterval: 100ms
failureCoolDown: 1m
clusters: [{name: fleet/spoke}]
nodeGroups: [{name: first, replicas: 1}, {name: second}]
identities:
- {id: "spiffe://karpenter-capi/reader", name: reader, roles: [reader], clusters: [fleet/spoke]}
- {id: "spiffe://karpenter-capi/autoscaler", name: autoscaler, roles: [autoscaler], clusters: [fleet/spoke]}
- {id: "spiffe://karpenter-capi/admin", name: admin, roles: [admin], allClusters: true}
- {id: "spiffe://karpenter-capi/nobody", name: nobody, roles: [reader], clusters: [fleet/other]}
`

// fake is a running fake-agent.
type fake struct{ address, control, certificates string }

// file returns the path of a file of the caller's certificate.
func (f fake) file(caller, name string) string { return filepath.Join(f.certificates, caller, name) }

var (
	serving   = regexp.MustCompile(`"serving" "address"="([^"]+)"`)
	controlAt = regexp.MustCompile(`"control" "url"="([^"]+)"`)
)

// start runs fake-agent until the test ends.
func start(t *testing.T, scenario string, arguments ...string) fake {
	t.Helper()
	f := fake{certificates: t.TempDir()}
	file := filepath.Join(t.TempDir(), "scenario.yaml")
	require.NoError(t, os.WriteFile(file, []byte(scenario), 0o600))
	read, write := io.Pipe()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() {
		err := fakeserver.Run(ctx, append(arguments, "--scenario="+file, "--listen-address=127.0.0.1:0"), io.Discard, write)
		_ = write.Close() // The reader sees the end.
		ended <- err
	}()
	addresses, drained := make(chan [2]string, 1), make(chan struct{})
	go func() {
		defer close(drained)
		var url string
		for lines := bufio.NewScanner(read); lines.Scan(); {
			if found := controlAt.FindStringSubmatch(lines.Text()); found != nil {
				url = found[1]
			}
			if found := serving.FindStringSubmatch(lines.Text()); found != nil {
				addresses <- [2]string{found[1], url}
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
		<-drained
	})
	select {
	case found := <-addresses:
		f.address, f.control = found[0], found[1]
	case err := <-ended:
		ended <- err
		t.Fatalf("fake-agent ended: %v", err)
	case <-time.After(time.Minute):
		t.Fatal("fake-agent does not serve")
	}
	return f
}

// secured starts fake-agent with certificates.
func secured(t *testing.T, arguments ...string) fake {
	t.Helper()
	dir := t.TempDir()
	f := start(t, quick, append(arguments, "--certificates-dir="+dir)...)
	f.certificates = dir
	return f
}

// as returns the flags for a caller.
func (f fake) as(caller string) []string {
	return []string{
		"--address=" + f.address, "--ca-file=" + filepath.Join(f.certificates, "ca.crt"),
		"--cert-file=" + f.file(caller, "tls.crt"), "--key-file=" + f.file(caller, "tls.key"),
	}
}

type verdict struct {
	Verdict string               `json:"verdict"`
	Passed  int                  `json:"passed"`
	Failed  int                  `json:"failed"`
	Skipped int                  `json:"skipped"`
	Results []conformance.Result `json:"results"`
}

// conform runs the command. It returns the exit status, the output, and the verdict that was
// written.
func conform(t *testing.T, arguments ...string) (int, string, verdict) {
	t.Helper()
	dir := t.TempDir()
	var out, errOut bytes.Buffer
	status := run(t.Context(), append(arguments, "--json="+filepath.Join(dir, "v.json"), "--junit="+filepath.Join(dir, "v.xml")), &out, &errOut)
	require.Empty(t, errOut.String())
	content, err := os.ReadFile(filepath.Join(dir, "v.json"))
	require.NoError(t, err)
	var v verdict
	require.NoError(t, json.Unmarshal(content, &v))
	for _, r := range v.Results {
		if r.Outcome == conformance.Failed {
			t.Logf("%s: %s", r.ID, r.Message)
		}
	}
	content, err = os.ReadFile(filepath.Join(dir, "v.xml"))
	require.NoError(t, err)
	var suite struct {
		Tests int `xml:"tests,attr"`
	}
	require.NoError(t, xml.Unmarshal(content, &suite))
	require.Equal(t, len(v.Results), suite.Tests)
	return status, out.String(), v
}

// Over TCP with mutual TLS, the fake keeps the same contract as in a test's own process.
func TestFakeAgentConformsOverTCP(t *testing.T) {
	f := secured(t, "--control-address=127.0.0.1:0")
	status, out, v := conform(t, "--address="+f.address, "--control="+f.control)
	require.Equal(t, conforms, status)
	require.Len(t, v.Results, len(conformance.Behaviours()))
	for _, r := range v.Results {
		if strings.HasPrefix(r.ID, "autoscaler.") {
			require.Equal(t, "the agent does not serve the protocol of a cluster-autoscaler", r.Message)
		} else {
			require.Equal(t, conformance.Passed, r.Outcome, r.ID)
		}
	}
	require.Regexp(t, `conformance: PASS passed=\d+ failed=0 skipped=\d+\n$`, out)
}

// A control that is older than an optional operation does not list it. What needs it is skipped.
func TestAnOlderControlIsNoFailure(t *testing.T) {
	f := secured(t, "--control-address=127.0.0.1:0")
	to, err := url.Parse(f.control)
	require.NoError(t, err)
	older := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ModifyResponse: func(r *http.Response) error {
			content, err := io.ReadAll(r.Body)
			if err != nil {
				return err
			}
			content = bytes.Replace(content, []byte(`"operations"`), []byte(`"unknown"`), 1)
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(content)), int64(len(content))
			r.Header.Set("Content-Length", strconv.Itoa(len(content)))
			return nil
		},
	})
	t.Cleanup(older.Close)
	status, _, v := conform(t, "--address="+f.address, "--control="+older.URL, "--only=^nodepools[.](report|published)$")
	require.Equal(t, conforms, status)
	require.Equal(t, 1, v.Passed)
	require.Equal(t, 1, v.Skipped)
}

// Without a control, every behaviour is checked except those that need one.
func TestFakeAgentConformsAsItIsGiven(t *testing.T) {
	f := secured(t)
	arguments := append(f.as("cluster/fleet/spoke"), "--cluster=fleet/spoke", "--node-group=fleet/first,fleet/second")
	for _, caller := range []string{"autoscaler", "admin"} {
		arguments = append(arguments, "--"+caller+"-cert-file="+f.file(caller, "tls.crt"), "--"+caller+"-key-file="+f.file(caller, "tls.key"))
	}
	status, out, v := conform(t, arguments...)
	require.Equal(t, conforms, status)
	require.Equal(t, "PASS", v.Verdict)
	for _, r := range v.Results {
		if r.Outcome == conformance.Skipped && r.Profile != conformance.ProfileFault && !strings.HasPrefix(r.ID, "autoscaler.") {
			require.Contains(t, r.Message, "the identity of a Cluster that does not exist", r.ID)
		}
		if r.Profile == conformance.ProfileFault {
			require.Equal(t, conformance.Skipped, r.Outcome, r.ID)
		}
	}
	require.Greater(t, v.Passed, 30)
	require.Regexp(t, `conformance: PASS passed=\d+ failed=0 skipped=\d+\n$`, out)
}

func TestAReaderChecksTheReadersProfile(t *testing.T) {
	f := secured(t)
	status, _, v := conform(t, append(f.as("reader"), "--cluster=fleet/spoke", "--node-group=fleet/first", "--profiles=reader")...)
	require.Equal(t, conforms, status)
	require.Greater(t, v.Passed, 8)
	for _, r := range v.Results {
		require.Equal(t, conformance.ProfileReader, r.Profile)
	}
}

func TestPlaintextIsCheckedAsAnAdministrator(t *testing.T) {
	f := start(t, quick, "--plaintext-loopback")
	status, _, v := conform(t, "--address="+f.address, "--plaintext-loopback", "--cluster=fleet/spoke", "--node-group=fleet/first",
		"--node-group=fleet/second", "--profiles=reader,claimer")
	require.Equal(t, conforms, status)
	require.Greater(t, v.Passed, 20)
}

// Neither an agent that loses replies nor one that rejects calls conforms.
func TestAnAgentThatDoesNotConformFails(t *testing.T) {
	f := start(t, quick+"calls: [{method: GetClaim, fail: {code: INTERNAL}}]\n", "--plaintext-loopback")
	status, out, v := conform(t, "--address="+f.address, "--plaintext-loopback", "--cluster=fleet/spoke", "--only=^claims[.]not-found$")
	require.Equal(t, breaks, status)
	require.Equal(t, 1, v.Failed)
	require.Contains(t, out, "FAIL  claims.not-found")
	require.Regexp(t, `conformance: FAIL passed=0 failed=1 skipped=0\n$`, out)
}

func TestAnInterruptionIsNoVerdictAboutTheAgent(t *testing.T) {
	f := start(t, quick, "--plaintext-loopback")
	arguments := []string{"--address=" + f.address, "--plaintext-loopback", "--cluster=fleet/spoke", "--only=^claims[.]not-found$"}
	var out, errOut bytes.Buffer
	missing := filepath.Join(t.TempDir(), "missing", "verdict.json")
	require.Equal(t, unchecked, run(t.Context(), append(arguments, "--json="+missing), &out, &errOut), "a file of before may be there")
	require.Contains(t, out.String(), "conformance: PASS")
	require.Contains(t, errOut.String(), "verdict.json")

	errOut.Reset()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	require.Equal(t, unchecked, run(ctx, arguments, writer(func([]byte) { interrupt() }), &errOut)) // with the first result
	require.Contains(t, errOut.String(), "interrupted")
}

// writer calls a function with what is written.
type writer func([]byte)

func (w writer) Write(text []byte) (int, error) {
	w(text)
	return len(text), nil
}

func TestWhoMayNotReadIsToldSo(t *testing.T) {
	f := secured(t)
	var out, errOut bytes.Buffer
	status := run(t.Context(), append(f.as("nobody"), "--cluster=fleet/spoke", "--node-group=fleet/first"), &out, &errOut)
	require.Equal(t, unchecked, status)
	require.Contains(t, errOut.String(), "node group fleet/first: GetNodeGroup: rpc error: code = PermissionDenied")
	require.Equal(t, "conformance: FAIL passed=0 failed=0 skipped=0\n", out.String())
}
