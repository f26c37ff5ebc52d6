package conformance_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// brokenEnv is a target that publishes something else than what is applied.
type brokenEnv struct {
	*fakeEnv

	tb      testing.TB
	applied []conformance.NodePoolSet
	apply   func(e *brokenEnv, set conformance.NodePoolSet)
	remove  func(e *brokenEnv, name string)
}

// Patience is short: what is missing does not come.
func (*brokenEnv) Patience() time.Duration { return time.Second }

func (e *brokenEnv) ApplyNodePoolSet(tb testing.TB, set conformance.NodePoolSet) {
	tb.Helper()
	set.NodePools, set.NodeClasses = slices.Clone(set.NodePools), slices.Clone(set.NodeClasses)
	if e.apply == nil {
		e.fakeEnv.ApplyNodePoolSet(tb, set)
	} else {
		e.apply(e, set)
	}
	e.applied = append(e.applied, set)
}

func (e *brokenEnv) DeleteNodePoolSet(tb testing.TB, name string) {
	tb.Helper()
	if e.remove == nil {
		e.fakeEnv.DeleteNodePoolSet(tb, name)
	} else {
		e.remove(e, name)
	}
}

// published changes the objects that the target shows.
func (e *brokenEnv) published(change func(*agentv1alpha1.PublishedObject)) {
	e.tb.Helper()
	response, err := e.Client().NodePools.ListPublishedObjects(e.tb.Context(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: e.Cluster()})
	require.NoError(e.tb, err)
	for _, object := range response.GetObjects() {
		change(object)
		e.agent.Publish(e.Cluster(), object)
	}
}

// Each behaviour of publishing fails on a target that breaks it, at what it breaks.
func TestATargetThatPublishesWronglyFails(t *testing.T) {
	t.Parallel()
	type env = *brokenEnv
	for id, broken := range map[string]struct {
		brokenEnv
		message string
	}{
		"nodepools.published": {message: "any text", brokenEnv: brokenEnv{
			apply: func(e env, set conformance.NodePoolSet) {
				for i := range set.NodePools {
					set.NodePools[i].Annotations = nil
				}
				e.fakeEnv.ApplyNodePoolSet(e.tb, set)
			},
		}},
		"nodepools.changed": {message: "the same revision with another spec as with its first spec", brokenEnv: brokenEnv{
			apply: func(e env, set conformance.NodePoolSet) {
				e.fakeEnv.ApplyNodePoolSet(e.tb, set)
				e.published(func(object *agentv1alpha1.PublishedObject) { object.Revision = "1" })
			},
		}},
		"nodepools.policy": {message: "the policy Delete", brokenEnv: brokenEnv{
			apply: func(e env, set conformance.NodePoolSet) {
				set.DeletionPolicy = ""
				e.fakeEnv.ApplyNodePoolSet(e.tb, set)
			},
		}},
		"nodepools.withdrawn": {message: "NodePoolSets []", brokenEnv: brokenEnv{
			apply: func(e env, set conformance.NodePoolSet) {
				if len(e.applied) == 0 {
					e.fakeEnv.ApplyNodePoolSet(e.tb, set)
				} else {
					e.fakeEnv.DeleteNodePoolSet(e.tb, set.Name)
				}
			},
		}},
		"nodepools.set-deleted": {message: "NodePoolSets [deleted fleet]", brokenEnv: brokenEnv{
			remove: func(e env, name string) {
				e.agent.ApplyNodePoolSet(fakeagent.NodePoolSet{Name: name})
			},
		}},
		"nodepools.two-sets": {message: `expected: "z-older"`, brokenEnv: brokenEnv{
			// The newest is the first.
			apply: func(e env, set conformance.NodePoolSet) {
				e.fakeEnv.DeleteNodePoolSet(e.tb, set.Name)
				for _, other := range e.applied {
					e.fakeEnv.DeleteNodePoolSet(e.tb, other.Name)
				}
				for _, next := range append([]conformance.NodePoolSet{set}, e.applied...) {
					e.fakeEnv.ApplyNodePoolSet(e.tb, next)
				}
			},
		}},
		"nodepools.problem": {message: "both entries", brokenEnv: brokenEnv{
			apply: func(e env, set conformance.NodePoolSet) {
				set.NodePools = lo.Reject(set.NodePools, func(p nodepoolset.Template, _ int) bool { return strings.Contains(p.Labels["team"], " ") })
				e.fakeEnv.ApplyNodePoolSet(e.tb, set)
			},
		}},
		"nodepools.mirror": {message: "and the mirror map[", brokenEnv: brokenEnv{
			// A stream that is silent does not follow.
			apply: func(e env, set conformance.NodePoolSet) {
				e.agent.FreezeStreams(len(e.applied) > 0)
				e.fakeEnv.ApplyNodePoolSet(e.tb, set)
			},
		}},
	} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			verdict := conformance.Check(t.Context(), conformance.Checks{
				NewEnv: func(tb testing.TB) conformance.Env {
					tb.Helper()
					own := broken.brokenEnv
					own.fakeEnv, own.tb = fakeEnvWith(tb), tb
					return &own
				},
				Only: func(other string) bool { return other == id },
			})
			require.Equal(t, "conformance: FAIL passed=0 failed=1 skipped=0", verdict.Line())
			require.Contains(t, verdict.Results[0].Message, broken.message)
		})
	}
}

// without is an Env without what is OPTIONAL.
type without struct{ conformance.Env }

// An Env of another implementation may be older than the NodePoolSets.
func TestAnEnvWithoutNodePoolSetsIsNoFailure(t *testing.T) {
	verdict := conformance.Check(t.Context(), conformance.Checks{
		NewEnv: func(tb testing.TB) conformance.Env { tb.Helper(); return without{newFakeEnv(tb)} },
		Only:   func(id string) bool { return strings.HasPrefix(id, "nodepools.") },
	})
	requirePass(t, verdict, 3, 8)
	for _, r := range verdict.Results {
		if r.Outcome == conformance.Skipped {
			require.Equal(t, "the control over the target cannot apply NodePoolSets", r.Message, r.ID)
		}
	}
}

// An agent without the feature serves none of its methods.
func TestAnAgentThatPublishesNothingIsNoFailure(t *testing.T) {
	names := lo.Without(features.All(), features.NodePools, features.ClusterAutoscaler)
	verdict := conformance.Check(t.Context(), conformance.Checks{
		NewEnv: func(tb testing.TB) conformance.Env {
			tb.Helper()
			env := fakeEnvWith(tb, fakeagent.WithFeatures(names...))
			for _, method := range []string{"ListPublishedObjects", "WatchPublishedObjects", "ReportNodePools"} {
				env.agent.Fail(method, fakeagent.Always, status.Error(codes.Unimplemented, "no such service"))
			}
			return env
		},
		Only: func(id string) bool { return strings.HasPrefix(id, "nodepools.") || strings.HasPrefix(id, "requests.") },
	})
	requirePass(t, verdict, 4, 11)
}
