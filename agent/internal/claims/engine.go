// Package claims is the claim engine: it gives each claim exactly one Machine and takes back exactly that Machine, by
// compare-and-swap on Kubernetes objects alone.
//
// # State
//
// Nothing that matters is in this process. The MachineClaim anchors a claim: its creation decides which node group the
// claim belongs to, its phase who wins a race between binding and releasing. The [protocol.Ledger], an annotation of the
// MachineDeployment, says what is in flight there and changes only together with spec.replicas. The label on a Machine is
// the lasting binding.
//
// # One step
//
// A node group is brought forward one step at a time: read the MachineDeployment, then its claims, Machines and
// MachineSets; [protocol.Decide] what the protocol asks for; write the ledger, or do the writes on other objects that the ledger
// permits; again, until there is nothing to do. Every event, every call and every restart leads to the same step, so that
// there is no separate recovery. Steps of one node group do not overlap within a process; between processes the ledger's
// compare-and-swap orders them.
//
// # Group commit
//
// A call that adds a claim waits for the step that enters it. While a step is under way, further calls gather, and the next
// step takes all of them in one write.
package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Indexes are the names of the caches' indexes. One that is empty does not exist, and cached lists select by label then.
type Indexes struct {
	// Group is of Machines, MachineSets and those MachineClaims that have not ended, by the name of their MachineDeployment.
	Group string
	// Failed is of the MachineClaims that failed, in the same way.
	Failed string
	// Cluster is of Machines and MachineClaims by the name of their Cluster.
	Cluster string
}

// selecting lists by an index of the caches if there is one, else by label.
func selecting(index, label, value string) client.ListOption {
	if index != "" {
		return client.MatchingFields{index: value}
	}
	return client.MatchingLabels{label: value}
}

// Config is what an [Engine] needs.
type Config struct {
	// Name identifies this agent across restarts; other agents of the hub have other names. Empty means a random id for this process.
	Name string
	// Client reads from caches and writes. REQUIRED.
	Client client.Client
	// Reader reads from the API server itself, consistently. REQUIRED.
	Reader client.Reader
	// Indexes are the caches' own.
	Indexes Indexes
	// Live leaves ended claims out of lists that Reader answers. Nil lists them too, which is only slower.
	Live client.ListOption
	// Recorder takes the events that people see. Nil means none.
	Recorder events.EventRecorder
	// Clock is the time. Nil means the real one.
	Clock clock.Clock
	// SpareGrace is how long a Machine that nobody claims is kept for the next claim. Zero means one minute.
	SpareGrace time.Duration
	// TombstoneRetention is how long an ended claim is remembered; it must be longer than any caller retries. Zero means
	// 24 hours.
	TombstoneRetention time.Duration
	// CollectGrace is how much older than its token a claim must be to be collected by [Engine.Sync]. Zero means 30 seconds.
	CollectGrace time.Duration
	// TokenLife is how long after the listing that made it a token may be used: a holder reads its live set right after it
	// took the token, and one that needs longer has a problem of its own. Zero means ten minutes.
	TokenLife time.Duration
	// NoMachines says why no Machine can be created for a MachineDeployment now, because of the hub's ResourceQuotas or of Cluster API itself. A
	// nil refusal means that nothing is known to prevent it; a nil function means the same for every group. A group with a spare Machine accepts
	// a claim in any case.
	NoMachines func(ctx context.Context, md *clusterv1.MachineDeployment) (*eligibility.Refusal, error)
	// Failure says when a Machine is given up. The zero value gives none up.
	Failure protocol.Failure
	// Report returns a condition of a Machine's infrastructure object, where [protocol.Failure.See] names one, without waiting for it to be
	// read; known is false while that has not been. Nil means that nothing is known.
	Report func(ctx context.Context, m *clusterv1.Machine, condition string) (report protocol.Report, known bool)
	// Bounds limit what one Cluster can store. The zero value does not.
	Bounds Bounds
	// Coalesce is the shortest time between two writes of one ledger that nobody waits for. Zero means one second.
	Coalesce time.Duration
}

// Key names a claim.
type Key struct {
	Namespace, Cluster, ID string
}

func (k Key) object() types.NamespacedName {
	return types.NamespacedName{Namespace: k.Namespace, Name: v1alpha1.ObjectName(k.Cluster, k.ID)}
}

// Request asks for one Machine.
type Request struct {
	// Namespace and Cluster name the Cluster object; ID is the caller's id for the claim.
	Namespace, Cluster, ID string
	// Holder keeps the claim alive and may collect it.
	Holder string
	// Spoke is the cluster that the claim is made from; empty when it is not known.
	Spoke string
	// MaxNodeProvisionTime is how long the claim waits for its Machine's provider ID and Node; zero for as long as the options say.
	MaxNodeProvisionTime time.Duration
	// DisplayName is what the caller calls it; may be empty.
	DisplayName string
	// Candidates are names of MachineDeployments in Namespace, best first.
	Candidates []string
	// Adopt is the name of an existing Machine of the only candidate that the claim takes over; empty for a new Machine.
	Adopt string
	// AdoptAboveMinSize refuses that where replicas would have to be raised for the user to keep the min size.
	AdoptAboveMinSize bool
	// ValidateOnly checks against the caches and writes nothing.
	ValidateOnly bool
	// Holders are those that the caller may act as: the id of another's claim is refused to it.
	Holders Holders
}

