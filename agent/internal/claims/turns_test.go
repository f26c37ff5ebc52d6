package claims

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// One Cluster's calls for many node groups leave another Cluster's call its turn.
func TestTheRunsOfOneClusterDoNotQueueBeforeAnothers(t *testing.T) {
	const groups = 200
	objects := make([]client.Object, 0, groups+1)
	for n := range groups {
		objects = append(objects, groupOf(fmt.Sprintf("flood-%d", n), 0, nil))
	}
	other := groupOf("other", 0, nil)
	other.Spec.ClusterName = "another"
	e := engineWith(t, append(objects, other)...)
	nothing := func(*protocol.Snapshot) *protocol.Decision { return &protocol.Decision{} }
	e.decide = nothing
	for _, object := range append(objects, other) { // as the controller does at the start
		_, err := e.group(object.GetNamespace(), object.GetName()).plan(t.Context())
		require.NoError(t, err)
	}

	var (
		mu            sync.Mutex
		running, most int
		inOrder       []string
	)
	held, release := make(chan struct{}, groups), make(chan struct{})
	e.decide = func(s *protocol.Snapshot) *protocol.Decision {
		mu.Lock()
		inOrder = append(inOrder, s.Deployment.Name)
		if s.Deployment.Name == "other" {
			mu.Unlock()
			return nothing(s)
		}
		running++
		most = max(most, running)
		mu.Unlock()
		held <- struct{}{}
		<-release
		mu.Lock()
		running--
		mu.Unlock()
		return nothing(s)
	}
	for _, object := range objects {
		e.group(object.GetNamespace(), object.GetName()).kick(t.Context())
	}
	for range perCluster {
		<-held
	}
	e.group(other.Namespace, other.Name).kick(t.Context())
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(inOrder) > perCluster
	}, 10*time.Second, time.Millisecond)
	mu.Lock()
	assert.Equal(t, "other", inOrder[perCluster], "it is next, before the %d that came earlier", groups-perCluster)
	mu.Unlock()

	close(release)
	require.Eventually(t, func() bool {
		e.turns.mu.Lock()
		defer e.turns.mu.Unlock()
		return len(e.turns.of) == 0
	}, 10*time.Second, time.Millisecond, "all have run, and nothing is left behind")
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, perCluster, most)
	assert.Subset(t, inOrder, []string{"flood-0", fmt.Sprintf("flood-%d", groups-1)})
}

// The controller's workers take turns between Clusters, too.
func TestAFloodOfOneClustersGroupsDelaysAnothersByFewSteps(t *testing.T) {
	const groups = 200
	objects := make([]client.Object, 0, groups+1)
	for n := range groups {
		objects = append(objects, groupOf(fmt.Sprintf("flood-%d", n), 0, nil))
	}
	other := groupOf("other", 0, nil)
	other.Spec.ClusterName = "another"
	e := engineWith(t, append(objects, other)...)
	var (
		mu      sync.Mutex
		inOrder []string
	)
	held, release := make(chan struct{}, groups), make(chan struct{})
	e.decide = func(s *protocol.Snapshot) *protocol.Decision {
		mu.Lock()
		inOrder = append(inOrder, s.Deployment.Name)
		mu.Unlock()
		if s.Deployment.Name != "other" {
			held <- struct{}{}
			<-release
		}
		return &protocol.Decision{}
	}
	o := options(e.Client)
	queue := o.NewQueue("claims", workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	for _, object := range objects {
		queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(object)})
	}
	var workers sync.WaitGroup
	for range o.MaxConcurrentReconciles {
		workers.Go(func() {
			for {
				request, ended := queue.Get()
				if ended {
					return
				}
				if _, err := e.Reconcile(t.Context(), request); err != nil {
					t.Error(err)
				}
				queue.Done(request)
			}
		})
	}
	for range o.MaxConcurrentReconciles {
		<-held
	}
	queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(other)})
	for range 2 { // two steps of the flood end
		release <- struct{}{}
	}
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.Contains(inOrder, "other")
	}, 10*time.Second, time.Millisecond, "it does not wait for the %d groups that came before", groups-o.MaxConcurrentReconciles)
	mu.Lock()
	assert.LessOrEqual(t, slices.Index(inOrder, "other"), o.MaxConcurrentReconciles+1)
	mu.Unlock()
	close(release)
	queue.ShutDownWithDrain()
	workers.Wait()
	assert.Len(t, inOrder, groups+1)
}

// All node groups of a Cluster share the writes that it has at once.
func TestTheWritesOfOneClusterDoNotQueueBeforeAnothers(t *testing.T) {
	const groups, each = 3, 12
	e := engineWith(t)
	var writing atomic.Int32
	release := make(chan struct{})
	e.Client = interceptor.NewClient(e.Client.(client.WithWatch), interceptor.Funcs{ //nolint:forcetypeassert // the fake is one
		Patch: func(_ context.Context, _ client.WithWatch, machine client.Object, _ client.Patch, _ ...client.PatchOption) error {
			if machine.GetName() != "other" {
				writing.Add(1)
				<-release
			}
			return nil
		},
	})
	perform := func(cluster string, names ...string) {
		s := &protocol.Snapshot{Deployment: groupOf("group", 0, nil)}
		s.Deployment.Spec.ClusterName = cluster
		_, _ = e.perform(t.Context(), s, lo.Map(names, func(name string, _ int) protocol.Action {
			m := machineOf(name)
			m.Labels[v1alpha1.ClaimLabel] = "a"
			return protocol.Action{Kind: protocol.Unbind, Machine: m}
		}))
	}
	var running sync.WaitGroup
	for range groups {
		running.Go(func() { perform(clusterName, lo.Times(each, strconv.Itoa)...) })
	}
	require.Eventually(t, func() bool { return writing.Load() == perCluster }, 20*time.Second, time.Millisecond)
	perform("another", "other") // it does not wait
	require.EqualValues(t, perCluster, writing.Load())
	close(release)
	running.Wait()
	require.EqualValues(t, groups*each, writing.Load())
}
