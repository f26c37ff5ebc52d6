package main

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func source(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("..")
	require.NoError(t, err)
	return path
}

func TestEveryMutantApplies(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants {
		assert.False(t, names[m.name], "two mutants are called %q", m.name)
		names[m.name] = true
		_, err := m.overlay(source(t), t.TempDir())
		assert.NoError(t, err)
	}
}
