package claims

import (
	"context"
	"fmt"
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

// halfReleased is a Machine that was being released and that a move or a restore created again:
// without its deletion, and under another UID.
func halfReleased(m *clusterv1.Machine) {
	m.Spec.ProviderID, m.Status.NodeRef.Name = "sim://"+m.Name, "node-"+m.Name
	m.Finalizers = []string{v1alpha1.ReleaseFinalizer}
	m.Annotations = map[string]string{
		clusterv1.DeleteMachineAnnotation: v1alpha1.Group, clusterv1.ExcludeNodeDrainingAnnotation: v1alpha1.Group, "example.com/note": "x",
	}
}

// What a release wrote on a Machine is removed, and nothing else.
func TestAMachineThatIsKeptLosesWhatItsReleaseWrote(t *testing.T) {
	m := machineOf("m")
	halfReleased(m)
	e := engineWith(t, m)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.Keep, Machine: m.DeepCopy()}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.False(t, protocol.HasFinalizer(m))
	assert.Equal(t, map[string]string{"example.com/note": "x"}, m.Annotations)
}

// A Machine is deleted only with our finalizer on it, even if that was there before.
func TestAMachineThatIsKeptMeanwhileIsNotDeleted(t *testing.T) {
	m := machineOf("m")
	halfReleased(m)
	e := engineWith(t, m)
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	require.NoError(t, hub.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			now := &clusterv1.Machine{}
			require.NoError(t, c.Get(ctx, client.ObjectKeyFromObject(o), now))
			now.Finalizers = []string{clusterv1.MachineFinalizer}
			require.NoError(t, c.Update(ctx, now))
			return c.Delete(ctx, o, opts...)
		},
	})
	require.Error(t, e.do(t.Context(), protocol.Action{Kind: protocol.BeginDelete, Machine: m.DeepCopy()}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.True(t, protocol.Alive(m))
}

// An agent that finds the paused step half done completes it. Merely unpausing would make Cluster
// API restore the MachineSet's replica, and the release would then lower both the MachineSet and
// the MachineDeployment for a second Machine.
func TestAPausedStepThatSomebodyLeftIsCompleted(t *testing.T) {
	three := int32(3)
	ledger := &protocol.Ledger{Version: 1, Seq: 7, Floor: 2, LastReplicas: 3, Releasing: map[types.UID]protocol.Release{
		"gone": {Machine: "gone", Claim: "c", Set: "small-a"},
	}}
	md := groupOf("small", three, map[string]string{
		v1alpha1.LedgerAnnotation: ledger.Encode(), clusterv1.PausedAnnotation: v1alpha1.PausedByAgent,
	})
	md.Status.Conditions = []metav1.Condition{{Type: clusterv1.PausedCondition, Status: metav1.ConditionTrue}}
	set := func(name string, replicas int32, annotations map[string]string) *clusterv1.MachineSet {
		return &clusterv1.MachineSet{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: name, Annotations: annotations,
				Labels: map[string]string{clusterv1.MachineDeploymentNameLabel: "small", clusterv1.ClusterNameLabel: clusterName},
			},
			Spec: clusterv1.MachineSetSpec{ClusterName: clusterName, Replicas: &replicas},
		}
	}
	released := machineOf("gone")
	tornDown(released)
	released.Labels[v1alpha1.ClaimLabel] = "c"
	e := engineWith(t, md, released, set("small-a", 1, map[string]string{v1alpha1.ReleasedAnnotation: "gone"}), set("small-b", 1, nil))
	var written []string
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if err := c.Patch(ctx, o, patch, opts...); err != nil {
				return err
			}
			if md, is := o.(*clusterv1.MachineDeployment); is {
				_, paused := md.Annotations[clusterv1.PausedAnnotation]
				written = append(written, fmt.Sprintf("replicas=%d paused=%t", *md.Spec.Replicas, paused))
			}
			return nil
		},
	})
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NotEmpty(t, written)
	assert.Equal(t, "replicas=2 paused=false", written[0])
}

// Assignments are batched, but not where Machines then join before they are assigned: each of those
// would be released and replaced by one that may join too soon as well.
func TestAMachineIsNamedAtOnceWhereOthersJoinedTooSoon(t *testing.T) {
	for _, missed := range []bool{false, true} {
		md := groupOf("small", 2, map[string]string{
			v1alpha1.LedgerAnnotation: (&protocol.Ledger{
				Version: 1, Seq: 4, LastReplicas: 2, Pending: map[string]protocol.Assignment{"a": {}, "b": {}},
			}).Encode(),
		})
		md.Generation = 2 // more Machines are being made, so nothing is short yet
		joined := machineOf("joined")
		joined.Spec.ProviderID, joined.Status.NodeRef.Name = "sim://joined", "node-joined"
		objects := []client.Object{md, machineOf("fresh"), claimIn("", "a", v1alpha1.PhasePending, ""), claimIn("", "b", v1alpha1.PhasePending, "")}
		if missed {
			objects = append(objects, joined)
		}
		e := engineWith(t, objects...)
		e.Coalesce = time.Second
		s, err := e.read(t.Context(), uncached, client.ObjectKeyFromObject(md))
		require.NoError(t, err)
		d := protocol.Decide(s)
		require.NotNil(t, d.Ledger)
		require.Equal(t, "fresh", d.Ledger.Pending["a"].Machine)
		wait := e.group(namespace, "small").coalesce(s, d)
		assert.Equal(t, missed, wait == 0, "%s", wait)
	}
}

// The clock follows the hub's API server, and another one may be a minute behind.
func TestALedgerWriteIsNotPutOffForLongerBecauseTheClockIsSetBack(t *testing.T) {
	md := groupOf("small", 1, map[string]string{
		v1alpha1.LedgerAnnotation: (&protocol.Ledger{Version: 1, Seq: 4, LastReplicas: 1, Pending: map[string]protocol.Assignment{"a": {}}}).Encode(),
	})
	e := engineWith(t, md, machineOf("fresh"), claimIn("", "a", v1alpha1.PhasePending, ""))
	e.Coalesce = time.Second
	s, err := e.read(t.Context(), uncached, client.ObjectKeyFromObject(md))
	require.NoError(t, err)
	d := protocol.Decide(s)
	require.NotNil(t, d.Ledger)
	g := e.group(namespace, "small")
	g.wanted, g.lastQuiet = e.Clock.Now().Add(time.Minute), e.Clock.Now().Add(time.Minute)
	assert.LessOrEqual(t, g.coalesce(s, d), time.Second)
}

func TestARestoredClaimThatFailedKeepsItsReason(t *testing.T) {
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a")},
		Spec:       v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseReleasing, FailedAt: new(metav1.NewTime(newTestTime())), Reason: "NoCapacity", Message: "no hosts left",
		},
	}
	e := engineWith(t, claim)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	require.NoError(t, e.restore(t.Context(), protocol.Action{Kind: protocol.Restore, Claim: claim, Machine: machineOf("m")}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	assert.Equal(t, "m", claim.Status.Machine.Name)
	assert.Equal(t, "NoCapacity", claim.Status.Reason)
	assert.Equal(t, "no hosts left", claim.Status.Message)
	assert.Equal(t, v1alpha1.PhaseReleasing, claim.Status.Phase)
}
