package claims

import (
	"context"
	"errors"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// moveOrder is the order in which `clusterctl move` creates objects in the target, owners first. It
// deletes them in the source in reverse order.
var moveOrder = [][]kind{{clusters}, {deployments, allClaims}, {machineSets}, {allMachines}}

// move does what `clusterctl move` does, while agents work in both hubs and a holder keeps calling.
// It pauses the Cluster, copies its objects, deletes them in the source, and creates them in the
// target before it unpauses the Cluster there. The world has only one hub, so the source is cleared
// before the target is filled, and the model's hub is first the one and then the other.
func (w *world) move() {
	if w.depth > 0 || len(w.busy) > 0 || slices.ContainsFunc(w.agents, func(p *process) bool { return p.call != nil }) || w.outsidersAtWork() {
		return
	}
	for len(w.late) > 0 {
		w.landOne()
	}
	w.peaceful, w.moving, w.moved = false, true, true
	defer func() { w.moving = false }()
	w.pauseCluster(true)
	before := w.claims()

	copies := map[kind]objects{}
	for _, group := range moveOrder {
		w.actAroundAMove(before)
		for _, k := range group {
			copies[k] = w.hub.snapshot(k)
		}
	}
	for _, group := range slices.Backward(moveOrder) {
		for _, k := range group {
			for _, name := range slices.Sorted(maps.Keys(w.hub.objects[k])) {
				w.actAroundAMove(before)
				delete(w.hub.objects[k], name)
				w.hub.version++
			}
		}
	}
	w.actAroundAMove(before)

	for e := range w.agents {
		w.agents[e] = w.newProcess(e) // the target's
	}
	for _, k := range allKinds {
		w.hub.objects[k] = objects{} // of the source, including what agents made there meanwhile
	}
	renamed := map[types.UID]types.UID{}
	for _, group := range moveOrder {
		for _, k := range group {
			for _, name := range slices.Sorted(maps.Keys(copies[k])) {
				w.actAroundAMove(before)
				renamed[copies[k][name].GetUID()] = w.makeInTarget(copies[k][name], renamed)
			}
		}
	}
	w.actAroundAMove(before)
	w.pauseCluster(false)
	w.carryOver(renamed, before)
}

// outsidersAtWork reports whether a Machine is being deleted whose release the ledger does not
// record. A move would revive it, and its deletion would have to be repeated.
func (w *world) outsidersAtWork() bool {
	return slices.ContainsFunc(w.groups, func(group string) bool {
		l := w.ledger(group)
		return slices.ContainsFunc(w.machines(group), func(m *clusterv1.Machine) bool {
			if protocol.Alive(m) {
				return false
			}
			return l == nil || l.Releasing[m.UID].Machine == "" || w.outsiders[m.UID]
		})
	})
}

// pauseCluster pauses or unpauses the Cluster. The agents know of a pause before clusterctl has
// copied anything.
func (w *world) pauseCluster(paused bool) {
	o, err := w.hub.find(clusters, clusterName)
	w.must(err)
	cluster := o.(*clusterv1.Cluster).DeepCopy() //nolint:forcetypeassert // of the kind
	cluster.Spec.Paused = &paused
	w.must(w.hub.update(cluster, false))
	for _, p := range w.agents {
		if paused {
			p.caches[clusters] = w.hub.snapshot(clusters)
		}
	}
}

// makeInTarget creates a copy of an object without its status and its deletion, and returns its new
// UID.
func (w *world) makeInTarget(source client.Object, renamed map[types.UID]types.UID) types.UID {
	o := newOf(source)
	spec := copyOf(source)
	copyStatus(spec, o)
	assign(o, spec)
	o.SetDeletionTimestamp(nil)
	owners := o.GetOwnerReferences()
	for i := range owners {
		owners[i].UID = renamed[owners[i].UID]
	}
	o.SetOwnerReferences(owners)
	w.must(w.hub.create(o))
	return o.GetUID()
}

// carryOver keeps what the world records by UID.
func (w *world) carryOver(renamed map[types.UID]types.UID, before map[string]*v1alpha1.MachineClaim) {
	for _, known := range []map[types.UID]bool{w.surge, w.tainted, w.open, w.outsiders} {
		for uid, is := range maps.Clone(known) {
			delete(known, uid)
			if now, moved := renamed[uid]; moved {
				known[now] = is
			}
		}
	}
	clear(w.seen) // deleted Machines live again
	for uid, at := range maps.Clone(w.joined) {
		delete(w.joined, uid)
		if now, moved := renamed[uid]; moved {
			w.joined[now] = at
		}
	}
	w.session = session{}
	for id, o := range w.owners {
		c := before[id]
		o.returned = false
		// A claim that ended in the very moment in which another agent entered it waits again,
		// because only the ledger is known.
		entered := slices.ContainsFunc(w.groups, func(group string) bool {
			l := w.ledger(group)
			if l == nil {
				return false
			}
			_, entered := l.Pending[id]
			return entered
		})
		o.ended = !entered && (o.ended || c != nil && c.CurrentPhase() == v1alpha1.PhaseEnded)
		if !o.ended {
			o.released = false // the caller repeats ReleaseClaim until the claim has ended
		}
	}
}

// actAroundAMove lets agents and the holder act while the hub is incomplete.
func (w *world) actAroundAMove(before map[string]*v1alpha1.MachineClaim) {
	for range w.draw("acts", 0, 2) {
		p := w.agents[w.anyAgent()]
		k := allKinds[w.pick(len(allKinds))]
		p.caches[k] = w.hub.snapshot(k)
		group := w.anyGroup()
		switch w.draw("around a move", 0, 3) {
		case 0:
			w.agentStep(w.anyAgent(), group)
		case 1:
			w.agentReconciles(w.anyAgent(), group)
		case 2:
			w.ask(w.anyAgent(), before)
		case 3:
			if len(w.order) > 0 {
				w.release(w.anyAgent(), w.anyOwner())
			}
		}
	}
}

// ask makes the calls from which a holder concludes that a claim is gone. No agent may answer that.
func (w *world) ask(e int, before map[string]*v1alpha1.MachineClaim) {
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		_, _, err := agent.List(ctx, ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		if err == nil {
			w.t.Fatalf("I9: claims are listed while a move is under way")
		}
		return err
	})
	for id := range before {
		w.asAgent(e, func(ctx context.Context, agent *Engine) error {
			_, err := agent.Get(ctx, Key{namespace, clusterName, id})
			if errors.Is(err, ErrNotFound) {
				w.t.Fatalf("I9: claim %s is said not to be there while a move is under way", id)
			}
			return err
		})
	}
}

// checkStill checks that agents write nothing to moved objects while the Cluster is paused.
func (w *world) checkStill(before moment) {
	for _, k := range []kind{deployments, machineSets, allMachines} {
		for name, o := range w.hub.objects[k] {
			if was, known := before[k][name]; known && was != o {
				w.t.Fatalf("I9: an agent writes on %s %s while the Cluster is paused", k, name)
			}
		}
	}
}
