package agent_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// gate refuses requests for some resources, and ends their watches.
type gate struct {
	mu      sync.Mutex
	refused string // a part of the paths that are refused
	status  int
	watches map[string][]io.Closer // by path
}

func (g *gate) send(request *http.Request, next http.RoundTripper) (*http.Response, error) {
	g.mu.Lock()
	refuse, code := g.status != 0 && strings.Contains(request.URL.Path, g.refused), g.status
	g.mu.Unlock()
	if refuse {
		return &http.Response{
			StatusCode: code, Header: http.Header{"Content-Type": {"text/plain"}}, Body: io.NopCloser(strings.NewReader("refused")), Request: request,
		}, nil
	}
	response, err := next.RoundTrip(request)
	if err == nil && request.URL.Query().Has("watch") {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.watches[request.URL.Path] = append(g.watches[request.URL.Path], response.Body)
	}
	return response, err
}

// refuse answers with a status for all paths that contain a text, until [gate.open].
func (g *gate) refuse(path string, status int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused, g.status = path, status
	for watched, bodies := range g.watches {
		if strings.Contains(watched, path) {
			for _, body := range bodies {
				_ = body.Close()
			}
			delete(g.watches, watched)
		}
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.status = 0
}

// The caches are outdated while the API server answers, but not for what the agent needs.
func TestAnAgentThatCannotFollowTheHubServesNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		path   string
		status int
	}{
		"its account was deleted":               {"/", http.StatusUnauthorized},
		"its rights were withdrawn":             {"/", http.StatusForbidden},
		"a right was withdrawn":                 {"/clusters", http.StatusForbidden},
		"the webhook of a kind does not work":   {"/machinesets", http.StatusInternalServerError},
		"the definition of a kind was deleted":  {"/machineclaims", http.StatusNotFound},
		"the right to the policy was withdrawn": {"/configmaps", http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			namespace := plane.Namespace(t)
			plane.Create(t, capitest.NewCluster(namespace, "spoke"))
			config, registry := rest.CopyConfig(plane.Config), prometheus.NewRegistry() // only the gate refuses
			g := &gate{watches: map[string][]io.Closer{}}
			config.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTrip(func(request *http.Request) (*http.Response, error) { return g.send(request, next) })
			})
			o := testOptions(namespace)
			o.Policy = namespace + "/policy"
			plane.Create(t, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "policy"}, Data: map[string]string{authz.PolicyKey: "identities: []"},
			})
			r := start(t, agent.Config{Hub: config, Options: o, Registerer: registry, HubPatience: agent.HubPatience})
			client := r.client(namespace, "spoke")
			list := func(ctx context.Context) error {
				_, err := client.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{
					Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"},
				})
				return err
			}
			eventually(t, "the agent serves", func(ctx context.Context) (bool, error) { return list(ctx) == nil, nil })
			g.refuse(c.path, c.status)
			eventually(t, "the agent serves nothing", func(ctx context.Context) (bool, error) {
				return agenterrors.ReasonOf(list(ctx)) == agenterrors.ReasonHubUnreachable, nil
			})
			if c.path != "/" {
				failed, err := testutil.GatherAndCount(registry, "capi_agent_watch_errors_total")
				require.NoError(t, err)
				require.Equal(t, 1, failed, "one kind is not answered")
			}
			g.open()
			eventually(t, "the agent serves again", func(ctx context.Context) (bool, error) { return list(ctx) == nil, nil })
		})
	}
}
