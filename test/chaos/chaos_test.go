package chaos_test

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"github.com/onsi/gomega"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/test/chaos"
)

func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// TestNothingIsLostWhenTheAgentDiesAnywhere is the short form of `make chaos`.
func TestNothingIsLostWhenTheAgentDiesAnywhere(t *testing.T) {
	g := gomega.NewWithT(t)
	// The sandbox must be stopped when the test is interrupted.
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	report, err := chaos.Run(ctx, chaos.Options{Name: "chaos-short", Short: true, Say: t.Logf})
	g.Expect(err).NotTo(gomega.HaveOccurred())
	report.Write(t.Output())

	g.Expect(context.Cause(ctx)).NotTo(gomega.HaveOccurred())
	for _, row := range report.Rows {
		g.Expect(row.Err).NotTo(gomega.HaveOccurred(), row.Scenario)
		g.Expect(row.Violations).To(gomega.BeEmpty(), row.Scenario)
		g.Expect(row.Claims).To(gomega.BeNumerically(">", 0), row.Scenario)
	}
	sum := report.Total()
	g.Expect(sum.Leaked).To(gomega.BeZero(), "leaked")
	g.Expect(sum.Duplicated).To(gomega.BeZero(), "duplicated")
	g.Expect(sum.Innocent).To(gomega.BeZero(), "innocent")
	g.Expect(sum.Unsettled).To(gomega.BeZero(), "unsettled")
	g.Expect(report.Calls).To(gomega.BeNumerically(">", 0), "calls of which the history was checked")
	g.Expect(report.Streams.Streams).To(gomega.BeNumerically(">", 10), "streams, as agents were killed")
	g.Expect(report.Streams.Lists).To(gomega.BeNumerically(">", 0), "lists that streams were compared with")
	g.Expect(report.Strange).To(gomega.BeEmpty(), "writes and answers that are not known")
	for _, point := range chaos.CorePoints() {
		g.Expect(report.Hits(point)).To(gomega.BeNumerically(">", 0), "the agent was killed %s %q", point.When, point.Class)
	}
	g.Expect(report.Good()).To(gomega.BeTrue())
}
