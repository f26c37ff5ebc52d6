package claims

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// maxOwners bounds a history, because more claims show nothing new.
const maxOwners = 6

// pausedByHuman is the value of the paused annotation when a person pauses a MachineDeployment.
const pausedByHuman = "maintenance"

func (w *world) draw(what string, from, to int) int {
	return rapid.IntRange(from, to).Draw(w.dice, what)
}

// rarely returns true about once in n calls.
func (w *world) rarely(n int) bool { return w.draw("rarely", 1, n) == 1 }

func (w *world) pick(n int) int {
	if w.fair || n == 1 {
		return 0
	}
	return w.draw("pick", 0, n-1)
}

func (w *world) anyAgent() int        { return w.draw("agent", 0, len(w.agents)-1) }
func (w *world) anyGroup() string     { return w.groups[w.pick(len(w.groups))] }
func (w *world) anyOwner() string     { return w.order[w.pick(len(w.order))] }
func (w *world) candidates() []string { return rapid.Permutation(w.groups).Draw(w.dice, "candidates") }

func (w *world) anyMachine() *clusterv1.Machine {
	all := w.machines(w.anyGroup())
	if len(all) == 0 {
		return nil
	}
	return all[w.pick(len(all))]
}

// interleave lets the adversary act while an agent or a controller is in the middle of an
// operation.
func (w *world) interleave() {
	if w.fair || w.moving || w.depth >= 2 {
		return
	}
	w.depth++
	names := slices.Sorted(maps.Keys(w.actions))
	for range w.draw("others act", 1, 4) {
		w.act(rapid.SampledFrom(names).Draw(w.dice, "meanwhile"))
	}
	w.depth--
}

func (w *world) act(name string) {
	w.events++
	w.actions[name]()
}

