package machineview_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/machineview"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

const (
	patience = 20 * time.Second
	// panics is the name of a Machine that makes the cache panic.
	panics = "panics"
)

var plane *capitest.ControlPlane

func TestMain(m *testing.M) { capitest.Main(m, &plane) }

type fixture struct {
	*testing.T

	namespace string
	cluster   types.NamespacedName
	machines  *watchcache.Cache[*agentv1alpha1.Machine]
	claims    *watchcache.Cache[*agentv1alpha1.Claim]
	view      *machineview.View
	// lagging are the Machines that the cache shows instead of the current ones, by name. Nil hides
	// the Machine.
	lagging sync.Map
	// failing is how many more reads of a claim from the cache fail.
	failing atomic.Int32
}

// lagged reads Machines like a cache that lags.
func (f *fixture) lagged(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if _, is := o.(*v1alpha1.MachineClaim); is && f.failing.Add(-1) >= 0 {
		return apierrors.NewServiceUnavailable("the test says so")
	}
	if machine, is := o.(*clusterv1.Machine); is {
		if key.Name == panics {
			panic("a bug")
		}
		if shown, lags := f.lagging.Load(key.Name); lags {
			if shown == nil {
				return apierrors.NewNotFound(clusterv1.GroupVersion.WithResource("machines").GroupResource(), key.Name)
			}
			shown.(*clusterv1.Machine).DeepCopyInto(machine) //nolint:forcetypeassert // nothing else is in it
			return nil
		}
	}
	return c.Get(ctx, key, o, opts...)
}

// start runs a View for a new namespace with a node group `small`, and waits until its views
// are complete.
func start(t *testing.T, before ...func(f *fixture)) *fixture {
	t.Helper()
	f := &fixture{T: t, namespace: plane.Namespace(t)}
	f.cluster = types.NamespacedName{Namespace: f.namespace, Name: "spoke"}
	f.machines = watchcache.New(watchcache.Options[*agentv1alpha1.Machine]{Equal: machineview.EqualMachines, Buffer: 100, Heartbeat: time.Minute})
	f.claims = watchcache.New(watchcache.Options[*agentv1alpha1.Claim]{Equal: machineview.EqualClaims, Buffer: 100, Heartbeat: time.Minute})
	plane.Create(t, capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0))
	for _, do := range before {
		do(f)
	}
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	scope := hub.NewScope(nil, []types.NamespacedName{f.cluster})
	caches, err := scope.CacheOptions()
	require.NoError(t, err)
	mgr, err := manager.New(plane.Config, manager.Options{
		Scheme: scheme, Cache: caches, Metrics: metricsserver.Options{BindAddress: "0"}, HealthProbeBindAddress: "0", Logger: logr.Discard(),
		Controller: hub.Controllers(),
		NewClient: func(config *rest.Config, options client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, options)
			if err != nil {
				return nil, err
			}
			return interceptor.NewClient(c, interceptor.Funcs{Get: f.lagged}), nil
		},
	})
	require.NoError(t, err)
	require.NoError(t, hub.Index(t.Context(), mgr.GetFieldIndexer()))
	f.view = machineview.New(machineview.Config{Machines: f.machines, Claims: f.claims, Scope: scope})
	require.NoError(t, f.view.SetupWithManager(mgr))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	for _, ready := range []<-chan struct{}{f.machines.Ready(), f.claims.Ready()} {
		select {
		case <-ready:
		case <-time.After(patience):
			t.Fatal("the view is not complete")
		}
	}
	return f
}

func (f *fixture) machine(name string, changes ...func(*clusterv1.Machine)) *clusterv1.Machine {
	f.Helper()
	machine := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name, Labels: map[string]string{
			clusterv1.ClusterNameLabel: "spoke", clusterv1.MachineDeploymentNameLabel: "small",
		}},
		Spec: clusterv1.MachineSpec{
			ClusterName: "spoke", Bootstrap: clusterv1.Bootstrap{DataSecretName: new("x")},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: "g.io", Kind: "K", Name: name},
		},
	}
	for _, change := range changes {
		change(machine)
	}
	plane.Create(f.T, machine)
	return machine
}

func (f *fixture) claim(id string) *v1alpha1.MachineClaim {
	f.Helper()
	claim := &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: f.namespace, Name: v1alpha1.ObjectName("spoke", id), Labels: map[string]string{v1alpha1.ClusterLabel: "spoke"},
		},
		Spec: v1alpha1.MachineClaimSpec{ClusterName: "spoke", ClaimID: id, Holder: "karpenter", NodeGroup: "small"},
	}
	plane.Create(f.T, claim)
	return claim
}

