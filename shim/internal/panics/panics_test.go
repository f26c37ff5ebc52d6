package panics_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/panics"
)

func TestAPanicIsAnError(t *testing.T) {
	require.NoError(t, panics.Confined(func() error { return nil }))
	failure := errors.New("a failure")
	require.ErrorIs(t, panics.Confined(func() error { return failure }), failure)
	err := panics.Confined(func() error {
		var none map[string]int
		none["x"] = 1
		return nil
	})
	require.ErrorContains(t, err, "assignment to entry in nil map")
	require.ErrorContains(t, err, "panics_test.go", "where it happened")
}
