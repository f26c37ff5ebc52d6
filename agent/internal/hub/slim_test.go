package hub_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// The agent interprets a Machine in the same way, whether it comes from a cache or from the API
// server. The tests of the engine's model, whose caches are slim too, check that the engine decides
// the same, and never writes such an object as a whole.
func TestSlimMachinesSayTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := drawMachine(t)
		slim := slimmed(t, whole)
		require.True(t, proto.Equal(protoconv.Machine(slim), protoconv.Machine(whole)))
		require.Equal(t, protocol.Outdated(whole), protocol.Outdated(slim))
		require.Equal(t, protocol.DeletionCompleted(whole), protocol.DeletionCompleted(slim))
		require.Equal(t, protocol.SetOf(whole), protocol.SetOf(slim))
		require.Equal(t, protocol.HasFinalizer(whole), protocol.HasFinalizer(slim))
		if !protocol.Alive(whole) {
			require.Equal(t, protocol.DeletingReason(whole), protocol.DeletingReason(slim))
		}
		require.Equal(t, whole.Spec.InfrastructureRef, slim.Spec.InfrastructureRef)
		require.Equal(t, whole.Status.LastUpdated, slim.Status.LastUpdated)

		whole.ManagedFields = nil
		require.Equal(t, whole.ObjectMeta, slim.ObjectMeta, "patches test it")
		require.Equal(t, slim, slimmed(t, slim), "a cache may do it twice")
	})
}

func TestSlimClaimsKeepTheirStatus(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := drawClaim(t)
		slim := slimmed(t, whole)
		if ended := whole.CurrentPhase() == v1alpha1.PhaseEnded && whole.Status.EndedAt != nil; ended {
			require.Empty(t, slim.Status.History, "nothing is written to it any more")
			whole.Status.History = nil
		}
		require.Empty(t, slim.Status.Conditions, "each write derives them from the rest")
		whole.Status.Conditions = nil
		require.Equal(t, whole.Status, slim.Status, "it is written as a whole")
		require.Empty(t, slim.Spec.Candidates)
		whole.Spec.Candidates = nil
		require.Equal(t, whole.Spec, slim.Spec)
		require.Empty(t, slim.ManagedFields)
		whole.ManagedFields = nil
		require.Equal(t, whole.ObjectMeta, slim.ObjectMeta)
		require.Equal(t, slim, slimmed(t, slim), "a cache may do it twice")
	})
}

func TestSlimLeavesOthersButTheirManagedFields(t *testing.T) {
	whole := &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{
		Name: "group", Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
	}}
	whole.Spec.Template.Spec.Bootstrap.DataSecretName = new("bootstrap")
	slim, err := hub.Slim(whole.DeepCopy())
	require.NoError(t, err)
	whole.ManagedFields = nil
	require.Equal(t, whole, slim)
}

func slimmed[T interface{ DeepCopy() T }](t *rapid.T, whole T) T {
	o, err := hub.Slim(whole.DeepCopy())
	if err != nil {
		t.Fatal(err)
	}
	slim, ok := o.(T)
	if !ok {
		t.Fatalf("it is a %T", o)
	}
	return slim
}

func drawMeta(t *rapid.T) metav1.ObjectMeta {
	text := rapid.StringMatching(`[a-c]{0,2}`)
	texts := rapid.OneOf(
		rapid.MapOfN(rapid.OneOf(text, rapid.SampledFrom([]string{
			v1alpha1.ClaimLabel, v1alpha1.ClaimNameLabel, clusterv1.MachineDeploymentNameLabel, clusterv1.PausedAnnotation,
		})), text, 0, 4),
		rapid.Just[map[string]string](nil))
	o := metav1.ObjectMeta{
		Namespace: text.Draw(t, "namespace"), Name: text.Draw(t, "name"), Labels: texts.Draw(t, "labels"), Annotations: texts.Draw(t, "annotations"),
		Finalizers: rapid.SampledFrom([][]string{
			nil,
			{},
			{v1alpha1.ReleaseFinalizer},
			append(make([]string, 0, 4), clusterv1.MachineFinalizer),
			{clusterv1.MachineFinalizer, v1alpha1.ReleaseFinalizer},
		}).Draw(t, "finalizers"),
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "manager"}},
	}
	if rapid.Bool().Draw(t, "owned") {
		o.OwnerReferences = append(o.OwnerReferences, metav1.OwnerReference{Kind: "MachineSet", Name: text.Draw(t, "owner"), Controller: new(true)})
	}
	if rapid.Bool().Draw(t, "is deleted") {
		o.DeletionTimestamp = new(metav1.NewTime(time.Unix(5, 0)))
	}
	return o
}

