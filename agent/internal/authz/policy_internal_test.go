package authz

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
)

// The file is read in a goroutine of its own.
func TestAPolicyFileThatPanicsLeavesTheLastValidOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(content string) { require.NoError(t, os.WriteFile(path, []byte(content), 0o600)) }
	write("identities: []")
	file, err := LoadPolicyFile(path, "karpenter-capi", logr.Discard())
	require.NoError(t, err)
	before, parse := file.Current(), file.parse
	panicked := 0
	file.parse = func([]byte) (*Policy, error) {
		panicked++
		panic("a bug")
	}
	write("clusters: []")
	for range 3 {
		require.ErrorContains(t, file.load(), "a bug")
	}
	require.Equal(t, 1, panicked, "each panic is logged and counted")
	require.Same(t, before, file.Current())
	file.parse = parse
	write("clusters: [] # again")
	require.NoError(t, file.load())
	require.NotSame(t, before, file.Current())
}
