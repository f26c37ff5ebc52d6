package simprovider

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

// move replaces the instance's object with what clusterctl creates in the target hub: an object
// that never had a status.
func (b *bench) move() {
	b.t.Helper()
	m := b.instance()
	m.Status = simv1.SimMachineStatus{}
	if err := b.hub.Status().Update(b.t.Context(), m); err != nil {
		b.t.Fatal(err)
	}
}

func TestAnInstanceThatMovedIsKnownByItsProviderID(t *testing.T) {
	b := newBench(t, delays(10*time.Second))
	for range 3 {
		b.reconcile()
		b.clock.Step(10 * time.Second)
	}
	node := b.node()
	if node == nil {
		t.Fatal("the kubelet did not join")
	}
	providerID, addresses := b.instance().Spec.ProviderID, b.instance().Status.Addresses

	b.move()
	b.reconcile()
	b.wantReason(simv1.ReasonRunning)
	m := b.instance()
	if m.Spec.ProviderID != providerID || !ptr.Deref(m.Status.Initialization.Provisioned, false) || m.Status.FailureDomain != "a" ||
		len(m.Status.Addresses) != 2 || m.Status.Addresses[0] != addresses[0] || m.Status.Addresses[1] != addresses[1] {
		t.Errorf("it is %+v", m)
	}
	b.clock.Step(time.Hour)
	b.reconcile()
	if now := b.node(); now == nil || now.ResourceVersion != node.ResourceVersion {
		t.Errorf("a kubelet that runs registered its Node again: %+v", now)
	}

	if err := b.hub.Delete(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	b.reconcile()
	b.wantReason(simv1.ReasonTerminating)
	if _, alive := b.node().Labels[KubeletLabel]; alive {
		t.Error("its kubelet runs on although it was stopped")
	}
}

func TestAnInstanceThatMovedAndIsDeletedAtOnceIsStopped(t *testing.T) {
	b := newBench(t, delays(0))
	b.reconcile()
	if b.node() == nil {
		t.Fatal("the kubelet did not join")
	}
	m := b.instance()
	b.update(m, func() { m.Spec.TerminationDelay = metav1.Duration{Duration: time.Minute} })
	b.move()
	if err := b.hub.Delete(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	b.reconcile()
	b.reconcile()
	if _, alive := b.node().Labels[KubeletLabel]; alive {
		t.Error("its kubelet runs on although it was stopped")
	}
}

func TestAnInstanceThatMovedBeforeItJoinedJoins(t *testing.T) {
	b := newBench(t, delays(10*time.Second))
	for range 2 {
		b.reconcile()
		b.clock.Step(10 * time.Second)
	}
	if b.instance().Spec.ProviderID == "" || b.node() != nil {
		t.Fatal("it is not between its boot and its Node")
	}
	b.move()
	b.reconcile()
	if result := b.reconcile(); result.RequeueAfter != 10*time.Second {
		t.Errorf("it comes back after %s", result.RequeueAfter)
	}
	b.clock.Step(10 * time.Second)
	b.reconcile()
	if b.node() == nil {
		t.Error("the kubelet did not join")
	}
}

func TestAnInstanceWhoseObjectMovesAwayIsLeftAlone(t *testing.T) {
	cluster := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}}
	for name, leave := range map[string]func(b *bench){
		"deleted while its Cluster is paused": func(b *bench) {
			b.update(cluster, func() { cluster.Spec.Paused = new(true) })
		},
		"deleted for a move, its Cluster not seen": func(b *bench) {
			m := b.instance()
			b.update(m, func() { m.Annotations = map[string]string{deleteForMove: ""} })
			if err := b.hub.Delete(b.t.Context(), cluster); err != nil {
				b.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, delays(0))
			b.reconcile()
			node := b.node()
			if node == nil {
				t.Fatal("the kubelet did not join")
			}
			leave(b)
			if err := b.hub.Delete(t.Context(), b.instance()); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				b.reconcile()
				b.clock.Step(time.Hour)
			}
			if m := b.instance(); m.Status.StoppedAt != nil || len(m.Finalizers) == 0 {
				t.Errorf("the instance was stopped: %+v", m)
			}
			if now := b.node(); now == nil || now.ResourceVersion != node.ResourceVersion {
				t.Errorf("the Node was changed: %+v", now)
			}
		})
	}
}

// staleOnce returns an old version of the instance once, like a cache that has the provider ID but
// not the status yet.
type staleOnce struct {
	client.Client
	stale *simv1.SimMachine
}

func (c *staleOnce) Get(ctx context.Context, key client.ObjectKey, o client.Object, options ...client.GetOption) error {
	if m, ok := o.(*simv1.SimMachine); ok && c.stale != nil {
		c.stale.DeepCopyInto(m)
		c.stale = nil
		return nil
	}
	return c.Client.Get(ctx, key, o, options...)
}

func TestAnInstanceWhoseStatusIsNotSeenYetKeepsIt(t *testing.T) {
	b := newBench(t, delays(0))
	m := b.instance()
	b.update(m, func() { m.Spec.ProviderID = "sim://spoke/one" })
	stale := b.instance()
	for range 2 {
		b.reconcile()
	}
	node, status := b.node(), b.instance().Status
	if node == nil || status.JoinedAt == nil {
		t.Fatal("the kubelet did not join")
	}
	b.clock.Step(time.Hour)
	b.hub = &staleOnce{Client: b.hub, stale: stale}
	if result := b.reconcile(); result.RequeueAfter == 0 {
		t.Error("it does not look again")
	}
	if now := b.instance().Status; !now.JoinedAt.Equal(status.JoinedAt) || !now.BootedAt.Equal(status.BootedAt) {
		t.Errorf("the status was %+v and is %+v", status, now)
	}
	if now := b.node(); now == nil || now.ResourceVersion != node.ResourceVersion {
		t.Errorf("a kubelet that runs registered its Node again: %+v", now)
	}
}