// plan fills the actions. Those that advance a history have several entries, so that they are
// chosen more often.
func (w *world) plan(outside bool) {
	w.actions = map[string]func(){
		"agent":                     func() { w.agentStep(w.anyAgent(), w.anyGroup()) },
		"agent (again)":             func() { w.agentStep(w.anyAgent(), w.anyGroup()) },
		"agent (still)":             func() { w.agentStep(w.anyAgent(), w.anyGroup()) },
		"agent is told of an event": func() { w.agentReconciles(w.anyAgent(), w.anyGroup()) },
		"agent's cache catches up": func() {
			p := w.agents[w.anyAgent()]
			k := allKinds[w.pick(len(allKinds))]
			p.caches[k] = w.hub.snapshot(k)
		},

		"claim": func() {
			if id := w.newOwner(""); id != "" && !w.rarely(4) {
				w.create(w.anyAgent(), id, w.owners[id].candidates)
			}
		},
		"claim (again)": func() {
			if id := w.newOwner(""); id != "" {
				w.create(w.anyAgent(), id, w.owners[id].candidates)
			}
		},
		"adopt": func() {
			if m := w.anyMachine(); m != nil && w.rarely(2) {
				if id := w.newOwner(m.Name); id != "" {
					w.owners[id].candidates = []string{m.Labels[clusterv1.MachineDeploymentNameLabel]}
					w.peaceful = false
					w.create(w.anyAgent(), id, w.owners[id].candidates)
				}
			}
		},
		"claim is repeated": func() {
			if len(w.order) > 0 {
				id := w.anyOwner()
				candidates := w.owners[id].candidates
				if w.owners[id].adopt == "" && !w.owners[id].lost {
					candidates = w.candidates()
				}
				w.create(w.anyAgent(), id, candidates)
			}
		},
		"release": func() {
			if len(w.order) > 0 {
				w.release(w.anyAgent(), w.anyOwner())
			}
		},
		"return": func() {
			if len(w.order) > 0 && w.rarely(2) {
				w.returnMachine(w.anyAgent(), w.anyOwner())
			}
		},
		"release what somebody deletes": func() {
			for _, c := range w.dying() {
				w.release(w.anyAgent(), c.Spec.ClaimID)
			}
		},
		"owner dies": func() {
			if len(w.order) > 0 && w.rarely(3) {
				w.owners[w.anyOwner()].alive = false
			}
		},
		"holder lists":            func() { w.listClaims(w.anyAgent()) },
		"holder reads its owners": w.readOwners,
		"holder syncs":            func() { w.sync(w.anyAgent()) },
		"holder is connected to another cluster": func() {
			if w.rarely(3) {
				w.syncElsewhere(w.anyAgent())
			}
		},
		"tombstones": func() {
			if w.depth == 0 && w.rarely(2) {
				w.clock.Step(time.Duration(w.draw("minutes", 1, 40)) * time.Minute)
			}
			w.expire(w.anyAgent())
		},

		"deployment":          func() { w.deploymentStep(w.anyGroup()) },
		"deployment (again)":  func() { w.deploymentStep(w.anyGroup()) },
		"machine set":         w.anySetStep,
		"machine set (again)": w.anySetStep,
		"machine":             w.anyMachineStep,
		"machine (again)":     w.anyMachineStep,
		"machine (still)":     w.anyMachineStep,
		"machines": func() {
			for _, m := range w.machines(w.anyGroup()) {
				w.machineStep(m)
			}
		},

		"things move on":         w.moveOn,
		"things move on (again)": w.moveOn,
		"things move on (still)": w.moveOn,

		"outsider deletes": func() {
			if m := w.anyMachine(); outside && m != nil && len(w.outsiders) < 2 {
				w.outsider(m)
			}
		},
		"human raises": func() {
			if w.rarely(3) {
				w.human(w.anyGroup(), 1)
			}
		},
		"human lowers": func() {
			if outside && w.rarely(3) {
				w.human(w.anyGroup(), -1)
			}
		},
		"human pauses": func() {
			if w.rarely(4) {
				w.pauseByHand(w.anyGroup(), true)
			}
		},
		"human unpauses": func() { w.pauseByHand(w.anyGroup(), false) },
		"rollout": func() {
			if w.rarely(4) {
				w.rollout(w.anyGroup())
			}
		},
		"claim object lost": func() {
			if outside && w.rarely(4) {
				w.loseClaim(w.rarely(2))
			}
		},
		"ledger lost": func() {
			if outside && w.rarely(6) {
				w.loseLedger(w.anyGroup())
			}
		},
		"group made again": func() {
			if outside && w.rarely(6) {
				w.makeAgain(w.anyGroup())
			}
		},
		"the hub is moved": func() {
			if outside && w.rarely(6) {
				w.move()
			}
		},
		"group blocked": func() {
			if w.rarely(3) {
				group := w.anyGroup()
				w.blocked[group] = true
				w.refused[group] = w.rarely(2)
			}
		},
		"late write arrives": w.landOne,
		"time":               func() { w.clock.Step(time.Duration(w.draw("seconds", 1, 90)) * time.Second) },
	}
	// Histories with fewer kinds of actions get further with those that they have.
	for _, kind := range []struct {
		what    string
		actions []string
	}{
		{"people scale", []string{"human raises", "human lowers"}},
		{"people pause", []string{"human pauses", "human unpauses", "group blocked"}},
		{"people adopt", []string{"adopt"}},
		{"machines are returned", []string{"return"}},
		{"people roll out", []string{"rollout"}},
		{"things get lost", []string{"claim object lost", "ledger lost"}},
		{"people replace groups", []string{"group made again"}},
		{"people move hubs", []string{"the hub is moved"}},
		{"holder", []string{"owner dies", "holder lists", "holder reads its owners", "holder syncs"}},
		{"time", []string{"tombstones", "time"}},
		{"moving on", []string{"things move on", "things move on (again)", "things move on (still)"}},
	} {
		if !rapid.Bool().Draw(w.dice, kind.what) {
			for _, name := range kind.actions {
				delete(w.actions, name)
			}
		}
	}
}

// --- agents ---

func (w *world) agentStep(e int, group string) {
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		_, err := agent.group(namespace, group).run(ctx)
		return err
	})
}

// agentReconciles makes an agent reconcile the group, which looks at its caches first.
func (w *world) agentReconciles(e int, group string) {
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		_, err := agent.Reconcile(ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: group}})
		return err
	})
}

// expire makes an agent delete the claims that ended long ago.
func (w *world) expire(e int) {
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		var errs []error
		claims := w.claims()
		for _, id := range slices.Sorted(maps.Keys(claims)) {
			_, err := tombstones{agent}.Reconcile(ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: namespace, Name: claims[id].Name}})
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// --- the holder ---

// newOwner makes a NodeClaim that wants a Machine. It returns "" when there are enough.
func (w *world) newOwner(adopt string) string {
	if len(w.order) >= maxOwners {
		return ""
	}
	id := fmt.Sprintf("c%d", len(w.order))
	w.order = append(w.order, id)
	w.owners[id] = &owner{candidates: w.candidates(), adopt: adopt, alive: true, born: w.clock.Now()}
	return id
}

