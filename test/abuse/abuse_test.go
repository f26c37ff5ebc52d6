package abuse_test

import (
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"github.com/onsi/gomega"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/test/abuse"
)

func TestMain(m *testing.M) {
	abuse.Attacker()
	klog.SetLogger(logr.Discard())
	ctrl.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// TestNoAttackCostsAnotherTenantAnything is the short form of `make abuse`: a few seconds of each
// attack, without judging times.
func TestNoAttackCostsAnotherTenantAnything(t *testing.T) {
	g := gomega.NewWithT(t)
	// The sandbox must be stopped when the test is interrupted.
	ctx, stop := signal.NotifyContext(t.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	report, err := abuse.Run(ctx, abuse.Options{
		Name: "abuse-short", Rounds: 1, Claims: 4, Agents: 1, Untimed: true, Say: t.Logf, Log: t.Output(),
	})
	g.Expect(err).NotTo(gomega.HaveOccurred())
	report.Write(t.Output())

	g.Expect(report.Rows).To(gomega.HaveLen(len(abuse.Names())))
	for _, row := range report.Rows {
		g.Expect(row.Err).NotTo(gomega.HaveOccurred(), row.Attack)
		g.Expect(row.Wrong).To(gomega.BeEmpty(), row.Attack)
		g.Expect(row.Calls+row.Connections).To(gomega.BeNumerically(">", 0), row.Attack)
		g.Expect(row.MemoryPeak).To(gomega.BeNumerically(">", 0), row.Attack)
	}
	g.Expect(report.Good()).To(gomega.BeTrue())
}
