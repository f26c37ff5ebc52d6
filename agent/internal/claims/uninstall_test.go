package claims

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// TestUninstallLeavesNothingAndTakesNothing uninstalls in the middle of random histories.
func TestUninstallLeavesNothingAndTakesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, worldOptions{
			groups: 1, floor: rapid.Int32Range(0, 2).Draw(t, "floor"), strategy: clusterv1.OnDeleteMachineDeploymentStrategyType,
		})
		group := w.groups[0]
		// Short histories: the states that are half done at their end matter.
		actions := map[string]func(){
			"agent": func() { w.agentStep(0, group) },
			"create": func() {
				if id := w.newOwner(""); id != "" {
					w.create(0, id, w.groups)
				}
			},
			"release": func() {
				if len(w.order) > 0 {
					w.release(0, w.anyOwner())
				}
			},
			"controllers": func() { w.controllers(group) },
			"rollout": func() {
				if w.rarely(5) {
					w.rollout(group)
				}
			},
		}
		w.depth = 2 // no interruptions
		names := slices.Sorted(maps.Keys(actions))
		for range rapid.IntRange(0, 16).Draw(t, "actions") {
			actions[rapid.SampledFrom(names).Draw(t, "action")]()
			w.check()
		}
		going := map[types.UID]bool{}
		for _, c := range w.claims() {
			if c.Status.Phase == v1alpha1.PhaseReleasing && c.Status.Machine != nil {
				going[c.Status.Machine.UID] = true
			}
		}
		var staying []types.UID
		for _, m := range w.machines(group) {
			if protocol.Alive(m) && !going[m.UID] && !protocol.HasFinalizer(m) {
				staying = append(staying, m.UID)
			}
		}

		w.withdrawing = true
		w.late = nil
		replicas := *w.md(group).Spec.Replicas
		start := func() *process {
			p := w.newProcess(0)
			p.engine.withdraws = true
			return p
		}
		p := start()
		key := types.NamespacedName{Namespace: namespace, Name: group}
		for round := 0; ; round++ {
			if round > 100 {
				t.Fatalf("not withdrawn\n%s", w.describe())
			}
			// The agent dies now and then, and is restarted.
			p.call = &call{fault: none, gap: -1, writes: max(-1, rapid.IntRange(-20, 6).Draw(t, "crash"))}
			if p.call.writes >= 0 {
				p.call.fault = rapid.SampledFrom([]fault{crashBefore, crashAfter}).Draw(t, "fault")
			}
			waiting, err := p.engine.withdraw(context.Background(), key, false)
			if err == nil && waiting == "" && !p.call.dead {
				break
			}
			if p.call.dead {
				p = start()
			}
			now := *w.md(group).Spec.Replicas
			if now > replicas {
				t.Fatalf("a Machine was ordered: %d replicas, of %d\n%s", now, replicas, w.describe())
			}
			replicas = now
			if rapid.Bool().Draw(t, "controllers run") { // a release may take long
				w.controllers(group)
			}
			w.clock.Step(rapid.SampledFrom([]time.Duration{time.Second, time.Minute}).Draw(t, "pass"))
		}
		p.call = &call{fault: none, gap: -1, writes: -1}
		must(t, p.engine.deleteClaims(context.Background(), UninstallOptions{
			Serves: func(types.NamespacedName) bool { return true }, Report: func(string, ...any) {},
		}))
		w.fair = true
		w.rest()

		md := w.md(group)
		if md.Annotations[v1alpha1.LedgerAnnotation] != "" || pausedByAgent(md) || len(w.claims()) > 0 {
			t.Fatalf("something was left behind\n%s", w.describe())
		}
		for _, s := range w.sets(group) {
			if cleaned(s) != nil {
				t.Fatalf("something was left on MachineSet %s: %v", s.Name, s.Annotations)
			}
		}
		machines := w.machines(group)
		for _, m := range machines {
			if cleaned(m) != nil {
				t.Fatalf("something was left on Machine %s: %v %v %v", m.Name, m.Labels, m.Annotations, m.Finalizers)
			}
		}
		if len(machines) != int(*md.Spec.Replicas) {
			t.Fatalf("%d Machines for %d replicas\n%s", len(machines), *md.Spec.Replicas, w.describe())
		}
		for _, uid := range staying {
			if !slices.ContainsFunc(machines, func(m *clusterv1.Machine) bool { return m.UID == uid }) {
				t.Fatalf("Machine %s was taken from the user\n%s", uid, w.describe())
			}
		}
	})
}

// Uninstall knows every mark of the agent. A mark left behind would freeze a group of a later
// installation, or make Cluster API delete a Machine without a drain.
func TestUninstallRemovesEachMark(t *testing.T) {
	md := groupOf("small", 1, map[string]string{
		v1alpha1.LedgerAnnotation: closedLedger, v1alpha1.ReplicasLoweredAnnotation: "frozen", v1alpha1.ClaimedAnnotation: "2", "example.com/note": "x",
	})
	m := machineOf("m")
	halfReleased(m)
	m.Labels[v1alpha1.ClaimLabel], m.Labels[v1alpha1.ClaimNameLabel] = "c", "c"
	for _, key := range []string{
		v1alpha1.ClaimNameAnnotation, v1alpha1.ClaimHolderAnnotation, v1alpha1.ClaimSpokeAnnotation, v1alpha1.ClaimedAtAnnotation,
		v1alpha1.HandedOverAnnotation, v1alpha1.NodeRegisteredAtAnnotation, v1alpha1.ReleaseHook,
	} {
		m.Annotations[key] = "x"
	}
	m.Annotations[clusterv1.ExcludeWaitForNodeVolumeDetachAnnotation] = v1alpha1.Group
	m.Annotations[clusterv1.MachineSkipRemediationAnnotation] = v1alpha1.Group
	frozen := groupOf("frozen", 1, map[string]string{v1alpha1.ReplicasLoweredAnnotation: "frozen"})
	e := engineWith(t, md, m, frozen)
	require.NoError(t, e.Uninstall(t.Context(), UninstallOptions{
		Serves: func(types.NamespacedName) bool { return true }, Report: func(string, ...any) {},
	}))
	for _, object := range []client.Object{md, m, frozen} {
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(object), object))
		for key := range object.GetAnnotations() {
			assert.Equal(t, "example.com/note", key)
		}
		assert.NotContains(t, object.GetLabels(), v1alpha1.ClaimLabel)
		assert.NotContains(t, object.GetFinalizers(), v1alpha1.ReleaseFinalizer)
	}
}

