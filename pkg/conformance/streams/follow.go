package streams

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Watcher watches an agent, and records what it receives.
type Watcher interface {
	// Follow opens one stream after the other until ctx is done, and requests lists meanwhile.
	Follow(ctx context.Context)
	// Settled waits until the current stream has shown what a list shows. Nothing may change
	// meanwhile. If ctx is done before, the error reports the differences.
	Settled(ctx context.Context) error
	// Excuse exempts an object from the rules about its history, because its state was lost.
	Excuse(key string)
	// Check returns the figures, and the violations, oldest first.
	Check() (Figures, []string)
}

// All returns watchers of everything in a Cluster that the client's identity may see: node groups,
// machines, all claims, and the claims of each of the holders.
func All(who string, c *client.Client, cluster *agentv1alpha1.ClusterRef, o Options, holders ...string) []Watcher {
	watchers := []Watcher{
		&follower[*agentv1alpha1.NodeGroup]{
			Record: New(who, NodeGroups(cluster), o),
			watch: messages(c.NodeGroups.WatchNodeGroups, &agentv1alpha1.WatchNodeGroupsRequest{Cluster: cluster},
				(*agentv1alpha1.WatchNodeGroupsResponse).GetUpsert, (*agentv1alpha1.WatchNodeGroupsResponse).GetRemovedId),
			list: func(ctx context.Context) ([]*agentv1alpha1.NodeGroup, int64, error) {
				r, err := c.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: cluster})
				return r.GetNodeGroups(), r.GetGeneration(), err
			},
		},
		&follower[*agentv1alpha1.Machine]{
			Record: New(who, Machines(cluster), o),
			watch: messages(c.Machines.WatchMachines, &agentv1alpha1.WatchMachinesRequest{Cluster: cluster},
				(*agentv1alpha1.WatchMachinesResponse).GetUpsert, (*agentv1alpha1.WatchMachinesResponse).GetRemovedName),
			list: func(ctx context.Context) ([]*agentv1alpha1.Machine, int64, error) {
				r, err := c.Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{Cluster: cluster})
				return r.GetMachines(), 0, err
			},
		},
	}
	for _, holder := range append([]string{""}, holders...) {
		watchers = append(watchers, &follower[*agentv1alpha1.Claim]{
			Record: New(strings.TrimSpace(who+" "+holder), Claims(cluster, holder), o),
			watch: messages(c.Claims.WatchClaims, &agentv1alpha1.WatchClaimsRequest{Cluster: cluster, Holder: holder},
				(*agentv1alpha1.WatchClaimsResponse).GetUpsert, (*agentv1alpha1.WatchClaimsResponse).GetRemovedId),
			list: func(ctx context.Context) ([]*agentv1alpha1.Claim, int64, error) {
				r, err := c.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: cluster, Holder: holder, IncludeEnded: true})
				return r.GetClaims(), 0, err
			},
		})
	}
	return watchers
}

const (
	// openAgain is how long a watcher waits before it opens the next stream.
	openAgain = 200 * time.Millisecond
	// listWithin is the timeout of a list.
	listWithin = 10 * time.Second
)

type follower[T proto.Message] struct {
	*Record[T]

	watch func(context.Context) (receive func() (Event[T], error), err error)
	list  func(context.Context) (objects []T, generation int64, err error)
}

func (f *follower[T]) Follow(ctx context.Context) {
	for pause(ctx, openAgain) {
		f.one(ctx)
	}
}

// one follows a stream until it ends.
func (f *follower[T]) one(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	var lists sync.WaitGroup
	defer lists.Wait()
	defer cancel()
	receive, err := f.watch(ctx)
	if err != nil {
		return
	}
	f.Open()
	defer f.Ended()
	synced := make(chan struct{}, 1)
	lists.Go(func() { f.compare(ctx, synced) })
	for {
		event, err := receive()
		if err != nil {
			return
		}
		f.Event(event)
		if event.Kind == Synced {
			select {
			case synced <- struct{}{}:
			default:
			}
		}
	}
}

// compare requests a list after each marker, and periodically.
func (f *follower[T]) compare(ctx context.Context, synced <-chan struct{}) {
	tick := time.NewTicker(f.options.ListEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-synced:
		case <-tick.C:
		}
		answered := f.List()
		if objects, generation, err := f.ask(ctx); err == nil {
			answered(objects, generation)
		}
	}
}

func (f *follower[T]) ask(ctx context.Context) ([]T, int64, error) {
	ctx, cancel := context.WithTimeout(ctx, listWithin)
	defer cancel()
	return f.list(ctx)
}

func (f *follower[T]) Settled(ctx context.Context) error {
	var differ []string
	for {
		objects, _, err := f.ask(ctx)
		if err == nil {
			if differ = f.Differences(objects); len(differ) == 0 {
				return nil
			}
		}
		if !pause(ctx, openAgain) {
			return errors.Join(err, fmt.Errorf("%s watches %s, and at rest it differs from a list: %s", f.who, f.rules.Name, Summary(differ)))
		}
	}
}

// pause waits, and reports whether ctx is not done.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// markers are the events that every stream has in addition to its objects.
type markers interface {
	GetSynced() *agentv1alpha1.Synced
	GetHeartbeat() *agentv1alpha1.Heartbeat
	GetResync() *agentv1alpha1.Resync
}

// messages opens a stream and converts its messages to events.
func messages[Request proto.Message, Response any, T interface {
	proto.Message
	comparable
}, M interface {
	*Response
	markers
}](
	call func(context.Context, Request, ...grpc.CallOption) (grpc.ServerStreamingClient[Response], error), request Request,
	upsert func(*Response) T, removed func(*Response) string,
) func(context.Context) (func() (Event[T], error), error) {
	return func(ctx context.Context) (func() (Event[T], error), error) {
		stream, err := call(ctx, request)
		if err != nil {
			return nil, err
		}
		return func() (Event[T], error) {
			message, err := stream.Recv()
			if err != nil {
				return Event[T]{}, err
			}
			var none T
			if object := upsert(message); object != none {
				return Event[T]{Kind: Upsert, Object: object}, nil
			}
			switch m := M(message); {
			case m.GetSynced() != nil:
				return Event[T]{Kind: Synced, Generation: m.GetSynced().GetGeneration()}, nil
			case m.GetResync() != nil:
				return Event[T]{Kind: Resync}, nil
			case m.GetHeartbeat() != nil:
				return Event[T]{Kind: Heartbeat}, nil
			}
			return Event[T]{Kind: Removed, Key: removed(message)}, nil
		}, nil
	}
}