// Holders reports whether a caller may act as a holder. Nil means as any.
type Holders func(holder string) bool

// check returns [ErrForeignHolder] when the claim is another holder's. One that has ended is only remembered, and nobody's.
func (h Holders) check(c *v1alpha1.MachineClaim) error {
	if h == nil || c.CurrentPhase() == v1alpha1.PhaseEnded || h(c.Spec.Holder) {
		return nil
	}
	return ErrForeignHolder
}

// ReleaseOptions qualify a release.
type ReleaseOptions struct {
	// Drained says that the caller has drained the Node.
	Drained bool
	// Failed says that the Machine did not come or is no good: it is not handed over, and its group cools down.
	Failed bool
	// Reason is for the claim's history; may be empty.
	Reason string
	// Holders are those that the caller may act as: another's claim is not released.
	Holders Holders

	unless func(*v1alpha1.MachineClaim) bool // leaves the claim as it is; nil for never
}

// Engine makes, binds and releases claims. It is safe for concurrent use, and several may run against one hub.
type Engine struct {
	Config
	spawn    func(func()) // runs a group outside its caller; tests run it in place
	parallel int          // writes that one step does at once
	decide   func(*protocol.Snapshot) *protocol.Decision
	started  time.Time
	// withdraws says that the agent is being uninstalled, so that no failed Machine is kept for debugging.
	withdraws bool
	// ledgerBudget is how many bytes all entries of one ledger may take; zero means [protocol.LedgerBudget]. Tests lower it.
	ledgerBudget int
	// id tells this agent from the others that write ledgers. Nothing but who goes first depends on its being unique.
	id      string
	written ownWrites
	// deference is how long a node group is left to the agent that wrote its ledger last; see [group.leave]. Tests set it.
	deference time.Duration

	mu           sync.Mutex
	groups       map[types.NamespacedName]*group
	unregistered map[types.NamespacedName]unregistered // by Cluster
	// woken are node groups to look at because of a holder's report, which no watched object shows.
	woken    chan event.GenericEvent
	synced   map[speaker]map[types.UID]bool  // the claims that a holder's last live set decided
	censuses map[types.NamespacedName]census // by Cluster
}

// New returns an engine that is driven by calls alone until [Engine.SetupWithManager] connects it to the hub's events.
func New(c Config) *Engine {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.SpareGrace == 0 {
		c.SpareGrace = time.Minute
	}
	if c.TombstoneRetention == 0 {
		c.TombstoneRetention = 24 * time.Hour
	}
	if c.CollectGrace == 0 {
		c.CollectGrace = 30 * time.Second
	}
	if c.TokenLife == 0 {
		c.TokenLife = 10 * time.Minute
	}
	if c.Coalesce == 0 {
		c.Coalesce = time.Second
	}
	return &Engine{
		Config: c, id: idOf(c.Name), deference: deference, written: newOwnWrites(c.Clock),
		started: c.Clock.Now(), spawn: func(run func()) { go run() }, parallel: parallelWrites, decide: protocol.Decide,
		groups: map[types.NamespacedName]*group{}, unregistered: map[types.NamespacedName]unregistered{}, woken: make(chan event.GenericEvent, 1024),
		synced: map[speaker]map[types.UID]bool{}, censuses: map[types.NamespacedName]census{},
	}
}

// idOf returns what an agent of this name signs ledgers with. It is the same after a restart, so that the agent continues its own unfinished work
// at once.
func idOf(name string) string {
	if name == "" {
		return rand.String(8)
	}
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(name))
	return fmt.Sprintf("%08x", sum.Sum32())
}

// Create makes the claim durable and returns it. The same id again returns the claim that there is. Errors: [*EndedError],
// [*NoRoomError], [*RefusedError], [*UnknownGroupError], [*UnseenError], [*TooManyError], [ErrForeignHolder],
// [ErrUnknownCluster], [ErrConflict]; any other error comes from the API server, and the claim may or may not exist.
func (e *Engine) Create(ctx context.Context, r Request) (*v1alpha1.MachineClaim, error) {
	defer observeCreate(e.Clock, e.Clock.Now())
	cluster, err := e.cluster(ctx, r.Namespace, r.Cluster)
	if err != nil {
		return nil, err
	}
	if cluster == nil {
		return nil, ErrUnknownCluster
	}
	key := Key{Namespace: r.Namespace, Cluster: r.Cluster, ID: r.ID}
	open, err := e.choose(ctx, r, cluster, r.Candidates)
	if err != nil {
		return nil, err
	}
	if open.none() || r.ValidateOnly {
		existing, err := e.stored(ctx, key)
		switch {
		case err == nil && r.ValidateOnly:
			if err := r.Holders.check(existing); err != nil {
				return nil, err
			}
			return existing, ended(existing)
		case err == nil:
			return e.follow(ctx, existing, r.Holders)
		case !errors.Is(err, ErrNotFound):
			return nil, err
		case open.none() && r.ValidateOnly:
			return nil, open.refused()
		}
	}

	r.Candidates = open.candidates
	c := e.newClaim(r, cluster, open.first())
	if r.ValidateOnly {
		return c, e.room(ctx, client.ObjectKeyFromObject(cluster), false)
	}
	switch lost, err := e.remember(ctx, key); {
	case err == nil:
		return e.follow(ctx, lost, r.Holders)
	case !errors.Is(err, ErrNotFound):
		return nil, err
	case open.none():
		return nil, open.refused()
	}
	full := e.room(ctx, client.ObjectKeyFromObject(cluster), false)
	entered := false
	if full == nil {
		entered, err = e.make(ctx, c, open.deployment)
		full = overQuota(client.ObjectKeyFromObject(cluster), err)
	}
	switch {
	case full != nil || apierrors.IsAlreadyExists(err):
		existing, err := e.stored(ctx, key)
		switch gone := errors.Is(err, ErrNotFound); {
		case gone && full != nil:
			return nil, full
		case gone:
			return nil, fmt.Errorf("reading the claim that was there already: %w", ErrConflict) // it was deleted in between
		}
		if err != nil {
			return nil, err
		}
		return e.follow(ctx, existing, r.Holders)
	case err != nil:
		return nil, fmt.Errorf("creating MachineClaim %s: %w", c.Name, err)
	}
	if entered {
		return c, nil
	}
	return e.enter(ctx, c)
}

