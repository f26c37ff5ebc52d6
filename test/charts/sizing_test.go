package charts_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// sized matches a row of a table in docs/sizing.md: one or two numbers, perhaps the peak, and the
// memory that is requested and its limit.
var sized = regexp.MustCompile(`(?m)^\| ([\d,]+)[^|\n]* \|(?: ([\d,]+)[^|\n]* \| [\d,]+ MiB \|)? (\d+Mi) \| (\d+Gi) \|$`)

// TestMemoryFollowsFromTheSizing compares what the charts render with the tables of the page.
func TestMemoryFollowsFromTheSizing(t *testing.T) {
	_ = os.Getenv("TESTED_DOCS") // declares the page as an input of the test cache
	page, err := os.ReadFile(filepath.Join(root(t), "docs", "sizing.md"))
	require.NoError(t, err)
	rows := sized.FindAllStringSubmatch(string(page), -1)
	require.Len(t, rows, 9)
	for _, row := range rows {
		first, second := strings.ReplaceAll(row[1], ",", ""), strings.ReplaceAll(row[2], ",", "")
		c, settings := charts[1], "sizing.nodes="+first
		if second != "" {
			c, settings = charts[0], "sizing.machines="+first+",sizing.spokes="+second
		}
		resources := container(t, c, settings).Resources
		requested, limit := resource.MustParse(row[3]), resource.MustParse(row[4])
		require.Zero(t, resources.Requests.Memory().Cmp(requested), "%s: %s", row[0], resources.Requests.Memory())
		require.Zero(t, resources.Limits.Memory().Cmp(limit), "%s: %s", row[0], resources.Limits.Memory())
		if strings.Contains(row[0], "(the default)") {
			require.Equal(t, resources, container(t, c, "replicas=2").Resources, row[0])
		}
	}
}

func TestMemoryInTheResourcesReplacesThatOfTheSizing(t *testing.T) {
	for _, c := range charts {
		set := container(t, c, "resources.requests.memory=100Mi,resources.limits.memory=9Gi").Resources
		require.Equal(t, "100Mi", set.Requests.Memory().String())
		require.Equal(t, "9Gi", set.Limits.Memory().String())
		removed := container(t, c, "resources.requests.memory=null,resources.limits.memory=null").Resources
		require.NotContains(t, removed.Requests, corev1.ResourceMemory)
		require.NotContains(t, removed.Limits, corev1.ResourceMemory)
		require.Contains(t, removed.Requests, corev1.ResourceCPU)
		// A release of an earlier chart has no such values, and its own resources.
		earlier := container(t, c, "sizing=null,resources.requests.memory=128Mi,resources.limits.memory=1Gi").Resources
		require.Equal(t, "1Gi", earlier.Limits.Memory().String())
	}
}

// The defaults of the limits leave room for other callers up to that number of spokes.
func TestLimitsOverAllIdentitiesGrowWithTheSpokes(t *testing.T) {
	const limits = "--limit-all-"
	require.NotContains(t, strings.Join(container(t, charts[0], "sizing.spokes=1500").Args, " "), limits)
	args := container(t, charts[0], "sizing.spokes=2000,extraArgs={--limit-all-connections=9000}").Args
	require.Equal(t, []string{
		"--limit-all-connections=5000", "--limit-all-watches-at-once=7500", "--limit-all-calls-at-once=5000", "--limit-all-connections=9000",
	}, args[len(args)-4:], "the last one has precedence")
}

// container renders a chart with its least values and further settings, and returns its
// Deployment's container.
func container(t *testing.T, c chart, settings string) corev1.Container {
	t.Helper()
	objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), "--set", settings)
	return of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0]
}
