package claimreasons_test

import (
	"flag"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
)

var addNames = flag.Bool("add-names", false, "add the names of new reasons to testdata/names.txt")

const namesFile = "testdata/names.txt"

// The file has the names that agents may have reported already.
func TestNamesAreAppendOnly(t *testing.T) {
	names := claimreasons.All()
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(names))), len(names), "a name is there twice")
	for _, name := range names {
		require.Regexp(t, "^[A-Z][A-Za-z]+$", name)
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
	require.Equal(t, frozen, names, "new names are added with: go test ./pkg/claimreasons -args -add-names")
}
