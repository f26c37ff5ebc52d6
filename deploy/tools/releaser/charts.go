package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

func chartsCommand(ctx context.Context, flags *flag.FlagSet, arguments []string) error {
	var r release
	r.addFlags(flags)
	file := flags.String("images", "deploy/images/images.yaml", "File that defines the images and names their charts.")
	layouts := flags.String("layouts", "", "Folder with the OCI layouts of the images.")
	helm := flags.String("helm", "helm", "Helm's binary.")
	out := flags.String("out", "", "Folder to write the charts' archives to.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	definitions, err := readDefinitions(*file)
	if err != nil {
		return err
	}
	for _, d := range definitions {
		if d.Chart == "" {
			continue
		}
		if err := d.packageChart(ctx, r, *layouts, *helm, *out); err != nil {
			return fmt.Errorf("packaging %s: %w", d.Chart, err)
		}
	}
	return nil
}

// packageChart writes the archive of the image's chart. Its version is the release, and its values
// refer to the image by digest.
func (d definition) packageChart(ctx context.Context, r release, layouts, helm, out string) error {
	_, digest, err := d.fromLayout(r, layouts)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "chart")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := os.CopyFS(dir, os.DirFS(d.Chart)); err != nil {
		return err
	}
	values := filepath.Join(dir, "values.yaml")
	content, err := os.ReadFile(values)
	if err != nil {
		return err
	}
	for _, setting := range []struct{ field, value string }{{"repository", d.repository(r)}, {"digest", digest.String()}} {
		if content, err = setScalar(content, setting.value, "image", setting.field); err != nil {
			return fmt.Errorf("values.yaml: %w", err)
		}
	}
	if err := os.WriteFile(values, content, 0o644); err != nil {
		return err
	}
	command := exec.CommandContext(ctx, helm, "package", "--version", r.semantic(), "--app-version", r.Version, "--destination", out, dir)
	output, err := command.CombinedOutput()
	if err != nil {
		return fmt.Errorf("helm package: %w: %s", err, output)
	}
	fmt.Printf("chart: %s\n", strings.TrimPrefix(strings.TrimSpace(string(output)), "Successfully packaged chart and saved it to: "))
	return nil
}

// setScalar replaces a plain or quoted scalar of a YAML document, which is there and on one line,
// and leaves everything else, such as comments, as it is.
func setScalar(document []byte, value string, path ...string) ([]byte, error) {
	var root yaml.Node
	if err := yaml.Unmarshal(document, &root); err != nil {
		return nil, err
	}
	node := &root
	if len(node.Content) == 1 {
		node = node.Content[0]
	}
	for _, key := range path {
		at := -1
		if node.Kind == yaml.MappingNode {
			at = slices.IndexFunc(node.Content, func(n *yaml.Node) bool { return n.Value == key })
		}
		// Keys have even positions.
		if at < 0 || at%2 != 0 {
			return nil, fmt.Errorf("there is no field %s", strings.Join(path, "."))
		}
		node = node.Content[at+1]
	}
	quote := map[yaml.Style]string{yaml.DoubleQuotedStyle: `"`, yaml.SingleQuotedStyle: "'", 0: ""}
	q, known := quote[node.Style]
	if node.Kind != yaml.ScalarNode || !known {
		return nil, fmt.Errorf("%s is not a scalar on one line", strings.Join(path, "."))
	}
	lines := bytes.SplitAfter(document, []byte("\n"))
	line := lines[node.Line-1]
	before, after := line[:node.Column-1], line[node.Column-1:]
	rest, found := bytes.CutPrefix(after, []byte(q+node.Value+q))
	if !found {
		return nil, fmt.Errorf("%s is not written in the way that it is read", strings.Join(path, "."))
	}
	lines[node.Line-1] = slices.Concat(before, fmt.Appendf(nil, "%q", value), rest)
	return bytes.Join(lines, nil), nil
}
