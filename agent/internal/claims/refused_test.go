package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// denyingWith refuses to delete Machines whose name begins with prefix, as a policy engine does.
func denyingWith(e *Engine, prefix, answer string) {
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			if strings.HasPrefix(o.GetName(), prefix) {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "machines"}, o.GetName(), errors.New(answer))
			}
			return c.Delete(ctx, o, opts...)
		},
	})
}

// releasing is a group whose Machines of these names are to be deleted for claims of the same
// names.
func releasing(t *testing.T, names ...string) *Engine {
	t.Helper()
	ledger := (&protocol.Ledger{Version: 1, Of: namespace + "/small", Seq: 1, LastReplicas: protocol.Count(names)}).Clone()
	var objects []client.Object
	for _, name := range names {
		m := machineOf(name)
		joins(m)
		m.Labels[v1alpha1.ClaimLabel] = name
		ledger.Releasing[types.UID(name)] = protocol.Release{Machine: name, Claim: name}
		objects = append(objects, m, claimIn("", name, v1alpha1.PhaseReleasing, name))
	}
	return engineWith(t, append(objects, groupWith("", protocol.Count(names), ledger))...)
}

func TestWritesThatFailDoNotStarveTheOthers(t *testing.T) {
	var names []string
	for i := range 3 * maxActions {
		names = append(names, fmt.Sprintf("protected-%03d", i))
	}
	e := releasing(t, append(names, "z")...)
	last := names[len(names)-1]
	freed := false
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			if strings.HasPrefix(o.GetName(), "protected") && (!freed || o.GetName() != last) {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "machines"}, o.GetName(), errors.New("protected by policy"))
			}
			return c.Delete(ctx, o, opts...)
		},
	})
	run := func() {
		t.Helper()
		_, err := e.group(namespace, "small").run(t.Context())
		require.ErrorContains(t, err, "protected by policy")
	}
	goes := func(name string) bool {
		t.Helper()
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
		return !protocol.Alive(m)
	}
	for range 4 {
		run()
	}
	require.True(t, goes("z"), "it came behind more of those than one step takes")
	freed = true
	for range 4 {
		run()
	}
	require.True(t, goes(last), "it had failed like the others, and is tried again as often as they are")
}

// A chart of an earlier version forbids the agent to mark any Machine, for example.
func TestWhatNothingDependsOnComesLast(t *testing.T) {
	marks := lo.Times(5*maxActions, func(i int) protocol.Action {
		return protocol.Action{Kind: protocol.MarkRepair, Machine: machineOf(fmt.Sprintf("m%d", i))}
	})
	gone := protocol.Action{Kind: protocol.BeginDelete, Machine: machineOf("z")}
	actions := slices.Concat(marks, []protocol.Action{gone})
	g := &group{skip: maxActions}
	tried := g.batch(actions)
	require.Len(t, tried, maxActions)
	require.Contains(t, tried, gone)

	other := protocol.Action{Kind: protocol.BeginDelete, Machine: machineOf("y")}
	actions = append(actions, other)
	g.noteFailures(actions, tried, &actionsError{error: errors.New("refused"), of: map[string]bool{gone.String(): true}})
	require.Equal(t, other, g.batch(actions)[0])
	require.NotEqual(t, gone, g.batch(actions)[1], "it waits for its turn among those that come last")
	g.noteFailures(actions, []protocol.Action{gone}, nil)
	require.Empty(t, g.failed)
}

// A policy engine's answer may have several lines, and may be longer than a claim's message.
func TestARefusedWriteOnAMachineIsNotedOnItsClaim(t *testing.T) {
	for name, answer := range map[string]string{"short": "protected by policy", "long": "protected by policy:\n" + strings.Repeat("no, ", 400)} {
		t.Run(name, func(t *testing.T) { testARefusedWrite(t, answer) })
	}
}

func testARefusedWrite(t *testing.T, answer string) {
	t.Helper()
	e := releasing(t, "m")
	denyingWith(e, "m", answer)
	claim := claimIn("", "m", v1alpha1.PhaseReleasing, "m")
	for range 3 {
		_, err := e.group(namespace, "small").run(t.Context())
		require.Error(t, err)
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
		assert.Equal(t, protocol.ReasonWriteRefused, claim.Status.Reason)
		assert.Contains(t, claim.Status.Message, "protected by policy")
		assert.Len(t, claim.Status.History, 1, "once is enough")
	}
}

// Policies put ids of requests into their texts, and of several webhooks the fastest answers. The
// claim's own event starts the next run.
func TestARefusalInOtherWordsIsNotedOnceAMinute(t *testing.T) {
	e := releasing(t, "m")
	now := clocktesting.NewFakeClock(newTestTime())
	e.Clock = now
	refusals, notes := 0, 0
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Delete: func(_ context.Context, _ client.WithWatch, o client.Object, _ ...client.DeleteOption) error {
			refusals++
			return apierrors.NewForbidden(schema.GroupResource{Resource: "machines"}, o.GetName(), fmt.Errorf("request %d is denied", refusals))
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			notes++
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	recorder := events.NewFakeRecorder(100)
	e.Recorder = recorder
	for range 10 {
		_, err := e.group(namespace, "small").run(t.Context())
		require.Error(t, err)
		now.Step(time.Second)
	}
	require.Equal(t, 10, refusals, "it is tried again")
	assert.Equal(t, 1, notes)
	assert.Len(t, recorder.Events, 1)

	now.SetTime(newTestTime().Add(time.Minute))
	_, err := e.group(namespace, "small").run(t.Context())
	require.ErrorContains(t, err, "request 11 is denied")
	assert.Equal(t, 2, notes)
	assert.Len(t, recorder.Events, 2)
	claim := claimIn("", "m", v1alpha1.PhaseReleasing, "m")
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	assert.Contains(t, claim.Status.Message, "request 11 is denied", "it is brought up to date")
}

// Without the write, all claims of the MachineDeployment wait.
func TestARefusedWriteOnAMachineSetIsAWarningOnItsMachineDeployment(t *testing.T) {
	set := &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "small-a"}, Spec: clusterv1.MachineSetSpec{Replicas: new(int32(1))},
	}
	md := groupOf("small", 1, nil)
	e := engineWith(t, set, md)
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "machinesets"}, "small-a", errors.New("protected by policy"))
		},
	})
	recorder := events.NewFakeRecorder(1)
	e.Recorder = recorder
	_, err := e.perform(t.Context(), &protocol.Snapshot{Deployment: md}, []protocol.Action{{Kind: protocol.LowerSet, Set: set, UIDs: []types.UID{"m"}}})
	require.Error(t, err)
	require.Len(t, recorder.Events, 1)
	assert.Contains(t, <-recorder.Events, "Warning WriteRefused the hub refuses a write on MachineSet small-a")
}
