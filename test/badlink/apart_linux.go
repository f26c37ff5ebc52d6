package badlink

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// origin is the environment variable with the network namespace that the program has left.
const origin = "BADLINK_ORIGIN"

// Apart has the program in a network namespace of its own, with nothing but loopback, and in a mount namespace of its own. It does so by starting the
// program again in its place, with the same arguments and process id: main calls it before anything else. What the program starts is in the same
// namespaces. They end with the last of these processes.
//
// The error says what is missing if the program may not do that.
func Apart() error {
	const self = "/proc/self/ns/net"
	namespace, err := os.Readlink(self)
	if err != nil {
		return err
	}
	if before, moved := os.LookupEnv(origin); moved {
		if before == namespace {
			return fmt.Errorf("%s says that the program has left %s, but it is there", origin, namespace)
		}
		// What this program starts may move on.
		if err := os.Unsetenv(origin); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	}

	program, err := os.Executable()
	if err != nil {
		return err
	}
	// Only this thread moves, and the program that it executes takes the place of all others.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("making a network namespace: %w: it takes root, or CAP_SYS_ADMIN and CAP_NET_ADMIN", err)
		}
		return fmt.Errorf("making a network namespace: %w", err)
	}
	// What is mounted from now on must not show elsewhere.
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keeping mounts private: %w", err)
	}
	environment := slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, origin+"=") })
	return fmt.Errorf("starting again: %w", syscall.Exec(program, os.Args, append(environment, origin+"="+namespace)))
}
