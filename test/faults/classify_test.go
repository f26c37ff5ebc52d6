package faults_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/test/faults"
)

const (
	capi  = "cluster.x-k8s.io"
	ours  = "agent.karpenter.cluster.x-k8s.io"
	empty = `{"v":1,"seq":1,"floor":1,"lastReplicas":2}`
)

// ledgers returns a JSON patch of a MachineDeployment that changes the ledger, the replicas, and
// more.
func ledgers(before, after string, was, shall int, more string) string {
	quote := func(text string) string {
		data, err := json.Marshal(text)
		if err != nil {
			panic(err)
		}
		return string(data)
	}
	const path = `"/metadata/annotations/agent.karpenter.cluster.x-k8s.io~1ledger"`
	patch := `[`
	if before != "" {
		patch += fmt.Sprintf(`{"op":"test","path":%s,"value":%s},`, path, quote(before))
	}
	patch += fmt.Sprintf(`{"op":"test","path":"/spec/replicas","value":%d},{"op":"add","path":%s,"value":%s}`, was, path, quote(after))
	if was != shall {
		patch += fmt.Sprintf(`,{"op":"replace","path":"/spec/replicas","value":%d}`, shall)
	}
	return patch + more + `]`
}

func claim(group, status string) string {
	return fmt.Sprintf(`{"metadata":{"name":"spoke.c"},"spec":{"clusterName":"spoke","claimID":"c","nodeGroup":%q},"status":%s}`, group, status)
}

// status returns a status of a claim on the group small.
func status(phase, reason, message string, events int) string {
	history := strings.TrimSuffix(strings.Repeat("{},", events), ",")
	return claim("small", fmt.Sprintf(`{"phase":%q,"reason":%q,"message":%q,"history":[%s]}`, phase, reason, message, history))
}

