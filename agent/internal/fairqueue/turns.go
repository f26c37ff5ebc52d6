package fairqueue

import "slices"

// Turns are items that wait, each for its owner. Owners with waiting items take turns, however many
// items each of them has. The items of one owner are handed out in the order of their arrival,
// unless an item is to come first. The zero value has none. It is not safe for concurrent use.
type Turns[O, I comparable] struct {
	// waiting has the items of each owner that has any, in order.
	waiting map[O][]I
	// first is how many of an owner's items, at the beginning, are to come before its other ones.
	first map[O]int
	// next has the keys of waiting, in the order of their turns.
	next []O
	len  int
}

// Push adds an item. An owner without other items comes after all that have some.
func (t *Turns[O, I]) Push(owner O, item I) {
	if len(t.waiting[owner]) == 0 {
		t.next = append(t.next, owner)
	}
	if t.waiting == nil {
		t.waiting = map[O][]I{}
	}
	t.waiting[owner] = append(t.waiting[owner], item)
	t.len++
}

// PushFirst adds an item that comes before its owner's other ones, and after those that were added
// by PushFirst earlier.
func (t *Turns[O, I]) PushFirst(owner O, item I) {
	t.Push(owner, item)
	items := t.waiting[owner][t.first[owner]:]
	copy(items[1:], items)
	items[0] = item
	if t.first == nil {
		t.first = map[O]int{}
	}
	t.first[owner]++
}

// removed records that the item of an owner at the given position is gone.
func (t *Turns[O, I]) removed(owner O, at int) {
	t.len--
	switch first := t.first[owner]; {
	case at >= first:
	case first == 1:
		delete(t.first, owner)
	default:
		t.first[owner]--
	}
}

// Len returns how many items wait.
func (t *Turns[O, I]) Len() int { return t.len }

// Next returns the item whose turn it is. There must be one.
func (t *Turns[O, I]) Next() I { return t.waiting[t.next[0]][0] }

// Pass lets the owner whose turn it is keep its items, and wait for its next turn. There must be
// one.
func (t *Turns[O, I]) Pass() { t.next = append(t.next[1:], t.next[0]) }

// Pop removes the item whose turn it is, and returns it. There must be one.
func (t *Turns[O, I]) Pop() I {
	owner := t.next[0]
	t.next = t.next[1:]
	item := t.waiting[owner][0]
	if rest := t.waiting[owner][1:]; len(rest) > 0 {
		t.waiting[owner] = rest
		t.next = append(t.next, owner)
	} else {
		delete(t.waiting, owner)
	}
	t.removed(owner, 0)
	return item
}

// Remove removes an item that waits no more. An item that is not waiting is ignored.
func (t *Turns[O, I]) Remove(owner O, item I) {
	at := slices.Index(t.waiting[owner], item)
	if at < 0 {
		return
	}
	if rest := slices.Delete(t.waiting[owner], at, at+1); len(rest) > 0 {
		t.waiting[owner] = rest
	} else {
		delete(t.waiting, owner)
		turn := slices.Index(t.next, owner)
		t.next = slices.Delete(t.next, turn, turn+1)
	}
	t.removed(owner, at)
}
