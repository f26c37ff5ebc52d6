package timeline_test

import (
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"

	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

func TestExcessIsThatOfTheMedianRounds(t *testing.T) {
	seconds := func(values ...int) []time.Duration {
		return lo.Map(values, func(s, _ int) time.Duration { return time.Duration(s) * time.Second })
	}
	for name, c := range map[string]struct {
		rounds, baseline []time.Duration
		excess, noise    time.Duration
	}{
		"one round":                     {seconds(9), seconds(8), time.Second, 0},
		"in any order":                  {seconds(30, 9, 10), seconds(9, 8, 7), 2 * time.Second, 2 * time.Second},
		"faster than the baseline":      {seconds(7, 7, 7), seconds(8, 8, 9), -time.Second, time.Second},
		"a slow round of the baseline":  {seconds(10, 10, 10), seconds(8, 8, 20), 2 * time.Second, 12 * time.Second},
		"an even number: the lower one": {seconds(10, 12), seconds(8, 9), 2 * time.Second, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			excess, noise := timeline.Excess(c.rounds, c.baseline)
			assert.Equal(t, c.excess, excess)
			assert.Equal(t, c.noise, noise)
		})
	}
}
