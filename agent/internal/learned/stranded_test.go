package learned_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
)

var unregistered = learned.Node{ProviderID: "test://a", Unregistered: true}

// reportFor reports the Nodes once a minute for the given number of minutes, like a holder. It
// returns the groups that have changed.
func (f *fixture) reportFor(minutes int, nodes ...learned.Node) []types.NamespacedName {
	var changed []types.NamespacedName
	for range minutes {
		f.clock.Step(time.Minute)
		changed = append(changed, f.report(nodes...)...)
	}
	return changed
}

// The shim may report to another agent from now on.
func TestAnOldReportIsNoProblem(t *testing.T) {
	f := start(t)
	f.report(unregistered)
	f.reportFor(10, unregistered)
	require.NotNil(t, f.nodes.Stranded(group))
	f.clock.Step(6 * time.Minute)
	assert.Nil(t, f.nodes.Stranded(group))
	f.report(unregistered)
	f.reportFor(9, unregistered)
	assert.Nil(t, f.nodes.Stranded(group), "its ten minutes start again")
}

func TestANodeThatNoClaimWillRegisterIsAProblemUntilItsTaintIsGone(t *testing.T) {
	f := start(t)
	assert.Empty(t, f.report(unregistered))
	assert.Empty(t, f.reportFor(9, unregistered), "it may be booting, or be about to be claimed")
	require.Nil(t, f.nodes.Stranded(group))

	f.clock.Step(time.Minute)
	assert.Equal(t, []types.NamespacedName{group}, f.report(unregistered))
	problem := f.nodes.Stranded(group)
	require.NotNil(t, problem)
	assert.Contains(t, problem.Value, "machine-")
	assert.Contains(t, problem.Message, "kubectl taint node")
	f.clock.Step(time.Minute)
	assert.Empty(t, f.report(unregistered), "it is said once")

	assert.Equal(t, []types.NamespacedName{group}, f.report(learned.Node{ProviderID: "test://a"}))
	assert.Nil(t, f.nodes.Stranded(group))
}

func TestANodeThatIsClaimedOrOnItsWayOutIsNoProblem(t *testing.T) {
	for name, change := range map[string]func(*fixture, *clusterv1.Machine){
		"claimed": func(f *fixture, m *clusterv1.Machine) {
			m.Labels[v1alpha1.ClaimLabel] = "claim"
			require.NoError(f, f.client.Update(f.Context(), m))
		},
		"being deleted": func(f *fixture, m *clusterv1.Machine) {
			m.Finalizers = []string{"test/hold"}
			require.NoError(f, f.client.Update(f.Context(), m))
			require.NoError(f, f.client.Delete(f.Context(), m))
		},
		"gone": func(f *fixture, m *clusterv1.Machine) { require.NoError(f, f.client.Delete(f.Context(), m)) },
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t)
			f.report(unregistered)
			f.reportFor(60, unregistered)
			require.NotNil(t, f.nodes.Stranded(group))
			var machines clusterv1.MachineList
			require.NoError(t, f.client.List(t.Context(), &machines))
			require.Len(t, machines.Items, 1)
			change(f, &machines.Items[0])
			assert.Equal(t, []types.NamespacedName{group}, f.report(unregistered))
			assert.Nil(t, f.nodes.Stranded(group))
		})
	}
}

// Each new text would be an event and a change of the node group.
func TestAProblemNamesAFewMachinesAndCountsNone(t *testing.T) {
	f := start(t)
	nodes := []learned.Node{unregistered}
	for _, id := range []string{"test://b", "test://c", "test://d", "test://e"} {
		f.machine("present", "v1.36.3", id, spoke.Name)
		nodes = append(nodes, learned.Node{ProviderID: id, Unregistered: true})
	}
	f.report(nodes...)
	f.reportFor(10, nodes...)
	assert.Regexp(t, `^(machine-\w+, ){3}…$`, f.nodes.Stranded(group).Value)
}
