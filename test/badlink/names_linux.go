package badlink

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Names are names of hosts that are known to this program, which must be [Apart], and to what it starts.
type Names struct{ file *os.File }

// hostsSize is the size of the file that names are in. It never changes, so that one write replaces all of it: a reader never finds less.
const hostsSize = 4096

// NewNames takes the place of /etc/hosts. Of its entries only localhost is kept.
func NewNames() (*Names, error) {
	const hosts = "/etc/hosts"
	file, err := os.CreateTemp("", "badlink-hosts-*")
	if err != nil {
		return nil, err
	}
	n := &Names{file: file}
	err = file.Chmod(0o644)
	if err == nil {
		err = n.Set("localhost", netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	if err == nil {
		err = unix.Mount(file.Name(), hosts, "", unix.MS_BIND, "")
	}
	// The mount keeps it.
	if removeErr := os.Remove(file.Name()); err == nil {
		err = removeErr
	}
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("replacing %s: %w", hosts, err)
	}
	return n, nil
}

// Set has the name, and no other but localhost, resolve to the address. A program in Go looks at the file again after five seconds.
func (n *Names) Set(name string, address netip.Addr) error {
	text := fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", address, name)
	if len(text) > hostsSize {
		return fmt.Errorf("the name %.20s… is too long", name)
	}
	_, err := n.file.WriteAt(bytes.Join([][]byte{[]byte(text), []byte(strings.Repeat("\n", hostsSize-len(text)))}, nil), 0)
	return err
}
