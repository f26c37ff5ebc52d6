// Package cloudprovider implements Karpenter core's CloudProvider on top of an agent that provides
// the machines.
//
// It only translates: package catalogue holds the node groups, package instancetype converts them
// for core, and the agent owns the machines. Every call to the agent has a timeout, and a missing
// answer never leads to a conclusion.
package cloudprovider

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	"go.opentelemetry.io/otel/trace"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/staticpool"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

// Name is the provider's name in core's metrics.
const Name = "clusterapi"

// Claims mirrors the shim's claims, including ended ones for as long as the agent retains them.
type Claims interface {
	Get(claimID string) (*agentv1alpha1.Claim, bool)
	WithProviderID(id string) []*agentv1alpha1.Claim
	State() agentclient.State
}

// Overlays applies NodeOverlays to instance types. Core's InstanceTypeStore implements it.
type Overlays interface {
	ApplyAll(nodePool string, instanceTypes []*cloudprovider.InstanceType) ([]*cloudprovider.InstanceType, error)
}

// Config configures a CloudProvider. Every field but Overlays and TracerProvider is REQUIRED.
type Config struct {
	// Cluster identifies this workload cluster's Cluster in the hub.
	Cluster *agentv1alpha1.ClusterRef
	// Kube reads the workload cluster, from a cache.
	Kube client.Reader
	// Client calls the agent.
	Client *agentclient.Client
	// Claims mirrors the shim's claims.
	Claims Claims
	// Catalogue holds the node groups and instance types that can be scheduled on.
	Catalogue *catalogue.Catalogue
	// Overlays is the store that core's overlay decorator uses, so that Create selects by the
	// prices that core planned with. It is used only while the feature gate NodeOverlay is on. Nil
	// means no overlays.
	Overlays Overlays
	// Unclaimed finds the Machines of NodeClaims that never had a claim.
	Unclaimed *unclaimed.Finder
	// Static is notified when no node group has room for a NodeClaim.
	Static *staticpool.Gate
	// Recorder publishes events about NodeClaims.
	Recorder events.Recorder
	// RepairAfter is how long a Node may be unhealthy before core replaces it, with the feature
	// gate NodeRepair on.
	RepairAfter time.Duration
	// Repairs means that core replaces unhealthy Nodes, and that MachineHealthChecks must not
	// remediate their machines as well.
	Repairs bool
	// Timeout bounds one method's calls to the agent. A method that adopts a Machine gets
	// adoptionTimeouts times as long.
	Timeout time.Duration
	// Settled reports whether every NodeClaim that existed when this process became active has been
	// checked for adoption. Until then nothing is planned or disrupted.
	Settled func() bool
	// Refused returns why the agent accepts no live set of this cluster, nil if it does or is not
	// known to refuse. Until it accepts one, no claim is created: the machine would join the
	// cluster whose identity the shim has.
	Refused func() error
	// TracerProvider traces Create and Delete. Nil disables tracing.
	TracerProvider trace.TracerProvider
	// Clock measures how long node groups have been gone and Machines have been deleting.
	Clock clock.PassiveClock
}

// CloudProvider implements core's interface. It is safe for concurrent use.
type CloudProvider struct {
	Config

	listing *listing
	began   *atomic.Pointer[time.Time] // time of the first Create for a NodeClaim that is to adopt a Machine
}

var _ cloudprovider.CloudProvider = (*CloudProvider)(nil)

// New returns a CloudProvider.
func New(config Config) *CloudProvider {
	return &CloudProvider{Config: config, listing: &listing{}, began: &atomic.Pointer[time.Time]{}}
}

// Name returns the provider's name.
func (c *CloudProvider) Name() string { return Name }

// GetSupportedNodeClasses returns a new object on every call, because core reads NodeClasses into
// it.
func (c *CloudProvider) GetSupportedNodeClasses() []status.Object {
	return []status.Object{&v1alpha1.ClusterAPINodeClass{}}
}

