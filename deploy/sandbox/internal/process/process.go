// Package process runs programs like a kubelet runs containers: it writes their output to a file,
// probes their readiness, and restarts them with a growing delay when they die.
//
// No program outlives this process, however that ends: on Linux the kernel kills each program with
// its parent. This is why kwokctl, which also runs control planes as processes, is not used: it
// leaves them running when it ends, and does not restart one that dies.
package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// shortestBackoff and longestBackoff bound the delay before a program that has died is
	// restarted.
	shortestBackoff = 500 * time.Millisecond
	longestBackoff  = 10 * time.Second
	// healthyAfter is how long a program must have run before a death resets its backoff.
	healthyAfter = 20 * time.Second
	// hopelessAfter is how often a program may die before it is first ready.
	hopelessAfter = 3
	// probeInterval is how often a program that is not ready is probed, and probeIntervalReady how
	// often a ready one is.
	probeInterval      = 100 * time.Millisecond
	probeIntervalReady = 2 * time.Second
	probeTimeout       = 3 * time.Second
)

// ErrHopeless means that a program dies repeatedly before it is ready.
var ErrHopeless = errors.New("does not stay up")

// Spec describes a program.
type Spec struct {
	// Name identifies the program among the others.
	Name string
	// Path is the executable, and Args are its arguments.
	Path string
	Args []string
	// Env is the complete environment.
	Env []string
	// Dir is the working directory.
	Dir string
	// Log is the file to which output is appended.
	Log string
	// Grace is how long the program has between SIGTERM and SIGKILL.
	Grace time.Duration
	// RestartAfter is the delay between the program's death and its restart. Zero means a delay
	// that grows with each death.
	RestartAfter time.Duration
	// Ready returns nil while the program works. It is called repeatedly for as long as the program
	// runs.
	Ready func(context.Context) error
	// Changed is called after each change of [Process.Status], from several goroutines. It must not
	// block.
	Changed func()
}

// Status is the state of a program at one moment.
type Status struct {
	Name string `json:"name"`
	// PID is 0 while the program is not running.
	PID int `json:"pid,omitempty"`
	// Ready is whether the last probe succeeded.
	Ready bool `json:"ready"`
	// Restarts counts the automatic restarts.
	Restarts int `json:"restarts"`
	// StartedAt is when the current run began.
	StartedAt time.Time `json:"startedAt,omitzero"`
	// LastExit describes the last exit. Empty if there was none.
	LastExit string `json:"lastExit,omitempty"`
	// Log is the file with the output.
	Log string `json:"log"`
}

// Process is a supervised program. Its methods are safe for concurrent use.
type Process struct {
	spec Spec

	// control serialises Start and Stop.
	control sync.Mutex
	cancel  context.CancelFunc
	ended   chan struct{} // closed when the supervision that cancel stops has ended

	mu      sync.Mutex
	status  Status
	deaths  int // since it was last ready or started by a caller
	running *os.Process
	changed chan struct{} // closed and replaced at each change
}

// New returns a program that has not been started.
func New(spec Spec) *Process {
	return &Process{spec: spec, status: Status{Name: spec.Name, Log: spec.Log}, changed: make(chan struct{})}
}

// Start starts the program and keeps it running until [Process.Stop]. It returns once the program
// has been started for the first time. It does nothing if the program is already supervised.
func (p *Process) Start() error {
	p.control.Lock()
	defer p.control.Unlock()
	if p.ended != nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(p.spec.Log), 0o750); err != nil {
		return err
	}
	p.update(func() { p.deaths = 0 })
	cmd, err := p.spawn()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	p.cancel, p.ended = cancel, ended
	go func() {
		defer close(ended)
		p.supervise(ctx, cmd)
	}()
	return nil
}

// Stop terminates the program, kills it after its grace period, and returns once it is gone. It
// does nothing if the program is not supervised.
func (p *Process) Stop() {
	p.control.Lock()
	defer p.control.Unlock()
	if p.ended == nil {
		return
	}
	p.cancel()
	<-p.ended
	p.cancel, p.ended = nil, nil
}

// Kill kills the program as kill -9 does. A supervised program is restarted.
func (p *Process) Kill() error { return p.signal(syscall.SIGKILL) }

// Suspend suspends the program as kill -STOP does, until [Process.Resume] or its end.
func (p *Process) Suspend() error { return p.signal(syscall.SIGSTOP) }

