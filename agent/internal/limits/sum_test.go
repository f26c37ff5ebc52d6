package limits_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
)

func TestTheOwnerWithTheMostIsTheFirstToGetNoMore(t *testing.T) {
	sum := limits.Sum[int]{Limit: 1000, Assured: 10}
	for name, c := range map[string]struct {
		own, total int
		full, near bool
	}{
		"nothing":                           {0, 0, false, false},
		"alone, half of all but one":        {499, 499, false, true},
		"alone, half of all":                {500, 500, true, true},
		"alone, nine tenths of the half":    {475, 475, false, true},
		"alone, less":                       {470, 470, false, false},
		"one of many that have much":        {58, 942, true, true},
		"less than others":                  {57, 942, false, true},
		"few, when none are left":           {9, 2000, false, true},
		"very few, when none are left":      {8, 2000, false, false},
		"what is assured, and none is left": {10, 2000, true, true},
	} {
		require.Equal(t, c.full, sum.Full(c.own, c.total), name)
		require.Equal(t, c.near, sum.Near(c.own, c.total), name)
	}
	none := limits.Sum[int64]{Assured: 10}
	require.False(t, none.Full(1<<60, 1<<62))
	require.False(t, none.Near(1<<60, 1<<62))
}
