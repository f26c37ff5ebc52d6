package monitoring_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/monitoring"
)

// now is when alerts are evaluated: two hours after time zero.
const now = 2 * time.Hour

func TestAlertsNameWhatExists(t *testing.T) {
	metrics, alerts := metrics(t), alerts(t)
	for _, a := range alerts {
		t.Run(a.Alert, func(t *testing.T) {
			g := NewWithT(t)
			g.Expect(metrics.Check(a.Expr)).To(Succeed())
			g.Expect(a.Labels).To(HaveLen(1))
			g.Expect(a.Labels["severity"]).To(BeElementOf("critical", "warning", "info"))
			g.Expect(slices.Sorted(maps.Keys(a.Annotations))).To(Equal([]string{"description", "summary"}), "the template adds the link to the runbook")
		})
	}
	g := NewWithT(t)
	g.Expect(lo.FindDuplicates(lo.Map(alerts, func(a monitoring.Alert, _ int) string { return a.Alert }))).To(BeEmpty())
}

func TestEachAlertHasARunbook(t *testing.T) {
	g := NewWithT(t)
	page, err := os.ReadFile(filepath.Join(root(t), "docs/runbooks.md"))
	g.Expect(err).NotTo(HaveOccurred())
	sections := map[string]string{}
	for section := range strings.SplitSeq(string(page), "\n### ") {
		name, text, _ := strings.Cut(section, "\n")
		sections[name] = text
	}
	var named []string
	for _, a := range alerts(t) {
		named = append(named, a.Alert)
		g.Expect(sections).To(HaveKeyWithValue(a.Alert, And(
			ContainSubstring("**Meaning.**"), ContainSubstring("**What to do.**"), Or(ContainSubstring("**Causes.**"), ContainSubstring("| cause |")),
		)))
	}
	g.Expect(slices.Sorted(maps.Keys(sections))).To(ConsistOf(append(lo.ToAnySlice(named), "# Runbooks")...),
		"there is no runbook without an alert")
}

func TestEachAlertFiresByItsCause(t *testing.T) {
	engine := monitoring.NewEngine()
	for _, a := range alerts(t) {
		t.Run(a.Alert, func(t *testing.T) {
			g := NewWithT(t)
			cause, known := causes[a.Alert]
			g.Expect(known).To(BeTrue(), "its cause is in the table of this test")
			series, err := monitoring.Load(cause.series)
			g.Expect(err).NotTo(HaveOccurred())
			firing, err := engine.Firing(t.Context(), series, a, now)
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(firing).To(HaveLen(1))
			for _, match := range label.FindAllStringSubmatch(a.Annotations["description"], -1) {
				g.Expect(firing[0].Has(match[1])).To(BeTrue(), "the description uses the label %s", match[1])
			}
		})
	}
	g := NewWithT(t)
	g.Expect(alerts(t)).To(HaveLen(len(causes)), "there is no cause without an alert")
}

// The series that a cause is said to have are those that a test of the component sees.
func TestEachCauseIsMadeInATestOfItsComponent(t *testing.T) {
	for name, cause := range causes {
		t.Run(name, func(t *testing.T) {
			g := NewWithT(t)
			if cause.test == "" {
				return // the series is absent, or Karpenter core's
			}
			path, function, _ := strings.Cut(cause.test, ":")
			content, err := os.ReadFile(filepath.Join(root(t), path))
			g.Expect(err).NotTo(HaveOccurred())
			_, body, found := strings.Cut(string(content), "\nfunc "+function+"(t *testing.T) {\n")
			g.Expect(found).To(BeTrue(), "%s has no %s", path, function)
			body, _, _ = strings.Cut(body, "\n}\n")
			metric, _, _ := strings.Cut(strings.TrimSpace(cause.series), "{")
			metric = strings.TrimSuffix(strings.Fields(metric)[0], "_bucket")
			g.Expect(body).To(ContainSubstring(metric))
		})
	}
}