// make makes the claim's object, and enters it at once where that can be done; it reports whether it did.
func (e *Engine) make(ctx context.Context, c *v1alpha1.MachineClaim, md *clusterv1.MachineDeployment) (entered bool, err error) {
	g := e.group(c.Namespace, c.Spec.NodeGroup)
	made, alone := g.beginMaking()
	defer made()
	done := g.begin() // before the event of its creation has a run enter it
	if err := e.Client.Create(ctx, c); err != nil {
		done()
		return false, err
	}
	e.added(types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}, 1, 0)
	if !alone { // of several that come at once the others gather, and a run enters them in one write
		done()
		return false, nil
	}
	return g.enterAtOnce(md, c, done), nil //nolint:contextcheck // it goes on after the call
}

// remember makes a claim's object again, if it was lost while a Machine carries the claim's label, and returns it: the claim must
// neither be made anew on another node group nor be taken for gone. It returns [ErrNotFound] when there is nothing to remember. A
// label that the caches do not show yet is too young for that.
func (e *Engine) remember(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	if paused, err := e.paused(ctx, types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}); err != nil || paused {
		return nil, cmp.Or(err, ErrNotFound)
	}
	var labelled clusterv1.MachineList
	err := e.Client.List(ctx, &labelled, client.InNamespace(key.Namespace), selecting(e.Indexes.Cluster, clusterv1.ClusterNameLabel, key.Cluster),
		client.MatchingLabels{v1alpha1.ClaimLabel: key.ID}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the claim's Machines: %w", err)
	}
	for i := range labelled.Items {
		m := &labelled.Items[i]
		if !protocol.Alive(m) || m.Spec.ClusterName != key.Cluster {
			continue
		}
		if err := e.recreate(ctx, m); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("making the claim again from its Machine: %w", err)
		}
		return e.stored(ctx, key)
	}
	return nil, ErrNotFound
}

func (e *Engine) newClaim(r Request, cluster *clusterv1.Cluster, nodeGroup string) *v1alpha1.MachineClaim {
	var maxNodeProvisionTime *int32
	if r.MaxNodeProvisionTime > 0 {
		maxNodeProvisionTime = new(int32(r.MaxNodeProvisionTime / time.Second))
	}
	return &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.Namespace,
			Name:      v1alpha1.ObjectName(r.Cluster, r.ID),
			Labels: map[string]string{
				v1alpha1.ClusterLabel:   r.Cluster,
				v1alpha1.NodeGroupLabel: nodeGroup,
				v1alpha1.HolderLabel:    r.Holder,
			},
			OwnerReferences: ownedBy(cluster),
		},
		Spec: v1alpha1.MachineClaimSpec{
			ClusterName: r.Cluster,
			ClusterUID:  cluster.UID,
			ClaimID:     r.ID,
			Holder:      r.Holder,
			Spoke:       r.Spoke,
			DisplayName: r.DisplayName,
			Candidates:  r.Candidates,
			NodeGroup:   nodeGroup,
			Adopt:       r.Adopt,

			AdoptAboveMinSize:           r.AdoptAboveMinSize,
			MaxNodeProvisionTimeSeconds: maxNodeProvisionTime,
		},
	}
}

func ownedBy(cluster *clusterv1.Cluster) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: cluster.Name, UID: cluster.UID}}
}

