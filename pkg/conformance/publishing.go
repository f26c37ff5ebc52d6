package conformance

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// These are keys of published objects.
const (
	poolKey  = "NodePool/default"
	classKey = "ClusterAPINodeClass/default"
)

var publishingCases = []testCase{
	{"nodepools.published", fault(), "an entry is listed as it was written, and retained unless told otherwise, and watch sends it", func(s *suite) {
		to := s.publishing()
		next := s.watchPublished(nil)
		set := poolSet("fleet", entry("default", 10))
		set.NodePools[0].Labels = map[string]string{"example.com/team": "a"}
		set.NodePools[0].Annotations = map[string]string{"example.com/note": "any text: a, b\n"}
		set.NodePools[0].Spec = json.RawMessage(`{"weight": 10, "big": 9007199254740993, "template": {"spec": {"taints": [{"key": "a"}], "none": {}}}}`)
		set.NodeClasses = []nodepoolset.Template{entry("default", 20)}
		to.ApplyNodePoolSet(s.TB, set)
		objects := s.untilPublished("both entries", func(objects published, _ []string) bool { return len(objects) == 2 })
		for key, wanted := range map[string]struct {
			kind     string
			template nodepoolset.Template
		}{
			poolKey: {"NodePool", set.NodePools[0]}, classKey: {"ClusterAPINodeClass", set.NodeClasses[0]},
		} {
			object := objects[key]
			require.NotNil(s, object, "%s is not among %v", key, lo.Keys(objects))
			require.Equal(s, wanted.kind, object.GetKind())
			require.Equal(s, "default", object.GetName())
			require.Equal(s, "fleet", object.GetSet())
			require.Equal(s, wanted.template.Labels, object.GetLabels())
			require.Equal(s, wanted.template.Annotations, object.GetAnnotations())
			require.JSONEq(s, string(wanted.template.Spec), object.GetSpecJson())
			require.Equal(s, agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN, object.GetDeletionPolicy())
			require.NotEmpty(s, object.GetRevision())
			require.Empty(s, object.GetProblem())
		}
		require.Contains(s, objects[poolKey].GetSpecJson(), "9007199254740993", "a number has become another one")
		response, err := s.Client().NodePools.ListPublishedObjects(s.bounded(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: s.Cluster()})
		require.NoError(s, err)
		require.Equal(s, []string{classKey, poolKey},
			lo.Map(response.GetObjects(), func(o *agentv1alpha1.PublishedObject, _ int) string { return client.PublishedKey(o) }))
		require.Equal(s, []string{"fleet"}, response.GetSets())
		missing := lo.Assign(objects)
		skipUntil(func() bool {
			if object := next().GetUpsert(); object != nil && proto.Equal(missing[client.PublishedKey(object)], object) {
				delete(missing, client.PublishedKey(object))
			}
			return len(missing) == 0
		})
	}},

	{"nodepools.changed", fault(), "other content has another revision, and the same content has the same", func(s *suite) {
		to := s.publishing()
		next := s.watchPublished(nil)
		seen := map[string]string{}
		apply := func(what string, set NodePoolSet, shown func(*agentv1alpha1.PublishedObject) bool) published {
			s.Helper()
			to.ApplyNodePoolSet(s.TB, set)
			objects := s.untilPublished(what, func(objects published, _ []string) bool { return shown(objects[poolKey]) })
			skipUntil(func() bool { return proto.Equal(next().GetUpsert(), objects[poolKey]) })
			return objects
		}
		other := func(what string, set NodePoolSet, shown func(*agentv1alpha1.PublishedObject) bool) published {
			s.Helper()
			objects := apply(what, set, shown)
			revision := objects[poolKey].GetRevision()
			require.NotEmpty(s, revision)
			require.NotContains(s, seen, revision, "it has the same revision with %s as with %s", what, seen[revision])
			seen[revision] = what
			return objects
		}
		set := poolSet("fleet", entry("default", 1), entry("other", 1))
		weighs := func(n int) func(*agentv1alpha1.PublishedObject) bool {
			return func(o *agentv1alpha1.PublishedObject) bool { return weight(o) == n }
		}
		first := other("its first spec", set, weighs(1))
		set.NodePools[0].Spec = entry("default", 2).Spec
		other("another spec", set, weighs(2))
		set.NodePools[0].Labels = map[string]string{"team": "a"}
		other("a label", set, func(o *agentv1alpha1.PublishedObject) bool { return o.GetLabels()["team"] == "a" })
		set.NodePools[0].Annotations = map[string]string{"note": "a"}
		last := other("an annotation", set, func(o *agentv1alpha1.PublishedObject) bool { return o.GetAnnotations()["note"] == "a" })
		require.True(s, proto.Equal(first["NodePool/other"], last["NodePool/other"]), "%v became %v", first["NodePool/other"], last["NodePool/other"])
		set.DeletionPolicy = "Delete"
		other("another deletion policy", set, func(o *agentv1alpha1.PublishedObject) bool {
			return o.GetDeletionPolicy() == agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE
		})
		again := apply("its first content again", poolSet("fleet", entry("default", 1), entry("other", 1)), weighs(1))
		require.True(s, proto.Equal(first[poolKey], again[poolKey]), "%v became %v", first[poolKey], again[poolKey])
	}},

	{"nodepools.policy", fault(), "the deletion policy of a NodePoolSet is that of each of its objects", func(s *suite) {
		to := s.publishing()
		set := poolSet("fleet", entry("default", 1))
		set.NodeClasses = []nodepoolset.Template{entry("default", 1)}
		to.ApplyNodePoolSet(s.TB, poolSet("other", entry("other", 1)))
		for _, wanted := range []struct {
			written string
			shown   agentv1alpha1.DeletionPolicy
		}{
			{"Delete", agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE},
			{"Retain", agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN},
		} {
			set.DeletionPolicy = wanted.written
			to.ApplyNodePoolSet(s.TB, set)
			objects := s.untilPublished("the policy "+wanted.written, func(objects published, _ []string) bool {
				return objects[poolKey].GetDeletionPolicy() == wanted.shown && objects[classKey].GetDeletionPolicy() == wanted.shown
			})
			require.Equal(s, agentv1alpha1.DeletionPolicy_DELETION_POLICY_RETAIN, objects["NodePool/other"].GetDeletionPolicy())
		}
	}},

	{"nodepools.withdrawn", fault(), "an entry that is removed is no longer published, and its NodePoolSet is still listed", func(s *suite) {
		to := s.publishing()
		set := poolSet("fleet", entry("default", 1), entry("removed", 1))
		to.ApplyNodePoolSet(s.TB, set)
		before := s.untilPublished("both entries", func(objects published, _ []string) bool { return len(objects) == 2 })
		next := s.watchPublished(before)
		set.NodePools = set.NodePools[:1]
		to.ApplyNodePoolSet(s.TB, set)
		skipUntil(func() bool { return next().GetRemovedKey() == "NodePool/removed" })
		s.untilPublished("only the entry that is left, as it was", func(objects published, sets []string) bool {
			return len(objects) == 1 && proto.Equal(objects[poolKey], before[poolKey]) && slices.Equal(sets, []string{"fleet"})
		})
	}},

	{"nodepools.set-deleted", fault(), "a NodePoolSet that is deleted is not listed, and nothing of it is published", func(s *suite) {
		to := s.publishing()
		to.ApplyNodePoolSet(s.TB, poolSet("deleted", entry("first", 1), entry("second", 1)))
		to.ApplyNodePoolSet(s.TB, poolSet("fleet", entry("default", 1)))
		before := s.untilPublished("every entry", func(objects published, sets []string) bool {
			return len(objects) == 3 && slices.Equal(sets, []string{"deleted", "fleet"})
		})
		next := s.watchPublished(before)
		to.DeleteNodePoolSet(s.TB, "deleted")
		removed := map[string]bool{}
		skipUntil(func() bool {
			removed[next().GetRemovedKey()] = true
			return removed["NodePool/first"] && removed["NodePool/second"]
		})
		s.untilPublished("only the other NodePoolSet, as it was", func(objects published, sets []string) bool {
			return len(objects) == 1 && proto.Equal(objects[poolKey], before[poolKey]) && slices.Equal(sets, []string{"fleet"})
		})
	}},

	{"nodepools.two-sets", fault(), "the older of two NodePoolSets publishes an object of both, and after its deletion the other", func(s *suite) {
		to := s.publishing()
		// Their names are in the other order than their ages.
		const older, newer = "z-older", "a-newer"
		to.ApplyNodePoolSet(s.TB, poolSet(older, entry("default", 1)))
		s.untilPublished("the first", func(objects published, _ []string) bool { return weight(objects[poolKey]) == 1 })
		to.ApplyNodePoolSet(s.TB, poolSet(newer, entry("default", 2), entry("own", 2)))
		objects := s.untilPublished("what the second has alone", func(objects published, sets []string) bool {
			return objects["NodePool/own"] != nil && slices.Equal(sets, []string{newer, older})
		})
		require.Len(s, objects, 2)
		require.Equal(s, older, objects[poolKey].GetSet())
		require.Equal(s, 1, weight(objects[poolKey]))
		require.Equal(s, newer, objects["NodePool/own"].GetSet())

		next := s.watchPublished(objects)
		to.DeleteNodePoolSet(s.TB, older)
		var event *agentv1alpha1.WatchPublishedObjectsResponse
		skipUntil(func() bool {
			event = next()
			require.NotEqual(s, poolKey, event.GetRemovedKey(), "the other NodePoolSet publishes it")
			return event.GetUpsert() != nil && client.PublishedKey(event.GetUpsert()) == poolKey && event.GetUpsert().GetSet() == newer
		})
		s.untilPublished("the object of the other NodePoolSet", func(objects published, sets []string) bool {
			return len(objects) == 2 && proto.Equal(objects[poolKey], event.GetUpsert()) && slices.Equal(sets, []string{newer})
		})

		to.ApplyNodePoolSet(s.TB, poolSet(older, entry("default", 1), entry("again", 1)))
		objects = s.untilPublished("what the first has alone", func(objects published, _ []string) bool { return objects["NodePool/again"] != nil })
		require.Equal(s, newer, objects[poolKey].GetSet(), "it is the older one now")
	}},

	{"nodepools.problem", fault(), "an entry that cannot be applied has a problem and no spec, and the others are published", func(s *suite) {
		to := s.publishing()
		set := poolSet("fleet", entry("default", 1), entry("good", 1))
		set.NodePools[0].Labels = map[string]string{"team": "no value of a label"}
		to.ApplyNodePoolSet(s.TB, set)
		objects := s.untilPublished("both entries", func(objects published, _ []string) bool { return len(objects) == 2 })
		bad, good := objects[poolKey], objects["NodePool/good"]
		require.NotEmpty(s, bad.GetProblem())
		require.Empty(s, bad.GetSpecJson())
		require.Equal(s, "fleet", bad.GetSet())
		require.NotEmpty(s, bad.GetRevision())
		require.Empty(s, good.GetProblem())
		require.Equal(s, 1, weight(good))
		set.NodePools[0].Labels["team"] = "a"
		to.ApplyNodePoolSet(s.TB, set)
		objects = s.untilPublished("the entry that was mended", func(objects published, _ []string) bool {
			return objects[poolKey].GetProblem() == "" && weight(objects[poolKey]) == 1
		})
		require.NotEqual(s, bad.GetRevision(), objects[poolKey].GetRevision())
		require.True(s, proto.Equal(good, objects["NodePool/good"]))
	}},

	{"nodepools.mirror", fault(), "a mirror follows", func(s *suite) {
		to := s.publishing()
		to.ApplyNodePoolSet(s.TB, poolSet("fleet", entry("default", 1)))
		mirror := s.Client().MirrorPublishedObjects(s.Cluster())
		ctx := s.bounded()
		go func() { _ = mirror.Run(ctx) }() // It ends with the context.
		require.NoError(s, mirror.WaitForSync(ctx))
		follows := func(what string, wanted func(published) bool) {
			s.Helper()
			s.eventually("the mirror shows "+what, func() error {
				listed, _ := s.published()
				mirrored, _ := mirror.List()
				shown := lo.KeyBy(mirrored, client.PublishedKey)
				if !wanted(listed) || len(shown) != len(listed) ||
					!lo.EveryBy(lo.Keys(listed), func(key string) bool { return proto.Equal(listed[key], shown[key]) }) {
					return fmt.Errorf("a list shows %v, and the mirror %v", listed, shown)
				}
				return nil
			})
		}
		follows("the first entry", func(listed published) bool { return len(listed) == 1 && weight(listed[poolKey]) == 1 })
		to.ApplyNodePoolSet(s.TB, poolSet("fleet", entry("default", 2), entry("other", 1)))
		follows("a change and another entry", func(listed published) bool { return len(listed) == 2 && weight(listed[poolKey]) == 2 })
		to.ApplyNodePoolSet(s.TB, poolSet("fleet", entry("other", 1)))
		follows("that one is removed", func(listed published) bool { return len(listed) == 1 && listed["NodePool/other"] != nil })
		to.DeleteNodePoolSet(s.TB, "fleet")
		follows("nothing", func(listed published) bool { return len(listed) == 0 })
	}},
}

