package protocol

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// sized is a group of ten running, unclaimed Machines that a min size of ten kept, with the given
// size annotations now.
func sized(sizes map[string]string) *Snapshot {
	s := atRest(10, &Ledger{Version: 1, Seq: 1, Min: 10, LastReplicas: 10})
	s.Deployment.Annotations = sizes
	s.Deployment.Labels = map[string]string{v1alpha1.MemberLabel: ""}
	s.Group = eligibility.Of(s.Deployment, &clusterv1.Cluster{})
	s.SpareSince = s.Now.Add(-time.Hour)
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"} {
		s.withMachine(name, "", node)
	}
	return s
}

func TestAMistypedSizeRemovesNoMachine(t *testing.T) {
	const minSize, maxSize = clusterv1.AutoscalerMinSizeAnnotation, clusterv1.AutoscalerMaxSizeAnnotation
	for name, sizes := range map[string]map[string]string{
		"min size in words":            {minSize: "three"},
		"min size with a fraction":     {minSize: "10.0"},
		"negative min size":            {minSize: "-10"},
		"empty min size":               {minSize: ""},
		"max size below the min size":  {minSize: "10", maxSize: "1"},
		"max size in words":            {minSize: "10", maxSize: "lots"},
		"both of them":                 {minSize: "ten", maxSize: "one"},
		"min size raised above a max ": {minSize: "30", maxSize: "20"},
	} {
		t.Run(name, func(t *testing.T) {
			d := Decide(sized(sizes))
			assert.Nil(t, d.Ledger, "nothing is removed, raised or lowered")
			assert.Empty(t, d.Actions)
		})
	}
}

// It is not certain which Machines are spares while a size cannot be used.
func TestNoSpareIsRemovedWhileASizeCannotBeUsed(t *testing.T) {
	for size, removed := range map[string]int{"8": 2, "eight": 0} {
		s := sized(map[string]string{clusterv1.AutoscalerMinSizeAnnotation: size})
		s.Ledger.Min = 8 // as last read
		d := Decide(s)
		if removed == 0 {
			assert.Nil(t, d.Ledger, "min size %q", size)
			continue
		}
		require.NotNil(t, d.Ledger)
		assert.Len(t, d.Ledger.Releasing, removed, "min size %q", size)
	}
}

// The control for both: a smaller min size that can be read is what the user wants.
func TestASmallerMinSizeIsFollowed(t *testing.T) {
	d := Decide(sized(map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "8"}))
	require.NotNil(t, d.Ledger)
	assert.Len(t, d.Ledger.Releasing, 2)
	assert.Equal(t, int32(8), d.Ledger.Min)
}

func TestTheLastGoodMinSizeStaysInForce(t *testing.T) {
	s := sized(map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "three"})
	*s.Deployment.Spec.Replicas = 12 // a person adds two
	s.Group.Replicas = 12
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(10), d.Ledger.Min)
	assert.Equal(t, int32(12), d.Ledger.Floor, "two more than the ten that the min size kept")
}

func TestClaimsAreReleasedWhateverTheSizesAre(t *testing.T) {
	s := atRest(11, &Ledger{Version: 1, Seq: 1, Min: 10, LastReplicas: 11}).
		withMachine("m", "c", node).withClaim("c", v1alpha1.PhaseReleasing, "m")
	s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.Invalid}}
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Contains(t, d.Ledger.Releasing, s.Machines[0].UID)
}

func TestAClaimIsRefusedWhileASizeCannotBeUsed(t *testing.T) {
	s := sized(map[string]string{clusterv1.AutoscalerMinSizeAnnotation: "three"}).withClaim("c", "", "")
	d := Decide(s)
	assert.Equal(t, eligibility.Invalid, d.Refused["c"].Reason)
	assert.Contains(t, d.Refused["c"].Message, "three")
	assert.Equal(t, int32(10), d.Replicas)
}

// A group without any claim is raised to its min size as well.
func TestReplicasAreRaisedToTheMinSizeWithoutAClaim(t *testing.T) {
	s := atRest(1, nil).withMachine("a", "", node)
	s.Group.Min = 3
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.Equal(t, int32(3), d.Replicas)
	assert.Equal(t, int32(3), d.Ledger.Min)

	s = atRest(1, nil).withMachine("a", "", node)
	s.Group.Min = 3
	s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.NotMember}}
	assert.Nil(t, Decide(s).Ledger, "the group did not opt in")
}

// The refusals of a group are independent: a group whose opt-in label was removed before it was
// paused is paused.
func TestAPauseIsRespectedWhateverElseIsWrong(t *testing.T) {
	for _, other := range []eligibility.Reason{eligibility.NotMember, eligibility.Deleting, eligibility.CoolingDown} {
		s := atRest(1, &Ledger{Version: 1, Seq: 1, LastReplicas: 1}).withMachine("a", "", node)
		s.SpareSince = s.Now.Add(-time.Hour)
		s.Group.Refusals = []eligibility.Refusal{{Reason: other}}
		require.NotNil(t, Decide(s).Ledger, "%s alone: the spare is removed", other)
		s.Group.Refusals = append(s.Group.Refusals, eligibility.Refusal{Reason: eligibility.Paused})
		assert.Nil(t, Decide(s).Ledger, "%s and a pause", other)
	}
}

// While a topology sets the replicas, it would set raised replicas back, and Cluster API would
// remove Machines of its choice.
func TestNothingIsRaisedWhereAnotherOwnerSetsTheReplicas(t *testing.T) {
	s := atRest(1, &Ledger{Version: 1, Seq: 1, Floor: 1, LastReplicas: 1}).
		withMachine("a", "", node).withMachine("m", "c", node).withClaim("c", v1alpha1.PhaseBound, "m")
	s.Claims[0].Status.Machine.NodeName = "node-m"
	assert.Equal(t, int32(2), Decide(s).Replicas)
	s.Group.Refusals = []eligibility.Refusal{{Reason: eligibility.ReplicasOwned}}
	assert.Equal(t, int32(1), Decide(s).Replicas)
}
