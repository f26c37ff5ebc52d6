package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// repairAfter is how long Karpenter tolerates an unhealthy Node here; the product's default is half
// an hour.
const repairAfter = 15 * time.Second

// TestUnhealthyNodesAreRepairedByOneOfTwo first combines a MachineHealthCheck that ignores claimed
// Machines with Karpenter's own repair, of a Node whose kubelet reports that it is not ready, and of
// one whose kubelet is dead. Then it uses a MachineHealthCheck that includes them and is faster. Both
// can be forbidden for a single Node.
func TestUnhealthyNodesAreRepairedByOneOfTwo(t *testing.T) {
	figure := shows(t, "unhealthy nodes: repaired by Karpenter or by a MachineHealthCheck, once, and not against a veto")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	inSandbox(t, sandbox.Options{
		Name: "e2e-repair", FeatureGates: []string{"NodeRepair"}, ShimEnv: []string{"NODE_REPAIR_AFTER=" + repairAfter.String()},
	})
	useCrowd(t)
	const pods = 6 // Karpenter does not repair if more than a fifth is unhealthy
	// Kubernetes' default, with which only a kubelet can end a pod before its time. The NodePool has no
	// terminationGracePeriod, as is the default, too.
	graceful := mergePatch(`{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":30}}}}`)
	workload := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "crowd"}}
	require.NoError(t, w.Spoke.Patch(t.Context(), workload, graceful))
	scale(t, "crowd", pods)
	await(t, 2*time.Minute, running(pods))
	check := &clusterv1.MachineHealthCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"},
		Spec: clusterv1.MachineHealthCheckSpec{
			ClusterName: sandbox.ClusterName,
			Selector: metav1.LabelSelector{
				MatchLabels:      map[string]string{clusterv1.MachineDeploymentNameLabel: "crowd"},
				MatchExpressions: []metav1.LabelSelectorRequirement{{Key: agentv1.ClaimLabel, Operator: metav1.LabelSelectorOpDoesNotExist}},
			},
			Checks: clusterv1.MachineHealthCheckChecks{UnhealthyNodeConditions: []clusterv1.UnhealthyNodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionFalse, TimeoutSeconds: new(int32(1))},
			}},
		},
	}
	require.NoError(t, w.Hub.Create(t.Context(), check))
	t.Cleanup(func() { _ = w.Hub.Delete(context.Background(), check) })
	machines := listCrowd(t)
	require.Len(t, machines, pods)
	before := made("crowd")
	disrupted := func() []string {
		return lo.FilterMap(w.Recorder.State().Timelines, func(j timeline.Timeline, _ int) (string, bool) { return j.Disrupted, j.Disrupted != "" })
	}

	vetoed, repaired := machines[0], machines[1]
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: vetoed.Status.NodeRef.Name}}
	require.NoError(t, w.Spoke.Patch(t.Context(), node, forbidding(karpenterv1.DoNotRepairAnnotationKey)))
	sicken(t, &vetoed, corev1.ConditionFalse)
	// Core publishes one such event about a Node every two minutes, and may already have published
	// that it was not initialized yet.
	poll(t, 4*time.Minute, func(ctx context.Context) (string, error) {
		var all corev1.EventList
		err := w.Spoke.List(ctx, &all)
		told := lo.ContainsBy(all.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == node.Name && strings.Contains(e.Message, karpenterv1.DoNotRepairAnnotationKey)
		})
		return lo.Ternary(told, "", "Karpenter to say that it may not repair the Node"), err
	})
	forbidden := time.Now()
	poll(t, soon, func(context.Context) (string, error) {
		return lo.Ternary(time.Since(forbidden) > 2*repairAfter, "", "what is forbidden not to happen late"), nil
	})
	require.Contains(t, uidsOf(listCrowd(t)), vetoed.UID, "it must not be repaired")
	require.Equal(t, before, made("crowd"))
	sicken(t, &vetoed, corev1.ConditionTrue)

	sicken(t, &repaired, corev1.ConditionFalse)
	began := time.Now()
	awaitReplaced(t, &repaired, pods)
	figure("Karpenter's repair took %.0f s", time.Since(began).Seconds())
	require.Equal(t, before+1, made("crowd"), "one new Node for one that was unhealthy")
	require.Equal(t, []string{"Unhealthy"}, disrupted())

	// A kubelet that is dead confirms no eviction: Karpenter must not wait for its pods.
	dead := machines[4]
	silence(t, dead.Status.NodeRef.Name)
	poll(t, 4*time.Minute, func(ctx context.Context) (string, error) {
		var n corev1.Node
		err := w.Spoke.Get(ctx, client.ObjectKey{Name: dead.Status.NodeRef.Name}, &n)
		unknown := lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown
		})
		return lo.Ternary(unknown, "", "Kubernetes to notice that the kubelet is dead"), err
	})
	began = time.Now()
	awaitReplaced(t, &dead, pods)
	figure("Karpenter's repair of a Node with a dead kubelet took %.0f s", time.Since(began).Seconds())
	require.Equal(t, before+2, made("crowd"))
	require.Equal(t, []string{"Unhealthy", "Unhealthy"}, disrupted())

	// From here on the MachineHealthCheck includes all Machines, and is faster.
	require.NoError(t, w.Hub.Patch(t.Context(), check, mergePatch(`{"spec":{"selector":{"matchExpressions":null}}}`)))
	kept, remediated := machines[2], machines[3]
	require.NoError(t, w.Hub.Patch(t.Context(), &kept, forbidding(clusterv1.MachineSkipRemediationAnnotation)))
	for _, m := range []*clusterv1.Machine{&kept, &remediated} { // so that only the MachineHealthCheck does it
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Status.NodeRef.Name}}
		require.NoError(t, w.Spoke.Patch(t.Context(), node, forbidding(karpenterv1.DoNotRepairAnnotationKey)))
	}
	sicken(t, &kept, corev1.ConditionFalse)
	sicken(t, &remediated, corev1.ConditionFalse)
	began = time.Now()
	awaitReplaced(t, &remediated, pods)
	figure("the MachineHealthCheck's took %.0f s", time.Since(began).Seconds())
	require.Equal(t, before+3, made("crowd"))
	// Where Cluster API takes long to drain the Node and to delete the Machine, Karpenter may remove the Node
	// meanwhile as an empty one, for which it makes none.
	require.Equal(t, []string{"Unhealthy", "Unhealthy"}, lo.Without(disrupted(), "Empty"), "those of Karpenter's own repair")
	require.Subset(t, uidsOf(listCrowd(t)), []types.UID{kept.UID, vetoed.UID})
	sicken(t, &kept, corev1.ConditionTrue) // a Node that is not ready uses up a disruption budget: alone, it would never be removed
}

