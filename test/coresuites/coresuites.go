// Package coresuites evaluates the results of Karpenter core's own test suites for a provider:
// which specs passed, which cannot run against simulated machines and why, and which failed.
package coresuites

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"sigs.k8s.io/yaml"
)

// Spec is the result of one spec of a suite.
type Spec struct {
	Suite string
	// Name consists of the texts of the spec's containers and its own, separated by blanks, as
	// Ginkgo matches it.
	Name string
	// OfSuite reports that it is no spec but what runs before or after all of them, under the name
	// of its kind. It is among the results only if it has not passed.
	OfSuite bool
	// State is Ginkgo's state: passed, skipped, or the kind of failure.
	State   string
	Took    time.Duration
	Message string
}

// Read returns the specs in Ginkgo's JSON report.
func Read(report io.Reader, suite string) ([]Spec, error) {
	var runs []struct {
		SpecReports []struct {
			ContainerHierarchyTexts []string      `json:"ContainerHierarchyTexts"`
			LeafNodeType            string        `json:"LeafNodeType"`
			LeafNodeText            string        `json:"LeafNodeText"`
			State                   string        `json:"State"`
			RunTime                 time.Duration `json:"RunTime"`
			Failure                 struct {
				Message string `json:"Message"`
			} `json:"Failure"`
		} `json:"SpecReports"`
	}
	if err := json.NewDecoder(report).Decode(&runs); err != nil {
		return nil, fmt.Errorf("reading the report of suite %s: %w", suite, err)
	}
	var specs []Spec
	for _, run := range runs {
		for _, r := range run.SpecReports {
			if r.LeafNodeType != "It" {
				if r.State != "passed" {
					specs = append(specs, Spec{
						Suite: suite, Name: r.LeafNodeType, OfSuite: true, State: r.State, Took: r.RunTime, Message: r.Failure.Message,
					})
				}
				continue
			}
			specs = append(specs, Spec{
				Suite: suite, Name: strings.Join(append(slices.Clone(r.ContainerHierarchyTexts), r.LeafNodeText), " "),
				State: r.State, Took: r.RunTime, Message: r.Failure.Message,
			})
		}
	}
	return specs, nil
}

// Suites are core's suites that run against a sandbox. Each of the others is an [Exception] as a
// whole.
func Suites() []string { return []string{"regression", "disruption"} }

// Exception names one or more specs that cannot pass, and why.
type Exception struct {
	Suite string `json:"suite"`
	// Specs is a prefix of the specs' names. It is empty if none of the suite can pass.
	Specs string `json:"specs"`
	Why   string `json:"why"`
}

//go:embed exceptions.yaml
var exceptions []byte

// Exceptions returns the specs that cannot pass against a sandbox.
func Exceptions() ([]Exception, error) {
	var all []Exception
	if err := yaml.UnmarshalStrict(exceptions, &all); err != nil {
		return nil, fmt.Errorf("exceptions.yaml: %w", err)
	}
	return all, nil
}

// Verdict is the evaluation of specs.
type Verdict struct {
	Passed, Failed []Spec
	// Excepted are the specs that were not run, with their exceptions.
	Excepted map[string]Exception
	// Unexplained are specs that were skipped without an exception.
	Unexplained []Spec
	// Stale are exceptions, in suites that ran, that match no spec or a spec that passed.
	Stale []Exception
	// Left are suites that did not run because none of their specs can pass.
	Left []Exception
}

// Evaluate evaluates specs.
func Evaluate(specs []Spec, all []Exception) Verdict {
	v := Verdict{Excepted: map[string]Exception{}}
	used, ran := map[Exception]bool{}, map[string]bool{}
	for _, s := range specs {
		ran[s.Suite] = true
		i := slices.IndexFunc(all, func(e Exception) bool { return e.Suite == s.Suite && strings.HasPrefix(s.Name, e.Specs) })
		switch {
		case s.State == "passed":
			v.Passed = append(v.Passed, s)
		case s.State == "skipped" && i >= 0:
			used[all[i]] = true
			v.Excepted[s.Suite+": "+s.Name] = all[i]
		case s.State == "skipped":
			v.Unexplained = append(v.Unexplained, s)
		default:
			v.Failed = append(v.Failed, s)
		}
	}
	v.Left = lo.Filter(all, func(e Exception, _ int) bool { return e.Specs == "" && !ran[e.Suite] })
	v.Stale = slices.DeleteFunc(slices.Clone(all), func(e Exception) bool { return used[e] || !ran[e.Suite] })
	return v
}

// OK reports whether the specs need no attention.
func (v Verdict) OK() bool {
	return len(v.Failed) == 0 && len(v.Unexplained) == 0 && len(v.Stale) == 0 && len(v.Passed) > 0
}
