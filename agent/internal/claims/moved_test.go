package claims

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

var clusterKey = types.NamespacedName{Namespace: namespace, Name: clusterName}

// movingClaim is a claim as it is stored.
func movingClaim(id string, phase v1alpha1.Phase, machine string, change func(*v1alpha1.MachineClaim)) *v1alpha1.MachineClaim {
	c := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, id),
			Labels: map[string]string{
				v1alpha1.ClusterLabel: clusterName, v1alpha1.NodeGroupLabel: "small", v1alpha1.HolderLabel: holder,
			},
		},
		Spec: v1alpha1.MachineClaimSpec{
			ClusterName: clusterName, ClaimID: id, Holder: holder, NodeGroup: "small", Candidates: []string{"small"}, Spoke: spoke,
		},
		Status: v1alpha1.MachineClaimStatus{Phase: phase},
	}
	if machine != "" {
		c.Status.Machine = &v1alpha1.MachineReference{Name: machine, UID: types.UID(machine)}
	}
	if change != nil {
		change(c)
	}
	return c
}

func setCluster(t *testing.T, e *Engine, change func(*clusterv1.Cluster)) {
	t.Helper()
	var cluster clusterv1.Cluster
	require.NoError(t, e.Client.Get(t.Context(), clusterKey, &cluster))
	change(&cluster)
	require.NoError(t, e.Client.Update(t.Context(), &cluster))
}

func pause(cluster *clusterv1.Cluster) { cluster.Spec.Paused = new(true) }

// asked returns the calls from which a holder draws conclusions.
func asked(e *Engine) map[string]func(context.Context) error {
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "vanished"}
	return map[string]func(context.Context) error{
		"get":     func(ctx context.Context) error { _, err := e.Get(ctx, key); return err },
		"release": func(ctx context.Context) error { _, err := e.Release(ctx, key, ReleaseOptions{}); return err },
		"list": func(ctx context.Context) error {
			_, _, err := e.List(ctx, ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
			return err
		},
		"sync": func(ctx context.Context) error {
			o := ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder}
			_, err := e.Sync(ctx, SyncRequest{
				Namespace: namespace, Cluster: clusterName, Holder: holder, Spoke: spoke, Token: newToken(o, e.Clock.Now(), nil).encode(),
			})
			return err
		},
	}
}

// While a Cluster is moved its objects vanish, first under a pause, and finally with the Cluster.
func TestNobodyIsToldThatAClaimIsGoneWhileItsClusterIsOnItsWay(t *testing.T) {
	for name, test := range map[string]struct {
		gone bool
		err  error
	}{
		"paused": {err: ErrClusterPaused},
		"gone":   {gone: true, err: ErrUnknownCluster},
	} {
		e := engineWith(t, groupOf("small", 0, nil))
		setCluster(t, e, pause)
		if test.gone {
			require.NoError(t, e.Client.Delete(t.Context(), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}}))
		}
		for call, ask := range asked(e) {
			t.Run(name+" "+call, func(t *testing.T) { require.ErrorIs(t, ask(t.Context()), test.err) })
		}
		var claims v1alpha1.MachineClaimList
		require.NoError(t, e.Client.List(t.Context(), &claims))
		assert.Empty(t, claims.Items, "no tombstone is made of a claim that may live in another hub")
	}
}

// A release is only in the claim's status until the ledger has it, and a move loses the status.
func TestAReleaseIsNotTakenWhileTheClusterIsPaused(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, nil), movingClaim("c", v1alpha1.PhaseBound, "m", nil), machineOf("m"))
	setCluster(t, e, pause)
	_, err := e.Release(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"}, ReleaseOptions{})
	require.ErrorIs(t, err, ErrClusterPaused)
	c, err := e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseBound, c.CurrentPhase())
}

// A claim without a status looks new. A list with such a claim would lack the claim's Machine.
func TestAClaimIsNotShownBeforeItIsKnownWhatItHas(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, nil), movingClaim("vanished", "", "", func(c *v1alpha1.MachineClaim) { c.Spec.ClusterUID = "before" }))
	setCluster(t, e, func(c *clusterv1.Cluster) { c.UID = "after" })
	for call, ask := range asked(e) {
		if call == "release" {
			continue // it requests what the caller wants in any case
		}
		t.Run(call, func(t *testing.T) { require.ErrorIs(t, ask(t.Context()), ErrRestoring) })
	}
	_, err := e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "vanished", Holder: holder, Candidates: []string{"small"},
	})
	require.ErrorIs(t, err, ErrRestoring)
}

