// Command values-docs writes the reference of the charts' values from values.yaml, in which the
// comment "# -- …" above a value describes it, and from values.schema.json, which has the types and
// is generated from values.yaml by values-schema.
//
//	values-docs docs/values.md <chart's folder> …
//
// A map with such a comment is one value. A map without one is a section, whose values have
// comments of their own. A value without a comment, or one that is not in both files, is an error,
// unless the schema describes it as deprecated. helm-docs, whose comments these are, does neither
// know the schema nor require a comment.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: values-docs <file> <chart's folder> …")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "values-docs:", err)
		os.Exit(1)
	}
}

func run(file string, charts []string) error {
	var page bytes.Buffer
	fmt.Fprintln(&page, "<!-- Generated from the charts' values.yaml and values.schema.json by values-docs. DO NOT EDIT. -->")
	fmt.Fprintln(&page, "# Values of the charts")
	fmt.Fprintln(&page)
	fmt.Fprintln(&page, "What `helm install --set` and `--values` accept. A value that has another type or an unknown name is refused.")
	fmt.Fprintln(&page, "Options that have no value of their own are set by `extraArgs`: see [options](options.md).")
	for _, chart := range charts {
		if err := section(&page, chart); err != nil {
			return fmt.Errorf("%s: %w", chart, err)
		}
	}
	return os.WriteFile(file, page.Bytes(), 0o644)
}

// schema is what is used of a JSON schema.
type schema struct {
	Ref         string             `json:"$ref"`
	Definitions map[string]*schema `json:"definitions"`
	Description string             `json:"description"`
	Type        any                `json:"type"`
	Enum        []any              `json:"enum"`
	Items       *schema            `json:"items"`
	Properties  map[string]*schema `json:"properties"`
}

// section writes the values of a chart. Its link holds for a page in a folder at the top of the
// repository, if the chart's folder is given from there.
func section(page io.Writer, chart string) error {
	var description struct{ Name, Description string }
	if err := read(filepath.Join(chart, "Chart.yaml"), yaml.Unmarshal, &description); err != nil {
		return err
	}
	var types schema
	if err := read(filepath.Join(chart, "values.schema.json"), json.Unmarshal, &types); err != nil {
		return err
	}
	if err := resolve(&types, types.Definitions); err != nil {
		return fmt.Errorf("values.schema.json: %w", err)
	}
	var values yaml.Node
	if err := read(filepath.Join(chart, "values.yaml"), yaml.Unmarshal, &values); err != nil {
		return err
	}
	if values.Kind != yaml.DocumentNode || values.Content[0].Kind != yaml.MappingNode {
		return errors.New("values.yaml is not a map")
	}
	fmt.Fprintf(page, "\n## %s\n\n%s Defaults that are not shown are in\n[values.yaml](../%s/values.yaml).\n\n",
		description.Name, sentence(description.Description), filepath.ToSlash(chart))
	fmt.Fprint(page, "| value | type | default | description |\n|---|---|---|---|\n")
	return rows(page, nil, values.Content[0], &types)
}

// read parses a file.
func read(path string, parse func([]byte, any) error, into any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := parse(content, into); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	return nil
}

// resolve replaces the references of values and of items with what they refer to.
func resolve(s *schema, definitions map[string]*schema) error {
	if s.Ref != "" {
		definition := definitions[strings.TrimPrefix(s.Ref, "#/definitions/")]
		if definition == nil || definition.Ref != "" {
			return fmt.Errorf("%s is not the schema of a value", s.Ref)
		}
		*s = *definition
	}
	for _, of := range s.Properties {
		if err := resolve(of, definitions); err != nil {
			return err
		}
	}
	if s.Items == nil {
		return nil
	}
	return resolve(s.Items, definitions)
}