// Resume resumes a suspended program. It has no effect on a running one.
func (p *Process) Resume() error { return p.signal(syscall.SIGCONT) }

func (p *Process) signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == nil {
		return fmt.Errorf("%s is not running", p.spec.Name)
	}
	return p.running.Signal(s)
}

// Status returns the current state of the program.
func (p *Process) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

// WaitReady waits until the program is ready. It fails with [ErrHopeless] if the program keeps
// dying instead.
func (p *Process) WaitReady(ctx context.Context) error {
	for {
		p.mu.Lock()
		status, deaths, changed := p.status, p.deaths, p.changed
		p.mu.Unlock()
		switch {
		case status.Ready:
			return nil
		case deaths >= hopelessAfter:
			return fmt.Errorf("%s %w: %s; see %s", p.spec.Name, ErrHopeless, status.LastExit, p.spec.Log)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; see %s", p.spec.Name, ctx.Err(), p.spec.Log)
		}
	}
}

// update changes the status and notifies all waiters.
func (p *Process) update(change func()) {
	p.mu.Lock()
	before, deaths := p.status, p.deaths
	change()
	if p.status != before || p.deaths != deaths {
		close(p.changed)
		p.changed = make(chan struct{})
	}
	p.mu.Unlock()
	if p.spec.Changed != nil {
		p.spec.Changed()
	}
}

func (p *Process) spawn() (*exec.Cmd, error) {
	log, err := os.OpenFile(p.spec.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()               // the program has its own descriptor
	cmd := exec.Command(p.spec.Path, p.spec.Args...) //nolint:gosec,noctx // the caller's to choose; ended by runOnce
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = p.spec.Env, p.spec.Dir, log, log
	if err := startChild(cmd); err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.spec.Name, err)
	}
	p.update(func() {
		p.running = cmd.Process
		p.status.PID, p.status.StartedAt = cmd.Process.Pid, time.Now()
	})
	return cmd, nil
}

// supervise keeps the program running until the context ends.
func (p *Process) supervise(ctx context.Context, cmd *exec.Cmd) {
	backoff := shortestBackoff
	for {
		if cmd != nil {
			started := time.Now()
			p.runOnce(ctx, cmd)
			if time.Since(started) > healthyAfter {
				backoff = shortestBackoff
			}
		}
		if ctx.Err() != nil {
			return
		}
		delay := p.spec.RestartAfter
		if delay == 0 {
			delay, backoff = backoff, min(2*backoff, longestBackoff)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
		var err error
		if cmd, err = p.spawn(); err != nil {
			p.update(func() { p.deaths++; p.status.LastExit = err.Error() })
			continue
		}
		p.update(func() { p.status.Restarts++ })
	}
}

// runOnce probes the program until it ends, and ends it when the context ends.
func (p *Process) runOnce(ctx context.Context, cmd *exec.Cmd) {
	probing, stopProbing := context.WithCancel(ctx)
	probed := make(chan struct{})
	go func() {
		defer close(probed)
		p.probe(probing)
	}()
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait()
	}()

	select {
	case <-exited:
	case <-ctx.Done():
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(p.spec.Grace):
			_ = cmd.Process.Kill()
			<-exited
		}
	}
	stopProbing()
	<-probed
	p.update(func() {
		p.running = nil
		p.deaths++
		p.status.PID, p.status.Ready, p.status.StartedAt = 0, false, time.Time{}
		p.status.LastExit = cmd.ProcessState.String()
	})
}

// Tail returns the last lines of a program's log, or the reason why they cannot be read. It reads
// at most 64 KiB.
func Tail(log string, lines int) string {
	const most = 64 << 10
	file, err := os.Open(log) //nolint:gosec // the caller's to choose
	if err != nil {
		return err.Error()
	}
	defer func() { _ = file.Close() }()
	if size, err := file.Seek(0, io.SeekEnd); err == nil {
		_, err = file.Seek(max(0, size-most), io.SeekStart)
		if err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (p *Process) probe(ctx context.Context) {
	for {
		attempt, cancel := context.WithTimeout(ctx, probeTimeout)
		err := p.spec.Ready(attempt)
		cancel()
		if ctx.Err() != nil {
			return
		}
		interval := probeInterval
		if err == nil {
			interval = probeIntervalReady
		}
		if p.Status().Ready != (err == nil) {
			p.update(func() {
				p.status.Ready = err == nil
				if err == nil {
					p.deaths = 0
				}
			})
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(interval):
		}
	}
}
