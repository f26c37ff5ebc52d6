package process

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// The kernel sends the death signal when the thread that forked ends, not the process. Therefore
// one thread, which is kept forever, forks every child.
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
	// In a separate process group, the child does not receive the terminal's Ctrl-C: we stop it in
	// order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	forks <- func() { started <- cmd.Start() }
	return <-started
}
