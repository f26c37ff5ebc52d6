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

// Snapshot saves the content of an etcd ([HubEtcd] or [SpokeEtcd]) to a file, while it runs. The
// error is [ErrNotBuilt] if the binary etcdctl is missing.
func (s *Sandbox) Snapshot(ctx context.Context, etcd, file string) error {
	m, err := s.member(etcd)
	if err != nil {
		return err
	}
	return s.run(ctx, "etcdctl", "--endpoints="+m.url, "snapshot", "save", file)
}

// PutBack restores an etcd from a snapshot and discards later changes. The etcd and its API server
// must have been stopped. As etcd's documentation recommends for Kubernetes, revisions continue
// beyond those of any watch, and all watches must restart. The error is [ErrNotBuilt] if the binary
// etcdutl is missing.
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

// run runs a binary until it exits.
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
