package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/samber/lo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/test/faults"
	"github.com/karpenter-capi/karpenter-capi/test/history"
)

// CorePoints returns the fail points of the short form: before and after each step that every claim
// goes through.
func CorePoints() []faults.Point {
	return faults.PointsAt([]faults.When{faults.Before, faults.After}, core...)
}

var core = []faults.Class{
	faults.ClaimCreated, faults.ReplicasRaised, faults.ClaimEntered, faults.MachineNamed, faults.ClaimBound, faults.MachineLabelled,
	faults.LedgerTidied, faults.ClaimReleasing, faults.ReleaseBegun, faults.MachineHeld, faults.MachineDeleted,
	faults.ReplicasLowered, faults.FinalizerRemoved, faults.ClaimEnded,
}

const (
	// hitWithin bounds the time to hit the fail points.
	hitWithin      = 12 * time.Minute
	hitShortWithin = 4 * time.Minute
	// provokeWithin bounds one provocation, during most of which the agent is killed.
	provokeWithin = 45 * time.Second
)

// provocation causes writes of some classes.
type provocation struct {
	classes []faults.Class
	groups  []*group
	round   func(ctx context.Context, r *run) error
}

func failPoints(ctx context.Context, r *run) error {
	return r.killAt(ctx, faults.PointsOf(faults.Classes...), hitWithin, provocations())
}

func failPointsShort(ctx context.Context, r *run) error {
	return r.killAt(ctx, CorePoints(), hitShortWithin, nil)
}

// killAt kills the agent once at each of the fail points, while claims come and go and the
// provocations cause each write. The report lists the points that were not hit in time.
func (r *run) killAt(ctx context.Context, points []faults.Point, within time.Duration, provoke []*provocation) error {
	usual := []*group{newGroup("points-a", 1, 10), newGroup("points-b", 0, 5)}
	usual[0].boot = time.Second // long enough for claims to be released before the Node exists
	groups := append([]*group(nil), usual...)
	for _, p := range provoke {
		groups = append(groups, p.groups...)
	}
	return r.with(ctx, groups, func() error {
		r.points.Arm(points...)
		l := r.startLoad(ctx, mix{workers: 6, choices: on(usual...), hold: 2 * time.Second, pace: 500 * time.Millisecond})
		searching, stop := context.WithTimeout(ctx, within)
		defer stop()
		var working sync.WaitGroup
		for _, p := range provoke {
			working.Go(func() {
				for searching.Err() == nil && len(r.points.Left()) > 0 {
					if !lo.SomeBy(r.points.Left(), func(q faults.Point) bool { return lo.Contains(p.classes, q.Class) }) {
						_ = wait(searching, time.Second)
						continue
					}
					bounded, cancel := context.WithTimeout(searching, provokeWithin)
					_ = p.round(bounded, r) // the agent is killed meanwhile
					cancel()
					for _, g := range p.groups {
						_ = r.releaseOf(searching, g) // otherwise the group would fill up
					}
				}
			})
		}
		for searching.Err() == nil && len(r.points.Left()) > 0 {
			_ = wait(searching, 200*time.Millisecond)
		}
		stop()
		if left := r.points.Left(); len(left) > 0 {
			r.say("not hit: %s", pointsLeft(left))
		}
		working.Wait()
		l.finish()
		for _, g := range groups {
			if g.version == blockedVersion {
				if err := r.releaseOf(ctx, g); err != nil {
					return err
				}
			}
		}
		return ctx.Err()
	})
}

