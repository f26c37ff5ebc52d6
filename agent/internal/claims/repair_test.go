package claims

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// skipsRemediation returns the value of the annotation that MachineHealthChecks heed.
func skipsRemediation(t *testing.T, e *Engine, machine string) string {
	t.Helper()
	m := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: machine}, m))
	return m.Annotations[clusterv1.MachineSkipRemediationAnnotation]
}

// A change of the holder's setting reaches the Machines of all its claims.
func TestMachinesFollowWhetherTheirHolderRepairs(t *testing.T) {
	e, round := syncing(t, nil, spoke)
	m := &clusterv1.Machine{}
	require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: "a"}, m))
	metav1.SetMetaDataAnnotation(&m.ObjectMeta, v1alpha1.ClaimHolderAnnotation, holder)
	require.NoError(t, e.Client.Update(t.Context(), m))
	step := func() {
		t.Helper()
		_, err := e.group(namespace, "small").run(t.Context())
		require.NoError(t, err)
	}
	now := testclock.NewFakeClock(newTestTime().Add(time.Hour))
	e.Clock = now
	sync := func(repairs *bool) string {
		t.Helper()
		_, err := round(SyncRequest{Spoke: spoke, LiveIDs: []string{"a"}, HolderRepairs: repairs})
		require.NoError(t, err)
		step()
		return skipsRemediation(t, e, "a")
	}
	settles := func(repairs bool) string {
		t.Helper()
		before := sync(&repairs)
		require.Equal(t, before, sync(&repairs), "not at once: a caller may say something else each time")
		now.Step(settledAfter)
		return sync(&repairs)
	}
	require.Empty(t, sync(nil))
	require.Equal(t, v1alpha1.Group, settles(true))
	require.Equal(t, v1alpha1.Group, sync(nil), "a holder that does not know the field changes nothing")
	for i := range 10 {
		now.Step(settledAfter / 2)
		require.Equal(t, v1alpha1.Group, sync(new(i%2 == 0)))
	}

	require.NoError(t, e.Client.Delete(t.Context(), claimNamed(t, e, "a")))
	require.True(t, claimNamed(t, e, "a").Spec.HolderRepairs, "the claim that is made again from its Machine")
	step()
	require.Equal(t, v1alpha1.Group, sync(nil))

	require.Empty(t, settles(false))
}

// Some webhooks keep only annotations that they know.
func TestAMarkThatIsNotKeptIsNotWrittenWithoutAPause(t *testing.T) {
	e, _ := syncing(t, nil, spoke)
	claim := claimNamed(t, e, "a")
	claim.Spec.HolderRepairs = true
	require.NoError(t, e.Client.Update(t.Context(), claim))
	patches := 0
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if _, is := o.(*clusterv1.Machine); !is {
				return c.Patch(ctx, o, p, opts...)
			}
			patches++
			return c.Get(ctx, client.ObjectKeyFromObject(o), o) // it answers with what it had
		},
	})
	again, err := e.group(namespace, "small").run(t.Context())
	require.ErrorContains(t, err, "a webhook of the hub reverts a change of the annotation cluster.x-k8s.io/skip-remediation")
	require.Equal(t, 1, patches)
	require.GreaterOrEqual(t, again, time.Second)
}

// The API server drops a field that an older CustomResourceDefinition does not have.
func TestAnOlderDefinitionOfClaimsCostsNoWrites(t *testing.T) {
	e, round := syncing(t, nil, spoke)
	now := testclock.NewFakeClock(newTestTime().Add(time.Hour))
	e.Clock = now
	writes := 0
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			if claim, is := o.(*v1alpha1.MachineClaim); is {
				claim.Spec.HolderRepairs = false
				writes++
			}
			return c.Update(ctx, o, opts...)
		},
	})
	for range 5 {
		_, err := round(SyncRequest{Spoke: spoke, LiveIDs: []string{"a"}, HolderRepairs: new(true)})
		require.NoError(t, err)
		now.Step(settledAfter)
	}
	require.Equal(t, 1, writes)
}

// The next claim may have another holder, and the floor's Machines have none.
func TestTheMarkForMachineHealthChecksGoesWithTheClaim(t *testing.T) {
	e, m := engineWithMachine(t)
	read := func() *clusterv1.Machine {
		t.Helper()
		require.NoError(t, e.Client.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: m.Name}, m))
		return m.DeepCopy()
	}
	c := e.newClaim(Request{Namespace: namespace, Cluster: clusterName, ID: "c", Holder: holder, HolderRepairs: true}, &clusterv1.Cluster{}, "small")
	require.NoError(t, e.label(t.Context(), c, m.DeepCopy()))
	require.Empty(t, skipsRemediation(t, e, m.Name), "a policy that refuses the mark must not refuse the claim")
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.MarkRepair, Claim: c, Machine: read()}))
	require.Equal(t, v1alpha1.Group, skipsRemediation(t, e, m.Name))
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.Unbind, Claim: c, Machine: read()}))
	require.NoError(t, e.do(t.Context(), protocol.Action{Kind: protocol.MarkRepair, Machine: read()}))
	require.Empty(t, skipsRemediation(t, e, m.Name))
}

// Without the mark the claim is as good, so its history does not show that.
func TestARefusedMarkForMachineHealthChecksIsAWarningOnTheNodeGroup(t *testing.T) {
	e, _ := syncing(t, nil, spoke)
	recorder := events.NewFakeRecorder(10)
	e.Recorder = recorder
	c := claimNamed(t, e, "a")
	c.Spec.HolderRepairs = true
	require.NoError(t, e.Client.Update(t.Context(), c))
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if _, is := o.(*clusterv1.Machine); is {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "machines"}, o.GetName(), errors.New("not this annotation"))
			}
			return c.Patch(ctx, o, patch, opts...)
		},
	})
	_, err := e.group(namespace, "small").run(t.Context())
	require.ErrorContains(t, err, "not this annotation")
	require.NotEmpty(t, recorder.Events)
	assert.Contains(t, <-recorder.Events, "WriteRefused the hub refuses a write on Machine a (mark-repair)")
	assert.Empty(t, claimNamed(t, e, "a").Status.Reason)
}
