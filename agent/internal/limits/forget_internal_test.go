package limits

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"
)

// A look at all callers is worth it only if there are many new ones.
func TestIdleCallersAreForgottenWithoutALookAtAllForEachNewOne(t *testing.T) {
	l, err := New(Defaults(), clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), nil)
	require.NoError(t, err)
	begin := func(i int) *Call {
		call, err := l.Begin(strconv.Itoa(i), "/m", false)
		require.NoError(t, err)
		return call
	}
	var calls []*Call
	for i := range enough + 1 { // the last one looks, and finds none that is idle
		calls = append(calls, begin(i))
	}
	for _, call := range calls {
		call.End()
	}
	l.clock = clocktesting.NewFakePassiveClock(time.Unix(100000, 0))
	for i := range enough - 1 {
		begin(enough + 1 + i).End()
	}
	require.Len(t, l.callers, 2*enough, "none is looked for before there are twice as many")
	begin(-1).End()
	require.Less(t, len(l.callers), 2*enough, "those that were idle for long are forgotten")
	require.Contains(t, l.callers, "-1")
}
