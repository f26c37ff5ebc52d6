package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

func pushCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var r release
	r.addFlags(flags)
	file := flags.String("images", "deploy/images/images.yaml", "File that defines the images.")
	layouts := flags.String("layouts", "", "Folder with the OCI layouts of the images.")
	charts := flags.String("charts", "", "Folder with the charts' archives. If empty, no charts are pushed.")
	helm := flags.String("helm", "helm", "Helm's binary.")
	insecure := flags.Bool("insecure", false, "Connect to the registry without TLS.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if r.Registry == "" {
		return errors.New("--registry is required")
	}
	definitions, err := readDefinitions(*file)
	if err != nil {
		return err
	}
	// Charts refer to images, so images are there first.
	for _, d := range definitions {
		if err := d.push(ctx, r, *layouts, *insecure); err != nil {
			return fmt.Errorf("pushing the image %s: %w", d.Name, err)
		}
	}
	if *charts == "" {
		return nil
	}
	archives, err := filepath.Glob(filepath.Join(*charts, "*.tgz"))
	if err != nil {
		return err
	}
	if len(archives) == 0 {
		return fmt.Errorf("%s contains no charts", *charts)
	}
	for _, archive := range archives {
		command := []string{"push", archive, "oci://" + r.Registry + "/charts"}
		if *insecure {
			command = append(command, "--plain-http")
		}
		output, err := exec.CommandContext(ctx, *helm, command...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("helm push: %w: %s", err, output)
		}
		fmt.Printf("pushed: %s\n", strings.Join(strings.Fields(string(output)), " "))
	}
	return nil
}

// push pushes an image to the registry, with the credentials of docker or podman login. It does not
// replace a release: charts and clusters refer to it.
func (d definition) push(ctx context.Context, r release, layouts string, insecure bool) error {
	var options []name.Option
	if insecure {
		options = append(options, name.Insecure)
	}
	tag, err := name.NewTag(d.reference(r), options...)
	if err != nil {
		return err
	}
	index, digest, err := d.fromLayout(r, layouts)
	if err != nil {
		return err
	}
	access := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	there, err := remote.Head(tag, access...)
	switch {
	case err != nil && !isNotFound(err):
		return err
	case err == nil && there.Digest != digest && isRelease(r):
		return fmt.Errorf("%s is there already, with the digest %s instead of %s", tag, there.Digest, digest)
	case err == nil && there.Digest == digest:
		fmt.Printf("there already: %s@%s\n", tag, digest)
		return nil
	}
	if err := remote.WriteIndex(tag, index, access...); err != nil {
		return err
	}
	fmt.Printf("pushed: %s@%s\n", tag, digest)
	return nil
}

// isRelease reports whether the version is a tag. Other builds may be repeated.
func isRelease(r release) bool { return strings.HasPrefix(r.Version, "v") }

func isNotFound(err error) bool {
	var problem *transport.Error
	return errors.As(err, &problem) && problem.StatusCode == http.StatusNotFound
}
