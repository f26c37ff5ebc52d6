package streams_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/streams"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var spoke = &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "spoke"}

const (
	pending   = agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING
	bound     = agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	releasing = agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
	ended     = agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED

	patience = time.Minute
)

// told is a record of claims, with methods to fill it.
type told struct {
	*streams.Record[*agentv1alpha1.Claim]

	clock *clocktesting.FakePassiveClock
}

func newTold() told {
	clock := clocktesting.NewFakePassiveClock(time.Unix(1, 0))
	return told{streams.New("a watcher", streams.Claims(spoke, "karpenter"), streams.Options{Patience: patience, Clock: clock}), clock}
}

func claim(id string, phase agentv1alpha1.ClaimPhase) *agentv1alpha1.Claim {
	return &agentv1alpha1.Claim{Cluster: spoke, ClaimId: id, NodeGroupId: "fleet/workers", Holder: "karpenter", Phase: phase}
}

func (r told) shows(claims ...*agentv1alpha1.Claim) {
	for _, c := range claims {
		r.Event(streams.Event[*agentv1alpha1.Claim]{Kind: streams.Upsert, Object: c})
	}
}

func (r told) removes(id string) {
	r.Event(streams.Event[*agentv1alpha1.Claim]{Kind: streams.Removed, Key: id})
}

func (r told) says(kind streams.Kind) { r.Event(streams.Event[*agentv1alpha1.Claim]{Kind: kind}) }

// begins opens a stream whose snapshot has these claims.
func (r told) begins(claims ...*agentv1alpha1.Claim) {
	r.Open()
	r.shows(claims...)
	r.says(streams.Synced)
}

func (r told) lists(claims ...*agentv1alpha1.Claim) { r.List()(claims, 0) }

// waits keeps a stream open for longer than it may withhold an event.
func (r told) waits() {
	r.clock.SetTime(r.clock.Now().Add(patience + time.Second))
	r.says(streams.Heartbeat)
}

func TestWhatAWatcherMayBeTold(t *testing.T) {
	a, b := claim("a", pending), claim("b", pending)
	other := claim("a", pending)
	other.Cluster = &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "other"}
	theirs := claim("a", pending)
	theirs.Holder = "somebody"
	on := func(machine string) *agentv1alpha1.Claim {
		c := claim("a", bound)
		c.Machine = &agentv1alpha1.Machine{Uid: machine}
		return c
	}
	late := claim("a", ended)
	late.NodeGroupId = ""
	released := claim("a", releasing)
	released.ReleasedAt = timestamppb.New(time.Unix(2, 0))
	for name, test := range map[string]struct {
		stream func(told)
		wrong  string // "" for no violation
	}{
		// Valid streams.
		"a claim's life": {stream: func(r told) {
			r.begins()
			r.shows(a, on("m"), released, claim("b", ended))
			r.removes("b")
		}},
		"changes that a slow reader does not see": {stream: func(r told) { r.begins(a); r.shows(claim("a", ended)) }},
		"what vanished while no stream was open":  {stream: func(r told) { r.begins(a, b); r.Ended(); r.begins(b); r.lists(b); r.waits() }},
		"what vanished before a resync": {stream: func(r told) {
			r.begins(a, b)
			r.says(streams.Resync)
			r.shows(b)
			r.says(streams.Synced)
			r.lists(b)
			r.waits()
		}},
		"a snapshot from before a removal that follows": {stream: func(r told) { r.begins(a); r.lists(); r.removes("a"); r.waits() }},
		"a list that is ahead of the stream":            {stream: func(r told) { r.begins(a); r.lists(on("m")); r.shows(on("m")); r.waits() }},
		"a list that was under way for long": {stream: func(r told) {
			r.begins(a)
			answer := r.List()
			r.shows(on("m"))
			answer([]*agentv1alpha1.Claim{a}, 0)
			r.waits()
		}},
		"a stream that ends in time":                   {stream: func(r told) { r.begins(a); r.lists(b); r.Ended(); r.begins(b); r.waits() }},
		"a forgotten claim that is released once more": {stream: func(r told) { r.begins(a); r.removes("a"); r.shows(late); r.removes("a") }},
		"a claim whose state was lost": {stream: func(r told) {
			r.begins(on("m"))
			r.Excuse("a")
			r.shows(a)
		}},

		// Violations of order.
		"a phase that goes back":                     {wrong: "goes back", stream: func(r told) { r.begins(released); r.shows(on("m")) }},
		"a phase that goes back on the next stream":  {wrong: "goes back", stream: func(r told) { r.begins(claim("a", ended)); r.Ended(); r.begins(a) }},
		"another machine":                            {wrong: "its machine was m", stream: func(r told) { r.begins(on("m")); r.shows(on("n")) }},
		"a release that is taken back":               {wrong: "time of release", stream: func(r told) { r.begins(released); r.shows(claim("a", ended)) }},
		"a claim that comes back":                    {wrong: "comes back", stream: func(r told) { r.begins(a); r.removes("a"); r.shows(a) }},
		"a claim that comes back on the next stream": {wrong: "comes back", stream: func(r told) { r.begins(a); r.removes("a"); r.Ended(); r.begins(a) }},
		"a claim that comes back after a snapshot":   {wrong: "comes back", stream: func(r told) { r.begins(a); r.Ended(); r.begins(); r.shows(a) }},

		// Violations of completeness.
		"a claim that a snapshot lacks":        {wrong: "b is missing", stream: func(r told) { r.begins(a); r.lists(a, b); r.waits() }},
		"a change that is not told":            {wrong: "a is {", stream: func(r told) { r.begins(a); r.lists(on("m")); r.waits() }},
		"a removal that is not told":           {wrong: "a is gone", stream: func(r told) { r.begins(a); r.lists(); r.waits() }},
		"a marker too many":                    {wrong: "twice", stream: func(r told) { r.begins(a); r.says(streams.Synced) }},
		"a removal of what was never shown":    {wrong: "never showed it", stream: func(r told) { r.begins(a); r.removes("b") }},
		"an object without a key":              {wrong: "without a key", stream: func(r told) { r.begins(claim("", pending)) }},
		"a change that another one stands for": {wrong: "b is missing", stream: func(r told) { r.begins(a); r.lists(a, b); r.shows(on("m")); r.waits() }},

		// Gaps.
		"what vanished while no stream was open is shown": {wrong: "a is gone", stream: func(r told) {
			r.begins(a, b)
			r.Ended()
			r.begins(a, b)
			r.lists(b)
			r.waits()
		}},
		"what vanished before a resync is shown": {wrong: "a is gone", stream: func(r told) {
			r.begins(a, b)
			r.says(streams.Resync)
			r.shows(a, b)
			r.says(streams.Synced)
			r.lists(b)
			r.waits()
		}},

		// Objects that are not the watcher's.
		"a claim of another Cluster": {wrong: "Cluster fleet/other", stream: func(r told) { r.begins(other) }},
		"another holder's claim":     {wrong: "held by somebody", stream: func(r told) { r.begins(); r.shows(theirs) }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTold()
			test.stream(r)
			_, wrong := r.Check()
			if test.wrong == "" {
				assert.Empty(t, wrong)
				return
			}
			require.Len(t, wrong, 1)
			assert.Contains(t, wrong[0], test.wrong)
		})
	}
}

