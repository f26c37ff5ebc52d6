package agent

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/contact"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/storage"
)

// Callers get half of --kube-api-burst together, and the rest is left to the agent.
func TestTheAgentsClientsLimitTheirRequestsToTheHub(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(server.Close)
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(clusterv1.GroupVersion.WithKind("Machine"), meta.RESTScopeNamespace)
	o := options.New()
	o.MetricsBindAddress, o.HealthProbeBindAddress = "0", "0"
	o.KubeAPIQPS, o.KubeAPIBurst = 1e-6, 4
	mgr, err := newManager(Config{Hub: &rest.Config{Host: server.URL}, Options: o, Log: logr.Discard(), Mapper: mapper}, hub.NewScope(nil, nil), nil,
		storage.New(storage.Limits{}), contact.NewWatches(nil, logr.Discard()))
	require.NoError(t, err)
	limiter, err := limits.New(shareOfHub(o), clock.RealClock{}, nil)
	require.NoError(t, err)
	get := func(ctx context.Context) error {
		return mgr.GetAPIReader().Get(ctx, types.NamespacedName{Namespace: "fleet", Name: "a"}, &clusterv1.Machine{})
	}
	as := func(identity string, within time.Duration) context.Context {
		call, err := limiter.Begin(identity, "/m", false)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(limits.NewContext(t.Context(), call), within)
		t.Cleanup(cancel)
		return ctx
	}
	answered := func(err error) {
		t.Helper()
		_, ok := err.(apierrors.APIStatus)
		require.True(t, ok, "%v", err)
	}
	answered(get(as("a", time.Minute)))
	answered(get(as("b", time.Minute)))
	require.ErrorIs(t, get(as("c", time.Millisecond)), context.DeadlineExceeded)
	answered(get(t.Context()))
	answered(get(t.Context()))
	within, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.ErrorContains(t, get(within), "would exceed context deadline")
}
