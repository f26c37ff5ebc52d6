package claims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// Request asks for one Machine.
type Request struct {
	// Namespace and Cluster name the Cluster object. ID is the caller's id for the claim.
	Namespace, Cluster, ID string
	// Holder keeps the claim alive and may collect it.
	Holder string
	// Spoke is the cluster that the claim is made from; empty when unknown.
	Spoke string
	// MaxNodeProvisionTime is how long the claim waits for its Machine's provider ID and Node; zero
	// means as long as the options allow.
	MaxNodeProvisionTime time.Duration
	// DisplayName is the caller's name for the claim; may be empty.
	DisplayName string
	// Candidates are names of MachineDeployments in Namespace, best first.
	Candidates []string
	// Adopt is the name of an existing Machine of the only candidate that the claim takes over;
	// empty for a new Machine.
	Adopt string
	// AdoptAboveMinSize refuses an adoption that would have to raise replicas for the user to keep
	// the min size.
	AdoptAboveMinSize bool
	// HolderRepairs means that the holder replaces the Node while it is unhealthy.
	HolderRepairs bool
	// ValidateOnly checks against the caches and writes nothing.
	ValidateOnly bool
	// Holders are the holders that the caller may act as. The id of another holder's claim is
	// refused.
	Holders Holders
	// RequestID and TraceID are recorded on a new claim, for users; empty for none.
	RequestID, TraceID string
}

// Create makes the claim durable and returns it. A repeated call with the same id returns the
// existing claim. Errors: [*EndedError], [*NoRoomError], [*RefusedError], [*UnknownGroupError],
// [*UnseenError], [*TooManyError], [*ForeignSpokeError], [ErrForeignHolder], [ErrUnknownCluster],
// [ErrConflict], [ErrWriteRefused], [ErrRestoring], [ErrClusterPaused]. After any other error, such
// as the API server's or the context's, the claim may or may not exist, and the call can be
// repeated.
func (e *Engine) Create(ctx context.Context, r Request) (*v1alpha1.MachineClaim, error) {
	begun := e.Clock.Now()
	cluster, err := e.cluster(ctx, r.Namespace, r.Cluster)
	if err != nil {
		return nil, err
	}
	if cluster == nil {
		return nil, ErrUnknownCluster
	}
	c, err := e.create(ctx, r, cluster)
	if !r.ValidateOnly {
		observeCreate(e.Clock, begun, client.ObjectKeyFromObject(cluster), c, err)
	}
	return c, err
}

func (e *Engine) create(ctx context.Context, r Request, cluster *clusterv1.Cluster) (*v1alpha1.MachineClaim, error) {
	key := Key{Namespace: r.Namespace, Cluster: r.Cluster, ID: r.ID}
	open, err := e.choose(ctx, r, cluster, r.Candidates)
	if err != nil {
		return nil, err
	}
	if open.none() || r.ValidateOnly {
		existing, err := e.getUncached(ctx, key)
		switch {
		case err == nil && r.ValidateOnly:
			if err := r.Holders.check(existing); err != nil {
				return nil, err
			}
			return existing, ended(existing)
		case err == nil:
			return e.resume(ctx, existing, r.Holders)
		case !errors.Is(err, ErrNotFound):
			return nil, err
		case open.none() && r.ValidateOnly:
			return nil, open.refused()
		}
	}

	r.Candidates = open.candidates
	c := e.newClaim(r, cluster, open.first())
	if r.ValidateOnly {
		return c, e.mayMake(ctx, r, c)
	}
	switch lost, err := e.restoreFromLabel(ctx, key); {
	case err == nil:
		return e.resume(ctx, lost, r.Holders)
	case !errors.Is(err, ErrNotFound):
		return nil, err
	case open.none():
		return nil, open.refused()
	}
	refused := e.mayMake(ctx, r, c)
	entered := false
	if refused == nil {
		entered, err = e.make(ctx, c, open.deployment)
		refused = overQuota(client.ObjectKeyFromObject(cluster), err)
	}
	if refused == nil && refusedForGood(err) {
		e.warn(cluster, protocol.ReasonWriteRefused, "CreateClaim", "no MachineClaim can be made: "+err.Error())
		return nil, fmt.Errorf("making the claim: %w: %w", ErrWriteRefused, err)
	}
	switch {
	case refused != nil || apierrors.IsAlreadyExists(err):
		existing, err := e.getUncached(ctx, key)
		switch gone := errors.Is(err, ErrNotFound); {
		case gone && refused != nil:
			return nil, refused
		case gone:
			return nil, fmt.Errorf("reading the claim that was there already: %w", ErrConflict) // it was deleted in between
		}
		if err != nil {
			return nil, err
		}
		return e.resume(ctx, existing, r.Holders)
	case err != nil:
		return nil, fmt.Errorf("creating MachineClaim %s: %w", c.Name, err)
	}
	if entered {
		return c, nil
	}
	return e.enterOrMoveOn(ctx, c)
}

