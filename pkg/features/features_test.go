package features_test

import (
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/features"
)

var addNames = flag.Bool("add-names", false, "add the names of new features to testdata/names.txt")

const namesFile = "testdata/names.txt"

// The file has the names that agents may have listed already.
func TestNamesAreAppendOnly(t *testing.T) {
	names := features.All()
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(names))), len(names), "a name is there twice")
	for _, name := range names {
		require.Regexp(t, "^[a-z][a-z0-9-]*[a-z0-9]$", name)
	}
	content, err := os.ReadFile(namesFile)
	require.NoError(t, err)
	frozen := strings.Fields(string(content))
	require.GreaterOrEqual(t, len(names), len(frozen), "a name is gone")
	require.Equal(t, frozen, names[:len(frozen)], "a name was changed, or its place")
	if *addNames {
		require.NoError(t, os.WriteFile(namesFile, []byte(strings.Join(names, "\n")+"\n"), 0o600))
		return
	}
	require.Equal(t, frozen, names, "new names are added with: go test ./pkg/features -args -add-names")
}

// The page says what each feature means.
func TestThePageHasEveryFeature(t *testing.T) {
	_ = os.Getenv("TESTED_DOCS") // declares a file outside of the module as an input of the test cache
	page, err := os.ReadFile("../../docs/compatibility.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(page), "| feature | means |\n|---|---|\n")
	require.True(t, found, "the page has no table of features")
	table, _, _ = strings.Cut(table, "\n\n")
	row := regexp.MustCompile("^\\| `([a-z0-9-]+)` \\| .+ \\|$")
	var names []string
	for line := range strings.Lines(table + "\n") {
		columns := row.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		require.NotNil(t, columns, "%q is not a feature and its meaning", line)
		names = append(names, columns[1])
	}
	require.Equal(t, features.All(), names)
}

// Agents that list nothing are out there already: what they can do is fixed.
func TestTheBaselineIsFixed(t *testing.T) {
	require.Equal(t, []string{"adopt-machines", "return-machines", "spoke-ids", "held-node-groups"}, features.Baseline())
}

func TestFeaturesDependOnTheConfiguration(t *testing.T) {
	require.Equal(t, features.All(), features.Served(nil))
	require.NotContains(t, features.Served(features.Configured{features.Certificates: false}), features.Certificates)
	require.Contains(t, features.Served(features.Configured{features.Certificates: true}), features.Certificates)
}

func TestMissingFeatures(t *testing.T) {
	wanted := []string{features.Clusters, features.SpokeIDs}
	require.Empty(t, features.Missing([]string{features.SpokeIDs, features.Clusters, "of-a-newer-agent"}, wanted))
	require.Equal(t, []string{features.SpokeIDs}, features.Missing([]string{features.Clusters}, wanted))
	require.Equal(t, []string{features.Clusters}, features.Missing(nil, wanted), "an agent that is older than the list has the baseline")
}
