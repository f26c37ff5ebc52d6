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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
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
func TestAFloodOfOneClustersGroupsDelaysAnothersByNoStep(t *testing.T) {
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
		workers.Go(func() { work(t, e, queue) })
	}
	atOnce := o.MaxConcurrentReconciles * 2 / 3
	for range atOnce {
		<-held
	}
	queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(other)})
	began := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(inOrder)
	}
	require.Eventually(t, func() bool { return slices.Contains(began(), "other") }, 10*time.Second, time.Millisecond,
		"it does not wait for the %d groups that came before", groups-atOnce)
	assert.Equal(t, atOnce, slices.Index(began(), "other"), "it does not even wait for a step of the flood")
	close(release)
	require.Eventually(t, func() bool { return len(began()) == groups+1 }, 10*time.Second, time.Millisecond)
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

// An admission webhook may take seconds for each write on the objects of one tenant.
func TestTheSlowWritesOfOneClusterDelayNoOthers(t *testing.T) {
	waiting := func(group, cluster string) []client.Object {
		ledger := protocol.Ledger{Version: 1, Seq: 1, LastReplicas: 1, Pending: map[string]protocol.Assignment{group: {}}}
		md := groupOf(group, 1, map[string]string{v1alpha1.LedgerAnnotation: ledger.Encode()})
		md.Spec.ClusterName = cluster
		m := machineOf(group)
		m.Labels[clusterv1.MachineDeploymentNameLabel], m.Labels[clusterv1.ClusterNameLabel], m.Spec.ClusterName = group, cluster, cluster
		return []client.Object{md, m, &v1alpha1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: v1alpha1.ObjectName(cluster, group), CreationTimestamp: metav1.Now(),
				Labels: map[string]string{v1alpha1.ClusterLabel: cluster, v1alpha1.NodeGroupLabel: group},
			},
			Spec:   v1alpha1.MachineClaimSpec{ClusterName: cluster, ClaimID: group, NodeGroup: group, Candidates: []string{group}},
			Status: v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
		}}
	}
	const groups = 2 * concurrentGroups
	objects := append(waiting("other", "another"), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "another"}})
	for n := range groups {
		objects = append(objects, waiting(fmt.Sprintf("slow-%d", n), clusterName)...)
	}
	e := engineWith(t, objects...)
	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	var slow atomic.Int32
	release := make(chan struct{})
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			if md, is := o.(*clusterv1.MachineDeployment); is && md.Name != "other" {
				slow.Add(1)
				<-release
			}
			return c.Patch(ctx, o, p, opts...)
		},
	})
	o := options(hub)
	queue := o.NewQueue("claims", workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	var workers sync.WaitGroup
	defer workers.Wait()
	defer queue.ShutDown()
	defer close(release)
	for range o.MaxConcurrentReconciles {
		workers.Go(func() { work(t, e, queue) })
	}
	for n := range groups {
		queue.Add(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: fmt.Sprintf("slow-%d", n)}})
	}
	atOnce := o.MaxConcurrentReconciles * 2 / 3
	require.Eventually(t, func() bool { return int(slow.Load()) >= atOnce }, 20*time.Second, time.Millisecond)
	queue.Add(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: namespace, Name: "other"}})
	require.Eventually(t, func() bool {
		var c v1alpha1.MachineClaim
		err := hub.Get(t.Context(), Key{Namespace: namespace, Cluster: "another", ID: "other"}.object(), &c)
		return err == nil && c.Status.Phase == v1alpha1.PhaseBound
	}, 10*time.Second, time.Millisecond)
	assert.EqualValues(t, atOnce, slow.Load(), "a Cluster has no more workers, however long it has waited")
}

// work is a worker of the node groups' controller.
func work(t *testing.T, e *Engine, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	t.Helper()
	for {
		request, ended := queue.Get()
		if ended {
			return
		}
		result, err := e.Reconcile(t.Context(), request)
		if err != nil {
			t.Errorf("reconciling %s: %v", request, err)
		}
		if result.RequeueAfter > 0 {
			queue.AddAfter(request, result.RequeueAfter)
		}
		queue.Done(request)
	}
}
