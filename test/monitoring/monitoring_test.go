package monitoring_test

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/monitoring"
)

// now is when alerts are evaluated: two hours after time zero.
const now = 2 * time.Hour

func TestAlertsNameWhatExists(t *testing.T) {
	metrics, alerts := metrics(t), alerts(t)
	for _, a := range alerts {
		t.Run(a.Alert, func(t *testing.T) {
			require.NoError(t, metrics.Check(a.Expr))
			require.Len(t, a.Labels, 1)
			require.Contains(t, []string{"critical", "warning", "info"}, a.Labels["severity"])
			require.Equal(t, []string{"description", "summary"}, slices.Sorted(maps.Keys(a.Annotations)), "the template adds the link to the runbook")
		})
	}
	require.Empty(t, lo.FindDuplicates(lo.Map(alerts, func(a monitoring.Alert, _ int) string { return a.Alert })))
}

func TestEachAlertHasARunbook(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs/runbooks.md"))
	require.NoError(t, err)
	sections := map[string]string{}
	for section := range strings.SplitSeq(string(page), "\n### ") {
		name, text, _ := strings.Cut(section, "\n")
		sections[name] = text
	}
	var named []string
	for _, a := range alerts(t) {
		named = append(named, a.Alert)
		require.Contains(t, sections, a.Alert)
		require.Contains(t, sections[a.Alert], "**Meaning.**")
		require.Contains(t, sections[a.Alert], "**What to do.**")
		require.Regexp(t, `\*\*Causes\.\*\*|\| cause \|`, sections[a.Alert])
	}
	require.ElementsMatch(t, append(named, "# Runbooks"), slices.Sorted(maps.Keys(sections)), "there is no runbook without an alert")
}

var writeAlerts = flag.Bool("write-alerts", false, "rewrite the table of the alerts in docs/runbooks.md")

func TestTheTableOfAlertsIsComplete(t *testing.T) {
	path := filepath.Join(root(t), "docs/runbooks.md")
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	const begin, end = "<!-- The table is written by TestTheTableOfAlertsIsComplete. -->\n\n", "\n## Alerts of the agent\n"
	before, rest, found := strings.Cut(string(page), begin)
	require.True(t, found)
	_, after, found := strings.Cut(rest, end)
	require.True(t, found)
	recorded := recordings(t)
	var table strings.Builder
	table.WriteString("| alert | severity | fires | after | the cause is made in |\n|---|---|---|---|---|\n")
	for _, a := range alerts(t) {
		test, _, _ := strings.Cut(recorded[a.Alert].Test, "/")
		fmt.Fprintf(&table, "| [%s](#%s) | %s | %s | %s | `%s` |\n", a.Alert, strings.ToLower(a.Alert), a.Labels["severity"],
			strings.ReplaceAll(a.Annotations["summary"], "|", "\\|"), cmp.Or(a.For, "0m"), test)
	}
	wanted := before + begin + table.String() + end + after
	if *writeAlerts {
		require.NoError(t, os.WriteFile(path, []byte(wanted), 0o644))
		return
	}
	require.Equal(t, wanted, string(page), "write it with: go test ./test/monitoring -run TestTheTableOfAlerts -args -write-alerts")
}

// What a component served when a test made the cause is enough for the alert, and soon enough. What
// it served before is not.
func TestEachAlertFiresByItsCause(t *testing.T) {
	engine, recorded := monitoring.NewEngine(), recordings(t)
	for _, a := range alerts(t) {
		t.Run(a.Alert, func(t *testing.T) {
			series, err := monitoring.Unfold(recorded[a.Alert].Recording, course(a.Alert, "scraped"))
			require.NoError(t, err)
			at, firing, err := engine.Firings(t.Context(), series, a, begins-before, begins+after)
			require.NoError(t, err)
			require.Len(t, firing, 1)
			wait, err := a.Wait()
			require.NoError(t, err)
			window, err := a.Window()
			require.NoError(t, err)
			require.GreaterOrEqual(t, at, begins+wait)
			require.LessOrEqual(t, at, begins+wait+window)
			for _, match := range label.FindAllStringSubmatch(a.Annotations["description"], -1) {
				require.True(t, firing[0].Has(match[1]), "the description uses the label %s", match[1])
			}
		})
	}
}

// begins is when a cause is made: after the certificates of the recordings were issued, as times
// are after zero. The component is scraped before it and after it.
const begins, before, after = 1000 * 24 * time.Hour, time.Hour, time.Hour

// course is that of the recording of an alert.
func course(alert, job string) monitoring.Course {
	return monitoring.Course{
		Target: map[string]string{"job": job, "namespace": "system", "pod": job + "-0", "instance": job + ":8080"},
		From:   begins - before, Begins: begins, Until: begins + after, Repeats: slices.Contains(repeats, alert),
	}
}

