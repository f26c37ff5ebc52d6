package control_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance/control"
)

// one is a control that expects one operation, and fails for one machine.
type one struct{ control.Control }

func (one) JoinNode(_ context.Context, cluster control.Cluster, machine string) error {
	if machine == "missing" {
		return errors.New("no machine missing in cluster " + cluster.Namespace + "/" + cluster.Name)
	}
	return nil
}

func (one) NewEnvironment(context.Context) (*control.Environment, error) {
	return &control.Environment{Callers: map[conformance.Caller]control.KeyPair{}}, nil
}

func (one) EndEnvironment(context.Context, control.Cluster) error { return nil }

func TestOperationsAreAnswered(t *testing.T) {
	server := httptest.NewServer(control.Handler(one{}))
	defer server.Close()
	for name, c := range map[string]struct {
		path, kind, body string
		status           int
		answer           string
	}{
		"done":              {"join-node", "application/json", `{"cluster": {"namespace": "a", "name": "b"}, "machine": "m"}`, 200, "{}"},
		"not done":          {"join-node", "application/json", `{"cluster": {"namespace": "a", "name": "b"}, "machine": "missing"}`, 409, "cluster a/b"},
		"another type":      {"join-node", "text/plain", `{}`, 400, "Content-Type must be application/json"},
		"an unknown field":  {"join-node", "application/json", `{"node": "a"}`, 400, `unknown field \"node\"`},
		"no JSON":           {"join-node", "application/json", `[`, 400, "reading the request"},
		"no deployment":     {"create-node-group", "application/json", `{}`, 409, "deployment: is missing"},
		"unknown operation": {"reboot", "application/json", `{}`, 404, "404"},
	} {
		t.Run(name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/v1/"+c.path, strings.NewReader(c.body))
			require.NoError(t, err)
			request.Header.Set("Content-Type", c.kind)
			response, err := http.DefaultClient.Do(request)
			require.NoError(t, err)
			content, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, c.status, response.StatusCode)
			require.Contains(t, string(content), c.answer)
		})
	}
}

// publisher is a control with every optional operation.
type publisher struct{ one }

func (publisher) ApplyNodePoolSet(_ context.Context, cluster control.Cluster, set conformance.NodePoolSet) error {
	return fmt.Errorf("applied %s in %s with %s", set.Name, cluster.Namespace, set.NodePools[0].Spec)
}

func (publisher) DeleteNodePoolSet(_ context.Context, cluster control.Cluster, name string) error {
	return fmt.Errorf("deleted %s in %s", name, cluster.Namespace)
}

func TestOptionalOperationsAreListed(t *testing.T) {
	const applied = `{"cluster": {"namespace": "a", "name": "b"}, "nodePoolSet": {"name": "c", "nodePools": [{"name": "d", "spec": {"e": 1}}]}}`
	for name, c := range map[string]struct {
		control    control.Control
		path, body string
		status     int
		answer     string
	}{
		"none":             {one{}, "new-environment", `{}`, 200, `"callers":{}}}`},
		"all":              {publisher{}, "new-environment", `{}`, 200, `"operations":["apply-node-pool-set","delete-node-pool-set"]`},
		"applied":          {publisher{}, "apply-node-pool-set", applied, 409, `applied c in a with {\"e\": 1}`},
		"deleted":          {publisher{}, "delete-node-pool-set", `{"cluster": {"namespace": "a", "name": "b"}, "name": "c"}`, 409, "deleted c in a"},
		"no NodePoolSet":   {publisher{}, "apply-node-pool-set", `{}`, 409, "nodePoolSet: is missing"},
		"not an operation": {one{}, "apply-node-pool-set", applied, 404, "404"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(control.Handler(c.control))
			defer server.Close()
			response, err := http.Post(server.URL+"/v1/"+c.path, "application/json", strings.NewReader(c.body))
			require.NoError(t, err)
			content, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, c.status, response.StatusCode)
			require.Contains(t, string(content), c.answer)
		})
	}
}

func TestAnEnvironmentWithoutCertificatesIsAnError(t *testing.T) {
	server := httptest.NewServer(control.Handler(one{}))
	defer server.Close()
	_, err := control.Dial(t.Context(), control.Options{Control: server.URL, Address: "127.0.0.1:1", Within: 10 * time.Second})
	require.ErrorContains(t, err, "the caller cluster: ")
}
