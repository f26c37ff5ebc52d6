package claims

import (
	"context"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
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

// The claim stays with its Machine, whatever candidate a call names first.
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

// It must not be shown as ready for a moment.
func TestAClaimThatIsRestoredToAMachineThatIsDeletedSaysSo(t *testing.T) {
	e := engineWith(t)
	claim := e.newClaim(
		Request{Namespace: namespace, Cluster: clusterName, ID: "a", Candidates: []string{"g"}, Holder: "spoke"},
		&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}}, "g",
	)
	require.NoError(t, e.Client.Create(t.Context(), claim))
	m := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "g-1", UID: "g-1", DeletionTimestamp: new(metav1.NewTime(newTestTime()))},
		Status:     clusterv1.MachineStatus{NodeRef: clusterv1.MachineNodeReference{Name: "node-1"}},
	}
	require.NoError(t, e.restore(t.Context(), protocol.Action{Kind: protocol.Restore, Claim: claim, Machine: m}))
	got := &v1alpha1.MachineClaim{}
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), got))
	assert.Equal(t, v1alpha1.PhaseBound, got.Status.Phase)
	assert.Equal(t, protocol.ReasonMachineDeleting, got.Status.Reason)
	assert.False(t, meta.IsStatusConditionTrue(got.Status.Conditions, v1alpha1.ConditionReady))

	m.DeletionTimestamp = nil
	require.NoError(t, e.restore(t.Context(), protocol.Action{Kind: protocol.Restore, Claim: got, Machine: m}))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), got))
	assert.Equal(t, protocol.ReasonBound, got.Status.Reason)
	assert.True(t, meta.IsStatusConditionTrue(got.Status.Conditions, v1alpha1.ConditionReady))
}

// A claim whose call is gone moves to where the call would have moved it.
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
	e.group(namespace, "full").kick(t.Context())
	got, err := e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(t, err)
	assert.Equal(t, "open", got.Spec.NodeGroup)
	assert.Equal(t, v1alpha1.PhasePending, got.Status.Phase, "it is entered there")

	e = engineWith(t, groupOf("full", 0, full), groupOf("open", 0, nil), claim.DeepCopy())
	e.spawn, e.withdraws = func(run func()) { run() }, true
	e.group(namespace, "full").kick(t.Context())
	got, err = e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(t, err)
	assert.Equal(t, "full", got.Spec.NodeGroup, "the agent is uninstalled: a group that it was withdrawn from gets no ledger again")

	last := claim.DeepCopy()
	last.Spec.Candidates = []string{"open", "full"}
	e = engineWith(t, groupOf("full", 0, full), last)
	e.spawn = func(run func()) { run() }
	e.group(namespace, "full").kick(t.Context())
	got, err = e.Get(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseEnded, got.Status.Phase)
	assert.Equal(t, protocol.ReasonNoRoom, got.Status.Reason)
}

// A lost object does not mean that the claim has ended: its Machine runs.
func TestAClaimWhoseObjectWasLostIsReleasedWithItsMachine(t *testing.T) {
	m := machineOf("m")
	m.Labels[v1alpha1.ClaimLabel] = "a"
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "a"}
	e := engineWith(t, groupOf("small", 1, nil), m)
	c, err := e.Get(t.Context(), key)
	require.NoError(t, err, "and so it is shown")
	assert.Equal(t, unknownHolder, c.Spec.Holder)
	c, err = e.Release(t.Context(), key, ReleaseOptions{})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseReleasing, c.Status.Phase)

	c, err = engineWith(t, groupOf("small", 1, nil), m.DeepCopy()).Release(t.Context(), key, ReleaseOptions{})
	require.NoError(t, err)
	assert.Equal(t, v1alpha1.PhaseReleasing, c.Status.Phase)
}

// kubectl get -o yaml | sed | kubectl create copies annotations too.
func TestALedgerCopiedWithAMachineDeploymentIsNotBelieved(t *testing.T) {
	ledger := (&protocol.Ledger{Version: protocol.LedgerVersion, Of: namespace + "/workers", Seq: 7, Floor: 2, LastReplicas: 6}).Encode()
	for name, others := range map[string]bool{"workers": false, "workers2": true} {
		md := groupOf(name, 6, map[string]string{v1alpha1.LedgerAnnotation: ledger})
		s, err := engineWith(t, md).read(t.Context(), uncached, client.ObjectKeyFromObject(md))
		require.NoError(t, err)
		assert.Equal(t, others, s.Ledger == nil, name)
		s.SpareSince = s.Now.Add(-24 * 60 * 60e9)
		if others {
			assert.Nil(t, protocol.Decide(s).Ledger, "nothing is anybody's but the user's")
		}
	}
}

