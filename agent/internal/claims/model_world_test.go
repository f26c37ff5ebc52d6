package claims

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

const (
	namespace   = "fleet"
	clusterName = "spoke"
	holder      = "karpenter"
	capiHolds   = clusterv1.MachineFinalizer
)

// world is a hub in which Cluster API's controllers take one small step at a time. The adversary
// decides which step is next, which Machine a MachineSet deletes where Cluster API leaves it open,
// and what happens to each request of an agent.
type world struct {
	t failer
	// dice is the adversary's source of randomness; nil in a world without one.
	dice   *rapid.T
	hub    *hub
	clock  *testclock.FakeClock
	agents []*process
	groups []string

	// actions are what the adversary may do, by name. depth is how many calls are interrupted by
	// others now.
	actions map[string]func()
	depth   int
	events  int
	// late are writes that have not arrived yet.
	late []func()
	// chosen returns what happens to the write that an agent is about to make; nil leaves that to
	// the dice.
	chosen func() fault
	// fair means that nothing is interrupted or fails any more.
	fair bool
	// moving means that the Cluster is paused because a move is in progress.
	moving bool
	// moved means that a move is over.
	moved bool
	// withdrawing means that an agent is being uninstalled, so that what it removes is not taken
	// from any owner.
	withdrawing bool
	// inPlace means that rolling updates move Machines between MachineSets.
	inPlace bool
	// noSurge means that rolling updates delete a Machine before they create another one.
	noSurge bool
	// copies means that MachineSets get a copy of the MachineDeployment's ledger, as in Cluster
	// API.
	copies bool

	// ledgerBudget is the agents' budget; zero means more than histories need.
	ledgerBudget int
	// skew is the maximum difference of each agent's clock from the API server's, which is the
	// world's.
	skew time.Duration
	// failure defines when the agents give Machines up.
	failure protocol.FailurePolicy
	// since is when a claim's wait for a Machine began or the claim was bound, whichever was last,
	// by the world's clock. failed is when a claim of a group last failed.
	since, failed map[string]time.Time

	// Cluster API.

	// seen holds the Machines that the MachineSet controller's lagging cache knows to be deleted.
	seen map[types.UID]bool
	// busy holds the controllers, by group or MachineSet, that are in the middle of a step.
	busy      map[string]bool
	templates map[string]int
	blocked   map[string]bool // groups whose MachineSets can create no Machines
	refused   map[string]bool // those of them where each attempt ends with an error, as under a quota
	// slow reports whether a Machine's infrastructure is still slow; nil means never.
	slow func(*clusterv1.Machine) bool
	// surge holds the Machines that a rollout created while it ran.
	surge map[types.UID]bool
	// joined counts the events up to the Node's joining. tainted Nodes still carry the unregistered
	// taint.
	joined  map[types.UID]int
	tainted map[types.UID]bool
	// open holds the Machines of the floor whose Nodes the shim has untainted: pods may run there.
	open map[types.UID]bool

	// People.

	owned map[string]int32 // what the user owns in each group, according to the user
	// scaled is when people last set a group to a number of replicas.
	scaled map[string]time.Time
	// licensed counts the Machines that Cluster API may choose: in each group because a human
	// lowered replicas, and in each MachineSet because a rollout did.
	licensed map[string]int
	// outsiders holds the Machines whose removal another actor than the agent caused.
	outsiders map[types.UID]bool
	// peaceful means that only the agents have acted so far.
	peaceful bool
	// ledgers holds the groups and texts of all ledgers that agents have written.
	ledgers map[string]bool
	// wiped holds the groups whose ledger was lost or edited: what it cannot explain is the user's
	// from then on.
	wiped map[string]bool

	// The holder.

	owners  map[string]*owner
	order   []string // ids of the owners, in order of creation
	session session
	// kept holds the claims that the agents would not release although their owners are gone. They
	// are left to a person.
	kept map[string]bool
	// reported holds all provider IDs that the holder ever reported as unregistered.
	reported map[string]bool
}

