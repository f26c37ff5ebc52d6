// Package bystander observes Nodes, NodeClaims and pods that must not be affected.
package bystander

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/test/informers"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// Bystander observes the Nodes, NodeClaims and pods that a spoke had when the observation began. It
// is safe for concurrent use.
type Bystander struct {
	stop func()

	mu   sync.Mutex
	seen []string
}

// Watch observes the environment's spoke until ctx is done or [Bystander.Stop] is called.
func Watch(ctx context.Context, w *testenv.Env) (*Bystander, error) {
	watches, err := cache.New(w.Sandbox.SpokeConfig(), cache.Options{Scheme: testenv.Scheme()})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { _ = watches.Start(ctx) }) // it only fails if it is started twice
	b := &Bystander{stop: func() {
		cancel()
		watching.Wait()
	}}
	for _, kind := range []client.Object{&corev1.Node{}, &karpenterv1.NodeClaim{}, &corev1.Pod{}} {
		if err := b.follow(ctx, watches, kind); err != nil {
			b.stop()
			return nil, err
		}
	}
	return b, nil
}

// follow observes the objects of a kind that exist now.
func (b *Bystander) follow(ctx context.Context, watches cache.Cache, kind client.Object) error {
	began, last := false, map[client.ObjectKey]client.Object{}
	see := func(now client.Object) {
		b.mu.Lock()
		defer b.mu.Unlock()
		key := client.ObjectKeyFromObject(now)
		before, known := last[key]
		switch {
		case known && before.GetUID() != now.GetUID():
			b.tell(before, "was deleted, and made again")
			delete(last, key)
		case known:
			b.changed(before, now)
			last[key] = now
		case !began:
			last[key] = now
		}
	}
	gone := func(object client.Object) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if before, known := last[client.ObjectKeyFromObject(object)]; known {
			b.tell(before, "was deleted")
			delete(last, client.ObjectKeyFromObject(object))
		}
	}
	if err := informers.Follow(ctx, watches, kind, see, gone); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	began = true
	return nil
}

// Stop ends the observation.
func (b *Bystander) Stop() { b.stop() }

// Incidents returns what was observed, oldest first, with the kind and name of each object.
func (b *Bystander) Incidents() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.seen)
}

func (b *Bystander) tell(o client.Object, what string) {
	b.seen = append(b.seen, fmt.Sprintf("%s %T %s %s", time.Now().Format(time.TimeOnly), o, o.GetName(), what))
}

func (b *Bystander) changed(before, now client.Object) {
	if before.GetDeletionTimestamp().IsZero() && !now.GetDeletionTimestamp().IsZero() {
		b.tell(now, "is being deleted")
	}
	node, isNode := now.(*corev1.Node)
	old, _ := before.(*corev1.Node)
	if !isNode {
		return
	}
	drained := func(n *corev1.Node) bool {
		return n.Spec.Unschedulable || lo.ContainsBy(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == karpenterv1.DisruptedTaintKey })
	}
	// A Node that merely does not report for a while is Unknown.
	stopped := func(n *corev1.Node) bool {
		return lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionFalse
		})
	}
	if drained(node) && !drained(old) {
		b.tell(node, "is being drained")
	}
	if stopped(node) && !stopped(old) {
		b.tell(node, "was stopped: its instance is being destroyed")
	}
}
