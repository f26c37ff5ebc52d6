package main

import (
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	got, err := parse(strings.Join([]string{
		`?	Desc{fqName: "a_refused_total", help: "Why, in \"words\": {x}.", constLabels: {}, variableLabels: {reason,method}}`,
		`*prometheus.GaugeVec	Desc{fqName: "a_groups", help: "", constLabels: {}, variableLabels: {}}`,
		`*prometheus.valueFunc	Desc{fqName: "a_view", help: "Objects.", constLabels: {view="b"}, variableLabels: {}}`,
		`*prometheus.valueFunc	Desc{fqName: "a_view", help: "Objects.", constLabels: {view="a, \"b\""}, variableLabels: {}}`,
		`*prometheus.HistogramVec	Desc{fqName: "a_wait_seconds", help: "Time.", constLabels: {}, variableLabels: {name}}`,
	}, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []metric{
		{name: "a_groups", kind: "gauge"},
		{name: "a_refused_total", kind: "counter", help: `Why, in "words": {x}.`, labels: []string{"reason", "method"}},
		{name: "a_view", kind: "gauge", help: "Objects.", labels: []string{"view"}},
		{name: "a_wait_seconds", kind: "histogram", help: "Time.", labels: []string{"name"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, err := parse("panic: no\n"); err == nil {
		t.Error("what is no description was taken for one")
	}
}

func TestUnit(t *testing.T) {
	for name, want := range map[string]string{"a_seconds": "seconds", "a_cpu_seconds_total": "seconds", "a_bytes": "bytes", "a_total": ""} {
		if got := unit(name); got != want {
			t.Errorf("unit(%s) = %q, want %q", name, got, want)
		}
	}
}
