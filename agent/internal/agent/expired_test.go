package agent_test

import (
	"context"
	"io"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
)

// Kubernetes learns of it, and a person learns why.
func TestReadinessReportsAnExpiredCertificate(t *testing.T) {
	o := testOptions(plane.Namespace(t))
	o.HealthProbeBindAddress = freeAddress(t)
	r := start(t, agent.Config{Options: o})
	get := func(path string) (int, string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+o.HealthProbeBindAddress+path, http.NoBody)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		defer func() { assert.NoError(t, response.Body.Close()) }()
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(body)
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		code, _ := get("/readyz")
		assert.Equal(c, http.StatusOK, code)
	}, patience, 50*time.Millisecond)
	r.authority.IssueFor(t, -time.Second, filepath.Dir(r.files.CertFile), r.authority)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		code, _ := get("/readyz")
		assert.Equal(c, http.StatusInternalServerError, code)
		_, why := get("/readyz/certificate")
		assert.Contains(c, why, "the certificate of "+r.address+" expired at ")
		code, _ = get("/readyz/synced")
		assert.Equal(c, http.StatusOK, code)
	}, patience, 50*time.Millisecond)
}