// A newer agent's ledger costs a claim only that candidate.
func TestAGroupWhoseLedgerANewerAgentWroteIsPassedOver(t *testing.T) {
	newer := map[string]string{v1alpha1.LedgerAnnotation: `{"v":3}`}
	e := engineWith(t, groupOf("newer", 0, newer), groupOf("open", 0, nil))
	c, err := e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"newer", "open"},
	})
	require.NoError(t, err)
	assert.Equal(t, "open", c.Spec.NodeGroup)
	_, err = e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "b", Holder: "spoke", Candidates: []string{"newer"}})
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	assert.ErrorContains(t, err, "newer agent")
}

func TestValidatingOnlyLeavesAClaimThatIsThereAlone(t *testing.T) {
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "open"},
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", NodeGroup: "open", Candidates: []string{"open"}},
	}
	e := engineWith(t, groupOf("open", 0, nil), claim)
	_, err := e.Create(t.Context(), Request{
		Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"open"}, ValidateOnly: true,
	})
	require.NoError(t, err)
	var md clusterv1.MachineDeployment
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "open"}, &md))
	assert.Zero(t, *md.Spec.Replicas)
}

// A MachineDeployment's name may have belonged to another Cluster.
func TestMachinesOfAnotherClusterAreNotTheGroups(t *testing.T) {
	old := machineOf("old")
	old.Spec.ClusterName = "another"
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName("another", "a"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: "another", ClaimID: "a", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseBound, Machine: &v1alpha1.MachineReference{Name: "gone", UID: "gone"},
		},
	}
	e := engineWith(t, groupOf("small", 1, nil), old, machineOf("mine"), claim)
	s, err := e.read(t.Context(), uncached, client.ObjectKey{Namespace: namespace, Name: "small"})
	require.NoError(t, err)
	require.Len(t, s.Machines, 1)
	assert.Equal(t, "mine", s.Machines[0].Name)
	assert.Contains(t, kinds(protocol.Decide(s)), protocol.End, "its Machine is gone with its MachineDeployment")
}

// A claim that needs a new Machine is not left waiting where none can be made.
func TestAGroupForWhichNoMachineCanBeMadeTakesClaimsForSparesOnly(t *testing.T) {
	for _, reason := range []eligibility.Reason{eligibility.QuotaExceeded, eligibility.MachinesBlocked} {
		t.Run(string(reason), func(t *testing.T) {
			const ledger = `{"v":1,"seq":1,"floor":0,"lastReplicas":1,"spare":1}`
			spare := machineOf("spare")
			spare.Labels[clusterv1.MachineDeploymentNameLabel] = "kept"
			e := engineWith(t, spare,
				groupOf("small", 1, map[string]string{v1alpha1.LedgerAnnotation: ledger}), // no Machine was made for its spare
				groupOf("full", 1, map[string]string{v1alpha1.LedgerAnnotation: ledger, clusterv1.AutoscalerMaxSizeAnnotation: "1"}),
				groupOf("kept", 1, map[string]string{v1alpha1.LedgerAnnotation: ledger}),
			)
			e.NoMachines = func(_ context.Context, md *clusterv1.MachineDeployment) (*eligibility.Refusal, error) {
				return &eligibility.Refusal{NodeGroup: md.Name, Reason: reason, Message: "none"}, nil
			}
			ask := func(id string, candidates ...string) (*v1alpha1.MachineClaim, error) {
				return e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: id, Holder: "spoke", Candidates: candidates})
			}
			for _, group := range []string{"small", "full"} {
				_, err := ask("for-"+group, group)
				var refused *NoRoomError
				require.ErrorAs(t, err, &refused, group)
				assert.Equal(t, reason, refused.Candidates[0].Reason, group)
			}
			c, err := ask("b", "small", "full", "kept")
			require.NoError(t, err)
			assert.Equal(t, "kept", c.Spec.NodeGroup)
		})
	}
}

// The caches of a hub that is put back to an earlier state go back one kind after the other.
func TestNoClaimIsMadeAgainForAMachineThatIsNoMore(t *testing.T) {
	labelled := machineOf("later")
	labelled.Labels[v1alpha1.ClaimLabel] = "a"
	another := labelled.DeepCopy()
	another.UID = "another"
	unlabelled := machineOf("later")
	for name, test := range map[string]struct {
		now  []client.Object
		made bool
	}{
		"it is there":              {[]client.Object{labelled}, true},
		"it is gone":               {nil, false},
		"it is another one":        {[]client.Object{another}, false},
		"it has its label no more": {[]client.Object{unlabelled}, false},
	} {
		t.Run(name, func(t *testing.T) {
			objects := []client.Object{groupOf("small", 1, nil)}
			for _, object := range test.now {
				objects = append(objects, object.DeepCopyObject().(client.Object)) //nolint:forcetypeassert // as it was
			}
			e := engineWith(t, objects...)
			err := e.recreate(t.Context(), labelled)
			assert.Equal(t, test.made, err == nil, "%v", err)
			_, err = e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
			assert.Equal(t, test.made, err == nil, "%v", err)
		})
	}
}

