package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// On an API server, the annotation and the ledger are one write, the event is a Warning, and
// removing the annotation ends the freeze.
func TestAFrozenGroupSaysSoAndEndsWhenTheAnnotationGoes(t *testing.T) {
	md := groupOf("small", 3, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":3,"lastReplicas":4,"spare":0}`,
	})
	*md.Spec.Replicas = 0
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", Holder: "karpenter", NodeGroup: "small"},
		Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseBound, Machine: &v1alpha1.MachineReference{Name: "m", UID: "m"},
		},
	}
	m := machineOf("m")
	m.Labels[v1alpha1.ClaimLabel] = "a"
	e := engineWith(t, md, claim, m)
	recorder := events.NewFakeRecorder(8)
	e.Recorder = recorder

	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)

	key := types.NamespacedName{Namespace: namespace, Name: "small"}
	stored := &clusterv1.MachineDeployment{}
	require.NoError(t, e.Reader.Get(t.Context(), key, stored))
	assert.Contains(t, stored.Annotations[v1alpha1.ReplicasLoweredAnnotation], "spec.replicas to 0")
	assert.Equal(t, int32(0), *stored.Spec.Replicas)
	assert.Contains(t, <-recorder.Events, "Warning "+protocol.ReasonReplicasLowered)
	refusal, err := e.refusal(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "b"},
		&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}}, stored)
	require.NoError(t, err)
	require.NotNil(t, refusal)
	assert.Equal(t, eligibility.ReplicasLowered, refusal.Reason)

	before := stored.DeepCopy()
	delete(stored.Annotations, v1alpha1.ReplicasLoweredAnnotation)
	require.NoError(t, e.Client.Patch(t.Context(), stored, client.MergeFrom(before)))
	_, err = e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NoError(t, e.Reader.Get(t.Context(), key, stored))
	assert.Equal(t, int32(4), *stored.Spec.Replicas)
}

// Admission policies read the number beside the ledger. A move, a restore or an older agent leaves
// another one.
func TestTheNumberOfClaimsBesideTheLedgerIsKeptTrue(t *testing.T) {
	for name, annotations := range map[string]map[string]string{
		"none":     {},
		"too low":  {v1alpha1.ClaimedAnnotation: "0"},
		"too high": {v1alpha1.ClaimedAnnotation: "7"},
		"no such":  {v1alpha1.ClaimedAnnotation: "x"},
	} {
		t.Run(name, func(t *testing.T) {
			annotations[v1alpha1.LedgerAnnotation] = `{"v":1,"seq":1,"floor":0,"lastReplicas":1,"spare":0}`
			m := machineOf("m")
			m.Labels[v1alpha1.ClaimLabel] = "a"
			e := engineWith(t, groupOf("small", 1, annotations), m, claimIn("", "a", v1alpha1.PhaseBound, "m"))
			_, err := e.group(namespace, "small").run(t.Context())
			require.NoError(t, err)
			var md clusterv1.MachineDeployment
			require.NoError(t, e.Reader.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: "small"}, &md))
			assert.Equal(t, "1", md.Annotations[v1alpha1.ClaimedAnnotation])
		})
	}
}
