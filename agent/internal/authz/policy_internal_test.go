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
	file.parse = func([]byte) (*Policy, error) { panic("a bug") }
	write("clusters: []")
	require.ErrorContains(t, file.load(), "a bug")
	require.Same(t, before, file.Current())
	file.parse = parse
	require.NoError(t, file.load())
	require.NotSame(t, before, file.Current())
}
