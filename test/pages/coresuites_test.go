package pages_test

import (
	"cmp"
	"fmt"
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
