package claims

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// heldClaim is Karpenter's claim on node group a that was made at the given time and waits for its
// Machine.
func heldClaim(id string, made time.Time) *v1alpha1.MachineClaim {
	return &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, id), UID: types.UID(id), CreationTimestamp: metav1.NewTime(made),
			Labels: map[string]string{
				v1alpha1.ClusterLabel: clusterName, v1alpha1.NodeGroupLabel: "a", v1alpha1.HolderLabel: "karpenter",
			},
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: id, Holder: "karpenter", Spoke: spoke, NodeGroup: "a"},
		Status: v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
	}
}

// quiet returns the engine without runs in the background.
func quiet(e *Engine) *Engine {
	e.spawn = func(func()) {}
	return e
}

func only(holder string) Holders { return func(h string) bool { return h == holder } }

func TestAnotherHoldersClaimIsNeitherReleasedNorFollowed(t *testing.T) {
	e := quiet(engineWith(t, groupOf("a", 1, nil), heldClaim("theirs", newTestTime())))
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "theirs"}
	ask := Request{Namespace: namespace, Cluster: clusterName, ID: "theirs", Holder: "mine", Candidates: []string{"a"}, Holders: only("mine")}

	_, err := e.Release(t.Context(), key, ReleaseOptions{Failed: true, Holders: only("mine")})
	require.ErrorIs(t, err, ErrForeignHolder)
	_, err = e.Create(t.Context(), ask)
	require.ErrorIs(t, err, ErrForeignHolder)
	ask.ValidateOnly = true
	_, err = e.Create(t.Context(), ask)
	require.ErrorIs(t, err, ErrForeignHolder)
	c, err := e.Get(t.Context(), key)
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhasePending, c.Status.Phase)

	c, err = e.Release(t.Context(), key, ReleaseOptions{Holders: only("karpenter")})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseReleasing, c.Status.Phase)
}

// An ended claim belongs to no holder: any caller may repeat its release, and its id is refused to
// all alike.
func TestAnEndedClaimIsNoHoldersAnyMore(t *testing.T) {
	gone := heldClaim("gone", newTestTime())
	gone.Status.Phase = v1alpha1.PhaseEnded
	e := quiet(engineWith(t, groupOf("a", 1, nil), gone))
	_, err := e.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "gone"}, ReleaseOptions{Holders: only("mine")})
	require.NoError(t, err)
	_, err = e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "gone", Holder: "mine", Candidates: []string{"a"}, Holders: only("mine"),
	})
	var ended *EndedError
	require.ErrorAs(t, err, &ended)
}

// The grace period covers small clock differences. Beyond it only the API server's clock counts.
func TestAClaimMadeAfterTheListingIsNotCollectedByAClockThatIsAhead(t *testing.T) {
	now := newTestTime()
	e := quiet(engineWith(t, groupOf("a", 2, nil), heldClaim("orphan", now.Add(-time.Hour))))
	e.Clock = clocktesting.NewFakeClock(now.Add(time.Hour))
	list := ListOptions{Namespace: namespace, Cluster: clusterName, Holder: "karpenter"}
	_, token, err := e.List(t.Context(), list)
	require.NoError(t, err)
	require.NoError(t, e.Client.Create(t.Context(), heldClaim("young", now)))
	result, err := e.Sync(t.Context(), SyncRequest{
		Namespace: namespace, Cluster: clusterName, Holder: "karpenter", Token: token, Spoke: spoke,
	})
	require.NoError(t, err)
	assert.Equal(t, []string{"orphan"}, result.Collected)
}

// Another agent receives a report of the claim's Node after this one listed the claims.
func TestAClaimWhoseNodeWasRegisteredMeanwhileIsNotCollected(t *testing.T) {
	now := newTestTime()
	e := quiet(engineWith(t, groupOf("a", 1, nil), heldClaim("a", now.Add(-time.Hour))))
	e.Clock = clocktesting.NewFakeClock(now)
	_, token, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: "karpenter"})
	require.NoError(t, err)
	through, ok := e.Client.(client.WithWatch)
	require.True(t, ok)
	e.Reader = interceptor.NewClient(through, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, o ...client.GetOption) error {
			if err := c.Get(ctx, key, into, o...); err != nil {
				return err
			}
			claim, ok := into.(*v1alpha1.MachineClaim)
			if !ok || claim.Status.NodeRegisteredAt != nil {
				return nil
			}
			claim.Status.NodeRegisteredAt = new(metav1.NewTime(now))
			return c.Status().Update(ctx, claim)
		},
	})
	result, err := e.Sync(t.Context(), SyncRequest{Namespace: namespace, Cluster: clusterName, Holder: "karpenter", Token: token, Spoke: spoke})
	require.NoError(t, err)
	assert.Empty(t, result.Collected)
	assert.Equal(t, []string{"a"}, result.Kept)
	c, err := e.Get(t.Context(), keyOf("a"))
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhasePending, c.Status.Phase)
}

