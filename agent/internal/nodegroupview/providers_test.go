package nodegroupview_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// -write-derived writes the tables of derived values into the pages.
var writeDerived = flag.Bool("write-derived", false, "write what the agent derives into the pages of docs/providers")

// pages is the folder of the pages about infrastructure providers.
const pages = "../../../docs/providers"

// Each page has manifests of a node group, the status that the provider gives its template, and a
// table of what the agent makes of them. This test creates the manifests in an API server that has
// the provider's own schemas, with strict validation, and compares the table.
func TestWhatProviderPagesSayIsDerivedIs(t *testing.T) {
	installProviderSchemas(t)
	files, err := filepath.Glob(filepath.Join(pages, "*.md"))
	require.NoError(t, err)
	groups := 0
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".md"), func(t *testing.T) {
			page := readPage(t, file)
			f := start(t)
			var deployments []string
			templates := map[string]*unstructured.Unstructured{} // by the MachineDeployment that refers to them
			for _, object := range page.objects {
				object := object.DeepCopy()
				place(f, object)
				err := plane.Client.Create(t.Context(), object, client.FieldValidation("Strict"))
				require.NoError(t, err, "%s %s", object.GetKind(), object.GetName())
				switch {
				case object.GetKind() == "MachineDeployment":
					deployments = append(deployments, object.GetName())
				case strings.HasSuffix(object.GetKind(), "MachineTemplate"):
					templates[object.GetKind()+"/"+object.GetName()] = object
				}
			}
			for _, status := range page.statuses {
				template := templates[status.template]
				require.NotNil(t, template, "the status of %q", status.template)
				template.Object["status"] = status.fields
				require.NoError(t, plane.Client.Status().Update(t.Context(), template, client.FieldValidation("Strict")))
			}
			for _, name := range deployments {
				groups++
				page.compare(t, f, name)
			}
		})
	}
	require.Positive(t, groups)
}

// Every template of a page must belong to the kinds that the chart lets the agent read, and every
// bootstrap template must set the taint that Karpenter removes.
func TestProviderPagesSetTheTaint(t *testing.T) {
	values, err := os.ReadFile("../../../deploy/charts/agent/values.yaml")
	require.NoError(t, err)
	files, err := filepath.Glob(filepath.Join(pages, "*.md"))
	require.NoError(t, err)
	for _, file := range files {
		for _, object := range readPage(t, file).objects {
			text, err := object.MarshalJSON()
			require.NoError(t, err)
			switch kind := object.GetKind(); {
			case strings.HasSuffix(kind, "ConfigTemplate"):
				const taint = `karpenter\.sh/unregistered:NoExecute|"effect":"NoExecute","key":"karpenter\.sh/unregistered"`
				require.Regexp(t, taint, string(text), "%s: %s", file, kind)
			case strings.HasSuffix(kind, "MachineTemplate"):
				require.Contains(t, string(values), "- "+strings.ToLower(kind)+"s\n", "rbac.infrastructureResources")
			case kind == "MachineDeployment":
				require.Contains(t, object.GetLabels(), v1alpha1.MemberLabel, file)
				require.Contains(t, object.GetAnnotations(), clusterv1.AutoscalerMinSizeAnnotation, file)
				require.Contains(t, object.GetAnnotations(), clusterv1.AutoscalerMaxSizeAnnotation, file)
			}
		}
	}
}

var failureRow = regexp.MustCompile("(?m)^\\| (?:`([^`]*)`)? ?\\| (?:`([^`]*)`)? ?\\| (\\w+) \\| (\\w+) \\|$")

// The failure table of a page has a reason and a part of the message, the class, and the machine's
// minimum age.
func TestProviderPagesClassifyFailuresAsTheAgentDoes(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(pages, "*.md"))
	require.NoError(t, err)
	rows := 0
	for _, file := range files {
		page := readPage(t, file)
		for _, row := range failureRow.FindAllStringSubmatch(page.text, -1) {
			rows++
			verdict := failures.Of(page.machineKind(), row[1], "failed: "+row[2]+": more")
			require.Equal(t, row[3], string(verdict.Class), "%s: %s", file, row[0])
			require.Equal(t, row[4], verdict.After.String(), "%s: %s", file, row[0])
		}
	}
	require.Greater(t, rows, 5)
}

// providerPage is a page about a provider.
type providerPage struct {
	path, text string
	objects    []*unstructured.Unstructured
	statuses   []templateStatus
}

// templateStatus is a status that a page says the provider writes to the template, as
// <kind>/<name>.
type templateStatus struct {
	template string
	fields   any
}

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

func readPage(t *testing.T, path string) providerPage {
	t.Helper()
	_, _ = os.Getenv("TESTED_DOCS"), os.Getenv("TESTED_CHARTS") // declares files outside of the module as inputs of the test cache
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	page := providerPage{path: path, text: string(text)}
	last := ""
	for _, block := range yamlBlock.FindAllSubmatch(text, -1) {
		decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(block[1]), 4096)
		for {
			var object map[string]any
			err := decoder.Decode(&object)
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, path)
			if object["kind"] == nil {
				require.Contains(t, object, "status", path)
				page.statuses = append(page.statuses, templateStatus{last, object["status"]})
				continue
			}
			u := &unstructured.Unstructured{Object: object}
			if strings.HasSuffix(u.GetKind(), "MachineTemplate") {
				last = u.GetKind() + "/" + u.GetName()
			}
			page.objects = append(page.objects, u)
		}
	}
	return page
}

