package client

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// MirrorNodeGroups returns a mirror of the Cluster's node groups, by ID.
func (c *Client) MirrorNodeGroups(cluster *agentv1alpha1.ClusterRef) *Mirror[*agentv1alpha1.NodeGroup] {
	return newMirror(c, "nodegroups", (*agentv1alpha1.NodeGroup).GetId,
		watch(c.NodeGroups.WatchNodeGroups, &agentv1alpha1.WatchNodeGroupsRequest{Cluster: cluster},
			func(r *agentv1alpha1.WatchNodeGroupsResponse) event[*agentv1alpha1.NodeGroup] {
				if e, ok := r.GetEvent().(*agentv1alpha1.WatchNodeGroupsResponse_RemovedId); ok {
					return event[*agentv1alpha1.NodeGroup]{kind: removed, key: e.RemovedId}
				}
				return decode(r, r.GetUpsert(), r.GetUpsert() != nil)
			}))
}

// MirrorClaims returns a mirror of the Cluster's claims of a holder, or of all its claims if holder
// is empty, by ID. Ended claims are included while the agent retains them.
func (c *Client) MirrorClaims(cluster *agentv1alpha1.ClusterRef, holder string) *Mirror[*agentv1alpha1.Claim] {
	m := newMirror(c, "claims", (*agentv1alpha1.Claim).GetClaimId,
		watch(c.Claims.WatchClaims, &agentv1alpha1.WatchClaimsRequest{Cluster: cluster, Holder: holder},
			func(r *agentv1alpha1.WatchClaimsResponse) event[*agentv1alpha1.Claim] {
				if e, ok := r.GetEvent().(*agentv1alpha1.WatchClaimsResponse_RemovedId); ok {
					return event[*agentv1alpha1.Claim]{kind: removed, key: e.RemovedId}
				}
				return decode(r, r.GetUpsert(), r.GetUpsert() != nil)
			}))
	m.providerID = func(claim *agentv1alpha1.Claim) string { return claim.GetMachine().GetProviderId() }
	return m
}

// MirrorMachines returns a mirror of the Machines of the Cluster's node groups, by name.
func (c *Client) MirrorMachines(cluster *agentv1alpha1.ClusterRef) *Mirror[*agentv1alpha1.Machine] {
	m := newMirror(c, "machines", (*agentv1alpha1.Machine).GetName,
		watch(c.Machines.WatchMachines, &agentv1alpha1.WatchMachinesRequest{Cluster: cluster},
			func(r *agentv1alpha1.WatchMachinesResponse) event[*agentv1alpha1.Machine] {
				if e, ok := r.GetEvent().(*agentv1alpha1.WatchMachinesResponse_RemovedName); ok {
					return event[*agentv1alpha1.Machine]{kind: removed, key: e.RemovedName}
				}
				return decode(r, r.GetUpsert(), r.GetUpsert() != nil)
			}))
	m.providerID = (*agentv1alpha1.Machine).GetProviderId
	return m
}

// MirrorClusters returns a mirror of the Clusters that the client's identity may read, by
// [ClusterKey].
func (c *Client) MirrorClusters() *Mirror[*agentv1alpha1.Cluster] {
	return newMirror(c, "clusters", func(cluster *agentv1alpha1.Cluster) string { return ClusterKey(cluster.GetRef()) },
		watch(c.Clusters.WatchClusters, &agentv1alpha1.WatchClustersRequest{},
			func(r *agentv1alpha1.WatchClustersResponse) event[*agentv1alpha1.Cluster] {
				if e, ok := r.GetEvent().(*agentv1alpha1.WatchClustersResponse_Removed); ok {
					return event[*agentv1alpha1.Cluster]{kind: removed, key: ClusterKey(e.Removed)}
				}
				return decode(r, r.GetUpsert(), r.GetUpsert() != nil)
			}))
}

// MirrorPublishedObjects returns a mirror of what the hub publishes to the Cluster, by
// [PublishedKey].
func (c *Client) MirrorPublishedObjects(cluster *agentv1alpha1.ClusterRef) *Mirror[*agentv1alpha1.PublishedObject] {
	return newMirror(c, "publishedobjects", PublishedKey,
		watch(c.NodePools.WatchPublishedObjects, &agentv1alpha1.WatchPublishedObjectsRequest{Cluster: cluster},
			func(r *agentv1alpha1.WatchPublishedObjectsResponse) event[*agentv1alpha1.PublishedObject] {
				if e, ok := r.GetEvent().(*agentv1alpha1.WatchPublishedObjectsResponse_RemovedKey); ok {
					return event[*agentv1alpha1.PublishedObject]{kind: removed, key: e.RemovedKey}
				}
				return decode(r, r.GetUpsert(), r.GetUpsert() != nil)
			}))
}

// PublishedKey returns `<kind>/<name>` of a published object.
func PublishedKey(object *agentv1alpha1.PublishedObject) string {
	return object.GetKind() + "/" + object.GetName()
}

// ClusterKey returns `<namespace>/<name>` of a Cluster.
func ClusterKey(ref *agentv1alpha1.ClusterRef) string {
	return ref.GetNamespace() + "/" + ref.GetName()
}

// markers are the events that every stream has in addition to its objects.
type markers interface {
	GetSynced() *agentv1alpha1.Synced
	GetHeartbeat() *agentv1alpha1.Heartbeat
	GetResync() *agentv1alpha1.Resync
}

func decode[T proto.Message](response markers, object T, isUpsert bool) event[T] {
	switch {
	case isUpsert:
		return event[T]{kind: upsert, object: object}
	case response.GetSynced() != nil:
		return event[T]{kind: synced}
	case response.GetHeartbeat() != nil:
		return event[T]{kind: heartbeat}
	case response.GetResync() != nil:
		return event[T]{kind: resync, reason: response.GetResync().GetReason()}
	}
	return event[T]{kind: unknown}
}

// watch opens a stream of responses and converts them to events.
func watch[Request proto.Message, Response any, T proto.Message](
	call func(context.Context, Request, ...grpc.CallOption) (grpc.ServerStreamingClient[Response], error),
	request Request,
	read func(*Response) event[T],
) func(context.Context) (func() (event[T], error), error) {
	return func(ctx context.Context) (func() (event[T], error), error) {
		stream, err := call(ctx, request)
		if err != nil {
			return nil, err
		}
		return func() (event[T], error) {
			response, err := stream.Recv()
			if err != nil {
				return event[T]{}, err
			}
			return read(response), nil
		}, nil
	}
}
