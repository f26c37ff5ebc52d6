package server

import (
	"context"
	"errors"

	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// sender sends the events of one stream, each as its own message type.
type sender[T any] struct {
	upsert    func(T) error
	removed   func(key string) error
	synced    func(*agentv1alpha1.Synced) error
	heartbeat func(*agentv1alpha1.Heartbeat) error
	resync    func(*agentv1alpha1.Resync) error
}

// watch sends those of a Cluster's objects that wanted selects; nil selects all. It ends when the
// caller goes away or loses its rights, the agent shuts down, or the hub's API server stops
// responding. In the last case anything sent, heartbeats included, would look newer than it is.
func watch[T any](
	ctx context.Context, s *Server, objects *watchcache.Cache[T], cluster types.NamespacedName, wanted func(T) bool, send sender[T],
) error {
	if err := s.inContact(); err != nil {
		return err
	}
	ctx, stop := s.whileInContact(ctx)
	defer stop()
	ctx, end := s.whileEntitled(ctx, func(ctx context.Context) error { return s.entitled(ctx, cluster) })
	defer end()
	if call := limits.FromContext(ctx); call != nil {
		if err := call.Watch(ctx, objects.Count(cluster)); err != nil {
			return throttled(ctx, err)
		}
	}
	return forward(ctx, objects, cluster, wanted, send)
}

// forward sends a cache's events until the context ends. The returned error is for the caller, and
// names the context's cause.
func forward[T any](
	ctx context.Context, objects *watchcache.Cache[T], cluster types.NamespacedName, wanted func(T) bool, send sender[T],
) error {
	subscription, err := objects.Subscribe(cluster, wanted)
	if err != nil {
		return answerOther(ctx, err)
	}
	defer subscription.Close()
	for {
		event, err := subscription.Next(ctx)
		if lost := (*lostContactError)(nil); errors.As(context.Cause(ctx), &lost) {
			return agenterrors.HubUnreachable(lost.Error())
		}
		if ended := (*endedRightsError)(nil); errors.As(context.Cause(ctx), &ended) {
			return ended.error
		}
		if err != nil {
			return answerOther(ctx, err)
		}
		switch event.Kind {
		case watchcache.Upsert:
			err = send.upsert(event.Object)
		case watchcache.Removed:
			err = send.removed(event.Key)
		case watchcache.Synced:
			err = send.synced(&agentv1alpha1.Synced{Generation: event.Generation})
		case watchcache.Heartbeat:
			err = send.heartbeat(&agentv1alpha1.Heartbeat{Time: timestamppb.New(event.Time)})
		case watchcache.Resync:
			err = send.resync(&agentv1alpha1.Resync{Reason: "the stream was read too slowly, and changes were dropped"})
		}
		if err != nil {
			return err
		}
	}
}