// published are published objects by their keys.
type published = map[string]*agentv1alpha1.PublishedObject

// publishing returns what applies NodePoolSets. It skips the rest of the case if there is nothing,
// or if the agent publishes none.
func (s *suite) publishing() Publishing {
	s.Helper()
	servesNodePools(s)
	to, ok := s.Env.(Publishing)
	if !ok {
		s.Skip("the control over the target cannot apply NodePoolSets")
	}
	return to
}

func poolSet(name string, pools ...nodepoolset.Template) NodePoolSet {
	return NodePoolSet{Name: name, NodePools: pools}
}

// entry returns an entry whose spec has this weight.
func entry(name string, weight int) nodepoolset.Template {
	return nodepoolset.Template{Name: name, Spec: fmt.Appendf(nil, `{"weight":%d}`, weight)}
}

// weight returns the weight in the spec of an object, or 0 without one.
func weight(object *agentv1alpha1.PublishedObject) int {
	var spec struct {
		Weight int `json:"weight"`
	}
	if json.Unmarshal([]byte(object.GetSpecJson()), &spec) != nil {
		return 0
	}
	return spec.Weight
}

// published lists the objects and the names of the NodePoolSets.
func (s *suite) published() (published, []string) {
	s.Helper()
	response, err := s.Client().NodePools.ListPublishedObjects(s.bounded(), &agentv1alpha1.ListPublishedObjectsRequest{Cluster: s.Cluster()})
	require.NoError(s, err)
	return lo.KeyBy(response.GetObjects(), client.PublishedKey), response.GetSets()
}

