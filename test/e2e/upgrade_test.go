package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/journey"
)

const (
	// What workers run before the upgrade, behind the control plane, and what it is to be.
	versionBefore, versionAfter = "v1.36.2", "v1.36.3"
	upgradeWithin               = 8 * time.Minute
)

// TestWorkersAreUpgraded has a node group run behind its control plane, and then takes it to the control plane's version: by Karpenter, which
// replaces drifted Nodes within its budgets, and by Cluster API, which rolls the MachineDeployment. More pods come in the middle of it.
func TestWorkersAreUpgraded(t *testing.T) {
	const pods, more = 4, 2
	for name, strategy := range map[string]clusterv1.MachineDeploymentRolloutStrategyType{
		"by Karpenter, with OnDelete":        clusterv1.OnDeleteMachineDeploymentStrategyType,
		"by Cluster API, with RollingUpdate": clusterv1.RollingUpdateMachineDeploymentStrategyType,
	} {
		t.Run(name, func(t *testing.T) {
			figure := shows(t, "workers are upgraded "+name)
			if testing.Short() {
				t.Skip("not in the short run: replaces every Node, one after the other")
			}
			g := NewWithT(t)
			useCrowd(t)
			deployment := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"}}
			g.Expect(w.Hub.Patch(t.Context(), deployment, mergePatch(fmt.Sprintf(
				`{"spec":{"rollout":{"strategy":{"type":%q}},"template":{"spec":{"version":%q}}}}`, strategy, versionBefore)))).To(Succeed())
			pool := &karpenterv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "crowd"}}
			g.Expect(w.Spoke.Patch(t.Context(), pool, mergePatch(`{"spec":{"disruption":{"budgets":[{"nodes":"1"}]}}}`))).To(Succeed())
			known := len(w.Recorder.State().Journeys)
			scale(t, "crowd", pods)
			await(t, 2*time.Minute, running(pods))
			g.Expect(versions(t)).To(Equal(map[string]int{versionBefore: pods}), "workers stay behind the control plane for as long as they are told to")

			fewest := watchFewest(t)
			began := time.Now()
			upgrade := mergePatch(fmt.Sprintf(`{"spec":{"template":{"spec":{"version":%q}}}}`, versionAfter))
			g.Expect(w.Hub.Patch(t.Context(), deployment, upgrade)).To(Succeed())
			poll(t, upgradeWithin, func(context.Context) (string, error) {
				return lo.Ternary(versions(t)[versionAfter] > 0, "", "a first Machine of the new version"), nil
			})
			scale(t, "crowd", pods+more)
			poll(t, upgradeWithin, func(context.Context) (string, error) {
				have := versions(t)
				done := have[versionAfter] == pods+more && len(have) == 1
				return lo.Ternary(done, "", fmt.Sprintf("%d Machines of %s: there are %v", pods+more, versionAfter, have)), nil
			})
			await(t, 2*time.Minute, running(pods+more))
			await(t, 2*time.Minute, crowdRuns(pods+more)) // what a rollout made in advance is a spare for a while
			made := w.Recorder.State().Journeys[known:]
			figure("%d of %d nodes replaced in %.0f s, %d NodeClaims made, at least %d Nodes ready meanwhile", pods, pods+more,
				time.Since(began).Seconds(), len(made), fewest())
			g.Expect(len(made)).To(BeNumerically("<=", 2*pods+more), "no node is replaced twice")
			if strategy == clusterv1.OnDeleteMachineDeploymentStrategyType {
				g.Expect(lo.CountBy(made, func(j journey.Journey) bool { return j.Disrupted == "Drifted" })).To(Equal(pods))
				g.Expect(fewest()).To(BeNumerically(">=", pods), "a replacement is there before a Node goes")
			}
		})
	}
}

// versions counts the crowd's Machines that are not on their way out by their Kubernetes version.
func versions(t *testing.T) map[string]int {
	t.Helper()
	return lo.CountValuesBy(lo.Filter(listCrowd(t), func(m clusterv1.Machine, _ int) bool { return m.DeletionTimestamp.IsZero() }),
		func(m clusterv1.Machine) string { return m.Spec.Version })
}

// watchFewest returns the smallest number of the crowd's Nodes that were ready and took pods at any time since.
func watchFewest(t *testing.T) func() int {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	fewest := 1 << 30
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			var nodes corev1.NodeList
			if err := w.Spoke.List(ctx, &nodes, client.MatchingLabels{corev1.LabelInstanceTypeStable: "crowd"}); err != nil {
				return false, nil //nolint:nilerr // it is asked again
			}
			fewest = min(fewest, lo.CountBy(nodes.Items, func(n corev1.Node) bool {
				return n.DeletionTimestamp.IsZero() && lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
					return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
				})
			}))
			return false, nil
		})
	}()
	return func() int {
		stop()
		<-done
		return fewest
	}
}

// TestClaimsWaitWhileTheControlPlaneIsUpgraded: Cluster API makes no Machines then.
func TestClaimsWaitWhileTheControlPlaneIsUpgraded(t *testing.T) {
	shows(t, "claims wait while the control plane is upgraded, and say why")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	g := NewWithT(t)
	useCrowd(t)
	plane := &simv1.SimControlPlane{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}}
	g.Expect(w.Hub.Get(t.Context(), client.ObjectKeyFromObject(plane), plane)).To(Succeed())
	version := func(v string) error {
		return w.Hub.Patch(context.Background(), plane, mergePatch(fmt.Sprintf(`{"spec":{"version":%q}}`, v)))
	}
	before := plane.Spec.Version
	t.Cleanup(func() {
		if err := version(before); err != nil {
			t.Error(err)
		}
	})
	known := len(w.Recorder.State().Journeys)
	g.Expect(version("v1.36.4")).To(Succeed()) // its API server is still of the old one
	scale(t, "crowd", 3)
	await(t, soon, reached(3, journey.Claimed))
	poll(t, soon, func(ctx context.Context) (string, error) {
		var claims agentv1.MachineClaimList
		err := w.Hub.List(ctx, &claims, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{agentv1.NodeGroupLabel: "crowd"})
		waiting := lo.FilterMap(claims.Items, func(c agentv1.MachineClaim, _ int) (string, bool) {
			return c.Status.Message, c.CurrentPhase() == agentv1.PhasePending
		})
		told := lo.CountBy(waiting, func(message string) bool { return strings.Contains(message, "is upgrading") })
		return lo.Ternary(told == 3, "", fmt.Sprintf("3 claims to say that Cluster API waits for the control plane: %q", waiting)), err
	})
	g.Expect(listCrowd(t)).To(BeEmpty())
	g.Expect(version(before)).To(Succeed())
	await(t, 2*time.Minute, running(3))
	g.Expect(w.Recorder.State().Journeys[known:]).To(HaveLen(3), "the NodeClaims that waited have the Nodes")
}