// A claim records the UID of its Cluster, which a move changes.
func TestAClaimRemembersItsCluster(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil))
	setCluster(t, e, func(c *clusterv1.Cluster) { c.UID = "now" })
	e.spawn = func(run func()) { run() }
	c, err := e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "c", Holder: holder, Candidates: []string{"small"}})
	require.NoError(t, err)
	assert.Equal(t, types.UID("now"), c.Spec.ClusterUID)
}

// The cache may not show yet that the Cluster was paused before its Machines vanished.
func TestAMachineThatVanishesUnderAPauseThatTheCacheDoesNotShowIsNotLost(t *testing.T) {
	ledger := &protocol.Ledger{Version: 1, Seq: 1, LastReplicas: 1}
	e := engineWith(t,
		groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: ledger.Encode(), v1alpha1.ClaimedAnnotation: "1"}),
		movingClaim("c", v1alpha1.PhaseBound, "vanished", nil))
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	setCluster(t, e, pause)
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			err := c.Get(ctx, key, o, opts...)
			if cluster, ok := o.(*clusterv1.Cluster); ok {
				cluster.Spec.Paused = nil
			}
			return err
		},
	})
	step := func() v1alpha1.Phase {
		_, err := e.group(namespace, "small").run(t.Context())
		require.NoError(t, err)
		c, err := e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		return c.CurrentPhase()
	}
	assert.Equal(t, v1alpha1.PhaseBound, step())

	e.Client = hub
	setCluster(t, e, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	assert.Equal(t, v1alpha1.PhaseEnded, step(), "it is lost when nobody has paused anything")
}

// The MachineDeployment goes after its Machines, and before the Cluster.
func TestTheClaimsOfAMachineDeploymentThatVanishesUnderAPauseDoNotEnd(t *testing.T) {
	e := engineWith(t, movingClaim("c", v1alpha1.PhaseBound, "vanished", nil))
	setCluster(t, e, pause)
	requeueAfter, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	assert.NotZero(t, requeueAfter)
	c, err := e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseBound, c.CurrentPhase())
}

// After a move, only the ledger knows of a release that was in progress.
func TestAReleaseGoesOnAfterAMove(t *testing.T) {
	ledger := &protocol.Ledger{
		Version: 1, UID: "before", Seq: 1, LastReplicas: 1,
		Releasing: map[types.UID]protocol.Release{"old": {Machine: "m", Claim: "c", Drained: true}},
	}
	md := groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: ledger.Encode()})
	md.UID = "after"
	m := machineOf("m")
	halfReleased(m)
	m.Labels[v1alpha1.ClaimLabel] = "c"
	e := engineWith(t, md, m, movingClaim("c", "", "", func(c *v1alpha1.MachineClaim) { c.Spec.ClusterUID = "before" }))
	setCluster(t, e, func(c *clusterv1.Cluster) { c.UID = "after" })
	e.synced[holderKey{clusterKey, holder}] = map[types.UID]bool{"": true}
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	c, err := e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseReleasing, c.CurrentPhase())
	assert.True(t, c.Status.Drained)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
	assert.False(t, protocol.Alive(m), "it is deleted again")
}

// The caller must not be told that the claim does not exist, because that was not established.
func TestAClaimThatIsDeletedWhileItIsAskedForAgainIsALostRace(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil))
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Create: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.CreateOption) error {
			return apierrors.NewAlreadyExists(schema.GroupResource{Resource: "machineclaims"}, o.GetName())
		},
	})
	_, err := e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "c", Holder: holder, Candidates: []string{"small"}})
	require.ErrorIs(t, err, ErrConflict)
	require.NotErrorIs(t, err, ErrNotFound)
}