func TestEachStepOfTheProtocolHasItsClass(t *testing.T) {
	pending := func(entries string) string {
		return `{"v":1,"seq":2,"floor":1,"lastReplicas":2,"pending":{` + entries + `}}`
	}
	releasing := `{"v":1,"seq":2,"floor":1,"lastReplicas":2,"releasing":{"u":{"m":"m"}}}`
	const paused = `,{"op":"%s","path":"/metadata/annotations/cluster.x-k8s.io~1paused","value":"x"}`
	for _, tc := range []struct {
		class                              faults.Class
		verb, group, resource, subresource string
		body                               string
	}{
		{faults.ClaimCreated, "create", ours, "machineclaims", "", claim("small", "{}")},
		{faults.TombstoneCreated, "create", ours, "machineclaims", "", claim("", "{}")},
		{faults.ClaimMoved, "update", ours, "machineclaims", "", claim("small", "{}")},
		{faults.ClaimForgotten, "delete", ours, "machineclaims", "", "{}"},
		{faults.ClaimEntered, "update", ours, "machineclaims", "status", status("Pending", "WaitingForMachine", "", 1)},
		{faults.ClaimExplained, "update", ours, "machineclaims", "status", status("Pending", "WaitingForMachine", "", 2)},
		{faults.ClaimExplained, "update", ours, "machineclaims", "status", status("Bound", "MachineDeleting", "", 3)},
		{faults.ClaimExplained, "update", ours, "machineclaims", "status", status("Bound", "WaitingForInfrastructure", "", 3)},
		{faults.ClaimExplained, "update", ours, "machineclaims", "status", status("Bound", "WaitingForNode", "", 4)},
		{
			faults.ClaimExplained, "update", ours, "machineclaims", "status",
			status("Releasing", "DrainingNode", "Machine m has been deleting for more than a minute: pods", 4),
		},
		{faults.ClaimBound, "update", ours, "machineclaims", "status", status("Bound", "Bound", "bound to Machine lost", 2)},
		{faults.ClaimRestored, "update", ours, "machineclaims", "status", status("Bound", "Bound", "the claim's status was lost and was restored", 1)},
		{faults.NodeNoted, "update", ours, "machineclaims", "status", status("Bound", "NodeJoined", "", 3)},
		{faults.ReturnRequested, "update", ours, "machineclaims", "status", status("Bound", "ReturnRequested", "", 4)},
		{faults.ClaimReleasing, "update", ours, "machineclaims", "status", status("Releasing", "ReleaseRequested", "", 4)},
		{faults.ClaimReleasing, "update", ours, "machineclaims", "status", status("Releasing", "Collected", "", 4)},
		{faults.ClaimFailed, "update", ours, "machineclaims", "status", status("Releasing", "Failed", "", 4)},
		{faults.ClaimFailed, "update", ours, "machineclaims", "status", status("Releasing", "Late", "", 4)},
		{faults.ClaimEnded, "update", ours, "machineclaims", "status", status("Ended", "Released", "", 5)},
		{faults.TombstoneEngraved, "update", ours, "machineclaims", "status", claim("", `{"phase":"Ended","reason":"NeverMade"}`)},

		{faults.LedgerBegun, "patch", capi, "machinedeployments", "", ledgers("", pending(`"c":{}`), 1, 2, "")},
		{faults.LedgerBegun, "patch", capi, "machinedeployments", "", ledgers("{ broken", empty, 2, 2, "")},
		{faults.ReplicasRaised, "patch", capi, "machinedeployments", "", ledgers(empty, pending(`"c":{}`), 1, 2, "")},
		{faults.SpareEntered, "patch", capi, "machinedeployments", "", ledgers(empty, pending(`"c":{"m":"m","u":"u"}`), 2, 2, "")},
		{faults.MachineNamed, "patch", capi, "machinedeployments", "", ledgers(pending(`"c":{}`), pending(`"c":{"m":"m","u":"u"}`), 2, 2, "")},
		{faults.LedgerTidied, "patch", capi, "machinedeployments", "", ledgers(pending(`"c":{}`), empty, 2, 2, "")},
		{faults.ReleaseBegun, "patch", capi, "machinedeployments", "", ledgers(empty, releasing, 2, 2, "")},
		{faults.FloorChosen, "patch", capi, "machinedeployments", "", ledgers(
			empty, `{"v":1,"seq":2,"floor":1,"lastReplicas":2,"marking":["u"]}`, 2, 2, "")},
		{faults.FloorRaised, "patch", capi, "machinedeployments", "", ledgers(
			empty, `{"v":2,"seq":2,"floor":2,"lastReplicas":2,"returning":{"u":{"m":"m","c":"c"}}}`, 2, 2, "")},
		{faults.ReplicasLowered, "patch", capi, "machinedeployments", "", ledgers(releasing, empty, 2, 1, "")},
		{faults.PausePut, "patch", capi, "machinedeployments", "", ledgers(releasing, releasing, 2, 2, fmt.Sprintf(paused, "add"))},
		{faults.PauseRemoved, "patch", capi, "machinedeployments", "", ledgers(releasing, empty, 2, 1, fmt.Sprintf(paused, "remove"))},

		{faults.MachineLabelled, "patch", capi, "machines", "", `{"metadata":{"labels":{"agent.karpenter.cluster.x-k8s.io/claim":"c"}}}`},
		{faults.MachineLabelled, "patch", capi, "machines", "", `[{"op":"test","path":"/metadata/uid","value":"u"},` +
			`{"op":"add","path":"/metadata/labels/agent.karpenter.cluster.x-k8s.io~1claim","value":"c"}]`},
		{faults.MachineUnlabelled, "patch", capi, "machines", "", `{"metadata":{"labels":{"agent.karpenter.cluster.x-k8s.io/claim":null}}}`},
		{
			faults.MachineReturned, "patch", capi, "machines", "",
			`{"metadata":{"labels":{"` + ours + `/claim":null},"annotations":{"` + ours + `/floor":"true"}}}`,
		},
		{faults.MachineHeld, "patch", capi, "machines", "", `[{"op":"add","path":"/metadata/finalizers","value":["m","` + ours + `/release"]}]`},
		{faults.MachineHeld, "patch", capi, "machines", "", `{"metadata":{"resourceVersion":"7"}}`},
		{faults.FinalizerRemoved, "patch", capi, "machines", "", `[{"op":"add","path":"/metadata/finalizers","value":[]}]`},
		{faults.FinalizerRemoved, "patch", capi, "machines", "", `{"metadata":{"finalizers":null}}`},
		{faults.FloorMarked, "patch", capi, "machines", "", `{"metadata":{"annotations":{"` + ours + `/floor":"true"},"resourceVersion":"7"}}`},
		{faults.MachineDeleted, "delete", capi, "machines", "", `{"preconditions":{"uid":"u"}}`},

		{faults.SetPaused, "patch", capi, "machinesets", "", `{"metadata":{"annotations":{"cluster.x-k8s.io/paused":"x"}}}`},
		{faults.SetUnpaused, "patch", capi, "machinesets", "", `{"metadata":{"annotations":{"cluster.x-k8s.io/paused":null}}}`},
		{faults.SetLowered, "patch", capi, "machinesets", "", `{"metadata":{"annotations":{"x":"y"}},"spec":{"replicas":1}}`},

		{faults.Ignored, "create", "events.k8s.io", "events", "", `{}`},
		{faults.Ignored, "create", ours, "spokes", "", `{}`},
		{faults.Ignored, "patch", ours, "spokes", "status", `{}`},
	} {
		t.Run(string(tc.class), func(t *testing.T) {
			class, err := new(faults.Memory).Classify(&faults.Request{
				Verb: tc.verb, Group: tc.group, Resource: tc.resource, Subresource: tc.subresource, Namespace: "fleet", Name: "o", Body: []byte(tc.body),
			})
			require.NoError(t, err)
			require.Equal(t, tc.class, class)
		})
	}
}