// make creates the claim's object, and enters the claim at once where possible. It reports whether
// it entered it.
func (e *Engine) make(ctx context.Context, c *v1alpha1.MachineClaim, md *clusterv1.MachineDeployment) (entered bool, err error) {
	g := e.group(c.Namespace, c.Spec.NodeGroup)
	made := g.beginMaking()
	defer made()
	done := g.begin() // before the creation's event makes a run enter it
	err = e.Client.Create(ctx, c)
	alone := made()
	if err != nil {
		done()
		if !apierrors.IsAlreadyExists(err) { // else the caches are about to show it
			e.unreserve(c, false)
		}
		return false, err
	}
	if !alone { // others of several concurrent claims gather, and a run enters them in one write
		done()
		return false, nil
	}
	return g.enterAtOnce(ctx, md, c, done), nil
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
			Annotations:     r.annotations(),
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
			HolderRepairs:               r.HolderRepairs,
			MaxNodeProvisionTimeSeconds: maxNodeProvisionTime,
		},
	}
}

// annotations returns the annotations of the claim that is made.
func (r Request) annotations() map[string]string {
	return lo.OmitByValues(map[string]string{v1alpha1.RequestIDAnnotation: r.RequestID, v1alpha1.TraceIDAnnotation: r.TraceID}, []string{""})
}

func ownedBy(cluster *clusterv1.Cluster) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: clusterv1.GroupVersion.String(), Kind: "Cluster", Name: cluster.Name, UID: cluster.UID}}
}

