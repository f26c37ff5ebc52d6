package simprovider

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// bench is an in-memory hub with one Machine and a workload cluster, and a clock that only moves
// when told to.
type bench struct {
	t          *testing.T
	hub, spoke client.Client
	clock      *clocktesting.FakeClock
}

func (b *bench) client(context.Context, client.ObjectKey) (client.Client, error) { return b.spoke, nil }

func (b *bench) serverVersion(context.Context, client.ObjectKey) (string, error) {
	return "v1.36.3", nil
}

func newBench(t *testing.T, spec simv1.SimMachineSpec) *bench {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, clusterv1.AddToScheme, simv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	metadata := metav1.ObjectMeta{Namespace: "fleet", Name: "one", Labels: map[string]string{clusterv1.ClusterNameLabel: "spoke"}}
	owned := metadata
	owned.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: clusterv1.GroupVersion.String(), Kind: "Machine", Name: "one", UID: "1", Controller: new(true),
	}}
	return &bench{
		t: t,
		hub: fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&simv1.SimMachine{}).WithObjects(
			&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}},
			&clusterv1.Machine{ObjectMeta: metadata, Spec: clusterv1.MachineSpec{
				ClusterName: "spoke", Version: "v1.36.3", Bootstrap: clusterv1.Bootstrap{DataSecretName: new("bootstrap")},
			}},
			&simv1.SimMachine{ObjectMeta: owned, Spec: spec},
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "bootstrap"}},
		).Build(),
		spoke: fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&corev1.Node{}).Build(),
		clock: clocktesting.NewFakeClock(time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)),
	}
}

// reconcile reconciles like a provider that has just started, without any state in memory.
func (b *bench) reconcile() reconcile.Result {
	b.t.Helper()
	r := &machineReconciler{hub: b.hub, workloads: b, clock: b.clock}
	result, err := r.Reconcile(b.t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Namespace: "fleet", Name: "one"}})
	if err != nil {
		b.t.Fatal(err)
	}
	return result
}

func (b *bench) instance() *simv1.SimMachine {
	b.t.Helper()
	m := &simv1.SimMachine{}
	if err := b.hub.Get(b.t.Context(), client.ObjectKey{Namespace: "fleet", Name: "one"}, m); err != nil {
		b.t.Fatal(err)
	}
	return m
}

func (b *bench) update(o client.Object, change func()) {
	b.t.Helper()
	if err := b.hub.Get(b.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		b.t.Fatal(err)
	}
	change()
	if err := b.hub.Update(b.t.Context(), o); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) wantReason(reason string) {
	b.t.Helper()
	c := meta.FindStatusCondition(b.instance().Status.Conditions, clusterv1.ReadyCondition)
	if c == nil || c.Reason != reason {
		b.t.Fatalf("the Ready condition is %+v, want the reason %s", c, reason)
	}
}

func (b *bench) node() *corev1.Node {
	b.t.Helper()
	node := &corev1.Node{}
	if err := b.spoke.Get(b.t.Context(), client.ObjectKey{Name: "one"}, node); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		b.t.Fatal(err)
	}
	return node
}

func delays(d time.Duration) simv1.SimMachineSpec {
	delay := metav1.Duration{Duration: d}
	return simv1.SimMachineSpec{
		BootDelay: delay, JoinDelay: delay, TerminationDelay: delay, InstanceType: "small", Zone: "a",
		Capacity: resources("cpu", "4", "memory", "8Gi"),
		NodeInfo: simv1.NodeInfo{Architecture: "arm64", OperatingSystem: "linux"},
		NodeTaints: []corev1.Taint{
			{Key: "karpenter.sh/unregistered", Effect: corev1.TaintEffectNoExecute}, clusterv1.NodeUninitializedTaint,
		},
	}
}

