package adoption

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

func TestTheRateOfANodeClassIsForgottenWithIt(t *testing.T) {
	kube := shimtest.FakeKube(interceptor.Funcs{})
	c := NewNodes(NodesConfig{Kube: kube})
	var classes []*v1alpha1.ClusterAPINodeClass
	for _, name := range []string{"stays", "goes"} {
		class := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
		class.Spec.Adoption.Machines = v1alpha1.AdoptAll
		require.NoError(t, kube.Create(t.Context(), class))
		c.rate(class)
		classes = append(classes, class)
	}
	found := func() int {
		wanted, err := c.classes(t.Context(), false)
		require.NoError(t, err)
		return len(wanted)
	}
	require.Equal(t, 2, found())
	require.Len(t, c.rates, 2)
	stays := c.rates["stays"]

	require.NoError(t, kube.Delete(t.Context(), classes[1]))
	require.Equal(t, 1, found())
	require.Equal(t, map[types.UID]*rate.Limiter{"stays": stays}, c.rates)
	require.Same(t, stays, c.rate(classes[0]), "it goes on")
}
