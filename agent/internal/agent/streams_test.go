package agent_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// TestWatchersOfTwoAgents starts and stops watchers of two agents. Meanwhile one agent stops and
// another starts, and claims of two holders and of another Cluster change. What each watcher
// receives must be ordered, complete, without gaps, and its own.
func TestWatchersOfTwoAgents(t *testing.T) {
	e, config := newHub(t)
	config.Options.WatchBuffer = 1                      // makes some watchers too slow
	config.Options.TombstoneRetention = 2 * time.Second // makes the agents forget claims
	config.Options.FailureCoolDown = time.Second
	e.set(func() { e.free = true })
	plane.Create(t, capitest.NewCluster(e.namespace, "other"))
	for name, cluster := range map[string]string{"workers": "spoke", "more": "spoke", "others": "other"} {
		plane.Create(t, capitest.NewInfrastructureTemplate(e.namespace, name, nil))
		plane.Create(t, capitest.NewMachineDeployment(e.namespace, name, cluster, 1))
	}
	lives := []life{
		{e.Cluster(), "karpenter", []string{e.namespace + "/workers", e.namespace + "/more"}},
		{e.Cluster(), "cluster-autoscaler", []string{e.namespace + "/more", e.namespace + "/workers"}},
		{&agentv1alpha1.ClusterRef{Namespace: e.namespace, Name: "other"}, "karpenter", []string{e.namespace + "/others"}},
	}

	var watching []*watching
	begin := func(name string) (*running, *client.Client) {
		r := start(t, config)
		admin := r.as("spiffe://karpenter-capi/admin")
		for who, c := range map[string]*client.Client{"an administrator": admin, "the spoke": r.client(e.namespace, "spoke")} {
			o := streams.Options{Patience: patience, ListEvery: time.Second}
			for _, w := range streams.All(who+" at the "+name+" agent", c, e.Cluster(), o, "karpenter", "cluster-autoscaler") {
				watching = append(watching, watch(t, w))
			}
		}
		return r, admin
	}
	ending, first := begin("first")
	ended := watching
	watching = nil
	_, second := begin("second")
	live(t, "early", lives, first, second)
	for _, w := range ended {
		w.end()
	}
	ending.stop()
	_, third := begin("third")
	live(t, "late", lives, second, third)

	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	for _, w := range watching {
		w.stay()
	}
	for _, w := range watching {
		require.NoError(t, w.watcher.Settled(ctx))
		w.end()
	}
	var sum streams.Figures
	for _, w := range append(ended, watching...) {
		figures, wrong := w.watcher.Check()
		assert.Empty(t, wrong)
		sum.Add(figures)
	}
	t.Log(&sum)
	assert.Greater(t, sum.Streams, len(ended)+len(watching), "watchers came again")
	assert.Positive(t, sum.Events)
	assert.Positive(t, sum.Lists)
}

// watching is a watcher that restarts until stay is called.
type watching struct {
	watcher   streams.Watcher
	stay, end func()
}

func watch(t *testing.T, watcher streams.Watcher) *watching {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	staying := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-staying:
				watcher.Follow(ctx)
			default:
				visit, leave := context.WithTimeout(ctx, time.Duration(300+rand.IntN(1500))*time.Millisecond)
				watcher.Follow(visit)
				leave()
			}
			if ctx.Err() != nil {
				return
			}
		}
	})
	w := &watching{watcher: watcher, stay: sync.OnceFunc(func() { close(staying) }), end: func() {
		cancel()
		done.Wait()
	}}
	t.Cleanup(w.end)
	return w
}

// life is what a holder does.
type life struct {
	cluster *agentv1alpha1.ClusterRef
	holder  string
	groups  []string
}

// live makes the holders create claims, and release most of them, through random agents.
func live(t *testing.T, when string, lives []life, agents ...*client.Client) {
	t.Helper()
	var holders sync.WaitGroup
	for n, l := range lives {
		holders.Go(func() {
			for i := range 8 {
				id := fmt.Sprintf("%s-%d-%d", when, n, i)
				call(t, agents, func(c *client.Client) error {
					_, err := c.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
						Cluster: l.cluster, ClaimId: id, Holder: l.holder, Candidates: l.groups,
					})
					return err
				})
				if i%3 == 0 {
					continue
				}
				call(t, agents, func(c *client.Client) error {
					_, err := c.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: l.cluster, ClaimId: id})
					return err
				})
			}
		})
	}
	holders.Wait()
}

// call calls a random agent, and retries if the error allows it.
func call(t *testing.T, agents []*client.Client, do func(*client.Client) error) {
	t.Helper()
	eventually(t, "an agent answers", func(context.Context) (bool, error) {
		err := do(agents[rand.IntN(len(agents))])
		if agenterrors.IsConflict(err) || agenterrors.IsUnavailable(err) || agenterrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
}
