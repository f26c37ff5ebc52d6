package scenario

import (
	"net"
	"sync"
)

// gate is a listener that can be shut, which closes every connection.
type gate struct {
	net.Listener

	mu     sync.Mutex
	closed bool
	conns  map[*gatedConn]struct{}
}

func newGate(listener net.Listener) *gate {
	return &gate{Listener: listener, conns: map[*gatedConn]struct{}{}}
}

// Accept implements [net.Listener]. Connections accepted while the gate is shut are closed.
func (g *gate) Accept() (net.Conn, error) {
	conn, err := g.Listener.Accept()
	if err != nil {
		return nil, err
	}
	gated := &gatedConn{Conn: conn, gate: g}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		_ = conn.Close() // The server detects the closed connection.
	} else {
		g.conns[gated] = struct{}{}
	}
	return gated, nil
}

func (g *gate) shut(shut bool) {
	g.mu.Lock()
	g.closed = shut
	var conns []*gatedConn
	if shut {
		for conn := range g.conns {
			conns = append(conns, conn)
		}
	}
	g.mu.Unlock()
	for _, conn := range conns {
		_ = conn.Close() // What was sent on it is lost in any case.
	}
}

type gatedConn struct {
	net.Conn

	gate *gate
}

func (c *gatedConn) Close() error {
	c.gate.mu.Lock()
	delete(c.gate.conns, c)
	c.gate.mu.Unlock()
	return c.Conn.Close()
}
