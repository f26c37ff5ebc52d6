package fakeagent_test

import (
	"encoding/json"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func template(name, spec string) nodepoolset.Template {
	return nodepoolset.Template{Name: name, Spec: json.RawMessage(spec)}
}

// published returns what is published to the default Cluster, by kind and name, and the sets.
func published(t *testing.T, agent *fakeagent.Agent) (map[string]*agentv1alpha1.PublishedObject, []string) {
	t.Helper()
	response, err := agent.Client().NodePools.ListPublishedObjects(t.Context(),
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: fakeagent.DefaultCluster()})
	require.NoError(t, err)
	return lo.KeyBy(response.GetObjects(), client.PublishedKey), response.GetSets()
}

func TestTheSameContentHasTheSameRevision(t *testing.T) {
	agent := start(t)
	revision := func(spec string) string {
		agent.ApplyNodePoolSet(fakeagent.NodePoolSet{Name: "fleet", NodePools: []nodepoolset.Template{template("default", spec)}})
		objects, _ := published(t, agent)
		return objects["NodePool/default"].GetRevision()
	}
	first := revision(`{"a": 1, "b": {"d": 2, "c": 3}}`)
	require.Equal(t, first, revision(`{"b":{"c":3,"d":2},"a":1}`), "written in another way")
	require.NotEqual(t, first, revision(`{"a": 1, "b": {"d": 2, "c": 4}}`))
}

// A set without entries is one whose objects have all been withdrawn.
func TestANodePoolSetWithoutEntriesIsListed(t *testing.T) {
	agent := start(t)
	agent.ApplyNodePoolSet(fakeagent.NodePoolSet{Name: "older", NodeClasses: []nodepoolset.Template{template("default", "{}")}})
	agent.ApplyNodePoolSet(fakeagent.NodePoolSet{Name: "newer", NodeClasses: []nodepoolset.Template{template("default", "{}")}})
	agent.ApplyNodePoolSet(fakeagent.NodePoolSet{Name: "empty"})
	objects, sets := published(t, agent)
	require.Equal(t, []string{"empty", "newer", "older"}, sets)
	require.Len(t, objects, 1)
	require.Equal(t, "older", objects["ClusterAPINodeClass/default"].GetSet())

	agent.Unpublish(fakeagent.DefaultCluster(), "ClusterAPINodeClass", "default")
	objects, sets = published(t, agent)
	require.Empty(t, objects, "it is withdrawn from both")
	require.Equal(t, []string{"empty", "newer", "older"}, sets)

	agent.RemoveCluster(fakeagent.DefaultCluster())
	_, err := agent.Client().NodePools.ListPublishedObjects(t.Context(),
		&agentv1alpha1.ListPublishedObjectsRequest{Cluster: fakeagent.DefaultCluster()})
	require.Equal(t, agenterrors.ReasonClusterNotFound, agenterrors.ReasonOf(err))
	agent.AddCluster(fakeagent.DefaultCluster())
	_, sets = published(t, agent)
	require.Empty(t, sets)
}

func TestProblemsNameTheirFields(t *testing.T) {
	agent := start(t)
	labelled, annotated := template("labelled", "{}"), template("annotated", "{}")
	labelled.Labels = map[string]string{"team": "a b"}
	annotated.Annotations = map[string]string{"a b": "any text"}
	agent.ApplyNodePoolSet(fakeagent.NodePoolSet{
		Name: "fleet", NodePools: []nodepoolset.Template{template("good", "{}"), labelled}, NodeClasses: []nodepoolset.Template{annotated},
	})
	objects, _ := published(t, agent)
	require.Contains(t, objects["NodePool/labelled"].GetProblem(), "spec.nodePools[1].labels[team]: a valid label must be")
	require.Contains(t, objects["ClusterAPINodeClass/annotated"].GetProblem(), "spec.nodeClasses[0].annotations[a b]: name part must consist")
	require.Empty(t, objects["NodePool/good"].GetProblem())
	require.Equal(t, "{}", objects["NodePool/good"].GetSpecJson())
}

func TestANodePoolSetThatTheHubRefusesPanics(t *testing.T) {
	agent := start(t)
	require.PanicsWithValue(t, "fakeagent: nodePools[0].spec: is missing; write {} for an empty one", func() {
		agent.ApplyNodePoolSet(fakeagent.NodePoolSet{Name: "fleet", NodePools: []nodepoolset.Template{{Name: "default"}}})
	})
	_, sets := published(t, agent)
	require.Empty(t, sets)
}

func TestAnObjectThatATestPublishesGetsARevision(t *testing.T) {
	agent := start(t)
	object := &agentv1alpha1.PublishedObject{Kind: "NodePool", Name: "default", Set: "fleet", SpecJson: "{}"}
	agent.Publish(fakeagent.DefaultCluster(), object)
	first, _ := published(t, agent)
	require.NotEmpty(t, first["NodePool/default"].GetRevision())
	require.Empty(t, object.GetRevision(), "it is the caller's")
	object.Set = "other"
	agent.Publish(fakeagent.DefaultCluster(), object)
	second, sets := published(t, agent)
	require.Equal(t, "other", second["NodePool/default"].GetSet(), "it replaces the earlier one")
	require.NotEqual(t, first["NodePool/default"].GetRevision(), second["NodePool/default"].GetRevision())
	require.Equal(t, []string{"fleet", "other"}, sets)
	object.Revision = "mine"
	agent.Publish(fakeagent.DefaultCluster(), object)
	third, _ := published(t, agent)
	require.Equal(t, "mine", third["NodePool/default"].GetRevision())
}