// refusal says why a group would not take the claim now, as far as the caches tell; nil when it would.
func (e *Engine) refusal(
	ctx context.Context, r Request, cluster *clusterv1.Cluster, md *clusterv1.MachineDeployment,
) (*eligibility.Refusal, error) {
	key, name := client.ObjectKeyFromObject(md), md.Name
	gone := unknownGroup(name)
	ledger, err := protocol.LedgerOf(md)
	if errors.Is(err, protocol.ErrNewerLedger) {
		return newer(name, err), nil
	}
	group := eligibility.Of(md, cluster)
	switch refusal := group.Refusal(); {
	case refusal != nil:
		return refusal, nil
	case r.Adopt != "": // a Machine that there is
	case group.Full() && ledger != nil:
		if spare, err := e.maySpare(ctx, key, ledger, group); !spare || err != nil {
			return new(protocol.FullGroup(name, *group.Max)), err
		}
	case !group.Full():
		if cooling, err := e.CoolingDown(ctx, key); cooling != nil || err != nil {
			return cooling, err
		}
	}
	var noMachines *eligibility.Refusal
	if r.Adopt == "" {
		if e.NoMachines != nil {
			if noMachines, err = e.NoMachines(ctx, md); err != nil {
				return nil, err
			}
		}
		if noMachines == nil && !group.Full() {
			return nil, nil
		}
	}
	// Whether there is a spare, or the Machine to adopt can be had, takes the whole view of the group: what would be decided if
	// the claim were there already?
	s, err := e.read(ctx, cached, key)
	if err == nil && s == nil {
		s, err = e.read(ctx, live, key)
	}
	if err != nil {
		return nil, err
	}
	if s == nil {
		return gone, nil
	}
	asked := e.newClaim(r, cluster, name)
	asked.CreationTimestamp = metav1.NewTime(s.Now) // behind those that wait already
	s.Claims = append(s.Claims, asked)
	d := e.decide(s)
	if refusal, refused := d.Refused[r.ID]; refused {
		return &refusal, nil
	}
	if noMachines != nil && (d.Ledger == nil || d.Ledger.Pending[r.ID].UID == "") {
		return noMachines, nil // a spare replica does not help without its Machine
	}
	return nil, nil
}

// newer is the refusal of a node group whose ledger this agent does not know.
func newer(nodeGroup string, why error) *eligibility.Refusal {
	return &eligibility.Refusal{
		NodeGroup: nodeGroup, Reason: eligibility.Invalid, Message: why.Error() + "; use an agent of at least the version that wrote it",
	}
}

// CoolingDown says why the group takes no claims because one failed there recently, as far as the caches tell; nil when it
// does not cool down.
func (e *Engine) CoolingDown(ctx context.Context, key types.NamespacedName) (*eligibility.Refusal, error) {
	if e.Failure.CoolDown == 0 {
		return nil, nil
	}
	var list v1alpha1.MachineClaimList
	// They are read only, and there may be many: all that failed while ended claims are remembered.
	err := e.Client.List(ctx, &list, client.InNamespace(key.Namespace), selecting(e.Indexes.Failed, v1alpha1.NodeGroupLabel, key.Name),
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing failed claims: %w", err)
	}
	claims := make([]*v1alpha1.MachineClaim, 0, len(list.Items))
	for i := range list.Items {
		claims = append(claims, &list.Items[i])
	}
	return protocol.CoolDownOf(key.Name, claims, e.Clock.Now(), e.Failure.CoolDown), nil
}

// follow answers a repeated call: with the claim that there is, once it is entered in the ledger.
func (e *Engine) follow(ctx context.Context, c *v1alpha1.MachineClaim, may Holders) (*v1alpha1.MachineClaim, error) {
	if err := may.check(c); err != nil {
		return nil, err
	}
	if err := ended(c); err != nil {
		return nil, err
	}
	switch c.CurrentPhase() {
	case v1alpha1.PhaseEnded, v1alpha1.PhaseReleasing, v1alpha1.PhaseBound:
		return c, nil
	case v1alpha1.PhasePending:
		if c.Status.Phase == v1alpha1.PhasePending {
			return c, nil
		}
	}
	if err := e.known(ctx, c); err != nil {
		return nil, err
	}
	return e.enter(ctx, c)
}

// ended is the [EndedError] of a claim that has ended, or is being released or returned, else nil.
func ended(c *v1alpha1.MachineClaim) error {
	if phase := c.CurrentPhase(); phase != v1alpha1.PhaseEnded && phase != v1alpha1.PhaseReleasing && !c.Status.Returned {
		return nil
	}
	return &EndedError{Reason: cmp.Or(c.Status.Reason, protocol.ReasonNeverMade), Message: cmp.Or(c.Status.Message, neverMade)}
}

// enter waits until the claim is in its group's ledger, and moves it on from groups that have no room.
func (e *Engine) enter(ctx context.Context, c *v1alpha1.MachineClaim) (*v1alpha1.MachineClaim, error) {
	var refusals []eligibility.Refusal
	turn := turnOf(ctx)
	for {
		turn.LeaveHub()
		refusal, err := e.group(c.Namespace, c.Spec.NodeGroup).enter(ctx, c.Spec.ClaimID)
		if errors.Is(err, protocol.ErrNewerLedger) && c.Status.Phase == "" {
			// The agent that knows that ledger may enter it still; moving it on is decided by compare-and-swap.
			refusal, err = newer(c.Spec.NodeGroup, err), nil
		}
		if errors.Is(err, ErrWriteRefused) && c.Status.Phase == "" {
			refusal, err = &eligibility.Refusal{NodeGroup: c.Spec.NodeGroup, Reason: eligibility.Invalid, Message: err.Error()}, nil
		}
		if err != nil {
			return nil, err
		}
		if refusal == nil {
			return c, nil
		}
		refusals = append(refusals, *refusal)
		if err := turn.AskHub(ctx); err != nil {
			return nil, fmt.Errorf("waiting to move the claim on: %w", err)
		}

		if entered, err := e.entered(ctx, c); entered || err != nil {
			return c, err
		}
		next, err := e.nextCandidate(ctx, c)
		if err != nil {
			return nil, err
		}
		refusals = append(refusals, next.refusals...)
		if next.none() {
			return nil, e.endUnplaced(ctx, c, refusals)
		}
		if c, err = e.moveTo(ctx, c, next); err != nil {
			return nil, conflictOr(err, "moving the claim to its next candidate")
		}
	}
}

