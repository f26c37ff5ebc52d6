package pages_test

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/coresuites"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

func TestThePageListsTheSpecsOfCoreThatCannotRun(t *testing.T) {
	page, err := pages.Read(root(t), "docs/lifecycle.md")
	require.NoError(t, err)
	exceptions, err := coresuites.Exceptions()
	require.NoError(t, err)
	_, section, found := strings.Cut(page.Text, "## Karpenter's own suites\n")
	require.True(t, found)
	rows := lo.Filter(strings.Split(section, "\n"), func(line string, _ int) bool { return strings.HasPrefix(line, "| ") })
	require.ElementsMatch(t, lo.Map(exceptions, func(e coresuites.Exception, _ int) string {
		return fmt.Sprintf("| %s | %s | %s |", e.Suite, cmp.Or(e.Specs, "all"), e.Why)
	}), rows[1:], "the table, without its head")
	for _, suite := range coresuites.Suites() {
		require.Contains(t, section, "`"+suite+"`")
	}
}

// The page of the specs that pass is written by a run, and is out of date after an upgrade of core.
func TestThePageListsTheSpecsThatPassOfTheCoreThatIsUsed(t *testing.T) {
	module, err := os.ReadFile(filepath.Join(root(t), "shim", "go.mod"))
	require.NoError(t, err)
	core := regexp.MustCompile(`(?m)^\s+sigs\.k8s\.io/karpenter (v\S+)`).FindSubmatch(module)
	require.NotNil(t, core)
	page, err := pages.Read(root(t), "docs/core-suites.md")
	require.NoError(t, err)
	require.Contains(t, page.Text, "The end-to-end suites of Karpenter "+string(core[1])+",", "run make core-suites with -record, and commit the page")
	exceptions, err := coresuites.Exceptions()
	require.NoError(t, err)
	heading := regexp.MustCompile(`(?m)^## (\w+): (\d+) specs$`)
	headings := heading.FindAllStringSubmatch(page.Text, -1)
	require.ElementsMatch(t, coresuites.Suites(), lo.Map(headings, func(h []string, _ int) string { return h[1] }))
	for i, section := range heading.Split(page.Text, -1)[1:] {
		suite := headings[i][1]
		rows := lo.Filter(strings.Split(section, "\n"), func(line string, _ int) bool { return strings.HasPrefix(line, "| ") })
		require.Equal(t, headings[i][2], strconv.Itoa(len(rows)-1), "the rows of the table of %s, without its head", suite)
		for _, row := range rows[1:] {
			for _, e := range exceptions {
				require.False(t, e.Suite == suite && strings.HasPrefix(row, "| "+e.Specs), "%s cannot run: %s", row, e.Why)
			}
		}
	}
}
