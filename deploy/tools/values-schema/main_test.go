package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// generate writes a chart's files, and returns its schema.
func generate(t *testing.T, values, schema string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{"values.yaml": values, "schema.yaml": schema} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "values.schema.json")
	if err := run(dir, file); err != nil {
		return "", err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(content), nil
}

const values = `# Values of the chart.

# -- How many.
# @schema minimum: 0; maximum: 10
replicas: 2

# Not a description.
log:
  # @schema enum: ["", info]
  # -- Level.
  # @schema required: true
  level: info
  # -- A pattern with colons, commas and braces.
  # @schema pattern: ^(|a:[0-9]{2,3})$
  pattern: ""
# -- Any keys.
free:
  a: b
# -- These keys.
# @schema additionalProperties: false
gates:
  A: true
# -- Strings.
# @schema additionalProperties: {type: string}
labels:
  a: b
# -- By its default.
ports: [1, 2]
# -- Maps.
# @schema item: object
volumes: []
# -- Names.
# @schema itemEnum: [a, b]
names: []
# -- Rules.
# @schema itemRef: #/definitions/rule
rules: []
# -- A rule.
# @schema $ref: #/definitions/rule
rule: {}
# -- A share.
# @schema type: [number, "null"]; exclusiveMinimum: 0
share: null
`

const fragment = `title: Values
properties:
  was: {description: 'Deprecated: has no effect.'}
definitions:
  rule: {type: object, properties: {a: {$ref: '#/definitions/word'}}, additionalProperties: false}
  word: {type: string, minLength: 1}
`

const want = `{
  "$schema": "http://json-schema.org/draft-07/schema#",
  "title": "Values",
  "type": "object",
  "properties": {
    "replicas": {"type": "integer", "minimum": 0, "maximum": 10},
    "log": {
      "type": "object",
      "properties": {"level": {"type": "string", "enum": ["", "info"]}, "pattern": {"type": "string", "pattern": "^(|a:[0-9]{2,3})$"}},
      "required": ["level"],
      "additionalProperties": false
    },
    "free": {"type": "object"},
    "gates": {"type": "object", "properties": {"A": {"type": "boolean"}}, "additionalProperties": false},
    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    "ports": {"type": "array", "items": {"type": "integer"}},
    "volumes": {"type": "array", "items": {"type": "object"}},
    "names": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
    "rules": {"type": "array", "items": {"$ref": "#/definitions/rule"}},
    "rule": {"$ref": "#/definitions/rule"},
    "share": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "was": {"description": "Deprecated: has no effect."}
  },
  "definitions": {
    "rule": {"type": "object", "properties": {"a": {"$ref": "#/definitions/word"}}, "additionalProperties": false},
    "word": {"type": "string", "minLength": 1}
  },
  "additionalProperties": false
}
`

// squeezed is JSON without the white space between its tokens.
func squeezed(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.NewReplacer(`": `, `":`, `, "`, `,"`).Replace(strings.Join(lines, ""))
}

func TestASchemaHasEveryValueAndItsAnnotations(t *testing.T) {
	got, err := generate(t, values, fragment)
	if err != nil {
		t.Fatal(err)
	}
	if squeezed(got) != squeezed(want) {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	for range 20 {
		again, err := generate(t, values, fragment)
		if err != nil || again != got {
			t.Fatalf("the same files have another schema: %v\n%s", err, again)
		}
	}
}

func TestMistakesAreNamed(t *testing.T) {
	const title = "title: Values\n"
	for want, files := range map[string][2]string{
		"a.b: unknown keyword \"minimal\"":           {"a:\n  # @schema minimal: 1\n  b: 1\n", title},
		"unknown keyword \"prefixItems\"":            {"# @schema prefixItems: [{type: string}]\na: [b]\n", title},
		"unknown keyword \"typ\"":                    {"# @schema additionalProperties: {typ: string}\na: {}\n", title},
		"a: \"minimum\" is not `keyword: value`":     {"# @schema minimum\na: 1\n", title},
		"a: minimum is set twice":                    {"# @schema minimum: 1\n# @schema minimum: 2\na: 1\n", title},
		"a: items is set twice":                      {"# @schema item: string; itemEnum: [a]\na: []\n", title},
		"a: required can only be true":               {"# @schema required: false\na: 1\n", title},
		"a: draft 7 ignores keywords beside $ref":    {"# @schema $ref: #/definitions/x; minimum: 1\na: 1\n", title},
		"a: the default does not show the type of":   {"a: []\n", title},
		"a: the default does not show the type, but": {"a: null\n", title},
		"line 3: the annotation is not":              {"a:\n  b: 1\n  # @schema minimum: 1\n\nc: 2\n", title},
		"line 1: the annotation is not":              {"a: 1 # @schema minimum: 1\n", title},
		"the schema does not admit the defaults":     {"# @schema minimum: 2\na: 1\n", title},
		"definitions/x":                              {"# @schema $ref: #/definitions/x\na: 1\n", title},
		"error parsing regexp":                       {"# @schema pattern: (\na: \"\"\n", title},
		"nothing refers to the definition x":         {"a: 1\n", title + "definitions: {x: {type: string}}\n"},
		"a: schema.yaml has it, too":                 {"a: 1\n", title + "properties: {a: {}}\n"},
		"schema.yaml: it has no title":               {"a: 1\n", "properties: {}\n"},
		"schema.yaml: unknown keyword":               {"a: 1\n", title + "definition: {}\n"},
		"schema.yaml: yaml":                          {"a: 1\n", "a: b: c\n"},
		"values.yaml: it is not a map":               {"- 1\n", title},
		"values.yaml: yaml":                          {"a: b: c\n", title},
	} {
		_, err := generate(t, files[0], files[1])
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