// While a quota is used up, a claim that has waited for too long has failed for it.
func TestAWaitingClaimKnowsOfAQuota(t *testing.T) {
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "a"),
			Labels: map[string]string{v1alpha1.ClusterLabel: clusterName, v1alpha1.NodeGroupLabel: "small"},
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "a", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
	}
	for _, waits := range []bool{false, true} {
		for reason, want := range map[eligibility.Reason]string{eligibility.QuotaExceeded: "none is left", eligibility.MachinesBlocked: ""} {
			objects := []client.Object{groupOf("small", 1, nil)}
			if waits {
				objects = append(objects, claim.DeepCopy())
			}
			e := engineWith(t, objects...)
			e.NoMachines = func(_ context.Context, md *clusterv1.MachineDeployment) (*eligibility.Refusal, error) {
				return &eligibility.Refusal{NodeGroup: md.Name, Reason: reason, Message: "none is left"}, nil
			}
			s, err := e.read(t.Context(), uncached, client.ObjectKey{Namespace: namespace, Name: "small"})
			require.NoError(t, err)
			if !waits {
				want = ""
			}
			assert.Equal(t, want, s.Quota, "%t %s", waits, reason)
		}
	}
}

// Nothing of ours stays on objects that outlive their MachineDeployment.
func TestAMachineSetThatWasLeftBehindIsUnpaused(t *testing.T) {
	set := &clusterv1.MachineSet{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: "small-a",
		Labels:      map[string]string{clusterv1.MachineDeploymentNameLabel: "small", clusterv1.ClusterNameLabel: clusterName},
		Annotations: map[string]string{clusterv1.PausedAnnotation: v1alpha1.PausedByAgent},
	}, Spec: clusterv1.MachineSetSpec{ClusterName: clusterName}}
	e := engineWith(t, set)
	_, err := e.group(namespace, "small").run(t.Context())
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(set), set))
	assert.NotContains(t, set.Annotations, clusterv1.PausedAnnotation)
}

// orphaned is the Machine of the claim a, which has no object.
func orphaned() *clusterv1.Machine {
	m := machineOf("m")
	joins(m)
	m.Labels[v1alpha1.ClaimLabel] = "a"
	m.Annotations = map[string]string{v1alpha1.ClaimHolderAnnotation: holder}
	return m
}

// Once a person has removed a Cluster's finalizer, Cluster API no longer handles the deletion of
// its MachineDeployments, and their Machines stay.
func TestWithoutItsClusterNoClaimIsMadeAgain(t *testing.T) {
	md := groupWith("", 1, &protocol.Ledger{Version: 1, Of: namespace + "/small", Seq: 1, LastReplicas: 1})
	md.Annotations[v1alpha1.ClaimedAnnotation] = "1"
	md.Finalizers, md.DeletionTimestamp = []string{clusterv1.MachineDeploymentFinalizer}, new(metav1.NewTime(newTestTime()))
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}}
	made := actionsTotal.WithLabelValues(string(protocol.Recreate), result(nil))
	for name, lags := range map[string]bool{"the caches show that": false, "the caches do not show that yet": true} {
		t.Run(name, func(t *testing.T) {
			e := engineWith(t, md.DeepCopy(), orphaned())
			hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
			require.NoError(t, hub.Delete(t.Context(), cluster.DeepCopy()))
			if lags {
				e.Client = interceptor.NewClient(hub, interceptor.Funcs{
					Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, o ...client.GetOption) error {
						if before, is := into.(*clusterv1.Cluster); is {
							cluster.DeepCopyInto(before)
							return nil
						}
						return c.Get(ctx, key, into, o...)
					},
				})
			}
			before := testutil.ToFloat64(made)
			decisions := 0
			e.decide = func(s *protocol.Snapshot) *protocol.Decision {
				decisions++
				return protocol.Decide(s)
			}
			after, err := e.group(namespace, "small").run(t.Context())
			require.NoError(t, err)
			assert.Equal(t, 1, decisions, "one step")
			if lags {
				assert.Equal(t, time.Second, after, "as after a lost race")
			} else {
				assert.Zero(t, after, "there is nothing to do")
			}
			assert.InDelta(t, before, testutil.ToFloat64(made), 0, "nothing was made")
		})
	}
}

