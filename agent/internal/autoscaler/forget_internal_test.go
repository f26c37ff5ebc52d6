package autoscaler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroupview"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// A caller may name any number of Clusters, and a hub may have many in the course of time.
func TestOnlyClustersWithGroupsAreKept(t *testing.T) {
	groups := watchcache.New(watchcache.Options[nodegroup.NodeGroup]{Equal: nodegroupview.EqualHeld, Buffer: 1, Heartbeat: time.Minute})
	claims := watchcache.New(watchcache.Options[*agentv1alpha1.Claim]{
		Equal: func(a, b *agentv1alpha1.Claim) bool { return proto.Equal(a, b) }, Buffer: 1, Heartbeat: time.Minute,
	})
	groups.SetReady()
	claims.SetReady()
	s := New(Config{Groups: groups, Claims: claims, Clock: clock.RealClock{}})
	spoke := types.NamespacedName{Namespace: "fleet", Name: "spoke"}
	groups.Set(spoke, "fleet/workers", nodegroup.NodeGroup{})
	for _, name := range []types.NamespacedName{spoke, {Namespace: "fleet", Name: "invented"}} {
		require.NoError(t, s.read(name, func(*cluster) error { return nil }))
	}
	require.Len(t, s.clusters, 1)
	require.Contains(t, s.clusters, spoke)
	s.ForgetCluster(spoke)
	require.Empty(t, s.clusters)
}
