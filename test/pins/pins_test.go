// Package pins checks the versions that the sandbox's foreign binaries are built with.
package pins

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/modfile"
	"golang.org/x/mod/semver"
)

// The sandbox's binaries come from a module each, and share most of their packages, also with ours. If
// a module is required in two versions, whatever imports it is compiled twice, and the first `make demo`
// on a machine takes minutes longer.
func TestTheSandboxesBinariesShareTheirDependencies(t *testing.T) {
	_ = os.Getenv("TESTED_FILES") // for the test cache: the go.mod files are an input
	const root, ours = "../..", "the workspace"
	// Version 1 of it has another API than etcdctl was written for. Little else imports it.
	apart := map[string]string{"etcd": "github.com/olekukonko/tablewriter"}
	// versions has the version of each module by who requires it.
	versions := map[string]map[string]string{}
	add := func(file, as string) {
		for path, version := range requirements(t, filepath.Join(root, file)) {
			if apart[as] == path {
				continue
			}
			if versions[path] == nil {
				versions[path] = map[string]string{}
			}
			// A workspace has the highest version that any of its modules requires.
			versions[path][as] = slices.MaxFunc([]string{version, cmp.Or(versions[path][as], version)}, semver.Compare)
		}
	}
	tools := []string{"etcd", "kubernetes", "kwok", "cluster-api", "helm", "grpcurl"}
	for _, tool := range tools {
		add("deploy/tools/"+tool+"/go.mod", tool)
	}
	for _, module := range []string{"agent", "shim", "pkg", "pkg/tracing", "proto"} {
		add(module+"/go.mod", ours)
	}
	shared := 0
	for path, by := range versions {
		if strings.HasPrefix(path, "k8s.io/") {
			delete(by, ours) // Karpenter core requires some that are older, and Kubernetes is of one version
		}
		if len(by) < 2 {
			continue
		}
		shared++
		highest := ""
		for _, version := range by {
			highest = slices.MaxFunc([]string{version, highest}, semver.Compare)
		}
		for _, tool := range tools {
			if version := by[tool]; version != "" && version != highest {
				t.Errorf("%s requires %s %s, others require %s: run GOWORK=off go get %s@%s && GOWORK=off go mod tidy in deploy/tools/%s",
					tool, path, version, highest, path, highest, tool)
			}
		}
		if version := by[ours]; version != "" && version != highest {
			t.Errorf("the workspace requires %s %s, a tool requires %s: update it in the modules that require it", path, version, highest)
		}
	}
	require.Greater(t, shared, 50, "modules that several require")
}

// requirements returns the versions of all modules that a go.mod file requires, as replaced.
func requirements(t *testing.T, file string) map[string]string {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	parsed, err := modfile.Parse(file, content, nil)
	require.NoError(t, err)
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
