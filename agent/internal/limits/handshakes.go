package limits

import (
	"container/list"
	"maps"
	"slices"
	"sync"
)

// handshakes are the connections whose identity is not known yet. Anyone who can reach the port can
// open them. New connections are never rejected: otherwise clients that never finish their
// handshake could lock out all others. Instead, when there are too many, the oldest connection of
// the source with the most connections is dropped.
type handshakes struct {
	mu sync.Mutex
	// pending holds [*handshake] elements, oldest first.
	pending *list.List
	from    map[string]int
}

type handshake struct {
	source string
	drop   func()
}

func newHandshakes() *handshakes { return &handshakes{pending: list.New(), from: map[string]int{}} }

// begin adds a connection from a source. The drop function closes it. begin returns a function to
// call when the connection's identity is known or the connection has ended, and whether it dropped
// another connection.
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
	h, _ := place.Value.(*handshake) // the list holds nothing else
	return h
}

// oldestOfMost returns the oldest connection of the source with the most connections. Among several
// such sources it returns the oldest connection of all. h.mu must be held.
func (h *handshakes) oldestOfMost() *list.Element {
	most := slices.Max(slices.Collect(maps.Values(h.from)))
	place := h.pending.Front()
	for h.from[of(place).source] < most {
		place = place.Next()
	}
	return place
}

// remove does nothing if the element has already been removed. h.mu must be held.
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
