package claims

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// --- of each write of an agent ---

// moment is the content of the hub before a write.
type moment map[kind]objects

func (w *world) look() moment {
	return moment{
		allMachines: w.hub.snapshot(allMachines), allClaims: w.hub.snapshot(allClaims), deployments: w.hub.snapshot(deployments),
		machineSets: w.hub.snapshot(machineSets),
	}
}

// checkWrite checks what one write of an agent changed. begun is the number of events when the
// agent's call began.
func (w *world) checkWrite(begun int, before moment) {
	for name, o := range w.hub.objects[allMachines] {
		if was, existed := before[allMachines][name]; existed && was != o {
			w.checkMachine(was.(*clusterv1.Machine), o.(*clusterv1.Machine)) //nolint:forcetypeassert // of the kind
		}
	}
	for name, o := range w.hub.objects[allClaims] {
		was, existed := before[allClaims][name]
		switch {
		case existed && was != o:
			w.checkClaim(was.(*v1alpha1.MachineClaim), o.(*v1alpha1.MachineClaim)) //nolint:forcetypeassert // of the kind
		case !existed:
			w.checkNewClaim(o.(*v1alpha1.MachineClaim)) //nolint:forcetypeassert // of the kind
		}
	}
	for name, o := range w.hub.objects[deployments] {
		if was := before[deployments][name]; was != o {
			w.checkDeployment(begun, was.(*clusterv1.MachineDeployment), o.(*clusterv1.MachineDeployment)) //nolint:forcetypeassert // of the kind
		}
	}
}

// checkMachine checks I1 and I3 for labels. A label is written only when unset, and only for a
// claim that is bound to the Machine. It is removed only when the claim is being released and
// nothing can run on the Machine.
func (w *world) checkMachine(was, is *clusterv1.Machine) {
	from, to := protocol.ClaimOf(was), protocol.ClaimOf(is)
	if to != "" && was.Annotations[v1alpha1.FloorAnnotation] == "" && is.Annotations[v1alpha1.FloorAnnotation] != "" {
		w.t.Fatalf("I1: Machine %s is marked as the floor's, and is claim %s's\n%s", is.Name, to, w.describe())
	}
	if from == to {
		return
	}
	if from != "" && to != "" {
		w.t.Fatalf("I1: Machine %s had claim %s and is given to claim %s\n%s", is.Name, from, to, w.describe())
	}
	if to == "" && is.Annotations[v1alpha1.FloorAnnotation] != "" {
		if o := w.owners[from]; o != nil && !o.returns {
			w.t.Fatalf("I3: Machine %s is taken from claim %s, which did not return it\n%s", is.Name, from, w.describe())
		}
		return
	}
	if to == "" {
		if protocol.HasNode(is) {
			w.t.Fatalf("I3: Machine %s of claim %s has a Node and is handed over\n%s", is.Name, from, w.describe())
		}
		if o := w.owners[from]; o != nil && o.alive && !o.excused {
			w.t.Fatalf("I3: Machine %s is taken from the live claim %s\n%s", is.Name, from, w.describe())
		}
		return
	}
	c := w.claims()[to]
	if c == nil || c.Status.Phase != v1alpha1.PhaseBound && c.Status.Phase != v1alpha1.PhaseReleasing ||
		c.Status.Machine == nil || c.Status.Machine.UID != is.UID {
		w.t.Fatalf("I1: Machine %s is labelled with claim %s, which is not bound to it\n%s", is.Name, to, w.describe())
	}
	group := is.Labels[clusterv1.MachineDeploymentNameLabel]
	if l := w.ledger(group); l != nil && l.Pending[to].Adopted {
		w.owned[group]-- // the claim adopted one of the user's
		w.owners[to].adopted = true
	} else if l != nil && w.wiped[group] && w.owners[to] != nil && w.owners[to].adopt != "" {
		w.owned[group] = min(w.owned[group], l.Floor) // the same, but its owner is lost with the ledger
	}
}

// checkNewClaim checks I1 for the anchor.
func (w *world) checkNewClaim(c *v1alpha1.MachineClaim) {
	for _, o := range w.hub.objects[allClaims] {
		other := o.(*v1alpha1.MachineClaim) //nolint:forcetypeassert // of the kind
		if other.Name != c.Name && other.Spec.ClaimID == c.Spec.ClaimID {
			w.t.Fatalf("I1: claim %s is on groups %s and %s", c.Spec.ClaimID, other.Spec.NodeGroup, c.Spec.NodeGroup)
		}
	}
}

