package server

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/excerpt"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// maxDeletedNodes is the maximum number of nodes of one NodeGroupDeleteNodes call.
const maxDeletedNodes = 5000

// maxNodeName bounds a node's name and provider ID, in bytes. An object's name has at most 253, and
// names of template nodes consist of a group's name and a suffix.
const maxNodeName = 1 << 10

// nodeFields are the needed fields of an ExternalGrpcNode. Its labels and annotations are not
// decoded.
var nodeFields = excerpt.Fields{1: {Name: "providerID", Check: isNodeName}, 2: {Name: "name", Check: isNodeName}}

func isNodeName(value []byte) error {
	if len(value) > maxNodeName {
		return fmt.Errorf("is longer than %d bytes", maxNodeName)
	}
	return nil
}

// excerpts lists, for methods of the cluster-autoscaler whose requests have more than the agent
// needs, what it needs. The messages of that protocol have no constraints.
var excerpts = map[string]excerpt.Fields{
	externalgrpc.CloudProvider_NodeGroupForNode_FullMethodName: {1: {Name: "node", Inside: nodeFields}},
	externalgrpc.CloudProvider_PricingNodePrice_FullMethodName: {
		1: {Name: "node", Inside: nodeFields}, 4: {Name: "startTimestamp"}, 5: {Name: "endTimestamp"},
	},
	externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName: {
		1: {Name: "nodes", Most: maxDeletedNodes, Inside: nodeFields}, 2: {Name: "id"},
	},
}

// needed returns the part of an encoded request that is decoded.
func needed(method string, encoded []byte) ([]byte, error) {
	fields, listed := excerpts[method]
	if !listed {
		return encoded, nil
	}
	short, err := excerpt.Of(encoded, fields)
	if of, ok := errors.AsType[*excerpt.FieldError](err); ok {
		return nil, agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: of.Field, Description: of.Message})
	}
	if err != nil {
		return nil, grpcstatus.Error(codes.InvalidArgument, notOfMethod)
	}
	return short, nil
}

const notOfMethod = "the request is not a message of this method"
