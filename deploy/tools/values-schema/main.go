// Command values-schema writes the JSON schema of a chart's values from values.yaml, whose comments
// "# @schema …" hold what the defaults do not show, and from schema.yaml, a schema with the title,
// the definitions and the values that values.yaml does not have.
//
//	values-schema <chart's folder> <file>
//
// An annotation is in the comment above its value. It has one or several keywords of JSON schema,
// separated by semicolons:
//
//	# @schema minimum: 1; maximum: 10
//	replicas: 2
//
// The value of a keyword is YAML, but that of pattern, $ref and itemRef is taken as it is. These
// keywords have a form of their own:
//
//	item: string             items: {type: string}
//	itemEnum: [a, b]         items: {type: string, enum: [a, b]}
//	itemRef: #/definitions/x items: {$ref: '#/definitions/x'}
//	required: true           the map that contains the value requires it
//
// The syntax follows that of github.com/losisin/helm-values-schema-json, which is not used: it
// describes a map whose keys are the user's as it describes a section, and accepts an empty list or
// a null that does not show its type.
//
// The type is that of the default. A map without a comment "# -- …" is a section, as in
// values-docs: it has the values that it shows, and no others. A map with one may have any keys,
// unless additionalProperties is false. What the default does not show must be annotated: the items
// of an empty list, and the type of null.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"
	"go.yaml.in/yaml/v3"
)

// draft is the version of JSON schema that every Helm 3 and every editor knows.
const draft = "http://json-schema.org/draft-07/schema#"

// definitions is where a reference finds its definition.
const definitions = "#/definitions/"

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: values-schema <chart's folder> <file>")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "values-schema: %s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
}

func run(chart, file string) error {
	root, err := base(filepath.Join(chart, "schema.yaml"))
	if err != nil {
		return fmt.Errorf("schema.yaml: %w", err)
	}
	content, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return err
	}
	if err := fill(root, content); err != nil {
		return fmt.Errorf("values.yaml: %w", err)
	}
	if err := check(root, content); err != nil {
		return err
	}
	text, err := encode(root)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}

// encode returns a schema as JSON, whose first keywords tell what it is.
func encode(root *jsonschema.Schema) ([]byte, error) {
	rest := *root
	rest.Schema, rest.Title = "", ""
	first, err := json.Marshal(&jsonschema.Schema{Schema: root.Schema, Title: root.Title})
	if err != nil {
		return nil, err
	}
	others, err := json.Marshal(&rest)
	if err != nil {
		return nil, err
	}
	var text bytes.Buffer
	compact := slices.Concat(bytes.TrimSuffix(first, []byte("}")), []byte(","), bytes.TrimPrefix(others, []byte("{")))
	if err := json.Indent(&text, compact, "", "  "); err != nil {
		return nil, err
	}
	text.WriteByte('\n')
	return text.Bytes(), nil
}

// base reads what the annotations cannot express.
func base(file string) (*jsonschema.Schema, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var decoded map[string]any
	if err := yaml.Unmarshal(content, &decoded); err != nil {
		return nil, err
	}
	root, err := parse(decoded)
	if err != nil {
		return nil, err
	}
	if root.Title == "" {
		return nil, errors.New("it has no title")
	}
	root.Schema = draft
	return root, nil
}

// fill adds the values to the root.
func fill(root *jsonschema.Schema, content []byte) error {
	var document yaml.Node
	if err := yaml.Unmarshal(content, &document); err != nil {
		return err
	}
	if document.Kind != yaml.DocumentNode || document.Content[0].Kind != yaml.MappingNode {
		return errors.New("it is not a map")
	}
	r := reader{read: map[string]int{}}
	err := r.section(root, nil, document.Content[0])
	return errors.Join(err, r.unread(content))
}

