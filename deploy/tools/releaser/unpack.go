package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func unpackCommand(_ context.Context, flags *flag.FlagSet, arguments []string) error {
	folder := flags.String("layout", "", "OCI layout with the image.")
	into := flags.String("into", "", "Folder to write the image's files to.")
	name := flags.String("platform", "linux/"+runtime.GOARCH, "Platform.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	platform, err := v1.ParsePlatform(*name)
	if err != nil {
		return err
	}
	index, _, err := readLayout(*folder)
	if err != nil {
		return err
	}
	// It recomputes every digest.
	if err := validate.Index(index); err != nil {
		return fmt.Errorf("the image in %s is damaged: %w", *folder, err)
	}
	images, err := partial.FindImages(index, match.Platforms(*platform))
	if err != nil {
		return err
	}
	if len(images) != 1 {
		return fmt.Errorf("%s contains %d images for %s instead of one", *folder, len(images), platform)
	}
	if err := unpack(images[0], *into); err != nil {
		return err
	}
	config, err := images[0].ConfigFile()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(config)
}

// unpack writes an image's files to a folder, which it creates. They belong to who runs this, and
// have the modes that the image gives them.
func unpack(image v1.Image, folder string) (err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	files := mutate.Extract(image)
	defer func() { err = errors.Join(err, files.Close(), root.Close()) }()
	for archive := tar.NewReader(files); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch header.Typeflag {
		case tar.TypeDir:
			if err := root.Mkdir(header.Name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		case tar.TypeReg:
			if err := unpackFile(root, header.Name, archive); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%s is neither a file nor a folder", header.Name)
		}
		// Unlike Mkdir and OpenFile, this does not heed the umask.
		if err := root.Chmod(header.Name, header.FileInfo().Mode()); err != nil {
			return err
		}
	}
}

func unpackFile(root *os.Root, name string, content io.Reader) error {
	file, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Close())
}