// GetInstanceTypes returns the instance types in the newest snapshot of the catalogue, and none for
// a NodePool of another provider. For a NodeClass that selects nothing, it returns the instance
// types that NodeClaims remember, without available offerings.
//
// It returns an error before the agent was first reached, while existing NodeClaims are being
// adopted, for a NodeClass that does not exist, and for one that selects nothing and that no
// NodeClaim remembers. An empty result instead would make core treat the NodePool's Nodes as
// drifted because of a typo in a selector.
func (c *CloudProvider) GetInstanceTypes(_ context.Context, nodePool *karpv1.NodePool) ([]*cloudprovider.InstanceType, error) {
	if nodePool == nil || !isOurs(nodePool.Spec.Template.Spec.NodeClassRef) {
		return nil, nil
	}
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		return nil, catalogue.ErrNotSynced
	}
	if !c.Settled() {
		return nil, errNotSettled
	}
	class, ok := snapshot.Class(nodePool.Spec.Template.Spec.NodeClassRef.Name)
	if !ok {
		return nil, fmt.Errorf("ClusterAPINodeClass %q does not exist", nodePool.Spec.Template.Spec.NodeClassRef.Name)
	}
	types := class.For(nodePool)
	if len(types) == 0 && len(class.Groups) == 0 {
		return nil, fmt.Errorf("ClusterAPINodeClass %q selects no node group", class.Name)
	}
	return types, nil
}

// Ready reports whether core gets instance types at all: the agent has been reached, and existing
// NodeClaims have been adopted.
func (c *CloudProvider) Ready() bool { return c.Catalogue.Snapshot() != nil && c.Settled() }

// errNotSettled means that not all existing NodeClaims have been checked for adoption yet.
var errNotSettled = errors.New("the machines of NodeClaims without a claim are being adopted")

func isOurs(ref *karpv1.NodeClassReference) bool {
	return ref != nil && ref.Group == v1alpha1.Group && ref.Kind == "ClusterAPINodeClass"
}

// Delete releases the NodeClaim's claim, which it finds by the NodeClaim's UID, whatever provider
// ID the NodeClaim carries. It returns a NodeClaimNotFoundError once the agent reports that the
// instance is gone or that it knows no such claim. Core calls Delete every five seconds. While the
// mirror of claims is connected and already shows this release, Delete does not call the agent.
//
// If the NodeClaim never had a claim and runs on a Machine of this Cluster, Delete first adopts
// that Machine. If the agent refuses, Delete returns an error and publishes an event until the
// Machine is gone or can be adopted. If the agent does not report the Machine, Delete does the same
// until it does. If the Machine belongs to another NodeClaim, the NodeClaim ends without it. Core
// has drained the Node by then: it does not call the provider earlier.
func (c *CloudProvider) Delete(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	if claim := c.releasing(nodeClaim); claim != nil {
		c.tellStuck(nodeClaim, claim.GetMachine())
		return nil
	}
	ctx, end := c.trace(ctx, "Delete", nodeClaim)
	err := c.release(ctx, nodeClaim)
	end(cloudprovider.IgnoreNodeClaimNotFoundError(err)) // not found means success here
	return err
}

func (c *CloudProvider) release(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	// This must precede the release: a released UID can no longer claim anything.
	looking, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	machine, err := c.Unclaimed.Of(looking, nodeClaim)
	unknown := errors.Is(err, unclaimed.ErrUnknownMachine)
	if err != nil && !unknown {
		return fmt.Errorf("looking for a machine without a claim: %w", err)
	}
	if machine != nil || unknown {
		if wait, err := c.claimLeft(ctx, nodeClaim, machine); err != nil || wait {
			return err
		}
	}
	ctx, cancel = context.WithTimeout(ctx, c.Timeout) // not that of an adoption, which takes longer
	defer cancel()
	switch adopting, err := c.adopting(ctx, nodeClaim); {
	case err != nil:
		return err
	case adopting != nil: // a claim released before it has the Machine leaves the Machine to the user
		c.tellPending(nodeClaim, adopting)
		return nil
	}
	response, err := c.Client.Claims.ReleaseClaim(ctx, &agentv1alpha1.ReleaseClaimRequest{
		Cluster: c.Cluster,
		ClaimId: string(nodeClaim.UID),
		Drained: drained(nodeClaim),
		Reason:  releaseReason(nodeClaim),
	})
	if agenterrors.IsTooMany(err) {
		c.Recorder.Publish(events.Event{
			InvolvedObject: nodeClaim,
			Type:           corev1.EventTypeWarning,
			Reason:         "ReleaseLimited",
			Message:        lo.Substring("The machine stays for now, because the agent refuses further releases in this Cluster: "+err.Error(), 0, 1024),
			DedupeValues:   []string{string(nodeClaim.UID)},
			DedupeTimeout:  10 * time.Minute,
		})
	}
	if err != nil {
		return fmt.Errorf("releasing the claim: %w", err)
	}
	if claim := response.GetClaim(); claim == nil || claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return cloudprovider.NewNodeClaimNotFoundError(fmt.Errorf("claim %s no longer has a machine", nodeClaim.UID))
	}
	return nil
}

