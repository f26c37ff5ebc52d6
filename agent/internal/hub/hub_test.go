package hub_test

import (
	"reflect"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

func TestEmptyScopeHasEverything(t *testing.T) {
	g := NewWithT(t)
	scope := hub.NewScope(nil, nil)
	g.Expect(scope.Contains(types.NamespacedName{Namespace: "any", Name: "cluster"})).To(BeTrue())
	options, err := scope.CacheOptions()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(options.DefaultNamespaces).To(BeEmpty())
	g.Expect(options.DefaultTransform).NotTo(BeNil())
}

func TestScopeOfNamespacesAndClusters(t *testing.T) {
	g := NewWithT(t)
	scope := hub.NewScope([]string{"whole"}, []types.NamespacedName{
		{Namespace: "part", Name: "b"}, {Namespace: "part", Name: "a"}, {Namespace: "one", Name: "c"}, {Namespace: "whole", Name: "x"},
	})
	for cluster, want := range map[types.NamespacedName]bool{
		{Namespace: "whole", Name: "anything"}: true,
		{Namespace: "part", Name: "a"}:         true,
		{Namespace: "part", Name: "c"}:         false,
		{Namespace: "elsewhere", Name: "a"}:    false,
	} {
		g.Expect(scope.Contains(cluster)).To(Equal(want), cluster.String())
	}
	options, err := scope.CacheOptions()
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(options.DefaultNamespaces).To(HaveLen(3))
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
	g.Expect(selectors(&clusterv1.Machine{})).To(Equal(map[string]string{
		"whole": "", "part": "cluster.x-k8s.io/cluster-name in (a,b)", "one": "cluster.x-k8s.io/cluster-name in (c)",
	}))
	g.Expect(selectors(&clusterv1.Cluster{})).To(Equal(map[string]string{"whole": "", "part": "", "one": "metadata.name=c"}))
}

func TestSchemeIsComplete(t *testing.T) {
	_, err := hub.Scheme()
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
}