// entered reports whether the present ledger of the claim's node group has the claim: another agent may have entered it since this one
// refused it, and not have noted that on the claim itself yet.
func (e *Engine) entered(ctx context.Context, c *v1alpha1.MachineClaim) (bool, error) {
	var md clusterv1.MachineDeployment
	key := types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.NodeGroup}
	if err := e.Reader.Get(ctx, key, &md); apierrors.IsNotFound(err) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("reading MachineDeployment %s: %w", key, err)
	}
	l, err := protocol.LedgerOf(&md)
	if err != nil || l == nil {
		return false, nil //nolint:nilerr // a ledger that cannot be read has no claim for this agent
	}
	_, entered := l.Pending[c.Spec.ClaimID]
	return entered, nil
}

// nextCandidate chooses among the candidates after the one that the claim is at.
func (e *Engine) nextCandidate(ctx context.Context, c *v1alpha1.MachineClaim) (choice, error) {
	at := slices.Index(c.Spec.Candidates, c.Spec.NodeGroup)
	cluster, err := e.cluster(ctx, c.Namespace, c.Spec.ClusterName)
	if err != nil || at < 0 || cluster == nil {
		return choice{}, err
	}
	r := Request{Namespace: c.Namespace, Cluster: c.Spec.ClusterName, ID: c.Spec.ClaimID, Holder: c.Spec.Holder, Adopt: c.Spec.Adopt}
	return e.choose(ctx, r, cluster, c.Spec.Candidates[at+1:])
}

// endUnplaced ends a claim that no candidate took, and says why.
func (e *Engine) endUnplaced(ctx context.Context, c *v1alpha1.MachineClaim, refusals []eligibility.Refusal) error {
	cause := refusedAll(refusals)
	if c.Spec.Adopt != "" {
		if err := e.retract(ctx, c); err != nil {
			return conflictOr(err, "retracting a claim whose Machine cannot be adopted")
		}
		return cause
	}
	reason := protocol.ReasonRefused
	if noRoom := (*NoRoomError)(nil); errors.As(cause, &noRoom) {
		reason = protocol.ReasonNoRoom
	}
	if err := e.endClaim(ctx, c, v1alpha1.Event{Reason: reason, Message: cause.Error()}); err != nil {
		return conflictOr(err, "ending a claim that no candidate took")
	}
	return cause
}

// retract removes a claim that no ledger has had and that is to adopt a Machine: its id belongs to what runs on that Machine, and must be good for
// another try once what is in the way has been removed.
func (e *Engine) retract(ctx context.Context, c *v1alpha1.MachineClaim) error {
	return client.IgnoreNotFound(e.Client.Delete(ctx, c, preconditions(c.UID, c.ResourceVersion)))
}

// Release asks for the claim's end and returns it. Of a claim that is unknown it makes a tombstone, so that a call to make the
// claim that comes late is refused. Errors: [ErrForeignHolder], [*TooManyError], [ErrConflict], [ErrClusterPaused], of an unknown claim
// [ErrUnknownCluster], or the API server's.
func (e *Engine) Release(ctx context.Context, key Key, o ReleaseOptions) (*v1alpha1.MachineClaim, error) {
	reason := v1alpha1.Event{Reason: protocol.ReasonReleaseRequested, Message: o.Reason}
	if reason.Message == "" {
		reason.Message = "the holder released it"
	}
	return e.release(ctx, key, o, reason)
}

func (e *Engine) release(ctx context.Context, key Key, o ReleaseOptions, why v1alpha1.Event) (*v1alpha1.MachineClaim, error) {
	for attempt := 0; ; attempt++ {
		var c *v1alpha1.MachineClaim
		var err error
		if attempt == 0 && o.unless == nil { // which may depend on more than the claim
			c, err = e.asCached(ctx, key)
		}
		if c == nil && err == nil {
			c, err = e.find(ctx, key)
		}
		if errors.Is(err, ErrNotFound) {
			c, err := e.bury(ctx, key, why.Message)
			if errors.Is(err, ErrConflict) && attempt < 5 {
				continue // it was made just now
			}
			return c, err
		}
		if err != nil {
			return nil, err
		}
		if c.CurrentPhase() == v1alpha1.PhaseEnded {
			return c, nil
		}
		if err := o.Holders.check(c); err != nil {
			return nil, err
		}
		if o.unless != nil && o.unless(c) {
			return c, nil
		}
		if c.Status.Returned {
			e.group(c.Namespace, c.Spec.NodeGroup).kick()
			return c, nil // its Machine is the user's, or about to be
		}
		if c.Status.Phase == v1alpha1.PhaseReleasing && (c.Status.Drained || !o.Drained) {
			e.group(c.Namespace, c.Spec.NodeGroup).kick()
			return c, nil
		}
		first := c.Status.Phase != v1alpha1.PhaseReleasing
		c.Status.Phase = v1alpha1.PhaseReleasing
		c.Status.Drained = o.Drained
		if first {
			now := metav1.NewTime(e.Clock.Now())
			c.Status.ReleasedAt = &now
			if o.Failed {
				c.Status.FailedAt = &now
			}
			e.note(c, why)
		}
		switch err := e.writeRequest(ctx, c); {
		case err == nil:
			return c, nil
		case lostRace(err) && attempt < 5:
			continue
		default:
			return nil, conflictOr(err, "releasing the claim")
		}
	}
}

