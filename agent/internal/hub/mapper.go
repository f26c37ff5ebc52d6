package hub

import (
	"net/http"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// NewMapper returns a mapper that resolves each version of a kind only once. Caches of single
// namespaces resolve before every read, and the underlying mapper searches all groups each time.
func NewMapper(config *rest.Config, client *http.Client) (meta.RESTMapper, error) {
	dynamic, err := apiutil.NewDynamicRESTMapper(config, client)
	if err != nil {
		return nil, err
	}
	return &mapper{RESTMapper: dynamic}, nil
}

type mapper struct {
	meta.RESTMapper

	// known maps schema.GroupVersionKind to *meta.RESTMapping, whose resource and scope never
	// change.
	known sync.Map
}

// RESTMapping implements [meta.RESTMapper].
func (m *mapper) RESTMapping(gk schema.GroupKind, versions ...string) (*meta.RESTMapping, error) {
	if len(versions) != 1 {
		return m.RESTMapper.RESTMapping(gk, versions...)
	}
	gvk := gk.WithVersion(versions[0])
	if known, ok := m.known.Load(gvk); ok {
		return known.(*meta.RESTMapping), nil //nolint:forcetypeassert // nothing else is in it
	}
	mapping, err := m.RESTMapper.RESTMapping(gk, versions...)
	if err != nil {
		return nil, err
	}
	// While this version is not served, the mapping is of another one.
	if mapping.GroupVersionKind == gvk {
		m.known.Store(gvk, mapping)
	}
	return mapping, nil
}
