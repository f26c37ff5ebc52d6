package hub_test

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

func TestEmptyScopeHasEverything(t *testing.T) {
	scope := hub.NewScope(nil, nil)
	require.True(t, scope.Contains(types.NamespacedName{Namespace: "any", Name: "cluster"}))
	options, err := scope.CacheOptions()
	require.NoError(t, err)
	require.Empty(t, options.DefaultNamespaces)
	require.NotNil(t, options.DefaultTransform)
}

func TestScopeOfNamespacesAndClusters(t *testing.T) {
	scope := hub.NewScope([]string{"whole"}, []types.NamespacedName{
		{Namespace: "part", Name: "b"}, {Namespace: "part", Name: "a"}, {Namespace: "one", Name: "c"}, {Namespace: "whole", Name: "x"},
	})
	for cluster, want := range map[types.NamespacedName]bool{
		{Namespace: "whole", Name: "anything"}: true,
		{Namespace: "part", Name: "a"}:         true,
		{Namespace: "part", Name: "c"}:         false,
		{Namespace: "elsewhere", Name: "a"}:    false,
	} {
		require.Equal(t, want, scope.Contains(cluster), cluster.String())
	}
	options, err := scope.CacheOptions()
	require.NoError(t, err)
	require.Len(t, options.DefaultNamespaces, 3)
	selectors := func(object client.Object) map[string]string {
		texts := map[string]string{}
		for key, byObject := range options.ByObject {
			if reflect.TypeOf(key) != reflect.TypeOf(object) {
				continue
			}
			for namespace, config := range byObject.Namespaces {
				switch {
				case config.LabelSelector != nil:
					texts[namespace] = config.LabelSelector.String()
				case config.FieldSelector != nil:
					texts[namespace] = config.FieldSelector.String()
				default:
					texts[namespace] = ""
				}
			}
		}
		return texts
	}
	require.Equal(t, map[string]string{
		"whole": "", "part": "cluster.x-k8s.io/cluster-name in (a,b)", "one": "cluster.x-k8s.io/cluster-name in (c)",
	}, selectors(&clusterv1.Machine{}))
	require.Equal(t, map[string]string{"whole": "", "part": "", "one": "metadata.name=c"}, selectors(&clusterv1.Cluster{}))
}

func TestSchemeIsComplete(t *testing.T) {
	_, err := hub.Scheme()
	require.NoError(t, err)
}