// writeRequest writes what a caller asks of its claim, and has the claim's node group looked at. Errors: [ErrClusterPaused], as a move that is
// under way would lose what the status alone has until the ledger has it, or the API server's.
func (e *Engine) writeRequest(ctx context.Context, c *v1alpha1.MachineClaim) error {
	switch paused, err := e.paused(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.ClusterName}); {
	case err != nil:
		return err
	case paused:
		return ErrClusterPaused
	}
	if err := e.writeStatus(ctx, c); err != nil {
		return err
	}
	e.group(c.Namespace, c.Spec.NodeGroup).kick()
	return nil
}

// lostRace reports whether a claim has changed, or its object is another one, since it was read.
func lostRace(err error) bool { return apierrors.IsConflict(err) || apierrors.IsNotFound(err) }

// Return asks for the claim's end and leaves its Machine to the user. It returns the claim, also one that has ended. Errors: [ErrNotFound],
// [ErrForeignHolder], [*NotReturnableError], [ErrConflict], [ErrUnknownCluster], [ErrClusterPaused], [ErrRestoring], or the API server's.
func (e *Engine) Return(ctx context.Context, key Key, may Holders, why string) (*v1alpha1.MachineClaim, error) {
	for attempt := 0; ; attempt++ {
		c, err := e.Get(ctx, key)
		if err != nil {
			return nil, err
		}
		if c.CurrentPhase() == v1alpha1.PhaseEnded {
			return c, nil
		}
		if err := may.check(c); err != nil {
			return nil, err
		}
		switch {
		case c.Status.Returned:
			e.group(c.Namespace, c.Spec.NodeGroup).kick()
			return c, nil
		case c.CurrentPhase() == v1alpha1.PhaseReleasing:
			return nil, &NotReturnableError{Message: "the claim is being released, and its Machine is removed; that cannot be taken back"}
		case c.CurrentPhase() == v1alpha1.PhasePending:
			return nil, &NotReturnableError{Message: "the claim has no Machine yet; release it instead"}
		}
		if dying, err := e.machineDies(ctx, c); err != nil {
			return nil, err
		} else if dying {
			return nil, &NotReturnableError{Message: "its Machine is being deleted by another actor"}
		}
		c.Status.Returned = true
		e.note(c, v1alpha1.Event{
			Reason: protocol.ReasonReturnRequested, Message: cmp.Or(why, "the holder returns its Machine to the user"),
		})
		switch err := e.writeRequest(ctx, c); {
		case err == nil:
			return c, nil
		case lostRace(err) && attempt < 5:
			continue
		default:
			return nil, conflictOr(err, "returning the claim's Machine")
		}
	}
}

// machineDies reports whether the caches show that the claim's Machine is being deleted, or is gone.
func (e *Engine) machineDies(ctx context.Context, c *v1alpha1.MachineClaim) (bool, error) {
	if c.Status.Machine == nil {
		return false, nil
	}
	var m clusterv1.Machine
	found, err := e.get(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Status.Machine.Name}, &m)
	return err == nil && (!found || m.UID != c.Status.Machine.UID || !protocol.Alive(&m)), err
}

// Get returns the claim as the API server has it, or [ErrNotFound]. One whose object was lost is made again, if a Machine carries
// its label. Other errors: [ErrUnknownCluster], [ErrClusterPaused], [ErrRestoring], or the API server's.
func (e *Engine) Get(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	c, err := e.find(ctx, key)
	if err != nil {
		return nil, err
	}
	return c, e.known(ctx, c)
}

// asCached returns a claim for the first attempt of a write on it, which is refused if it is not the present one any more; nil when the
// caches do not show it, or show that there is nothing to write.
func (e *Engine) asCached(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	var c v1alpha1.MachineClaim
	err := e.Client.Get(ctx, key.object(), &c)
	if phase := c.CurrentPhase(); err == nil && (phase == v1alpha1.PhasePending || phase == v1alpha1.PhaseBound) {
		return &c, nil
	}
	return nil, client.IgnoreNotFound(err)
}

// find is [Engine.Get] for callers that do not mind what the claim has.
func (e *Engine) find(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	c, err := e.stored(ctx, key)
	if !errors.Is(err, ErrNotFound) {
		return c, err
	}
	// Before, as it may not have been there yet, and after, as it may be gone already.
	cluster := types.NamespacedName{Namespace: key.Namespace, Name: key.Cluster}
	if _, err := e.Whole(ctx, cluster); err != nil {
		return nil, err
	}
	if c, err := e.stored(ctx, key); !errors.Is(err, ErrNotFound) {
		return c, err
	}
	if _, err := e.Whole(ctx, cluster); err != nil {
		return nil, err
	}
	return e.remember(ctx, key)
}

