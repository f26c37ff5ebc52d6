package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

const (
	// pollInterval is how often the state of a starting or stopping sandbox is checked.
	pollInterval = 100 * time.Millisecond
	// silence is the maximum time without output while waiting.
	silence = 5 * time.Second
	// stopPatience is how long a sandbox may take to stop cleanly.
	stopPatience = time.Minute
)

// bringUp starts `sandbox run` in the background and follows it until it is ready. If that fails or
// the context ends, nothing is left running.
func bringUp(ctx context.Context, out io.Writer, options sandbox.Options) error {
	if running, err := sandbox.Running(options); err != nil {
		return err
	} else if running {
		return fmt.Errorf("sandbox %q %w: see `sandbox status`, end it with `sandbox down`", options.Name, sandbox.ErrRunning)
	}
	supervisor, output, err := startSupervisor(options)
	if err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = supervisor.Wait() // its state reports how it ended
	}()

	state, err := follow(ctx, out, options, supervisor.Process.Pid, exited)
	if err == nil {
		_, _ = fmt.Fprintf(out, "Sandbox %q is ready after %s.\n\n", state.Name, seconds(state.ReadyAt.Sub(state.StartedAt)))
		tellWhatNext(out, state)
		return nil
	}
	if ctx.Err() != nil {
		_, _ = fmt.Fprintln(out, "Cleaning up …")
		_ = supervisor.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(stopPatience):
			_ = supervisor.Process.Kill()
			<-exited
		}
		return context.Cause(ctx)
	}
	said, readErr := os.ReadFile(output) //nolint:gosec // a file of ours
	if readErr == nil && len(said) > 0 && state.Error == "" {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(said)))
	}
	return err
}

// startSupervisor starts the process that holds the sandbox, in its own session. Its output goes to
// the returned file.
func startSupervisor(options sandbox.Options) (cmd *exec.Cmd, output string, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, "", err
	}
	dir, err := sandbox.Dir(options)
	if err != nil {
		return nil, "", err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o750); err != nil {
		return nil, "", err
	}
	output = dir + ".log"
	file, err := os.Create(output) //nolint:gosec // a file of ours
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = file.Close() }() // the supervisor has its own descriptor
	args := []string{"run", "--name=" + options.Name, "--root=" + options.Root, "--topology=" + string(options.Topology)}
	if options.HubOf != "" {
		args = append(args, "--hub-of="+options.HubOf)
	}
	if options.HubOnly {
		args = append(args, "--hub-only")
	}
	if options.WithoutAgent {
		args = append(args, "--no-agent")
	}
	if options.WithoutShim {
		args = append(args, "--no-shim")
	}
	for _, arg := range options.AgentArgs {
		args = append(args, "--agent-arg="+arg)
	}
	for _, gate := range options.FeatureGates {
		args = append(args, "--feature-gate="+gate)
	}
	for _, variable := range options.ShimEnv {
		args = append(args, "--shim-env="+variable)
	}
	cmd = exec.Command(self, args...) //nolint:gosec,noctx // this program again, which outlives this one
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd, output, cmd.Start()
}

// follow prints each completed step of the start until the sandbox is ready, has failed, or the
// context ends.
func follow(ctx context.Context, out io.Writer, options sandbox.Options, pid int, exited <-chan struct{}) (sandbox.State, error) {
	p := progress{out: out, last: time.Now(), told: map[string]bool{}}
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		ended := false
		select {
		case <-ctx.Done():
			return sandbox.State{}, ctx.Err()
		case <-exited:
			ended = true
		case <-ticker.C:
		}
		// Until the supervisor has written its state, the file may be from an earlier sandbox.
		state, err := sandbox.ReadState(options)
		if err == nil && state.PID == pid {
			p.tell(state)
			switch state.Phase {
			case sandbox.Ready:
				return state, nil
			case sandbox.Failed:
				return state, fmt.Errorf("%s\nThe logs are in %s", state.Error, relative(state.Paths.Logs))
			case sandbox.Starting, sandbox.Stopping:
			}
		} else if err != nil && !errors.Is(err, sandbox.ErrNoState) {
			return sandbox.State{}, err
		}
		if ended {
			return sandbox.State{}, errors.New("the sandbox ended while it started")
		}
	}
}

// progress reports the progress of a start: each step once, and what the start is waiting for if
// nothing happens for a while.
type progress struct {
	out  io.Writer
	last time.Time // time of the last output
	told map[string]bool
}

func (p *progress) tell(state sandbox.State) {
	var waiting []string
	for _, step := range state.Steps {
		switch {
		case step.DoneAt.IsZero():
			waiting = append(waiting, fmt.Sprintf("%s (%s)", step.Name, seconds(time.Since(step.StartedAt))))
		case !p.told[step.Name] && step.Error == "":
			p.told[step.Name] = true
			p.last = time.Now()
			_, _ = fmt.Fprintf(p.out, "  %-24s %6s\n", step.Name, seconds(step.DoneAt.Sub(step.StartedAt)))
		}
	}
	if len(waiting) > 0 && time.Since(p.last) > silence {
		p.last = time.Now()
		_, _ = fmt.Fprintf(p.out, "  waiting for %s\n", strings.Join(waiting, ", "))
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// tellWhatNext prints example commands that can be run unchanged.
func tellWhatNext(out io.Writer, state sandbox.State) {
	paths := state.Paths
	_, _ = fmt.Fprintf(out, `Hub:
  bin/kubectl --kubeconfig %s get clusters,machinedeployments,machines -A
`, relative(paths.HubKubeconfig))
	if hasNodes := lo.ContainsBy(state.Components, func(c sandbox.ComponentStatus) bool { return strings.HasSuffix(c.Name, "-kwok") }); hasNodes {
		example := "apply -f deploy/sandbox/examples/machinedeployment.yaml"
		if state.Cluster != sandbox.ClusterName {
			example = fmt.Sprintf("apply -f <(sed 's/spoke/%[1]s/; s/standard-4/%[1]s-4/' deploy/sandbox/examples/machinedeployment.yaml)", state.Cluster)
		}
		_, _ = fmt.Fprintf(out, `  bin/kubectl --kubeconfig %s %s
Spoke:
  bin/kubectl --kubeconfig %s get nodes,pods -A
`, relative(paths.HubKubeconfig), example, relative(paths.SpokeKubeconfig))
	}
	if state.AgentAddress != "" {
		_, _ = fmt.Fprintf(out, `Agent:
  bin/grpcurl -cacert %s -cert %s -key %s %s list
`, relative(paths.AgentCA), relative(paths.ClientCertificate), relative(paths.ClientKey), state.AgentAddress)
	}
	_, _ = fmt.Fprintf(out, `Variables with all of these: source %s
Logs: %s
`, relative(paths.Env), relative(paths.Logs))
}