// releasing returns the claim if it is already being released and the agent needs no further
// information, and nil otherwise.
func (c *CloudProvider) releasing(nodeClaim *karpv1.NodeClaim) *agentv1alpha1.Claim {
	claim, known := c.Claims.Get(string(nodeClaim.UID))
	if known && c.Claims.State().Connected && claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING &&
		(claim.GetDrained() || !drained(nodeClaim)) {
		return claim
	}
	return nil
}

// stuckAfter is how long a Machine may be deleting, or the claim on it pending, before the
// NodeClaim gets an event about it.
const stuckAfter = 5 * time.Minute

// tellPending publishes an event on a NodeClaim whose claim has long been waiting for the Machine
// that it adopts, with the reason that the agent reports.
func (c *CloudProvider) tellPending(nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) {
	since := claim.GetCreatedAt().AsTime()
	if c.Clock.Since(since) < stuckAfter {
		return
	}
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "AdoptionPending",
		Message: lo.Substring(fmt.Sprintf("Machine %s in the hub stays until this NodeClaim's claim has adopted it. The claim has been waiting "+
			"since %s: %s", claim.GetAdoptMachine(), since.UTC().Format(time.RFC3339),
			lo.CoalesceOrEmpty(claim.GetMessage(), claim.GetReason(), "the agent does not report what it waits for")), 0, 1024),
		DedupeValues:  []string{string(nodeClaim.UID), claim.GetReason()},
		DedupeTimeout: 10 * time.Minute,
	})
}

// tellStuck publishes an event on a NodeClaim whose Machine has been deleting for long, with the
// reason that Cluster API reports. Core calls Delete again every few seconds.
func (c *CloudProvider) tellStuck(nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) {
	since := machine.GetDeletedAt()
	if since == nil || c.Clock.Since(since.AsTime()) < stuckAfter {
		return
	}
	why := strings.Trim(machine.GetDeletingReason()+": "+machine.GetDeletingMessage(), ": ")
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "MachineDeletionStuck",
		Message: lo.Substring(fmt.Sprintf("Machine %s in the hub has been terminating since %s: %s", machine.GetName(),
			since.AsTime().UTC().Format(time.RFC3339), lo.CoalesceOrEmpty(why, "Cluster API does not report what it waits for")), 0, 1024),
		DedupeValues:  []string{string(nodeClaim.UID), machine.GetDeletingReason()},
		DedupeTimeout: 10 * time.Minute,
	})
}

// drained reports whether core has drained the Node, so that Cluster API need not. It is also true
// if the NodeClaim's termination grace period expired before the volumes were detached: the user
// asked for no further waiting.
func drained(nodeClaim *karpv1.NodeClaim) bool {
	conditions := nodeClaim.StatusConditions()
	if !conditions.Get(karpv1.ConditionTypeDrained).IsTrue() {
		return false
	}
	detached := conditions.Get(karpv1.ConditionTypeVolumesDetached)
	return detached.IsTrue() || detached.IsFalse()
}

func releaseReason(nodeClaim *karpv1.NodeClaim) string {
	reason := fmt.Sprintf("NodeClaim %s was deleted", nodeClaim.Name)
	if why := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeDisruptionReason); why.IsTrue() {
		reason += " (" + why.Reason + ")"
	}
	return reason
}

// Get returns the machine with the provider ID, which may be a claim's placeholder. While the
// mirror of claims is connected and shows a live claim with that ID, Get does not call the agent:
// core asks about each draining Node that is not Ready once a second. A NodeClaimNotFoundError,
// upon which core drops the Node without draining it, is always based on an answer of the agent.
func (c *CloudProvider) Get(ctx context.Context, providerID string) (*karpv1.NodeClaim, error) {
	if providerID == "" {
		return nil, errors.New("a Node without a provider ID cannot be looked up")
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	claim, err := c.find(ctx, providerID)
	if err != nil {
		return nil, err
	}
	if claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return nil, cloudprovider.NewNodeClaimNotFoundError(
			fmt.Errorf("the claim on the machine with provider ID %s has ended: %s", providerID, claim.GetReason()),
		)
	}
	return c.nodeClaimOf(claim, providerID), nil
}

