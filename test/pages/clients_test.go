package pages_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// What the page shows is what package foreign runs.
func TestTheCodeOfThePageOnClientsIsThatOfTheExamples(t *testing.T) {
	page, err := pages.Read(root(t), "docs/clients.md")
	require.NoError(t, err)
	shown := map[string]int{}
	for _, block := range page.Blocks() {
		file, is := map[string]string{"go": "docs/examples/go/main.go", "python": "docs/examples/python/claimer.py"}[block.Language]
		if !is {
			continue
		}
		shown[file]++
		source, err := os.ReadFile(filepath.Join(root(t), file))
		require.NoError(t, err)
		require.True(t, contains(string(source), block.Code), "%s is not in %s:\n%s", at(page, block), file, block.Code)
	}
	require.Len(t, shown, 2)
	for file, blocks := range shown {
		require.GreaterOrEqual(t, blocks, 4, file)
	}
}

// contains reports whether the source has the lines of the code in one piece, all indented by the same.
func contains(source, code string) bool {
	first, _, _ := strings.Cut(code, "\n")
	for _, match := range regexp.MustCompile(`(?m)^([\t ]*)`+regexp.QuoteMeta(first)+"$").FindAllStringSubmatch(source, -1) {
		var indented strings.Builder
		for line := range strings.Lines(code) {
			if line != "\n" {
				indented.WriteString(match[1])
			}
			indented.WriteString(line)
		}
		if strings.Contains("\n"+source, "\n"+indented.String()) {
			return true
		}
	}
	return false
}

func TestCodeIsFoundWithAnyIndentation(t *testing.T) {
	source := "a\n\tb\n\n\t\tc\nd\n"
	require.True(t, contains(source, "b\n\n\tc\n"))
	require.True(t, contains(source, "a\n\tb\n"))
	require.False(t, contains(source, "b\n\tc\n"))
	require.False(t, contains(source, "b\n\n\tc\nd\n"))
	require.False(t, contains("ab\n", "b\n"), "part of a line")
}

// A field that is added to NodeGroup has to be explained as a part of an offering.
func TestEveryFieldOfANodeGroupIsAPartOfAnOffering(t *testing.T) {
	page, err := pages.Read(root(t), "docs/clients.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(page.Text, "\n## A node group is an offering\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")

	var documented, parts []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (\\w+) \\| .+ \\|$").FindAllStringSubmatch(section, -1) {
		documented, parts = append(documented, row[1]), append(parts, row[2])
	}
	var fields []string
	described := (&agentv1alpha1.NodeGroup{}).ProtoReflect().Descriptor().Fields()
	for i := range described.Len() {
		fields = append(fields, string(described.Get(i).Name()))
	}
	require.ElementsMatch(t, fields, documented, "the lines of the table, one for each field of NodeGroup")
	for i, part := range parts {
		require.Contains(t, []string{"topology", "weight", "capacity", "resources", "identity", "revision", "provenance"}, part, documented[i])
	}
	require.Subset(t, parts, []string{"topology", "weight", "capacity", "resources"})
}
