package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// takeDown stops a sandbox, verifies that none of its processes is left, and removes its files.
func takeDown(ctx context.Context, out io.Writer, options sandbox.Options, keepLogs bool) error {
	began := time.Now()
	running, err := sandbox.Running(options)
	if err != nil {
		return err
	}
	if running {
		if err := endSupervisor(ctx, out, options); err != nil {
			return err
		}
	}
	left, err := sandbox.Remnants(options)
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	for _, pid := range left {
		_, _ = fmt.Fprintf(out, "Process %d had lost its supervisor, ending it.\n", pid)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("ending process %d: %w", pid, err)
		}
	}
	dir, err := sandbox.Dir(options)
	if err != nil {
		return err
	}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) && !running {
		_, _ = fmt.Fprintf(out, "There is no sandbox %q.\n", options.Name)
		return nil
	}
	if !keepLogs {
		if err := errors.Join(os.RemoveAll(dir), os.RemoveAll(dir+".log")); err != nil {
			return err
		}
	}
	_, _ = fmt.Fprintf(out, "Sandbox %q is down after %s; nothing is left running.\n", options.Name, seconds(time.Since(began)))
	return nil
}

// endSupervisor terminates the process that holds the sandbox and waits until it has exited. In the
// end it kills the process.
func endSupervisor(ctx context.Context, out io.Writer, options sandbox.Options) error {
	state, err := sandbox.ReadState(options)
	if err != nil {
		return err
	}
	if err := syscall.Kill(state.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("ending process %d: %w", state.PID, err)
	}
	began, told, forced := time.Now(), time.Now(), false
	for {
		running, err := sandbox.Running(options)
		if err != nil || !running {
			return err
		}
		if time.Since(told) > silence {
			told = time.Now()
			_, _ = fmt.Fprintf(out, "Waiting for it to end (%s) …\n", seconds(time.Since(began)))
		}
		if !forced && time.Since(began) > stopPatience {
			forced = true
			_ = syscall.Kill(state.PID, syscall.SIGKILL)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pollInterval):
		}
	}
}
