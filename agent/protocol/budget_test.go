package protocol

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// A MachineSet has the MachineDeployment's annotations and its own. Whatever is requested of a
// group, the API server may refuse none of them.
func TestNoLedgerOutgrowsItsAnnotation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pad := func(what string, n, length int) string {
			text := fmt.Sprintf("%s-%05d-", what, n)
			return text + strings.Repeat("x", max(0, length-len(text)))
		}
		length := rapid.IntRange(12, longestName).Draw(t, "length of names")
		s := atRest(rapid.Int32Range(0, 10000).Draw(t, "replicas"), nil)
		if rapid.Bool().Draw(t, "ledger") {
			s.Ledger = (&Ledger{Version: LedgerVersion, Seq: 1, LastReplicas: s.Group.Replicas}).Clone()
		}
		s.Deployment.Annotations = map[string]string{"example.com/note": strings.Repeat("x", rapid.IntRange(0, 250<<10).Draw(t, "note"))}
		s.Sets[0].Annotations = map[string]string{"example.com/other": strings.Repeat("x", rapid.IntRange(0, 100<<10).Draw(t, "other"))}
		s.SpareSince = s.Now.Add(-time.Hour)
		for i := range rapid.SampledFrom([]int{0, 3, 3000}).Draw(t, "pending") {
			s.withClaim(pad("claim", i, length), rapid.SampledFrom([]v1alpha1.Phase{"", v1alpha1.PhasePending}).Draw(t, "phase"), "")
		}
		for i := range rapid.SampledFrom([]int{0, 3, 2000}).Draw(t, "releasing") {
			name, id := pad("machine", i, length), pad("release", i, length)
			change := rapid.SampledFrom([]func(*clusterv1.Machine){node, nil, completed, deleting("Draining")}).Draw(t, "machine")
			s.withMachine(name, id, change).withClaim(id, v1alpha1.PhaseReleasing, name)
		}
		for i := range rapid.SampledFrom([]int{0, 3, 2000}).Draw(t, "spare") {
			s.withMachine(pad("spare", i, length), "", node)
		}
		for range 3 {
			d := Decide(s)
			if d.Ledger == nil {
				break
			}
			grown := d.Ledger.Clone()
			for id, entry := range grown.Pending {
				grown.Pending[id] = Assignment{Machine: pad("named", 1, longestName), UID: types.UID(pad("uid", 1, uidLength)), Adopted: entry.Adopted}
			}
			var released []types.UID
			for uid, r := range grown.Releasing {
				r.Drained, r.Set, r.Decremented, r.Generation = true, s.Sets[0].Name, true, 1<<62
				grown.Releasing[uid] = r
				released = append(released, uid)
			}
			size := annotationBytes(s.Deployment.Annotations, s.Sets[0].Annotations) + len(v1alpha1.LedgerAnnotation) + len(grown.Encode()) +
				len(v1alpha1.ReleasedAnnotation) + len(JoinUIDs(released))
			if entries := len(grown.Pending) + len(grown.Releasing); size > validation.TotalAnnotationSizeLimitB && entries > 0 {
				t.Fatalf("%d entries, grown: %d bytes of annotations", entries, size)
			}
			s.Ledger = d.Ledger
			s.Deployment.Annotations[v1alpha1.LedgerAnnotation] = d.Ledger.Encode()
		}
	})
}

// roomFor returns a budget with room for the given number of entries of a kind.
func roomFor(entries int) int {
	return 4 * (entries*sizeOfClaim("c0", Assignment{}) + 1) / 3
}