func (f *fixture) setStatus(claim *v1alpha1.MachineClaim, change func(*v1alpha1.MachineClaimStatus)) {
	f.Helper()
	require.NoError(f, plane.Client.Get(f.Context(), client.ObjectKeyFromObject(claim), claim))
	change(&claim.Status)
	require.NoError(f, plane.Client.Status().Update(f.Context(), claim))
}

func (f *fixture) patch(object client.Object, change func()) {
	f.Helper()
	require.NoError(f, plane.Client.Get(f.Context(), client.ObjectKeyFromObject(object), object))
	before, ok := object.DeepCopyObject().(client.Object)
	require.True(f, ok)
	change()
	require.NoError(f, plane.Client.Patch(f.Context(), object, client.MergeFrom(before)))
}

func until[T any](f *fixture, view *watchcache.Cache[T], key string, wanted func(object T, found bool) bool) T {
	f.Helper()
	var object T
	err := wait.PollUntilContextTimeout(f.Context(), 5*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		var found bool
		var err error
		object, found, err = view.Get(f.cluster, key)
		return err == nil && wanted(object, found), err
	})
	require.NoError(f, err, "%v", object)
	return object
}

func found[T any](_ T, found bool) bool { return found }

func gone[T any](_ T, found bool) bool { return !found }

func TestMachinesOfNodeGroupsAreShown(t *testing.T) {
	f := start(t, func(f *fixture) {
		f.machine("first")
		plane.Create(f.T, capitest.NewMachineDeployment(f.namespace, "closed", "spoke", 0, func(md *clusterv1.MachineDeployment) {
			delete(md.Labels, v1alpha1.MemberLabel)
		}))
		f.machine("closed", func(m *clusterv1.Machine) { m.Labels[clusterv1.MachineDeploymentNameLabel] = "closed" })
		f.machine("foreign", func(m *clusterv1.Machine) {
			m.Spec.ClusterName, m.Labels[clusterv1.ClusterNameLabel] = "other", "other"
		})
	})
	all, _, err := f.machines.List(f.cluster)
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, f.namespace+"/small", all[0].GetNodeGroupId())

	md := capitest.NewMachineDeployment(f.namespace, "closed", "spoke", 0)
	f.patch(md, func() { md.Labels[v1alpha1.MemberLabel] = "" })
	until(f, f.machines, "closed", found)
	f.patch(md, func() { delete(md.Labels, v1alpha1.MemberLabel) })
	until(f, f.machines, "closed", gone)

	first := f.machine("second")
	until(f, f.machines, "second", found)
	f.patch(first, func() { first.Spec.ProviderID = "test://second" })
	until(f, f.machines, "second", func(m *agentv1alpha1.Machine, _ bool) bool { return m.GetProviderId() == "test://second" })
	require.NoError(t, plane.Client.Delete(t.Context(), first))
	until(f, f.machines, "second", gone)
}

func TestClaimShowsItsMachineOnlyOnceItIsLabelled(t *testing.T) {
	f := start(t)
	claim, machine := f.claim("a"), f.machine("m")
	pending := until(f, f.claims, "a", found)
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, pending.GetPhase())
	require.Equal(t, protoconv.WaitingReason, pending.GetReason())
	until(f, f.machines, "m", found)

	f.setStatus(claim, func(s *v1alpha1.MachineClaimStatus) {
		s.Phase, s.Reason = v1alpha1.PhaseBound, "Bound"
		s.Machine = &v1alpha1.MachineReference{Name: "m", UID: machine.UID}
	})
	binding := until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool { return c.GetReason() == protoconv.BindingReason })
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, binding.GetPhase())
	require.Nil(t, binding.GetMachine())

	f.patch(machine, func() { machine.Labels[v1alpha1.ClaimLabel] = "a" })
	require.NoError(t, plane.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	shown, err := f.view.Show(t.Context(), claim)
	require.NoError(t, err)
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, shown.GetPhase(), "the caches may not know yet, the API server does")
	bound := until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	})
	require.Equal(t, string(machine.UID), bound.GetMachine().GetUid())
	require.Equal(t, "a", bound.GetMachine().GetClaimId())

	f.patch(machine, func() { machine.Spec.ProviderID = "test://m" })
	until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool { return c.GetMachine().GetProviderId() == "test://m" })

	// The Machine is removed, and its last known state stays.
	f.setStatus(claim, func(s *v1alpha1.MachineClaimStatus) {
		s.Phase, s.Reason = v1alpha1.PhaseEnded, "Released"
		s.Machine.ProviderID = "test://m"
	})
	require.NoError(t, plane.Client.Delete(t.Context(), machine))
	until(f, f.machines, "m", gone)
	// The caches of Machines and claims may show the change in any order.
	ended := until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED && c.GetMachine().GetCreatedAt() == nil
	})
	require.Equal(t, string(machine.UID), ended.GetMachine().GetUid())
	require.Equal(t, "test://m", ended.GetMachine().GetProviderId())

	require.NoError(t, plane.Client.Delete(t.Context(), claim))
	until(f, f.claims, "a", gone)
}

