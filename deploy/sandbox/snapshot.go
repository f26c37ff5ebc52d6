package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
)

// Snapshot writes all that an etcd ([HubEtcd] or [SpokeEtcd]) holds to a file, while it runs. The error is [ErrNotBuilt] without the
// binary etcdctl.
func (s *Sandbox) Snapshot(ctx context.Context, etcd, file string) error {
	m, err := s.member(etcd)
	if err != nil {
		return err
	}
	return s.run(ctx, "etcdctl", "--endpoints="+m.url, "snapshot", "save", file)
}

// PutBack makes a snapshot what an etcd holds, instead of what it held since. The etcd and its API server must have been stopped. Revisions
// go on beyond those of any watch, and all watches have to begin anew, as etcd's documentation has it for Kubernetes. The error is
// [ErrNotBuilt] without the binary etcdutl.
func (s *Sandbox) PutBack(ctx context.Context, etcd, file string) error {
	m, err := s.member(etcd)
	if err != nil {
		return err
	}
	if p, err := s.find(etcd); err != nil {
		return err
	} else if p.Status().PID != 0 {
		return fmt.Errorf("%s runs", etcd)
	}
	if err := os.RemoveAll(m.dir); err != nil {
		return err
	}
	return s.run(ctx, "etcdutl", append([]string{"snapshot", "restore", file, "--bump-revision=1000000000", "--mark-compacted"}, m.identity()...)...)
}

func (s *Sandbox) member(etcd string) (member, error) {
	for _, c := range []*controlPlane{s.hub, s.spoke} {
		if c != nil && c.etcd.name == etcd {
			return c.etcd, nil
		}
	}
	return member{}, fmt.Errorf("there is no etcd %q", etcd)
}

// run runs a binary to its end.
func (s *Sandbox) run(ctx context.Context, binary string, args ...string) error {
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, s.options.binary(binary), args...) //nolint:gosec // the sandbox's own
	cmd.Stdout, cmd.Stderr, cmd.Env = &output, &output, []string{s.mark(), "HOME=" + s.options.StateDir}
	err := cmd.Run()
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s; run `make tools`", ErrNotBuilt, cmd.Path)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", binary, args[0], err, output.Bytes())
	}
	return nil
}
