package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// deletedWithin allows for Cluster API, which retries an unreachable API server several times, and
// for instances, which wait 20 seconds for theirs.
const deletedWithin = 5 * time.Minute

// TestAClusterGoesWhoseShimAndSpokeAreGone deletes a Cluster while a claim waits for its Machine's
// Node, another is being released, and there is no holder left to release the others.
func TestAClusterGoesWhoseShimAndSpokeAreGone(t *testing.T) {
	figure := shows(t, "a Cluster goes whose shim and spoke are gone: no claim, ledger or finalizer of the agents holds it back")
	if testing.Short() {
		t.Skip("not in the short run: waits for instances that give up an API server")
	}
	h := startHub(t, "e2e-deleted")
	h.run(t, h.source, 3, 3)
	h.hold(t, h.source, true)
	h.hangs(t, func() { h.scale(t, 3, 4) })
	h.scale(t, 2, 4)
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		claims := h.claims(t, h.source, agentv1.PhaseReleasing)
		if len(claims) != 1 || claims[0].Status.Machine == nil {
			return fmt.Sprintf("a claim to be released: %d are", len(claims)), nil
		}
		var m clusterv1.Machine
		err := h.source.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: claims[0].Status.Machine.Name}, &m)
		ours := lo.Contains(m.Finalizers, agentv1.ReleaseFinalizer)
		return lo.Ternary(ours && !m.DeletionTimestamp.IsZero(), "", "Machine "+m.Name+" to be deleted by the agent, and held"), err
	})

	for _, component := range []string{
		sandbox.Shim, sandbox.SpokeKwok, sandbox.SpokeScheduler, sandbox.SpokeControllerManager, sandbox.SpokeAPIServer, sandbox.SpokeEtcd,
	} {
		require.NoError(t, h.source.Sandbox.StopComponent(component))
	}
	h.hold(t, h.source, false)
	began := time.Now()
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: sandbox.ClusterName}}
	require.NoError(t, h.source.Hub.Delete(within(t, soon), cluster))
	poll(t, deletedWithin, h.clusterIsGone)
	figure("it was gone after %.0f s", time.Since(began).Seconds())
	require.Empty(t, h.faults())
}

// clusterIsGone is a condition for poll: nothing that the Cluster owns is left in the hub.
func (h hubs) clusterIsGone(ctx context.Context) (string, error) {
	var left []string
	for _, list := range []client.ObjectList{
		&clusterv1.ClusterList{}, &clusterv1.MachineDeploymentList{}, &clusterv1.MachineSetList{}, &clusterv1.MachineList{},
		&simv1.SimMachineList{}, &simv1.SimClusterList{}, &simv1.SimControlPlaneList{}, &agentv1.MachineClaimList{},
	} {
		if err := h.source.Hub.List(ctx, list, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return "", err
		}
		err := meta.EachListItem(list, func(o runtime.Object) error {
			object, err := meta.Accessor(o)
			if err == nil {
				left = append(left, fmt.Sprintf("%T %s (finalizers %v, deleted %v)",
					o, object.GetName(), object.GetFinalizers(), object.GetDeletionTimestamp()))
			}
			return err
		})
		if err != nil {
			return "", err
		}
	}
	return lo.Ternary(len(left) == 0, "", "what the Cluster had to go:\n  "+strings.Join(left, "\n  ")), nil
}

// hangs makes one machine hang before it joins: the one claimed next in the node group west because
// of what more does. Later machines do not hang. It is not in east, where the claim might be
// assigned one of the team's machines.
func (h hubs) hangs(t *testing.T, more func()) (machine string) {
	t.Helper()
	names := func(ctx context.Context) ([]string, error) {
		var instances simv1.SimMachineList
		err := h.source.Hub.List(ctx, &instances, client.InNamespace(sandbox.ClusterNamespace))
		return lo.FilterMap(instances.Items, func(m simv1.SimMachine, _ int) (string, bool) {
			return m.Name, m.Spec.StuckAt == simv1.StageJoin && m.Status.BootedAt != nil && m.Status.JoinedAt == nil
		}), err
	}
	template := &simv1.SimMachineTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "west"}}
	set := func(value string) {
		patch := mergePatch(`{"spec":{"template":{"spec":{"stuckAt":` + value + `}}}}`)
		require.NoError(t, h.source.Hub.Patch(within(t, soon), template, patch))
	}
	before, err := names(within(t, soon))
	require.NoError(t, err)
	set(`"Join"`)
	more()
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		hanging, err := names(ctx)
		hanging = lo.Without(hanging, before...)
		if len(hanging) == 1 {
			machine = hanging[0]
		}
		return lo.Ternary(len(hanging) == 1, "", fmt.Sprintf("a machine to hang before it joins: %v do", hanging)), err
	})
	// The machine must have its claim.
	poll(t, soon, func(ctx context.Context) (string, error) {
		var m clusterv1.Machine
		err := h.source.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: machine}, &m)
		return lo.Ternary(m.Labels[agentv1.ClaimLabel] != "", "", "Machine "+machine+" to be claimed"), err
	})
	set("null")
	return machine
}
