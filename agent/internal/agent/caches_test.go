package agent

import (
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/contact"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/storage"
)

// All controllers, indexes and event handlers get their objects from the manager's cache.
func TestTheCachesConfinePanics(t *testing.T) {
	config, mapper, o := &rest.Config{Host: "https://hub"}, meta.NewDefaultRESTMapper(nil), options.New()
	o.MetricsBindAddress, o.HealthProbeBindAddress = "0", "0"
	mgr, err := newManager(Config{Hub: config, Options: o, Log: logr.Discard(), Mapper: mapper}, hub.NewScope(nil, nil), nil,
		storage.New(storage.Limits{}), contact.NewWatches(nil, logr.Discard()))
	require.NoError(t, err)
	confining, err := hub.NewCache(logr.Discard())(config, cache.Options{Mapper: mapper})
	require.NoError(t, err)
	require.IsType(t, confining, mgr.GetCache())
}
