package claims

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

// recovered runs work on one node group and turns a panic into a [*panics.Error], because one
// group's objects must not end the process that serves all others. The context's logger names the
// group.
func recovered(ctx context.Context, do func() error) error {
	return panics.Confined(log.FromContext(ctx), panicsTotal, "work on a node group panicked", do)
}

// panicBackoff returns how much longer a group whose step panicked is left alone, and why; zero
// when it is not. Calls are answered with the error meanwhile. lock is held.
func (g *group) panicBackoff() (time.Duration, error) {
	left := min(g.resting.Sub(g.engine.Clock.Now()), longestRetry) // more if the clock was set back
	if left <= 0 {
		return 0, nil
	}
	return left, g.panicked
}

// notePanic leaves the group alone after a panic. The time grows with the number of panics in a
// row. lock is held.
func (g *group) notePanic(err *panics.Error) time.Duration {
	g.panicked = err
	g.panics++
	pause := min(time.Second<<min(g.panics-1, 10), longestRetry)
	g.resting = g.engine.Clock.Now().Add(pause)
	return pause
}
