// Package informers follows all objects of a kind, for tests that record what happened to them.
package informers

import (
	"context"
	"fmt"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Follow calls see for each object of the kind that exists, appears or changes, and gone for each
// that disappears, with its last known state. It makes one call at a time and returns once the
// existing objects have been seen. The calls end with the cache, which must be running; ctx only
// bounds the start. The objects are the cache's and must not be changed.
func Follow[T client.Object](ctx context.Context, in cache.Cache, kind T, see, gone func(T)) error {
	informer, err := in.GetInformer(ctx, kind)
	if err != nil {
		return fmt.Errorf("watching %T: %w", kind, err)
	}
	call := func(f func(T), object any) {
		if tombstone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
			object = tombstone.Obj
		}
		if typed, ok := object.(T); ok {
			f(typed)
		}
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { call(see, object) },
		UpdateFunc: func(_, object any) { call(see, object) },
		DeleteFunc: func(object any) { call(gone, object) },
	})
	if err != nil {
		return fmt.Errorf("watching %T: %w", kind, err)
	}
	if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return fmt.Errorf("watching %T: %w", kind, context.Cause(ctx))
	}
	return nil
}