// check reports references without a definition, definitions without a reference, and defaults that
// the schema does not admit.
func check(root *jsonschema.Schema, content []byte) error {
	resolved, err := root.Resolve(nil)
	if err != nil {
		return err
	}
	referred := map[string]bool{}
	walk(root, func(s *jsonschema.Schema) { referred[strings.TrimPrefix(s.Ref, definitions)] = true })
	for _, name := range slices.Sorted(maps.Keys(root.Definitions)) {
		if !referred[name] {
			return fmt.Errorf("schema.yaml: nothing refers to the definition %s", name)
		}
	}
	var values map[string]any
	if err := yaml.Unmarshal(content, &values); err != nil {
		return err
	}
	if err := resolved.Validate(values); err != nil {
		return fmt.Errorf("values.yaml: the schema does not admit the defaults: %w", err)
	}
	return nil
}

// walk visits a schema and those in it.
func walk(s *jsonschema.Schema, visit func(*jsonschema.Schema)) {
	if s == nil {
		return
	}
	visit(s)
	for _, of := range []map[string]*jsonschema.Schema{s.Definitions, s.Properties, s.PatternProperties} {
		for _, name := range slices.Sorted(maps.Keys(of)) {
			walk(of[name], visit)
		}
	}
	for _, of := range slices.Concat(s.AllOf, s.AnyOf, s.OneOf, []*jsonschema.Schema{s.Not, s.Items, s.AdditionalProperties}) {
		walk(of, visit)
	}
}

// reader reads values and their annotations.
type reader struct {
	read map[string]int // how often each line with an annotation was read
}

// section describes a map that has exactly these values.
func (r reader) section(s *jsonschema.Schema, path []string, values *yaml.Node) error {
	s.Type = "object"
	if s.AdditionalProperties == nil {
		s.AdditionalProperties = never()
	}
	if s.Properties == nil {
		s.Properties = map[string]*jsonschema.Schema{}
	}
	var errs []error
	for i := 0; i < len(values.Content); i += 2 {
		key, value := values.Content[i], values.Content[i+1]
		of := append(slices.Clone(path), key.Value)
		described, required, err := r.value(of, key, value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", strings.Join(of, "."), err))
			continue
		}
		if s.Properties[key.Value] != nil {
			errs = append(errs, fmt.Errorf("%s: schema.yaml has it, too", strings.Join(of, ".")))
			continue
		}
		s.Properties[key.Value] = described
		s.PropertyOrder = append(s.PropertyOrder, key.Value)
		if required {
			s.Required = append(s.Required, key.Value)
		}
	}
	return errors.Join(errs...)
}

// value describes a value, and whether the map that contains it requires it.
func (r reader) value(path []string, key, value *yaml.Node) (*jsonschema.Schema, bool, error) {
	annotated, err := r.annotations(key.HeadComment)
	if err != nil {
		return nil, false, err
	}
	required := annotated["required"] == true
	if _, ok := annotated["required"]; ok && !required {
		return nil, false, errors.New("required can only be true")
	}
	delete(annotated, "required")
	s, err := parse(annotated)
	if err != nil {
		return nil, false, err
	}
	if s.Ref != "" {
		if len(annotated) > 1 {
			return nil, false, errors.New("draft 7 ignores keywords beside $ref")
		}
		return s, required, nil
	}
	if s.Type == "" && s.Types == nil {
		if s.Type, err = typeOf(value); err != nil {
			return nil, false, err
		}
	}
	if value.Kind == yaml.SequenceNode && s.Items == nil {
		s.Items, err = item(value)
	}
	documented := strings.Contains("\n"+key.HeadComment, "\n# -- ")
	closed := s.AdditionalProperties != nil && isNever(s.AdditionalProperties)
	if value.Kind == yaml.MappingNode && len(value.Content) > 0 && (!documented || closed) {
		err = r.section(s, path, value)
	}
	return s, required, err
}

// item describes the items of a list by its default.
func item(list *yaml.Node) (*jsonschema.Schema, error) {
	var types []string
	for _, value := range list.Content {
		name, err := typeOf(value)
		if err != nil {
			return nil, err
		}
		types = append(types, name)
	}
	if types = slices.Compact(types); len(types) != 1 {
		return nil, errors.New("the default does not show the type of the items: write `# @schema item: …` above it")
	}
	return &jsonschema.Schema{Type: types[0]}, nil
}

