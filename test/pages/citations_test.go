package pages_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

var (
	// The rules and invariants of the claim protocol, and what else violates it in the model.
	citation = regexp.MustCompile(`\b(?:R\d|I\d{1,2}|E[1-3]|[LPT]\d)\b`)
	// The first cell of a table.
	definition = regexp.MustCompile(`(?m)^\| ([A-Z]\d{1,2}) \|`)
)

// What code cites by a number is in a table of a page.
func TestEveryCitedRuleIsDefined(t *testing.T) {
	defined := map[string]bool{}
	for _, name := range []string{"docs/claims.md", "docs/model.md"} {
		page, err := pages.Read(root(t), name)
		require.NoError(t, err)
		for _, row := range definition.FindAllStringSubmatch(page.Text, -1) {
			defined[row[1]] = true
		}
	}
	cited := 0
	for _, folder := range []string{"agent/protocol", "agent/internal/claims", "test/claimmodel", "test/invariants", "test/chaos"} {
		err := filepath.WalkDir(filepath.Join(root(t), folder), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" {
				return err
			}
			text, err := os.ReadFile(path)
			for _, name := range citation.FindAllString(string(text), -1) {
				cited++
				require.Contains(t, defined, name, "%s cites it", path)
			}
			return err
		})
		require.NoError(t, err)
	}
	require.Greater(t, cited, 50, "citations were found")
}
