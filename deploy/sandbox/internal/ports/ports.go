// Package ports reserves TCP ports on the loopback interface for servers that are started and
// restarted later.
//
// Ports come from below the kernel's range for outgoing connections, so that no such connection
// occupies a port while its server is down. A file lock holds each port, so that no two sandboxes
// get the same one.
package ports

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/gofrs/flock"
)

const (
	lowest = 20000
	// highest is below the default range for outgoing connections on Linux, the BSDs and macOS.
	highest = 32000
)

// ErrNoneFree means that every port tried was in use.
var ErrNoneFree = errors.New("no free port")

// Pool is a set of reserved ports. The zero value is ready to use; it is not safe for concurrent
// use.
type Pool struct {
	locks []*flock.Flock
}

// Reserve returns a port on which nothing listens and that no other pool of this user holds, in
// this process or another.
func (p *Pool) Reserve() (int, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("karpenter-capi-ports-%d", os.Getuid()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, err
	}
	for range 1000 {
		port := lowest + rand.IntN(highest-lowest) //nolint:gosec // spreads the tries; nothing depends on it being secret
		lock := flock.New(filepath.Join(dir, strconv.Itoa(port)))
		if locked, err := lock.TryLock(); err != nil {
			return 0, fmt.Errorf("locking port %d: %w", port, err)
		} else if !locked {
			continue
		}
		if !free(port) {
			_ = lock.Unlock()
			continue
		}
		p.locks = append(p.locks, lock)
		return port, nil
	}
	return 0, fmt.Errorf("%w between %d and %d", ErrNoneFree, lowest, highest)
}

// Release releases all ports.
func (p *Pool) Release() {
	for _, lock := range p.locks {
		_ = lock.Unlock()
	}
	p.locks = nil
}

// free reports whether a server could listen on the port. A server that listens on all interfaces
// also makes it unavailable.
func free(port int) bool {
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))) //nolint:noctx // closed at once
	if err != nil {
		return false
	}
	_ = listener.Close()
	return true
}
