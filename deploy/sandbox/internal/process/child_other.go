//go:build !linux

package process

import (
	"os/exec"
	"syscall"
)

func startChild(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd.Start()
}
