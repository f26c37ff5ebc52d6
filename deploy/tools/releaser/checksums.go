package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const (
	checksumsFile = "SHA256SUMS"
	signatureFile = "SHA256SUMS.sig"
	imagesFile    = "images.txt"
)

func checksumsCommand(_ context.Context, flags *flag.FlagSet, arguments []string) error {
	var r release
	r.addFlags(flags)
	dir := flags.String("dir", "", "Folder with the release.")
	file := flags.String("images", "deploy/images/images.yaml", "File that defines the images.")
	layouts := flags.String("layouts", "", "Folder with the OCI layouts of the images. If it is below the release's, it is left out.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	definitions, err := readDefinitions(*file)
	if err != nil {
		return err
	}
	if err := writeImageList(filepath.Join(*dir, imagesFile), definitions, r, *layouts); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(*dir, signatureFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	sums, err := checksums(*dir, *layouts)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(*dir, checksumsFile), sums, 0o644); err != nil {
		return err
	}
	key, err := signingKey()
	if err != nil {
		return err
	}
	if key == nil {
		fmt.Printf("checksums: %s, unsigned: RELEASE_KEY is not set\n", filepath.Join(*dir, checksumsFile))
		return nil
	}
	signature, err := sign(key, sums)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(*dir, signatureFile), []byte(signature+"\n"), 0o644); err != nil {
		return err
	}
	fmt.Printf("checksums: %s, signed\n", filepath.Join(*dir, checksumsFile))
	return nil
}

// writeImageList writes each image with its tag and its digest, on a line, so that the signature of
// the checksums covers images too, wherever they are.
func writeImageList(file string, definitions []definition, r release, layouts string) error {
	var list strings.Builder
	for _, d := range definitions {
		_, digest, err := d.fromLayout(r, layouts)
		if err != nil {
			return err
		}
		fmt.Fprintf(&list, "%s@%s\n", d.reference(r), digest)
	}
	return os.WriteFile(file, []byte(list.String()), 0o644)
}

// checksums returns the SHA-256 of every file below a folder, in the format of sha256sum.
func checksums(dir, without string) ([]byte, error) {
	var sums strings.Builder
	// In lexical order.
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name == filepath.Clean(cmp.Or(without, "/")):
			return filepath.SkipDir
		case entry.IsDir() || entry.Name() == checksumsFile:
			return nil
		}
		sum, err := checksum(name)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		fmt.Fprintf(&sums, "%x  %s\n", sum, filepath.ToSlash(relative))
		return err
	})
	return []byte(sums.String()), err
}

func checksum(name string) (sum []byte, err error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	hash := sha256.New()
	_, err = io.Copy(hash, file)
	return hash.Sum(nil), err
}
