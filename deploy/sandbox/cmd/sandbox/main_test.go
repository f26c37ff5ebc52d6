package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// The test binary doubles as the command.
func TestMain(m *testing.M) {
	if os.Getenv("TEST_COMMAND") != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// repository is a folder with links to this repository's binaries and with sandboxes of its own.
type repository struct {
	t       *testing.T
	options sandbox.Options
}

func newRepository(t *testing.T) repository {
	t.Helper()
	_ = os.Getenv("TESTED_BINARIES") // declares the sources of the binaries as inputs of the test cache
	bin, err := filepath.Abs("../../../../bin")
	if err != nil {
		t.Fatal(err)
	}
	r := repository{t: t, options: sandbox.Options{Name: "test", Root: t.TempDir()}}
	if err := os.Symlink(bin, filepath.Join(r.options.Root, "bin")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = r.run("down") })
	return r
}

// command returns the command with the arguments, and the buffer that receives its output.
func (r repository) command(arguments ...string) (*exec.Cmd, *bytes.Buffer) {
	said := &bytes.Buffer{}
	cmd := exec.Command(os.Args[0], append(arguments, "--name="+r.options.Name, "--root="+r.options.Root)...)
	cmd.Env = append(os.Environ(), "TEST_COMMAND=1")
	cmd.Stdout, cmd.Stderr = said, said
	// The supervisor outlives `up` but must not keep its pipes open.
	cmd.WaitDelay = 5 * time.Second
	return cmd, said
}

func (r repository) run(arguments ...string) (said string, err error) {
	cmd, out := r.command(arguments...)
	err = cmd.Run()
	return out.String(), err
}

func (r repository) wantNothingLeft() {
	r.t.Helper()
	if left, err := sandbox.Remnants(r.options); err != nil && !errors.Is(err, errors.ErrUnsupported) || len(left) > 0 {
		r.t.Errorf("left running: %v, %v", left, err)
	}
	if running, err := sandbox.Running(r.options); running || err != nil {
		r.t.Errorf("running: %t, %v", running, err)
	}
}

// waitFor polls until the condition holds.
func waitFor(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("never happened: %s", what)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func TestUpStatusDown(t *testing.T) {
	r := newRepository(t)

	if said, err := r.run("status"); err == nil || !strings.Contains(said, "not running") {
		t.Errorf("status of nothing says %q, %v", said, err)
	}
	if said, err := r.run("down"); err != nil || !strings.Contains(said, "There is no sandbox") {
		t.Errorf("down of nothing says %q, %v", said, err)
	}

	said, err := r.run("up", "--no-agent")
	if err != nil {
		t.Fatalf("up: %v: %s", err, said)
	}
	for _, want := range []string{"hub API server", "is ready after", "hub.kubeconfig get", "spoke.kubeconfig get"} {
		if !strings.Contains(said, want) {
			t.Errorf("up does not say %q: %s", want, said)
		}
	}
	if said, err := r.run("up", "--no-agent"); err == nil || !strings.Contains(said, "running already") {
		t.Errorf("a second up says %q, %v", said, err)
	}
	if said, err := r.run("status"); err != nil || !strings.Contains(said, "cluster-api ") {
		t.Errorf("status says %q, %v", said, err)
	}
	for _, file := range []string{"hub.kubeconfig", "spoke.kubeconfig", "env"} {
		if _, err := os.Stat(filepath.Join(r.options.Root, ".sandbox", "test", file)); err != nil {
			t.Error(err)
		}
	}

	if said, err := r.run("down"); err != nil || !strings.Contains(said, "nothing is left running") {
		t.Errorf("down says %q, %v", said, err)
	}
	r.wantNothingLeft()
	if _, err := os.Stat(filepath.Join(r.options.Root, ".sandbox", "test")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is left: %v", err)
	}
}

func TestNothingIsLeftOfAnUpThatDoesNotSucceed(t *testing.T) {
	t.Run("interrupted", func(t *testing.T) {
		r := newRepository(t)
		cmd, said := r.command("up", "--no-agent")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		r.waitForComponents()
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Errorf("up succeeded: %s", said)
		}
		r.wantNothingLeft()
	})
	t.Run("out of time", func(t *testing.T) {
		r := newRepository(t)
		if said, err := r.run("up", "--no-agent", "--timeout=1s"); err == nil || !strings.Contains(said, "not ready within 1s") {
			t.Errorf("up says %q, %v", said, err)
		}
		r.wantNothingLeft()
	})
	t.Run("not built", func(t *testing.T) {
		r := newRepository(t)
		if err := os.Remove(filepath.Join(r.options.Root, "bin")); err != nil {
			t.Fatal(err)
		}
		if said, err := r.run("up"); err == nil || !strings.Contains(said, "make tools build") {
			t.Errorf("up says %q, %v", said, err)
		}
		r.wantNothingLeft()
	})
}

func TestNothingIsLeftOfASandboxWhoseSupervisorIsKilled(t *testing.T) {
	r := newRepository(t)
	cmd, _ := r.command("run", "--no-agent")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.waitForComponents()
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	waitFor(t, "no process is left", func() bool {
		left, err := sandbox.Remnants(r.options)
		return err != nil || len(left) == 0
	})
	if said, err := r.run("status"); err == nil || !strings.Contains(said, "not running") {
		t.Errorf("status says %q, %v", said, err)
	}
	if said, err := r.run("down"); err != nil {
		t.Errorf("down says %q, %v", said, err)
	}
	r.wantNothingLeft()
}

// waitForComponents waits until more than the databases have been started.
func (r repository) waitForComponents() {
	r.t.Helper()
	waitFor(r.t, "components are started", func() bool {
		state, err := sandbox.ReadState(r.options)
		return err == nil && len(state.Components) > 2
	})
}
