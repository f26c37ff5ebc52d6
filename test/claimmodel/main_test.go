package main

import (
	"regexp"
	"testing"
)

// TestShortTable runs what takes seconds: the rules hold, and leaving out any rule causes a
// violation.
func TestShortTable(t *testing.T) {
	if err := runTable(table(true), regexp.MustCompile(""), t.Output()); err != nil {
		t.Fatal(err)
	}
}

// TestTableTellsFailure verifies that the table reports a run with an unexpected result.
func TestTableTellsFailure(t *testing.T) {
	for _, run := range table(true) {
		switch run.name {
		case "1 claim":
			run.violation = "I3"
		case "without tombstone":
			run.violation = ""
		default:
			continue
		}
		if err := runTable([]row{run}, regexp.MustCompile(""), t.Output()); err == nil {
			t.Errorf("%q does not end as expected, and no error is reported", run.name)
		}
	}
}
