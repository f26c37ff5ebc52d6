package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// TestPodsRunOnTheFloor has a node group whose Machines all join with Karpenter's taint, and which
// has some of the user's besides those of claims.
func TestPodsRunOnTheFloor(t *testing.T) {
	figure := shows(t, "the floor: its Nodes take pods, claims get other machines, and it stays")
	if testing.Short() {
		t.Skip("not in the short run: the shim reports its Nodes once a minute")
	}
	useCrowd(t)
	const floor, pods = 2, 3
	began := time.Now()
	patchGroup(t, "crowd", fmt.Sprintf(`{"spec":{"replicas":%d}}`, floor))
	await(t, 2*time.Minute, crowdRuns(floor))
	taken := func(yes bool) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) {
			for _, m := range listCrowd(t) {
				node := &corev1.Node{}
				if err := w.Spoke.Get(ctx, client.ObjectKey{Name: m.Status.NodeRef.Name}, node); err != nil {
					return "", err
				}
				if lo.ContainsBy(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key == karpenterv1.UnregisteredTaintKey }) == yes {
					return fmt.Sprintf("Karpenter's taint of Node %s to be taken off: %t", node.Name, yes), nil
				}
			}
			return "", nil
		}
	}
	poll(t, soon, taken(false)) // all join with it
	poll(t, 4*time.Minute, taken(true))
	figure("its Nodes took pods %.0f s after they were asked for", time.Since(began).Seconds())
	theirs := listCrowd(t)
	for i := range theirs {
		require.Contains(t, theirs[i].Annotations, agentv1.FloorAnnotation)
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: fmt.Sprintf("floor-%d", i), Labels: map[string]string{"app": "floor"}},
			Spec: corev1.PodSpec{
				NodeSelector:                  map[string]string{corev1.LabelHostname: theirs[i].Status.NodeRef.Name},
				TerminationGracePeriodSeconds: new(int64(0)),
				Containers:                    []corev1.Container{{Name: "app", Image: "registry.k8s.io/pause:3.10"}},
			},
		}
		require.NoError(t, w.Spoke.Create(t.Context(), pod))
		t.Cleanup(func() { _ = w.Spoke.Delete(context.Background(), pod) })
	}
	poll(t, soon, podsRun("floor", floor))

	before := made("crowd")
	scale(t, "crowd", pods)
	await(t, 2*time.Minute, running(floor+pods))
	await(t, soon, crowdRuns(floor+pods))
	require.Equal(t, before+pods, made("crowd"))
	group := described(t, "crowd")
	require.Equal(t, int32(floor), group.GetFloorReplicas())
	paths := w.Sandbox.State().Paths
	response, err := agentAs(t, paths.ReaderCertificate, paths.ReaderKey).Machines.ListMachines(within(t, soon),
		&agentv1alpha1.ListMachinesRequest{Cluster: theCluster(), NodeGroupId: group.GetId()})
	require.NoError(t, err)
	owners := lo.CountValuesBy(response.GetMachines(), func(m *agentv1alpha1.Machine) agentv1alpha1.MachineOwner { return m.GetOwner() })
	require.Equal(t, map[agentv1alpha1.MachineOwner]int{
		agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR: floor, agentv1alpha1.MachineOwner_MACHINE_OWNER_CLAIM: pods,
	}, owners)
	scale(t, "crowd", 0)
	await(t, 3*time.Minute, crowdRuns(floor))
	throughout(t, spareGrace+15*time.Second, time.Second, func() {
		require.ElementsMatch(t, uidsOf(theirs), uidsOf(listCrowd(t)))
	})
	poll(t, soon, podsRun("floor", floor))
}

// podsRun returns a condition: this many pods of the app run.
func podsRun(app string, pods int) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		var list corev1.PodList
		err := w.Spoke.List(ctx, &list, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{"app": app})
		up := lo.CountBy(list.Items, func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp.IsZero() })
		return lo.Ternary(up == pods, "", fmt.Sprintf("%d pods %s to run: %d do", pods, app, up)), err
	}
}
