package e2e_test

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
)

func TestEveryServerListensOnLoopbackOnly(t *testing.T) {
	shows(t, "every server listens on loopback only")
	var all []netip.AddrPort
	for _, component := range w.Sandbox.State().Components {
		listening, err := listeners(component.PID)
		require.NoError(t, err, component.Name)
		for _, address := range listening {
			require.True(t, address.Addr().IsLoopback(), "%s listens on %s", component.Name, address)
		}
		all = append(all, listening...)
	}
	require.Greater(t, len(all), len(w.Sandbox.State().Components), "the test has to see what it is looking for")
}

// This tests the detection itself: a socket that listens on all interfaces is detected as such.
func TestListenersAreSeen(t *testing.T) {
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "tcp", ":0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, listener.Close()) })
	address, err := netip.ParseAddrPort(listener.Addr().String())
	require.NoError(t, err)
	listening, err := listeners(os.Getpid())
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(listening, func(a netip.AddrPort) bool {
		return a.Port() == address.Port() && !a.Addr().IsLoopback()
	}), "%v", listening)
}

// listeners returns the TCP addresses on which a process listens.
func listeners(pid int) ([]netip.AddrPort, error) {
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	descriptors, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return nil, err
	}
	mine := map[string]bool{}
	for _, d := range descriptors {
		// The descriptor may have been closed meanwhile.
		target, err := os.Readlink(filepath.Join(proc, "fd", d.Name()))
		if inode, socket := strings.CutPrefix(target, "socket:["); err == nil && socket {
			mine[strings.TrimSuffix(inode, "]")] = true
		}
	}
	var found []netip.AddrPort
	for _, table := range []string{"tcp", "tcp6"} {
		addresses, err := listening(filepath.Join(proc, "net", table), mine)
		if err != nil {
			return nil, err
		}
		found = append(found, addresses...)
	}
	return found, nil
}

// listening parses a kernel table of sockets, and returns the addresses of the listening ones with
// one of the inodes.
func listening(table string, inodes map[string]bool) ([]netip.AddrPort, error) {
	const stateListen = "0A"
	file, err := os.Open(table)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	var found []netip.AddrPort
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[3] != stateListen || !inodes[fields[9]] {
			continue
		}
		address, err := parseAddress(fields[1])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", table, err)
		}
		found = append(found, address)
	}
	return found, nil
}

// parseAddress parses an address in the kernel's notation: words of four bytes in host byte order,
// a colon, the port.
func parseAddress(text string) (netip.AddrPort, error) {
	address, port, _ := strings.Cut(text, ":")
	words, err := hex.DecodeString(address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	bytes := lo.FlatMap(lo.Chunk(words, 4), func(word []byte, _ int) []byte {
		return binary.NativeEndian.AppendUint32(nil, binary.BigEndian.Uint32(word))
	})
	addr, ok := netip.AddrFromSlice(bytes)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("%q is no address", text)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), nil
}
