// Package failures interprets why a Machine's infrastructure is not ready: whether the machine will
// still come and, if not, why not. Cluster API has no notion of a final failure. Every provider
// reports errors in its own way, and most use one reason for all of them.
//
// The rules about providers are data (rules.yaml). The package has no state; its functions are safe
// for concurrent use.
package failures

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"time"

	"sigs.k8s.io/yaml"
)

// Class is why a machine does not come. Every class except [Transient] means that it will not.
//
// Claims and metrics carry the names, so a name never changes its meaning.
type Class string

// Classes of reports.
const (
	// Transient means that the machine may still come. Unknown reports are transient.
	Transient Class = "Transient"
	// Capacity means that there is currently no capacity for such a machine.
	Capacity Class = "Capacity"
	// Quota means that the account or project has reached a limit.
	Quota Class = "Quota"
	// Configuration means that a setting is wrong and must be corrected.
	Configuration Class = "Configuration"
	// GivenUp means that the provider has stopped trying, without a specific reason, or that the
	// infrastructure object no longer exists.
	GivenUp Class = "GivenUp"
)

// Classes of failures that do not follow from a report of the infrastructure.
const (
	// TimedOut means that the machine took several times its deadline, or was never created.
	TimedOut Class = "TimedOut"
	// Reported means that the claim's holder released the claim as failed.
	Reported Class = "Reported"
)

// Final returns the classes that mean that the machine will not come.
func Final() []Class { return []Class{Capacity, Quota, Configuration, GivenUp, TimedOut, Reported} }

// Says describes the class of a report in a few words, for messages. It is "" for [Transient].
func (c Class) Says() string {
	switch c {
	case Transient, TimedOut, Reported:
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

// Verdict is the meaning of a report.
type Verdict struct {
	// Class is never empty.
	Class Class
	// After is how old the machine must be before the class applies. Until then the report is
	// [Transient].
	After time.Duration
	// Gone means that the instance existed and exists no more, or will never run again. Only such a
	// class applies to a Machine that has its provider ID already.
	Gone bool
	// See names a more specific condition of the infrastructure object, which is to be evaluated
	// instead of the report. It is usually empty. If set, Class is [Transient].
	See string
}

// Of interprets the reason and the message of a condition with status False, for the kind of the
// infrastructure object.
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
	reason, message *regexp.Regexp // nil matches anything
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
		panic(err) // a test parses the rules too
	}
	return read
}()

// parse parses rules.
func parse(text []byte) ([]rule, error) {
	var lines []struct {
		Kind, Reason, Message, See, After string
		Means                             Class
		Gone                              bool
	}
	if err := yaml.UnmarshalStrict(text, &lines); err != nil {
		return nil, fmt.Errorf("reading rules: %w", err)
	}
	read := make([]rule, 0, len(lines))
	for i, line := range lines {
		r := rule{kind: line.Kind, verdict: Verdict{Class: line.Means, See: line.See, Gone: line.Gone}}
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
			return nil, fmt.Errorf("[%d].means: %q is not a class", i, line.Means)
		}
		if r.verdict.Gone && r.verdict.Class == Transient {
			return nil, fmt.Errorf("[%d].gone: a report of an instance that is gone cannot be transient", i)
		}
		if r.reason == nil && r.message == nil {
			return nil, fmt.Errorf("[%d]: neither reason nor message", i)
		}
		read = append(read, r)
	}
	return read, nil
}
