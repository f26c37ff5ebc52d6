package claims

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// The spokes of many Clusters list their claims at once after an agent has been replaced. Each gets
// its own, and they share requests, because each request costs the API server as much as the
// namespace has claims.
func TestListsThatWaitShareRequests(t *testing.T) {
	const clusters = 40
	claimOf := func(cluster, id, holder string, phase v1alpha1.Phase) *v1alpha1.MachineClaim {
		c := heldClaim(id, time.Now())
		c.Name = v1alpha1.ObjectName(cluster, id)
		c.Spec.ClusterName, c.Spec.Holder = cluster, holder
		c.Labels = map[string]string{v1alpha1.ClusterLabel: cluster, v1alpha1.HolderLabel: holder}
		c.Status.Phase = phase
		return c
	}
	name := func(i int) string { return fmt.Sprintf("team-%02d", i) }
	const large = "large"
	long := strings.Repeat("a", 64) // no value of a label
	var objects []client.Object
	for i := range clusters {
		objects = append(objects,
			&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name(i)}},
			claimOf(name(i), "mine", "karpenter", v1alpha1.PhasePending),
			claimOf(name(i), "ended", "karpenter", v1alpha1.PhaseEnded),
			claimOf(name(i), "other", "cluster-autoscaler", v1alpha1.PhasePending))
	}
	objects = append(objects, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: large}})
	for i := range manyClaims {
		objects = append(objects, claimOf(large, strconv.Itoa(i), "karpenter", v1alpha1.PhaseEnded))
	}
	e := engineWith(t, append(objects, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: long}})...)
	through, ok := e.Reader.(client.WithWatch)
	require.True(t, ok)

	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		requests, answer := 0, make(chan struct{})
		e.Reader = interceptor.NewClient(through, interceptor.Funcs{
			List: func(ctx context.Context, c client.WithWatch, into client.ObjectList, o ...client.ListOption) error {
				if _, claims := into.(*v1alpha1.MachineClaimList); claims {
					mu.Lock()
					requests++
					mu.Unlock()
					<-answer
				}
				return c.List(ctx, into, o...)
			},
		})
		var calls sync.WaitGroup
		for i := range clusters {
			calls.Go(func() {
				o := ListOptions{Namespace: namespace, Cluster: name(i), Holder: "karpenter"}
				listed, token, err := e.List(t.Context(), o)
				if err != nil || token == "" || len(listed) != 1 || listed[0].Name != v1alpha1.ObjectName(name(i), "mine") {
					t.Errorf("list of %s: %v, %v", name(i), listed, err)
				}
			})
			calls.Go(func() {
				listed, _, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: name(i), IncludeEnded: true})
				ids := make([]string, 0, len(listed))
				for i := range listed {
					ids = append(ids, listed[i].Spec.ClaimID)
				}
				slices.Sort(ids)
				if err != nil || !slices.Equal(ids, []string{"ended", "mine", "other"}) {
					t.Errorf("list of all of %s: %v, %v", name(i), ids, err)
				}
			})
		}
		calls.Go(func() {
			if listed, _, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: long, Holder: "karpenter"}); err != nil || len(listed) != 0 {
				t.Errorf("list of a Cluster with a long name: %v, %v", listed, err)
			}
		})
		calls.Go(func() {
			listed, _, err := e.List(t.Context(), ListOptions{Namespace: namespace, Cluster: large, IncludeEnded: true})
			if err != nil || len(listed) != manyClaims {
				t.Errorf("list of a large Cluster: %d claims, %v", len(listed), err)
			}
		})
		synctest.Wait()
		close(answer)
		calls.Wait()
		require.Equal(t, 2*(2+1)+2, requests, "for each kind of list two of their own and one for all others; the long name's and the large one's")
	})
}
