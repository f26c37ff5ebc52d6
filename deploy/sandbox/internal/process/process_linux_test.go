package process

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestAProgramDiesWithItsParent(t *testing.T) {
	dir := t.TempDir()
	parent := exec.Command(os.Args[0])
	parent.Env = []string{"TEST_PROGRAM=parent", "TEST_DIR=" + dir}
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 16)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(line[:n])))
	if err != nil {
		t.Fatal(err)
	}
	if pids, err := WithEnvironment("TEST_DIR=" + dir); err != nil || !slices.Contains(pids, pid) {
		t.Fatalf("the child %d is not among %v: %v", pid, pids, err)
	}
	_ = parent.Process.Kill()
	_ = parent.Wait()
	eventually(t, "the child is gone", func() bool {
		pids, err := WithEnvironment("TEST_DIR=" + dir)
		if err != nil {
			t.Fatal(err)
		}
		return !slices.Contains(pids, pid)
	})
}

func TestListenersFindsWhatAProcessListensOn(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			t.Logf("without %s: %v", address, err)
			continue
		}
		defer func() { _ = listener.Close() }()
		got, err := Listeners(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		if want := netip.MustParseAddrPort(listener.Addr().String()); !slices.Contains(got, want) {
			t.Errorf("%s is not among %v", want, got)
		}
	}
}

func TestParseAddress(t *testing.T) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the examples are from a little-endian machine")
	}
	for in, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"00000000:0050":                         "0.0.0.0:80",
		"00000000000000000000000001000000:01BB": "[::1]:443",
		"00000000000000000000000000000000:01BB": "[::]:443",
		"0000000000000000FFFF00000100007F:01BB": "127.0.0.1:443",
	} {
		got, err := parseAddress(in)
		if err != nil || got.String() != want {
			t.Errorf("%s: got %v, %v; want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0100007F", "0100007F:zz", "0100:0050"} {
		if got, err := parseAddress(in); err == nil {
			t.Errorf("%q was read as %v", in, got)
		}
	}
}
