package timeline

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Sightings records when objects of a kind were first seen as described, for kinds and states that
// a [Recorder] does not follow. Its times are of the same clock as a recorder's, and are likewise
// those of watch events. Its methods are safe for concurrent use.
type Sightings struct {
	mu sync.Mutex
	at map[string]time.Time
}

// Sight records the first event about each object for which is returns true. gone reports that the
// object no longer exists. Existing objects that are as described count as seen at the time of the
// call. The recording ends with the cache; ctx only bounds the start.
func Sight[T client.Object](ctx context.Context, in cache.Cache, kind T, is func(object T, gone bool) bool) (*Sightings, error) {
	s := &Sightings{at: map[string]time.Time{}}
	informer, err := in.GetInformer(ctx, kind)
	if err != nil {
		return nil, fmt.Errorf("watching %T: %w", kind, err)
	}
	see := func(object any, gone bool) {
		if tombstone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
			object = tombstone.Obj
		}
		if typed, ok := object.(T); ok && is(typed, gone) {
			s.see(typed.GetName())
		}
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { see(object, false) },
		UpdateFunc: func(_, object any) { see(object, false) },
		DeleteFunc: func(object any) { see(object, true) },
	})
	if err != nil {
		return nil, fmt.Errorf("watching %T: %w", kind, err)
	}
	if !toolscache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return nil, fmt.Errorf("watching %T: %w", kind, context.Cause(ctx))
	}
	return s, nil
}

func (s *Sightings) see(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.at[name]; !known {
		s.at[name] = time.Now()
	}
}

// Of returns when the object with the name was first seen as described, and false if it was not.
func (s *Sightings) Of(name string) (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, seen := s.at[name]
	return at, seen
}

// Times returns when each object was first seen as described, in order.
func (s *Sightings) Times() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.at), time.Time.Compare)
}
