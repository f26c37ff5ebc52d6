package control_test

import (
	"context"
	"errors"
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

func TestAnEnvironmentWithoutCertificatesIsAnError(t *testing.T) {
	server := httptest.NewServer(control.Handler(one{}))
	defer server.Close()
	_, err := control.Dial(t.Context(), control.Options{Control: server.URL, Address: "127.0.0.1:1", Within: 10 * time.Second})
	require.ErrorContains(t, err, "the caller cluster: ")
}
