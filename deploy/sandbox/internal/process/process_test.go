package process

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The test binary doubles as the programs that the tests run.
func TestMain(m *testing.M) {
	switch os.Getenv("TEST_PROGRAM") {
	case "":
		os.Exit(m.Run())
	case "fail":
		_, _ = os.Stderr.WriteString("cannot work\n")
		os.Exit(3)
	case "run":
		select {}
	case "parent":
		// Starts a child under supervision, prints its pid, and waits to be killed.
		p := New(spec(os.Getenv("TEST_DIR"), "run"))
		if err := p.Start(); err != nil {
			panic(err)
		}
		_, _ = os.Stdout.WriteString(strconv.Itoa(p.Status().PID) + "\n")
		select {}
	}
}

func spec(dir, program string) Spec {
	return Spec{
		Name: program, Path: os.Args[0], Env: []string{"TEST_PROGRAM=" + program, "TEST_DIR=" + dir},
		Log: filepath.Join(dir, program+".log"), Grace: time.Second,
		Ready: func(context.Context) error { return nil },
	}
}

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx := testContext(t)
	for !condition() {
		select {
		case <-ctx.Done():
			t.Fatalf("never happened: %s", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestAKilledProgramIsStartedAgain(t *testing.T) {
	p := New(spec(t.TempDir(), "run"))
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	if err := p.WaitReady(testContext(t)); err != nil {
		t.Fatal(err)
	}
	first := p.Status().PID
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another process is ready", func() bool {
		s := p.Status()
		return s.Ready && s.PID != first && s.Restarts == 1
	})
	if got := p.Status().LastExit; got != "signal: killed" {
		t.Errorf("last exit is %q", got)
	}
}

func TestAStoppedProgramIsGoneAndCanBeStartedAgain(t *testing.T) {
	p := New(spec(t.TempDir(), "run"))
	for range 2 {
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		if err := p.WaitReady(testContext(t)); err != nil {
			t.Fatal(err)
		}
		p.Stop()
		if s := p.Status(); s.PID != 0 || s.Ready || s.Restarts != 0 {
			t.Fatalf("after Stop: %+v", s)
		}
		if err := p.Kill(); err == nil {
			t.Fatal("a stopped program could be killed")
		}
	}
}

func TestAProgramThatKeepsDyingIsHopeless(t *testing.T) {
	s := spec(t.TempDir(), "fail")
	s.Ready = func(context.Context) error { return errors.New("not ready") }
	p := New(s)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	defer p.Stop()
	err := p.WaitReady(testContext(t))
	if !errors.Is(err, ErrHopeless) || !strings.Contains(err.Error(), "exit status 3") {
		t.Fatalf("got %v", err)
	}
	if log, _ := os.ReadFile(s.Log); !bytes.Contains(log, []byte("cannot work")) {
		t.Errorf("the log lacks the program's output: %q", log)
	}
}
