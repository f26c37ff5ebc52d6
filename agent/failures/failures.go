// Package failures says what it means that a Machine's infrastructure is not ready: whether the machine will come, and if not, why not. Cluster
// API knows no final failure, and every provider reports errors in its own way, most with one reason for all of them.
//
// What providers write is data (rules.yaml). The package has no state; its functions are safe for concurrent use.
package failures

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"time"

	"sigs.k8s.io/yaml"
)

// Class is what a report means. Every class but [Transient] means that the machine will not come.
type Class string

const (
	// Transient means that the machine may still come. Unknown reports are transient.
	Transient Class = "Transient"
	// Capacity means that there is no room for such a machine now.
	Capacity Class = "Capacity"
	// Quota means that the account or project has reached a limit.
	Quota Class = "Quota"
	// Configuration means that a setting is wrong and has to be corrected.
	Configuration Class = "Configuration"
	// GivenUp means that the provider has stopped trying and does not say why.
	GivenUp Class = "GivenUp"
)

// Says is the class in a few words, for people; "" for [Transient].
func (c Class) Says() string {
	switch c {
	case Transient:
	case Capacity:
		return "there is no capacity"
	case Quota:
		return "a quota is used up"
	case Configuration:
		return "its configuration is wrong"
	case GivenUp:
		return "it will not come"
	}
	return ""
}

// Verdict is what a report means.
type Verdict struct {
	// Class is never empty.
	Class Class
	// After is how old the machine must be before the class counts; until then the report is [Transient].
	After time.Duration
	// See names a condition of the infrastructure object that says more, and is to be judged in place of the report; empty for none. Class is
	// [Transient] then.
	See string
}

// Of judges the reason and the message of a condition that is False, by the kind of the infrastructure object.
func Of(kind, reason, message string) Verdict {
	for _, r := range rules {
		if r.fits(kind, reason, message) {
			return r.verdict
		}
	}
	return Verdict{Class: Transient}
}

type rule struct {
	kind            string
	reason, message *regexp.Regexp // nil for any
	verdict         Verdict
}

func (r rule) fits(kind, reason, message string) bool {
	return (r.kind == "" || r.kind == kind) &&
		(r.reason == nil || r.reason.MatchString(reason)) && (r.message == nil || r.message.MatchString(message))
}

//go:embed rules.yaml
var data []byte

var rules = func() []rule {
	read, err := parse(data)
	if err != nil {
		panic(err) // a test reads them too
	}
	return read
}()

// parse reads rules.
func parse(text []byte) ([]rule, error) {
	var lines []struct {
		Kind, Reason, Message, See, After string
		Means                             Class
	}
	if err := yaml.UnmarshalStrict(text, &lines); err != nil {
		return nil, fmt.Errorf("reading rules: %w", err)
	}
	read := make([]rule, 0, len(lines))
	for i, line := range lines {
		r := rule{kind: line.Kind, verdict: Verdict{Class: line.Means, See: line.See}}
		var err error
		if line.Reason != "" {
			if r.reason, err = regexp.Compile("^(" + line.Reason + ")$"); err != nil {
				return nil, fmt.Errorf("[%d].reason: %w", i, err)
			}
		}
		if line.Message != "" {
			if r.message, err = regexp.Compile("(?is)" + line.Message); err != nil {
				return nil, fmt.Errorf("[%d].message: %w", i, err)
			}
		}
		if line.After != "" {
			if r.verdict.After, err = time.ParseDuration(line.After); err != nil {
				return nil, fmt.Errorf("[%d].after: %w", i, err)
			}
		}
		if line.See != "" && line.Means == "" {
			r.verdict.Class = Transient
		}
		if !slices.Contains([]Class{Transient, Capacity, Quota, Configuration, GivenUp}, r.verdict.Class) {
			return nil, fmt.Errorf("[%d].means: %q is no class", i, line.Means)
		}
		if r.reason == nil && r.message == nil {
			return nil, fmt.Errorf("[%d]: neither reason nor message", i)
		}
		read = append(read, r)
	}
	return read, nil
}