// Releases may take long. What the user gets meanwhile stays as it is.
func TestUninstallBeginsNothingWhileItWaits(t *testing.T) {
	md := groupOf("small", 3, map[string]string{
		v1alpha1.LedgerAnnotation:             `{"v":1,"seq":1,"floor":0,"lastReplicas":3,"spare":2}`,
		clusterv1.AutoscalerMinSizeAnnotation: "0", clusterv1.AutoscalerMaxSizeAnnotation: "10",
	})
	md.Status.ObservedGeneration = md.Generation
	set := &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "small-a", Labels: map[string]string{
			clusterv1.MachineDeploymentNameLabel: "small", clusterv1.ClusterNameLabel: clusterName,
		}},
		Spec: clusterv1.MachineSetSpec{ClusterName: clusterName, Replicas: new(int32(3))},
	}
	going, spare, other := machineOf("going"), machineOf("spare"), machineOf("other")
	halfReleased(going)
	going.Labels[v1alpha1.ClaimLabel] = "a"
	e := engineWith(t, md, set, claimIn("", "a", v1alpha1.PhaseReleasing, "going"), claimIn("", "b", v1alpha1.PhasePending, ""), going, spare, other)
	for _, m := range []*clusterv1.Machine{spare, other} {
		joins(m)
		require.NoError(t, e.Client.Update(t.Context(), m))
	}
	passing := clocktesting.NewFakeClock(newTestTime())
	e.Clock, e.withdraws = passing, true
	key := client.ObjectKeyFromObject(md)
	for range 3 {
		waiting, err := e.withdraw(t.Context(), key, false)
		require.NoError(t, err)
		require.Equal(t, "claims that are still being released: 1", waiting)
		passing.Step(time.Hour)
	}
	for _, m := range []*clusterv1.Machine{spare, other} {
		require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(m), m))
		require.False(t, protocol.HasFinalizer(m), m.Name)
	}
	require.NoError(t, e.Client.Get(t.Context(), key, md))
	require.LessOrEqual(t, *md.Spec.Replicas, int32(3))
}

// A node group whose write is refused, by a policy of the organisation for example, is named with
// the cause, and keeps no other one from being withdrawn.
func TestUninstallGoesOnAfterARefusedWrite(t *testing.T) {
	marked := func() map[string]string { return map[string]string{v1alpha1.ReplicasLoweredAnnotation: "frozen"} }
	e := engineWith(t, groupOf("a", 1, marked()), groupOf("b", 1, marked()))
	base, ok := e.Client.(client.WithWatch)
	require.True(t, ok)
	e.Client = interceptor.NewClient(base, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if o.GetName() == "a" {
				return apierrors.NewInvalid(schema.GroupKind{Kind: "MachineDeployment"}, "a", field.ErrorList{
					field.Invalid(field.NewPath("spec", "rollout"), "x", "the policy of the organisation"),
				})
			}
			return c.Patch(ctx, o, p, opts...)
		},
	})
	err := e.Uninstall(t.Context(), UninstallOptions{})
	require.ErrorContains(t, err, "MachineDeployment "+namespace+"/a")
	require.ErrorContains(t, err, "the policy of the organisation")
	var md clusterv1.MachineDeployment
	require.NoError(t, base.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: "b"}, &md))
	require.NotContains(t, md.Annotations, v1alpha1.ReplicasLoweredAnnotation)
}

// Right after the bindings of the agent's own policies have been deleted, API servers still apply
// them.
func TestUninstallRepeatsForbiddenWritesForAWhile(t *testing.T) {
	for name, lasts := range map[string]time.Duration{"a few seconds": refusedFor / 3, "for good": time.Hour} {
		t.Run(name, func(t *testing.T) {
			e := engineWith(t, groupOf("a", 1, map[string]string{v1alpha1.ReplicasLoweredAnnotation: "frozen"}))
			base, ok := e.Client.(client.WithWatch)
			require.True(t, ok)
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				e.Client = interceptor.NewClient(base, interceptor.Funcs{
					Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
						if time.Since(began) < lasts {
							return apierrors.NewForbidden(schema.GroupResource{Resource: "machinedeployments"}, "a", errors.New("a policy"))
						}
						return c.Patch(ctx, o, p, opts...)
					},
				})
				var said []string
				report := func(format string, arguments ...any) { said = append(said, fmt.Sprintf(format, arguments...)) }
				err := e.Uninstall(t.Context(), UninstallOptions{Report: report})
				require.Regexp(t, "^MachineDeployment "+namespace+"/a: refused, and repeated until 15s after the start: .*a policy$", said[0])
				if lasts > refusedFor {
					require.True(t, apierrors.IsForbidden(err), "%v", err)
					require.Len(t, said, 1)
					require.Less(t, time.Since(began), 2*refusedFor)
					return
				}
				require.NoError(t, err)
				require.Equal(t, "MachineDeployment "+namespace+"/a: withdrawn", said[1])
			})
		})
	}
}