func TestWhatOnlyTheMemoryKnows(t *testing.T) {
	var m faults.Memory
	create := &faults.Request{Verb: "create", Group: ours, Resource: "machineclaims", Namespace: "fleet", Body: []byte(claim("small", "{}"))}
	classify := func(r *faults.Request) faults.Class {
		class, err := m.Classify(r)
		require.NoError(t, err)
		return class
	}
	require.Equal(t, faults.ClaimCreated, classify(create))
	m.Lose("fleet", "spoke.c")
	require.Equal(t, faults.ClaimRemade, classify(create))

	adopt := &faults.Request{
		Verb: "create", Group: ours, Resource: "machineclaims", Namespace: "fleet",
		Body: []byte(`{"metadata":{"name":"spoke.a"},"spec":{"claimID":"a","nodeGroup":"small","adopt":"m"}}`),
	}
	require.Equal(t, faults.ClaimCreated, classify(adopt))
	after := `{"v":1,"seq":2,"floor":0,"lastReplicas":2,"pending":{"a":{"m":"m","u":"u","adopted":true}}}`
	enter := &faults.Request{Verb: "patch", Group: capi, Resource: "machinedeployments", Body: []byte(ledgers(empty, after, 2, 2, ""))}
	require.Equal(t, faults.AdoptEntered, classify(enter))
}

func TestUnknownWritesAreTold(t *testing.T) {
	for name, r := range map[string]faults.Request{
		"another resource":          {Verb: "create", Resource: "configmaps", Body: []byte("{}")},
		"another change of Machine": {Verb: "patch", Group: capi, Resource: "machines", Body: []byte(`{"metadata":{"annotations":{"x":"y"}}}`)},
		"a spec":                    {Verb: "patch", Group: capi, Resource: "machines", Body: []byte(`[{"op":"add","path":"/spec/x","value":1}]`)},
		"another reason": {
			Verb: "update", Group: ours, Resource: "machineclaims", Subresource: "status", Body: []byte(status("Bound", "New", "", 1)),
		},
		"replicas without a ledger": {
			Verb: "patch", Group: capi, Resource: "machinedeployments", Body: []byte(`[{"op":"replace","path":"/spec/replicas","value":1}]`),
		},
		"a deletion": {Verb: "delete", Group: capi, Resource: "machinesets", Body: []byte("{}")},
	} {
		t.Run(name, func(t *testing.T) {
			class, err := new(faults.Memory).Classify(&r)
			require.Equal(t, faults.Unknown, class)
			require.Error(t, err)
		})
	}
}

func TestReadsHaveNoClass(t *testing.T) {
	class, err := new(faults.Memory).Classify(&faults.Request{Verb: "watch", Resource: "machines"})
	require.NoError(t, err)
	require.Empty(t, class)
}

func TestEachClassIsListedOnce(t *testing.T) {
	seen := map[faults.Class]bool{}
	for _, c := range faults.Classes {
		require.NotContains(t, seen, c)
		seen[c] = true
	}
	require.Len(t, faults.PointsOf(faults.Classes...), 3*len(faults.Classes))
}
