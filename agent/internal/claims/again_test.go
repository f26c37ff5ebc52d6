package claims

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// A MachineDeployment's name may come to stand for another object. If the MachineDeployment was
// deleted and made again, the new one has nothing to do with the claims of the old one. If it was
// moved to another hub, it is the same one under another UID.

// claimIn is a claim on the group "small" that was entered in the ledger of the MachineDeployment
// with that UID; empty means not entered.
func claimIn(uid types.UID, id string, phase v1alpha1.Phase, machine string) *v1alpha1.MachineClaim {
	c := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, id), CreationTimestamp: metav1.NewTime(newTestTime()),
			Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: id, NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{Phase: phase, NodeGroupUID: uid},
	}
	if machine != "" {
		c.Status.Machine = &v1alpha1.MachineReference{Name: machine, UID: types.UID(machine)}
	}
	return c
}

func groupWith(uid types.UID, replicas int32, ledger *protocol.Ledger) *clusterv1.MachineDeployment {
	var annotations map[string]string
	if ledger != nil {
		annotations = map[string]string{v1alpha1.LedgerAnnotation: ledger.Encode()}
	}
	md := groupOf("small", replicas, annotations)
	md.UID = uid
	return md
}

func readSmall(t *testing.T, objects ...client.Object) *protocol.Snapshot {
	t.Helper()
	s, err := engineWith(t, objects...).read(t.Context(), uncached, client.ObjectKey{Namespace: namespace, Name: "small"})
	require.NoError(t, err)
	s.Sets = []*clusterv1.MachineSet{{
		ObjectMeta: metav1.ObjectMeta{Name: "small-a"}, Spec: clusterv1.MachineSetSpec{Replicas: &s.Group.Replicas},
	}}
	return s
}

func TestAMachineDeploymentThatWasMadeAgainKeepsItsFloor(t *testing.T) {
	old := &protocol.Ledger{
		Version: 1, Of: namespace + "/small", UID: "old", Seq: 7, Floor: 1, LastReplicas: 3, Pending: map[string]protocol.Assignment{"a": {}, "b": {}},
	}
	for name, ledger := range map[string]*protocol.Ledger{"from its manifest": nil, "from an export, ledger and all": old} {
		t.Run(name, func(t *testing.T) {
			s := readSmall(t, groupWith("new", 3, ledger),
				claimIn("old", "a", v1alpha1.PhasePending, ""), claimIn("old", "b", v1alpha1.PhasePending, ""), claimIn("", "c", "", ""))
			d := protocol.Decide(s)
			require.NotNil(t, d.Ledger)
			assert.Equal(t, int32(3), d.Ledger.Floor, "all three are the user's")
			assert.Equal(t, int32(4), d.Replicas, "and one is for the claim that came after")
			assert.Equal(t, map[string]protocol.Assignment{"c": {}}, d.Ledger.Pending)
			require.Equal(t, []protocol.ActionKind{protocol.End, protocol.End}, kinds(d), "the others have nothing to wait for")
			assert.Equal(t, protocol.ReasonNodeGroupGone, d.Actions[0].Event.Reason)
		})
	}
}

// Claims that lost their Machines with the old MachineDeployment are not claims on the new one,
// which they would freeze.
func TestAMachineDeploymentThatWasMadeAgainIsNotFrozen(t *testing.T) {
	objects := []client.Object{groupWith("new", 1, nil), claimIn("", "new", "", "")}
	for _, id := range []string{"a", "b", "c"} {
		objects = append(objects, claimIn("old", id, v1alpha1.PhaseBound, "gone-"+id))
	}
	d := protocol.Decide(readSmall(t, objects...))
	require.NotNil(t, d.Ledger)
	assert.False(t, d.Ledger.Lowered)
	assert.Equal(t, int32(1), d.Ledger.Floor)
	assert.Equal(t, int32(2), d.Replicas)
	assert.Equal(t, []protocol.ActionKind{protocol.End, protocol.End, protocol.End}, kinds(d))
}

func TestAMachineDeploymentThatWasMovedKeepsItsLedger(t *testing.T) {
	ledger := &protocol.Ledger{
		Version: 1, Of: namespace + "/small", UID: "source", Seq: 7, Floor: 1, LastReplicas: 3, Pending: map[string]protocol.Assignment{"waits": {}},
	}
	bound, users := machineOf("bound"), machineOf("user's")
	bound.Labels[v1alpha1.ClaimLabel] = "a"
	for _, m := range []*clusterv1.Machine{bound, users} {
		joins(m)
	}
	s := readSmall(t, groupWith("target", 3, ledger), bound, users) // the claims were not moved
	s.SpareSince = s.Now.Add(-time.Hour)
	d := protocol.Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(1), d.Ledger.Floor, "the floor is what it was")
	assert.Equal(t, int32(3), d.Replicas)
	assert.Empty(t, d.Ledger.Releasing)
	assert.Equal(t, []protocol.ActionKind{protocol.Recreate}, kinds(d), "the claim is made again from its Machine, and nothing is removed")
}

