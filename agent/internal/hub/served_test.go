package hub_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

// clientOf returns a client of a server, as the agent's.
func clientOf(t *testing.T, server *httptest.Server) client.Client {
	t.Helper()
	config := &rest.Config{Host: server.URL}
	config.Wrap(hub.Served)
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(v1alpha1.GroupVersion.WithKind("MachineClaim"), meta.RESTScopeNamespace)
	c, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	require.NoError(t, err)
	return c
}

// The responses are those of kube-apiserver 1.36.
func TestAnObjectWhoseKindIsNotServedIsNotTakenForAbsent(t *testing.T) {
	for name, answer := range map[string]struct {
		contentType, body string
		absent            bool
	}{
		"there is no such object": {
			"application/json", `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"machineclaims \"a\" not found",` +
				`"reason":"NotFound","details":{"name":"a","kind":"machineclaims"},"code":404}`, true,
		},
		"there is no such resource": {"text/plain; charset=utf-8", "404 page not found\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", answer.contentType)
				w.WriteHeader(http.StatusNotFound)
				_, _ = io.WriteString(w, answer.body)
			}))
			defer server.Close()
			c := clientOf(t, server)

			err := c.Get(t.Context(), client.ObjectKey{Namespace: "team-a", Name: "a"}, &v1alpha1.MachineClaim{})
			require.Equal(t, answer.absent, apierrors.IsNotFound(err), "%v", err)
			if !answer.absent {
				require.True(t, apierrors.IsServiceUnavailable(err), "%v", err)
				require.ErrorContains(t, err, "is its CRD installed")
			}
			err = c.List(t.Context(), &v1alpha1.MachineClaimList{}, client.InNamespace("team-a"))
			require.Equal(t, answer.absent, apierrors.IsNotFound(err), "%v", err)
		})
	}
}

// While a CRD is being deleted, no policy has refused anything. The responses are those of
// kube-apiserver 1.36.
func TestACRDThatIsBeingDeletedRefusesNothing(t *testing.T) {
	for name, answer := range map[string]struct {
		message string
		refused bool
	}{
		"the CRD is being deleted": {"create not allowed while custom resource definition is terminating", false},
		"a policy refuses it":      {"ValidatingAdmissionPolicy 'frozen' with binding 'frozen' denied request: no claims today", true},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				w.WriteHeader(http.StatusForbidden)
				status := apierrors.NewForbidden(
					v1alpha1.GroupVersion.WithResource("machineclaims").GroupResource(), "a", errors.New(answer.message),
				).Status()
				status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
				_ = json.NewEncoder(w).Encode(status)
			}))
			defer server.Close()
			c := clientOf(t, server)

			claim := &v1alpha1.MachineClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "a"}}
			err := c.Create(t.Context(), claim)
			require.Equal(t, answer.refused, apierrors.IsForbidden(err), "%v", err)
			require.Equal(t, !answer.refused, apierrors.IsServiceUnavailable(err), "%v", err)
			if answer.refused {
				require.ErrorContains(t, err, answer.message)
			}
		})
	}
}

// Discovery responses are not changed: a missing group is not an error.
func TestDiscoveryIsAnsweredAsItIs(t *testing.T) {
	for _, path := range []string{"/apis/agent.karpenter.cluster.x-k8s.io/v1alpha1", "/apis/cluster.x-k8s.io", "/api/v1/namespaces/a"} {
		answer := transport(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusNotFound, Header: http.Header{"Content-Type": []string{"text/plain"}}, Body: http.NoBody}, nil
		})
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://hub"+path, http.NoBody)
		require.NoError(t, err)
		response, err := hub.Served(answer).RoundTrip(request)
		require.NoError(t, err)
		require.Equal(t, http.StatusNotFound, response.StatusCode, path)
		require.NoError(t, response.Body.Close())
	}
}
