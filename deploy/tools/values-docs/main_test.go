package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// chart writes a chart's files and returns its folder.
func chart(t *testing.T, values, schema string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"Chart.yaml": "name: c\ndescription: Does x\n", "values.yaml": values, "values.schema.json": schema,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestAPageHasEveryValue(t *testing.T) {
	page := filepath.Join(t.TempDir(), "values.md")
	err := run(page, []string{chart(t, `# Values of the chart.

# -- How many: at most
# ten.
# @schema minimum: 0; maximum: 10
replicas: 2

# Not a description.
log:
  # @schema enum: ["", info]
  # -- Level.
  level: info
  # -- Formats, for a|b.
  formats: [json]
# -- Rules. For example:
#   a: b
#   c: d
# @schema $ref: #/definitions/rules
rules: {}
# -- Labels.
labels:
  a: b
# -- Long.
long: [aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa]
# -- Either.
# @schema type: [integer, string]
# @schema minimum: 1
either: 1
# -- Ports.
# @schema itemRef: #/definitions/port
ports: []
# -- Levels.
levels: []
`, `{"definitions": {
  "port": {"type": "integer"},
  "rules": {"type": "object", "properties": {"a": {"type": "string"}}}
}, "properties": {
  "global": {"type": "object"},
  "replicas": {"type": "integer"},
  "log": {"type": "object", "properties": {
    "level": {"enum": ["", "info"]},
    "formats": {"type": "array", "items": {"type": "string"}}
  }},
  "rules": {"$ref": "#/definitions/rules"},
  "labels": {},
  "long": {"type": "array", "items": {"type": "object"}},
  "either": {"type": ["integer", "string"]},
  "ports": {"type": "array", "items": {"$ref": "#/definitions/port"}},
  "levels": {"type": "array", "items": {"type": "string", "enum": ["a", "bs"]}},
  "was": {"description": "Deprecated: has no effect."}
}}`)})
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, got, _ := strings.Cut(string(content), "|---|---|---|---|\n")
	want := "| `replicas` | integer | `2` | How many: at most ten. |\n" +
		"| `log.level` | `\"\"`, `info` | `info` | Level. |\n" +
		"| `log.formats` | list of strings | `[\"json\"]` | Formats, for a\\|b. |\n" +
		"| `rules` | map |  | Rules. values.yaml has an example. |\n" +
		"| `labels` | any | `{\"a\":\"b\"}` | Labels. |\n" +
		"| `long` | list of maps | … | Long. |\n" +
		"| `either` | integer or string | `1` | Either. |\n" +
		"| `ports` | list of integers |  | Ports. |\n" +
		"| `levels` | list of `a`, `bs` |  | Levels. |\n" +
		"| `was` | any |  | Deprecated: has no effect. |\n"
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	if !strings.Contains(string(content), "\n## c\n\nDoes x. ") {
		t.Errorf("no heading in:\n%s", content)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	for want, files := range map[string][2]string{
		"a.b has no comment":                 {"a:\n  b: 1\n", `{"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}`},
		"a has no comment":                   {"# Not a description.\na: {}\n", `{"properties": {"a": {"type": "object"}}}`},
		"values.schema.json has no a.b":      {"a:\n  # -- B.\n  b: 1\n", `{"properties": {"a": {"type": "object"}}}`},
		"values.yaml has no a.c":             {"a:\n  # -- B.\n  b: 1\n", `{"properties": {"a": {"properties": {"b": {}, "c": {}}}}}`},
		"#/definitions/b is not":             {"a: 1\n", `{"properties": {"a": {"$ref": "#/definitions/b"}}}`},
		"values.yaml is not a map":           {"- 1\n", `{}`},
		"values.yaml: yaml":                  {"a: b: c\n", `{}`},
		"values.schema.json: unexpected end": {"a: 1\n", `{`},
	} {
		err := run(filepath.Join(t.TempDir(), "values.md"), []string{chart(t, files[0], files[1])})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
