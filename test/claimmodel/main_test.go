package main

import (
	"regexp"
	"testing"
)

// TestShortTable runs what takes seconds: the rules hold, and each rule that is left out is missed.
func TestShortTable(t *testing.T) {
	if err := runTable(table(true), regexp.MustCompile(""), t.Output()); err != nil {
		t.Fatal(err)
	}
}

// TestTableTellsFailure asks that a run which ends otherwise than it must is told.
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
			t.Errorf("%q ends otherwise than asked for, and nobody says so", run.name)
		}
	}
}