// untilPublished waits until wanted accepts what a list shows.
func (s *suite) untilPublished(what string, wanted func(published, []string) bool) published {
	s.Helper()
	var objects published
	s.eventually("a list shows "+what, func() error {
		var sets []string
		objects, sets = s.published()
		if !wanted(objects, sets) {
			return fmt.Errorf("it shows %v of the NodePoolSets %v", lo.Values(objects), sets)
		}
		return nil
	})
	return objects
}

// watchPublished returns a function that returns the next event after the stream has shown shown,
// which may be nil: a list can be newer than what a watch shows at first.
func (s *suite) watchPublished(shown published) (next func() *agentv1alpha1.WatchPublishedObjectsResponse) {
	s.Helper()
	stream, err := s.Client().NodePools.WatchPublishedObjects(s.bounded(), &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: s.Cluster()})
	require.NoError(s, err)
	next = func() *agentv1alpha1.WatchPublishedObjectsResponse {
		s.Helper()
		response, err := stream.Recv()
		require.NoError(s, err)
		return response
	}
	missing := lo.Assign(shown)
	synced := false
	skipUntil(func() bool {
		event := next()
		synced = synced || event.GetSynced() != nil
		if object := event.GetUpsert(); object != nil && proto.Equal(missing[client.PublishedKey(object)], object) {
			delete(missing, client.PublishedKey(object))
		}
		return synced && len(missing) == 0
	})
	return next
}
