// Package foreign provides the modules that other repositories import, as a module proxy would, and
// names their versions.
//
// Every module of this repository is developed in one workspace. Other repositories get them by
// version or commit instead, each for itself, and ignore replace directives. What works here may
// therefore not build there.
package foreign

import (
	archivezip "archive/zip"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
	"golang.org/x/mod/zip"
)

// The paths of the modules that others import.
const (
	Proto = "github.com/karpenter-capi/karpenter-capi/proto"
	Pkg   = "github.com/karpenter-capi/karpenter-capi/pkg"
)

// Repository is a checkout of this repository.
type Repository struct {
	// Root is the folder with the .git folder.
	Root string
}

// HasHistory reports whether the checkout has all of its commits: it is no shallow clone, and no
// copy without .git.
func (r Repository) HasHistory(ctx context.Context) bool {
	shallow, err := r.git(ctx, "rev-parse", "--is-shallow-repository")
	return err == nil && shallow == "false"
}

// NewestChange returns the newest commit that changed the folder. The folder is the same in HEAD.
func (r Repository) NewestChange(ctx context.Context, folder string) (string, error) {
	commit, err := r.git(ctx, "log", "-1", "--format=%H", "--", folder)
	if err == nil && commit == "" {
		err = fmt.Errorf("no commit has changed %s", folder)
	}
	return commit, err
}

// Pending reports whether the next commit is the first that can require the folder's module as it
// is: the working tree differs from HEAD there, or HEAD itself has changed it, and no commit can
// name itself.
func (r Repository) Pending(ctx context.Context, folder string) (bool, error) {
	changes, err := r.git(ctx, "status", "--porcelain", "--", folder)
	if err != nil || changes != "" {
		return err == nil, err
	}
	newest, err := r.NewestChange(ctx, folder)
	if err != nil {
		return false, err
	}
	head, err := r.git(ctx, "rev-parse", "HEAD")
	return newest == head, err
}

// Version returns the version by which the go command knows the commit of the module in the folder:
// its tag, such as `proto/v0.1.0`, or a pseudo-version.
func (r Repository) Version(ctx context.Context, folder, commit string) (string, error) {
	tags, err := r.git(ctx, "tag", "--points-at", commit, "--list", folder+"/v*")
	if err != nil {
		return "", err
	}
	for tag := range strings.FieldsSeq(tags) {
		if version := strings.TrimPrefix(tag, folder+"/"); semver.Canonical(version) == version {
			return version, nil
		}
	}
	seconds, err := r.git(ctx, "show", "-s", "--format=%ct", commit)
	if err != nil {
		return "", err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return "", err
	}
	// No tag before the commit is an error of git's, and no problem.
	older, _ := r.git(ctx, "describe", "--tags", "--abbrev=0", "--match", folder+"/v*", commit)
	return module.PseudoVersion("v0", strings.TrimPrefix(older, folder+"/"), time.Unix(unix, 0).UTC(), commit[:12]), nil
}

// Commit returns the commit of a version that [Repository.Version] may have returned. It is an
// error if HEAD does not descend from it: others could not get it, or not for long.
func (r Repository) Commit(ctx context.Context, folder, version string) (string, error) {
	name := folder + "/" + version
	if module.IsPseudoVersion(version) {
		var err error
		if name, err = module.PseudoVersionRev(version); err != nil {
			return "", err
		}
	}
	commit, err := r.git(ctx, "rev-parse", "--verify", "--quiet", name+"^{commit}")
	if err != nil {
		return "", fmt.Errorf("version %s of %s is no commit of this repository", version, folder)
	}
	if _, err := r.git(ctx, "merge-base", "--is-ancestor", commit, "HEAD"); err != nil {
		return "", fmt.Errorf("version %s of %s is not in the history of HEAD", version, folder)
	}
	if is, err := r.Version(ctx, folder, commit); err != nil || is != version {
		return "", errors.Join(err, fmt.Errorf("the go command knows commit %s of %s as %s, not as %s", commit, folder, is, version))
	}
	return commit, nil
}

// File returns the go.mod file of the module in the folder.
func (r Repository) File(folder string) (*modfile.File, error) {
	path := filepath.Join(r.Root, folder, "go.mod")
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return modfile.Parse(path, content, nil)
}

// Required returns the version of the module that the module in the folder requires.
func (r Repository) Required(folder, path string) (string, error) {
	file, err := r.File(folder)
	if err != nil {
		return "", err
	}
	for _, require := range file.Require {
		if require.Mod.Path == path {
			return require.Mod.Version, nil
		}
	}
	return "", fmt.Errorf("%s/go.mod does not require %s", folder, path)
}

// Require makes the module in the folder require the version.
func (r Repository) Require(folder, path, version string) error {
	file, err := r.File(folder)
	if err != nil {
		return err
	}
	if err := file.AddRequire(path, version); err != nil {
		return err
	}
	content, err := file.Format()
	if err != nil {
		return err
	}
	return os.WriteFile(file.Syntax.Name, content, 0o644)
}

func (r Repository) git(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = r.Root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, bytes.TrimSpace(stderr.Bytes()))
	}
	return strings.TrimSuffix(string(out), "\n"), nil
}

// Proxy is a folder that serves modules to the go command, as `GOPROXY=file://<folder>`.
type Proxy string

// AddCommit adds the module in the folder of the repository as it was in a commit.
func (p Proxy) AddCommit(ctx context.Context, r Repository, path, version, folder, commit string) error {
	content, err := r.git(ctx, "archive", "--format=zip", commit, folder)
	if err != nil {
		return err
	}
	archive, err := archivezip.NewReader(strings.NewReader(content), int64(len(content)))
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "commit-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // It is in the system's folder for temporary files.
	if err := os.CopyFS(dir, archive); err != nil {
		return err
	}
	return p.AddFolder(path, version, filepath.Join(dir, folder))
}

// AddFolder adds the module in the folder as it is.
func (p Proxy) AddFolder(path, version, folder string) error {
	m := module.Version{Path: path, Version: version}
	escaped, err := module.EscapePath(m.Path)
	if err != nil {
		return err
	}
	dir := filepath.Join(string(p), escaped, "@v")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(dir, m.Version+".zip"))
	if err != nil {
		return err
	}
	if err := errors.Join(zip.CreateFromDir(file, m, folder), file.Close()); err != nil {
		return fmt.Errorf("%s: %w", m, err)
	}
	mod, err := os.ReadFile(filepath.Join(folder, "go.mod"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, m.Version+".mod"), mod, 0o644); err != nil {
		return err
	}
	info := fmt.Appendf(nil, `{"Version":%q}`, m.Version)
	if err := os.WriteFile(filepath.Join(dir, m.Version+".info"), info, 0o644); err != nil {
		return err
	}
	// The go command looks for a deprecation in the latest version. It takes no pseudo-version from
	// a list, but needs the list.
	if err := os.WriteFile(filepath.Join(dir, "list"), nil, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(string(p), escaped, "@latest"), info, 0o644)
}