// provocations returns provocations of the rare writes.
func provocations() []*provocation {
	tight, roomy := newGroup("points-tight", 0, 1), newGroup("points-roomy", 0, 4)
	wiped := newGroup("points-wiped", 1, 4)
	adopted := newGroup("points-adopted", 2, 6)
	broken := newGroup("points-broken", 0, 4)
	broken.failure = &simv1.MachineFailure{Reason: "InsufficientCapacity", Message: "none left"}
	rolled := newGroup("points-rolled", 1, 10)
	rolled.onDelete = true
	blocked := newGroup("points-blocked", 0, 4)
	blocked.version = blockedVersion
	lost := newGroup("points-lost", 0, 4)
	floor := newGroup("points-floor", 2, 4)
	returned := newGroup("points-returned", 1, 6)
	return []*provocation{
		{[]faults.Class{faults.ClaimMoved}, []*group{tight, roomy}, func(ctx context.Context, r *run) error {
			return r.moveOn(ctx, tight, roomy)
		}},
		{[]faults.Class{faults.LedgerBegun}, []*group{wiped}, func(ctx context.Context, r *run) error { return r.wipeAtRest(ctx, wiped) }},
		{[]faults.Class{faults.AdoptEntered}, []*group{adopted}, func(ctx context.Context, r *run) error { return r.adopt(ctx, adopted) }},
		{[]faults.Class{faults.ClaimFailed}, []*group{broken}, func(ctx context.Context, r *run) error { return r.failOn(ctx, broken) }},
		{[]faults.Class{faults.PausePut, faults.SetLowered, faults.PauseRemoved}, []*group{rolled}, func(ctx context.Context, r *run) error {
			return r.releaseFromTwoSets(ctx, rolled)
		}},
		{[]faults.Class{faults.ClaimExplained, faults.SetPaused, faults.SetUnpaused}, []*group{blocked}, func(ctx context.Context, r *run) error {
			return r.claimBlocked(ctx, blocked)
		}},
		{[]faults.Class{faults.ClaimRemade, faults.ClaimRestored}, []*group{lost}, func(ctx context.Context, r *run) error {
			return r.loseClaim(ctx, lost)
		}},
		{[]faults.Class{faults.TombstoneCreated, faults.TombstoneEngraved, faults.ClaimForgotten}, nil, func(ctx context.Context, r *run) error {
			return r.releaseUnknown(ctx, roomy)
		}},
		{[]faults.Class{faults.FloorChosen, faults.FloorMarked}, []*group{floor}, func(ctx context.Context, r *run) error {
			return r.markFloor(ctx, floor)
		}},
		{[]faults.Class{faults.ReturnRequested, faults.FloorRaised, faults.MachineReturned}, []*group{returned}, func(ctx context.Context, r *run) error {
			return r.returnMachine(ctx, returned)
		}},
	}
}

// claimBound makes a claim and waits until it has a Machine with a Node.
func (r *run) claimBound(ctx context.Context, groups ...*group) (string, error) {
	names := lo.Map(groups, func(g *group, _ int) string { return g.name })
	id, err := r.holders.create(ctx, names...)
	if err != nil || id == "" {
		return "", fmt.Errorf("no claim on %v: %w", names, err)
	}
	for {
		m, err := r.machineOf(ctx, id)
		if err == nil && m != nil && m.Status.NodeRef.Name != "" && m.Labels[agentv1.ClaimLabel] == id {
			return id, nil
		}
		if err := wait(ctx, pause); err != nil {
			return id, err
		}
	}
}

// awaitEnd releases a claim and waits until the release is complete.
func (r *run) awaitEnd(ctx context.Context, id string) error {
	if err := r.holders.release(ctx, id, true); err != nil {
		return err
	}
	return r.auditor.Await(ctx, func() bool { return r.phase(id) == agentv1.PhaseEnded })
}

// moveOn makes more concurrent claims than their first candidate has room for.
func (r *run) moveOn(ctx context.Context, tight, roomy *group) error {
	var making sync.WaitGroup
	for range 3 {
		making.Go(func() {
			if id, err := r.holders.create(ctx, tight.name, roomy.name); err == nil && id != "" {
				_ = wait(ctx, between(0, time.Second))
				_ = r.awaitEnd(ctx, id)
			}
		})
	}
	making.Wait()
	return nil
}

// wipeAtRest removes the ledger of a group in which nothing is in flight.
func (r *run) wipeAtRest(ctx context.Context, g *group) error {
	id, err := r.claimBound(ctx, g)
	if err != nil {
		return err
	}
	for range 3 {
		if err := r.wipe(ctx, g); err != nil {
			return err
		}
		if err := wait(ctx, between(time.Second, 3*time.Second)); err != nil {
			return err
		}
	}
	return r.awaitEnd(ctx, id)
}