// A MachineDeployment that is deleted with --cascade=orphan leaves its Machines.
func TestAClaimOfAGroupThatIsGoneIsMadeAgainForItsMachine(t *testing.T) {
	key := Key{Namespace: namespace, Cluster: clusterName, ID: "a"}
	list := func(e *Engine) error {
		_, _, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		return err
	}
	settle := func(e *Engine) {
		t.Helper()
		for range 2 { // the claim is made, and its event starts the second run
			_, err := e.group(namespace, "small").run(t.Context())
			require.NoError(t, err)
		}
	}
	t.Run("so that its Cluster can be listed", func(t *testing.T) {
		e := quiet(engineWith(t, orphaned()))
		require.ErrorIs(t, list(e), ErrRestoring)
		settle(e)
		require.NoError(t, list(e))
		c, err := e.Get(t.Context(), key)
		require.NoError(t, err)
		assert.Equal(t, v1alpha1.PhaseBound, c.Status.Phase)
		assert.Equal(t, types.UID("m"), c.Status.Machine.UID)
	})
	t.Run("and keeps it when a call made it again", func(t *testing.T) {
		e := quiet(engineWith(t, orphaned()))
		_, err := e.Get(t.Context(), key)
		require.NoError(t, err)
		settle(e)
		c, err := e.Create(t.Context(), ask("a", "small"))
		require.NoError(t, err)
		assert.Equal(t, v1alpha1.PhaseBound, c.Status.Phase)
	})
	t.Run("and is released with it", func(t *testing.T) {
		e := quiet(engineWith(t, orphaned()))
		_, err := e.Release(t.Context(), key, ReleaseOptions{})
		require.NoError(t, err)
		settle(e)
		assert.Equal(t, v1alpha1.PhaseReleasing, claimNamed(t, e, "a").Status.Phase)
		m := &clusterv1.Machine{}
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "m"}, m))
		assert.False(t, protocol.Alive(m))
	})
	t.Run("but not while its Cluster is paused", func(t *testing.T) {
		e := quiet(engineWith(t, orphaned()))
		cluster := &clusterv1.Cluster{}
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: clusterName}, cluster))
		cluster.Spec.Paused = new(true)
		require.NoError(t, e.Client.Update(t.Context(), cluster))
		settle(e)
		_, err := e.getUncached(t.Context(), key)
		require.ErrorIs(t, err, ErrNotFound)
	})
}

// The claim may be on its way from another hub. The repeated call is refused for the pause.
func TestAPauseThatTheCachesDoNotShowYetMakesNoClaimAgain(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, nil), orphaned())
	e.spawn = func(run func()) { run() }
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	e.Reader = interceptor.NewClient(hub, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, into client.Object, o ...client.GetOption) error {
			err := c.Get(ctx, key, into, o...)
			if cluster, is := into.(*clusterv1.Cluster); is {
				cluster.Spec.Paused = new(true)
			}
			return err
		},
	})
	_, err := e.Create(t.Context(), ask("a", "small"))
	require.ErrorIs(t, err, ErrConflict)
	_, err = e.getUncached(t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.ErrorIs(t, err, ErrNotFound)
}

// A copy of a MachineDeployment without the label of node groups keeps the ledger that it was
// copied with.
func TestALedgerThatCannotBeUsedIsLoggedOnce(t *testing.T) {
	var lines []string
	ctx := log.IntoContext(t.Context(), funcr.New(func(_, args string) { lines = append(lines, args) }, funcr.Options{}))
	md := groupWith("", 1, &protocol.Ledger{Version: 1, Of: namespace + "/workers", Seq: 7, LastReplicas: 1})
	delete(md.Labels, v1alpha1.MemberLabel)
	e := engineWith(t, md)
	plan := func(logged int) {
		t.Helper()
		for range 2 {
			_, err := e.group(namespace, "small").plan(ctx)
			require.NoError(t, err)
		}
		assert.Len(t, lines, logged)
	}
	plan(1)
	change := func(ledger string) {
		t.Helper()
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(md), md))
		md.Annotations[v1alpha1.LedgerAnnotation] = ledger
		require.NoError(t, e.Client.Update(t.Context(), md))
	}
	change("{")
	plan(2) // for another reason
	change((&protocol.Ledger{Version: 1, Of: namespace + "/small", Seq: 8, LastReplicas: 1}).Encode())
	plan(2)
	change("{")
	plan(3) // it could be used meanwhile
	require.NoError(t, e.Client.Delete(t.Context(), md))
	plan(3)
	assert.Empty(t, e.unusable, "what is gone takes no memory")
}