// clusterctl copies one claim after another, and stops at one that has disappeared since it was
// listed.
func TestAClaimIsNotForgottenWhileItsClusterIsMoved(t *testing.T) {
	long := metav1.NewTime(time.Now().Add(-48 * time.Hour))
	c := movingClaim("c", v1alpha1.PhaseEnded, "", func(c *v1alpha1.MachineClaim) { c.Status.EndedAt = &long })
	e := engineWith(t, c)
	setCluster(t, e, pause)
	forget := func() error {
		_, err := tombstones{e}.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(c)})
		require.NoError(t, err)
		return e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c)
	}
	require.NoError(t, forget(), "it is still there")
	setCluster(t, e, func(c *clusterv1.Cluster) { c.Spec.Paused = nil })
	require.True(t, apierrors.IsNotFound(forget()))
}

// The claim would be recreated from such a Machine. A claim of another Cluster may have the same
// ID.
func TestAClaimIsNotForgottenWhileAMachineOfItsClusterHasItsLabel(t *testing.T) {
	long := metav1.NewTime(time.Now().Add(-48 * time.Hour))
	c := movingClaim("c", v1alpha1.PhaseEnded, "", func(c *v1alpha1.MachineClaim) { c.Status.EndedAt = &long })
	own, theirs := machineOf("own"), machineOf("theirs")
	own.Labels[v1alpha1.ClaimLabel], own.Labels[clusterv1.ClusterNameLabel] = "c", clusterName
	theirs.Labels[v1alpha1.ClaimLabel], theirs.Labels[clusterv1.ClusterNameLabel] = "c", "another"
	e := engineWith(t, c, own, theirs)
	forget := func() error {
		_, err := tombstones{e}.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(c)})
		require.NoError(t, err)
		return e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c)
	}
	require.NoError(t, forget(), "it is still there")
	require.NoError(t, e.Client.Delete(t.Context(), own))
	require.True(t, apierrors.IsNotFound(forget()))
}

// The holder's earlier report of the Node is lost in a move, and a backup may have lost the owners.
func TestAClaimThatWasMovedIsNotCollectedAndGoesWithItsCluster(t *testing.T) {
	for _, remade := range []bool{true, false} {
		m := machineOf("m")
		m.Spec.ProviderID = "sim://m"
		e := engineWith(t, m, movingClaim("c", "", "", nil))
		setCluster(t, e, func(c *clusterv1.Cluster) { c.UID = "after" })
		c, err := e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.Restore, Claim: c, Machine: m, Remade: remade}))
		c, err = e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "c"})
		require.NoError(t, err)
		assert.Equal(t, v1alpha1.PhaseBound, c.CurrentPhase())
		assert.Equal(t, remade, c.Status.NodeRegisteredAt != nil)
		require.Len(t, c.OwnerReferences, 1)
		assert.Equal(t, types.UID("after"), c.OwnerReferences[0].UID)
	}
}

// A caller that does not find a provider ID in the list concludes that its Node has no Machine.
// Claims of older agents do not record the UID of their Cluster, and backups may leave claims out.
func TestClaimsAreNotListedWithoutTheMachinesThatTheyHave(t *testing.T) {
	list := func(e *Engine, holder string) error {
		_, _, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		return err
	}
	labelled := machineOf("m")
	labelled.Labels[v1alpha1.ClaimLabel], labelled.Labels[clusterv1.ClusterNameLabel] = "c", clusterName
	labelled.Annotations = map[string]string{v1alpha1.ClaimHolderAnnotation: holder}
	for name, claims := range map[string][]client.Object{
		"without its status": {movingClaim("c", "", "", nil)},
		"without its object": nil,
	} {
		t.Run(name, func(t *testing.T) {
			e := engineWith(t, append(claims, labelled.DeepCopy())...)
			require.ErrorIs(t, list(e, holder), ErrRestoring)
			require.ErrorIs(t, list(e, ""), ErrRestoring)
		})
	}
	for name, c := range map[string]*v1alpha1.MachineClaim{
		"bound": movingClaim("c", v1alpha1.PhaseBound, "m", nil),
		"ended": movingClaim("c", v1alpha1.PhaseEnded, "m", nil),
	} {
		t.Run(name, func(t *testing.T) { require.NoError(t, list(engineWith(t, labelled.DeepCopy(), c), holder)) })
	}
	require.NoError(t, list(engineWith(t, labelled.DeepCopy()), "somebody-else"))
	impossible := labelled.DeepCopy()
	impossible.Labels[v1alpha1.ClaimLabel] = "Test_1"
	require.NoError(t, list(engineWith(t, impossible), holder), "a label that cannot be a claim's id is ignored")
}

