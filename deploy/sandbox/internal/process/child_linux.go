package process

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// The kernel sends the death signal when the thread that forked ends, not the process. So every child is forked from one
// thread, which is kept for good.
var (
	forks    = make(chan func())
	forkOnce sync.Once
)

func startChild(cmd *exec.Cmd) error {
	forkOnce.Do(func() {
		go func() {
			runtime.LockOSThread()
			for fork := range forks {
				fork()
			}
		}()
	})
	// A group of its own keeps the terminal's Ctrl-C away from it: we end it, in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	forks <- func() { started <- cmd.Start() }
	return <-started
}