func drawMachine(t *rapid.T) *clusterv1.Machine {
	text := rapid.StringMatching(`[a-c]{0,2}`)
	m := &clusterv1.Machine{ObjectMeta: drawMeta(t)}
	m.Spec.ClusterName, m.Spec.Version, m.Spec.ProviderID = text.Draw(t, "cluster"), text.Draw(t, "version"), text.Draw(t, "provider ID")
	m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{Kind: text.Draw(t, "kind"), Name: "infrastructure"}
	m.Spec.Bootstrap.DataSecretName = new("bootstrap")
	m.Status.Phase, m.Status.NodeRef.Name = text.Draw(t, "phase"), text.Draw(t, "node")
	m.Status.FailureDomain = text.Draw(t, "zone")
	m.Status.LastUpdated = metav1.NewTime(time.Unix(rapid.Int64Range(0, 9).Draw(t, "last updated"), 0))
	m.Status.NodeInfo = &corev1.NodeSystemInfo{KernelVersion: "6.8"}
	// There is one condition of each type.
	for _, kind := range []string{
		clusterv1.MachineUpToDateCondition, clusterv1.MachineInfrastructureReadyCondition, clusterv1.MachineNodeReadyCondition,
		clusterv1.MachineDeletingCondition, clusterv1.PausedCondition, clusterv1.MachineReadyCondition,
	} {
		if rapid.Bool().Draw(t, "has "+kind) {
			m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
				Type:   kind,
				Status: rapid.SampledFrom([]metav1.ConditionStatus{metav1.ConditionTrue, metav1.ConditionFalse, metav1.ConditionUnknown}).Draw(t, "status"),
				Reason: rapid.SampledFrom([]string{
					"", clusterv1.MachineNotUpToDateReason, clusterv1.MachineInfrastructureDeletedReason, clusterv1.MachineNodeInspectionFailedReason,
					clusterv1.MachineDeletingDeletionCompletedReason, clusterv1.MachineNotDeletingReason,
				}).Draw(t, "reason"),
				Message: text.Draw(t, "message"), LastTransitionTime: metav1.NewTime(time.Unix(7, 0)),
			})
		}
	}
	return m
}

func drawClaim(t *rapid.T) *v1alpha1.MachineClaim {
	text := rapid.StringMatching(`[a-c]{0,2}`)
	c := &v1alpha1.MachineClaim{
		ObjectMeta: drawMeta(t),
		Spec: v1alpha1.MachineClaimSpec{
			ClusterName: text.Draw(t, "cluster"), ClaimID: text.Draw(t, "id"), NodeGroup: text.Draw(t, "group"), Candidates: []string{"a", "b"},
		},
		Status: v1alpha1.MachineClaimStatus{
			Phase: rapid.SampledFrom([]v1alpha1.Phase{
				"", v1alpha1.PhasePending, v1alpha1.PhaseBound, v1alpha1.PhaseReleasing, v1alpha1.PhaseEnded,
			}).Draw(t, "phase"),
			Reason: text.Draw(t, "reason"), Message: text.Draw(t, "message"),
			Machine: rapid.SampledFrom([]*v1alpha1.MachineReference{nil, {Name: "m", UID: "u"}}).Draw(t, "machine"),

			Conditions: []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse, Reason: "Bound"}},
		},
	}
	if rapid.Bool().Draw(t, "end is noted") {
		c.Status.EndedAt = new(metav1.NewTime(time.Unix(9, 0)))
	}
	for range rapid.IntRange(0, 3).Draw(t, "events") {
		c.Status.History = append(c.Status.History, v1alpha1.Event{Reason: text.Draw(t, "event"), Message: text.Draw(t, "message")})
	}
	return c
}