// The caches of claims and Machines lag independently of each other.
func TestAClaimIsShownBoundOnceItsMachineIsLabelledAndStaysSo(t *testing.T) {
	f := start(t)
	f.lagging.Store("m", nil)
	claim, machine := f.claim("b"), f.machine("m")
	unlabelled := machine.DeepCopy()
	f.setStatus(claim, func(s *v1alpha1.MachineClaimStatus) {
		s.Phase, s.Reason = v1alpha1.PhaseBound, "Bound"
		s.Machine = &v1alpha1.MachineReference{Name: "m", UID: machine.UID}
	})
	early := until(f, f.claims, "b", func(c *agentv1alpha1.Claim, found bool) bool {
		return found && c.GetReason() != protoconv.WaitingReason
	})
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, early.GetPhase(), "its Machine is not labelled, and the cache does not show it")
	require.Equal(t, protoconv.BindingReason, early.GetReason())

	f.patch(machine, func() {
		machine.Labels[v1alpha1.ClaimLabel] = "b"
		machine.Spec.ProviderID = "test://m"
	})
	until(f, f.claims, "b", func(c *agentv1alpha1.Claim, _ bool) bool {
		return c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	})
	f.lagging.Store("m", unlabelled)
	f.setStatus(claim, func(s *v1alpha1.MachineClaimStatus) { s.Message = "looked at again" })
	later := until(f, f.claims, "b", func(c *agentv1alpha1.Claim, _ bool) bool {
		return c.GetMessage() != "" && c.GetMessage() != early.GetMessage()
	})
	require.Equal(t, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, later.GetPhase(), "the cache shows its Machine as it was before")
	require.Equal(t, string(machine.UID), later.GetMachine().GetUid())
	require.Equal(t, "test://m", later.GetMachine().GetProviderId())
}

// Readers of a view without the claim would assume that it is gone.
func TestAViewIsNotCompleteWithoutAClaimThatCouldNotBeRead(t *testing.T) {
	f := start(t, func(f *fixture) {
		f.claim("c")
		f.failing.Store(4)
	})
	all, _, err := f.claims.List(f.cluster)
	require.NoError(t, err)
	require.Len(t, all, 1)
}

func TestMachineThatIsHandedOverLeavesItsFormerClaim(t *testing.T) {
	f := start(t)
	claim := f.claim("a")
	machine := f.machine("m", func(m *clusterv1.Machine) { m.Labels[v1alpha1.ClaimLabel] = "a" })
	f.setStatus(claim, func(s *v1alpha1.MachineClaimStatus) {
		s.Phase, s.Machine = v1alpha1.PhaseReleasing, &v1alpha1.MachineReference{Name: "m", UID: machine.UID}
	})
	until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool { return c.GetMachine().GetCreatedAt() != nil })
	f.patch(machine, func() { machine.Labels[v1alpha1.ClaimLabel] = "b" })
	until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool {
		// Only the reference is left: the Machine now belongs to another claim.
		return c.GetMachine().GetCreatedAt() == nil && c.GetMachine().GetUid() == string(machine.UID)
	})
}

func TestAMachineOfTheSameNameIsNotTheClaims(t *testing.T) {
	f := start(t)
	claim := f.claim("a")
	f.machine("m", func(m *clusterv1.Machine) { m.Labels[v1alpha1.ClaimLabel] = "a" })
	f.setStatus(claim, func(s *v1alpha1.MachineClaimStatus) {
		s.Phase, s.Machine = v1alpha1.PhaseReleasing, &v1alpha1.MachineReference{Name: "m", UID: "another"}
	})
	shown := until(f, f.claims, "a", func(c *agentv1alpha1.Claim, _ bool) bool { return c.GetMachine() != nil })
	require.Equal(t, "another", shown.GetMachine().GetUid())
	require.Nil(t, shown.GetMachine().GetCreatedAt())
}

func TestAPanicCostsOneMachineAlone(t *testing.T) {
	f := start(t)
	f.machine(panics)
	f.machine("healthy")
	require.Eventually(t, func() bool {
		_, found := f.machines.Peek(f.cluster, "healthy")
		return found
	}, patience, time.Millisecond)
	_, found := f.machines.Peek(f.cluster, panics)
	require.False(t, found)
}
