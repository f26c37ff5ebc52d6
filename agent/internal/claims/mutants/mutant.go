package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// mutant is one deliberate breakage of the claim engine or of its protocol.
type mutant struct {
	// name says what is broken.
	name string
	// edits make the breakage; all of them together.
	edits []edit
	// test is the test that has to catch it, of either package; empty means the protocol's [modelTest].
	test string
	// world, instead of a test, is the explored world that has to show the violation: the arguments of claimmodel.
	world, violation string
	// both says that the histories, or the test, have to catch it as well.
	both bool
	// smoke marks one that is caught within a few histories, so that it can be tried with every run of the unit tests.
	smoke bool
}

// edit replaces a text of the mutated packages' sources. The text must occur there exactly once, so that a mutant that no longer
// says what it means is noticed.
type edit struct {
	old, new string
}

// overlay writes the mutated files of the packages in these folders into dir and returns where each of them belongs.
func (m mutant) overlay(folders []string, dir string) (map[string]string, error) {
	texts := map[string]string{}
	for _, folder := range folders {
		paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
		if err != nil {
			return nil, fmt.Errorf("mutant %q: %w", m.name, err)
		}
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			data, err := os.ReadFile(path) //nolint:gosec // a file of this repository
			if err != nil {
				return nil, fmt.Errorf("mutant %q: %w", m.name, err)
			}
			texts[path] = string(data)
		}
	}
	mutated := map[string]bool{}
	for _, e := range m.edits {
		n := 0
		for path, text := range texts {
			if here := strings.Count(text, e.old); here > 0 {
				n += here
				texts[path] = strings.Replace(text, e.old, e.new, 1)
				mutated[path] = true
			}
		}
		if n != 1 {
			return nil, fmt.Errorf("mutant %q no longer applies: this occurs %d times:\n%s", m.name, n, e.old)
		}
	}
	replace := make(map[string]string, len(mutated))
	for path := range mutated {
		file := filepath.Join(dir, filepath.Base(filepath.Dir(path))+"-"+filepath.Base(path))
		if err := os.WriteFile(file, []byte(texts[path]), 0o600); err != nil {
			return nil, fmt.Errorf("mutant %q: %w", m.name, err)
		}
		replace[path] = file
	}
	return replace, nil
}
