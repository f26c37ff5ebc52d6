package ports

import (
	"net"
	"strconv"
	"testing"
)

func TestTwoPoolsNeverGetTheSamePort(t *testing.T) {
	var a, b Pool
	defer a.Release()
	defer b.Release()
	seen := map[int]bool{}
	for i := range 40 {
		pool := &a
		if i%2 == 0 {
			pool = &b
		}
		port, err := pool.Reserve()
		if err != nil {
			t.Fatal(err)
		}
		if seen[port] {
			t.Fatalf("port %d was reserved twice", port)
		}
		seen[port] = true
	}
}

func TestAReservedPortCanBeListenedOn(t *testing.T) {
	var pool Pool
	defer pool.Release()
	port, err := pool.Reserve()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	if free(port) {
		t.Errorf("port %d counts as free although a socket listens on it", port)
	}
}