// owner is a NodeClaim, as far as the holder knows.
type owner struct {
	candidates []string
	adopt      string
	alive      bool
	made       bool // a call to make its claim succeeded
	adopted    bool // its claim's label was put on a Machine of the user's
	asked      bool // its release was requested
	released   bool // a call to release its claim succeeded
	// returns: a call requested to return its Machine. returned: such a call succeeded, and the
	// claim's status was not lost since.
	returns, returned bool
	// excused means that its claim may end by itself, because its Machine was taken from it.
	excused bool
	// gone means that its tombstone has been deleted.
	gone bool
	// ended means that its claim had ended when the hub was moved.
	ended bool
	// lost means that its claim's object was deleted. The protocol does not cover a call that makes
	// the claim again on another group before an agent has recreated the object, because the anchor
	// itself was lost.
	lost bool
	born time.Time
}

// session is what the holder has gathered for SyncClaims.
type session struct {
	token string
	live  []string // nil until it was read
	nodes []NodeReport
}

// spoke is the cluster that the holder runs in. elsewhere is an unrelated cluster.
const (
	spoke     = "11111111-spoke"
	elsewhere = "22222222-elsewhere"
)

type worldOptions struct {
	groups           int
	floor            int32
	minimum, maximum string
	strategy         clusterv1.MachineDeploymentRolloutStrategyType
	// ledgerBudget is how many bytes a ledger's entries may take; zero means the engine's own
	// bound.
	ledgerBudget int
	// skew is how far an agent's clock may be from the API server's.
	skew time.Duration
	// failure defines when the agents give Machines up; the zero value gives none up.
	failure protocol.FailurePolicy
	// noSurge is the world's.
	noSurge bool
}

func newWorld(t *rapid.T, o worldOptions) *world {
	w := buildWorld(t, t, o)
	w.fair = false
	return w
}

// failer ends a history in which something is wrong.
type failer interface {
	Fatalf(format string, args ...any)
}

// newFairWorld returns a world without an adversary.
func newFairWorld(t failer, o worldOptions) *world { return buildWorld(t, nil, o) }

func buildWorld(t failer, dice *rapid.T, o worldOptions) *world {
	clock := testclock.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	w := &world{
		t: t, dice: dice, fair: true, clock: clock, hub: newHub(clock), peaceful: true, ledgerBudget: o.ledgerBudget, noSurge: o.noSurge,
		skew: o.skew, failure: o.failure, since: map[string]time.Time{}, failed: map[string]time.Time{},
		seen: map[types.UID]bool{}, busy: map[string]bool{}, templates: map[string]int{}, blocked: map[string]bool{}, refused: map[string]bool{},
		surge: map[types.UID]bool{}, joined: map[types.UID]int{}, tainted: map[types.UID]bool{}, open: map[types.UID]bool{},
		owned: map[string]int32{}, scaled: map[string]time.Time{}, ledgers: map[string]bool{},
		licensed: map[string]int{}, outsiders: map[types.UID]bool{}, wiped: map[string]bool{},
		owners: map[string]*owner{}, reported: map[string]bool{}, kept: map[string]bool{},
	}
	for range 2 {
		w.agents = append(w.agents, w.newProcess(len(w.agents))) // whose caches are still empty
	}
	w.must(w.hub.create(&clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterName}}))
	for i := range o.groups {
		name := fmt.Sprintf("group-%d", i)
		annotations := map[string]string{}
		if o.maximum != "" {
			annotations[clusterv1.AutoscalerMaxSizeAnnotation] = o.maximum
		}
		if o.minimum != "" {
			annotations[clusterv1.AutoscalerMinSizeAnnotation] = o.minimum
		}
		w.must(w.hub.create(&clusterv1.MachineDeployment{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: name, Labels: map[string]string{v1alpha1.MemberLabel: ""}, Annotations: annotations,
			},
			Spec: clusterv1.MachineDeploymentSpec{
				ClusterName: clusterName, Replicas: &o.floor,
				Rollout: clusterv1.MachineDeploymentRolloutSpec{Strategy: clusterv1.MachineDeploymentRolloutStrategy{Type: o.strategy}},
			},
		}))
		w.groups = append(w.groups, name)
		w.owned[name] = o.floor
	}
	return w
}

func (w *world) must(err error) {
	if err != nil {
		w.t.Fatalf("the model: %v", err)
	}
}

func must(t failer, err error) {
	if err != nil {
		t.Fatalf("unexpected: %v", err)
	}
}