// find returns the claim with the provider ID. For a Machine without a claim it returns a made-up
// claim. The claim may have ended if the provider ID is a placeholder. While the agent is away, a
// claim that was live with this provider ID when it was seen last is taken to be so: core then
// drains a Node that it is to remove, and Delete waits for the agent. An error would keep core from
// evicting the pods of a Node that is dead.
func (c *CloudProvider) find(ctx context.Context, providerID string) (*agentv1alpha1.Claim, error) {
	if placeholder.Is(providerID) {
		namespace, name, claimID, ok := placeholder.Parse(providerID)
		if !ok || namespace != c.Cluster.GetNamespace() || name != c.Cluster.GetName() {
			return nil, cloudprovider.NewNodeClaimNotFoundError(fmt.Errorf("%s is a claim of another cluster", providerID))
		}
		if claim, _ := c.Claims.Get(claimID); c.certain(claim) {
			return claim, nil
		}
		claim, err := c.ask(ctx, claimID)
		if isClaimNotFound(err) {
			return nil, cloudprovider.NewNodeClaimNotFoundError(err)
		}
		return claim, err
	}
	if claim, ok := liveClaimWith(c.Claims.WithProviderID(providerID), providerID); ok {
		if c.certain(claim) {
			return claim, nil
		}
		seen := claim
		claim, err := c.ask(ctx, claim.GetClaimId())
		switch {
		case agenterrors.IsUnavailable(err):
			return seen, nil
		case err != nil && !isClaimNotFound(err):
			return nil, err
		case err == nil && claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
			return claim, nil
		}
	}
	// The mirror may lag behind, and the infrastructure may reuse the provider ID of a machine that
	// is gone. So list all claims before reporting that there is no such machine.
	claims, err := c.listing.claims(ctx, c)
	if err != nil {
		return nil, err
	}
	claim, ok := liveClaimWith(claims, providerID)
	if ok {
		return claim, nil
	}
	// This includes the Machine of a claim that was bound to it after the claims were listed.
	machine, err := c.Unclaimed.Any(ctx, providerID)
	switch {
	case err != nil:
		return nil, fmt.Errorf("looking for a machine without a claim: %w", err)
	case machine != nil:
		return asClaimed(machine), nil
	}
	nodeClaims, err := owners.With(ctx, c.Kube, providerID)
	if err != nil {
		return nil, err
	}
	for _, nodeClaim := range nodeClaims {
		if unknown, err := c.isUnknown(ctx, nodeClaim); err != nil || unknown {
			return nil, cmp.Or(err, unclaimed.ErrUnknownMachine)
		}
	}
	return nil, cloudprovider.NewNodeClaimNotFoundError(fmt.Errorf("no machine has the provider ID %s", providerID))
}

// isUnknown reports whether the state of the NodeClaim's machine is unknown: see
// [unclaimed.ErrUnknownMachine].
func (c *CloudProvider) isUnknown(ctx context.Context, nodeClaim *karpv1.NodeClaim) (bool, error) {
	if !mayBeUnknown(nodeClaim) {
		return false, nil
	}
	_, err := c.Unclaimed.Of(ctx, nodeClaim)
	if errors.Is(err, unclaimed.ErrUnknownMachine) {
		return true, nil
	}
	return false, err
}

// mayBeUnknown reports whether the state of the NodeClaim's machine matters. It returns false if
// the user is detaching the NodeClaim from its machine.
func mayBeUnknown(nodeClaim *karpv1.NodeClaim) bool {
	return isOurs(nodeClaim.Spec.NodeClassRef) && !v1alpha1.ReturnsMachine(nodeClaim)
}

// asClaimed presents a Machine without a claim as a Bound claim, since core has no notion of an
// unclaimed machine.
func asClaimed(machine *agentv1alpha1.Machine) *agentv1alpha1.Claim {
	return &agentv1alpha1.Claim{
		Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, NodeGroupId: machine.GetNodeGroupId(), Machine: machine, CreatedAt: machine.GetCreatedAt(),
	}
}

