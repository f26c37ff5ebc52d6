package foreign_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"

	"github.com/karpenter-capi/karpenter-capi/test/foreign"
)

// workingTree is the version that the tests give to what has no commit yet.
var workingTree = module.PseudoVersion("v0", "", time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), strings.Repeat("0", 12))

// temporary holds the proxy and the module cache of all tests.
var temporary string

func TestMain(m *testing.M) {
	var err error
	if temporary, err = os.MkdirTemp("", "foreign-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(temporary) // it is in the system's folder for temporary files
	os.Exit(code)
}

// A foreign module, the Go example without its go.mod file, gets pkg by version as its users do.
// The versions of proto and pkg come from a module proxy: neither the workspace nor a replace
// directive is in effect.
func TestAForeignModuleBuildsFromFewModules(t *testing.T) {
	m := newModule(t)
	copyGo(t, filepath.Join(repository(t).Root, "docs/examples/go"), m.dir)

	m.goes(t, "mod", "init", "example.com/foreign")
	m.goes(t, "mod", "edit", "-go=1.26.0") // the oldest that proto and pkg promise to need
	m.goes(t, "get", foreign.Pkg+"@"+workingTree)
	m.goes(t, "mod", "tidy")
	m.goes(t, "vet", "./...")
	m.goes(t, "test", "-timeout=2m", "./...")

	require.Contains(t, m.goes(t, "mod", "edit", "-json"), `"Go": "1.26.0"`, "no newer Go is needed")
	require.Equal(t, required(t), m.goes(t, "list", "-m", "-f", "{{.Version}}{{with .Replace}} replaced{{end}}", foreign.Proto))
	modules := distinct(m.goes(t, "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./..."))
	t.Logf("%d modules:\n%s", len(modules), strings.Join(modules, "\n"))
	require.Subset(t, modules, []string{foreign.Pkg, foreign.Proto})
	require.Less(t, len(modules), 25, "modules that pkg/client is built from: %q", modules)
}

// The messages alone need neither Kubernetes nor the module pkg.
func TestTheProtocolIsImportedWithoutTheClient(t *testing.T) {
	m := newModule(t)
	source := "package foreign\n\nimport _ \"" + foreign.Proto + "/capi/agent/v1alpha1\"\n"
	require.NoError(t, os.WriteFile(filepath.Join(m.dir, "foreign.go"), []byte(source), 0o600))

	m.goes(t, "mod", "init", "example.com/foreign")
	m.goes(t, "get", foreign.Proto+"@"+required(t))
	m.goes(t, "build", "./...")
	modules := distinct(m.goes(t, "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./..."))
	require.Contains(t, modules, foreign.Proto)
	for _, m := range modules {
		require.False(t, strings.HasPrefix(m, "k8s.io/"), m)
	}
	require.Less(t, len(modules), 12, "modules: %q", modules)
}

// Both examples run against the fake agent, which is installed by version, and print what the page
// shows.
func TestTheExamplesRunAgainstTheFakeAgent(t *testing.T) {
	fake := newModule(t)
	fake.goes(t, "install", foreign.Pkg+"/cmd/fake-agent@"+workingTree)

	t.Run("Go", func(t *testing.T) {
		m := newModule(t)
		copyGo(t, filepath.Join(repository(t).Root, "docs/examples/go"), m.dir)
		m.goes(t, "mod", "init", "example.com/foreign")
		m.goes(t, "get", foreign.Pkg+"@"+workingTree)
		m.goes(t, "mod", "tidy")
		m.goes(t, "build", "-o", "claimer", ".")
		livesThroughAClaim(t, m, fake.serve(t), "./claimer")
	})
	t.Run("Python", func(t *testing.T) {
		python := interpreter(t)
		script := filepath.Join(repository(t).Root, "docs/examples/python/claimer.py")
		livesThroughAClaim(t, newModule(t), fake.serve(t), python, script)
	})
}

// livesThroughAClaim runs an example, first with all node groups, then with one that is full, one
// that does not exist and one whose machines fail, then with an ID that has ended.
func livesThroughAClaim(t *testing.T, m foreignModule, address string, command ...string) {
	t.Helper()
	example := func(args ...string) (string, error) {
		return m.try(t, command[0], slices.Concat(command[1:], []string{"-address=" + address}, args)...)
	}
	out, err := example("-claim-id=first")
	require.NoError(t, err, out)
	require.Regexp(t, `(?s)^candidates: fleet/spot, fleet/standard, fleet/broken
claimed from: fleet/spot
.*CLAIM_PHASE_BOUND.*
node: spot-\d+, instance: fake:///fleet/spoke/spot-\d+
.*CLAIM_PHASE_ENDED Released$`, out)

	out, err = example("-claim-id=second", "-node-group=fleet/full")
	require.Error(t, err)
	require.Contains(t, out, "rejected: fleet/full: UNAVAILABLE_REASON_QUOTA_EXCEEDED: the scenario says so\n")

	out, err = example("-claim-id=third", "-node-group=fleet/missing")
	require.Error(t, err)
	require.Regexp(t, `rejected: fleet/missing: \w+: does not exist in this cluster or has not opted in\n`, out)

	out, err = example("-claim-id=fourth", "-node-group=fleet/broken")
	require.Error(t, err, "the claim has ended without a machine")
	require.Contains(t, out, "claim fourth has ended as Failed: ")
	require.Contains(t, out, "there is no capacity")

	out, err = example("-claim-id=first")
	require.Error(t, err)
	require.Contains(t, out, "claim first has ended as Released; choose another id")
}

// The go command has to find what pkg requires where the repository is published.
func TestPkgRequiresACommitOfProto(t *testing.T) {
	r := repository(t)
	if !r.HasHistory(t.Context()) {
		t.Skip("this checkout lacks the history")
	}
	_, err := r.Commit(t.Context(), "proto", required(t))
	require.NoError(t, err, "make require-proto names another")
}

// go install rejects a module with replace directives, and a patch release in the go line makes
// others upgrade for nothing.
func TestModulesForOthersAreModest(t *testing.T) {
	for _, folder := range []string{"proto", "pkg", "pkg/tracing"} {
		t.Run(folder, func(t *testing.T) {
			file, err := repository(t).File(folder)
			require.NoError(t, err)
			require.Empty(t, file.Replace)
			require.Empty(t, file.Exclude)
			require.True(t, strings.HasSuffix(semver.Canonical("v"+file.Go.Version), ".0"), file.Go.Version)
			for _, needed := range file.Require {
				require.NotEqual(t, "v0.0.0", needed.Mod.Version, needed.Mod.Path)
			}
		})
	}
}

// foreignModule is a folder outside the workspace, with a module cache of its own.
type foreignModule struct {
	dir         string
	environment []string
}

// newModule makes an empty folder. The go command gets proto and pkg from a proxy there, and
// everything else from this machine's module cache, or else from where it usually does.
func newModule(t *testing.T) foreignModule {
	t.Helper()
	here := foreignModule{dir: t.TempDir(), environment: os.Environ()}
	settings := strings.Split(here.goes(t, "env", "GOMODCACHE", "GOPROXY"), "\n")
	here.environment = append(here.environment,
		"GOWORK=off", "GOENV=off", "CGO_ENABLED=0", "GOBIN="+filepath.Join(here.dir, "bin"),
		"GOMODCACHE="+filepath.Join(temporary, "modules"), "GOPROXY="+strings.Join([]string{
			"file://" + string(publish(t)), "file://" + filepath.Join(settings[0], "cache/download"), settings[1],
		}, ","),
		// These versions are not published. With -trimpath, the build cache is independent of the
		// module cache's folder.
		"GOPRIVATE=", "GONOPROXY=none", "GOSUMDB=off", "GOFLAGS=-mod=mod -modcacherw -trimpath -buildvcs=false",
	)
	return here
}

// publish makes a proxy with the modules proto and pkg, unless a test before has made it.
func publish(t *testing.T) foreign.Proxy {
	t.Helper()
	r, proxy := repository(t), foreign.Proxy(filepath.Join(temporary, "proxy"))
	if _, err := os.Stat(string(proxy)); err == nil {
		return proxy
	}
	require.NoError(t, proxy.AddFolder(foreign.Pkg, workingTree, filepath.Join(r.Root, "pkg")))
	require.NoError(t, addProto(t, proxy, required(t)))
	return proxy
}

// addProto adds what others get by the version of proto that pkg requires: the commit. Only if no
// commit could be required that has the protos as they are, it adds them as they are.
func addProto(t *testing.T, proxy foreign.Proxy, version string) error {
	t.Helper()
	r, ctx := repository(t), t.Context()
	if r.HasHistory(ctx) {
		pending, err := r.Pending(ctx, "proto")
		require.NoError(t, err)
		if !pending {
			commit, err := r.Commit(ctx, "proto", version)
			require.NoError(t, err, "make require-proto names another")
			t.Logf("proto is that of commit %s; if pkg needs a newer one, run make require-proto", commit)
			return proxy.AddCommit(ctx, r, foreign.Proto, version, "proto", commit)
		}
	}
	t.Log("proto is that of the working tree; run make require-proto once it is committed")
	return proxy.AddFolder(foreign.Proto, version, filepath.Join(r.Root, "proto"))
}

// goes runs the go command and returns what it prints.
func (m foreignModule) goes(t *testing.T, args ...string) string {
	t.Helper()
	out, err := m.try(t, "go", args...)
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// try returns what the command writes to its standard output, and with an error also to its
// standard error.
func (m foreignModule) try(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = m.dir, m.environment
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String() + stderr.String(), err
	}
	return strings.TrimSpace(out.String()), nil
}

var serving = regexp.MustCompile(`"serving" "address"="([^"]+)"`)

// serve runs the module's fake agent until the test ends. It returns its address.
func (m foreignModule) serve(t *testing.T) string {
	t.Helper()
	scenario, err := filepath.Abs("testdata/scenario.yaml")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), filepath.Join(m.dir, "bin", "fake-agent"),
		"--plaintext-loopback", "--listen-address=127.0.0.1:0", "--scenario="+scenario)
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start()) // it is killed when the test's context ends, before Cleanup
	addresses, read := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			if found := serving.FindStringSubmatch(lines.Text()); found != nil {
				addresses <- found[1]
			}
		}
	}()
	t.Cleanup(func() {
		<-read
		_ = cmd.Wait() // it was killed
	})
	select {
	case address := <-addresses:
		return address
	case <-read:
		t.Fatal("the fake agent ended")
	}
	return ""
}

