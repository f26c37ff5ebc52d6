package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"debug/elf"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
	"sigs.k8s.io/yaml"
)

const (
	// user is the user and the group that images run as, as in distroless images.
	user = 65532
	// commandsFolder is where an image has its commands.
	commandsFolder = "usr/local/bin"
	// authoritiesFile is the first file in which Go looks for certificate authorities.
	authoritiesFile = "etc/ssl/certs/ca-certificates.crt"
	// referenceAnnotation is where containerd looks for an image's name when it imports a layout.
	referenceAnnotation = "io.containerd.image.name"
	// source is the repository, as in an image's labels.
	source = "https://github.com/karpenter-capi/karpenter-capi"
)

// definition describes one image, whatever its platform.
type definition struct {
	// Name is the last part of the image's repository.
	Name string `json:"name"`
	// Description is the image's label.
	Description string `json:"description"`
	// Commands are names of binaries. The first is the entrypoint.
	Commands []string `json:"commands"`
	// Chart is the folder of the chart that runs this image. If empty, there is none.
	Chart string `json:"chart,omitempty"`
}

// readDefinitions reads the images of a release.
func readDefinitions(file string) ([]definition, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var definitions []definition
	if err := yaml.UnmarshalStrict(content, &definitions); err != nil {
		return nil, fmt.Errorf("reading %s: %w", file, err)
	}
	for _, d := range definitions {
		if d.Name == "" || len(d.Commands) == 0 {
			return nil, fmt.Errorf("reading %s: an image needs a name and commands", file)
		}
	}
	return definitions, nil
}

func imagesCommand(_ context.Context, flags *flag.FlagSet, arguments []string) error {
	var r release
	r.addFlags(flags)
	file := flags.String("images", "deploy/images/images.yaml", "File that defines the images.")
	only := flags.String("only", "", "Names of the images to write, separated by commas. If empty, all are.")
	binaries := flags.String("binaries", "", "Folder with the binaries, in one folder for each platform: linux-amd64/capi-agent.")
	platforms := flags.String("platforms", "linux/amd64,linux/arm64", "Platforms, separated by commas.")
	out := flags.String("out", "", "Folder to write to: an OCI layout for each image.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	definitions, err := readDefinitions(*file)
	if err != nil {
		return err
	}
	for _, d := range definitions {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), d.Name) {
			continue
		}
		index, err := d.build(r, *binaries, strings.Split(*platforms, ","))
		if err != nil {
			return fmt.Errorf("building the image %s: %w", d.Name, err)
		}
		if err := writeLayout(filepath.Join(*out, d.Name), index, d.reference(r)); err != nil {
			return fmt.Errorf("writing the image %s: %w", d.Name, err)
		}
		digest, err := index.Digest()
		if err != nil {
			return err
		}
		fmt.Printf("image: %s@%s\n", d.reference(r), digest)
	}
	return nil
}

// repository returns the image's name without a tag.
func (d definition) repository(r release) string { return path.Join(r.Registry, d.Name) }

// reference returns the image's name with the release as its tag.
func (d definition) reference(r release) string { return d.repository(r) + ":" + r.Version }

// build returns an index with an image for each platform.
func (d definition) build(r release, binaries string, platforms []string) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, name := range platforms {
		platform, err := v1.ParsePlatform(name)
		if err != nil {
			return nil, err
		}
		image, err := d.image(r, *platform, filepath.Join(binaries, strings.ReplaceAll(name, "/", "-")))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
	}
	annotated, ok := mutate.Annotations(index, d.labels(r)).(v1.ImageIndex)
	if !ok {
		return nil, errors.New("an annotated index is no index")
	}
	return annotated, nil
}

// image returns the image of one platform, with the binaries in the folder.
func (d definition) image(r release, platform v1.Platform, folder string) (v1.Image, error) {
	system, err := r.layer(systemFiles())
	if err != nil {
		return nil, err
	}
	var files []file
	for _, command := range d.Commands {
		content, err := os.ReadFile(filepath.Join(folder, command))
		if err != nil {
			return nil, err
		}
		if err := runsOn(platform, content); err != nil {
			return nil, fmt.Errorf("%s: %w", command, err)
		}
		files = append(files, file{name: path.Join(commandsFolder, command), mode: 0o755, content: content})
	}
	binaries, err := r.layer(files)
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image,
		mutate.Addendum{Layer: system, History: r.history("certificate authorities and the user")},
		mutate.Addendum{Layer: binaries, History: r.history(strings.Join(d.Commands, ", "))},
	)
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Variant = platform.OS, platform.Architecture, platform.Variant
	config.Created = v1.Time{Time: r.Created}
	config.Config = v1.Config{
		User:       fmt.Sprintf("%d:%[1]d", user),
		Entrypoint: []string{"/" + path.Join(commandsFolder, d.Commands[0])},
		Env:        []string{"PATH=/" + commandsFolder},
		WorkingDir: "/",
		Labels:     d.labels(r),
	}
	return mutate.ConfigFile(image, config)
}

