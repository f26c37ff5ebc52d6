package claims

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

func groupOf(name string, replicas int32, annotations map[string]string) *clusterv1.MachineDeployment {
	return &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Generation: 1, Labels: map[string]string{v1alpha1.MemberLabel: ""}, Annotations: annotations,
		},
		Spec: clusterv1.MachineDeploymentSpec{ClusterName: clusterName, Replicas: &replicas},
	}
}

func engineWith(t *testing.T, objects ...client.Object) *Engine {
	t.Helper()
	scheme := runtime.NewScheme()
	must(t, clusterv1.AddToScheme(scheme))
	must(t, v1alpha1.AddToScheme(scheme))
	objects = append(objects, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}})
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).WithStatusSubresource(&v1alpha1.MachineClaim{}).Build()
	return New(Config{Client: c, Reader: c, Clock: clock.RealClock{}})
}

// The claim is where its Machine is, whatever a call names first.
func TestAClaimWhoseObjectWasLostIsNotMadeOnAnotherGroup(t *testing.T) {
	e := engineWith(t, groupOf("cheap", 0, nil), groupOf("dear", 1, nil), &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "dear-1", UID: "dear-1",
			Labels: map[string]string{
				clusterv1.MachineDeploymentNameLabel: "dear", clusterv1.ClusterNameLabel: clusterName, v1alpha1.ClaimLabel: "a",
			},
			Annotations: map[string]string{v1alpha1.ClaimHolderAnnotation: "spoke"},
		},
		Spec: clusterv1.MachineSpec{ClusterName: clusterName},
	})
	c, err := e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"cheap", "dear"},
	})
	require.NoError(t, err)
	assert.Equal(t, "dear", c.Spec.NodeGroup)
	assert.Equal(t, "spoke", c.Spec.Holder)
	got, err := e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(t, err)
	require.NotNil(t, got.Status.Machine)
	assert.Equal(t, "dear-1", got.Status.Machine.Name)
	var cheap clusterv1.MachineDeployment
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "cheap"}, &cheap))
	assert.Zero(t, *cheap.Spec.Replicas)
}

// A claim whose call is gone goes where the call would have moved it.
func TestAnAbandonedClaimMovesToTheNextCandidate(t *testing.T) {
	full := map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "0", clusterv1.AutoscalerMaxSizeAnnotation: "0"}
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "full"},
			CreationTimestamp: metav1.NewTime(newTestTime()),
		},
		Spec: v1alpha1.MachineClaimSpec{
			ClusterName: clusterName, ClaimID: "a", NodeGroup: "full", Candidates: []string{"full", "gone", "open"},
		},
	}
	e := engineWith(t, groupOf("full", 0, full), groupOf("open", 0, nil), claim)
	e.spawn = func(run func()) { run() }
	e.group(namespace, "full").kick()
	got, err := e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(t, err)
	assert.Equal(t, "open", got.Spec.NodeGroup)
	assert.Equal(t, v1alpha1.PhasePending, got.Status.Phase, "it is entered there")

	last := claim.DeepCopy()
	last.Spec.Candidates = []string{"open", "full"}
	e = engineWith(t, groupOf("full", 0, full), last)
	e.spawn = func(run func()) { run() }
	e.group(namespace, "full").kick()
	got, err = e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseEnded, got.Status.Phase)
	assert.Equal(t, ReasonNoRoom, got.Status.Reason)
}