// wipe removes the ledger of a group, as kubectl replace does. What only the ledger knew becomes
// the user's.
func (r *run) wipe(ctx context.Context, g *group) error {
	r.fault("wiping the ledger of %s", g.name)
	path := "/metadata/annotations/" + "agent.karpenter.cluster.x-k8s.io~1ledger"
	return r.rewrite(ctx, g, func(md *clusterv1.MachineDeployment) edit {
		text, there := md.Annotations[agentv1.LedgerAnnotation]
		if !there {
			return edit{patch: []operation{}}
		}
		unclear := inFlight(text)
		return edit{
			patch: []operation{test(path, text), {Op: "remove", Path: path}},
			begin: func() { r.intent.share(g.name, 0, unclear) },
			end: func(applied bool) {
				if !applied {
					r.intent.share(g.name, 0, -unclear)
				}
			},
		}
	})
}

// adopt lets a claim adopt one of the user's Machines, and replaces that Machine for the user
// afterwards.
func (r *run) adopt(ctx context.Context, g *group) error {
	machines, err := r.machines(ctx, g)
	if err != nil {
		return err
	}
	m, found := lo.Find(machines, func(m clusterv1.Machine) bool {
		return m.DeletionTimestamp.IsZero() && m.Labels[agentv1.ClaimLabel] == "" && m.Status.NodeRef.Name != ""
	})
	if !found {
		if err := r.scale(ctx, g, 1); err != nil {
			return err
		}
		return r.awaitNodes(ctx, g, 1)
	}
	call := request(uuid.NewString(), g.name)
	call.AdoptMachine = m.Name
	// The user has one Machine less as soon as a claim has it.
	r.intent.share(g.name, -1, 0)
	id, err := r.holders.make(ctx, call)
	if err != nil || id == "" {
		r.intent.share(g.name, 0, 1) // the outcome is unknown
		return err
	}
	for {
		now, err := r.machineOf(ctx, id)
		if err == nil && now != nil && now.Labels[agentv1.ClaimLabel] == id {
			break
		}
		if err := wait(ctx, pause); err != nil {
			r.intent.share(g.name, 0, 1) // it may be released before it has the Machine
			return err
		}
	}
	if err := r.awaitEnd(ctx, id); err != nil {
		return err
	}
	return r.scale(ctx, g, 1)
}

// failOn makes claims on a group whose infrastructure has no capacity.
func (r *run) failOn(ctx context.Context, g *group) error {
	id, err := r.holders.create(ctx, g.name)
	if err != nil {
		return err
	}
	if id == "" { // it is cooling down
		return wait(ctx, time.Second)
	}
	err = r.auditor.Await(ctx, func() bool { return r.phase(id) == agentv1.PhaseEnded })
	r.forgive()
	return err
}

// releaseFromTwoSets makes claims on two MachineSets and releases them.
func (r *run) releaseFromTwoSets(ctx context.Context, g *group) error {
	if g.revision == 0 {
		g.revision++
		if err := r.Hub.Create(ctx, g.machineTemplate()); err != nil {
			return err
		}
	}
	var ids []string
	for revision := range 2 {
		for done := false; !done; {
			var err error
			if done, err = r.flipWhenQuiet(ctx, g, fmt.Sprintf("%s-r%d", g.name, revision)); err != nil {
				return err
			}
		}
		for range 2 {
			id, err := r.holders.create(ctx, g.name)
			if err != nil {
				return err
			}
			if id == "" { // full of leftovers, which never go while its template changes
				return errors.Join(r.releaseOf(ctx, g), wait(ctx, between(time.Second, 3*time.Second)))
			}
			ids = append(ids, id)
		}
		if err := r.auditor.Await(ctx, func() bool {
			return lo.EveryBy(ids, func(id string) bool { return r.phase(id) != agentv1.PhasePending })
		}); err != nil {
			return err
		}
		// A Machine without a Node would be handed over instead.
		if err := r.awaitNodes(ctx, g, len(ids)); err != nil {
			return err
		}
	}
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids {
		if err := r.holders.release(ctx, id, true); err != nil {
			return err
		}
		if err := wait(ctx, between(0, time.Second)); err != nil {
			return err
		}
	}
	return r.auditor.Await(ctx, func() bool {
		return lo.EveryBy(ids, func(id string) bool { return r.phase(id) == agentv1.PhaseEnded })
	})
}

