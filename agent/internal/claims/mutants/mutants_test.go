package main

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func source(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../../..")
	require.NoError(t, err)
	return path
}

func TestEveryMutantApplies(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants {
		assert.False(t, names[m.name], "two mutants are called %q", m.name)
		names[m.name] = true
		r := runner{root: source(t)}
		_, err := m.overlay(r.sources(), t.TempDir())
		require.NoError(t, err)
		_, err = r.home(m.test)
		require.NoError(t, err)
		assert.Equal(t, m.world == "", m.violation == "", m.name)
	}
}

// TestTheQuickestMutantsAreCaught tries those that a few histories suffice for; `make mutants` tries all.
func TestTheQuickestMutantsAreCaught(t *testing.T) {
	r := runner{root: source(t), budget: 5 * time.Minute, rounds: rounds[:2]}
	tried := 0
	for _, m := range mutants {
		if !m.smoke {
			continue
		}
		tried++
		t.Run(m.name, func(t *testing.T) {
			found, err := r.try(t.Context(), m)
			require.NoError(t, err)
			t.Logf("caught in %d histories: %s", found.histories, found.invariant)
		})
	}
	assert.GreaterOrEqual(t, tried, 4)
}
