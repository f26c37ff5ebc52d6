// Package pins checks the versions that the sandbox's foreign binaries are built with.
package pins

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/mod/modfile"
	"golang.org/x/mod/semver"
)

// The sandbox's binaries come from a module each, and share most of their packages, also with ours.
// If a module is required in two versions, whatever imports it is compiled twice, and the first
// `make demo` on a machine takes minutes longer.
func TestTheSandboxesBinariesShareTheirDependencies(t *testing.T) {
	_ = os.Getenv("TESTED_FILES") // declares the go.mod files as inputs of the test cache
	modules := []string{"agent", "shim", "pkg", "pkg/tracing", "proto"}
	for _, tool := range []string{"etcd", "kubernetes", "kwok", "cluster-api", "helm", "grpcurl"} {
		modules = append(modules, "deploy/tools/"+tool)
	}
	// versions has the version of each module by the folder that requires it. Of our own modules,
	// the highest counts: they are built in one workspace.
	versions := map[string]map[string]string{}
	for _, folder := range modules {
		by := folder
		if !strings.HasPrefix(folder, "deploy/") {
			by = workspace
		}
		for path, version := range requirements(t, filepath.Join("../..", folder, "go.mod")) {
			if apart(path, by) {
				continue
			}
			if versions[path] == nil {
				versions[path] = map[string]string{}
			}
			versions[path][by] = newer(versions[path][by], version)
		}
	}
	shared := 0
	for path, required := range versions {
		if len(required) > 1 {
			shared++
		}
		newest := lo.Reduce(lo.Values(required), func(newest, version string, _ int) string { return newer(newest, version) }, "")
		for by, version := range required {
			if version != newest {
				t.Errorf("%s requires %s %s, others %s: run GOWORK=off go get %s@%s and GOWORK=off go mod tidy there",
					by, path, version, newest, path, newest)
			}
		}
	}
	require.Greater(t, shared, 50, "modules that several require")
}

// The toolchain is a part of what is compiled: with two of them, nothing is shared at all.
func TestAllThatIsBuiltHereIsBuiltWithOneToolchain(t *testing.T) {
	_ = os.Getenv("TESTED_FILES") // declares the go.mod files as inputs of the test cache
	content, err := os.ReadFile("../../go.work")
	require.NoError(t, err)
	work, err := modfile.ParseWork("go.work", content, nil)
	require.NoError(t, err)
	require.NotNil(t, work.Go)
	files, err := filepath.Glob("../../deploy/tools/*/go.mod")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		parsed := parse(t, file)
		require.Nil(t, parsed.Toolchain, file)
		assert.Equal(t, work.Go.Version, parsed.Go.Version, "the Go version in %s, and that in go.work", file)
	}
}

// workspace stands for the modules of the workspace.
const workspace = "the workspace"

// apart reports whether a module may have another version there.
func apart(path, by string) bool {
	switch by {
	case workspace: // Karpenter core requires older versions of some than the control plane is built from
		return strings.HasPrefix(path, "k8s.io/")
	case "deploy/tools/etcd": // etcdctl was written for the API of version 0; few others import it
		return path == "github.com/olekukonko/tablewriter"
	}
	return false
}

// newer returns the higher of two versions. Each is higher than the empty one.
func newer(a, b string) string {
	if semver.Compare(a, b) > 0 {
		return a
	}
	return b
}

// requirements returns the versions of all modules that a go.mod file requires, as replaced.
func requirements(t *testing.T, file string) map[string]string {
	t.Helper()
	parsed := parse(t, file)
	all := map[string]string{}
	for _, required := range parsed.Require {
		all[required.Mod.Path] = required.Mod.Version
	}
	for _, replaced := range parsed.Replace {
		if _, ok := all[replaced.Old.Path]; ok && replaced.New.Version != "" {
			all[replaced.Old.Path] = replaced.New.Version
		}
	}
	return all
}

func parse(t *testing.T, file string) *modfile.File {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	parsed, err := modfile.Parse(file, content, nil)
	require.NoError(t, err)
	return parsed
}
