package nodepoolset_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/nodepoolset"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func object(template nodepoolset.Template) *agentv1alpha1.PublishedObject {
	return template.Object("fleet", agentv1alpha1.DeletionPolicy_DELETION_POLICY_DELETE, nodepoolset.NodeClass, "spec.nodeClasses[2]")
}

func TestWhatCannotBePublishedHasAProblemAndNoSpec(t *testing.T) {
	for name, c := range map[string]struct {
		template nodepoolset.Template
		problem  string
	}{
		"a label": {
			nodepoolset.Template{Labels: map[string]string{"b": "x y", "a b": "c"}, Spec: json.RawMessage("{}")},
			"spec.nodeClasses[2].labels[a b]: ",
		},
		"an annotation": {
			nodepoolset.Template{Annotations: map[string]string{"/": ""}, Spec: json.RawMessage("{}")},
			"spec.nodeClasses[2].annotations[/]: ",
		},
		"a long annotation": {
			nodepoolset.Template{Annotations: map[string]string{strings.Repeat("ä", 40000): ""}, Spec: json.RawMessage("{}")},
			"spec.nodeClasses[2].annotations[" + strings.Repeat("ä", 128) + "…]: ",
		},
		"no spec": {nodepoolset.Template{}, "spec.nodeClasses[2].spec: is missing; write {} for an empty one"},
		"null":    {nodepoolset.Template{Spec: json.RawMessage("null")}, "spec.nodeClasses[2].spec: is missing; write {} for an empty one"},
		"a list":  {nodepoolset.Template{Spec: json.RawMessage("[]")}, "spec.nodeClasses[2].spec: not a JSON object: "},
		"a large spec": {
			nodepoolset.Template{Spec: json.RawMessage(`{"a":"` + strings.Repeat("x", nodepoolset.MaxSpecBytes) + `"}`)},
			"spec.nodeClasses[2].spec: 32776 bytes of JSON, but at most 32768 are published",
		},
	} {
		t.Run(name, func(t *testing.T) {
			published := object(c.template)
			require.Empty(t, published.GetSpecJson())
			require.True(t, strings.HasPrefix(published.GetProblem(), c.problem), "%.512s", published.GetProblem())
			require.Less(t, len(published.GetProblem()), 1024)
			require.NotEmpty(t, published.GetRevision())
		})
	}
}

func TestTheRevisionFollowsTheContentAlone(t *testing.T) {
	written := nodepoolset.Template{Name: "default", Labels: map[string]string{"a": "b"}, Spec: json.RawMessage(`{"b": 1.50, "a": [1]}`)}
	published := object(written)
	require.JSONEq(t, `{"a":[1],"b":1.50}`, published.GetSpecJson())
	require.Contains(t, published.GetSpecJson(), "1.50", "numbers stay as they were written")

	written.Spec = json.RawMessage("{\"a\":[1],\n\"b\":1.50}")
	written.Annotations = map[string]string{}
	require.True(t, proto.Equal(published, object(written)))
	for _, change := range []func(*nodepoolset.Template){
		func(t *nodepoolset.Template) { t.Name = "other" },
		func(t *nodepoolset.Template) { t.Labels = map[string]string{"a": "c"} },
		func(t *nodepoolset.Template) { t.Annotations = map[string]string{"a": "b"} },
		func(t *nodepoolset.Template) { t.Spec = json.RawMessage(`{"b": 1.5, "a": [1]}`) },
	} {
		changed := written
		change(&changed)
		require.NotEqual(t, published.GetRevision(), object(changed).GetRevision())
	}
}