// interpreter returns a Python that has the packages which the example needs. The first one on the
// path may be another than the distribution's, which alone has the distribution's packages.
func interpreter(t *testing.T) string {
	t.Helper()
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.CommandContext(t.Context(), python, "-c", "import grpc, google.protobuf").Run() == nil {
			return python
		}
	}
	t.Skip("no python3 has grpcio and protobuf; in Debian: apt-get install python3-grpcio python3-protobuf")
	return ""
}

// required returns the version of proto that pkg requires.
func required(t *testing.T) string {
	t.Helper()
	version, err := repository(t).Required("pkg", foreign.Proto)
	if err != nil {
		t.Fatal(err)
	}
	return version
}

func repository(t *testing.T) foreign.Repository {
	t.Helper()
	// They declare the repository's files and its history as inputs of the test cache.
	_, _ = os.Getenv("TESTED_FILES"), os.Getenv("TESTED_COMMIT")
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return foreign.Repository{Root: root}
}

// copyGo copies the Go files of a folder.
func copyGo(t *testing.T, from, to string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(from, "*.go"))
	require.NoError(t, err)
	require.NotEmpty(t, files, from)
	for _, file := range files {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(to, filepath.Base(file)), content, 0o600))
	}
}

// distinct returns the different lines that are not empty, sorted.
func distinct(lines string) []string {
	return slices.Compact(slices.Sorted(strings.FieldsSeq(lines)))
}
