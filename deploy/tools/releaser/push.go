package main

import (
	"context"
	"crypto/ecdsa"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
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
	key, err := signingKey()
	if err != nil {
		return err
	}
	if key == nil {
		fmt.Println("what is pushed remains unsigned: RELEASE_KEY is not set")
	}
	p := publisher{
		release: r, layouts: *layouts, helm: *helm, insecure: *insecure, key: key,
		access: []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)},
	}
	// Charts refer to images, so images are there first.
	for _, d := range definitions {
		if err := p.pushImage(d); err != nil {
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
		if err := p.pushChart(ctx, archive); err != nil {
			return fmt.Errorf("pushing the chart %s: %w", filepath.Base(archive), err)
		}
	}
	return nil
}

// publisher pushes images and charts to a registry, with the credentials of docker or podman login.
type publisher struct {
	release       release
	layouts, helm string
	insecure      bool
	// key signs what is pushed. If it is nil, nothing is signed.
	key    *ecdsa.PrivateKey
	access []remote.Option
}

func (p *publisher) options() []name.Option {
	if p.insecure {
		return []name.Option{name.Insecure}
	}
	return nil
}

func (p *publisher) sign(pushed name.Digest) error {
	if p.key == nil {
		return nil
	}
	if err := signPushed(p.key, pushed, p.access); err != nil {
		return fmt.Errorf("signing: %w", err)
	}
	return nil
}

// pushImage does not replace a release: charts and clusters refer to it.
func (p *publisher) pushImage(d definition) error {
	tag, err := name.NewTag(d.reference(p.release), p.options()...)
	if err != nil {
		return err
	}
	index, digest, err := d.fromLayout(p.release, p.layouts)
	if err != nil {
		return err
	}
	there, err := remote.Head(tag, p.access...)
	switch {
	case err != nil && !isNotFound(err):
		return err
	case err == nil && there.Digest != digest && isRelease(p.release):
		return fmt.Errorf("%s is there already, with the digest %s instead of %s", tag, there.Digest, digest)
	case err == nil && there.Digest == digest:
		fmt.Printf("there already: %s@%s\n", tag, digest)
	default:
		if err := remote.WriteIndex(tag, index, p.access...); err != nil {
			return err
		}
		fmt.Printf("pushed: %s@%s\n", tag, digest)
	}
	return p.sign(tag.Digest(digest.String()))
}

// pushedChart is what helm push writes: the chart's name with its tag, and its digest.
var pushedChart = regexp.MustCompile(`(?m)^Pushed: (\S+)\nDigest: (\S+)$`)

func (p *publisher) pushChart(ctx context.Context, archive string) error {
	command := []string{"push", archive, "oci://" + p.release.Registry + "/charts"}
	if p.insecure {
		command = append(command, "--plain-http")
	}
	output, err := exec.CommandContext(ctx, p.helm, command...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("helm push: %w: %s", err, output)
	}
	pushed := pushedChart.FindSubmatch(output)
	if pushed == nil {
		return fmt.Errorf("helm push does not say what it has pushed: %s", output)
	}
	fmt.Printf("pushed: %s@%s\n", pushed[1], pushed[2])
	tag, err := name.NewTag(string(pushed[1]), p.options()...)
	if err != nil {
		return err
	}
	return p.sign(tag.Digest(string(pushed[2])))
}

// isRelease reports whether the version is a tag. Other builds may be repeated.
func isRelease(r release) bool { return strings.HasPrefix(r.Version, "v") }

func isNotFound(err error) bool {
	var problem *transport.Error
	return errors.As(err, &problem) && problem.StatusCode == http.StatusNotFound
}
