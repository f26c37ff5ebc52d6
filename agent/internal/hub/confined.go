package hub

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

// NewCache returns a constructor of caches that confine a panic to the object that causes it. All
// objects of a kind go through the same goroutines of client-go, where a panic would end the
// process:
//
//   - An object whose default transform panics stays as it is.
//   - An object whose index panics is not found by that index.
//   - An event handler that panics, with a controller's predicates and map functions, does not get that
//     event. If it was a change, the handler gets it once more, as a deletion and an addition: the version
//     that panics may be the one before.
//
// Handlers and functions must leave no lock held when they panic.
func NewCache(log logr.Logger) cache.NewCacheFunc {
	by := confining{log}
	return func(config *rest.Config, options cache.Options) (cache.Cache, error) {
		options.DefaultTransform = by.transform(options.DefaultTransform)
		inner, err := cache.New(config, options)
		if err != nil {
			return nil, err
		}
		return confinedCache{inner, by}, nil
	}
}

// confining confines panics to objects.
type confining struct{ log logr.Logger }

// to is to be deferred by what works on an object. It ends a panic.
func (c confining) to(object any) {
	if value := recover(); value != nil {
		key, _ := toolscache.DeletionHandlingMetaNamespaceKeyFunc(object) // else it has no name
		_ = panics.Note(c.log, panics.Objects, "an object of the hub is ignored because of a bug in the agent", value,
			"object", key, "type", fmt.Sprintf("%T", object))
	}
}

// transform returns nil for nil.
func (c confining) transform(transform toolscache.TransformFunc) toolscache.TransformFunc {
	if transform == nil {
		return nil
	}
	return func(object any) (any, error) {
		transformed, err := object, error(nil)
		func() {
			defer c.to(object)
			transformed, err = transform(object)
		}()
		return transformed, err
	}
}

type confinedCache struct {
	cache.Cache

	by confining
}

// IndexField implements [client.FieldIndexer].
func (c confinedCache) IndexField(ctx context.Context, object client.Object, field string, values client.IndexerFunc) error {
	return c.Cache.IndexField(ctx, object, field, func(object client.Object) []string {
		defer c.by.to(object)
		return values(object)
	})
}

// GetInformer implements [cache.Informers].
func (c confinedCache) GetInformer(ctx context.Context, object client.Object, options ...cache.InformerGetOption) (cache.Informer, error) {
	informer, err := c.Cache.GetInformer(ctx, object, options...)
	if err != nil {
		return nil, err
	}
	return confinedInformer{informer, c.by}, nil
}

// GetInformerForKind implements [cache.Informers].
func (c confinedCache) GetInformerForKind(
	ctx context.Context, kind schema.GroupVersionKind, options ...cache.InformerGetOption,
) (cache.Informer, error) {
	informer, err := c.Cache.GetInformerForKind(ctx, kind, options...)
	if err != nil {
		return nil, err
	}
	return confinedInformer{informer, c.by}, nil
}

type confinedInformer struct {
	cache.Informer

	by confining
}

// AddEventHandler implements [cache.Informer].
func (i confinedInformer) AddEventHandler(handler toolscache.ResourceEventHandler) (toolscache.ResourceEventHandlerRegistration, error) {
	return i.Informer.AddEventHandler(confinedHandler{handler, i.by})
}

// AddEventHandlerWithResyncPeriod implements [cache.Informer].
func (i confinedInformer) AddEventHandlerWithResyncPeriod(
	handler toolscache.ResourceEventHandler, period time.Duration,
) (toolscache.ResourceEventHandlerRegistration, error) {
	return i.Informer.AddEventHandlerWithResyncPeriod(confinedHandler{handler, i.by}, period)
}

// AddEventHandlerWithOptions implements [cache.Informer].
func (i confinedInformer) AddEventHandlerWithOptions(
	handler toolscache.ResourceEventHandler, options toolscache.HandlerOptions,
) (toolscache.ResourceEventHandlerRegistration, error) {
	return i.Informer.AddEventHandlerWithOptions(confinedHandler{handler, i.by}, options)
}

type confinedHandler struct {
	handler toolscache.ResourceEventHandler
	by      confining
}

// OnAdd implements [toolscache.ResourceEventHandler].
func (h confinedHandler) OnAdd(object any, initial bool) {
	defer h.by.to(object)
	h.handler.OnAdd(object, initial)
}

// OnUpdate implements [toolscache.ResourceEventHandler].
func (h confinedHandler) OnUpdate(before, after any) {
	if !h.changed(before, after) {
		h.OnDelete(before)
		h.OnAdd(after, false)
	}
}

// changed returns false after a panic.
func (h confinedHandler) changed(before, after any) (whole bool) {
	defer h.by.to(after)
	h.handler.OnUpdate(before, after)
	return true
}

// OnDelete implements [toolscache.ResourceEventHandler].
func (h confinedHandler) OnDelete(object any) {
	defer h.by.to(object)
	h.handler.OnDelete(object)
}
