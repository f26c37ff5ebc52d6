package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const definition = `
spec:
  group: example.com
  names: {kind: Thing}
  scope: Namespaced
  versions:
  - name: v1
    schema:
      openAPIV3Schema:
        description: |-
          Thing is an
          example.
        properties:
          apiVersion: {type: string}
          kind: {type: string}
          metadata: {type: object}
          spec:
            type: object
            description: spec is what is wanted.
            required: [mode]
            x-kubernetes-validations: [{message: "a or b", rule: r}]
            properties:
              mode:
                {type: string, description: "mode is <a> or b|c.", enum: [a, ""], default: a, x-kubernetes-validations: [{message: mode is immutable}]}
              name: {type: string, description: name is one., minLength: 1, maxLength: 63, pattern: "^[a-z]*$"}
              size: {description: size is any., x-kubernetes-int-or-string: true}
              count: {type: integer, description: count is some., minimum: 0, maximum: 5}
              parts:
                type: array
                description: parts are some.
                minItems: 2
                items: {type: object, properties: {at: {type: string, format: date-time, description: at is when.}}}
              kept:
                type: object
                description: kept is by name.
                additionalProperties: {type: string, maxLength: 9, x-kubernetes-validations: [{rule: "true", message: write a letter}]}
              more:
                type: object
                description: more is by name.
                additionalProperties: {type: object, properties: {x: {type: boolean, description: x is so.}}}
          status:
            type: object
            description: status is what is.
            properties:
              conditions: {type: array, description: conditions are several., items: {type: object, properties: {type: {type: string}}}}
`

func written(t *testing.T, crd string) (string, error) {
	t.Helper()
	dir := t.TempDir()
	page, file := filepath.Join(dir, "page.md"), filepath.Join(dir, "crd.yaml")
	if err := os.WriteFile(file, []byte(crd), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(page, []string{file}); err != nil {
		return "", err
	}
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	return string(content), nil
}

func TestAPageHasEveryField(t *testing.T) {
	page, err := written(t, definition)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(page, "\n## ")
	want := strings.Join([]string{
		"Thing",
		"",
		"`apiVersion: example.com/v1`, in a namespace. Thing is an example.",
		"",
		"| field | type | description |",
		"|---|---|---|",
		"| `spec` | object | spec is what is wanted. Rule: a or b. |",
		"| `spec.count` | integer | count is some. Constraints: at least 0, at most 5. |",
		"| `spec.kept` | map of string | kept is by name. Each value: at most 9 characters. Each value: write a letter. |",
		"| `spec.mode` | string | mode is &lt;a> or b\\|c. REQUIRED. Default: `a`. Constraints: one of `a`, `\"\"`. |",
		"| `spec.more` | map of object | more is by name. |",
		"| `spec.more.*.x` | boolean | x is so. |",
		"| `spec.name` | string | name is one. Constraints: at most 63 characters, not empty, pattern `^[a-z]*$`. |",
		"| `spec.parts` | [object] | parts are some. Constraints: at least 2 elements. |",
		"| `spec.parts[].at` | time | at is when. |",
		"| `spec.size` | integer or string | size is any. |",
		"| `status` | object | status is what is. |",
		"| `status.conditions` | [object] | conditions are several. |",
		"",
	}, "\n")
	if section != want {
		t.Errorf("got\n%s\nwant\n%s", section, want)
	}
}

func TestMistakesAreNamed(t *testing.T) {
	for name, tc := range map[string]struct{ crd, want string }{
		"a field without a description": {strings.Replace(definition, "description: x is so.", "format: x", 1), "spec.more.*.x has no description"},
		"no definition":                 {"spec: {}", "no version"},
		"not YAML":                      {"\t", "crd.yaml"},
	} {
		if _, err := written(t, tc.crd); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}