// machines are the architectures of platforms, by the names that Go gives them.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// runsOn returns an error unless the content is a program for the platform, and needs no other files:
// the images have no libraries.
func runsOn(platform v1.Platform, content []byte) error {
	machine, known := machines[platform.Architecture]
	if platform.OS != "linux" || !known {
		return fmt.Errorf("there are no images for the platform %s", platform)
	}
	program, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("not a program for linux: %w", err)
	}
	if program.Machine != machine {
		return fmt.Errorf("a program for %s instead of %s", program.Machine, machine)
	}
	for _, part := range program.Progs {
		if part.Type == elf.PT_INTERP {
			return errors.New("not linked statically; build it with CGO_ENABLED=0")
		}
	}
	return nil
}

// labels returns the labels of the image's configuration, which are the annotations of its index
// too: registries show those.
func (d definition) labels(r release) map[string]string {
	labels := map[string]string{
		"org.opencontainers.image.title":       d.Name,
		"org.opencontainers.image.description": d.Description,
		"org.opencontainers.image.version":     r.Version,
		"org.opencontainers.image.revision":    r.Commit,
		"org.opencontainers.image.created":     r.Created.Format(time.RFC3339),
		"org.opencontainers.image.source":      source,
		"org.opencontainers.image.licenses":    "Apache-2.0",
	}
	maps.DeleteFunc(labels, func(_, value string) bool { return value == "" })
	return labels
}

func (r *release) history(what string) v1.History {
	return v1.History{Created: v1.Time{Time: r.Created}, CreatedBy: "releaser: " + what}
}

// file is a file, or a folder, in an image. It belongs to root.
type file struct {
	name    string
	mode    fs.FileMode
	content []byte
}

// systemFiles returns what an image has beside its commands.
func systemFiles() []file {
	return []file{
		{name: "etc/passwd", mode: 0o644, content: fmt.Appendf(nil, "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:%d:%[1]d:nonroot:/:/sbin/nologin\n", user)},
		{name: "etc/group", mode: 0o644, content: fmt.Appendf(nil, "root:x:0:\nnonroot:x:%d:\n", user)},
		{name: authoritiesFile, mode: 0o644, content: authorities()},
		{name: "tmp", mode: fs.ModeDir | fs.ModeSticky | 0o777},
	}
}

// authorities returns Mozilla's certificate authorities, which the Go project keeps as a module. It
// omits those that Mozilla trusts in part only, because a file of certificates cannot express that.
func authorities() []byte {
	var certificates bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			// Writing to a buffer does not fail.
			_ = pem.Encode(&certificates, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate})
		}
	}
	return certificates.Bytes()
}

// layer returns a layer with the files and the folders that they are in. It is compressed once,
// and kept in memory.
func (r *release) layer(files []file) (v1.Layer, error) {
	folders := map[string]file{}
	for _, f := range files {
		for folder := path.Dir(f.name); folder != "."; folder = path.Dir(folder) {
			folders[folder] = file{name: folder, mode: fs.ModeDir | 0o755}
		}
	}
	all := slices.SortedFunc(slices.Values(slices.Concat(slices.Collect(maps.Values(folders)), files)),
		func(a, b file) int { return cmp.Compare(a.name, b.name) })

	var compressed bytes.Buffer
	zip := gzip.NewWriter(&compressed)
	archive := tar.NewWriter(zip)
	for _, f := range all {
		header := &tar.Header{
			Typeflag: tar.TypeReg, Name: f.name, Mode: int64(f.mode.Perm()), Size: int64(len(f.content)),
			ModTime: r.Created, Format: tar.FormatPAX,
		}
		if f.mode.IsDir() {
			header.Typeflag, header.Name = tar.TypeDir, f.name+"/"
		}
		if f.mode&fs.ModeSticky != 0 {
			header.Mode |= 0o1000
		}
		if err := archive.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := archive.Write(f.content); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(archive.Close(), zip.Close()); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(compressed.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// writeLayout replaces the folder by an OCI layout that contains the image under the reference.
func writeLayout(folder string, index v1.ImageIndex, reference string) error {
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	written, err := layout.Write(folder, mutate.IndexMediaType(empty.Index, types.OCIImageIndex))
	if err != nil {
		return err
	}
	return written.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": reference[strings.LastIndex(reference, ":")+1:],
		referenceAnnotation:                 reference,
	}))
}

// readLayout returns the image in an OCI layout that writeLayout has written, and its reference.
func readLayout(folder string) (index v1.ImageIndex, reference string, err error) {
	written, err := layout.FromPath(folder)
	if err != nil {
		return nil, "", err
	}
	outer, err := written.ImageIndex()
	if err != nil {
		return nil, "", err
	}
	manifest, err := outer.IndexManifest()
	if err != nil {
		return nil, "", err
	}
	if len(manifest.Manifests) != 1 {
		return nil, "", fmt.Errorf("%s contains %d images instead of one", folder, len(manifest.Manifests))
	}
	index, err = outer.ImageIndex(manifest.Manifests[0].Digest)
	return index, manifest.Manifests[0].Annotations[referenceAnnotation], err
}

// fromLayout returns the image in the layouts' folder, and its digest. It is an error if the image
// was built as another release, because its labels, binaries and charts would not match.
func (d definition) fromLayout(r release, layouts string) (v1.ImageIndex, v1.Hash, error) {
	index, reference, err := readLayout(filepath.Join(layouts, d.Name))
	if err != nil {
		return nil, v1.Hash{}, err
	}
	if reference != d.reference(r) {
		return nil, v1.Hash{}, fmt.Errorf("%s contains %s instead of %s", layouts, reference, d.reference(r))
	}
	digest, err := index.Digest()
	return index, digest, err
}