// refusal returns why a group would not take the claim now, according to the caches; nil when it
// would.
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
	if reserved := group.For(name, r.Holder); reserved != nil {
		return reserved, nil
	}
	switch refusal := group.Refusal(); {
	case refusal != nil:
		return refusal, nil
	case r.Adopt != "": // the Machine exists already
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
	// Whether there is a spare, or whether the Machine can be adopted, depends on the whole group:
	// decide as if the claim existed already.
	s, err := e.read(ctx, cached, key)
	if err == nil && s == nil {
		s, err = e.read(ctx, uncached, key)
	}
	if err != nil {
		return nil, err
	}
	if s == nil {
		return gone, nil
	}
	asked := e.newClaim(r, cluster, name)
	asked.CreationTimestamp = metav1.NewTime(s.Now) // after those that wait already
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

// newer returns the refusal of a node group whose ledger this agent does not know.
func newer(nodeGroup string, why error) *eligibility.Refusal {
	return &eligibility.Refusal{
		NodeGroup: nodeGroup, Reason: eligibility.Invalid, Message: why.Error() + "; use an agent of at least the version that wrote it",
	}
}

// CoolingDown returns why the group takes no claims because one failed there recently, according to
// the caches; nil when it does not cool down.
func (e *Engine) CoolingDown(ctx context.Context, key types.NamespacedName) (*eligibility.Refusal, error) {
	if e.Failure.CoolDown == 0 {
		return nil, nil
	}
	var list v1alpha1.MachineClaimList
	// They are only read, and there may be many: all failures while ended claims are kept.
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

// resume answers a repeated call with the existing claim, once it is entered in the ledger.
func (e *Engine) resume(ctx context.Context, c *v1alpha1.MachineClaim, may Holders) (*v1alpha1.MachineClaim, error) {
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
	return e.enterOrMoveOn(ctx, c)
}

// ended returns an [*EndedError] for a claim that has ended or is being released or returned, else
// nil.
func ended(c *v1alpha1.MachineClaim) error {
	if phase := c.CurrentPhase(); phase != v1alpha1.PhaseEnded && phase != v1alpha1.PhaseReleasing && !c.Status.Returned {
		return nil
	}
	return &EndedError{Reason: cmp.Or(c.Status.Reason, protocol.ReasonNeverMade), Message: cmp.Or(c.Status.Message, neverMade)}
}

// ledgerRefused is the text for callers. The API server's own text is shown to users of the hub
// only, because it may contain what a spoke must not know.
const ledgerRefused = "the hub refuses the agent's writes on this node group; a Warning event " + protocol.ReasonWriteRefused +
	" on its MachineDeployment has the reason"

// enterOrMoveOn waits until the claim is in its group's ledger, and moves it on from groups that
// have no room.
func (e *Engine) enterOrMoveOn(ctx context.Context, c *v1alpha1.MachineClaim) (*v1alpha1.MachineClaim, error) {
	var refusals []eligibility.Refusal
	turn := turnOf(ctx)
	for {
		turn.LeaveHub()
		refusal, err := e.group(c.Namespace, c.Spec.NodeGroup).awaitEntry(ctx, c.Spec.ClaimID)
		if errors.Is(err, protocol.ErrNewerLedger) && c.Status.Phase == "" {
			// An agent that knows that ledger may still enter the claim. Moving it on is decided by
			// compare-and-swap.
			refusal, err = newer(c.Spec.NodeGroup, err), nil
		}
		if errors.Is(err, ErrWriteRefused) && c.Status.Phase == "" {
			log.FromContext(ctx).Info("a candidate is passed over: the hub refuses the write of its ledger",
				"nodeGroup", c.Spec.NodeGroup, "claim", c.Spec.ClaimID, "cause", err.Error())
			refusal, err = &eligibility.Refusal{NodeGroup: c.Spec.NodeGroup, Reason: eligibility.Invalid, Message: ledgerRefused}, nil
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

// entered reports whether the present ledger of the claim's node group has the claim. Another agent
// may have entered it since this one refused it, and may not have recorded that on the claim yet.
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

// nextCandidate chooses among the candidates after the claim's present one.
func (e *Engine) nextCandidate(ctx context.Context, c *v1alpha1.MachineClaim) (choice, error) {
	at := slices.Index(c.Spec.Candidates, c.Spec.NodeGroup)
	cluster, err := e.cluster(ctx, c.Namespace, c.Spec.ClusterName)
	if err != nil || at < 0 || cluster == nil {
		return choice{}, err
	}
	r := Request{Namespace: c.Namespace, Cluster: c.Spec.ClusterName, ID: c.Spec.ClaimID, Holder: c.Spec.Holder, Adopt: c.Spec.Adopt}
	return e.choose(ctx, r, cluster, c.Spec.Candidates[at+1:])
}

// endUnplaced ends a claim that no candidate took, and returns the reason as an error.
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

// retract deletes a claim that no ledger has had and that was to adopt a Machine. Its id belongs to
// what runs on that Machine, and must be usable again once the obstacle has been removed.
func (e *Engine) retract(ctx context.Context, c *v1alpha1.MachineClaim) error {
	return client.IgnoreNotFound(e.Client.Delete(ctx, c, preconditions(c.UID, c.ResourceVersion)))
}
