package agent_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// BenchmarkCreateClaim creates claims over mutual TLS, on a real API server with etcd, for
// different numbers of concurrent callers. All claims are on one node group, and Cluster API
// creates no machines meanwhile.
func BenchmarkCreateClaim(b *testing.B) {
	for _, callers := range []int{1, 16, 100} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) { createClaims(b, callers, 0, 0) })
	}
}

// BenchmarkCreateClaimBesideEnded does the same for one caller, on a group with many retained ended
// claims.
func BenchmarkCreateClaimBesideEnded(b *testing.B) {
	for _, ended := range []int{0, 2000} {
		b.Run(fmt.Sprintf("ended=%d", ended), func(b *testing.B) { createClaims(b, 1, ended, 0) })
	}
}

// BenchmarkCreateClaimAlone does the same for one caller that leaves the agent time to finish
// between two claims. Only p50 and p99 are meaningful, as the other figures include the pauses.
func BenchmarkCreateClaimAlone(b *testing.B) { createClaims(b, 1, 0, 500*time.Millisecond) }

func createClaims(b *testing.B, callers, ended int, pause time.Duration) {
	b.Helper()
	namespace := plane.Namespace(b)
	plane.Create(b, capitest.NewCluster(namespace, "spoke"), capitest.NewInfrastructureTemplate(namespace, "group", nil),
		capitest.NewMachineDeployment(namespace, "group", "spoke", 0))
	remember(b, namespace, ended)
	o := testOptions(namespace)
	o.KubeAPIQPS, o.KubeAPIBurst = options.New().KubeAPIQPS, options.New().KubeAPIBurst
	client := start(b, agent.Config{Options: o}).client(namespace, "spoke")
	ref := &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}
	eventually(b, "the node group takes claims", func(ctx context.Context) (bool, error) {
		group, err := client.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: ref, Id: namespace + "/group"})
		return err == nil && group.GetNodeGroup().GetAvailability().GetAvailable(), nil
	})

	var (
		next  atomic.Int64
		mu    sync.Mutex
		took  []time.Duration
		calls errgroup.Group
	)
	b.ResetTimer()
	for range callers {
		calls.Go(func() error {
			for {
				n := next.Add(1)
				if n > int64(b.N) {
					return nil
				}
				time.Sleep(pause) //nolint:forbidigo // it is what the benchmark is about
				began := time.Now()
				_, err := client.Claims.CreateClaim(b.Context(), &agentv1alpha1.CreateClaimRequest{
					Cluster: ref, ClaimId: fmt.Sprintf("claim-%d", n), Holder: "karpenter", Candidates: []string{namespace + "/group"},
				})
				if err != nil {
					return err
				}
				mu.Lock()
				took = append(took, time.Since(began))
				mu.Unlock()
			}
		})
	}
	require.NoError(b, calls.Wait())
	b.StopTimer()
	slices.Sort(took)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "claims/s")
	b.ReportMetric(took[len(took)/2].Seconds()*1000, "p50-ms")
	b.ReportMetric(took[min(len(took)-1, len(took)*99/100)].Seconds()*1000, "p99-ms")
}

// remember creates ended claims.
func remember(b *testing.B, namespace string, claims int) {
	b.Helper()
	var writes errgroup.Group
	writes.SetLimit(32)
	for i := range claims {
		writes.Go(func() error {
			id := fmt.Sprintf("ended-%d", i)
			c := &v1alpha1.MachineClaim{
				ObjectMeta: metav1.ObjectMeta{
					Namespace: namespace, Name: v1alpha1.ObjectName("spoke", id),
					Labels: map[string]string{v1alpha1.ClusterLabel: "spoke", v1alpha1.NodeGroupLabel: "group", v1alpha1.HolderLabel: "karpenter"},
				},
				Spec: v1alpha1.MachineClaimSpec{ClusterName: "spoke", ClaimID: id, Holder: "karpenter", NodeGroup: "group"},
			}
			if err := plane.Client.Create(b.Context(), c); err != nil {
				return err
			}
			now := metav1.Now()
			c.Status = v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhaseEnded, Reason: "Released", EndedAt: &now}
			return plane.Client.Status().Update(b.Context(), c, &ctrlclient.SubResourceUpdateOptions{})
		})
	}
	require.NoError(b, writes.Wait())
}