// typeOf returns the type of a default.
func typeOf(value *yaml.Node) (string, error) {
	names := map[string]string{
		"!!map": "object", "!!seq": "array", "!!str": "string", "!!int": "integer", "!!float": "number", "!!bool": "boolean",
	}
	name := names[value.ShortTag()]
	if name == "" {
		return "", fmt.Errorf("the default does not show the type, but %s: write `# @schema type: …` above it", value.ShortTag())
	}
	return name, nil
}

// annotation is a line of a comment with an annotation.
var annotation = regexp.MustCompile(`# @schema .*`)

// annotations returns the keywords in a comment.
func (r reader) annotations(comment string) (map[string]any, error) {
	all := map[string]any{}
	set := func(keyword string, value any) error {
		if _, ok := all[keyword]; ok {
			return fmt.Errorf("%s is set twice", keyword)
		}
		all[keyword] = value
		return nil
	}
	for line := range strings.Lines(comment) {
		line = strings.TrimSpace(line)
		if annotation.FindString(line) != line || line == "" {
			continue
		}
		r.read[line]++
		_, text, _ := strings.Cut(line, "@schema")
		for part := range strings.SplitSeq(text, ";") {
			keyword, value, found := strings.Cut(strings.TrimSpace(part), ":")
			if !found {
				return nil, fmt.Errorf("%q is not `keyword: value`", strings.TrimSpace(part))
			}
			decoded, err := decode(keyword, strings.TrimSpace(value))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", keyword, err)
			}
			switch keyword {
			case "item":
				err = set("items", map[string]any{"type": decoded})
			case "itemEnum":
				err = set("items", map[string]any{"type": "string", "enum": decoded})
			case "itemRef":
				err = set("items", map[string]any{"$ref": decoded})
			default:
				err = set(keyword, decoded)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// decode returns the value of a keyword.
func decode(keyword, text string) (any, error) {
	switch keyword {
	case "pattern", "$ref", "itemRef":
		return text, nil
	}
	var value any
	err := yaml.Unmarshal([]byte(text), &value)
	return value, err
}

// unread reports an annotation that is not above a value, and would have no effect.
func (r reader) unread(content []byte) error {
	var errs []error
	number := 0
	for line := range strings.Lines(string(content)) {
		number++
		found := strings.TrimSpace(annotation.FindString(line))
		switch {
		case found == "":
		case r.read[found] > 0:
			r.read[found]--
		default:
			errs = append(errs, fmt.Errorf("line %d: the annotation is not in the comment above a value", number))
		}
	}
	return errors.Join(errs...)
}

// parse returns a schema. A keyword that is none of [supported] is an error.
func parse(keywords map[string]any) (*jsonschema.Schema, error) {
	text, err := json.Marshal(keywords)
	if err != nil {
		return nil, err
	}
	s := &jsonschema.Schema{}
	if err := json.Unmarshal(text, s); err != nil {
		return nil, err
	}
	walk(s, func(s *jsonschema.Schema) { err = errors.Join(err, known(s)) })
	return s, err
}

// supported are the keywords that a schema may have: of draft 7, without those that [walk] does not
// enter.
var supported = []string{
	"$ref", "additionalProperties", "allOf", "anyOf", "const", "definitions", "description", "enum", "exclusiveMaximum", "exclusiveMinimum", "format",
	"items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf",
	"pattern", "patternProperties", "properties", "required", "title", "type", "uniqueItems",
}

// known reports the keywords of a schema, without those in it, that it may not have.
func known(s *jsonschema.Schema) error {
	text, err := json.Marshal(s)
	if err != nil || text[0] != '{' {
		return err // true and false are schemas, too
	}
	var written map[string]json.RawMessage
	if err := json.Unmarshal(text, &written); err != nil {
		return err
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(written)) {
		if !slices.Contains(supported, name) {
			errs = append(errs, fmt.Errorf("unknown keyword %q", name))
		}
	}
	return errors.Join(errs...)
}

// never returns the schema that admits nothing.
func never() *jsonschema.Schema { return &jsonschema.Schema{Not: &jsonschema.Schema{}} }

// isNever reports whether a schema is that one.
func isNever(s *jsonschema.Schema) bool {
	text, err := json.Marshal(s)
	return err == nil && string(text) == "false"
}
