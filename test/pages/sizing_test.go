package pages_test

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// The page's table is the sum of the parts that it lists, and the requested memory covers it.
func TestTheSizingTableIsTheSumOfItsParts(t *testing.T) {
	page, err := pages.Read(root(t), "docs/sizing.md")
	require.NoError(t, err)
	part := func(name string) float64 {
		match := regexp.MustCompile(`\| ` + name + `[^|]*\| (\d+) [KM]iB`).FindStringSubmatch(page.Text)
		require.NotNil(t, match, name)
		return number(t, match[1])
	}
	idle, machine, ended, spoke := part("an agent without objects"), part("each Machine"), part("each ended claim"), part("each spoke")

	rows := regexp.MustCompile(`\| ([\d,]+)[^|]* \| ([\d,]+)[^|]* \| ([\d,]+) MiB \| (\d+)Mi \| (\d)Gi`).FindAllStringSubmatch(page.Text, -1)
	require.Greater(t, len(rows), 3)
	for _, row := range rows {
		machines, spokes, peak := number(t, row[1]), number(t, row[2]), number(t, row[3])
		require.InDelta(t, math.Round(idle+(machines*(machine+ended)+spokes*spoke)/1024), peak, 1, row[0])
		require.GreaterOrEqual(t, number(t, row[4]), peak, row[0])
		const callers, allEnded, identity = 2048, 313, 16 // what all callers can occupy, all ended claims, each identity
		require.GreaterOrEqual(t, number(t, row[5])*1024, peak+callers+allEnded+18*identity, row[0])
	}
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	value, err := strconv.ParseFloat(strings.ReplaceAll(text, ",", ""), 64)
	require.NoError(t, err)
	return value
}
