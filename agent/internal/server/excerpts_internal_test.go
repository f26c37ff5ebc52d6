package server

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// Nothing else bounds the names in the requests of the cluster-autoscaler.
func TestNamesOfNodesAreBounded(t *testing.T) {
	for _, size := range []int{maxNodeName, maxNodeName + 1} {
		long := strings.Repeat("n", size)
		for field, node := range map[string]*externalgrpc.ExternalGrpcNode{"name": {Name: long}, "providerID": {ProviderID: long}} {
			for method, c := range map[string]struct {
				of      string
				request proto.Message
			}{
				externalgrpc.CloudProvider_NodeGroupForNode_FullMethodName: {"node", &externalgrpc.NodeGroupForNodeRequest{Node: node}},
				externalgrpc.CloudProvider_PricingNodePrice_FullMethodName: {"node", &externalgrpc.PricingNodePriceRequest{Node: node}},
				externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName: {
					"nodes", &externalgrpc.NodeGroupDeleteNodesRequest{Nodes: []*externalgrpc.ExternalGrpcNode{node}},
				},
			} {
				encoded, err := proto.Marshal(c.request)
				require.NoError(t, err)
				_, err = needed(method, encoded)
				if size == maxNodeName {
					require.NoError(t, err, method)
					continue
				}
				require.Equal(t, codes.InvalidArgument, grpcstatus.Code(err), method)
				require.ErrorContains(t, err, c.of+"."+field+": is longer than 1024 bytes", method)
			}
		}
	}
}
