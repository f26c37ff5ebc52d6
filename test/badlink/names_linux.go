package badlink

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Names holds host names known to this program, which must have called [Apart], and to its child
// processes.
type Names struct{ file *os.File }

// hostsSize is the size of the file with the names. It is constant, so that one write replaces the
// whole content and readers never see a truncated file.
const hostsSize = 4096

// NewNames replaces /etc/hosts. Of its entries it only keeps localhost.
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
	// The mount keeps the file.
	if removeErr := os.Remove(file.Name()); err == nil {
		err = removeErr
	}
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("replacing %s: %w", hosts, err)
	}
	return n, nil
}

// Set makes the name resolve to the address, and removes all other names but localhost. A Go
// program re-reads the file after five seconds.
func (n *Names) Set(name string, address netip.Addr) error {
	text := fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", address, name)
	if len(text) > hostsSize {
		return fmt.Errorf("the name %.20s… is too long", name)
	}
	_, err := n.file.WriteAt(bytes.Join([][]byte{[]byte(text), []byte(strings.Repeat("\n", hostsSize-len(text)))}, nil), 0)
	return err
}