// checkClaim checks I3, I4 and I8 for the ends of claims: no claim ends without a cause.
func (w *world) checkClaim(was, is *v1alpha1.MachineClaim) {
	id := is.Spec.ClaimID
	o := w.owners[id]
	if o == nil {
		return
	}
	w.noteWait(was, is)
	if was.Spec.NodeGroup != is.Spec.NodeGroup {
		for _, group := range w.groups {
			if l := w.ledger(group); l != nil {
				if _, entered := l.Pending[id]; entered && (was.Status.Phase != "" || o.made) {
					w.t.Fatalf("I1: claim %s is entered on group %s and moves from %s to %s", id, group, was.Spec.NodeGroup, is.Spec.NodeGroup)
				}
			}
		}
	}
	from, to := was.CurrentPhase(), is.CurrentPhase()
	if from == to {
		return
	}
	if from == v1alpha1.PhaseEnded || from == v1alpha1.PhaseReleasing && to != v1alpha1.PhaseEnded {
		w.t.Fatalf("I1: claim %s goes back from %s to %s", id, from, to)
	}
	switch to {
	case v1alpha1.PhaseReleasing:
		if o.returned && !o.gone { // a release after the tombstone was deleted makes another, without a Machine
			w.t.Fatalf("I3: claim %s is released (%s), and had returned its Machine\n%s", id, is.Status.Reason, w.describe())
		}
		if is.Status.Reason == protocol.ReasonFailed || is.Status.Reason == protocol.ReasonLate {
			w.checkGivenUp(o, is)
		}
		if o.alive {
			w.t.Fatalf("I8: claim %s is released (%s) while its owner lives\n%s", id, is.Status.Reason, w.describe())
		}
		if is.Status.Reason == protocol.ReasonCollected && was.Status.NodeRegisteredAt != nil {
			w.t.Fatalf("I8: claim %s is collected although its Node was registered\n%s", id, w.describe())
		}
	case v1alpha1.PhaseEnded:
		w.checkEnd(o, from, is)
	case v1alpha1.PhasePending, v1alpha1.PhaseBound:
	}
}

func (w *world) checkEnd(o *owner, from v1alpha1.Phase, c *v1alpha1.MachineClaim) {
	id := c.Spec.ClaimID
	for _, group := range w.groups {
		for _, m := range w.machines(group) {
			if protocol.ClaimOf(m) == id && (protocol.Alive(m) || !protocol.DeletionCompleted(m)) {
				w.t.Fatalf("I4: claim %s ends (%s) while its Machine %s is there\n%s", id, c.Status.Reason, m.Name, w.describe())
			}
		}
	}
	if c.Status.Reason == protocol.ReasonReturned && !o.returns {
		w.t.Fatalf("I4: claim %s ends as returned, although nobody requested that\n%s", id, w.describe())
	}
	left := c.Status.Reason == protocol.ReasonHandedOver || o.returns
	if ref := c.Status.Machine; ref != nil && !left && !o.excused {
		for _, m := range w.machines(c.Spec.NodeGroup) {
			if m.UID == ref.UID && protocol.Alive(m) {
				w.t.Fatalf("I4: claim %s ends (%s) while its Machine %s lives\n%s", id, c.Status.Reason, m.Name, w.describe())
			}
		}
	}
	if !o.alive {
		return
	}
	switch {
	case c.Status.Reason == protocol.ReasonStateLost && (o.ended || !o.made):
	case c.Status.Reason == protocol.ReasonNoRoom || c.Status.Reason == protocol.ReasonRefused:
		if from != v1alpha1.PhasePending {
			w.t.Fatalf("I3: claim %s is refused (%s) after it was bound\n%s", id, c.Status.Reason, w.describe())
		}
		if o.made && !o.excused {
			w.t.Fatalf("I4: claim %s was made and is refused later: %s\n%s", id, c.Status.Message, w.describe())
		}
	case !o.excused:
		w.t.Fatalf("I3: claim %s ends (%s) though nobody asked and nobody took its Machine\n%s", id, c.Status.Reason, w.describe())
	}
}

