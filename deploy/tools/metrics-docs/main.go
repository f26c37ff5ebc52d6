// Command metrics-docs writes the reference of the binaries' metrics from what they print with the
// hidden command metrics-docs: for each metric the Go type that serves it, a tab, and its
// description as github.com/prometheus/client_golang formats it.
//
//	metrics-docs docs/metrics.md <binary>:<prefix of its own metrics> …
//
// Generators that parse Go source, such as that of github.com/aws/karpenter-provider-aws, are not
// used: they do not see the metrics that libraries create at run time, such as those of each kind's
// conditions, unless these are listed by hand.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: metrics-docs <file> <binary>:<prefix of its own metrics> …")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "metrics-docs:", err)
		os.Exit(1)
	}
}

const introduction = `<!-- Generated from what the binaries print with metrics-docs. DO NOT EDIT. -->
# Metrics

Every metric of agent and shim, and those of their libraries. [Service levels](slo.md) and
[runbooks](runbooks.md) describe how to use them. Both serve them, and those of Go ('go_*',
'process_*'), under the path '/metrics' of '--metrics-bind-address'. A metric with labels may have
no series before its first event.

The labels 'namespace', 'cluster' and 'machine_deployment' of the metrics of the agent name objects of
the hub. The series of a Cluster and of a MachineDeployment disappear with it.
`

func run(file string, binaries []string) error {
	var page bytes.Buffer
	fmt.Fprint(&page, strings.ReplaceAll(introduction, "'", "`"))
	for _, argument := range binaries {
		binary, prefix, _ := strings.Cut(argument, ":")
		printed, err := exec.Command(binary, "metrics-docs").Output()
		if err != nil {
			return fmt.Errorf("running %s metrics-docs: %w", binary, err)
		}
		metrics, err := parse(string(printed))
		if err != nil {
			return fmt.Errorf("%s: %w", binary, err)
		}
		own := slices.DeleteFunc(slices.Clone(metrics), func(m metric) bool { return !strings.HasPrefix(m.name, prefix) })
		others := slices.DeleteFunc(metrics, func(m metric) bool {
			return strings.HasPrefix(m.name, prefix) || strings.HasPrefix(m.name, "go_") || strings.HasPrefix(m.name, "process_")
		})
		if len(own) == 0 {
			return fmt.Errorf("%s has no metric whose name begins with %s", binary, prefix)
		}
		fmt.Fprintf(&page, "\n## %s\n", filepath.Base(binary))
		table(&page, own)
		fmt.Fprintf(&page, "\n### Libraries of %s\n", filepath.Base(binary))
		table(&page, others)
	}
	return os.WriteFile(file, page.Bytes(), 0o644)
}

type metric struct {
	name, kind, help string
	labels           []string
}

var (
	description = regexp.MustCompile(`^(\S+)\tDesc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"), ` +
		`constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	constant = regexp.MustCompile(`([a-zA-Z0-9_]+)="(?:[^"\\]|\\.)*"`)
)

// parse returns the metrics in the order of their names. A metric may have several descriptions, which differ in the values of constant labels.
func parse(printed string) ([]metric, error) {
	byName := map[string]metric{}
	for line := range strings.Lines(printed) {
		fields := description.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if fields == nil {
			return nil, fmt.Errorf("this is not the description of a metric: %s", line)
		}
		name, _ := strconv.Unquote(fields[2])
		help, _ := strconv.Unquote(fields[3])
		m := metric{name: name, help: help, kind: kind(fields[1], name)}
		for _, pair := range constant.FindAllStringSubmatch(fields[4], -1) {
			m.labels = append(m.labels, pair[1])
		}
		for label := range strings.SplitSeq(fields[5], ",") {
			if label != "" {
				m.labels = append(m.labels, label)
			}
		}
		byName[name] = m
	}
	metrics := make([]metric, 0, len(byName))
	for _, m := range byName {
		metrics = append(metrics, m)
	}
	slices.SortFunc(metrics, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return metrics, nil
}

// kind returns a metric's type, by the Go type that serves it, or by the conventions for names where that is a collector of several.
func kind(of, name string) string {
	of = strings.ToLower(of)
	for _, k := range []string{"counter", "histogram", "summary", "gauge"} {
		if strings.Contains(of, k) {
			return k
		}
	}
	switch {
	case strings.HasSuffix(name, "_total"):
		return "counter"
	case strings.HasSuffix(name, "_handling_seconds"):
		return "histogram"
	default:
		return "gauge"
	}
}

// unit returns a metric's unit, which is a part of its name.
func unit(name string) string {
	name = strings.TrimSuffix(name, "_total")
	for _, u := range []string{"seconds", "bytes"} {
		if strings.HasSuffix(name, "_"+u) {
			return u
		}
	}
	return ""
}

func table(w io.Writer, metrics []metric) {
	fmt.Fprintln(w, "\n| metric | type | unit | labels | what it shows |")
	fmt.Fprintln(w, "|---|---|---|---|---|")
	for _, m := range metrics {
		labels := ""
		if len(m.labels) > 0 {
			labels = "`" + strings.Join(m.labels, "`, `") + "`"
		}
		fmt.Fprintf(w, "| `%s` | %s | %s | %s | %s |\n", m.name, m.kind, unit(m.name), labels, cell(m.help))
	}
}

// cell is text that is safe in a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(strings.TrimSpace(text))
}
