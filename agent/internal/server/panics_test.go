package server_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The process serves all Clusters. What one caller can make panic must cost that caller alone.

func TestAPanicCostsTheCallsOfOneClusterAlone(t *testing.T) {
	f := start(t, func(_ *fixture, config *server.Config) {
		config.Onboarded = func(_ context.Context, name types.NamespacedName) (string, bool, error) {
			if name.Name == "broken" {
				panic("a bug")
			}
			return "", true, nil
		}
	})
	healthy, err := f.cluster().NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: spokeRef})
	require.NoError(t, err)
	_, err = healthy.Recv()
	require.NoError(t, err)

	broken := f.as("spiffe://karpenter-capi/cluster/fleet/broken")
	ref := &agentv1alpha1.ClusterRef{Namespace: "fleet", Name: "broken"}
	_, err = broken.NodeGroups.ListNodeGroups(f.ctx(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: ref})
	require.Equal(t, codes.Internal, grpcstatus.Code(err), "a call: %v", err)
	require.NotContains(t, err.Error(), "a bug")
	stream, err := broken.NodeGroups.WatchNodeGroups(f.ctx(), &agentv1alpha1.WatchNodeGroupsRequest{Cluster: ref})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.Equal(t, codes.Internal, grpcstatus.Code(err), "a stream: %v", err)
	require.NotContains(t, err.Error(), "a bug")

	f.nodeGroups.Set(spoke, "fleet/a", &agentv1alpha1.NodeGroup{Id: "fleet/a"})
	event, err := healthy.Recv()
	require.NoError(t, err, "a stream of another Cluster")
	require.Equal(t, "fleet/a", event.GetUpsert().GetId())
	require.NoError(t, f.list(f.cluster()))
}

// Certificates are looked at before there is a call, in goroutines of the transport.
func TestAPanicInAHandshakeCostsOneConnection(t *testing.T) {
	var broken atomic.Bool
	f := start(t, func(_ *fixture, config *server.Config) {
		authorizer, err := authz.New("karpenter-capi", func() *authz.Policy {
			if broken.Load() {
				panic("a bug")
			}
			return nil
		}, clock.RealClock{})
		require.NoError(t, err)
		config.Authorizer = authorizer
	})
	before := f.cluster()
	require.NoError(t, f.list(before))
	broken.Store(true)
	require.Equal(t, codes.Unavailable, grpcstatus.Code(f.list(f.cluster())))
	require.Contains(t, f.log.String(), "a connection is closed because of a bug in the agent")
	broken.Store(false)
	require.NoError(t, f.list(before), "other connections stay")
	require.NoError(t, f.list(f.cluster()))
}
