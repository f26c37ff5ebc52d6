package hub

import (
	"net/http"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// NewMapper returns a mapper that asks for each version of a kind once. Caches of single namespaces ask before every read, and the mapper
// behind this one looks through all groups each time.
func NewMapper(config *rest.Config, client *http.Client) (meta.RESTMapper, error) {
	dynamic, err := apiutil.NewDynamicRESTMapper(config, client)
	if err != nil {
		return nil, err
	}
	return &mapper{RESTMapper: dynamic}, nil
}

type mapper struct {
	meta.RESTMapper

	known sync.Map // of *meta.RESTMapping by schema.GroupVersionKind; neither its resource nor its scope ever changes
}

// RESTMapping returns the resource of a kind.
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
	if mapping.GroupVersionKind == gvk { // and not one of another version, as long as this one is not served
		m.known.Store(gvk, mapping)
	}
	return mapping, nil
}