func TestWhatTheLedgerHasNoRoomForWaitsInOrder(t *testing.T) {
	t.Run("claims", func(t *testing.T) {
		s := atRest(2, &Ledger{Version: 1, Seq: 4, Floor: 2, LastReplicas: 2})
		s.LedgerBudget = roomFor(2)
		for i := range 4 {
			s.withClaim(fmt.Sprintf("c%d", i), "", "")
			s.Claims[i].CreationTimestamp = metav1.NewTime(s.Now.Add(-time.Duration(i) * time.Second))
		}
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Equal(t, map[string]Assignment{"c2": {}, "c3": {}}, d.Ledger.Pending, "the oldest")
		assert.Equal(t, int32(4), d.Replicas, "nothing is counted for those that wait")
		assert.Empty(t, d.Refused, "they are not refused")
		assert.Equal(t, map[string]bool{"c0": true, "c1": true}, d.Queued)

		s.Ledger = d.Ledger
		s.withMachine("m", "c3", nil)
		s.Group.Replicas = 4
		s.Claims[0].Status = v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhaseBound, Machine: &v1alpha1.MachineReference{Name: "m", UID: "m"}}
		require.Equal(t, "c3", s.Claims[0].Spec.ClaimID)
		d = Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Contains(t, d.Ledger.Pending, "c1", "what left the ledger makes room for the next")
		assert.NotContains(t, d.Ledger.Pending, "c0")
	})
	t.Run("one that would fit behind one that does not", func(t *testing.T) {
		s := atRest(0, nil)
		s.LedgerBudget = roomFor(1)
		s.withClaim(strings.Repeat("long", 10), "", "").withClaim("c0", "", "")
		s.Claims[1].CreationTimestamp = metav1.NewTime(s.Now.Add(time.Second))
		d := Decide(s)
		assert.Len(t, d.Queued, 2)
		assert.Nil(t, d.Ledger)
	})
	t.Run("claims at the max size", func(t *testing.T) {
		s := atRest(0, nil)
		s.LedgerBudget = roomFor(1)
		s.Group.Max = new(int32(2))
		d := Decide(s.withClaim("a", "", "").withClaim("b", "", "").withClaim("c", "", ""))
		assert.Contains(t, d.Ledger.Pending, "a")
		assert.Contains(t, d.Queued, "b")
		assert.Equal(t, eligibility.AtMaxSize, d.Refused["c"].Reason, "as if the one before it were in the ledger")
	})
	t.Run("releases", func(t *testing.T) {
		s := atRest(3, &Ledger{Version: 1, Seq: 4, LastReplicas: 3})
		s.LedgerBudget = 4 * (s.newBudget(&Ledger{}, 0).sizeOfRelease("a", Release{Machine: "a", Claim: "a"}) + 1) / 3
		for _, id := range []string{"a", "b", "c"} {
			s.withMachine(id, id, node).withClaim(id, v1alpha1.PhaseReleasing, id)
		}
		d := Decide(s)
		require.NotNil(t, d.Ledger)
		assert.Len(t, d.Ledger.Releasing, 1)
		assert.Contains(t, d.Ledger.Releasing, types.UID("a"))
	})
	t.Run("releases do not keep claims out", func(t *testing.T) {
		ledger := (&Ledger{Version: 1, Seq: 4, LastReplicas: 3000}).Clone()
		s := atRest(3000, ledger)
		for i := range 3000 {
			id := fmt.Sprintf("machine-%04d", i)
			s.withMachine(id, id, node).withClaim(id, v1alpha1.PhaseReleasing, id)
		}
		d := Decide(s.withClaim("new", "", ""))
		require.NotNil(t, d.Ledger)
		assert.Contains(t, d.Ledger.Pending, "new")
		assert.Greater(t, len(d.Ledger.Releasing), 300)
		assert.Less(t, len(d.Ledger.Releasing), 3000)
	})
	t.Run("spares are kept for them", func(t *testing.T) {
		s := atRest(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1, Spare: 1})
		s.LedgerBudget, s.SpareSince = 200, s.Now.Add(-time.Hour)
		id := strings.Repeat("a", 63)
		d := Decide(s.withMachine("m", "", nil).withClaim(id, "", ""))
		assert.Contains(t, d.Queued, id)
		assert.Nil(t, d.Ledger, "though there is room for a release")
		s.Claims = nil
		require.NotNil(t, Decide(s).Ledger)
	})
}

func TestAGroupWhoseAnnotationsLeaveNoRoomRefusesClaims(t *testing.T) {
	s := atRest(0, nil).withClaim("a", "", "")
	s.Deployment.Annotations = map[string]string{"example.com/large": strings.Repeat("x", 250<<10), "example.com/small": "x"}
	d := Decide(s)
	assert.Equal(t, eligibility.Invalid, d.Refused["a"].Reason)
	assert.Contains(t, d.Refused["a"].Message, "metadata.annotations[example.com/large]")

	s.Claims[0].Spec.Adopt = "m"
	s.withMachine("m", "", node)
	assert.Equal(t, d.Refused, Decide(s).Refused, "also one that asks for a Machine")
}

// An entry counts with the largest size that it can reach.
func TestAReleaseGrowsNoLargerThanItCounts(t *testing.T) {
	uid, before := types.UID(strings.Repeat("u", uidLength)), types.UID(strings.Repeat("b", uidLength))
	begun := Release{Machine: "m", Claim: "c"}
	s := atRest(1, nil)
	grown := Release{
		Machine: "m", Claim: "c", Drained: true, Set: s.Sets[0].Name, Decremented: true, LoweredAs: before, Generation: math.MaxInt64,
	}
	without := (&Ledger{Releasing: map[types.UID]Release{"other": begun}}).Encode()
	with := (&Ledger{Releasing: map[types.UID]Release{"other": begun, uid: grown}}).Encode()
	released := "," + string(before) // in the MachineSet's annotation
	assert.LessOrEqual(t, len(with)-len(without)+len(released), s.newBudget(&Ledger{}, LedgerBudget).sizeOfRelease(uid, begun))
}
