package coresuites_test

import (
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	"github.com/samber/lo"

	"github.com/karpenter-capi/karpenter-capi/test/coresuites"
)

const report = `[{"SpecReports":[
	{"LeafNodeType":"BeforeSuite","State":"passed"},
	{"ContainerHierarchyTexts":["Drift","Budgets"],"LeafNodeType":"It","LeafNodeText":"respects them","State":"passed","RunTime":2000000000},
	{"ContainerHierarchyTexts":["Reboot"],"LeafNodeType":"It","LeafNodeText":"reboots","State":"skipped"},
	{"ContainerHierarchyTexts":["Drift"],"LeafNodeType":"It","LeafNodeText":"drifts","State":"timedout","Failure":{"Message":"too late"}},
	{"LeafNodeType":"AfterSuite","State":"panicked"}]}]`

func TestSpecsAreJudged(t *testing.T) {
	g := NewWithT(t)
	specs, err := coresuites.Read(strings.NewReader(report), "disruption")
	g.Expect(err).NotTo(HaveOccurred())
	reboot := coresuites.Exception{Suite: "disruption", Specs: "Reboot", Why: "no"}
	v := coresuites.Judge(specs, []coresuites.Exception{reboot, {Suite: "regression", Specs: "Chaos", Why: "did not run at all"}})
	g.Expect(v.Passed).To(ConsistOf(HaveField("Name", "Drift Budgets respects them")))
	g.Expect(v.Failed).To(ConsistOf(HaveField("Message", "too late"), HaveField("Name", "AfterSuite")))
	g.Expect(v.Excepted).To(Equal(map[string]coresuites.Exception{"disruption: Reboot reboots": reboot}))
	g.Expect(v.Stale).To(BeEmpty())
	g.Expect(v.OK()).To(BeFalse())

	good := lo.Filter(specs, func(s coresuites.Spec, _ int) bool { return s.State == "passed" || s.State == "skipped" })
	g.Expect(coresuites.Judge(good, []coresuites.Exception{reboot}).OK()).To(BeTrue())
	g.Expect(coresuites.Judge(good, nil).Unexplained).To(HaveLen(1), "skipped without an exception")
	g.Expect(coresuites.Judge(good[:1], []coresuites.Exception{reboot}).Stale).To(ConsistOf(reboot), "there is no such spec any more")
	g.Expect(coresuites.Judge(nil, nil).OK()).To(BeFalse(), "nothing ran")
}

func TestEveryExceptionSaysWhy(t *testing.T) {
	g := NewWithT(t)
	all, err := coresuites.Exceptions()
	g.Expect(err).NotTo(HaveOccurred())
	for _, e := range all {
		g.Expect([]string{e.Suite, e.Specs, e.Why}).NotTo(ContainElement(""))
	}
}
