package coresuites_test

import (
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/yaml"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/coresuites"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

const report = `[{"SpecReports":[
	{"LeafNodeType":"BeforeSuite","State":"passed"},
	{"ContainerHierarchyTexts":["Drift","Budgets"],"LeafNodeType":"It","LeafNodeText":"respects them","State":"passed","RunTime":2000000000},
	{"ContainerHierarchyTexts":["Reboot"],"LeafNodeType":"It","LeafNodeText":"reboots","State":"skipped"},
	{"ContainerHierarchyTexts":["Drift"],"LeafNodeType":"It","LeafNodeText":"drifts","State":"timedout","Failure":{"Message":"too late"}},
	{"LeafNodeType":"AfterSuite","State":"panicked"}]}]`

func TestResultsOfSpecsAreEvaluated(t *testing.T) {
	specs, err := coresuites.Read(strings.NewReader(report), "disruption")
	require.NoError(t, err)
	reboot := coresuites.Exception{Suite: "disruption", Specs: "Reboot", Why: "no"}
	v := coresuites.Evaluate(specs, []coresuites.Exception{reboot, {Suite: "regression", Specs: "Chaos", Why: "did not run at all"}})
	require.Len(t, v.Passed, 1)
	require.Equal(t, "Drift Budgets respects them", v.Passed[0].Name)
	require.Len(t, v.Failed, 2)
	require.Equal(t, "too late", v.Failed[0].Message)
	require.Equal(t, "AfterSuite", v.Failed[1].Name)
	require.True(t, v.Failed[1].OfSuite)
	require.Equal(t, map[string]coresuites.Exception{"disruption: Reboot reboots": reboot}, v.Excepted)
	require.Empty(t, v.Stale)
	require.False(t, v.OK())

	good := lo.Filter(specs, func(s coresuites.Spec, _ int) bool { return s.State == "passed" || s.State == "skipped" })
	require.True(t, coresuites.Evaluate(good, []coresuites.Exception{reboot}).OK())
	require.Len(t, coresuites.Evaluate(good, nil).Unexplained, 1, "skipped without an exception")
	stale := coresuites.Evaluate(good[:1], []coresuites.Exception{reboot}).Stale
	require.Equal(t, []coresuites.Exception{reboot}, stale, "there is no such spec any more")
	require.False(t, coresuites.Evaluate(nil, nil).OK(), "nothing ran")
}

func TestEverySpecIsInOnePartOfItsSuite(t *testing.T) {
	parts := coresuites.Parts("regression")
	require.Len(t, parts, 2)
	for name, expected := range map[string]string{"CapacityBuffer Disruption should grow": "CapacityBuffer", "Integration should run": ""} {
		in := lo.Filter(parts, func(p coresuites.Part, _ int) bool { return p.Has(coresuites.Spec{Suite: "regression", Name: name}) })
		require.Len(t, in, 1, name)
		require.Equal(t, expected, in[0].Specs)
	}
	for _, part := range parts {
		require.True(t, part.Has(coresuites.Spec{Suite: "regression", Name: "AfterSuite", OfSuite: true}))
	}
	require.Equal(t, []string{"CapacityBuffer"}, parts[0].Others())
	require.Empty(t, parts[1].Others())
	require.Equal(t, []coresuites.Part{{Suite: "disruption"}}, coresuites.Parts("disruption"))
}

func TestAPartHasItsOwnNodePool(t *testing.T) {
	requirements := func(p coresuites.Part) []karpenterv1.NodeSelectorRequirementWithMinValues {
		nodeClass, nodePool, err := p.WriteDefaults(t.TempDir())
		require.NoError(t, err)
		require.FileExists(t, nodeClass)
		content, err := os.ReadFile(nodePool)
		require.NoError(t, err)
		var pool karpenterv1.NodePool
		require.NoError(t, yaml.UnmarshalStrict(content, &pool))
		return pool.Spec.Template.Spec.Requirements
	}
	last := func(p coresuites.Part) karpenterv1.NodeSelectorRequirementWithMinValues {
		all := requirements(p)
		return all[len(all)-1]
	}
	require.Equal(t, karpenterv1.NodeSelectorRequirementWithMinValues{
		Key: corev1.LabelInstanceTypeStable, Operator: corev1.NodeSelectorOpIn, Values: []string{"c-2"},
	}, last(coresuites.Part{InstanceTypes: []string{"c-2"}}))
	buffers := coresuites.Parts("regression")[1]
	require.NotEmpty(t, buffers.InstanceTypes)
	require.Equal(t, karpenterv1.NodeSelectorRequirementWithMinValues{
		Key: corev1.LabelInstanceTypeStable, Operator: corev1.NodeSelectorOpNotIn, Values: buffers.InstanceTypes,
	}, last(coresuites.Part{Suite: "disruption"}), "the machines of a part are for no other")
}

// Specs that spread pods over zones need node groups that say where their machines are.
func TestEveryNodeGroupSaysItsZone(t *testing.T) {
	hub := fake.NewClientBuilder().WithScheme(testenv.Scheme()).Build()
	require.NoError(t, coresuites.Prepare(t.Context(), hub, fake.NewClientBuilder().WithScheme(testenv.Scheme()).Build(), "regression"))
	var templates simv1.SimMachineTemplateList
	require.NoError(t, hub.List(t.Context(), &templates))
	require.NotEmpty(t, templates.Items)
	for _, template := range templates.Items {
		group := &clusterv1.MachineDeployment{}
		require.NoError(t, hub.Get(t.Context(), client.ObjectKeyFromObject(&template), group))
		require.NotEmpty(t, template.Spec.Template.Spec.Zone)
		require.Contains(t, strings.Split(group.Annotations["capacity.cluster-autoscaler.kubernetes.io/labels"], ","),
			corev1.LabelTopologyZone+"="+template.Spec.Template.Spec.Zone)
	}
}

func TestEveryExceptionSaysWhy(t *testing.T) {
	all, err := coresuites.Exceptions()
	require.NoError(t, err)
	for _, e := range all {
		require.NotContains(t, []string{e.Suite, e.Why}, "")
	}
}

func TestASuiteOfWhichNothingCanRunIsListed(t *testing.T) {
	none := coresuites.Exception{Suite: "dra", Why: "no"}
	passed := coresuites.Spec{Suite: "disruption", Name: "Drift", State: "passed"}
	v := coresuites.Evaluate([]coresuites.Spec{passed}, []coresuites.Exception{none})
	require.Equal(t, []coresuites.Exception{none}, v.Left)
	require.True(t, v.OK())

	v = coresuites.Evaluate([]coresuites.Spec{passed, {Suite: "dra", Name: "GPU", State: "passed"}}, []coresuites.Exception{none})
	require.Equal(t, []coresuites.Exception{none}, v.Stale, "it can run")
	require.Empty(t, v.Left)
}

// A release of core may have a suite more.
func TestEverySuiteOfCoreRunsOrSaysWhyNot(t *testing.T) {
	all, err := coresuites.Exceptions()
	require.NoError(t, err)
	left := lo.FilterMap(all, func(e coresuites.Exception, _ int) (string, bool) { return e.Suite, e.Specs == "" })
	require.Empty(t, lo.Intersect(left, coresuites.Suites()))

	entry := reflect.ValueOf(karpenterv1.MustParseNillableDuration).Pointer()
	file, _ := runtime.FuncForPC(entry).FileLine(entry)
	folders, err := os.ReadDir(filepath.Join(filepath.Dir(file), "..", "..", "..", "test", "suites"))
	require.NoError(t, err)
	cores := lo.Map(folders, func(f os.DirEntry, _ int) string { return f.Name() })
	require.ElementsMatch(t, cores, append(left, coresuites.Suites()...))
}
