package hub_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

func TestMapperAsksOnce(t *testing.T) {
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
		assert.NoError(t, json.NewEncoder(w).Encode(answer))
	}))
	defer server.Close()
	mapper, err := hub.NewMapper(&rest.Config{Host: server.URL}, server.Client())
	require.NoError(t, err)
	kind := schema.GroupKind{Group: "example.org", Kind: "Thing"}

	_, err = mapper.RESTMapping(kind, "v1")
	require.True(t, meta.IsNoMatchError(err), "%v", err)
	served.Store(true)
	first, err := mapper.RESTMapping(kind, "v1")
	require.NoError(t, err, "what is not served yet is asked for again")
	require.Equal(t, "things", first.Resource.Resource)
	require.Equal(t, meta.RESTScopeNameNamespace, first.Scope.Name())
	before := asked.Load()
	again, err := mapper.RESTMapping(kind, "v1")
	require.NoError(t, err)
	require.Same(t, first, again)
	require.Equal(t, before, asked.Load())
}
