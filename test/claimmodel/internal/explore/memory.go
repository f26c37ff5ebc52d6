package explore

import "slices"

// fingerprints is a set of 64-bit keys. Two states with the same key would count as one: with n
// states the odds are n²/2⁶⁵, less than one in 10,000 for 50 million.
type fingerprints struct {
	slots []uint64 // zero is free
	mask  uint64
	used  int
}

func newFingerprints(expected int) *fingerprints {
	size := 1 << 10
	for size < min(expected, 1<<20)*2 {
		size <<= 1
	}
	return &fingerprints{slots: make([]uint64, size), mask: uint64(size - 1)}
}

// add reports whether the key is new.
func (f *fingerprints) add(key uint64) bool {
	if key == 0 {
		key = 1
	}
	for i := key & f.mask; ; i = (i + 1) & f.mask {
		switch f.slots[i] {
		case key:
			return false
		case 0:
			f.slots[i] = key
			if f.used++; f.used*3 > len(f.slots)*2 {
				f.grow()
			}
			return true
		}
	}
}

func (f *fingerprints) grow() {
	old := f.slots
	f.slots = make([]uint64, len(old)*2)
	f.mask = uint64(len(f.slots) - 1)
	for _, key := range old {
		if key == 0 {
			continue
		}
		i := key & f.mask
		for f.slots[i] != 0 {
			i = (i + 1) & f.mask
		}
		f.slots[i] = key
	}
}

// frontier is a queue that frees its memory as it is read.
type frontier[S any] struct {
	chunks   [][]S
	from, to int // within the first and the last chunk
}

const chunkLength = 1 << 12

func (f *frontier[S]) push(s *S) {
	if len(f.chunks) == 0 || f.to == chunkLength {
		f.chunks = append(f.chunks, make([]S, chunkLength))
		f.to = 0
	}
	f.chunks[len(f.chunks)-1][f.to] = *s
	f.to++
}

func (f *frontier[S]) more() bool {
	return len(f.chunks) > 1 || len(f.chunks) == 1 && f.from < f.to
}

func (f *frontier[S]) pop() S {
	s := f.chunks[0][f.from]
	if f.from++; f.from == chunkLength {
		f.chunks, f.from = f.chunks[1:], 0
	}
	return s
}

// history records how each state was first reached.
type history struct {
	parents []uint32
	acts    []Act
}

func (h *history) len() int { return len(h.parents) }

func (h *history) push(parent int, act Act) {
	h.parents = append(h.parents, uint32(parent))
	h.acts = append(h.acts, act)
}

// trace returns the steps to state i.
func (h *history) trace(i int, describe func(Act) string) []string {
	var steps []string
	for ; i != 0; i = int(h.parents[i]) {
		steps = append(steps, describe(h.acts[i]))
	}
	slices.Reverse(steps)
	return steps
}
