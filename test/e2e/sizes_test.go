package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/journey"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

func TestAMistypedSizeRemovesNoMachine(t *testing.T) {
	shows(t, "sizes: a mistyped size removes no machine, and is reported with its field and value")
	if testing.Short() {
		t.Skip("not in the short run: waits for longer than a spare is kept")
	}
	const minSize, maxSize = clusterv1.AutoscalerMinSizeAnnotation, clusterv1.AutoscalerMaxSizeAnnotation
	leaveAsFound(t)
	apply(t, w.Hub, manifests.CrowdHub)
	apply(t, w.Spoke, manifests.CrowdSpoke, manifests.CrowdWorkload)
	require.NoError(t, w.AwaitNodePool(within(t, soon), "crowd"))
	goHome(t, "crowd")
	annotate(t, "crowd", minSize, `"4"`)
	await(t, 3*time.Minute, crowdRuns(4))
	kept := crowdMachines(t)

	for _, tc := range []struct {
		name, minSize, maxSize string // as JSON
		value                  string // of the min size, as reported
	}{
		{name: "a min size in words", minSize: `"three"`, maxSize: `"120"`, value: "three"},
		{name: "a max size below the min size", minSize: `"4"`, maxSize: `"1"`, value: "4"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			const field = "metadata.annotations[" + minSize + "]"
			patchGroup(t, "crowd", fmt.Sprintf(`{"metadata":{"annotations":{%q:%s,%q:%s}}}`, minSize, tc.minSize, maxSize, tc.maxSize))
			poll(t, soon, conditionSays("crowd", shimv1.ConditionNodeGroupsValid, fmt.Sprintf("%s=%q", field, tc.value)))
			poll(t, soon, eventSays("MachineDeployment", "crowd", field))
			problems := described(t, "crowd").GetProblems()
			require.True(t, slices.ContainsFunc(problems, func(p *agentv1alpha1.Problem) bool {
				return p.GetField() == field && p.GetValue() == tc.value
			}), "%v", problems)

			throughout(t, spareGrace+15*time.Second, 500*time.Millisecond, func() {
				require.ElementsMatch(t, kept, crowdMachines(t))
				require.Equal(t, int32(4), crowdReplicas(t))
			})
		})
	}

	// Once corrected, the group is served and followed again.
	annotate(t, "crowd", maxSize, `"120"`)
	poll(t, soon, func(ctx context.Context) (string, error) {
		var class shimv1.ClusterAPINodeClass
		err := w.Spoke.Get(ctx, client.ObjectKey{Name: "crowd"}, &class)
		return lo.Ternary(class.StatusConditions().Root().IsTrue() && class.Status.Problems == 0, "", "no problem to be left"), err
	})
	scale(t, "crowd", 1)
	await(t, 3*time.Minute, running(1))
	await(t, soon, crowdRuns(5))
	require.Subset(t, crowdMachines(t), kept)
	annotate(t, "crowd", minSize, `"2"`)
	await(t, 3*time.Minute, crowdRuns(3))
}

// useCrowd creates the node group crowd for the test, with a NodePool and a Deployment of that name
// without pods.
func useCrowd(t *testing.T) {
	t.Helper()
	leaveAsFound(t)
	apply(t, w.Hub, manifests.CrowdHub)
	apply(t, w.Spoke, manifests.CrowdSpoke, manifests.CrowdWorkload)
	if err := w.AwaitNodePool(within(t, soon), "crowd"); err != nil {
		t.Fatal(err)
	}
	goHome(t, "crowd")
}

// crowdRuns returns a condition: the node group crowd has this many Machines and replicas, and all
// of them run.
func crowdRuns(machines int) func(journey.State) string {
	return func(s journey.State) string {
		is, _ := lo.Find(s.Groups, func(g journey.Group) bool { return g.Name == "crowd" })
		if is.Machines == machines && is.Running == machines && int(is.Replicas) == machines {
			return ""
		}
		return fmt.Sprintf("crowd to have %d Machines that run: %d of %d do, with %d replicas", machines, is.Running, is.Machines, is.Replicas)
	}
}

// crowdMachines returns the UIDs of the crowd's Machines that are not being deleted.
func crowdMachines(t *testing.T) []types.UID {
	t.Helper()
	return lo.FilterMap(listCrowd(t), func(m clusterv1.Machine, _ int) (types.UID, bool) { return m.UID, m.DeletionTimestamp.IsZero() })
}

func listCrowd(t *testing.T) []clusterv1.Machine {
	t.Helper()
	return machinesOf(t, "crowd")
}

func machinesOf(t *testing.T, group string) []clusterv1.Machine {
	t.Helper()
	var machines clusterv1.MachineList
	err := w.Hub.List(t.Context(), &machines, client.InNamespace(sandbox.ClusterNamespace),
		client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: group})
	if err != nil {
		t.Fatal(err)
	}
	return machines.Items
}

// crowdReplicas returns the spec.replicas of the crowd's MachineDeployment.
func crowdReplicas(t *testing.T) int32 {
	t.Helper()
	md := crowdDeployment(t)
	if md.Spec.Replicas == nil {
		t.Fatal("crowd has no replicas")
	}
	return *md.Spec.Replicas
}

func crowdDeployment(t *testing.T) *clusterv1.MachineDeployment {
	t.Helper()
	var md clusterv1.MachineDeployment
	if err := w.Hub.Get(t.Context(), client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: "crowd"}, &md); err != nil {
		t.Fatal(err)
	}
	return &md
}
