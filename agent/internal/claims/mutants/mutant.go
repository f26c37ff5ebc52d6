package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// mutant is one deliberate breakage of the claim engine or of its protocol.
type mutant struct {
	// name describes the breakage.
	name string
	// edits make the breakage, all of them together.
	edits []edit
	// test is the test of either package that must catch it. Empty means the protocol's
	// [modelTest].
	test string
	// world is used instead of a test: the arguments of claimmodel for the explored world that must
	// show the violation.
	world, violation string
	// both means that the histories, or the test, must catch it as well.
	both bool
	// smoke marks a mutant that a few histories catch, so that every run of the unit tests can try
	// it.
	smoke bool
}

// edit replaces a text in the mutated packages' sources. The text must occur there exactly once, so
// that a mutant that no longer applies is noticed.
type edit struct {
	old, new string
}

// overlay writes the mutated files of the packages in these folders into dir. It returns the
// mutated file for each original path.
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
