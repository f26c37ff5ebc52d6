package capitest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// guard kills the API server and etcd if the test binary ends without stopping them: killed,
// interrupted, or out of time.
type guard struct {
	command *exec.Cmd
	pipe    io.WriteCloser
}

// guardChildren guards the processes that this process has started so far. On systems without
// /proc, where they cannot be found, it returns nil: tests work there too, but a killed test leaves
// them running.
func guardChildren() (*guard, error) {
	if _, err := os.Stat("/proc/self/task"); err != nil {
		return nil, nil //nolint:nilerr // Not an error: another system.
	}
	children, err := children()
	if err != nil {
		return nil, err
	}
	// The guard waits for a line, which dismisses it. The end of the pipe means that this process
	// is gone.
	command := exec.Command("sh", append([]string{"-c", `read -r _ || kill -9 "$@"`, "guard"}, children...)...)
	// An interrupt from the terminal must not reach the guard.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	pipe, err := command.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("guarding the API server: %w", err)
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("guarding the API server: %w", err)
	}
	return &guard{command: command, pipe: pipe}, nil
}

// dismiss ends the guard without killing anything.
func (g *guard) dismiss() error {
	if g == nil {
		return nil
	}
	if _, err := io.WriteString(g.pipe, "\n"); err != nil {
		return fmt.Errorf("dismissing the API server's guard: %w", err)
	}
	return g.command.Wait()
}

// children returns the IDs of this process's children.
func children() ([]string, error) {
	threads, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var ids []string
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if err != nil {
			continue // The thread has ended.
		}
		for id := range strings.FieldsSeq(string(text)) {
			if _, err := strconv.Atoi(id); err == nil {
				ids = append(ids, id)
			}
		}
	}
	if len(ids) == 0 {
		return nil, errors.New("no processes of the API server are found under /proc")
	}
	return ids, nil
}
