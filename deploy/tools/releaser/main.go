// Command releaser makes what a release consists of beside binaries: images, charts that refer to
// them, a changelog and checksums. It needs neither a container engine nor a registry, except to
// push. docs/releases.md describes the result. Neither ko nor goreleaser is used: they build the
// binaries once more, with flags of their own, and cannot write the images' digests into charts.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"
)

// commands are the releaser's commands, in the order in which a release uses them.
var commands = []struct {
	name string
	run  func(ctx context.Context, flags *flag.FlagSet, arguments []string) error
}{
	{"images", imagesCommand},
	{"charts", chartsCommand},
	{"changelog", changelogCommand},
	{"checksums", checksumsCommand},
	{"push", pushCommand},
	{"unpack", unpackCommand},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	} else if err != nil {
		fmt.Fprintf(os.Stderr, "releaser: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) error {
	names := make([]string, 0, len(commands))
	for _, c := range commands {
		if len(arguments) > 0 && arguments[0] == c.name {
			return c.run(ctx, flag.NewFlagSet("releaser "+c.name, flag.ContinueOnError), arguments[1:])
		}
		names = append(names, c.name)
	}
	return fmt.Errorf("the first argument must be one of the commands %s", strings.Join(names, ", "))
}

// release identifies what is released.
type release struct {
	// Version is a tag of the repository, for example v0.1.0, or the name of a build that is none.
	Version string
	// Commit is the source revision.
	Commit string
	// Created is the revision's time. Everything in an image has it, so that the same sources
	// result in the same digests.
	Created time.Time
	// Registry is what the names of images begin with, for example ghcr.io/karpenter-capi.
	Registry string
}

func (r *release) addFlags(flags *flag.FlagSet) {
	flags.StringVar(&r.Version, "version", "devel", "Version of the release: a tag, for example v0.1.0.")
	flags.StringVar(&r.Commit, "commit", "", "Source revision.")
	flags.StringVar(&r.Registry, "registry", "", "Registry and path that the names of images begin with.")
	flags.Func("created", "Time of the source revision, in seconds since 1970.", func(value string) error {
		var seconds int64
		if _, err := fmt.Sscanf(value, "%d", &seconds); err != nil {
			return err
		}
		r.Created = time.Unix(seconds, 0).UTC()
		return nil
	})
}

// semantic returns the version without the v that tags begin with. A build without a semantic
// version precedes every release.
func (r *release) semantic() string {
	if version, found := strings.CutPrefix(r.Version, "v"); found {
		return version
	}
	return "0.0.0-" + r.Version
}
