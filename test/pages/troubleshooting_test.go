package pages_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// The page quotes lines of the log, which change with the code.
func TestTheLogLinesOfThePageExist(t *testing.T) {
	page, err := pages.Read(root(t), "docs/troubleshooting.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(page.Text, "\n## Log lines\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	rows := regexp.MustCompile("(?m)^\\| (agent|shim) \\| (info|debug|error) \\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1)
	require.Len(t, rows, strings.Count(section, "\n| ")-1, "every row has a side, a level and a line")
	logged := map[string][]string{"agent": logLines(t, "agent"), "shim": append(logLines(t, "shim"), logLines(t, "pkg/client")...)}
	for _, row := range rows {
		call := map[string]string{"info": ".Info(", "debug": ".V(1).Info(", "error": ".Error("}[row[2]]
		require.True(t, slices.ContainsFunc(logged[row[1]], func(line string) bool {
			return strings.Contains(line, row[3]) && strings.Contains(line, call) && (row[2] == "debug" || !strings.Contains(line, ".V("))
		}), "the %s does not log %q with level %s", row[1], row[3], row[2])
	}
}

// logLines returns the lines of Go code in a folder that log something.
func logLines(t *testing.T, folder string) []string {
	t.Helper()
	var lines []string
	require.NoError(t, filepath.WalkDir(filepath.Join(root(t), folder), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		content, err := os.ReadFile(path)
		for line := range strings.Lines(string(content)) {
			if strings.Contains(line, ".Info(") || strings.Contains(line, ".Error(") {
				lines = append(lines, line)
			}
		}
		return err
	}))
	return lines
}
