package claims

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Objects that earlier builds have written are read and processed further. The folder
// testdata/recorded has objects of real control planes, taken while agents were being killed. More
// may be added, but none is ever changed.

func TestRecordedLedgersAreReadInFull(t *testing.T) {
	var builds map[string][]json.RawMessage
	recorded(t, "ledgers.json", &builds)
	require.NotEmpty(t, builds)
	for build, ledgers := range builds {
		require.NotEmpty(t, ledgers, build)
		for _, text := range ledgers {
			l, err := protocol.ParseLedger(string(text))
			require.NoError(t, err, "%s: %s", build, text)
			assert.JSONEq(t, string(text), l.Encode(), build)
		}
	}
}

func TestRecordedClaimsAreReadInFull(t *testing.T) {
	phases := map[v1alpha1.Phase]bool{}
	for _, text := range recordedObjects(t, "MachineClaim") {
		var c v1alpha1.MachineClaim
		strict := json.NewDecoder(bytes.NewReader(text))
		strict.DisallowUnknownFields()
		require.NoError(t, strict.Decode(&c))
		again, err := json.Marshal(c)
		require.NoError(t, err)
		assert.JSONEq(t, string(text), string(again))
		phases[c.Status.Phase] = true
	}
	for _, phase := range []v1alpha1.Phase{v1alpha1.PhasePending, v1alpha1.PhaseBound, v1alpha1.PhaseReleasing, v1alpha1.PhaseEnded} {
		assert.True(t, phases[phase], "none is %s", phase)
	}
}

// Two claims with an assigned Machine, one with its own, and two releases under pause, of two
// MachineSets, right after an agent was killed.
func TestARecordedGroupIsCarriedOnWith(t *testing.T) {
	md := recordedAs[clusterv1.MachineDeployment](t, "MachineDeployment")[0]
	objects := []client.Object{md}
	for _, c := range recordedAs[v1alpha1.MachineClaim](t, "MachineClaim") {
		objects = append(objects, c)
	}
	for _, m := range recordedAs[clusterv1.Machine](t, "Machine") {
		objects = append(objects, m)
	}
	for _, set := range recordedAs[clusterv1.MachineSet](t, "MachineSet") {
		objects = append(objects, set)
	}
	s, err := engineWith(t, objects...).read(t.Context(), uncached, client.ObjectKeyFromObject(md))
	require.NoError(t, err)
	require.NotNil(t, s.Ledger, "the ledger is this MachineDeployment's")

	d := protocol.Decide(s)
	next := s.Ledger
	if d.Ledger != nil {
		next = d.Ledger
	}
	assert.Equal(t, s.Ledger.Floor, next.Floor)
	assert.ElementsMatch(t, lo.Keys(s.Ledger.Pending), lo.Keys(next.Pending))
	assert.Equal(t, s.Group.Replicas, d.Replicas)
	for uid := range next.Releasing {
		assert.Contains(t, s.Ledger.Releasing, uid, "nothing else is removed")
	}
	assert.Empty(t, d.Refused)
	binds, releases := 0, 0
	for _, a := range d.Actions {
		switch a.Kind {
		case protocol.Bind:
			binds++
			assert.Equal(t, a.Machine.UID, s.Ledger.Pending[a.Claim.Spec.ClaimID].UID)
		case protocol.End:
			releases++
			assert.Equal(t, v1alpha1.PhaseReleasing, a.Claim.Status.Phase, "its Machine's instance is gone")
		default:
			assert.Equal(t, protocol.LowerSet, a.Kind)
		}
	}
	assert.Equal(t, 2, binds)
	assert.Equal(t, 2, releases)
	assert.Len(t, next.Releasing, 2, "their replicas are still to be given back")
}

func recorded(t *testing.T, file string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "recorded", file))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, into))
}

func recordedObjects(t *testing.T, kind string) []json.RawMessage {
	t.Helper()
	var list struct {
		Items []json.RawMessage `json:"items"`
	}
	recorded(t, "group.json", &list)
	found := lo.Filter(list.Items, func(item json.RawMessage, _ int) bool {
		var is struct {
			Kind string `json:"kind"`
		}
		require.NoError(t, json.Unmarshal(item, &is))
		return is.Kind == kind
	})
	require.NotEmpty(t, found, kind)
	return found
}

func recordedAs[T any](t *testing.T, kind string) []*T {
	t.Helper()
	return lo.Map(recordedObjects(t, kind), func(item json.RawMessage, _ int) *T {
		object := new(T)
		require.NoError(t, json.Unmarshal(item, object))
		return object
	})
}