// checkDeployment checks I6: replicas are never above the max size or below the min size, and the
// floor keeps its Machines.
func (w *world) checkDeployment(begun int, was, is *clusterv1.MachineDeployment) {
	from, to := *was.Spec.Replicas, *is.Spec.Replicas
	var limit int32
	if n, _ := fmt.Sscan(is.Annotations[clusterv1.AutoscalerMaxSizeAnnotation], &limit); n == 1 && to > from && to > limit {
		w.t.Fatalf("I6: an agent raises %s from %d to %d, above its max size\n%s", is.Name, from, to, w.describe())
	}
	if n, _ := fmt.Sscan(is.Annotations[clusterv1.AutoscalerMinSizeAnnotation], &limit); n == 1 && to < from && to < limit {
		w.t.Fatalf("I6: an agent lowers %s from %d to %d, below its min size\n%s", is.Name, from, to, w.describe())
	}
	if value := was.Annotations[clusterv1.PausedAnnotation]; value == pausedByHuman && is.Annotations[clusterv1.PausedAnnotation] != value {
		w.t.Fatalf("I3: an agent undoes a human's pause of %s", is.Name)
	}
	text := is.Annotations[v1alpha1.LedgerAnnotation]
	after, err := protocol.ParseLedger(text)
	if err != nil {
		return
	}
	if text != was.Annotations[v1alpha1.LedgerAnnotation] && !w.wiped[is.Name] {
		written := is.Name + " " + text
		if w.ledgers[written] {
			w.t.Fatalf("R2: the ledger of %s is what it was before: who read it then takes it for unchanged\n%s", is.Name, w.describe())
		}
		w.ledgers[written] = true
	}
	before, err := protocol.ParseLedger(was.Annotations[v1alpha1.LedgerAnnotation])
	if err != nil {
		before = &protocol.Ledger{}
	}
	w.owned[is.Name] += w.returned(from, before, after)
	if n := newlyReturned(before, after); n > 0 {
		w.owned[is.Name] = max(w.owned[is.Name], before.Min, after.Min) + n
	}
	named := 0
	claims := w.claims()
	for id, n := range after.Pending {
		if n.UID == "" || n.Machine == before.Pending[id].Machine || w.owners[id].adopt != "" { // after a move it has another UID
			continue
		}
		if c := claims[id]; c != nil && c.Status.Machine != nil && c.Status.Machine.UID == n.UID {
			continue // a lost ledger is rebuilt
		}
		named++
		if w.open[n.UID] {
			w.t.Fatalf("I3: Machine %s is assigned to claim %s, and is the floor's with pods\n%s", n.Machine, id, w.describe())
		}
		if at, has := w.joined[n.UID]; has && at < begun && !w.reported["sim://"+n.Machine] {
			w.t.Fatalf("I3: Machine %s is assigned to claim %s, and something may run on its Node\n%s", n.Machine, id, w.describe())
		}
	}
	released := 0
	known := map[string]bool{}
	for _, r := range before.Releasing {
		known[r.Machine] = true
	}
	for uid, r := range after.Releasing {
		if !known[r.Machine] && r.Claim == "" {
			released++
			if w.open[uid] && w.peaceful {
				w.t.Fatalf("I3: Machine %s is removed as a spare, and is the floor's with pods\n%s", r.Machine, w.describe())
			}
			// As long as no more Machines live than there are replicas, none of them exists for the
			// rollout.
			living := slices.DeleteFunc(w.machines(is.Name), func(m *clusterv1.Machine) bool { return !protocol.Alive(m) })
			if w.surge[uid] && w.rollingOut(is.Name) && len(living) > int(to) {
				w.t.Fatalf("I3: Machine %s is released, which a rollout under way needs\n%s", r.Machine, w.describe())
			}
		}
	}
	if named+released > 0 && w.peaceful {
		free := 0
		for _, m := range w.machines(is.Name) {
			_, releasing := after.Releasing[m.UID]
			_, returned := after.Returning[m.UID] // the floor's, with a label that is being removed
			if protocol.Alive(m) && (protocol.ClaimOf(m) == "" || returned) && !releasing && !after.Assigned()[m.UID] {
				free++
			}
		}
		if free < int(w.floor(is.Name)) {
			w.t.Fatalf("I6: an agent takes the floor's Machines of %s: %d are left\n%s", is.Name, free, w.describe())
		}
	}
}

// returned counts the Machines that claims adopted from the user and that are the user's again,
// because they were removed before an agent saw the label on them.
func (w *world) returned(replicas int32, before, after *protocol.Ledger) int32 {
	floor := max(0, before.Floor+replicas-before.LastReplicas)
	var taken int32
	for id, n := range before.Pending {
		if _, still := after.Pending[id]; !n.Adopted || still {
			continue
		}
		if w.owners[id].adopted {
			taken++
		} else {
			floor++
		}
	}
	for id, n := range after.Pending {
		if n.Adopted && !before.Pending[id].Adopted {
			floor--
		}
	}
	if n := newlyReturned(before, after); n > 0 {
		floor = max(floor, after.Min) + n
	}
	return max(0, min(taken, after.Floor-floor))
}

