package server

// Undecided returns how many calls of connections with certificates are neither admitted nor
// refused.
func (s *Server) Undecided() int {
	sum := 0
	for c := range s.remote.current() {
		c.undecided.mu.Lock()
		sum += c.undecided.calls
		c.undecided.mu.Unlock()
	}
	return sum
}
