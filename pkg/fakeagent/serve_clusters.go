package fakeagent

import (
	"context"
	"strings"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// silence is how long after its last sync a shim is no longer connected.
const silence = 15 * time.Minute

// cluster is a Cluster that exists.
type cluster struct {
	uid     string
	created time.Time
	// shim is nil before the Cluster's shim has synchronized.
	shim *shim
}

type shim struct {
	lastSync         time.Time
	version, spokeID string
}

// ensureCluster makes the Cluster exist. a.mu must be held.
func (a *Agent) ensureCluster(key clusterKey) {
	if a.clusters[key] == nil {
		a.clusters[key] = &cluster{uid: uuid.NewString(), created: a.now()}
	}
	a.touchCluster(key)
}

// noteShim records that the Cluster's own shim has synchronized. Other callers are none. Another
// cluster replaces the recorded one only if an existing claim is in its set. a.mu must be held.
func (a *Agent) noteShim(ctx context.Context, key clusterKey, set *liveSet) {
	if caller, err := callerOf(ctx); err != nil || !caller.mayCallFor(Rule{Roles: []Role{RoleCluster}}, key) {
		return
	}
	noted := &shim{lastSync: a.now(), spokeID: set.known}
	if set.spoke != "" && (set.known == "" || set.matched) {
		noted.spokeID = set.spoke
	}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		// gRPC appends its own name and version.
		noted.version, _, _ = strings.Cut(strings.Join(md.Get("user-agent"), " "), " ")
	}
	a.clusters[key].shim = noted
	a.touchCluster(key)
	a.after(silence, func() { a.touchCluster(key) })
}

// renderCluster returns what callers see of the Cluster, and nil if it does not exist. a.mu must be
// held.
func (a *Agent) renderCluster(key clusterKey) *agentv1alpha1.Cluster {
	c := a.clusters[key]
	if c == nil {
		return nil
	}
	_, paused := a.paused[key]
	message := &agentv1alpha1.Cluster{
		Ref: key.ref(), Uid: c.uid, CreatedAt: timestamppb.New(c.created), Paused: paused,
		NodeGroups: int32(len(a.groupView.objects[key])),
		Machines:   int32(len(a.machineView.objects[key])),
	}
	for _, claim := range a.claimView.objects[key] {
		switch claim.GetPhase() {
		case agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		case agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING:
			message.PendingClaims++
			message.Claims++
		default:
			message.Claims++
		}
	}
	if s := c.shim; s != nil {
		message.Shim = &agentv1alpha1.Shim{
			Connected: a.now().Sub(s.lastSync) < silence, LastSync: timestamppb.New(s.lastSync), Version: s.version, SpokeId: s.spokeID,
		}
	}
	return message
}

type clusterService struct {
	agentv1alpha1.UnimplementedClusterServiceServer

	agent *Agent
}

// readableBy returns a function that reports whether the caller may read a Cluster.
func (s clusterService) readableBy(ctx context.Context) (func(*agentv1alpha1.Cluster) bool, error) {
	caller, err := callerOf(ctx)
	rule := s.agent.rules[agentv1alpha1.ClusterService_ListClusters_FullMethodName]
	return func(c *agentv1alpha1.Cluster) bool { return caller.mayCallFor(rule, keyOf(c.GetRef())) }, err
}

func (s clusterService) ListClusters(
	ctx context.Context, _ *agentv1alpha1.ListClustersRequest,
) (*agentv1alpha1.ListClustersResponse, error) {
	readable, err := s.readableBy(ctx)
	if err != nil {
		return nil, err
	}
	a := s.agent
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readable(ctx, clusterKey{}); err != nil {
		return nil, err
	}
	return &agentv1alpha1.ListClustersResponse{Clusters: a.clusterView.list(clusterKey{}, readable)}, nil
}

func (s clusterService) WatchClusters(
	_ *agentv1alpha1.WatchClustersRequest, stream grpc.ServerStreamingServer[agentv1alpha1.WatchClustersResponse],
) error {
	type response = agentv1alpha1.WatchClustersResponse
	readable, err := s.readableBy(stream.Context())
	if err != nil {
		return err
	}
	return serve(stream.Context(), s.agent, nil, s.agent.readable, s.agent.clusterView, readable, encoding[*agentv1alpha1.Cluster]{
		upsert: func(cluster *agentv1alpha1.Cluster) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Upsert{Upsert: cluster}})
		},
		removed: func(key string) error {
			namespace, name, _ := strings.Cut(key, "/")
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Removed{
				Removed: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: name},
			}})
		},
		synced: func(*agentv1alpha1.Synced) error { // it has no generation
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Synced{Synced: &agentv1alpha1.Synced{}}})
		},
		heartbeat: func(marker *agentv1alpha1.Heartbeat) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Heartbeat{Heartbeat: marker}})
		},
		resync: func(marker *agentv1alpha1.Resync) error {
			return stream.Send(&response{Event: &agentv1alpha1.WatchClustersResponse_Resync{Resync: marker}})
		},
	})
}