// newlyReturned counts the Machines that the second ledger records as returned and the first does
// not.
func newlyReturned(before, after *protocol.Ledger) int32 {
	known := map[string]bool{}
	for _, r := range before.Returning {
		known[r.Machine] = true
	}
	var n int32
	for _, r := range after.Returning {
		if !known[r.Machine] {
			n++
		}
	}
	return n
}

// checkDelete checks I3 for what an agent deletes.
func (w *world) checkDelete(target *clusterv1.Machine, p *metav1.Preconditions) {
	o, err := w.hub.find(allMachines, target.Name)
	if err != nil || p != nil && p.UID != nil && *p.UID != o.GetUID() {
		return
	}
	m := o.(*clusterv1.Machine) //nolint:forcetypeassert // of the kind
	claims := w.claims()
	for id, c := range claims {
		mine := protocol.ClaimOf(m) == id || c.Status.Machine != nil && c.Status.Machine.UID == m.UID
		if mine && (c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound) {
			w.t.Fatalf("I3: an agent deletes Machine %s of the live claim %s\n%s", m.Name, id, w.describe())
		}
	}
	if owner := w.owners[protocol.ClaimOf(m)]; owner != nil && owner.alive && claims[protocol.ClaimOf(m)] == nil {
		w.t.Fatalf("I3: an agent deletes Machine %s of claim %s, whose object was lost\n%s", m.Name, protocol.ClaimOf(m), w.describe())
	}
}

// checkForget checks I1 over time: an id must not be used again while a caller may still retry.
func (w *world) checkForget(target *v1alpha1.MachineClaim, p *metav1.Preconditions) {
	o, err := w.hub.find(allClaims, target.Name)
	if err != nil || p != nil && p.ResourceVersion != nil && *p.ResourceVersion != o.GetResourceVersion() {
		return
	}
	c := o.(*v1alpha1.MachineClaim) //nolint:forcetypeassert // of the kind
	if c.Spec.Adopt != "" && c.Status.Phase == "" {
		return // it was never entered, and its id may be used again
	}
	if c.Status.EndedAt == nil || w.clock.Since(c.Status.EndedAt.Time) < retention-w.skew {
		w.t.Fatalf("I1: claim %s is forgotten while its id may still be used\n%s", c.Spec.ClaimID, w.describe())
	}
	if owner := w.owners[c.Spec.ClaimID]; owner != nil {
		owner.gone = true
	}
}

// checkVictim checks I3 for what a MachineSet deletes: only Machines that a rollout replaces or
// cuts off, or after a human lowered replicas.
func (w *world) checkVictim(m *clusterv1.Machine, replaced bool) {
	group := m.Labels[clusterv1.MachineDeploymentNameLabel]
	switch {
	case w.resurrected(m):
		return
	case replaced:
	case w.licensed[protocol.SetOf(m)] > 0:
		w.licensed[protocol.SetOf(m)]--
	case w.licensed[group] > 0:
		w.licensed[group]--
	default:
		w.t.Fatalf("I3: lowering replicas made Cluster API choose Machine %s (claim %q)\n%s", m.Name, protocol.ClaimOf(m), w.describe())
	}
	w.takenAway(m)
}

// --- after every step ---

func (w *world) check() {
	if w.moving {
		return
	}
	claims := w.claims()
	byMachine := map[types.UID]string{}
	for _, id := range slices.Sorted(maps.Keys(claims)) {
		c := claims[id]
		if c.Status.Machine == nil || c.Status.Phase == v1alpha1.PhaseEnded {
			continue
		}
		if other, taken := byMachine[c.Status.Machine.UID]; taken {
			w.t.Fatalf("I1: claims %s and %s have one Machine\n%s", id, other, w.describe())
		}
		byMachine[c.Status.Machine.UID] = id
	}
	labelled := map[string]string{}
	for _, group := range w.groups {
		for _, m := range w.machines(group) {
			id := protocol.ClaimOf(m)
			if o := w.owners[id]; id == "" || o != nil && o.lost && !protocol.Alive(m) {
				continue // recreated while a write for the lost claim was in progress, and that Machine is being deleted
			}
			if other, twice := labelled[id]; twice {
				w.t.Fatalf("I1: Machines %s and %s both carry claim %s\n%s", m.Name, other, id, w.describe())
			}
			labelled[id] = m.Name
		}
	}
	for id, o := range w.owners {
		c := claims[id]
		if o.ended && c != nil && c.Status.Phase == "" {
			continue // it was moved without its status, which showed that it had ended
		}
		// A claim that returns its Machine ends in its own time, and a release does not change
		// that: it waits while the node group is held.
		if o.released && !o.gone && !o.excused && c != nil && !c.Returns() &&
			(c.CurrentPhase() == v1alpha1.PhasePending || c.CurrentPhase() == v1alpha1.PhaseBound) {
			w.t.Fatalf("I1: claim %s was released and lives\n%s", id, w.describe())
		}
	}
}