func TestWhatWasDecidedForAMachineDeploymentIsNotDoneToTheNextOne(t *testing.T) {
	ledger := &protocol.Ledger{
		Version: 1, Of: namespace + "/small", Seq: 1, LastReplicas: 1, Pending: map[string]protocol.Assignment{"a": {Machine: "m", UID: "m"}},
	}
	again := func(t *testing.T, e *Engine) {
		t.Helper()
		require.NoError(t, e.Client.Delete(t.Context(), groupWith("old", 1, nil)))
		require.NoError(t, e.Client.Create(t.Context(), groupWith("new", 1, ledger)))
	}
	t.Run("its ledger", func(t *testing.T) {
		e := engineWith(t, groupWith("old", 1, ledger))
		s, err := e.read(t.Context(), uncached, client.ObjectKey{Namespace: namespace, Name: "small"})
		require.NoError(t, err)
		again(t, e)
		_, err = e.writeLedger(t.Context(), s, &protocol.Decision{Ledger: s.Ledger.Clone(), Replicas: 1})
		require.ErrorContains(t, err, "/metadata/uid")
	})
	t.Run("what the ledger permitted", func(t *testing.T) {
		e := engineWith(t, groupWith("old", 1, ledger), machineOf("m"), claimIn("old", "a", v1alpha1.PhasePending, ""))
		hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
		asked, bound := 0, false
		e.Reader = interceptor.NewClient(hub, interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
				if _, is := o.(*clusterv1.MachineDeployment); is {
					if asked++; asked == 2 {
						again(t, e)
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
		_, err := e.group(namespace, "small").run(t.Context())
		require.ErrorIs(t, err, context.Canceled)
		assert.False(t, bound)
	})
}

func TestAClaimKnowsTheMachineDeploymentThatItWasEnteredFor(t *testing.T) {
	e := engineWith(t, groupWith("uid", 0, nil))
	e.spawn = func(run func()) { run() }
	c, err := e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"small"}})
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c))
	assert.Equal(t, types.UID("uid"), c.Status.NodeGroupUID)
	s, err := e.read(t.Context(), uncached, client.ObjectKey{Namespace: namespace, Name: "small"})
	require.NoError(t, err)
	assert.Equal(t, types.UID("uid"), s.Ledger.UID)
}

// A claim that is recreated from its Machine's label records the UID of the MachineDeployment too.
// Otherwise it would not be recognized as left behind.
func TestARestoredClaimKnowsItsMachineDeployment(t *testing.T) {
	m := machineOf("m")
	m.Labels[v1alpha1.ClaimLabel] = "a"
	ledger := &protocol.Ledger{Version: 1, Of: namespace + "/small", UID: "uid", Seq: 1, LastReplicas: 1}
	claim := claimIn("", "a", "", "")
	e := engineWith(t, groupWith("uid", 1, ledger), m, claim)
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	assert.Equal(t, v1alpha1.PhaseBound, claim.Status.Phase)
	assert.Equal(t, types.UID("uid"), claim.Status.NodeGroupUID)
}

// The Machine of another Cluster's claim does not raise replicas.
func TestAMachineOfTheOneBeforeIsNotCounted(t *testing.T) {
	ledger := &protocol.Ledger{Version: 1, Of: namespace + "/small", Seq: 7, Floor: 1, LastReplicas: 1}
	other := claimIn("", "a", v1alpha1.PhaseBound, "other")
	other.Name, other.Spec.ClusterName = "another.a", "another"
	theirs := machineOf("other")
	theirs.Spec.ClusterName = "another"
	theirs.Labels = map[string]string{v1alpha1.ClaimLabel: "a"}
	theirs.CreationTimestamp = metav1.NewTime(newTestTime())
	d := protocol.Decide(readSmall(t, groupWith("", 1, ledger), other, theirs))
	assert.Equal(t, int32(1), d.Replicas)
	assert.Nil(t, d.Ledger)
	assert.Empty(t, kinds(d), "it lives, and so its claim does")
}
