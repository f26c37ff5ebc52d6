package coresuites

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
)

// Record writes a page of the documentation with the specs that passed, of a version of Karpenter's
// core.
func Record(file, version string, passed []Spec) error {
	return os.WriteFile(file, []byte(page(version, time.Now(), passed)), 0o644)
}

func page(version string, now time.Time, passed []Spec) string {
	var b strings.Builder
	fmt.Fprintf(&b, `# The specs of Karpenter's own suites that pass

The end-to-end suites of Karpenter %s, run on %s by the command below, which wrote this page.
[A node's life](lifecycle.md#karpenters-own-suites) lists the specs that cannot run, and why. No test runs the
commands after a `+"`$`"+` on this page.

`+"```console\n$ make core-suites CORE_SUITES_FLAGS='-record=docs/core-suites.md'\n```\n", version, now.UTC().Format(time.DateOnly))
	passed = slices.SortedFunc(slices.Values(passed), func(a, b Spec) int {
		return cmp.Or(cmp.Compare(a.Suite, b.Suite), cmp.Compare(a.Name, b.Name))
	})
	for i, s := range passed {
		if i == 0 || passed[i-1].Suite != s.Suite {
			number := lo.CountBy(passed, func(o Spec) bool { return o.Suite == s.Suite })
			fmt.Fprintf(&b, "\n## %s: %d specs\n\n| spec | seconds |\n|---|---|\n", s.Suite, number)
		}
		fmt.Fprintf(&b, "| %s | %.0f |\n", strings.NewReplacer("|", `\|`, "<", "&lt;", ">", "&gt;").Replace(s.Name), s.Took.Seconds())
	}
	return b.String()
}