// rows writes a row for each value of a map, and reports every mistake.
func rows(page io.Writer, path []string, values *yaml.Node, types *schema) error {
	var errs []error
	known := map[string]bool{"global": true} // Helm's own, for charts that contain this one
	for i := 0; i < len(values.Content); i += 2 {
		key, value := values.Content[i], values.Content[i+1]
		known[key.Value] = true
		name := strings.Join(append(slices.Clone(path), key.Value), ".")
		of := types.Properties[key.Value]
		if of == nil {
			errs = append(errs, fmt.Errorf("values.schema.json has no %s", name))
			continue
		}
		text, documented := comment(key.HeadComment)
		switch {
		case documented && text != "":
			fmt.Fprintf(page, "| `%s` | %s | %s | %s |\n", name, kind(of), standard(value), cell(text))
		case value.Kind == yaml.MappingNode && len(value.Content) > 0:
			errs = append(errs, rows(page, append(slices.Clone(path), key.Value), value, of))
		default:
			errs = append(errs, fmt.Errorf("%s has no comment: write `# -- …` above it", name))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(types.Properties)) {
		name, of := strings.Join(append(slices.Clone(path), key), "."), types.Properties[key]
		switch {
		case known[key]:
		case strings.HasPrefix(of.Description, "Deprecated: "):
			fmt.Fprintf(page, "| `%s` | %s |  | %s |\n", name, kind(of), cell(of.Description))
		default:
			errs = append(errs, fmt.Errorf("values.yaml has no %s", name))
		}
	}
	return errors.Join(errs...)
}

// comment returns the description in a comment, without the annotations of values-schema, and
// without the example that follows it in indented lines.
func comment(text string) (description string, documented bool) {
	_, text, documented = strings.Cut("\n"+text, "\n# -- ")
	var words []string
	for line := range strings.Lines(text) {
		line = strings.TrimPrefix(strings.TrimRight(line, "\n"), "# ")
		if strings.HasPrefix(line, "@schema ") {
			continue
		}
		if strings.HasPrefix(line, "  ") {
			return strings.TrimSuffix(strings.Join(words, " "), " For example:") + " values.yaml has an example.", documented
		}
		words = append(words, strings.TrimSpace(line))
	}
	return strings.Join(words, " "), documented
}

// kind returns the type of a value: its name, or the values that it may have.
func kind(of *schema) string {
	if len(of.Enum) > 0 {
		var values []string
		for _, value := range of.Enum {
			values = append(values, "`"+cell(encoded(value))+"`")
		}
		return strings.Join(values, ", ")
	}
	var names []string
	switch t := of.Type.(type) {
	case string:
		names = []string{t}
	case []any:
		for _, name := range t {
			names = append(names, fmt.Sprint(name))
		}
	}
	for i, name := range names {
		switch name {
		case "object":
			names[i] = "map"
		case "array":
			names[i] = "list"
			if of.Items != nil && of.Items.Type != nil {
				names[i] = "list of " + plural(kind(of.Items))
			}
		}
	}
	if len(names) == 0 {
		return "any"
	}
	return strings.Join(names, " or ")
}

// plural returns the kind of a list's elements: in the plural, unless it is an enumeration of
// values.
func plural(kind string) string {
	if strings.HasPrefix(kind, "`") {
		return kind
	}
	return firstWord.ReplaceAllString(kind, "${0}s")
}

var firstWord = regexp.MustCompile(`^\w+`)

// longest is how long a default may be that is shown.
const longest = 60

// standard returns the default, unless it is empty or too long.
func standard(value *yaml.Node) string {
	var decoded any
	if err := value.Decode(&decoded); err != nil {
		return ""
	}
	text := encoded(decoded)
	switch {
	case text == `""` || text == "[]" || text == "{}" || text == "null":
		return ""
	case len(text) > longest:
		return "…"
	}
	return "`" + cell(text) + "`"
}

// encoded returns a value as JSON, but a string without quotes, unless it is empty.
func encoded(value any) string {
	if text, ok := value.(string); ok && text != "" {
		return text
	}
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return fmt.Sprint(value)
	}
	return strings.TrimSpace(text.String())
}

// sentence ends with a full stop.
func sentence(text string) string { return strings.TrimSuffix(strings.TrimSpace(text), ".") + "." }

// cell is text that is safe in a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(text)
}
