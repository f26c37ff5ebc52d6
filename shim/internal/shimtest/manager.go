package shimtest

import (
	"context"
	"net/http"
	"reflect"
	"sync"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// Manager returns a manager whose client is the environment's. The cache is [Env.Cache], or
// [informertest.FakeInformers] for controllers that are to get no event of the API server's.
func (w *Env) Manager(cache ctrlcache.Cache) manager.Manager {
	w.t.Helper()
	m, err := manager.New(&rest.Config{Host: "127.0.0.1:1"}, manager.Options{
		Scheme:         w.Kube.Scheme(),
		Metrics:        metricsserver.Options{BindAddress: "0"},
		Controller:     config.Controller{SkipNameValidation: new(true)},
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return w.Kube.RESTMapper(), nil },
		NewCache:       func(*rest.Config, ctrlcache.Options) (ctrlcache.Cache, error) { return cache, nil },
		NewClient:      func(*rest.Config, client.Options) (client.Client, error) { return w.Kube, nil },
	})
	require.NoError(w.t, err)
	return m
}

// Cache returns a cache whose informers report what happens in the fake API server to the objects
// of one kind.
func (w *Env) Cache(kind client.Object) ctrlcache.Cache {
	return &reporting{FakeInformers: &informertest.FakeInformers{Scheme: w.Kube.Scheme()}, kind: kind, informers: informersOf(w.t, w.Kube)}
}

type reporting struct {
	*informertest.FakeInformers

	kind      client.Object
	informers *informers
	mu        sync.Mutex // controllers ask for informers at the same time, for which the fake is not made
}

// GetInformer returns an informer that runs until the test ends.
func (r *reporting) GetInformer(ctx context.Context, object client.Object, options ...ctrlcache.InformerGetOption) (ctrlcache.Informer, error) {
	if reflect.TypeOf(object) == reflect.TypeOf(r.kind) {
		return r.informers.GetInformer(ctx, object, options...)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.FakeInformers.GetInformer(ctx, object, options...)
}