// known returns [ErrRestoring] when the claim was moved or restored without its status.
func (e *Engine) known(ctx context.Context, c *v1alpha1.MachineClaim) error {
	if c.CurrentPhase() != v1alpha1.PhasePending || c.Status.Phase != "" {
		return nil
	}
	cluster, err := e.cluster(ctx, c.Namespace, c.Spec.ClusterName)
	if err == nil && cluster != nil && protocol.Carried(c, cluster.UID) {
		err = ErrRestoring
	}
	return err
}

// Whole returns the Cluster if it exists and is not paused. A caller that concludes from a missing object calls it before the read, as a
// move may not have created the object here yet, and after the read, as a move may have deleted it. Errors: [ErrUnknownCluster],
// [ErrClusterPaused], or the API server's.
func (e *Engine) Whole(ctx context.Context, key types.NamespacedName) (*clusterv1.Cluster, error) {
	cluster, err := e.liveCluster(ctx, key)
	switch {
	case err != nil:
		return nil, err
	case cluster == nil:
		return nil, ErrUnknownCluster
	case eligibility.ClusterPaused(cluster):
		return nil, ErrClusterPaused
	}
	return cluster, nil
}

// liveCluster returns the Cluster as the API server has it, nil when there is none.
func (e *Engine) liveCluster(ctx context.Context, key types.NamespacedName) (*clusterv1.Cluster, error) {
	var cluster clusterv1.Cluster
	if err := e.Reader.Get(ctx, key, &cluster); apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // documented
	} else if err != nil {
		return nil, fmt.Errorf("reading Cluster %s: %w", key, err)
	}
	return &cluster, nil
}

// speaker is a holder of claims of one Cluster.
type speaker struct {
	cluster types.NamespacedName
	holder  string
}

// decided reports whether each of the claims was in its holder's last live set that this process took, or was judged by it for not being there.
// No time tells that: the API server dates the objects that are made again in a restore, and an agent the live set, each by its own clock.
func (e *Engine) decided(cluster types.NamespacedName, claims []*v1alpha1.MachineClaim) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !slices.ContainsFunc(claims, func(c *v1alpha1.MachineClaim) bool {
		return protocol.Reported(c) && !e.synced[speaker{cluster, c.Spec.Holder}][c.UID]
	})
}

// stored returns the claim as the API server has it, or [ErrNotFound].
func (e *Engine) stored(ctx context.Context, key Key) (*v1alpha1.MachineClaim, error) {
	var c v1alpha1.MachineClaim
	if err := e.Reader.Get(ctx, key.object(), &c); apierrors.IsNotFound(err) {
		return nil, ErrNotFound
	} else if err != nil {
		return nil, fmt.Errorf("reading the claim: %w", err)
	}
	return &c, nil
}

// ListOptions select claims.
type ListOptions struct {
	Namespace, Cluster string
	// Holder selects one holder's claims; empty means all.
	Holder string
	// IncludeEnded also selects ended claims that are still remembered.
	IncludeEnded bool
}

// List returns the claims as the API server has them, oldest first, and, for one holder, a token for [Engine.Sync]. They are all there
// are, and what they have is known, or it is an error: [ErrUnknownCluster], [ErrClusterPaused], [ErrRestoring], or the API server's.
func (e *Engine) List(ctx context.Context, o ListOptions) ([]v1alpha1.MachineClaim, string, error) {
	begun := e.Clock.Now()
	selector := client.MatchingLabels{v1alpha1.ClusterLabel: o.Cluster}
	if o.Holder != "" {
		selector[v1alpha1.HolderLabel] = o.Holder
	}
	options := []client.ListOption{client.InNamespace(o.Namespace), selector}
	if !o.IncludeEnded {
		options = e.liveOnly(options)
	}
	key := types.NamespacedName{Namespace: o.Namespace, Name: o.Cluster}
	if _, err := e.Whole(ctx, key); err != nil {
		return nil, "", err
	}
	owned, err := e.labelledIn(ctx, key) // before the claims: what is labelled by then says in its status what it has
	if err != nil {
		return nil, "", err
	}
	var list v1alpha1.MachineClaimList
	if err := e.Reader.List(ctx, &list, options...); err != nil {
		return nil, "", fmt.Errorf("listing claims: %w", err)
	}
	cluster, err := e.Whole(ctx, key)
	if err != nil {
		return nil, "", err
	}
	if err := e.knowsAll(ctx, cluster, o.Holder, list.Items, owned); err != nil {
		return nil, "", err
	}
	items := slices.DeleteFunc(list.Items, func(c v1alpha1.MachineClaim) bool {
		return c.Spec.ClusterName != o.Cluster || o.Holder != "" && c.Spec.Holder != o.Holder ||
			!o.IncludeEnded && c.CurrentPhase() == v1alpha1.PhaseEnded
	})
	slices.SortFunc(items, func(a, b v1alpha1.MachineClaim) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return cmp.Compare(a.Name, b.Name)
	})
	if o.Holder == "" {
		return items, "", nil
	}
	return items, newToken(o, begun, items).encode(), nil
}

