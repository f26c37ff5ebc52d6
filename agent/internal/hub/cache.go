package hub

import (
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/manager"
)

// AddCache gives the manager one more cache, which uses the manager's connections and confines
// panics ([NewCache]). The manager starts it before the controllers. What waits for a cache waits
// for all kinds in it: kinds whose watch may never sync, and kinds that need another selector, get
// a cache of their own.
func AddCache(mgr manager.Manager, options cache.Options) (cache.Cache, error) {
	options.HTTPClient, options.Scheme, options.Mapper = mgr.GetHTTPClient(), mgr.GetScheme(), mgr.GetRESTMapper()
	own, err := NewCache(mgr.GetLogger().WithName("hub"))(mgr.GetConfig(), options)
	if err != nil {
		return nil, fmt.Errorf("making a cache: %w", err)
	}
	if err := mgr.Add(withCache{own}); err != nil {
		return nil, fmt.Errorf("adding a cache: %w", err)
	}
	return own, nil
}

// withCache makes the manager recognize a cache.
type withCache struct{ cache.Cache }

// GetCache returns the cache.
func (c withCache) GetCache() cache.Cache { return c.Cache }
