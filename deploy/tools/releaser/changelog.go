package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// A section of a changelog has the commits that change files below its folders, unless an earlier
// section has them.
type section struct {
	title   string
	folders []string
}

// sections are ordered from what most readers are concerned by to what concerns developers only.
var sections = []section{
	{"API and packages for other programs", []string{"proto/", "pkg/"}},
	{"Custom resources and charts", []string{"agent/api/", "shim/apis/", "deploy/charts/"}},
	{"Agent", []string{"agent/"}},
	{"Karpenter and the kubectl plugin", []string{"shim/", "deploy/krew/"}},
	{"Documentation and examples", []string{"docs/", "README.md", "deploy/examples/"}},
	{"Tests, sandbox and build", []string{""}},
}

// commit is the part of a commit that a changelog shows.
type commit struct {
	hash    string
	subject string
	files   []string
}

func changelogCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var r release
	r.addFlags(flags)
	repository := flags.String("repository", ".", "Folder of the Git repository.")
	out := flags.String("out", "CHANGELOG.md", "File to write.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	since, commits, err := history(ctx, *repository)
	if err != nil {
		return err
	}
	if err := os.WriteFile(*out, []byte(changelog(r, since, commits)), 0o644); err != nil {
		return err
	}
	fmt.Printf("changelog: %s, %d commits since %s\n", *out, len(commits), since)
	return nil
}

// The bytes that separate commits, and the subject of a commit from the rest, in the output of git.
const (
	recordSeparator = "\x1e"
	unitSeparator   = "\x1f"
)

// history returns the commits since the last tag before the current commit, newest first, and that
// tag. Without such a tag it returns all commits, and since is "the beginning". Merges are left
// out, because they say nothing that their commits do not.
func history(ctx context.Context, repository string) (since string, commits []commit, err error) {
	revisions := "HEAD"
	since = "the beginning"
	// An error means that there is no tag, or no earlier commit.
	if tag, err := git(ctx, repository, "describe", "--tags", "--abbrev=0", "HEAD^"); err == nil {
		since = strings.TrimSpace(tag)
		revisions = since + "..HEAD"
	}
	log, err := git(ctx, repository, "log", "--no-merges", "--name-only", "--format="+recordSeparator+"%h"+unitSeparator+"%s"+unitSeparator, revisions)
	if err != nil {
		return "", nil, err
	}
	for record := range strings.SplitSeq(log, recordSeparator) {
		fields := strings.SplitN(record, unitSeparator, 3)
		if len(fields) != 3 {
			continue
		}
		commits = append(commits, commit{hash: fields[0], subject: fields[1], files: strings.Fields(fields[2])})
	}
	return since, commits, nil
}

func git(ctx context.Context, repository string, arguments ...string) (string, error) {
	// Without this, names of files with other characters than ASCII's are quoted.
	command := exec.CommandContext(ctx, "git", slices.Concat([]string{"-C", repository, "-c", "core.quotePath=false"}, arguments)...)
	var problem strings.Builder
	command.Stderr = &problem
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", arguments[0], err, strings.TrimSpace(problem.String()))
	}
	return string(out), nil
}

// changelog returns the changelog of a release as Markdown.
func changelog(r release, since string, commits []commit) string {
	bySection := make([][]commit, len(sections))
	for _, c := range commits {
		at := slices.IndexFunc(sections, func(s section) bool { return s.has(c) })
		bySection[at] = append(bySection[at], c)
	}
	var page strings.Builder
	fmt.Fprintf(&page, "# %s\n\n%s, changes since %s.\n", r.Version, r.Created.Format("2 January 2006"), since)
	for i, commits := range bySection {
		if len(commits) == 0 {
			continue
		}
		fmt.Fprintf(&page, "\n## %s\n\n", sections[i].title)
		for _, c := range commits {
			fmt.Fprintf(&page, "- %s (%s)\n", c.subject, c.hash)
		}
	}
	return page.String()
}

// has reports whether a commit belongs to the section. Tests alone do not make a change of what
// they test.
func (s section) has(c commit) bool {
	return slices.Contains(s.folders, "") || slices.ContainsFunc(c.files, func(file string) bool {
		return !strings.HasSuffix(file, "_test.go") &&
			slices.ContainsFunc(s.folders, func(folder string) bool { return strings.HasPrefix(file, folder) })
	})
}