// A test of the component makes each recording, and fails if the component serves other series. The
// binaries register what it has recorded: a registry in a test may be the test's own.
func TestEachRecordingIsMadeByATestOfItsComponent(t *testing.T) {
	recorded, metrics := recordings(t), metrics(t)
	names := lo.Map(alerts(t), func(a monitoring.Alert, _ int) string { return a.Alert })
	require.ElementsMatch(t, names, slices.Collect(maps.Keys(recorded)), "each alert has a recording, and each recording an alert")
	for alert, recording := range recorded {
		t.Run(alert, func(t *testing.T) {
			function, _, _ := strings.Cut(recording.Test, "/")
			files, err := filepath.Glob(filepath.Join(recording.Package, "*_test.go"))
			require.NoError(t, err)
			require.True(t, lo.ContainsBy(files, func(file string) bool {
				content, err := os.ReadFile(file)
				require.NoError(t, err)
				_, body, found := strings.Cut(string(content), "\nfunc "+function+"(t *testing.T) {\n")
				body, _, _ = strings.Cut(body, "\n}\n")
				return found && strings.Contains(body, strconv.Quote(alert))
			}), "no %s of %s records it", function, recording.Package)
			for _, s := range recording.Series {
				require.NoError(t, metrics.Check(s.Name))
			}
		})
	}
}

// Of several Clusters, certificates or replicas, the alert is about the one that has the cause.
func TestAlertsFireForWhatIsConcerned(t *testing.T) {
	engine, metrics := monitoring.NewEngine(), metrics(t)
	checked := 0
	for _, a := range alerts(t) {
		lines, found := concerned[a.Alert]
		if !found {
			continue
		}
		checked++
		t.Run(a.Alert, func(t *testing.T) {
			series, err := monitoring.Load(lines)
			require.NoError(t, err)
			for _, s := range series {
				require.NoError(t, metrics.Check(s.Lset.String()))
			}
			firing, err := engine.Firing(t.Context(), series, a, now)
			require.NoError(t, err)
			require.Len(t, firing, 1)
		})
	}
	require.Len(t, concerned, checked, "each is about an alert")
}

// Several hub-hosted shims, or several releases of the agent, may be scraped by one Prometheus.
func TestAHealthyReleaseHidesNoOther(t *testing.T) {
	engine, recorded := monitoring.NewEngine(), recordings(t)
	checked := 0
	for _, a := range alerts(t) {
		if strings.HasPrefix(a.Alert, "CapiAgent") && a.Alert != "CapiAgentHubUnreachable" {
			continue // it concerns one agent, or one of the hub's Clusters, whose metrics all agents have
		}
		if strings.Contains(a.Expr, "absent(") {
			continue // the charts confine it to a release, which test/charts checks
		}
		t.Run(a.Alert, func(t *testing.T) {
			healthy := course(a.Alert, "healthy")
			healthy.Begins = healthy.Until + monitoring.Step
			beside, err := monitoring.Unfold(recorded[a.Alert].Recording, healthy)
			require.NoError(t, err)
			series, err := monitoring.Unfold(recorded[a.Alert].Recording, course(a.Alert, "scraped"))
			require.NoError(t, err)
			_, firing, err := engine.Firings(t.Context(), append(series, beside...), a, begins-before, begins+after)
			require.NoError(t, err)
			require.Len(t, firing, 1)
			_, firing, err = engine.Firings(t.Context(), beside, a, begins-before, begins+after)
			require.NoError(t, err)
			require.Empty(t, firing)
		})
		checked++
	}
	require.Greater(t, checked, 10)
}

func TestNoAlertFiresInAHealthyFleet(t *testing.T) {
	series, err := monitoring.Load(healthy)
	require.NoError(t, err)
	engine, metrics := monitoring.NewEngine(), metrics(t)
	for _, s := range series {
		require.NoError(t, metrics.Check(s.Lset.String()))
	}
	for _, a := range alerts(t) {
		firing, err := engine.Firing(t.Context(), series, a, now)
		require.NoError(t, err)
		require.Empty(t, firing, a.Alert)
	}
}

func TestDashboardsQueryWhatExists(t *testing.T) {
	queries, err := monitoring.Queries(root(t))
	require.NoError(t, err)
	metrics := metrics(t)
	dashboards := map[string]int{}
	for _, query := range queries {
		dashboards[query.Dashboard]++
		require.NoError(t, metrics.Check(query.Expr), "%s: %s: %s", query.Dashboard, query.Panel, query.Expr)
	}
	require.Len(t, dashboards, 2)
	for dashboard, queries := range dashboards {
		require.Greater(t, queries, 10, dashboard)
	}
}

func TestServiceLevelsAreMeasuredByWhatExists(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs/slo.md"))
	require.NoError(t, err)
	metrics, indicators := metrics(t), 0
	for _, match := range expression.FindAllStringSubmatch(string(page), -1) {
		indicators++
		require.NoError(t, metrics.Check(strings.ReplaceAll(match[1], `\|`, "|")), match[1])
	}
	require.Greater(t, indicators, 4)
}