// machineKind returns the kind of the infrastructure objects of the page's first template.
func (p providerPage) machineKind() string {
	for _, object := range p.objects {
		if kind, found := strings.CutSuffix(object.GetKind(), "Template"); found && strings.HasSuffix(kind, "Machine") {
			return kind
		}
	}
	return ""
}

// place adapts a manifest to the test's namespace and Cluster.
func place(f *fixture, object *unstructured.Unstructured) {
	f.Helper()
	object.SetNamespace(f.namespace)
	if object.GetKind() == "MachineDeployment" {
		for _, path := range [][]string{{"spec", "clusterName"}, {"spec", "template", "spec", "clusterName"}} {
			require.NoError(f, unstructured.SetNestedField(object.Object, f.cluster.Name, path...))
		}
	}
}

// compare waits until the agent derives what the page says, or writes that into the page.
func (p providerPage) compare(t *testing.T, f *fixture, name string) {
	t.Helper()
	table := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(name) + "` \\| value \\| from \\|\n(\\|.*\n)*")
	written := table.FindString(p.text)
	require.NotEmpty(t, written, "the page has a table of %s", name)
	if *writeDerived {
		derived := ""
		// The views follow within milliseconds; only the writer of a page waits for them in this
		// way.
		require.Eventually(t, func() bool {
			before := derived
			derived = derivedTable(f, name)
			return derived != "" && derived == before && !strings.Contains(derived, "Estimate")
		}, patience, time.Second)
		text, err := os.ReadFile(p.path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(p.path, table.ReplaceAllLiteral(text, []byte(derived)), 0o600))
		return
	}
	// If they never agree, the comparison below shows how they differ.
	_ = wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		return derivedTable(f, name) == written, nil
	})
	require.Equal(t, written, derivedTable(f, name))
}

// derivedTable renders a node group as the pages show it.
func derivedTable(f *fixture, name string) string {
	group := f.group(name)
	if group == nil {
		return ""
	}
	var out strings.Builder
	fmt.Fprintf(&out, "| `%s` | value | from |\n|---|---|---|\n", name)
	row := func(label, path, value string) {
		if value == "" {
			value = "–"
		}
		source := group.GetSources()[path]
		from := strings.TrimPrefix(source.GetKind().String(), "SOURCE_KIND_")
		from = strings.ToLower(strings.ReplaceAll(from, "_", " "))
		if detail := source.GetDetail(); detail != "" {
			from += ", `" + strings.ReplaceAll(detail, f.namespace+"/", "") + "`"
		}
		if source == nil {
			from = "–"
		}
		fmt.Fprintf(&out, "| %s | %s | %s |\n", label, value, from)
	}
	resources := make([]string, 0, len(group.GetCapacity()))
	for resource := range group.GetCapacity() {
		resources = append(resources, resource)
	}
	slices.Sort(resources)
	for _, resource := range resources {
		row("`"+resource+"`", "capacity."+resource, group.GetCapacity()[resource])
	}
	row("architecture", "architecture", group.GetArchitecture())
	row("operating system", "operating_system", group.GetOperatingSystem())
	row("instance type", "instance_type", group.GetInstanceType())
	row("zone", "zone", group.GetZone())
	row("region", "region", group.GetRegion())
	row("capacity type", "capacity_type", capacityTypeOf(group))
	row("price per hour", "price", strings.TrimSpace(fmt.Sprintf("%.4g %s", group.GetPrice().GetPerHour(), group.GetPrice().GetCurrency())))
	for _, problem := range group.GetProblems() {
		fmt.Fprintf(&out, "| **problem** | | `%s` %s |\n", problem.GetField(), problem.GetMessage())
	}
	return out.String()
}

func capacityTypeOf(group *agentv1alpha1.NodeGroup) string {
	text := strings.TrimPrefix(group.GetCapacityType().String(), "CAPACITY_TYPE_")
	return strings.ToLower(strings.ReplaceAll(text, "_", "-"))
}

// installProviderSchemas installs the providers' CustomResourceDefinitions in the tests' API
// server.
func installProviderSchemas(t *testing.T) {
	t.Helper()
	kubeadm, err := capitest.ClusterAPICRDs("bootstrap/kubeadm/config/crd/bases/bootstrap.cluster.x-k8s.io_kubeadmconfigtemplates.yaml")
	require.NoError(t, err)
	files, err := filepath.Glob("testdata/providers/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	_, err = envtest.InstallCRDs(plane.Config, envtest.CRDInstallOptions{
		Paths: files, CRDs: kubeadm, ErrorIfPathMissing: true, MaxTime: time.Minute,
	})
	require.NoError(t, err)
}
