// Command crd-docs writes the reference of the objects that CustomResourceDefinitions define.
//
//	crd-docs docs/objects.md <file with a CustomResourceDefinition> …
//
// A field without a description is an error, which the generators of the field do not report; they
// also read Go types, not the CRDs that the charts install.
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
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: crd-docs <file> <CustomResourceDefinition> …")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "crd-docs:", err)
		os.Exit(1)
	}
}

func run(file string, definitions []string) error {
	var page bytes.Buffer
	fmt.Fprintln(&page, "<!-- Generated from the CustomResourceDefinitions by crd-docs. DO NOT EDIT. -->")
	fmt.Fprintln(&page, "# Objects")
	fmt.Fprintln(&page)
	fmt.Fprintln(&page, "The fields of the objects that agent and shim define. `kubectl explain` shows them as well. A type in")
	fmt.Fprintln(&page, "brackets is that of the elements of a list. Karpenter documents its own objects.")
	for _, definition := range definitions {
		if err := section(&page, definition); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(definition), err)
		}
	}
	return os.WriteFile(file, page.Bytes(), 0o644)
}

// crd is what is used of a CustomResourceDefinition.
type crd struct {
	Spec struct {
		Group string
		Names struct{ Kind string }
		Scope string
		// Versions are served; the page has a section for each.
		Versions []struct {
			Name   string
			Schema struct {
				OpenAPIV3Schema schema `yaml:"openAPIV3Schema"`
			}
		}
	}
}

// schema is what is used of a structural schema. The types of Kubernetes would make API machinery a
// dependency of this tool.
type schema struct {
	Description          string
	Type                 string
	Format               string
	IntOrString          bool `yaml:"x-kubernetes-int-or-string"`
	Enum                 []any
	Default              any
	Minimum, Maximum     *float64
	MinLength            *int `yaml:"minLength"`
	MaxLength            *int `yaml:"maxLength"`
	MinItems             *int `yaml:"minItems"`
	MaxItems             *int `yaml:"maxItems"`
	MaxProperties        *int `yaml:"maxProperties"`
	Pattern              string
	Required             []string
	Properties           map[string]*schema
	Items                *schema
	AdditionalProperties *schema                          `yaml:"additionalProperties"`
	Validations          []struct{ Message, Rule string } `yaml:"x-kubernetes-validations"`
}

var scopes = map[string]string{"Namespaced": "in a namespace", "Cluster": "in no namespace"}

// section writes the fields of a kind. Those of every object are not among them.
func section(page io.Writer, path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var definition crd
	if err := yaml.Unmarshal(content, &definition); err != nil {
		return err
	}
	if len(definition.Spec.Versions) == 0 {
		return errors.New("there is no version of a CustomResourceDefinition")
	}
	for _, version := range definition.Spec.Versions {
		root := version.Schema.OpenAPIV3Schema
		fmt.Fprintf(page, "\n## %s\n\n`apiVersion: %s/%s`, %s. %s\n\n", definition.Spec.Names.Kind, definition.Spec.Group, version.Name,
			scopes[definition.Spec.Scope], paragraph(root.Description))
		fmt.Fprint(page, "| field | type | description |\n|---|---|---|\n")
		for _, common := range []string{"apiVersion", "kind", "metadata"} {
			delete(root.Properties, common)
		}
		if err := rows(page, "", &root); err != nil {
			return err
		}
	}
	return nil
}

// rows writes a row for each field, followed by those below it.
func rows(page io.Writer, path string, of *schema) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(of.Properties)) {
		field := of.Properties[name]
		full := path + name
		if field.Description == "" {
			errs = append(errs, fmt.Errorf("%s has no description", full))
		}
		text := strings.Join(append([]string{paragraph(field.Description)}, rules(field, slices.Contains(of.Required, name))...), " ")
		fmt.Fprintf(page, "| `%s` | %s | %s |\n", full, kind(field), cell(text))
		switch {
		case full == "status.conditions": // as in every object
		case field.Items != nil && len(field.Items.Properties) > 0:
			errs = append(errs, rows(page, full+"[].", field.Items))
		case field.AdditionalProperties != nil && len(field.AdditionalProperties.Properties) > 0:
			errs = append(errs, rows(page, full+".*.", field.AdditionalProperties))
		default:
			errs = append(errs, rows(page, full+".", field))
		}
	}
	return errors.Join(errs...)
}

func kind(of *schema) string {
	switch {
	case of.IntOrString:
		return "integer or string"
	case of.Items != nil:
		return "[" + kind(of.Items) + "]"
	case of.AdditionalProperties != nil:
		return "map of " + kind(of.AdditionalProperties)
	case of.Format == "date-time":
		return "time"
	}
	return of.Type
}

// rules returns sentences about the values that a field may have.
func rules(of *schema, required bool) []string {
	var sentences []string
	if required {
		sentences = append(sentences, "REQUIRED.")
	}
	if of.Default != nil {
		sentences = append(sentences, fmt.Sprintf("Default: `%s`.", encoded(of.Default)))
	}
	var bounds []string
	for _, bound := range []struct {
		format string
		limit  *int
	}{
		{"at least %d characters", of.MinLength},
		{"at most %d characters", of.MaxLength},
		{"at least %d elements", of.MinItems},
		{"at most %d elements", of.MaxItems},
		{"at most %d entries", of.MaxProperties},
	} {
		if bound.limit != nil && (*bound.limit != 1 || !strings.HasPrefix(bound.format, "at least")) {
			bounds = append(bounds, fmt.Sprintf(bound.format, *bound.limit))
		}
	}
	if of.MinLength != nil && *of.MinLength == 1 || of.MinItems != nil && *of.MinItems == 1 {
		bounds = append(bounds, "not empty")
	}
	if of.Minimum != nil {
		bounds = append(bounds, fmt.Sprintf("at least %v", *of.Minimum))
	}
	if of.Maximum != nil {
		bounds = append(bounds, fmt.Sprintf("at most %v", *of.Maximum))
	}
	if len(of.Enum) > 0 {
		var values []string
		for _, value := range of.Enum {
			values = append(values, "`"+encoded(value)+"`")
		}
		bounds = append(bounds, "one of "+strings.Join(values, ", "))
	}
	if of.Pattern != "" {
		bounds = append(bounds, "pattern `"+of.Pattern+"`")
	}
	if len(bounds) > 0 {
		sentences = append(sentences, "Constraints: "+strings.Join(bounds, ", ")+".")
	}
	for _, each := range []*schema{of.Items, of.AdditionalProperties} {
		if each != nil && len(each.Properties) == 0 { // else its fields have rows of their own
			for _, sentence := range rules(each, false) {
				sentences = append(sentences, "Each value: "+strings.TrimPrefix(strings.TrimPrefix(sentence, "Constraints: "), "Rule: "))
			}
		}
	}
	for _, validation := range of.Validations {
		if !strings.Contains(validation.Message, "is immutable") { // the description says so
			sentences = append(sentences, "Rule: "+strings.TrimSuffix(paragraph(validation.Message), ".")+".")
		}
	}
	return sentences
}

func encoded(value any) string {
	if text, isText := value.(string); isText && text != "" {
		return text
	}
	content, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(content)
}

// paragraph returns a text on one line.
func paragraph(text string) string { return strings.Join(strings.Fields(text), " ") }

// cell escapes the characters that would end a table cell or start an HTML tag.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;").Replace(text)
}
