package claims

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// A Machine is bound as it was read: what has happened to it since decides whether the write
// succeeds.
func TestBindingTestsWhatCounts(t *testing.T) {
	for _, test := range []struct {
		name string
		// meanwhile changes the Machine between the read and the write.
		meanwhile func(m *clusterv1.Machine)
		refused   bool
	}{
		{"nothing happened", func(*clusterv1.Machine) {}, false},
		{"Cluster API wrote spec, annotations and finalizers", func(m *clusterv1.Machine) {
			m.Spec.ProviderID = "sim://1"
			m.Annotations["cluster.x-k8s.io/whatever"] = "x"
			m.Finalizers = append(m.Finalizers, clusterv1.MachineFinalizer)
		}, false},
		{"another claim has it", func(m *clusterv1.Machine) { m.Labels[v1alpha1.ClaimLabel] = "other" }, true},
		{"another claim had it and gave it up", func(m *clusterv1.Machine) {
			m.Annotations[v1alpha1.HandedOverAnnotation] = "other"
		}, true},
		{"somebody marked it for deletion", func(m *clusterv1.Machine) {
			m.Annotations[clusterv1.DeleteMachineAnnotation] = ""
		}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, read := engineWithMachine(t)
			now := read.DeepCopy()
			metav1.SetMetaDataAnnotation(&now.ObjectMeta, "cluster.x-k8s.io/churn", "1")
			test.meanwhile(now)
			require.NoError(t, e.Client.Update(t.Context(), now))

			err := e.label(t.Context(), &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClaimID: "mine"}}, read)

			require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(read), now))
			if test.refused {
				require.True(t, apierrors.IsConflict(err), "%v", err)
				require.NotEqual(t, "mine", protocol.ClaimOf(now))
				return
			}
			require.NoError(t, err)
			require.Equal(t, "mine", protocol.ClaimOf(now))
			require.Equal(t, "1", now.Annotations["cluster.x-k8s.io/churn"], "what others wrote stays")
		})
	}
}

func TestBindingAMachineThatIsBeingDeletedIsRefused(t *testing.T) {
	e, read := engineWithMachine(t)
	require.NoError(t, e.Client.Delete(t.Context(), read.DeepCopy()))
	err := e.label(t.Context(), &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClaimID: "mine"}}, read)
	require.True(t, apierrors.IsConflict(err), "%v", err)
}

func TestAMachineWithoutAnnotationsIsBound(t *testing.T) {
	e, read := engineWithMachine(t)
	read.Annotations = nil
	require.NoError(t, e.Client.Update(t.Context(), read))
	require.NoError(t, e.label(t.Context(), &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClaimID: "mine"}}, read.DeepCopy()))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(read), read))
	require.Equal(t, "mine", protocol.ClaimOf(read))
}

// The label is that of a claim that adopts the Machine, or the mark came too late.
func TestAClaimsLabelTakesTheMarkOff(t *testing.T) {
	e, read := engineWithMachine(t)
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.MarkFloor, Machine: read.DeepCopy()}))
	claim := &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClaimID: "mine"}}
	require.True(t, apierrors.IsConflict(e.label(t.Context(), claim, read)), "it was read before the mark")

	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(read), read))
	require.Contains(t, read.Annotations, v1alpha1.FloorAnnotation)
	require.NoError(t, e.label(t.Context(), claim, read.DeepCopy()))
	labelled := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(read), labelled))
	require.NotContains(t, labelled.Annotations, v1alpha1.FloorAnnotation)

	err := e.do(t.Context(), protocol.Action{Kind: protocol.MarkFloor, Machine: read})
	require.True(t, apierrors.IsConflict(err), "a mark that comes late: %v", err)
}

// A Machine that was handed over records which claim did that, so that a binding that was decided
// before fails.
func TestHandingOverLeavesATrace(t *testing.T) {
	e, read := engineWithMachine(t)
	claim := &v1alpha1.MachineClaim{Spec: v1alpha1.MachineClaimSpec{ClaimID: "first"}}
	require.NoError(t, e.label(t.Context(), claim, read))
	labelled := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(read), labelled))
	require.NoError(t, e.unbind(t.Context(), protocol.Action{Kind: protocol.Unbind, Claim: claim, Machine: labelled}))

	err := e.label(t.Context(), claim, read)

	require.True(t, apierrors.IsConflict(err), "%v", err)
}

// engineWithMachine returns an engine and its hub's only Machine, which is unclaimed.
func engineWithMachine(t *testing.T) (*Engine, *clusterv1.Machine) {
	t.Helper()
	scheme := runtime.NewScheme()
	require.NoError(t, clusterv1.AddToScheme(scheme))
	base := fake.NewClientBuilder().WithScheme(scheme).WithObjects(&clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{
		Namespace: "fleet", Name: "machine", UID: "uid", CreationTimestamp: metav1.NewTime(time.Unix(0, 0)),
		Labels: map[string]string{clusterv1.ClusterNameLabel: "spoke"}, Annotations: map[string]string{"example.com/note": "x"},
		Finalizers: []string{"example.com/somebody"},
	}}).Build()
	hub := interceptor.NewClient(base, interceptor.Funcs{
		// Like the API server.
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			err := c.Patch(ctx, o, p, opts...)
			if err != nil && apierrors.ReasonForError(err) == metav1.StatusReasonUnknown {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "Machine"}, o.GetName(), nil)
			}
			return err
		},
	})
	m := &clusterv1.Machine{}
	require.NoError(t, hub.Get(t.Context(), client.ObjectKey{Namespace: "fleet", Name: "machine"}, m))
	return New(Config{Client: hub, Reader: hub}), m
}
