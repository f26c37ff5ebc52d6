package pages_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// The matrix, the README and the installation page name the versions that the modules require and
// that the charts demand.
func TestTheMatrixIsWhatIsBuilt(t *testing.T) {
	found := func(file, pattern string) string {
		content, err := os.ReadFile(filepath.Join(root(t), file))
		require.NoError(t, err)
		match := regexp.MustCompile(pattern).FindSubmatch(content)
		require.NotNil(t, match, "%s in %s", pattern, file)
		return string(match[1])
	}
	const version = `(v\d+\.\d+\.\d+)`
	clusterAPI := found("deploy/tools/cluster-api/go.mod", `sigs.k8s.io/cluster-api `+version)
	require.Equal(t, clusterAPI, found("agent/go.mod", `sigs.k8s.io/cluster-api `+version), "the agent's and the sandbox's")
	kubernetes := found("deploy/tools/kubernetes/go.mod", `k8s.io/kubernetes `+version)
	karpenter := found("shim/go.mod", `sigs.k8s.io/karpenter `+version)
	const minimum = `kubeVersion: ">=(1\.\d+)\.0-0"`
	hub, spoke := found("deploy/charts/agent/Chart.yaml", minimum), found("deploy/charts/shim/Chart.yaml", minimum)
	minor := regexp.MustCompile(`^v\d+\.\d+`).FindString

	page, err := pages.Read(root(t), "docs/compatibility.md")
	require.NoError(t, err)
	require.Contains(t, page.Text, "| "+minor(clusterAPI)+" or later; tested with "+clusterAPI+
		" | v"+hub+" or later; tested with "+kubernetes+" | v"+spoke+" or later; tested with "+kubernetes+" | "+karpenter+", built in |")

	readme, err := pages.Read(root(t), "README.md")
	require.NoError(t, err)
	require.Contains(t, readme.Text, "| "+minor(clusterAPI)+" or later, API `v1beta2` | "+clusterAPI+",")
	require.Contains(t, readme.Text, "| v"+hub+" or later | "+minor(kubernetes)+" |")
	require.Contains(t, readme.Text, "| "+minor(karpenter)+", built into the shim |")

	install, err := pages.Read(root(t), "docs/install.md")
	require.NoError(t, err)
	require.Contains(t, install.Text, "Cluster API "+minor(clusterAPI)+" or later")
	require.Contains(t, install.Text, "Kubernetes v"+hub+" or later")
}