// ask reads a claim from the agent; see [isClaimNotFound] for the errors.
func (c *CloudProvider) ask(ctx context.Context, claimID string) (*agentv1alpha1.Claim, error) {
	response, err := c.Client.Claims.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: c.Cluster, ClaimId: claimID})
	if err != nil {
		return nil, fmt.Errorf("getting the claim: %w", err)
	}
	return response.GetClaim(), nil
}

// certain reports whether the mirrored claim, nil if there is none, shows without a call that the
// claim is live. The mirror may lag by moments, in which a claim that has ended is still drained.
func (c *CloudProvider) certain(claim *agentv1alpha1.Claim) bool {
	switch claim.GetPhase() {
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
		agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING:
		return c.Claims.State().Connected
	case agentv1alpha1.ClaimPhase_CLAIM_PHASE_UNSPECIFIED, agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
	}
	return false
}

func liveClaimWith(claims []*agentv1alpha1.Claim, providerID string) (*agentv1alpha1.Claim, bool) {
	return lo.Find(claims, func(claim *agentv1alpha1.Claim) bool {
		return claim.GetMachine().GetProviderId() == providerID && claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	})
}

// List returns each machine twice once it has a real provider ID: under that ID and under the
// placeholder. Core deletes NodeClaims of healthy Nodes whose provider ID is missing from the list,
// and during the swap a NodeClaim may carry either ID. The list includes Machines without a claim,
// because their NodeClaims may never have had one. It also includes NodeClaims that have a Node but
// whose machine the agent does not report: see [unclaimed.Finder.UnknownAmong]. The result is
// complete, or an error is returned.
func (c *CloudProvider) List(ctx context.Context) ([]*karpv1.NodeClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	response, err := c.Client.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: c.Cluster, Holder: v1alpha1.Holder})
	if err != nil {
		return nil, fmt.Errorf("listing the claims: %w", err)
	}
	nodeClaims := make([]*karpv1.NodeClaim, 0, 2*len(response.GetClaims()))
	listed := sets.New[string]()
	for _, claim := range response.GetClaims() {
		if claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
			continue
		}
		nodeClaims = append(nodeClaims, c.nodeClaimOf(claim, c.placeholderOf(claim.GetClaimId())))
		if id := claim.GetMachine().GetProviderId(); id != "" {
			nodeClaims = append(nodeClaims, c.nodeClaimOf(claim, id))
			listed.Insert(id)
		}
	}
	// Includes claimed Machines: a claim may have been bound after the claims were listed.
	machines, err := c.Unclaimed.All(ctx)
	if err != nil {
		return nil, fmt.Errorf("looking for machines without a claim: %w", err)
	}
	for _, machine := range machines {
		if id := machine.GetProviderId(); !listed.Has(id) {
			nodeClaims = append(nodeClaims, c.nodeClaimOf(asClaimed(machine), id))
			listed.Insert(id)
		}
	}
	unknown, err := c.unknown(ctx, listed)
	return append(nodeClaims, unknown...), err
}

// unknown returns the NodeClaims that have a Node and whose machine is neither listed nor known to
// be gone.
func (c *CloudProvider) unknown(ctx context.Context, listed sets.Set[string]) ([]*karpv1.NodeClaim, error) {
	all := &karpv1.NodeClaimList{}
	if err := c.Kube.List(ctx, all); err != nil {
		return nil, fmt.Errorf("listing the NodeClaims: %w", err)
	}
	unlisted := lo.Filter(lo.ToSlicePtr(all.Items), func(nodeClaim *karpv1.NodeClaim, _ int) bool {
		return !listed.Has(nodeClaim.Status.ProviderID) && mayBeUnknown(nodeClaim)
	})
	among, err := c.Unclaimed.UnknownAmong(ctx, unlisted)
	if err != nil {
		return nil, err
	}
	var unknown []*karpv1.NodeClaim
	for _, nodeClaim := range among {
		node, err := owners.Node(ctx, c.Kube, nodeClaim.Status.ProviderID)
		if err != nil {
			return nil, err
		}
		if node != nil {
			unknown = append(unknown, &karpv1.NodeClaim{
				ObjectMeta: metav1.ObjectMeta{Name: nodeClaim.Name, UID: nodeClaim.UID, CreationTimestamp: nodeClaim.CreationTimestamp},
				Status:     karpv1.NodeClaimStatus{ProviderID: nodeClaim.Status.ProviderID},
			})
		}
	}
	return unknown, nil
}

