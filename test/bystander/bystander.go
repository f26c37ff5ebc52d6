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
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// Bystander observes the Nodes, NodeClaims and pods that a spoke had when the observation began. It
// is safe for concurrent use.
type Bystander struct {
	stop func()

	mu    sync.Mutex
	seen  []string
	known map[types.UID]bool
}

// Watch observes the environment's spoke until ctx is done or [Bystander.Stop] is called.
func Watch(ctx context.Context, w *testenv.Env) (*Bystander, error) {
	informers, err := cache.New(w.Sandbox.SpokeConfig(), cache.Options{Scheme: testenv.Scheme()})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { _ = informers.Start(ctx) })
	b := &Bystander{known: map[types.UID]bool{}, stop: func() {
		cancel()
		watching.Wait()
	}}
	for _, kind := range []client.Object{&corev1.Node{}, &karpenterv1.NodeClaim{}, &corev1.Pod{}} {
		if err := b.follow(ctx, informers, kind); err != nil {
			b.stop()
			return nil, fmt.Errorf("watching %T: %w", kind, err)
		}
	}
	return b, nil
}

func (b *Bystander) follow(ctx context.Context, informers cache.Cache, kind client.Object) error {
	informer, err := informers.GetInformer(ctx, kind)
	if err != nil {
		return err
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(object any, existed bool) {
			if o, ok := object.(client.Object); ok && existed {
				b.mu.Lock()
				defer b.mu.Unlock()
				b.known[o.GetUID()] = true
			}
		},
		UpdateFunc: func(before, now any) { b.changed(before, now) },
		DeleteFunc: func(object any) {
			if last, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			b.tell(object, "was deleted")
		},
	})
	if err != nil {
		return err
	}
	if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return context.Cause(ctx)
	}
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

func (b *Bystander) tell(object any, what string) {
	o, ok := object.(client.Object)
	if !ok {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.known[o.GetUID()] {
		b.seen = append(b.seen, fmt.Sprintf("%s %T %s %s", time.Now().Format(time.TimeOnly), o, o.GetName(), what))
	}
}

func (b *Bystander) changed(before, now any) {
	was, isObject := before.(client.Object)
	is, _ := now.(client.Object)
	if !isObject {
		return
	}
	switch {
	case was.GetUID() != is.GetUID():
		b.tell(was, "was deleted, and made again")
	case was.GetDeletionTimestamp().IsZero() && !is.GetDeletionTimestamp().IsZero():
		b.tell(is, "is being deleted")
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