// A cluster-autoscaler's identity may act for any number of holders.
func TestAHolderWithoutClaimsTakesNoMemory(t *testing.T) {
	e := quiet(engineWith(t, groupOf("a", 1, nil)))
	e.Clock = clocktesting.NewFakeClock(newTestTime())
	for _, holder := range []string{"cluster-autoscaler-1", "cluster-autoscaler-2"} {
		_, token, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		require.NoError(t, err)
		_, err = e.Sync(t.Context(), SyncRequest{Namespace: namespace, Cluster: clusterName, Holder: holder, Token: token, Spoke: spoke})
		require.NoError(t, err)
	}
	assert.Empty(t, e.synced)
}

// A hub may have many Clusters in the course of time.
func TestNothingIsKeptOfClustersThatAreGone(t *testing.T) {
	e := quiet(engineWith(t, groupOf("a", 1, nil)))
	clk := clocktesting.NewFakeClock(newTestTime())
	e.Clock = clk
	e.synced[holderKey{clusterKey, holder}] = map[types.UID]bool{"a": true}
	e.recordReport(clusterKey, map[string]bool{"sim://a": true})
	count := func(cluster types.NamespacedName) {
		require.NoError(t, e.withNumbers(t.Context(), cluster, func(*numbers) {}))
	}
	count(clusterKey)
	e.ForgetCluster(clusterKey)
	assert.Empty(t, e.synced)
	assert.Empty(t, e.reports)
	assert.Empty(t, e.numbers)

	count(clusterKey)
	clk.Step(time.Hour)
	count(types.NamespacedName{Namespace: namespace, Name: "other"})
	assert.Len(t, e.numbers, 1, "the numbers of a Cluster that was not asked about for an hour are dropped")
}

// A holder that does not report Nodes changes nothing: the shim's report stays.
func TestNodesAreForgottenOnlyByAReport(t *testing.T) {
	e := quiet(engineWith(t))
	e.Clock = clocktesting.NewFakeClock(newTestTime())
	sync := func(holder string, nodes []NodeReport) {
		_, token, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		require.NoError(t, err)
		_, err = e.Sync(t.Context(), SyncRequest{Namespace: namespace, Cluster: clusterName, Holder: holder, Token: token, Nodes: nodes})
		require.NoError(t, err)
	}
	sync("karpenter", []NodeReport{{ProviderID: "x", Unregistered: true}})
	sync("cluster-autoscaler", nil)
	assert.Equal(t, map[string]bool{"x": false}, e.reportedNodes(clusterKey))
	sync("karpenter", []NodeReport{})
	assert.Empty(t, e.reportedNodes(clusterKey))
}

func TestAReportIsForgottenWhenItIsNotRenewed(t *testing.T) {
	e, clock := quiet(engineWith(t)), clocktesting.NewFakeClock(newTestTime())
	e.Clock = clock
	gone := types.NamespacedName{Namespace: namespace, Name: "gone"}
	e.recordReport(gone, map[string]bool{"x": true})
	clock.Step(reportLife)
	assert.Equal(t, map[string]bool{"x": true}, e.reportedNodes(gone))
	clock.Step(time.Second)
	assert.Nil(t, e.reportedNodes(gone))
	e.recordReport(clusterKey, map[string]bool{"y": true})
	assert.Len(t, e.reports, 1, "a Cluster that is gone takes no memory")
}

// No object that an agent watches shows this.
func TestANodeThatIsReportedBringsItsNodeGroupForward(t *testing.T) {
	machine := func(name, claim string, annotations map[string]string) *clusterv1.Machine {
		return &clusterv1.Machine{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: name, Annotations: annotations,
				Labels: map[string]string{
					clusterv1.ClusterNameLabel: clusterName, clusterv1.MachineDeploymentNameLabel: "group-" + name, v1alpha1.ClaimLabel: claim,
				},
			},
			Spec: clusterv1.MachineSpec{ClusterName: clusterName, ProviderID: "sim://" + name},
		}
	}
	joined := machine("joined", "", nil)
	joined.Status.NodeRef.Name = "joined"
	e := quiet(engineWith(t, machine("free", "", nil), machine("taken", "claim", nil), heldClaim("claim", newTestTime()), machine("runs", "", nil),
		joined, machine("marked", "", map[string]string{v1alpha1.FloorAnnotation: "true"})))
	e.Clock = clocktesting.NewFakeClock(newTestTime())
	looks := recordLooks(t, e)
	report := func() {
		_, token, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: "karpenter"})
		require.NoError(t, err)
		_, err = e.Sync(t.Context(), SyncRequest{Namespace: namespace, Cluster: clusterName, Holder: "karpenter", Token: token, Nodes: []NodeReport{
			{ProviderID: "sim://free", Unregistered: true},
			{ProviderID: "sim://taken", Unregistered: true},
			{ProviderID: "sim://runs"},
			{ProviderID: "sim://joined"},
			{ProviderID: "sim://marked", Unregistered: true},
		}})
		require.NoError(t, err)
	}
	report()
	assert.Equal(t, map[string]time.Duration{"group-free": 0, "group-joined": 0}, looks.after)
	clear(looks.after)
	report()
	assert.Equal(t, map[string]time.Duration{"group-free": 0}, looks.after, "that a Node is registered is news once")
}
