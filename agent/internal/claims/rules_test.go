package claims

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Rule R1: the ledger is read first, and everything that is decided from is read after it, from the
// API server itself.
func TestTheLedgerIsReadFirstAndAllElseAfterItFromTheAPIServer(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, nil), machineOf("m"))
	var read []string
	note := func(from string) interceptor.Funcs {
		return interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				read = append(read, fmt.Sprintf("%s %T", from, o))
				return c.Get(ctx, key, o, opts...)
			},
			List: func(ctx context.Context, c client.WithWatch, o client.ObjectList, opts ...client.ListOption) error {
				read = append(read, fmt.Sprintf("%s %T", from, o))
				return c.List(ctx, o, opts...)
			},
		}
	}
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	e.Client, e.Reader = interceptor.NewClient(hub, note("cache:")), interceptor.NewClient(hub, note("hub:"))

	s, err := e.read(t.Context(), uncached, types.NamespacedName{Namespace: namespace, Name: "small"})

	require.NoError(t, err)
	require.Len(t, s.Machines, 1)
	require.NotEmpty(t, read)
	assert.Equal(t, "hub: *v1beta2.MachineDeployment", read[0])
	for _, list := range []string{"*v1alpha1.MachineClaimList", "*v1beta2.MachineSetList", "*v1beta2.MachineList"} {
		assert.Contains(t, read, "hub: "+list)
		assert.NotContains(t, read, "cache: "+list)
	}
	assert.Less(t, slices.Index(read, "hub: *v1beta2.MachineSetList"), slices.Index(read, "hub: *v1beta2.MachineList"),
		"a paused MachineSet's Machines are counted")
}

// Rule R2: actions that were decided from a ledger are not performed once it has changed.
func TestNothingIsDoneOnTheStrengthOfALedgerThatHasChanged(t *testing.T) {
	md := groupOf("small", 1, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":0,"lastReplicas":1,"spare":0,"pending":{"a":{"m":"m","u":"m"}}}`,
	})
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
	}
	for _, changes := range []bool{true, false} {
		t.Run(fmt.Sprintf("changes=%t", changes), func(t *testing.T) {
			e := engineWith(t, md.DeepCopy(), machineOf("m"), claim.DeepCopy())
			hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
			asked, bound := 0, false
			e.Reader = interceptor.NewClient(hub, interceptor.Funcs{
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
					if _, is := o.(*clusterv1.MachineDeployment); is {
						if asked++; asked == 2 && changes { // another agent wrote here
							other := md.DeepCopy()
							other.Annotations[v1alpha1.LedgerAnnotation] = `{"v":1,"seq":2,"floor":0,"lastReplicas":1,"spare":0,"pending":{"a":{}}}`
							require.NoError(t, c.Patch(ctx, other, client.MergeFrom(md)))
						}
						if asked > 2 {
							return context.Canceled // seen enough
						}
					}
					return c.Get(ctx, key, o, opts...)
				},
			})
			e.Client = interceptor.NewClient(hub, interceptor.Funcs{SubResourceUpdate: func(
				ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption,
			) error {
				bound = true
				return c.SubResource(sub).Update(ctx, o, opts...)
			}})
			_, err := e.group(namespace, "small").steps(t.Context())
			require.ErrorIs(t, err, context.Canceled)
			assert.Equal(t, !changes, bound)
		})
	}
}

// The template decides which MachineSet a lowering is charged to.
func TestGivingBackTestsTheGeneration(t *testing.T) {
	md := groupOf("small", 2, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":1,"lastReplicas":2,"spare":0,"releasing":{"m":{"m":"m"}}}`,
	})
	e := engineWith(t, md)
	ledger, err := protocol.ParseLedger(md.Annotations[v1alpha1.LedgerAnnotation])
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(md), md))
	s := &protocol.Snapshot{Deployment: md, Group: eligibility.Group{Replicas: 2}, Ledger: ledger}
	next := ledger.Clone()
	next.Releasing["m"] = protocol.Release{Machine: "m", Decremented: true, Generation: 2}
	s.Deployment.Generation--

	_, err = e.writeLedger(t.Context(), s, &protocol.Decision{Ledger: next, Replicas: 1, Removes: true})

	require.ErrorContains(t, err, "/metadata/generation")
	s.Deployment.Generation++
	_, err = e.writeLedger(t.Context(), s, &protocol.Decision{Ledger: next, Replicas: 1, Removes: true})
	require.NoError(t, err)
}

// Our finalizer keeps the slot of a deleted Machine, and the mark keeps Cluster API from preferring
// another Machine.
func TestADeletionIsHeldAndMarkedBeforeItBegins(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, nil), machineOf("m"))
	m := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "m"}, m))
	require.NoError(t, e.beginDelete(t.Context(), protocol.Action{Kind: protocol.BeginDelete, Machine: m}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.True(t, protocol.HasFinalizer(m))
	assert.Contains(t, m.Annotations, clusterv1.DeleteMachineAnnotation)
	assert.False(t, protocol.Alive(m))
}

func machineOf(name string) *clusterv1.Machine {
	return &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID(name),
			Labels: map[string]string{clusterv1.MachineDeploymentNameLabel: "small", clusterv1.ClusterNameLabel: clusterName},
		},
		Spec: clusterv1.MachineSpec{ClusterName: clusterName},
	}
}

// joins gives the Machine its Node.
func joins(m *clusterv1.Machine) {
	m.Spec.ProviderID, m.Status.NodeRef.Name = "sim://"+m.Name, "node-"+m.Name
}

// tornDown is a Machine whose instance is gone, so that only the agent's finalizer keeps it.
func tornDown(m *clusterv1.Machine) {
	m.DeletionTimestamp = new(metav1.NewTime(newTestTime()))
	m.Finalizers = []string{v1alpha1.ReleaseFinalizer}
	m.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.MachineDeletingCondition, Status: "True", Reason: clusterv1.MachineDeletingDeletionCompletedReason,
	}}
}

// kinds returns the kinds of a decision's actions, in order.
func kinds(d *protocol.Decision) []protocol.ActionKind {
	all := make([]protocol.ActionKind, 0, len(d.Actions))
	for _, a := range d.Actions {
		all = append(all, a.Kind)
	}
	return all
}
