package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/conditions"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// TestWhatTheEndOfANodeWaitsFor deletes five NodeClaims: one whose pod may not be evicted, one
// whose pod a PodDisruptionBudget protects, one whose Node has a volume attached, one whose Machine
// has another controller's hooks, and one whose instance has its finalizer.
func TestWhatTheEndOfANodeWaitsFor(t *testing.T) {
	figure := shows(t, "the end of a node waits for its grace period, for volumes, and for others' hooks, which the NodeClaim names")
	if testing.Short() {
		t.Skip("not in the short run: waits until a deletion counts as stuck")
	}
	leaveAsFound(t)
	const (
		graced, attached, hooked, guarded, kept = "graced", "attached", "hooked", "guarded", "kept"

		grace     = 30 * time.Second
		preDrain  = clusterv1.PreDrainDeleteHookAnnotationPrefix + "/backup"
		preEnd    = clusterv1.PreTerminateDeleteHookAnnotationPrefix + "/backup"
		deletedBy = 2 * time.Minute
		// backup is the finalizer of another controller on the infrastructure's machine.
		backup = "example.com/backup"
	)
	groups := []string{graced, attached, hooked, guarded, kept}
	changes := map[string]func(*unstructured.Unstructured){
		graced: func(o *unstructured.Unstructured) {
			of("NodePool", func(o *unstructured.Unstructured) {
				set(o, grace.String(), "spec", "template", "spec", "terminationGracePeriod")
			})(o)
			of("Deployment", func(o *unstructured.Unstructured) {
				set(o, "true", "spec", "template", "metadata", "annotations", karpenterv1.DoNotDisruptAnnotationKey)
			})(o)
		},
	}
	for _, group := range groups {
		copies(t, w.Hub, manifests.CrowdHub, group, nil)
		copies(t, w.Spoke, manifests.CrowdSpoke, group, changes[group])
		copies(t, w.Spoke, manifests.CrowdWorkload, group, changes[group])
		require.NoError(t, w.AwaitNodePool(within(t, soon), group))
	}
	goHome(t, groups...)
	for _, group := range groups {
		scale(t, group, 1)
	}
	await(t, 2*time.Minute, running(len(groups)))
	ends := lo.SliceToMap(w.Recorder.State().Live(), func(j timeline.Timeline) (string, timeline.Timeline) { return j.NodePool, j })
	require.Len(t, ends, len(groups))
	now := func(group string) timeline.Timeline {
		j, _ := lo.Find(w.Recorder.State().Timelines, func(j timeline.Timeline) bool { return j.UID == ends[group].UID })
		return j
	}
	goes := func(group string) {
		t.Helper()
		await(t, deletedBy, func(timeline.State) string {
			return lo.Ternary(now(group).Reached(timeline.Gone), "", "NodeClaim "+ends[group].NodeClaim+" of "+group+" to go")
		})
	}
	claim := func(group string) *agentv1.MachineClaim {
		t.Helper()
		c := &agentv1.MachineClaim{}
		key := client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: agentv1.ObjectName(sandbox.ClusterName, string(ends[group].UID))}
		require.NoError(t, w.Hub.Get(within(t, soon), key, c))
		return c
	}
	runs := func(group string) {
		t.Helper()
		var instance simv1.SimMachine
		require.NoError(t, w.Hub.Get(within(t, soon), client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: ends[group].Machine}, &instance))
		require.Nil(t, instance.DeletionTimestamp, "the instance of "+group)
		require.Nil(t, instance.Status.StoppedAt, "the instance of "+group)
	}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: ends[hooked].Machine}}
	hook := func(patch string) error {
		return client.IgnoreNotFound(w.Hub.Patch(context.Background(), machine, mergePatch(`{"metadata":{"annotations":`+patch+`}}`)))
	}
	t.Cleanup(func() {
		if err := hook(fmt.Sprintf(`{%q:null,%q:null}`, preDrain, preEnd)); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, hook(fmt.Sprintf(`{%q:"somebody",%q:"somebody"}`, preDrain, preEnd)))
	volume := &storagev1.VolumeAttachment{
		ObjectMeta: metav1.ObjectMeta{Name: "e2e-attached"},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: "e2e.example.com", NodeName: ends[attached].Node, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: new("e2e")},
		},
	}
	require.NoError(t, w.Spoke.Create(t.Context(), volume))
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(w.Spoke.Delete(context.Background(), volume)); err != nil {
			t.Error(err)
		}
	})
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "e2e-guarded"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: new(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": guarded}},
		},
	}
	require.NoError(t, w.Spoke.Create(t.Context(), budget))
	t.Cleanup(func() {
		if err := client.IgnoreNotFound(w.Spoke.Delete(context.Background(), budget)); err != nil {
			t.Error(err)
		}
	})
	instance := &simv1.SimMachine{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: ends[kept].Machine}}
	keep := func(with bool) error {
		if err := w.Hub.Get(context.Background(), client.ObjectKeyFromObject(instance), instance); err != nil {
			return client.IgnoreNotFound(err)
		}
		before := client.MergeFromWithOptions(instance.DeepCopy(), client.MergeFromWithOptimisticLock{})
		if with {
			controllerutil.AddFinalizer(instance, backup)
		} else {
			controllerutil.RemoveFinalizer(instance, backup)
		}
		return w.Hub.Patch(context.Background(), instance, before)
	}
	keeping := func(with bool) {
		t.Helper()
		poll(t, soon, func(context.Context) (string, error) { // the provider writes the object as well
			err := keep(with)
			return lo.Ternary(apierrors.IsConflict(err), "the finalizer of the instance to be written", ""), lo.Ternary(apierrors.IsConflict(err), nil, err)
		})
	}
	t.Cleanup(func() { _ = keep(false) }) // else the test has failed already
	keeping(true)
	var keeps corev1.PodList
	require.NoError(t, w.Spoke.List(t.Context(), &keeps, client.InNamespace(metav1.NamespaceDefault), client.MatchingLabels{"app": graced}))
	require.Len(t, keeps.Items, 1)

	for _, group := range groups {
		require.NoError(t, w.Spoke.Delete(t.Context(), &karpenterv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: ends[group].NodeClaim}}))
	}

	poll(t, soon, func(ctx context.Context) (string, error) {
		var nodeClaim karpenterv1.NodeClaim
		err := w.Spoke.Get(ctx, client.ObjectKey{Name: ends[attached].NodeClaim}, &nodeClaim)
		detached := nodeClaim.StatusConditions().Get(karpenterv1.ConditionTypeVolumesDetached)
		return lo.Ternary(lo.FromPtr(detached).Reason == "AwaitingVolumeDetachment", "",
			"the NodeClaim to wait for the volume of its Node"), err
	})
	require.Equal(t, agentv1.PhaseBound, claim(attached).CurrentPhase(), "it was not released")
	runs(attached)
	require.NoError(t, w.Spoke.Delete(t.Context(), volume))
	goes(attached)
	require.True(t, claim(attached).Status.Drained, "Cluster API need not wait for the volume again")

	goes(graced)
	lasted, _ := now(graced).Took(timeline.Deleting, timeline.Gone)
	figure("a pod that may not be evicted: %v with a grace period of %v", rounded(lasted), grace)
	require.GreaterOrEqual(t, lasted, grace-2*time.Second, "times of the API server are whole seconds")
	require.NoError(t, client.IgnoreNotFound(w.Spoke.Get(t.Context(), client.ObjectKeyFromObject(&keeps.Items[0]), &keeps.Items[0])))

	poll(t, deletedBy, func(ctx context.Context) (string, error) {
		err := w.Hub.Get(ctx, client.ObjectKeyFromObject(instance), instance)
		return lo.Ternary(instance.Status.StoppedAt != nil, "", "the instance of "+kept+" to be stopped"), err
	})
	require.Contains(t, instance.Finalizers, backup)

	waitsFor := func(reason string, bound time.Duration) {
		t.Helper()
		poll(t, bound, func(ctx context.Context) (string, error) {
			err := w.Hub.Get(ctx, client.ObjectKeyFromObject(machine), machine)
			is := conditions.GetReason(machine, clusterv1.MachineDeletingCondition)
			return lo.Ternary(is == reason, "", fmt.Sprintf("the Machine to say %s: it says %s", reason, is)), err
		})
		// The shim does not report what ends within five minutes.
		poll(t, bound, func(ctx context.Context) (string, error) {
			var all corev1.EventList
			err := w.Spoke.List(ctx, &all)
			told := lo.ContainsBy(all.Items, func(e corev1.Event) bool {
				return e.InvolvedObject.Kind == "NodeClaim" && e.InvolvedObject.Name == ends[hooked].NodeClaim && e.Reason == "MachineDeletionStuck" &&
					strings.Contains(e.Message, machine.Name) && strings.Contains(e.Message, reason) && strings.Contains(e.Message, "/backup")
			})
			return lo.Ternary(told, "", "the NodeClaim to say that the Machine says "+reason), err
		})
		poll(t, soon, func(context.Context) (string, error) {
			c := claim(hooked)
			ready, _ := lo.Find(c.Status.Conditions, func(c metav1.Condition) bool { return c.Type == agentv1.ConditionReady })
			return lo.Ternary(ready.Status == metav1.ConditionFalse && ready.Reason == reason, "",
				fmt.Sprintf("the claim to say %s: it says %s", reason, ready.Reason)), nil
		})
		runs(hooked)
		require.False(t, now(hooked).Reached(timeline.Gone))
	}
	waitsFor(clusterv1.MachineDeletingWaitingForPreDrainHookReason, 6*time.Minute)
	figure("a hook is named on the NodeClaim %.0f s after its deletion", time.Since(now(hooked).At(timeline.Deleting)).Seconds())
	require.NoError(t, hook(fmt.Sprintf(`{%q:null}`, preDrain)))
	waitsFor(clusterv1.MachineDeletingWaitingForPreTerminateHookReason, soon)
	require.NoError(t, hook(fmt.Sprintf(`{%q:null}`, preEnd)))
	goes(hooked)

	// By now everything else has waited for as long.
	poll(t, soon, func(ctx context.Context) (string, error) {
		var all corev1.EventList
		err := w.Spoke.List(ctx, &all)
		told := lo.ContainsBy(all.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Name == ends[kept].NodeClaim && e.Reason == "MachineDeletionStuck" && strings.Contains(e.Message, ends[kept].Machine)
		})
		return lo.Ternary(told, "", "the NodeClaim to say that the infrastructure's machine stays"), err
	})
	require.False(t, now(kept).Reached(timeline.Gone))
	keeping(false)
	goes(kept)

	poll(t, soon, func(ctx context.Context) (string, error) {
		var nodeClaim karpenterv1.NodeClaim
		err := w.Spoke.Get(ctx, client.ObjectKey{Name: ends[guarded].NodeClaim}, &nodeClaim)
		drained := lo.FromPtr(nodeClaim.StatusConditions().Get(karpenterv1.ConditionTypeDrained))
		return lo.Ternary(drained.Reason == "Draining", "", "the NodeClaim to say that its Node is being drained"), err
	})
	require.False(t, now(guarded).Reached(timeline.Gone))
	require.Equal(t, agentv1.PhaseBound, claim(guarded).CurrentPhase(), "it was not released")
	runs(guarded)
	require.NoError(t, w.Spoke.Delete(t.Context(), budget))
	goes(guarded)

	await(t, 2*time.Minute, running(len(groups)))
	for _, group := range groups {
		require.Equal(t, 2, made(group), "one Node more for the pod of "+group)
	}
}
