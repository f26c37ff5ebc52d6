// Package pages_test verifies the documentation: its manifests, its links, and its commands, which
// it runs unchanged.
package pages_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

func TestBlocksHaveTheirSectionAndNoIndentation(t *testing.T) {
	page := pages.Page{Text: strings.Join([]string{
		"# Title", "```sh", "a", "```",
		"## One", "1. text", "", "   ```sh", "   b", "     c", "   ```", "### Below", "```yaml", "d: 1", "```",
		"## Two", "```sh", "e", "```", "", "```", "output", "```", "",
	}, "\n")}

	require.Equal(t, []pages.Block{
		{Language: "sh", Code: "a\n", Line: 3},
		{Language: "sh", Code: "b\n  c\n", Section: "One", Line: 9},
		{Language: "yaml", Code: "d: 1\n", Section: "One", Line: 14},
		{Language: "sh", Code: "e\n", Section: "Two", Line: 18},
		{Code: "output\n", Section: "Two", Line: 22},
	}, page.Blocks())
	require.Equal(t, "a\nb\n  c\ne\n", page.Script())
	require.Equal(t, "e\nb\n  c\n", page.Script("Two", "One"))
	require.Equal(t, []string{"b\n  c\n"}, page.Steps("One"))
	require.Equal(t, []string{"output\n"}, page.Outputs("Two"))
}

func at(page pages.Page, block pages.Block) string {
	return fmt.Sprintf("%s:%d", page.Path, block.Line)
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
	_ = os.Getenv("TESTED_FILES") // declares files of the whole repository as inputs of the test cache
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