// Nothing else ends the claim of a MachineDeployment whose name another Cluster's has now.
func TestAClaimThatWasMovedDoesNotMoveOn(t *testing.T) {
	e := engineWith(t, groupOf("small", 0, nil), groupOf("other", 0, nil), movingClaim("c", "", "", func(c *v1alpha1.MachineClaim) {
		c.Spec.ClusterUID, c.Spec.Candidates = "before", []string{"small", "other"}
	}))
	setCluster(t, e, func(c *clusterv1.Cluster) { c.UID = "after" })
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "c"}
	c, err := e.getUncached(t.Context(), key)
	require.NoError(t, err)
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.MoveOn, Claim: c}))
	c, err = e.getUncached(t.Context(), key)
	require.NoError(t, err)
	assert.Equal(t, "small", c.Spec.NodeGroup)
	assert.Equal(t, protocol.ReasonStateLost, c.Status.Reason)
}

// A list that was read while clusterctl was still creating claims, or was already deleting them, is
// incomplete, whatever the state of the Cluster on the other side of that read.
func TestTheClusterIsReadBeforeAndAfterWhatMayBeMissing(t *testing.T) {
	for pausedAt := range 2 {
		for _, call := range []string{"get", "release", "list"} {
			e := engineWith(t, groupOf("small", 0, nil))
			reads := 0
			e.Reader = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
				Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
					err := c.Get(ctx, key, o, opts...)
					if cluster, ok := o.(*clusterv1.Cluster); ok {
						cluster.Spec.Paused = new(reads == pausedAt)
						reads++
					}
					return err
				},
			})
			require.ErrorIs(t, asked(e)[call](t.Context()), ErrClusterPaused, "%s, paused at read %d", call, pausedAt)
		}
	}
}

// In a restore beside running agents, claims are created again that no live set has decided yet.
// The clocks of the agent that received the last live set and of the API server that dates the
// objects cannot show that.
func TestALiveSetDecidesNothingOfClaimsThatItsListingDidNotHold(t *testing.T) {
	ledger := &protocol.Ledger{Version: 1, UID: "before", Seq: 1, LastReplicas: 1, Pending: map[string]protocol.Assignment{"c": {}}}
	md := groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: ledger.Encode()})
	remade := func(uid types.UID, at time.Time) *v1alpha1.MachineClaim {
		return movingClaim("c", v1alpha1.PhasePending, "", func(c *v1alpha1.MachineClaim) {
			c.UID, c.CreationTimestamp = uid, metav1.NewTime(at)
		})
	}
	began := newTestTime()
	c := remade("c-before", began)
	e := quiet(engineWith(t, c))
	clock := testclock.NewFakeClock(began.Add(2 * time.Minute)) // the API server's shows one minute
	e.Clock, e.parallel = clock, 1
	list := func() string {
		_, token, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		require.NoError(t, err)
		return token
	}
	synced := func(token string, alive ...string) bool {
		if token != "" {
			_, err := e.Sync(t.Context(), SyncRequest{
				Namespace: namespace, Cluster: clusterName, Holder: holder, Spoke: spoke, Token: token, LiveIDs: alive,
			})
			require.NoError(t, err)
		}
		s, err := e.read(t.Context(), uncached, smallKey)
		require.NoError(t, err)
		return s.Synced
	}
	_, err := e.Sync(t.Context(), SyncRequest{Namespace: namespace, Cluster: clusterName, Holder: holder, Spoke: spoke, Token: list()})
	require.NoError(t, err)
	early := list()

	md.UID, md.CreationTimestamp = "after", metav1.NewTime(began.Add(time.Minute+time.Second))
	require.NoError(t, e.Client.Create(t.Context(), md))
	require.NoError(t, e.Client.Delete(t.Context(), claimNamed(t, e, "c")))
	require.NoError(t, e.Client.Create(t.Context(), remade("c-after", began.Add(time.Minute+time.Second))))
	assert.False(t, synced(""), "the live set is older than the claim, although a clock that is ahead dated it later")
	assert.False(t, synced(early), "and so is what a token of before brings")
	clock.Step(time.Minute)
	assert.True(t, synced(list(), "c"))
}
