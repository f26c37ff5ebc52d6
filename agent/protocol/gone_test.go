package protocol

import (
	"testing"

	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// The Machines of a MachineDeployment that was deleted with --cascade=orphan live on. The label is
// the lasting binding of each of them to its claim.
func TestAClaimOfAGroupThatIsGoneKeepsTheMachineThatCarriesItsLabel(t *testing.T) {
	for name, test := range map[string]struct {
		claim func(*Snapshot)
		want  []ActionKind
	}{
		"its object was lost":      {func(s *Snapshot) { s.Lost = map[string]*clusterv1.Machine{"c": s.Machines[0]} }, []ActionKind{Recreate}},
		"its status was lost":      {func(s *Snapshot) { s.withClaim("c", "", "") }, []ActionKind{Restore}},
		"it was never bound":       {func(s *Snapshot) { s.withClaim("c", v1alpha1.PhasePending, "") }, []ActionKind{Restore}},
		"its status names another": {func(s *Snapshot) { s.withClaim("c", v1alpha1.PhaseBound, "former") }, []ActionKind{Restore}},
		"it is released without":   {func(s *Snapshot) { s.withClaim("c", v1alpha1.PhaseReleasing, "") }, []ActionKind{Restore}},
		"it is bound to it":        {func(s *Snapshot) { s.withClaim("c", v1alpha1.PhaseBound, "m") }, nil},
		"it is released with it":   {func(s *Snapshot) { s.withClaim("c", v1alpha1.PhaseReleasing, "m") }, []ActionKind{BeginDelete}},
		"it has ended":             {func(s *Snapshot) { s.withClaim("c", v1alpha1.PhaseEnded, "m") }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := atRest(0, nil).withMachine("m", "c", node)
			test.claim(s)
			d := DecideGone(s)
			assert.Equal(t, test.want, kinds(d))
			assert.Empty(t, d.Refused, "its call moves it nowhere")
			assert.Zero(t, d.RequeueAfter)
			for _, a := range d.Actions {
				assert.Same(t, s.Machines[0], a.Machine)
			}
		})
	}
}

// Cluster API deletes the Machines of the MachineDeployment as well.
func TestAClaimOfAGroupThatIsGoneEndsWithTheMachineThatCarriesItsLabel(t *testing.T) {
	goes := func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.NewTime(newTestTime())) }
	for _, phase := range []v1alpha1.Phase{"", v1alpha1.PhasePending, v1alpha1.PhaseReleasing} {
		s := atRest(0, nil).withMachine("m", "c", goes).withClaim("c", phase, "")
		d := DecideGone(s)
		assert.Equal(t, []ActionKind{Restore}, kinds(d), "its status was lost, and its instance may still run")
		assert.Empty(t, d.Refused, "its call moves it nowhere")
		s.Claims = nil
		assert.Empty(t, kinds(DecideGone(s.withClaim("c", v1alpha1.PhaseBound, "m"))))
		s.Machines, s.Claims = nil, nil
		assert.Equal(t, []ActionKind{End}, kinds(DecideGone(s.withClaim("c", v1alpha1.PhaseBound, "m"))))
	}
	s := atRest(0, nil).withMachine("m", "c", goes)
	s.Lost = map[string]*clusterv1.Machine{"c": s.Machines[0]}
	assert.Empty(t, kinds(DecideGone(s)))
}
