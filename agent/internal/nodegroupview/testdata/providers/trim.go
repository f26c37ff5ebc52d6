//go:build ignore

// This program reads the CustomResourceDefinition of a provider's template from its standard input,
// and writes what the tests of the provider pages need of it: one version, without descriptions and
// without the conversion webhook, with the label of Cluster API's contract. README.md lists the
// sources. Properties that are named after the version are left out, wherever they are.
//
//	go run trim.go <contract> <version> [<property> …] <crd.yaml >trimmed.yaml
package main

import (
	"fmt"
	"io"
	"os"

	"sigs.k8s.io/yaml"
)

func main() {
	if err := trim(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func trim(contract, version string, without []string) error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var crd map[string]any
	if err := yaml.Unmarshal(text, &crd); err != nil {
		return err
	}
	metadata := crd["metadata"].(map[string]any)
	crd["metadata"] = map[string]any{"name": metadata["name"], "labels": map[string]any{"cluster.x-k8s.io/" + contract: version}}
	spec := crd["spec"].(map[string]any)
	delete(spec, "conversion")
	for _, each := range spec["versions"].([]any) {
		candidate := each.(map[string]any)
		if candidate["name"] != version {
			continue
		}
		delete(candidate, "additionalPrinterColumns")
		delete(candidate, "deprecated")
		delete(candidate, "deprecationWarning")
		candidate["served"], candidate["storage"] = true, true
		candidate["schema"] = map[string]any{"openAPIV3Schema": reduced(candidate["schema"].(map[string]any)["openAPIV3Schema"], without)}
		spec["versions"] = []any{candidate}
		out, err := yaml.Marshal(crd)
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(out)
		return err
	}
	return fmt.Errorf("%v has no version %s", metadata["name"], version)
}

// reduced removes the descriptions of a schema, but no property with that name, and some
// properties.
func reduced(schema any, without []string) any {
	switch schema := schema.(type) {
	case map[string]any:
		if _, text := schema["description"].(string); text {
			delete(schema, "description")
		}
		if properties, ok := schema["properties"].(map[string]any); ok {
			for _, name := range without {
				delete(properties, name)
			}
		}
		for key := range schema {
			schema[key] = reduced(schema[key], without)
		}
	case []any:
		for i := range schema {
			schema[i] = reduced(schema[i], without)
		}
	}
	return schema
}