func TestNoAlertFiresInAHealthyFleet(t *testing.T) {
	g := NewWithT(t)
	series, err := monitoring.Load(healthy)
	g.Expect(err).NotTo(HaveOccurred())
	engine, metrics := monitoring.NewEngine(), metrics(t)
	for _, s := range series {
		g.Expect(metrics.Check(s.Lset.String())).To(Succeed())
	}
	for _, a := range alerts(t) {
		firing, err := engine.Firing(t.Context(), series, a, now)
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(firing).To(BeEmpty(), a.Alert)
	}
}

func TestDashboardsQueryWhatExists(t *testing.T) {
	g := NewWithT(t)
	queries, err := monitoring.Queries(root(t))
	g.Expect(err).NotTo(HaveOccurred())
	metrics := metrics(t)
	dashboards := map[string]int{}
	for _, query := range queries {
		dashboards[query.Dashboard]++
		g.Expect(metrics.Check(query.Expr)).To(Succeed(), "%s: %s: %s", query.Dashboard, query.Panel, query.Expr)
	}
	g.Expect(dashboards).To(And(HaveLen(2), HaveEach(BeNumerically(">", 10))))
}

func TestServiceLevelsAreMeasuredByWhatExists(t *testing.T) {
	g := NewWithT(t)
	page, err := os.ReadFile(filepath.Join(root(t), "docs/slo.md"))
	g.Expect(err).NotTo(HaveOccurred())
	metrics, indicators := metrics(t), 0
	for _, match := range expression.FindAllStringSubmatch(string(page), -1) {
		indicators++
		g.Expect(metrics.Check(strings.ReplaceAll(match[1], `\|`, "|"))).To(Succeed(), match[1])
	}
	g.Expect(indicators).To(BeNumerically(">", 4))
}

// kube-state-metrics shows nothing for a path that does not exist, and says so in its log only.
func TestKubeStateMetricsReadsFieldsThatExist(t *testing.T) {
	g := NewWithT(t)
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
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(yaml.Unmarshal(content, &values)).To(Succeed())
	resources := values.CustomResourceState.Config.Spec.Resources
	g.Expect(resources).To(HaveLen(2))
	for _, resource := range resources {
		kind := resource.GroupVersionKind
		file := fmt.Sprintf("deploy/charts/agent/crds/%s_%ss.yaml", kind.Group, strings.ToLower(kind.Kind))
		content, err := os.ReadFile(filepath.Join(root(t), file))
		g.Expect(err).NotTo(HaveOccurred())
		var definition struct {
			Spec struct {
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema schema }
				}
			}
		}
		g.Expect(yaml.Unmarshal(content, &definition)).To(Succeed())
		g.Expect(definition.Spec.Versions).To(HaveLen(1))
		g.Expect(definition.Spec.Versions[0].Name).To(Equal(kind.Version))
		object := definition.Spec.Versions[0].Schema.OpenAPIV3Schema
		g.Expect(resource.Metrics).NotTo(BeEmpty())
		for _, m := range resource.Metrics {
			for _, p := range []paths{m.Each.Gauge, m.Each.Info, m.Each.StateSet} {
				at, exists := object.at(p.Path)
				g.Expect(exists).To(BeTrue(), "%s: %v", m.Name, p.Path)
				for label, path := range p.LabelsFromPath {
					_, exists := at.at(path)
					g.Expect(exists).To(BeTrue(), "%s, label %s: %v", m.Name, label, path)
				}
				_, exists = at.at(p.ValueFrom)
				g.Expect(exists).To(BeTrue(), "%s: %v", m.Name, p.ValueFrom)
				if p.List != nil {
					g.Expect(lo.Without(at.Enum, "")).To(ConsistOf(lo.ToAnySlice(p.List)...), m.Name)
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
)

func alerts(t *testing.T) []monitoring.Alert {
	t.Helper()
	alerts, err := monitoring.Alerts(root(t))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	NewWithT(t).Expect(alerts).NotTo(BeEmpty())
	return alerts
}

func metrics(t *testing.T) monitoring.Metrics {
	t.Helper()
	metrics, err := monitoring.ReadMetrics(root(t))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return metrics
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
	_ = os.Getenv("TESTED_FILES") // tells the test cache that charts and docs are an input
	root, err := filepath.Abs("../..")
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
	return root
}