func TestAnInstanceLivesThroughRestartsOfItsProvider(t *testing.T) {
	b := newBench(t, delays(10*time.Second))

	if result := b.reconcile(); result.RequeueAfter != 10*time.Second {
		t.Errorf("booting, it comes back after %s", result.RequeueAfter)
	}
	b.wantReason(simv1.ReasonBooting)
	if m := b.instance(); m.Spec.ProviderID != "" || !slices.Contains(m.Finalizers, simv1.MachineFinalizer) {
		t.Errorf("booting, it is %+v", m)
	}

	b.clock.Step(10 * time.Second)
	b.reconcile()
	b.wantReason(simv1.ReasonRunning)
	if m := b.instance(); m.Spec.ProviderID != "sim://spoke/one" || m.Status.FailureDomain != "a" ||
		!ptr.Deref(m.Status.Initialization.Provisioned, false) {
		t.Errorf("booted, it is %+v", m)
	}
	if b.node() != nil {
		t.Error("the kubelet joined before its time")
	}

	b.clock.Step(10 * time.Second)
	b.reconcile()
	node := b.node()
	if node == nil {
		t.Fatal("the kubelet did not join")
	}
	if node.Spec.ProviderID != "sim://spoke/one" || node.Status.NodeInfo.KubeletVersion != "v1.36.3" || len(node.Status.Conditions) != 4 ||
		node.Labels[corev1.LabelArchStable] != "arm64" || node.Labels[KubeletLabel] != KubeletLabelValue || len(node.Spec.Taints) != 2 {
		t.Errorf("the Node is %+v", node)
	}

	if err := b.spoke.Delete(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	b.clock.Step(time.Hour)
	b.reconcile()
	if b.node() != nil {
		t.Error("a kubelet that runs registered its Node a second time")
	}
}

func TestAnInstanceThatIsDeletedFallsSilentAndIsGone(t *testing.T) {
	b := newBench(t, delays(0))
	b.reconcile()
	if b.node() == nil {
		t.Fatal("the kubelet did not join")
	}
	m := b.instance()
	b.update(m, func() { m.Spec.TerminationDelay = metav1.Duration{Duration: time.Minute} })
	if err := b.hub.Delete(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
	b.update(machine, func() { machine.Status.NodeRef.Name = "one" })

	if result := b.reconcile(); result.RequeueAfter != time.Minute {
		t.Errorf("terminating, it comes back after %s", result.RequeueAfter)
	}
	b.wantReason(simv1.ReasonTerminating)
	node := b.node()
	if _, alive := node.Labels[KubeletLabel]; alive {
		t.Error("kwok still plays its kubelet")
	}
	ready := slices.IndexFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	if node.Status.Conditions[ready].Status != corev1.ConditionFalse || len(node.Status.Conditions) != 4 {
		t.Errorf("the Node's conditions are %+v", node.Status.Conditions)
	}

	b.clock.Step(time.Minute)
	b.reconcile()
	if err := b.hub.Get(t.Context(), client.ObjectKeyFromObject(m), m); !apierrors.IsNotFound(err) {
		t.Errorf("it is still there: %v", err)
	}
	if b.node() == nil {
		t.Error("the provider deleted the Node, which is Cluster API's to do")
	}
}

func TestTheNodeOfAnInstanceIsRemovedUnlessAnotherActorRemovesIt(t *testing.T) {
	machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
	for name, test := range map[string]struct {
		before func(*bench) error
		stays  bool
	}{
		"Cluster API has not seen the Node": {before: func(*bench) error { return nil }},
		"the Machine was removed by force":  {before: func(b *bench) error { return b.hub.Delete(t.Context(), machine.DeepCopy()) }},
		"the Node is that of another instance": {stays: true, before: func(b *bench) error {
			if err := b.spoke.Delete(t.Context(), b.node()); err != nil {
				return err
			}
			return b.spoke.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "one"}, Spec: corev1.NodeSpec{ProviderID: "sim://another"}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, delays(0))
			b.reconcile()
			m := b.instance()
			if err := b.hub.Delete(t.Context(), m); err != nil {
				t.Fatal(err)
			}
			if err := test.before(b); err != nil {
				t.Fatal(err)
			}
			b.reconcile()
			if err := b.hub.Get(t.Context(), client.ObjectKeyFromObject(m), m); !apierrors.IsNotFound(err) {
				t.Errorf("the instance is still there: %v", err)
			}
			if stays := b.node() != nil; stays != test.stays {
				t.Errorf("the Node stays: %t, want %t", stays, test.stays)
			}
		})
	}
}

func TestAnInstanceWaitsAsTheContractDemands(t *testing.T) {
	t.Run("for its Machine", func(t *testing.T) {
		b := newBench(t, delays(0))
		m := b.instance()
		b.update(m, func() { m.OwnerReferences = nil })
		b.reconcile()
		b.wantReason(simv1.ReasonWaitingForMachine)
	})
	t.Run("for the name of its bootstrap data", func(t *testing.T) {
		b := newBench(t, delays(0))
		machine := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
		b.update(machine, func() { machine.Spec.Bootstrap.DataSecretName = nil })
		b.reconcile()
		b.wantReason(simv1.ReasonWaitingForBootstrapData)
	})
	t.Run("for its bootstrap data", func(t *testing.T) {
		b := newBench(t, delays(0))
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "bootstrap"}}
		if err := b.hub.Delete(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		if result := b.reconcile(); result.RequeueAfter == 0 {
			t.Error("it does not look again")
		}
		b.wantReason(simv1.ReasonWaitingForBootstrapData)
		secret.ResourceVersion = ""
		if err := b.hub.Create(t.Context(), secret); err != nil {
			t.Fatal(err)
		}
		b.reconcile()
		b.wantReason(simv1.ReasonRunning)
	})
	t.Run("while its Cluster is paused", func(t *testing.T) {
		b := newBench(t, delays(0))
		cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}}
		b.update(cluster, func() { cluster.Spec.Paused = new(true) })
		b.reconcile()
		b.wantReason(simv1.ReasonPaused)
	})
	t.Run("while there is no room", func(t *testing.T) {
		spec := delays(0)
		spec.Failure = &simv1.MachineFailure{Reason: "InsufficientCapacity", Message: "zone a is full"}
		b := newBench(t, spec)
		b.reconcile()
		b.wantReason("InsufficientCapacity")
		m := b.instance()
		b.update(m, func() { m.Spec.Failure = nil })
		b.reconcile()
		b.wantReason(simv1.ReasonRunning)
	})
}
