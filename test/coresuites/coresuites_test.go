package coresuites_test

import (
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/coresuites"
)

const report = `[{"SpecReports":[
	{"LeafNodeType":"BeforeSuite","State":"passed"},
	{"ContainerHierarchyTexts":["Drift","Budgets"],"LeafNodeType":"It","LeafNodeText":"respects them","State":"passed","RunTime":2000000000},
	{"ContainerHierarchyTexts":["Reboot"],"LeafNodeType":"It","LeafNodeText":"reboots","State":"skipped"},
	{"ContainerHierarchyTexts":["Drift"],"LeafNodeType":"It","LeafNodeText":"drifts","State":"timedout","Failure":{"Message":"too late"}},
	{"LeafNodeType":"AfterSuite","State":"panicked"}]}]`

func TestSpecsAreJudged(t *testing.T) {
	specs, err := coresuites.Read(strings.NewReader(report), "disruption")
	require.NoError(t, err)
	reboot := coresuites.Exception{Suite: "disruption", Specs: "Reboot", Why: "no"}
	v := coresuites.Judge(specs, []coresuites.Exception{reboot, {Suite: "regression", Specs: "Chaos", Why: "did not run at all"}})
	require.Len(t, v.Passed, 1)
	require.Equal(t, "Drift Budgets respects them", v.Passed[0].Name)
	require.Len(t, v.Failed, 2)
	require.Equal(t, "too late", v.Failed[0].Message)
	require.Equal(t, "AfterSuite", v.Failed[1].Name)
	require.Equal(t, map[string]coresuites.Exception{"disruption: Reboot reboots": reboot}, v.Excepted)
	require.Empty(t, v.Stale)
	require.False(t, v.OK())

	good := lo.Filter(specs, func(s coresuites.Spec, _ int) bool { return s.State == "passed" || s.State == "skipped" })
	require.True(t, coresuites.Judge(good, []coresuites.Exception{reboot}).OK())
	require.Len(t, coresuites.Judge(good, nil).Unexplained, 1, "skipped without an exception")
	require.Equal(t, []coresuites.Exception{reboot}, coresuites.Judge(good[:1], []coresuites.Exception{reboot}).Stale, "there is no such spec any more")
	require.False(t, coresuites.Judge(nil, nil).OK(), "nothing ran")
}

func TestEveryExceptionSaysWhy(t *testing.T) {
	all, err := coresuites.Exceptions()
	require.NoError(t, err)
	for _, e := range all {
		require.NotContains(t, []string{e.Suite, e.Specs, e.Why}, "")
	}
}
