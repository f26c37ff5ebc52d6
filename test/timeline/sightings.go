package timeline

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/informers"
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
	see := func(gone bool) func(T) {
		return func(object T) {
			if is(object, gone) {
				s.see(object.GetName())
			}
		}
	}
	if err := informers.Follow(ctx, in, kind, see(false), see(true)); err != nil {
		return nil, err
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
