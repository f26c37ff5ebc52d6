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

// repairPods is how many pods there are: Karpenter does not repair if more than a fifth of the
// Nodes is unhealthy.
const repairPods = 6

// repairable brings up a sandbox whose Karpenter repairs, with a Node for each pod, and a
// MachineHealthCheck that selects all Machines and is faster. So many of them may be remediated by
// it.
func repairable(t *testing.T, o sandbox.Options, targets int32) {
	t.Helper()
	o.FeatureGates, o.ShimEnv = []string{"NodeRepair"}, append(o.ShimEnv, "NODE_REPAIR_AFTER="+repairAfter.String())
	inSandbox(t, o)
	useCrowd(t)
	// Kubernetes' default, with which only a kubelet can end a pod before its time. The NodePool
	// has no terminationGracePeriod, as is the default, too.
	graceful := mergePatch(`{"spec":{"template":{"spec":{"terminationGracePeriodSeconds":30}}}}`)
	workload := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "crowd"}}
	require.NoError(t, w.Spoke.Patch(t.Context(), workload, graceful))
	scale(t, "crowd", repairPods)
	await(t, 2*time.Minute, running(repairPods))
	check := &clusterv1.MachineHealthCheck{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "crowd"},
		Spec: clusterv1.MachineHealthCheckSpec{
			ClusterName: sandbox.ClusterName,
			Selector:    metav1.LabelSelector{MatchLabels: map[string]string{clusterv1.MachineDeploymentNameLabel: "crowd"}},
			Checks: clusterv1.MachineHealthCheckChecks{UnhealthyNodeConditions: []clusterv1.UnhealthyNodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionFalse, TimeoutSeconds: new(int32(1))},
				{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, TimeoutSeconds: new(int32(1))},
			}},
		},
	}
	require.NoError(t, w.Hub.Create(t.Context(), check))
	t.Cleanup(func() { _ = w.Hub.Delete(context.Background(), check) })
	poll(t, soon, func(ctx context.Context) (string, error) {
		err := w.Hub.Get(ctx, client.ObjectKeyFromObject(check), check)
		expected := check.Status.ExpectedMachines
		return lo.Ternary(expected != nil && *expected == targets, "", fmt.Sprintf("the MachineHealthCheck to have %d targets", targets)), err
	})
}

// disrupted returns why Karpenter disrupted Nodes.
func disrupted() []string {
	return lo.FilterMap(w.Recorder.State().Timelines, func(j timeline.Timeline, _ int) (string, bool) { return j.Disrupted, j.Disrupted != "" })
}

// TestUnhealthyNodesAreRepairedByOneOfTwo has Karpenter repair a Node whose kubelet reports that it
// is not ready, and one whose kubelet is dead. A MachineHealthCheck that is faster leaves both
// alone. The repair can be forbidden for a single Node.
func TestUnhealthyNodesAreRepairedByOneOfTwo(t *testing.T) {
	figure := shows(t, "unhealthy nodes: repaired by Karpenter, once, and not against a veto; a MachineHealthCheck of all Machines leaves them alone")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	const pods = repairPods
	repairable(t, sandbox.Options{Name: "e2e-repair"}, 0) // Cluster API does not count those that are not remediated
	machines := listCrowd(t)
	require.Len(t, machines, pods)
	for _, m := range machines {
		require.Equal(t, agentv1.Group, m.Annotations[clusterv1.MachineSkipRemediationAnnotation], "Machine %s", m.Name)
	}
	before := made("crowd")

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

	require.Contains(t, uidsOf(listCrowd(t)), vetoed.UID)
}

// TestAMachineHealthCheckRepairsWhereItMay has the agent leave the Machines to the
// MachineHealthCheck, which is faster than Karpenter's own repair, and a person forbid it for one
// of them.
func TestAMachineHealthCheckRepairsWhereItMay(t *testing.T) {
	figure := shows(t, "unhealthy nodes: repaired by a MachineHealthCheck where Karpenter leaves them to it, once, and not against a veto")
	if testing.Short() {
		t.Skip("not in the short run: needs a sandbox of its own")
	}
	const pods = repairPods
	repairable(t, sandbox.Options{Name: "e2e-health-check", ShimEnv: []string{"NODE_REPAIR_SKIP_REMEDIATION=false"}}, repairPods)
	machines := listCrowd(t)
	require.Len(t, machines, pods)
	before := made("crowd")
	kept, remediated := machines[0], machines[1]
	require.NotContains(t, kept.Annotations, clusterv1.MachineSkipRemediationAnnotation)
	require.NoError(t, w.Hub.Patch(t.Context(), &kept, forbidding(clusterv1.MachineSkipRemediationAnnotation)))
	for _, m := range []*clusterv1.Machine{&kept, &remediated} { // so that only the MachineHealthCheck does it
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: m.Status.NodeRef.Name}}
		require.NoError(t, w.Spoke.Patch(t.Context(), node, forbidding(karpenterv1.DoNotRepairAnnotationKey)))
	}
	sicken(t, &kept, corev1.ConditionFalse)
	sicken(t, &remediated, corev1.ConditionFalse)
	began := time.Now()
	awaitReplaced(t, &remediated, pods)
	figure("the MachineHealthCheck's took %.0f s", time.Since(began).Seconds())
	require.Equal(t, before+1, made("crowd"))
	// Where Cluster API takes long to drain the Node and to delete the Machine, Karpenter may
	// remove the Node meanwhile as an empty one, for which it makes none.
	require.Empty(t, lo.Without(disrupted(), "Empty"), "Karpenter's own repair")
	require.Contains(t, uidsOf(listCrowd(t)), kept.UID)
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

// silence detaches a Node from kwok, so that its kubelet falls silent: its lease is not renewed,
// and none of its pods ends.
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
