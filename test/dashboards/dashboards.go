// Package dashboards plots the charts' Grafana dashboards from metrics that it has recorded, with
// Prometheus's own engine.
package dashboards

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/samber/lo"
)

// Dashboard is a dashboard of a chart, as far as it is plotted.
type Dashboard struct {
	// Name is the file's name without its extension.
	Name   string  `json:"-"`
	Title  string  `json:"title"`
	Panels []Panel `json:"panels"`
}

// Panel is a row's title, a number, a table or a plot.
type Panel struct {
	Type        string   `json:"type"`
	Title       string   `json:"title"`
	GridPos     GridPos  `json:"gridPos"`
	Targets     []Target `json:"targets"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
}

// GridPos is where a panel is, on a grid of 24 columns.
type GridPos struct {
	X int `json:"x"`
	Y int `json:"y"`
	W int `json:"w"`
	H int `json:"h"`
}

// Target is a query of a panel.
type Target struct {
	Expr string `json:"expr"`
	// LegendFormat names a series: {{label}} stands for a label's value.
	LegendFormat string `json:"legendFormat"`
}

// Read returns the dashboards of the charts below a repository's root.
func Read(root string) ([]Dashboard, error) {
	files, err := filepath.Glob(filepath.Join(root, "deploy/charts/*/dashboards/*.json"))
	if err != nil {
		return nil, err
	}
	var all []Dashboard
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		d := Dashboard{Name: strings.TrimSuffix(filepath.Base(file), ".json")}
		if err := json.Unmarshal(content, &d); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		all = append(all, d)
	}
	return all, nil
}

// Digests returns the content of [DigestsFile], which `make dashboards` writes beside the pictures: a line for
// each dashboard, with the SHA-256 of what is plotted of it.
func Digests(all []Dashboard) (string, error) {
	var lines strings.Builder
	for _, d := range all {
		plotted, err := json.Marshal(d)
		if err != nil {
			return "", fmt.Errorf("encoding %s: %w", d.Name, err)
		}
		fmt.Fprintf(&lines, "%x  %s\n", sha256.Sum256(plotted), d.Name)
	}
	return lines.String(), nil
}

// DigestsFile is the name of the file in the pictures' folder that has their [Digests].
const DigestsFile = "dashboards.sha256"

// quiet holds, by dashboard, the panels about failures that `make dashboards` does not cause.
// test/monitoring checks that their queries name metrics that exist.
var quiet = map[string][]string{
	"karpenter-capi-hub": {"Claims whose owner is missing", "Writes to the hub that are refused or fail"},
}

// still holds, by dashboard, the further panels whose counters may stay zero: about limits, claims without
// an owner, and certificates, which the sandbox issues before the recording.
var still = map[string][]string{
	"karpenter-capi-hub":   {"Refused because of a limit"},
	"karpenter-capi-spoke": {"Claim sync", "Certificate requests in an hour"},
}

// MayBeEmpty returns the titles of the panels about failures and mistakes.
func (d Dashboard) MayBeEmpty() []string { return quiet[d.Name] }

// MayBeZero returns the titles of the panels whose counters need not count anything.
func (d Dashboard) MayBeZero() []string { return slices.Concat(quiet[d.Name], still[d.Name]) }

// Missing returns an error that names the panels that are empty, or whose counters stay zero, although
// they show something whenever machines are claimed and released. Nil means that there are none.
func (d Dashboard) Missing(empty, zero []string) error {
	var errs []error
	if missing, _ := lo.Difference(empty, d.MayBeEmpty()); len(missing) > 0 {
		errs = append(errs, fmt.Errorf("%s has no data in: %s", d.Name, strings.Join(missing, ", ")))
	}
	if missing, _ := lo.Difference(zero, d.MayBeZero()); len(missing) > 0 {
		errs = append(errs, fmt.Errorf("%s has nothing but zeros in: %s", d.Name, strings.Join(missing, ", ")))
	}
	return errors.Join(errs...)
}

// counts reports whether the panel shows increments of counters. Zero is news of them only where
// something must have been counted.
func (p Panel) counts() bool {
	return lo.SomeBy(p.Targets, func(t Target) bool { return strings.Contains(t.Expr, "_total") })
}

// window is the time over which rates and counts are computed: several times the interval of the
// recording.
const window = 10 * Interval

// selected are what Grafana replaces in a query, with all namespaces, Clusters and NodePools selected.
var selected = strings.NewReplacer("$__rate_interval", window.String(), "$__interval", window.String(), "$__range", "1h",
	"$namespace", ".*", "$cluster", ".*", "$nodepool", ".*")

var placeholder = regexp.MustCompile(`\{\{ *([a-z_]+) *\}\}`)

// legend returns a series' name.
func (t Target) legend(label func(name string) string) string {
	return placeholder.ReplaceAllStringFunc(t.LegendFormat, func(found string) string {
		return label(placeholder.FindStringSubmatch(found)[1])
	})
}
