package catalogue

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// The memories maintained by events equal those of a full list of NodeClaims, and a change is
// reported if and only if there is one.
func TestMemoriesAreThoseOfAllNodeClaims(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	kept, nodeClaims := newMemories(), map[string]*karpv1.NodeClaim{}
	listed := func() map[memory]bool {
		all := map[memory]bool{}
		for _, nodeClaim := range nodeClaims {
			if m, some := memoryOf(nodeClaim); some {
				all[m] = true
			}
		}
		return all
	}
	for range 5000 {
		before := listed()
		name := strconv.Itoa(random.IntN(20))
		var changed bool
		if random.IntN(4) == 0 {
			delete(nodeClaims, name)
			changed = kept.forget(name)
		} else {
			nodeClaim := &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{
				Name:        name,
				Annotations: map[string]string{v1alpha1.NodeGroupAnnotation: fmt.Sprint("fleet/", random.IntN(3))},
				Labels:      map[string]string{karpv1.CapacityTypeLabelKey: "spot", corev1.LabelTopologyZone: strconv.Itoa(random.IntN(2))},
			}}
			nodeClaim.Spec.NodeClassRef = &karpv1.NodeClassReference{Group: v1alpha1.Group, Name: "default"}
			if random.IntN(5) > 0 { // otherwise it has no machine yet
				nodeClaim.Labels[corev1.LabelInstanceTypeStable] = "small"
			}
			nodeClaims[name] = nodeClaim
			changed = kept.see(nodeClaim)
		}
		after := map[memory]bool{}
		for _, m := range kept.all() {
			after[m] = true
		}
		require.Equal(t, listed(), after)
		require.Equal(t, !maps.Equal(before, after), changed, "whether it is reported as a change")
	}
}
