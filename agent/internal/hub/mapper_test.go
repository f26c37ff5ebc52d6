package hub_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

func TestMapperAsksOnce(t *testing.T) {
	g := NewWithT(t)
	var asked atomic.Int64
	served := atomic.Bool{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		version := metav1.GroupVersionForDiscovery{GroupVersion: "example.org/v1", Version: "v1"}
		var answer any
		switch {
		case r.URL.Path == "/api":
			answer = metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions", APIVersion: "v1"}}
		case r.URL.Path == "/apis" && served.Load():
			answer = metav1.APIGroupList{
				TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
				Groups:   []metav1.APIGroup{{Name: "example.org", Versions: []metav1.GroupVersionForDiscovery{version}, PreferredVersion: version}},
			}
		case r.URL.Path == "/apis":
			answer = metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}}
		case r.URL.Path == "/apis/example.org/v1" && served.Load():
			answer = metav1.APIResourceList{
				TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: version.GroupVersion,
				APIResources: []metav1.APIResource{{Name: "things", Kind: "Thing", Namespaced: true}},
			}
		default:
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		g.Expect(json.NewEncoder(w).Encode(answer)).To(Succeed())
	}))
	defer server.Close()
	mapper, err := hub.NewMapper(&rest.Config{Host: server.URL}, server.Client())
	g.Expect(err).NotTo(HaveOccurred())
	kind := schema.GroupKind{Group: "example.org", Kind: "Thing"}

	_, err = mapper.RESTMapping(kind, "v1")
	g.Expect(meta.IsNoMatchError(err)).To(BeTrue(), "%v", err)
	served.Store(true)
	first, err := mapper.RESTMapping(kind, "v1")
	g.Expect(err).NotTo(HaveOccurred(), "what is not served yet is asked for again")
	g.Expect(first.Resource.Resource).To(Equal("things"))
	g.Expect(first.Scope.Name()).To(Equal(meta.RESTScopeNameNamespace))
	before := asked.Load()
	again, err := mapper.RESTMapping(kind, "v1")
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(again).To(BeIdenticalTo(first))
	g.Expect(asked.Load()).To(Equal(before))
}
