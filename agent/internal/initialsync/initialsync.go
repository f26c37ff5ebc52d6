// Package initialsync detects when a controller has processed every object that existed when it
// started.
package initialsync

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
)

// Tracker calls a function once every expected object has been processed. It is safe for concurrent
// use.
type Tracker struct {
	complete func()

	mu       sync.Mutex
	seen     map[types.NamespacedName]struct{}
	missing  map[types.NamespacedName]struct{}
	expected bool
	finished bool
}

// New returns a tracker that calls complete once.
func New(complete func()) *Tracker {
	return &Tracker{complete: complete, seen: map[types.NamespacedName]struct{}{}}
}

// SeenUnless calls [Tracker.Seen] if err is nil. A view is incomplete while an object could not be
// read: its readers would assume that the object is gone.
func (t *Tracker) SeenUnless(err error, key types.NamespacedName) {
	if err == nil {
		t.Seen(key)
	}
}

// Seen records that an object has been processed, whatever the result. One unusable object must not
// block the others.
func (t *Tracker) Seen(key types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.finished:
	case t.expected:
		delete(t.missing, key)
		t.check()
	default:
		t.seen[key] = struct{}{}
	}
}

// Expect sets the objects that existed at the start. It must only be called once.
func (t *Tracker) Expect(keys []types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expected = true
	t.missing = make(map[types.NamespacedName]struct{}, len(keys))
	for _, key := range keys {
		if _, seen := t.seen[key]; !seen {
			t.missing[key] = struct{}{}
		}
	}
	t.check()
}

func (t *Tracker) check() {
	if len(t.missing) > 0 || t.finished {
		return
	}
	t.finished, t.seen, t.missing = true, nil, nil
	t.complete()
}
