package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// mutant is one deliberate breakage of the claim engine.
type mutant struct {
	// name says what is broken.
	name string
	// edits make the breakage; all of them together.
	edits []edit
	// test is the test that has to catch it; empty means the protocol's [modelTest].
	test string
	// smoke marks one that is caught within a few histories, so that it can be tried with every run of the unit tests.
	smoke bool
}

// edit replaces a text of one file of package claims. The text must occur there exactly once, so that a mutant that no longer
// says what it means is noticed.
type edit struct {
	file, old, new string
}

// overlay writes the mutated files into dir and returns where each of them belongs.
func (m mutant) overlay(source, dir string) (map[string]string, error) {
	texts := map[string]string{}
	for _, e := range m.edits {
		path := filepath.Join(source, e.file)
		text, read := texts[path]
		if !read {
			data, err := os.ReadFile(path) //nolint:gosec // a file of this repository
			if err != nil {
				return nil, fmt.Errorf("mutant %q: %w", m.name, err)
			}
			text = string(data)
		}
		if n := strings.Count(text, e.old); n != 1 {
			return nil, fmt.Errorf("mutant %q no longer applies: its text occurs %d times in %s", m.name, n, e.file)
		}
		texts[path] = strings.Replace(text, e.old, e.new, 1)
	}
	replace := make(map[string]string, len(texts))
	for path, text := range texts {
		mutated := filepath.Join(dir, filepath.Base(path))
		if err := os.WriteFile(mutated, []byte(text), 0o600); err != nil {
			return nil, fmt.Errorf("mutant %q: %w", m.name, err)
		}
		replace[path] = mutated
	}
	return replace, nil
}
