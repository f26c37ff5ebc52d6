package limits

import (
	"container/list"
	"maps"
	"slices"
	"sync"
)

// handshakes are the connections whose identity is not known yet. Anyone who reaches the port can open them, so a new one is never refused,
// which would let those who never end their handshake keep out everybody else: when there are too many, the oldest gives way of the
// source that has the most.
type handshakes struct {
	mu sync.Mutex
	// pending are the [*handshake]s, oldest first.
	pending *list.List
	from    map[string]int
}

type handshake struct {
	source string
	drop   func()
}

func newHandshakes() *handshakes { return &handshakes{pending: list.New(), from: map[string]int{}} }

// begin adds a connection from a source, to be dropped by the function. It returns what to call when its identity is known, or when it has
// ended, and whether another was dropped.
func (h *handshakes) begin(source string, drop func()) (end func(), dropped bool) {
	h.mu.Lock()
	place := h.pending.PushBack(&handshake{source, drop})
	h.from[source]++
	var yields *handshake
	if h.pending.Len() > unknownConnections {
		oldest := h.oldestOfMost()
		yields = of(oldest)
		h.remove(oldest)
	}
	h.mu.Unlock()
	if yields != nil {
		yields.drop()
	}
	return sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.remove(place)
	}), yields != nil
}

func of(place *list.Element) *handshake {
	h, _ := place.Value.(*handshake) // nothing else is in the list
	return h
}

// oldestOfMost is the oldest of the source that has the most; of several such sources, the oldest of all. h.mu is held.
func (h *handshakes) oldestOfMost() *list.Element {
	most := slices.Max(slices.Collect(maps.Values(h.from)))
	place := h.pending.Front()
	for h.from[of(place).source] < most {
		place = place.Next()
	}
	return place
}

// remove does nothing to what has been removed. h.mu is held.
func (h *handshakes) remove(place *list.Element) {
	source, before := of(place).source, h.pending.Len()
	h.pending.Remove(place)
	if h.pending.Len() == before {
		return
	}
	if h.from[source]--; h.from[source] == 0 {
		delete(h.from, source)
	}
}
