package limits

// Sum limits how much of something all its owners together may have, by the rule of the sums of all
// callers: the owner with the most is the first to get no more.
type Sum[N int | int64] struct {
	// Limit is how much all owners together may have. 0 means no limit.
	Limit N
	// Assured is how much each owner may have, whatever others have. It may come on top of the
	// limit.
	Assured N
}

// Full reports whether an owner that has own of the total may have no more.
func (s Sum[N]) Full(own, total N) bool {
	return s.Limit > 0 && !mayGrow(own, 1, s.Assured, s.Limit-total)
}

// Near reports whether an owner that has own of the total has nine tenths of what it may have.
func (s Sum[N]) Near(own, total N) bool { return s.Full(own+own/9, total) }