func (c *CloudProvider) placeholderOf(claimID string) string {
	return placeholder.ProviderID(c.Cluster.GetNamespace(), c.Cluster.GetName(), claimID)
}

// Drift reasons. They become condition reasons, which allow letters, digits, and `_,:`.
const (
	// DriftNodeGroupNotSelected means that the NodeClaim's NodeClass no longer selects its node
	// group.
	DriftNodeGroupNotSelected cloudprovider.DriftReason = "NodeGroupNotSelected"
	// DriftMachineNotUpToDate means that the machine's template has changed and that Cluster API
	// leaves the replacement of the machine to others (OnDelete).
	DriftMachineNotUpToDate cloudprovider.DriftReason = "MachineNotUpToDate"
)

// IsDrifted decides by the NodeClass's drift policy from the local mirrors, which keep their last
// known state while the agent is unreachable. A machine that Cluster API will replace in a rolling
// update is not drifted: core would race Cluster API.
func (c *CloudProvider) IsDrifted(_ context.Context, nodeClaim *karpv1.NodeClaim) (cloudprovider.DriftReason, error) {
	if !isOurs(nodeClaim.Spec.NodeClassRef) {
		return "", nil
	}
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil || !c.Claims.State().Synced {
		return "", catalogue.ErrNotSynced
	}
	claim, known := c.Claims.Get(string(nodeClaim.UID))
	groupID := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
	if known {
		groupID = claim.GetNodeGroupId()
	}
	group, ok := snapshot.Source(groupID)
	var policy v1alpha1.DriftPolicy
	class, exists := snapshot.Class(nodeClaim.Spec.NodeClassRef.Name)
	if exists {
		policy = class.Drift
	}
	// A selector that matches nothing is treated as a mistake, not as a request to replace every
	// Node.
	if exists && policy.NodeGroupNotSelected != v1alpha1.DriftIgnore && len(class.Groups) > 0 && c.deselected(snapshot, class, groupID) {
		return DriftNodeGroupNotSelected, nil
	}
	machine := claim.GetMachine()
	if ok && policy.MachineNotUpToDate != v1alpha1.DriftIgnore && machine != nil && !machine.GetUpToDate() && machine.GetDeletedAt() == nil &&
		group.GetRolloutStrategy() == agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE {
		return DriftMachineNotUpToDate, nil
	}
	return "", nil
}

// goneFor is how long a node group must have been unknown to the agent before its Nodes count as
// not selected. It exceeds the time that a move or a restore of the hub takes, during which
// MachineDeployments are absent.
const goneFor = time.Hour

// deselected reports whether the NodeClass's selector does not match the group, or the group has
// been gone for at least goneFor. No selector matches a MachineDeployment without the opt-in label.
// While the agent is unreachable, no group is gone for good, and the snapshot may lack one that is
// back.
func (c *CloudProvider) deselected(snapshot *catalogue.Snapshot, class *catalogue.Class, groupID string) bool {
	if group, ok := snapshot.Source(groupID); ok {
		return !class.Selects(group)
	}
	since, gone := snapshot.GoneSince(groupID)
	return gone && c.Clock.Since(since) >= goneFor && c.Catalogue.IsGone(groupID)
}

// Reboot is not supported: Cluster API has no such operation.
func (c *CloudProvider) Reboot(context.Context, *karpv1.NodeClaim, string) error {
	return cloudprovider.NewNodeRebootNotImplementedError()
}

// RepairPolicies returns policies for the health that the kubelet reports. Core ignores them unless
// the feature gate NodeRepair is on.
func (c *CloudProvider) RepairPolicies() []cloudprovider.RepairPolicy {
	return []cloudprovider.RepairPolicy{
		{
			ConditionType:      corev1.NodeReady,
			ConditionStatus:    corev1.ConditionFalse,
			TolerationDuration: c.RepairAfter,
			Action:             cloudprovider.ReplaceNode,
		},
		{
			ConditionType:   corev1.NodeReady,
			ConditionStatus: corev1.ConditionUnknown,
			// Core allows one policy without an expression: the one above.
			ReasonRegex:        ".*",
			TolerationDuration: c.RepairAfter,
			// The kubelet does not respond, so no pod there would ever confirm its eviction.
			TerminationGracePeriod: new(time.Duration(0)),
			Action:                 cloudprovider.ReplaceNode,
		},
	}
}
