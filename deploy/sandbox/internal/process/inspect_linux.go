package process

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Listeners returns the TCP addresses on which a process listens.
func Listeners(pid int) ([]netip.AddrPort, error) {
	descriptors, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return nil, err
	}
	sockets := map[string]bool{}
	for _, d := range descriptors {
		// The descriptor may have been closed meanwhile.
		if target, err := os.Readlink(d); err == nil && strings.HasPrefix(target, "socket:[") {
			sockets[strings.Trim(target, "socket:[]")] = true
		}
	}
	var listeners []netip.AddrPort
	for _, table := range []string{"tcp", "tcp6"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		for _, line := range strings.Split(string(data), "\n")[1:] {
			const local, state, inode = 1, 3, 9
			fields := strings.Fields(line)
			if len(fields) <= inode || fields[state] != "0A" || !sockets[fields[inode]] {
				continue
			}
			address, err := parseAddress(fields[local])
			if err != nil {
				return nil, err
			}
			listeners = append(listeners, address)
		}
	}
	slices.SortFunc(listeners, netip.AddrPort.Compare)
	return listeners, nil
}

// parseAddress parses the kernel's notation: the address in words of host byte order, and the port,
// both in hexadecimal.
func parseAddress(s string) (netip.AddrPort, error) {
	host, port, ok := strings.Cut(s, ":")
	raw, err := hex.DecodeString(host)
	number, portErr := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || portErr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("cannot read the socket address %q", s)
	}
	for i := 0; i < len(raw); i += 4 {
		binary.BigEndian.PutUint32(raw[i:], binary.NativeEndian.Uint32(raw[i:]))
	}
	address, ok := netip.AddrFromSlice(raw)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("cannot read the socket address %q", s)
	}
	return netip.AddrPortFrom(address.Unmap(), uint16(number)), nil
}

// WithEnvironment returns this user's running processes that were started with the variable, given
// as NAME=value.
func WithEnvironment(variable string) ([]int, error) {
	environments, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, file := range environments {
		data, err := os.ReadFile(file) //nolint:gosec // found in /proc
		if err != nil {
			continue // gone, or another user's
		}
		if !slices.ContainsFunc(bytes.Split(data, []byte{0}), func(v []byte) bool { return string(v) == variable }) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
