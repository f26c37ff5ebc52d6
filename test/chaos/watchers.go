package chaos

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
)

const (
	// tellWithin is how long an agent may take to send its watchers what it lists. It exceeds the
	// stall of its own watches, and its wait before it reopens one that the hub refused.
	tellWithin = 90 * time.Second
	// compareEvery is how often each watcher compares its stream with a list.
	compareEvery = 5 * time.Second
)

// watchers watch all agents, and check the events that they receive.
type watchers struct {
	byAgent map[string][]streams.Watcher
	stop    func()
}

// watchAgents starts to watch all agents, including those that do not run yet.
func watchAgents(ctx context.Context, clients map[string]*client.Client) *watchers {
	ctx, cancel := context.WithCancel(ctx)
	var following sync.WaitGroup
	w := &watchers{byAgent: map[string][]streams.Watcher{}, stop: func() {
		cancel()
		following.Wait()
	}}
	o := streams.Options{Patience: tellWithin, ListEvery: compareEvery}
	for agent, c := range clients {
		w.byAgent[agent] = streams.All(agent, c, clusterRef(), o, holder, "karpenter")
		for _, watcher := range w.byAgent[agent] {
			following.Go(func() { watcher.Follow(ctx) })
		}
	}
	return w
}

// excuse allows a claim's state to regress, because it was lost.
func (w *watchers) excuse(claim string) {
	for _, watchers := range w.byAgent {
		for _, watcher := range watchers {
			watcher.Excuse(claim)
		}
	}
}

// settled waits until the first n agents have sent all their watchers what they list.
func (w *watchers) settled(ctx context.Context, n int) error {
	var all errgroup.Group
	for i := range n {
		for _, watcher := range w.byAgent[sandbox.AgentName(i)] {
			all.Go(func() error { return watcher.Settled(ctx) })
		}
	}
	if err := all.Wait(); err != nil {
		return fmt.Errorf("watchers are not told everything: %w", err)
	}
	return nil
}

// check returns a summary of what the watchers received, and what was wrong with it.
func (w *watchers) check() (streams.Figures, []string) {
	var sum streams.Figures
	var wrong []string
	for i := range agents {
		for _, watcher := range w.byAgent[sandbox.AgentName(i)] {
			figures, its := watcher.Check()
			sum.Add(figures)
			wrong = append(wrong, its...)
		}
	}
	return sum, slices.Clip(wrong)
}
