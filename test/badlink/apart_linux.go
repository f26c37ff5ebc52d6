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

// Apart moves the program into its own network namespace, with only a loopback interface, and its
// own mount namespace. It does so by re-executing the program, with the same arguments and process
// id, so main must call it before anything else. Child processes of the program share these
// namespaces, which end with the last of these processes.
//
// If the program lacks the privileges, the error states which.
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
		// Child processes may move to other namespaces.
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
	// Only this thread moves. The program that it executes replaces all threads.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("making a network namespace: %w: it takes root, or CAP_SYS_ADMIN and CAP_NET_ADMIN", err)
		}
		return fmt.Errorf("making a network namespace: %w", err)
	}
	// Later mounts must not propagate to other namespaces.
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keeping mounts private: %w", err)
	}
	environment := slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, origin+"=") })
	return fmt.Errorf("starting again: %w", syscall.Exec(program, os.Args, append(environment, origin+"="+namespace)))
}