func read[T any, P interface {
	*T
	client.Object
	DeepCopy() *T
}](h *hub, k kind, keep func(*T) bool) []*T {
	var out []*T
	for _, name := range slices.Sorted(maps.Keys(h.objects[k])) {
		o := (*T)(h.objects[k][name].(P)) //nolint:forcetypeassert // of the kind
		if keep == nil || keep(o) {
			out = append(out, P(o).DeepCopy())
		}
	}
	return out
}

func (w *world) md(name string) *clusterv1.MachineDeployment {
	o, err := w.hub.find(deployments, name)
	w.must(err)
	return o.(*clusterv1.MachineDeployment).DeepCopy() //nolint:forcetypeassert // of the kind
}

func (w *world) sets(group string) []*clusterv1.MachineSet {
	return read(w.hub, machineSets, func(s *clusterv1.MachineSet) bool { return s.Labels[clusterv1.MachineDeploymentNameLabel] == group })
}

func (w *world) machines(group string) []*clusterv1.Machine {
	return read(w.hub, allMachines, func(m *clusterv1.Machine) bool { return m.Labels[clusterv1.MachineDeploymentNameLabel] == group })
}

func (w *world) claims() map[string]*v1alpha1.MachineClaim {
	out := map[string]*v1alpha1.MachineClaim{}
	for _, c := range read[v1alpha1.MachineClaim](w.hub, allClaims, nil) {
		out[c.Spec.ClaimID] = c
	}
	return out
}

func (w *world) ledger(group string) *protocol.Ledger {
	l, err := protocol.ParseLedger(w.md(group).Annotations[v1alpha1.LedgerAnnotation])
	if err != nil {
		return nil
	}
	return l
}

// floor returns what the user has in the group: at least the min size, once an agent has looked at
// the group.
func (w *world) floor(group string) int32 {
	l := w.ledger(group)
	owned := w.owned[group]
	if l == nil {
		return owned
	}
	if w.wiped[group] {
		owned = max(owned, l.Floor)
	}
	return max(owned, w.minimum(group))
}

func (w *world) minimum(group string) int32 {
	var minimum int32
	_, _ = fmt.Sscan(w.md(group).Annotations[clusterv1.AutoscalerMinSizeAnnotation], &minimum)
	return minimum
}

func (w *world) maximum(group string) int32 {
	maximum := int32(math.MaxInt32)
	_, _ = fmt.Sscan(w.md(group).Annotations[clusterv1.AutoscalerMaxSizeAnnotation], &maximum)
	return maximum
}

// live counts the group's claims that have not ended.
func (w *world) live(group string) int32 {
	var live int32
	for _, c := range w.claims() {
		if c.Spec.NodeGroup == group && c.CurrentPhase() != v1alpha1.PhaseEnded {
			live++
		}
	}
	return live
}

func (w *world) describe() string {
	var b strings.Builder
	for _, group := range w.groups {
		md := w.md(group)
		fmt.Fprintf(&b, "%s replicas=%d gen=%d/%d owned=%d paused=%v ledger=%s\n",
			group, *md.Spec.Replicas, md.Generation, md.Status.ObservedGeneration, w.owned[group],
			md.Annotations[clusterv1.PausedAnnotation], md.Annotations[v1alpha1.LedgerAnnotation])
		for _, s := range w.sets(group) {
			fmt.Fprintf(&b, "  set %s replicas=%d gen=%d/%d paused=%s released=%s\n",
				s.Name, protocol.ReplicasOf(s), s.Generation, s.Status.ObservedGeneration,
				s.Annotations[clusterv1.PausedAnnotation], s.Annotations[v1alpha1.ReleasedAnnotation])
		}
		for _, m := range w.machines(group) {
			fmt.Fprintf(&b, "  machine %s %s set=%s claim=%q alive=%v node=%q %s finalizers=%v\n",
				m.Name, m.UID, protocol.SetOf(m), protocol.ClaimOf(m), protocol.Alive(m), m.Status.NodeRef.Name, protocol.DeletingReason(m), m.Finalizers)
		}
	}
	claims := w.claims()
	for _, id := range slices.Sorted(maps.Keys(claims)) {
		c := claims[id]
		fmt.Fprintf(&b, "  claim %s group=%s phase=%s reason=%s machine=%v\n", id, c.Spec.NodeGroup, c.Status.Phase, c.Status.Reason, c.Status.Machine)
	}
	for _, id := range w.order {
		fmt.Fprintf(&b, "  owner %s %+v\n", id, *w.owners[id])
	}
	return b.String()
}