// claimBlocked makes claims on a group whose Machines never come, and releases them.
func (r *run) claimBlocked(ctx context.Context, g *group) error {
	id, err := r.holders.create(ctx, g.name)
	if err != nil || id == "" {
		return err
	}
	if err := wait(ctx, between(3*time.Second, 5*time.Second)); err != nil {
		return err
	}
	if err := r.awaitEnd(ctx, id); err != nil {
		return err
	}
	return wait(ctx, spareGrace+between(time.Second, 3*time.Second))
}

// loseClaim destroys a claim's MachineClaim, or its status, as a restore from an old backup does.
func (r *run) loseClaim(ctx context.Context, g *group) error {
	id, err := r.claimBound(ctx, g)
	if err != nil {
		return err
	}
	c := &agentv1.MachineClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: sandbox.ClusterNamespace, Name: agentv1.ObjectName(sandbox.ClusterName, id),
	}}
	r.watched.excuse(id)
	r.fault("the MachineClaim of %s, or its status, is lost", id)
	if rand.IntN(2) == 0 {
		r.memory.Lose(c.Namespace, c.Name)
		err = r.Hub.Delete(ctx, c)
	} else {
		err = r.Hub.Status().Patch(ctx, c, client.RawPatch(types.MergePatchType, []byte(`{"status":null}`)))
	}
	if err != nil {
		return err
	}
	for {
		var now agentv1.MachineClaim
		err := r.Hub.Get(ctx, client.ObjectKeyFromObject(c), &now)
		if err == nil && now.Status.Phase == agentv1.PhaseBound {
			break
		}
		if err := wait(ctx, pause); err != nil {
			return err
		}
	}
	return r.awaitEnd(ctx, id)
}

// releaseUnknown releases a claim that was never made, and then makes the delayed call that creates
// it.
func (r *run) releaseUnknown(ctx context.Context, g *group) error {
	late := request(uuid.NewString(), g.name)
	if err := r.holders.release(ctx, late.GetClaimId(), false); err != nil {
		return err
	}
	for {
		bounded, cancel := context.WithTimeout(ctx, attemptWithin)
		answered := r.holders.told.Begin(late.GetClaimId(), history.Create)
		_, err := r.holders.anyAgent().Claims.CreateClaim(bounded, late)
		cancel()
		answered(madeOf(err))
		if agenterrors.IsEnded(err) {
			break
		}
		if err == nil {
			r.holders.odd("a claim was made that had been released before: %s", late.GetClaimId())
			break
		}
		if err := wait(ctx, pause); err != nil {
			return err
		}
	}
	return wait(ctx, between(0, 2*time.Second))
}

// markFloor reports the Nodes of the user's Machines as carrying Karpenter's taint until the agent
// has marked one of the Machines. If all are already marked, a user first removes a mark.
func (r *run) markFloor(ctx context.Context, g *group) error {
	if err := r.awaitNodes(ctx, g, int(g.own)); err != nil {
		return err
	}
	machines, err := r.machines(ctx, g)
	if err != nil {
		return err
	}
	m := machines[rand.IntN(len(machines))]
	if _, marked := m.Annotations[agentv1.FloorAnnotation]; marked {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, agentv1.FloorAnnotation)
		if err := r.Hub.Patch(ctx, &m, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return err
		}
	}
	for {
		if err := r.holders.report(ctx, machines); err != nil {
			return err
		}
		err := r.Hub.Get(ctx, client.ObjectKeyFromObject(&m), &m)
		if err != nil {
			return err
		}
		if _, marked := m.Annotations[agentv1.FloorAnnotation]; marked {
			return nil
		}
		if err := wait(ctx, time.Second); err != nil {
			return err
		}
	}
}

// returnMachine returns a claim's Machine to the user, who then has one more and removes another
// one.
func (r *run) returnMachine(ctx context.Context, g *group) error {
	id, err := r.claimBound(ctx, g)
	if err != nil {
		return err
	}
	returns, err := r.holders.returnMachine(ctx, id)
	if err == nil && returns {
		err = r.auditor.Await(ctx, func() bool { return r.phase(id) == agentv1.PhaseEnded })
	}
	if err != nil { // the owner of the Machine is unknown after its release
		r.holders.giveUp(id)
		r.intent.share(g.name, 0, 1)
		return err
	}
	if !returns {
		return fmt.Errorf("the Machine of claim %s, which is Bound, was not returned", id)
	}
	r.holders.drop(id)
	r.intent.share(g.name, 1, 0)
	return r.scale(ctx, g, -1)
}