// --- at rest ---

// settle runs everything fairly until nothing changes, and checks I2: first for the replicas of
// blocked groups, and then, with nothing blocked any more, for everything.
func (w *world) settle() {
	w.fair = true
	for len(w.late) > 0 {
		w.landOne()
	}
	for _, group := range w.groups {
		w.pauseByHand(group, false)
	}
	if w.moved {
		w.rest() // the claims' statuses come first
		w.syncAll()
	}
	if len(w.blocked) > 0 {
		w.rest()
		for _, group := range slices.Sorted(maps.Keys(w.blocked)) {
			w.checkBlocked(group)
		}
		clear(w.blocked)
		clear(w.refused)
	}
	w.rest()
	// Every caller finishes what it began, and the holder reports its live set.
	for _, id := range w.order {
		if o := w.owners[id]; o.asked && !o.released && !o.gone {
			w.release(0, id)
		}
	}
	w.syncAll()
	w.rest()
	// What the agents keep for safety is left to a person.
	for _, id := range w.order {
		if o, c := w.owners[id], w.claims()[id]; w.kept[id] && !o.alive && c != nil && c.CurrentPhase() != v1alpha1.PhaseEnded {
			w.release(0, id)
		}
	}
	w.rest()
	w.syncAll() // as every minute: which of the remaining Machines take no pods may have changed
	w.rest()
	w.checkRest()
}

// syncAll sends the live set to every agent.
func (w *world) syncAll() {
	w.clock.Step(time.Minute)
	for e := range w.agents {
		if e == 0 || w.skew > 0 { // then each call reaches another agent than the one before
			w.listClaims((e + 1) % len(w.agents))
			w.readOwners()
		}
		w.sync(e)
	}
}

// checkBlocked checks I2 for a group that creates no Machines: replicas without an owner are given
// back nevertheless. A Machine that no claim may have stays as long as a claim waits.
func (w *world) checkBlocked(group string) {
	active := slices.DeleteFunc(w.sets(group), func(s *clusterv1.MachineSet) bool { return protocol.ReplicasOf(s) == 0 })
	l := w.ledger(group)
	if len(active) > 1 || l == nil || l.Unassigned() > 0 || w.rollingOut(group) {
		return // not given back before one MachineSet is left; see [snapshot.shrink]
	}
	if live := w.live(group); *w.md(group).Spec.Replicas != w.floor(group)+live {
		w.t.Fatalf("I2: blocked group %s has %d replicas for a floor of %d and %d live claims\n%s",
			group, *w.md(group).Spec.Replicas, w.floor(group), live, w.describe())
	}
}

// rest runs everything fairly until nothing has changed for longer than any grace period.
func (w *world) rest() {
	still := 0
	const round = 45 * time.Second
	for range 400 {
		before := w.hub.version
		for _, group := range w.groups {
			for e := range w.agents {
				for _, k := range allKinds {
					w.agents[e].caches[k] = w.hub.snapshot(k)
				}
				w.agentReconciles(e, group)
			}
			w.controllers(group)
		}
		w.clock.Step(round)
		if still++; w.hub.version != before {
			still = 0
		} else if time.Duration(still-1)*round > protocol.AbandonedAfter {
			return
		}
	}
	w.t.Fatalf("I2: not quiet after 400 rounds\n%s", w.describe())
}