// An alert at another duration than the objective's fires while the objective holds, or not at all.
func TestAlertsOfDurationsFireAtTheObjective(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs/slo.md"))
	require.NoError(t, err)
	objectives := duration.FindAllStringSubmatch(string(page), -1)
	require.Len(t, objectives, 2)
	for _, objective := range objectives {
		share, seconds, edge, name := objective[1], objective[2], objective[3], objective[4]
		require.Equal(t, seconds, edge, "the indicator's bucket")
		alert, found := lo.Find(alerts(t), func(a monitoring.Alert) bool { return strings.EqualFold(a.Alert, name) })
		require.True(t, found, name)
		quantile := strings.TrimRight("0."+share, "0")
		require.True(t, strings.HasPrefix(alert.Expr, "histogram_quantile("+quantile+", "), alert.Expr)
		require.True(t, strings.HasSuffix(alert.Expr, " > "+seconds), alert.Expr)
	}
}

// kube-state-metrics shows nothing for a path that does not exist, and says so in its log only.
func TestKubeStateMetricsReadsFieldsThatExist(t *testing.T) {
	var values struct {
		CustomResourceState struct {
			Config struct {
				Spec struct {
					Resources []struct {
						GroupVersionKind struct {
							Group, Version, Kind string
						}
						LabelsFromPath map[string][]string
						Metrics        []struct {
							Name string
							Each struct{ Gauge, Info, StateSet paths }
						}
					}
				}
			}
		}
	}
	content, err := os.ReadFile(filepath.Join(root(t), "deploy/examples/kube-state-metrics.yaml"))
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(content, &values))
	resources := values.CustomResourceState.Config.Spec.Resources
	require.Len(t, resources, 3)
	for _, resource := range resources {
		kind := resource.GroupVersionKind
		file := fmt.Sprintf("deploy/charts/agent/files/crds/%s_%ss.yaml", kind.Group, strings.ToLower(kind.Kind))
		content, err := os.ReadFile(filepath.Join(root(t), file))
		require.NoError(t, err)
		var definition struct {
			Spec struct {
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema schema }
				}
			}
		}
		require.NoError(t, yaml.Unmarshal(content, &definition))
		require.Len(t, definition.Spec.Versions, 1)
		require.Equal(t, kind.Version, definition.Spec.Versions[0].Name)
		object := definition.Spec.Versions[0].Schema.OpenAPIV3Schema
		require.NotEmpty(t, resource.Metrics)
		for _, m := range resource.Metrics {
			for _, p := range []paths{m.Each.Gauge, m.Each.Info, m.Each.StateSet} {
				at, exists := object.at(p.Path)
				require.True(t, exists, "%s: %v", m.Name, p.Path)
				for label, path := range p.LabelsFromPath {
					_, exists := at.at(path)
					require.True(t, exists, "%s, label %s: %v", m.Name, label, path)
				}
				_, exists = at.at(p.ValueFrom)
				require.True(t, exists, "%s: %v", m.Name, p.ValueFrom)
				if p.List != nil {
					require.ElementsMatch(t, p.List, lo.Without(at.Enum, ""), m.Name)
				}
			}
		}
	}
}

// paths are what a metric of kube-state-metrics reads.
type paths struct {
	Path, ValueFrom, List []string
	LabelsFromPath        map[string][]string
}

// schema is that of a CustomResourceDefinition.
type schema struct {
	Properties map[string]schema
	Items      *schema
	Enum       []string
}

// at returns the schema of a field. Lists are entered, as kube-state-metrics does.
func (s schema) at(path []string) (schema, bool) {
	if len(path) > 0 && path[0] == "metadata" {
		return schema{}, true
	}
	for _, field := range path {
		if s.Items != nil {
			s = *s.Items
		}
		next, exists := s.Properties[field]
		if !exists {
			return schema{}, false
		}
		s = next
	}
	if s.Items != nil {
		s = *s.Items
	}
	return s, true
}

var (
	label      = regexp.MustCompile(`\$labels\.([a-z_]+)`)
	expression = regexp.MustCompile("`([^`]*\\bby \\([^`]*)`")
	duration   = regexp.MustCompile(`(?m)^\| (\d+) % of the claims .* within ([\d.]+) s \| .*le="([\d.]+)".*runbooks\.md#(\w+)\)`)
)

func alerts(t *testing.T) []monitoring.Alert {
	t.Helper()
	alerts, err := monitoring.Alerts(root(t))
	require.NoError(t, err)
	require.NotEmpty(t, alerts)
	return alerts
}

func recordings(t *testing.T) map[string]monitoring.Recorded {
	t.Helper()
	recordings, err := monitoring.Recordings(root(t))
	require.NoError(t, err)
	return recordings
}

func metrics(t *testing.T) monitoring.Metrics {
	t.Helper()
	metrics, err := monitoring.ReadMetrics(root(t))
	require.NoError(t, err)
	return metrics
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
	_ = os.Getenv("TESTED_FILES") // declares charts and docs as inputs of the test cache
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	return root
}
