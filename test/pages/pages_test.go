// Package pages_test verifies the documentation: its manifests, its links, and its commands, which
// it runs unchanged.
package pages_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

func TestBlocksHaveTheirSectionAndNoIndentation(t *testing.T) {
	g := NewWithT(t)
	page := pages.Page{Text: strings.Join([]string{
		"# Title", "```sh", "a", "```",
		"## One", "1. text", "", "   ```sh", "   b", "     c", "   ```", "### Below", "```yaml", "d: 1", "```",
		"## Two", "```sh", "e", "```", "",
	}, "\n")}

	g.Expect(page.Blocks()).To(Equal([]pages.Block{
		{Language: "sh", Code: "a\n", Line: 3},
		{Language: "sh", Code: "b\n  c\n", Section: "One", Line: 9},
		{Language: "yaml", Code: "d: 1\n", Section: "One", Line: 14},
		{Language: "sh", Code: "e\n", Section: "Two", Line: 18},
	}))
	g.Expect(page.Script()).To(Equal("a\nb\n  c\ne\n"))
	g.Expect(page.Script("Two", "One")).To(Equal("e\nb\n  c\n"))
	g.Expect(page.Steps("One")).To(Equal([]string{"b\n  c\n"}))
}

func at(page pages.Page, block pages.Block) string {
	return fmt.Sprintf("%s:%d", page.Path, block.Line)
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
	_ = os.Getenv("TESTED_FILES") // tells the test cache that files of the whole repository are an input
	dir, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
