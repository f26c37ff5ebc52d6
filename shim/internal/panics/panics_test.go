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
		var none *int
		*none = 1
		return nil
	})
	require.ErrorContains(t, err, "nil pointer dereference")
	require.ErrorContains(t, err, "panics_test.go", "where it happened")
}