// checkRest checks what must hold when nothing is in progress.
func (w *world) checkRest() {
	claims := w.claims()
	for _, id := range w.order {
		o, c := w.owners[id], claims[id]
		switch {
		case c == nil:
			if o.alive && o.made && !o.excused {
				w.t.Fatalf("I4: claim %s is lost\n%s", id, w.describe())
			}
		case c.CurrentPhase() == v1alpha1.PhaseReleasing:
			w.t.Fatalf("I2: claim %s is still being released\n%s", id, w.describe())
		case c.CurrentPhase() == v1alpha1.PhaseEnded:
		case !o.alive:
			w.t.Fatalf("I2: claim %s lives and its owner does not\n%s", id, w.describe())
		case c.CurrentPhase() == v1alpha1.PhaseBound && !w.carries(c):
			w.t.Fatalf("I2: claim %s is bound to a Machine that does not carry it\n%s", id, w.describe())
		case c.CurrentPhase() == v1alpha1.PhasePending && !w.overfull(c.Spec.NodeGroup):
			w.t.Fatalf("I2: claim %s waits for ever\n%s", id, w.describe())
		}
	}
	for _, group := range w.groups {
		w.checkGroupAtRest(group)
	}
}

// overfull reports whether the floor and the live claims are more than the group's max size allows:
// a person raised the floor or lowered the max size after the claims were entered.
func (w *world) overfull(group string) bool { return w.floor(group)+w.live(group) > w.maximum(group) }

// queued counts the group's claims that have neither an entry in the ledger nor a Machine.
func (w *world) queued(group string) int32 {
	var queued int32
	l := w.ledger(group)
	for _, c := range w.claims() {
		if c.Spec.NodeGroup == group && c.CurrentPhase() == v1alpha1.PhasePending {
			if _, entered := l.Pending[c.Spec.ClaimID]; !entered {
				queued++
			}
		}
	}
	return queued
}

func (w *world) checkGroupAtRest(group string) {
	live := w.live(group)
	md := w.md(group)
	l := w.ledger(group)
	want := w.floor(group) + live
	switch {
	case w.wiped[group] && l == nil:
		want = *md.Spec.Replicas // no claim was made on it since
	case l != nil && l.Unassigned() > 0 && w.overfull(group):
		// Claims wait for room, in the ledger too. Here that may last. A claim that was entered may
		// have lost its replica: it is given up with a Machine that no claim may have, to be
		// ordered anew, and meanwhile a person raised the replicas to the max size or above it.
		want = max(min(want-w.queued(group), w.maximum(group)), *md.Spec.Replicas)
	}
	if w.wiped[group] && *md.Spec.Replicas >= w.maximum(group) {
		want = min(want, *md.Spec.Replicas) // what it cannot explain is the user's as far as the max size allows
	}
	if *md.Spec.Replicas != want || len(w.machines(group)) != int(want) {
		w.t.Fatalf("I2: group %s: replicas %d, Machines %d, floor %d + live claims %d\n%s",
			group, *md.Spec.Replicas, len(w.machines(group)), w.floor(group), live, w.describe())
	}
	if claimed := strconv.Itoa(int(live - w.queued(group))); l != nil && md.Annotations[v1alpha1.ClaimedAnnotation] != claimed {
		w.t.Fatalf("I2: group %s has %s claims with a replica, and says %q\n%s", group, claimed, md.Annotations[v1alpha1.ClaimedAnnotation], w.describe())
	}
	if _, paused := md.Annotations[clusterv1.PausedAnnotation]; paused {
		w.t.Fatalf("I4: group %s was left paused\n%s", group, w.describe())
	}
	if l != nil && (len(l.Releasing) > 0 || len(l.Returning) > 0 || len(l.Pending) > 0 && live == 0) {
		w.t.Fatalf("I2: the ledger of %s holds on to something\n%s", group, w.describe())
	}
	for _, set := range w.sets(group) {
		if _, paused := set.Annotations[clusterv1.PausedAnnotation]; paused {
			w.t.Fatalf("I4: MachineSet %s was left paused\n%s", set.Name, w.describe())
		}
	}
	free, shut := 0, 0
	for _, m := range w.machines(group) {
		if protocol.HasFinalizer(m) {
			w.t.Fatalf("I4: Machine %s kept our finalizer\n%s", m.Name, w.describe())
		}
		if protocol.ClaimOf(m) == "" {
			free++
			if _, floors := m.Annotations[v1alpha1.FloorAnnotation]; w.tainted[m.UID] && w.reported[m.Spec.ProviderID] && !floors {
				shut++
			}
		}
	}
	if shut > max(0, free-int(w.floor(group))) {
		w.t.Fatalf("I2: %d of %d unclaimed Machines of %s take no pods, and the floor is %d\n%s", shut, free, group, w.floor(group), w.describe())
	}
}