func TestNodeGroupsAtOneGenerationAreTheSame(t *testing.T) {
	group := func(replicas int32) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{Cluster: spoke, Id: "fleet/workers", Replicas: replicas}
	}
	for name, test := range map[string]struct {
		listed     int32
		generation int64
		wrong      bool
	}{
		"the same":         {1, 7, false},
		"a later list":     {2, 8, false},
		"another snapshot": {2, 7, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := streams.New("a watcher", streams.NodeGroups(spoke), streams.Options{Patience: patience})
			r.Open()
			r.Event(streams.Event[*agentv1alpha1.NodeGroup]{Kind: streams.Upsert, Object: group(1)})
			r.Event(streams.Event[*agentv1alpha1.NodeGroup]{Kind: streams.Synced, Generation: 7})
			r.List()([]*agentv1alpha1.NodeGroup{group(test.listed)}, test.generation)
			_, wrong := r.Check()
			assert.Equal(t, test.wrong, len(wrong) > 0, wrong)
		})
	}
	t.Run("a generation that goes back", func(t *testing.T) {
		r := streams.New("a watcher", streams.NodeGroups(spoke), streams.Options{Patience: patience})
		r.Open()
		for _, e := range []streams.Event[*agentv1alpha1.NodeGroup]{
			{Kind: streams.Synced, Generation: 7}, {Kind: streams.Resync}, {Kind: streams.Synced, Generation: 6},
		} {
			r.Event(e)
		}
		_, wrong := r.Check()
		require.Len(t, wrong, 1)
		assert.Contains(t, wrong[0], "from generation 7 to 6")
	})
}

func TestWhatAMachineMayBecome(t *testing.T) {
	machine := func(change func(*agentv1alpha1.Machine)) *agentv1alpha1.Machine {
		m := &agentv1alpha1.Machine{Cluster: spoke, Name: "m", Uid: "1", ProviderId: "p", NodeName: "n", DeletedAt: timestamppb.New(time.Unix(2, 0))}
		change(m)
		return m
	}
	same := func(*agentv1alpha1.Machine) {}
	for name, test := range map[string]struct {
		before, after func(*agentv1alpha1.Machine)
		wrong         string
	}{
		"deleted":             {before: func(m *agentv1alpha1.Machine) { m.DeletedAt = nil }, after: same},
		"given to a claim":    {before: same, after: func(m *agentv1alpha1.Machine) { m.ClaimId = "a" }},
		"another UID":         {wrong: "UID", before: same, after: func(m *agentv1alpha1.Machine) { m.Uid = "2" }},
		"another provider ID": {wrong: "provider ID", before: same, after: func(m *agentv1alpha1.Machine) { m.ProviderId = "q" }},
		"no provider ID":      {wrong: "provider ID", before: same, after: func(m *agentv1alpha1.Machine) { m.ProviderId = "" }},
		"another Node":        {wrong: "Node", before: same, after: func(m *agentv1alpha1.Machine) { m.NodeName = "o" }},
		"alive again":         {wrong: "deletion", before: same, after: func(m *agentv1alpha1.Machine) { m.DeletedAt = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			why := streams.Machines(spoke).Backward(machine(test.before), machine(test.after))
			if test.wrong == "" {
				assert.Empty(t, why)
			} else {
				assert.Contains(t, why, test.wrong)
			}
		})
	}
}