func (w *world) create(e int, id string, candidates []string) {
	if w.clock.Since(w.owners[id].born) > callersPatience {
		return
	}
	from := spoke
	if w.rarely(4) {
		from = "" // a holder of an older version
	}
	w.createFrom(e, id, candidates, from)
}

// createFrom calls an agent once for the claim's Machine.
func (w *world) createFrom(e int, id string, candidates []string, from string) {
	o := w.owners[id]
	released := o.released
	made := w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		ctx, cancel := context.WithCancel(ctx)
		cancel() // it does not wait for room in the ledger
		_, err := agent.Create(ctx, Request{
			Namespace: namespace, Cluster: clusterName, ID: id, Holder: holder, DisplayName: "nc-" + id, Candidates: candidates, Adopt: o.adopt,
			Spoke: from,
		})
		w.checkCooling(err)
		if errors.Is(err, ErrUnknownCluster) && !w.moving {
			w.t.Fatalf("R3: an agent says that the Cluster does not exist")
		}
		return err
	})
	if made && released {
		w.t.Fatalf("I1: claim %s was made after its release\n%s", id, w.describe())
	}
	o.made = o.made || made
}

func (w *world) release(e int, id string) {
	o := w.owners[id]
	o.asked, o.alive = true, false
	if w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		_, err := agent.Release(ctx, Key{namespace, clusterName, id}, ReleaseOptions{Drained: len(id)%2 == 0})
		return err
	}) {
		o.released = true
	}
}

// returnMachine makes an agent return the claim's Machine to the user. The holder does not wait for
// the claim's end.
func (w *world) returnMachine(e int, id string) {
	o := w.owners[id]
	o.returns, o.alive = true, false
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		c, err := agent.Return(ctx, Key{namespace, clusterName, id}, nil, "")
		if err == nil && c.Status.Returned && c.CurrentPhase() == v1alpha1.PhaseBound {
			o.returned = true
		}
		if refused := (*NotReturnableError)(nil); errors.Is(err, ErrNotFound) || errors.As(err, &refused) {
			return nil
		}
		return err
	})
}

func (w *world) listClaims(e int) {
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		_, token, err := agent.List(ctx, ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		if err == nil {
			w.session = session{token: token}
		}
		return err
	})
}

// readOwners is what a holder does after it took a token: it reads its complete live set, and the
// state of its Nodes.
func (w *world) readOwners() {
	if w.session.token == "" {
		return
	}
	w.session.live, w.session.nodes = []string{}, nil
	w.openFloors()
	for _, id := range w.order {
		if w.owners[id].alive {
			w.session.live = append(w.session.live, id)
		}
	}
	for _, group := range w.groups {
		for _, m := range w.machines(group) {
			if protocol.Alive(m) && protocol.HasNode(m) {
				w.session.nodes = append(w.session.nodes, NodeReport{ProviderID: m.Spec.ProviderID, Unregistered: w.tainted[m.UID]})
				w.reported[m.Spec.ProviderID] = w.reported[m.Spec.ProviderID] || w.tainted[m.UID]
			}
		}
	}
}

// openFloors is what the shim does with the Nodes of the floor's Machines.
func (w *world) openFloors() {
	for _, group := range w.groups {
		for _, m := range w.machines(group) {
			if _, floors := m.Annotations[v1alpha1.FloorAnnotation]; floors && protocol.ClaimOf(m) == "" && w.tainted[m.UID] {
				w.tainted[m.UID], w.open[m.UID] = false, true
			}
		}
	}
}

func (w *world) sync(e int) {
	if w.session.live == nil {
		return
	}
	s := w.session
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		result, err := agent.Sync(ctx, SyncRequest{
			Namespace: namespace, Cluster: clusterName, Holder: holder, Token: s.token, LiveIDs: s.live, Nodes: s.nodes, NodesComplete: true,
			Spoke: spoke,
		})
		for _, id := range result.Kept {
			w.kept[id] = true
		}
		if errors.Is(err, ErrStaleToken) && w.fair {
			w.t.Fatalf("I2: what one agent listed a moment ago is too old for the other\n%s", w.describe())
		} else if errors.Is(err, ErrStaleToken) {
			w.session = session{}
			return ErrConflict
		}
		return err
	})
}