// labelledIn reads from the caches which claims the Cluster's Machines are labelled with. It returns the claims' holders by claim id, without
// Machines that are being deleted or belong to no MachineDeployment.
func (e *Engine) labelledIn(ctx context.Context, cluster types.NamespacedName) (map[string]string, error) {
	var machines clusterv1.MachineList
	err := e.Client.List(ctx, &machines, client.InNamespace(cluster.Namespace),
		selecting(e.Indexes.Cluster, clusterv1.ClusterNameLabel, cluster.Name), client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("listing the Cluster's Machines: %w", err)
	}
	owned := map[string]string{}
	for i := range machines.Items {
		m := &machines.Items[i]
		id := protocol.ClaimOf(m)
		if id != "" && protocol.Alive(m) && m.Spec.ClusterName == cluster.Name && m.Labels[clusterv1.MachineDeploymentNameLabel] != "" {
			owned[id] = m.Annotations[v1alpha1.ClaimHolderAnnotation]
		}
	}
	return owned, nil
}

// knowsAll returns [ErrRestoring] when a claim's Machine would be missing in the list: the claim lost its status, or its object, which the
// node group's next step makes again. owned are the holders of claims that have Machines; mine is whose claims are listed, "" for all.
func (e *Engine) knowsAll(
	ctx context.Context, cluster *clusterv1.Cluster, mine string, listed []v1alpha1.MachineClaim, owned map[string]string,
) error {
	restoring := func(id, group string) error {
		return fmt.Errorf("%w: claim %s of node group %s", ErrRestoring, id, group)
	}
	for i := range listed {
		c := &listed[i]
		id := c.Spec.ClaimID
		_, owns := owned[id]
		if protocol.Carried(c, cluster.UID) || owns && c.Status.Phase == "" {
			return restoring(id, c.Spec.NodeGroup)
		}
		delete(owned, id)
	}
	for id, holder := range owned {
		if mine != "" && holder != "" && holder != mine {
			continue
		}
		_, err := e.claimNamed(ctx, Key{Namespace: cluster.Namespace, Cluster: cluster.Name, ID: id})
		if errors.Is(err, ErrNotFound) {
			return restoring(id, "that its Machine belongs to")
		} else if err != nil {
			return err
		}
	}
	return nil
}

// liveOnly adds to the options of a list from the API server that ended claims are left out.
func (e *Engine) liveOnly(options []client.ListOption) []client.ListOption {
	if e.Live != nil {
		options = append(options, e.Live)
	}
	return options
}

// unregistered is what one Cluster's holder last reported: the provider IDs of Nodes that nothing runs on yet.
type unregistered struct {
	ids map[string]bool
	at  time.Time
}

// unregisteredLife is how long a report of unregistered Nodes is believed without being renewed.
const unregisteredLife = 2 * time.Minute

// learn remembers which Nodes of the Cluster nothing runs on yet, in place of what was reported before.
func (e *Engine) learn(cluster types.NamespacedName, reports []NodeReport) {
	ids := map[string]bool{}
	for _, r := range reports {
		if r.Unregistered {
			ids[r.ProviderID] = true
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unregistered[cluster] = unregistered{ids: ids, at: e.Clock.Now()}
}

// unregisteredIn tells which provider IDs of the Cluster's Nodes were reported as unregistered.
func (e *Engine) unregisteredIn(namespace, cluster string) func(providerID string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	report := e.unregistered[types.NamespacedName{Namespace: namespace, Name: cluster}]
	if e.Clock.Since(report.at) > unregisteredLife {
		delete(e.unregistered, types.NamespacedName{Namespace: namespace, Name: cluster})
		return func(string) bool { return false }
	}
	return func(providerID string) bool { return report.ids[providerID] } // never written after it was made
}

// cluster returns the Cluster, or nil when there is none. That is concluded only from the API server's own word (rule R3).
func (e *Engine) cluster(ctx context.Context, namespace, name string) (*clusterv1.Cluster, error) {
	var cluster clusterv1.Cluster
	found, err := e.get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &cluster)
	if err != nil || !found {
		return nil, err
	}
	return &cluster, nil
}

// paused reports whether the Cluster is paused; one that does not exist is not.
func (e *Engine) paused(ctx context.Context, key types.NamespacedName) (bool, error) {
	cluster, err := e.cluster(ctx, key.Namespace, key.Name)
	return cluster != nil && eligibility.ClusterPaused(cluster), err
}

// get reads an object from the cache, and from the API server when the cache does not have it.
func (e *Engine) get(ctx context.Context, key types.NamespacedName, object client.Object) (bool, error) {
	err := e.Client.Get(ctx, key, object)
	if apierrors.IsNotFound(err) {
		err = e.Reader.Get(ctx, key, object)
	}
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading %T %s: %w", object, key, err)
	}
	return true, nil
}

func (e *Engine) event(object runtime.Object, reason, action, message string) {
	switch {
	case e.Recorder == nil:
	case protocol.IsTrouble(reason):
		e.warn(object, reason, action, message)
	default:
		e.Recorder.Eventf(object, nil, corev1.EventTypeNormal, reason, action, "%s", message)
	}
}

// warn makes an event of something that a person has to look at.
func (e *Engine) warn(object runtime.Object, reason, action, message string) {
	if e.Recorder != nil {
		e.Recorder.Eventf(object, nil, corev1.EventTypeWarning, reason, action, "%s", message)
	}
}

// conflictOr turns a lost race into [ErrConflict] and wraps any other error.
func conflictOr(err error, doing string) error {
	if lostRace(err) {
		return fmt.Errorf("%s: %w", doing, ErrConflict)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