// forbidding sets an annotation that forbids an action.
func forbidding(key string) client.Patch {
	return mergePatch(fmt.Sprintf(`{"metadata":{"annotations":{%q:"true"}}}`, key))
}

func uidsOf(machines []clusterv1.Machine) []types.UID {
	return lo.Map(machines, func(m clusterv1.Machine, _ int) types.UID { return m.UID })
}

// sicken sets the condition Ready of a Machine's Node, as its kubelet would.
func sicken(t *testing.T, m *clusterv1.Machine, ready corev1.ConditionStatus) {
	t.Helper()
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"reason":"Test","message":"set by the test","lastTransitionTime":%q}]}}`,
		ready, time.Now().UTC().Format(time.RFC3339))
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Status.NodeRef.Name}}
	err := w.Spoke.Status().Patch(within(t, soon), node, client.RawPatch(types.StrategicMergePatchType, []byte(patch)))
	if err != nil {
		t.Fatal(err)
	}
}

// silence detaches a Node from kwok, so that its kubelet falls silent: its lease is not renewed, and
// none of its pods ends.
func silence(t *testing.T, node string) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	require.NoError(t, w.Spoke.Patch(within(t, soon), n, mergePatch(fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, sandbox.KubeletLabel))))
}

// awaitReplaced waits until the Machine is gone and all pods run elsewhere.
func awaitReplaced(t *testing.T, m *clusterv1.Machine, pods int) { //nolint:unparam // callers have as many pods by chance
	t.Helper()
	poll(t, 4*time.Minute, func(context.Context) (string, error) {
		return lo.Ternary(!lo.Contains(uidsOf(listCrowd(t)), m.UID), "", "Machine "+m.Name+" to be replaced"), nil
	})
	await(t, 2*time.Minute, running(pods))
	await(t, 2*time.Minute, crowdRuns(pods))
}