// syncElsewhere is a holder with the right identity and the wrong kubeconfig: it reads an empty
// set, and no Nodes.
func (w *world) syncElsewhere(e int) {
	w.asAgent(e, func(ctx context.Context, agent *Engine) error {
		_, token, err := agent.List(ctx, ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		if err != nil {
			return err
		}
		w.clock.Step(time.Second)
		result, err := agent.Sync(ctx, SyncRequest{
			Namespace: namespace, Cluster: clusterName, Holder: holder, Token: token, NodesComplete: true, Spoke: elsewhere,
		})
		if len(result.Collected) > 0 {
			w.t.Fatalf("I8: claims %v are collected by the live set of another cluster\n%s", result.Collected, w.describe())
		}
		if foreign := (*ForeignSpokeError)(nil); errors.As(err, &foreign) {
			return ErrConflict
		}
		return err
	})
}

// --- Cluster API ---

func (w *world) anySetStep() {
	if sets := w.sets(w.anyGroup()); len(sets) > 0 {
		w.setStep(sets[w.pick(len(sets))])
	}
}

func (w *world) anyMachineStep() {
	if m := w.anyMachine(); m != nil {
		w.machineStep(m)
	}
}

// moveOn lets a group's agents and controllers work for a while, so that histories get far.
func (w *world) moveOn() {
	group := w.anyGroup()
	for range w.draw("rounds", 1, 4) {
		w.agentStep(w.anyAgent(), group)
		w.controllers(group)
	}
}

// --- people ---

// human changes the replicas by hand.
func (w *world) human(group string, by int32) {
	md := w.md(group)
	replicas := *md.Spec.Replicas + by
	// A writer that sets one number again and again counts as a tool, for which the group is
	// frozen.
	number := fmt.Sprintf("%s %d", group, replicas)
	if at, before := w.scaled[number]; before && w.clock.Since(at) < 2*time.Hour {
		return
	}
	if by < 0 {
		left := w.owned[group]
		if l := w.ledger(group); l != nil {
			for _, entry := range l.Pending {
				if entry.Adopted {
					left-- // assigned to a claim
				}
			}
		}
		if left <= 0 {
			return
		}
	}
	if l, minimum := w.ledger(group), w.minimum(group); l != nil && minimum > 0 {
		if l.LastReplicas != *md.Spec.Replicas {
			return // two changes at once do not add up there
		}
		if by > 0 {
			w.owned[group] = max(w.owned[group], min(minimum, l.LastReplicas))
		}
	}
	md.Spec.Replicas = &replicas
	w.must(w.hub.update(md, false))
	w.scaled[number] = w.clock.Now()
	w.owned[group] += by // even if the min size keeps more than that
	if by < 0 {
		w.licensed[group]++
		w.peaceful = false
	}
}

func (w *world) pauseByHand(group string, paused bool) {
	md := w.md(group)
	value, is := md.Annotations[clusterv1.PausedAnnotation]
	switch {
	case paused && !is:
		metav1.SetMetaDataAnnotation(&md.ObjectMeta, clusterv1.PausedAnnotation, pausedByHuman)
	case !paused && value == pausedByHuman:
		delete(md.Annotations, clusterv1.PausedAnnotation)
	}
	w.must(w.hub.update(md, false))
}

// rollout changes the template.
func (w *world) rollout(group string) {
	if w.busy[group] {
		return // otherwise the controller's plan would be for a template that the model has forgotten
	}
	md := w.md(group)
	w.templates[group]++
	w.peaceful = false
	md.Spec.Template.Spec.Version = fmt.Sprintf("v1.%d.0", w.templates[group])
	w.must(w.hub.update(md, false))
}

// outsider deletes a Machine, as a person or a health check would.
func (w *world) outsider(m *clusterv1.Machine) {
	if protocol.Alive(m) {
		w.peaceful = false
		w.takenAway(m)
		w.must(w.hub.remove(m, nil))
	}
}

// takenAway records that another actor than the agent removes a Machine.
func (w *world) takenAway(m *clusterv1.Machine) {
	w.outsiders[m.UID] = true
	for id, c := range w.claims() {
		its := protocol.ClaimOf(m) == id || c.Status.Machine != nil && c.Status.Machine.UID == m.UID || c.Spec.Adopt == m.Name
		if o := w.owners[id]; o != nil && its {
			o.excused = true
		}
	}
	if o := w.owners[protocol.ClaimOf(m)]; o != nil {
		o.excused = true
	}
	if l := w.ledger(m.Labels[clusterv1.MachineDeploymentNameLabel]); l != nil {
		for id, entry := range l.Pending {
			if entry.UID == m.UID && w.owners[id] != nil {
				w.owners[id].excused = true // it may be bound to a Machine that is gone by then
			}
		}
	}
}

// loseClaim deletes the object of a claim that has a Machine, or only its status, as a careless
// restore does. The status may also be that of a claim that is being released.
func (w *world) loseClaim(onlyStatus bool) {
	claims := w.claims()
	var bound []*v1alpha1.MachineClaim
	for _, id := range w.order {
		c := claims[id]
		if c == nil || c.Status.Machine == nil {
			continue
		}
		if c.Status.Phase == v1alpha1.PhaseBound && w.carries(c) || onlyStatus && c.Status.Phase == v1alpha1.PhaseReleasing {
			bound = append(bound, c)
		}
	}
	if len(bound) == 0 {
		return
	}
	w.peaceful = false
	c := bound[w.pick(len(bound))]
	w.owners[c.Spec.ClaimID].returned = false
	if onlyStatus {
		w.owners[c.Spec.ClaimID].released = false // its caller has to repeat the call
		c.Status = v1alpha1.MachineClaimStatus{}
		w.must(w.hub.update(c, true))
	} else {
		o := w.owners[c.Spec.ClaimID]
		o.lost, o.candidates = true, []string{c.Spec.NodeGroup}
		w.must(w.hub.remove(c, nil))
	}
}

// carries reports whether a living Machine carries the claim's label.
func (w *world) carries(c *v1alpha1.MachineClaim) bool {
	return slices.ContainsFunc(w.machines(c.Spec.NodeGroup), func(m *clusterv1.Machine) bool {
		return protocol.Alive(m) && protocol.ClaimOf(m) == c.Spec.ClaimID
	})
}

// loseLedger wipes the ledger, as `kubectl replace` does, or writes nonsense there.
func (w *world) loseLedger(group string) {
	md := w.md(group)
	if md.Annotations[v1alpha1.LedgerAnnotation] == "" {
		return
	}
	if w.minimum(group) > 0 && md.Annotations[clusterv1.PausedAnnotation] == pausedByHuman {
		return // only the ledger records how far a pause keeps replicas below the user's share
	}
	w.peaceful = false
	w.wiped[group] = true
	for id, c := range w.claims() {
		if c.Spec.NodeGroup == group && !w.carries(c) && w.owners[id] != nil {
			w.owners[id].excused = true // only the ledger may record that it was entered, or which Machine it was assigned
		}
	}
	if w.rarely(2) {
		md.Annotations[v1alpha1.LedgerAnnotation] = "nonsense"
	} else {
		delete(md.Annotations, v1alpha1.LedgerAnnotation)
	}
	w.must(w.hub.update(md, false))
}

// makeAgain deletes the MachineDeployment with everything that belongs to it and makes it again, as
// `kubectl replace --force` does. Agents need not notice that it was gone.
func (w *world) makeAgain(group string) {
	if len(w.busy) > 0 {
		return // otherwise a controller's plan would be for objects that the model has forgotten
	}
	w.peaceful = false
	for id, c := range w.claims() {
		if c.Spec.NodeGroup == group && w.owners[id] != nil {
			w.owners[id].excused = true
		}
	}
	for _, m := range w.machines(group) {
		w.takenAway(m)
		delete(w.hub.objects[allMachines], m.Name)
	}
	for _, s := range w.sets(group) {
		delete(w.hub.objects[machineSets], s.Name)
		delete(w.licensed, s.Name)
	}
	md := w.md(group)
	delete(w.hub.objects[deployments], group)
	owned := int32(w.draw("floor", 0, 2))
	annotations := md.Annotations
	delete(annotations, v1alpha1.LedgerAnnotation)
	delete(annotations, clusterv1.PausedAnnotation)
	w.must(w.hub.create(&clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: group, Labels: md.Labels, Annotations: annotations},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: clusterName, Replicas: &owned, Template: md.Spec.Template, Rollout: md.Spec.Rollout,
		},
	}))
	w.owned[group], w.wiped[group], w.licensed[group] = owned, false, 0
}

// dying returns the bound claims whose Machine is being deleted.
func (w *world) dying() []*v1alpha1.MachineClaim {
	claims := w.claims()
	var dying []*v1alpha1.MachineClaim
	for _, id := range w.order {
		if c := claims[id]; c != nil && c.Status.Phase == v1alpha1.PhaseBound &&
			slices.ContainsFunc(w.machines(c.Spec.NodeGroup), func(m *clusterv1.Machine) bool { return m.UID == c.Status.Machine.UID && !protocol.Alive(m) }) {
			dying = append(dying, c)
		}
	}
	return dying
}

// landOne lets the oldest delayed write arrive.
func (w *world) landOne() {
	if len(w.late) == 0 {
		return
	}
	write := w.late[0]
	w.late = w.late[1:]
	write()
	w.check()
}
