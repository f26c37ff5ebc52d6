// Package cloudprovider is Karpenter core's CloudProvider for machines that an agent hands out.
//
// It only translates: what exists is in package catalogue, what a node group looks like to core in package instancetype, and
// machines are the agent's. Every call to the agent is bounded, and nothing is concluded from an answer that did not come.
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

// Claims is a mirror of the shim's claims, ended ones included while the agent remembers them.
type Claims interface {
	Get(claimID string) (*agentv1alpha1.Claim, bool)
	WithProviderID(id string) []*agentv1alpha1.Claim
	State() agentclient.State
}

// Overlays adjusts instance types as NodeOverlays say. Core's InstanceTypeStore is one.
type Overlays interface {
	ApplyAll(nodePool string, instanceTypes []*cloudprovider.InstanceType) ([]*cloudprovider.InstanceType, error)
}

// Config is what a CloudProvider works with. Every field but Overlays and TracerProvider is REQUIRED.
type Config struct {
	// Cluster is the hub's Cluster that this workload cluster is.
	Cluster *agentv1alpha1.ClusterRef
	// Kube reads the workload cluster, from a cache.
	Kube client.Reader
	// Client calls the agent.
	Client *agentclient.Client
	// Claims mirrors the shim's claims.
	Claims Claims
	// Catalogue says what can be scheduled on.
	Catalogue *catalogue.Catalogue
	// Overlays is what core's overlay decorator uses, so that Create picks by the prices that core planned with. Used only
	// while the feature gate NodeOverlay is on. Nil means none.
	Overlays Overlays
	// Unclaimed finds the Machines of NodeClaims that never had a claim.
	Unclaimed *unclaimed.Finder
	// Static is told when no node group has room for a NodeClaim.
	Static *staticpool.Gate
	// Recorder takes events about NodeClaims.
	Recorder events.Recorder
	// RepairAfter is how long a Node may be unhealthy before core replaces it, with the feature gate NodeRepair on.
	RepairAfter time.Duration
	// Timeout bounds one method's calls to the agent. A method that adopts a machine has adoptionTimeouts times as long.
	Timeout time.Duration
	// Settled reports whether every NodeClaim that was there when this process began to act has been looked at for adoption. Until then
	// nothing is planned or disrupted.
	Settled func() bool
	// TracerProvider records Create and Delete. Nil records nothing.
	TracerProvider trace.TracerProvider
	// Clock tells how long node groups have been gone, and Machines on their way out.
	Clock clock.PassiveClock
}

// CloudProvider implements core's interface. It is safe for concurrent use.
type CloudProvider struct {
	Config

	listing *listing
	began   *atomic.Pointer[time.Time] // when Create was first called for a NodeClaim that is to adopt a Machine
}

var _ cloudprovider.CloudProvider = (*CloudProvider)(nil)

// New returns a CloudProvider.
func New(config Config) *CloudProvider {
	return &CloudProvider{Config: config, listing: &listing{}, began: &atomic.Pointer[time.Time]{}}
}

// Name returns the provider's name.
func (c *CloudProvider) Name() string { return Name }

// GetSupportedNodeClasses returns a new object each time: core reads node classes into it.
func (c *CloudProvider) GetSupportedNodeClasses() []status.Object {
	return []status.Object{&v1alpha1.ClusterAPINodeClass{}}
}

// GetInstanceTypes answers from the catalogue's newest snapshot. A NodePool of another provider has none. Before the agent
// was heard of for the first time, while NodeClaims of before are being adopted, and for a node class that does not exist or
// selects nothing, it is an error: an empty
// answer would make core take the NodePool's nodes for drifted, for a typing error in a selector.
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
	if len(class.Groups) == 0 {
		return nil, fmt.Errorf("ClusterAPINodeClass %q selects no node group", class.Name)
	}
	return class.For(nodePool), nil
}

// errNotSettled means that the NodeClaims that were there before have not all been looked at for adoption.
var errNotSettled = errors.New("the machines of NodeClaims without a claim are being adopted")

func isOurs(ref *karpv1.NodeClassReference) bool {
	return ref != nil && ref.Group == v1alpha1.Group && ref.Kind == "ClusterAPINodeClass"
}

// Delete releases the NodeClaim's claim, whichever provider ID it carries: the claim is found by the NodeClaim's UID. It
// returns a NodeClaimNotFoundError once the agent says that the instance is gone, or that it knows of no such claim. Core calls it every
// five seconds; while the mirror of claims, which follows the agent, shows that the claim is being released in this way, the agent is not asked.
//
// A NodeClaim that never had a claim and that runs on a Machine of this Cluster adopts that Machine first. It waits, with an error and an event,
// where that is refused, until the Machine is gone or can be adopted, and where the agent does not show the Machine, until it does. It ends without
// the Machine where that is another NodeClaim's. Core has drained the Node by then: it asks no provider before that.
func (c *CloudProvider) Delete(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	if c.releasing(nodeClaim) {
		c.tellStuck(nodeClaim)
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	ctx, end := c.trace(ctx, "Delete", nodeClaim)
	err := c.release(ctx, nodeClaim)
	end(cloudprovider.IgnoreNodeClaimNotFoundError(err)) // which says that it is done
	return err
}

func (c *CloudProvider) release(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	// Before the release, after which nothing could be claimed under this UID any more.
	machine, err := c.Unclaimed.Of(ctx, nodeClaim)
	unknown := errors.Is(err, unclaimed.ErrUnknownMachine)
	if err != nil && !unknown {
		return fmt.Errorf("looking for a machine without a claim: %w", err)
	}
	if machine != nil || unknown {
		if wait, err := c.claimLeft(ctx, nodeClaim, machine); err != nil || wait {
			return err
		}
	}
	switch adopting, err := c.adopting(ctx, nodeClaim); {
	case err != nil:
		return err
	case adopting: // a claim that is released before it has the Machine leaves that with the user
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
			Message:        lo.Substring("The machine stays for now, as the agent releases no more of this Cluster's: "+err.Error(), 0, 1024),
			DedupeValues:   []string{string(nodeClaim.UID)},
			DedupeTimeout:  10 * time.Minute,
		})
	}
	if err != nil {
		return fmt.Errorf("releasing the claim: %w", err)
	}
	if claim := response.GetClaim(); claim == nil || claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return cloudprovider.NewNodeClaimNotFoundError(fmt.Errorf("claim %s has no machine any more", nodeClaim.UID))
	}
	return nil
}

// releasing reports whether the claim is being released, and nothing more is to be said about it: it goes on to its end by itself.
func (c *CloudProvider) releasing(nodeClaim *karpv1.NodeClaim) bool {
	claim, known := c.Claims.Get(string(nodeClaim.UID))
	return known && c.Claims.State().Connected && claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING &&
		(claim.GetDrained() || !drained(nodeClaim))
}

// stuckAfter is how long a Machine may be on its way out before its NodeClaim says what it waits for.
const stuckAfter = 5 * time.Minute

// tellStuck publishes, on a NodeClaim whose Machine has been on its way out for long, what Cluster API says about that. Core asks again every few
// seconds.
func (c *CloudProvider) tellStuck(nodeClaim *karpv1.NodeClaim) {
	claim, _ := c.Claims.Get(string(nodeClaim.UID))
	machine := claim.GetMachine()
	since := machine.GetDeletedAt()
	if since == nil || c.Clock.Since(since.AsTime()) < stuckAfter {
		return
	}
	why := strings.Trim(machine.GetDeletingReason()+": "+machine.GetDeletingMessage(), ": ")
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "MachineDeletionStuck",
		Message: lo.Substring(fmt.Sprintf("Machine %s of the management cluster has been on its way out since %s: %s", machine.GetName(),
			since.AsTime().UTC().Format(time.RFC3339), lo.CoalesceOrEmpty(why, "Cluster API does not say what it waits for")), 0, 1024),
		DedupeValues:  []string{string(nodeClaim.UID), machine.GetDeletingReason()},
		DedupeTimeout: 10 * time.Minute,
	})
}

// drained reports whether core has emptied the Node, so that Cluster API need not. When the NodeClaim's termination grace
// period ran out before the volumes were detached, the user wanted no more waiting either.
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

// Get returns the machine with the provider ID, which may be a claim's placeholder. The agent is asked each time: core takes a
// NodeClaimNotFoundError for leave to drop the Node without draining it.
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

// find returns the claim behind a provider ID, as if there were one for a Machine that has none. It may have ended if that is a
// placeholder.
func (c *CloudProvider) find(ctx context.Context, providerID string) (*agentv1alpha1.Claim, error) {
	if placeholder.Is(providerID) {
		namespace, name, claimID, ok := placeholder.Parse(providerID)
		if !ok || namespace != c.Cluster.GetNamespace() || name != c.Cluster.GetName() {
			return nil, cloudprovider.NewNodeClaimNotFoundError(fmt.Errorf("%s is a claim of another cluster", providerID))
		}
		claim, err := c.ask(ctx, claimID)
		if isClaimNotFound(err) {
			return nil, cloudprovider.NewNodeClaimNotFoundError(err)
		}
		return claim, err
	}
	if claimID, ok := c.liveClaimOf(providerID); ok {
		claim, err := c.ask(ctx, claimID)
		switch {
		case err != nil && !isClaimNotFound(err):
			return nil, err
		case err == nil && claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
			return claim, nil
		}
	}
	// The mirror may lag behind, and infrastructure may give the provider ID of a machine that is gone out again: ask for
	// everything before saying that there is no such machine.
	claims, err := c.listing.claims(ctx, c)
	if err != nil {
		return nil, err
	}
	claim, ok := liveClaimWith(claims, providerID)
	if ok {
		return claim, nil
	}
	// Or of a claim that got it after the claims were listed.
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

// isUnknown reports whether nothing is known of the NodeClaim's machine: see [unclaimed.ErrUnknownMachine]. It is not when the user detaches the
// NodeClaim from it.
func (c *CloudProvider) isUnknown(ctx context.Context, nodeClaim *karpv1.NodeClaim) (bool, error) {
	if !isOurs(nodeClaim.Spec.NodeClassRef) || v1alpha1.ReturnsMachine(nodeClaim) {
		return false, nil
	}
	_, err := c.Unclaimed.Of(ctx, nodeClaim)
	if errors.Is(err, unclaimed.ErrUnknownMachine) {
		return true, nil
	}
	return false, err
}

// asClaimed shows a Machine without a claim to core, which knows no such thing.
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

// liveClaimOf returns the claim that, as far as the mirror knows, has the machine with the provider ID.
func (c *CloudProvider) liveClaimOf(providerID string) (claimID string, ok bool) {
	claim, ok := liveClaimWith(c.Claims.WithProviderID(providerID), providerID)
	return claim.GetClaimId(), ok
}

func liveClaimWith(claims []*agentv1alpha1.Claim, providerID string) (*agentv1alpha1.Claim, bool) {
	return lo.Find(claims, func(claim *agentv1alpha1.Claim) bool {
		return claim.GetMachine().GetProviderId() == providerID && claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	})
}

// List returns each machine twice once it has a real provider ID: under that and under the placeholder. Core deletes the
// NodeClaims of healthy Nodes whose ID is not in the list, and which of the two a NodeClaim carries is, for moments, up to
// races. Machines without a claim are in it: there may be NodeClaims that never had one. So are the NodeClaims of Nodes whose machine the agent does
// not show: see [unclaimed.ErrUnknownMachine]. It is complete, or an error.
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
	// Also those with a claim: it may have got the Machine after the claims were listed.
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

// unknown returns the NodeClaims that have a Node and whose machine is neither listed nor known to be gone.
func (c *CloudProvider) unknown(ctx context.Context, listed sets.Set[string]) ([]*karpv1.NodeClaim, error) {
	all := &karpv1.NodeClaimList{}
	if err := c.Kube.List(ctx, all); err != nil {
		return nil, fmt.Errorf("listing the NodeClaims: %w", err)
	}
	var unknown []*karpv1.NodeClaim
	for i := range all.Items {
		nodeClaim := &all.Items[i]
		if listed.Has(nodeClaim.Status.ProviderID) {
			continue
		}
		is, err := c.isUnknown(ctx, nodeClaim)
		if err != nil {
			return nil, fmt.Errorf("looking for the machine of NodeClaim %s: %w", nodeClaim.Name, err)
		}
		if !is {
			continue
		}
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

// Drift reasons. They end up in a condition, which allows letters, digits, and `_,:`.
const (
	// DriftNodeGroupNotSelected means that the NodeClaim's node class does not select its node group any more.
	DriftNodeGroupNotSelected cloudprovider.DriftReason = "NodeGroupNotSelected"
	// DriftMachineNotUpToDate means that the machine's template changed and that Cluster API waits for somebody to replace
	// the machine.
	DriftMachineNotUpToDate cloudprovider.DriftReason = "MachineNotUpToDate"
)

// IsDrifted answers from the local mirrors, last known good while the agent is away, as the node class's drift policy says. What
// Cluster API replaces by itself, by a rolling update, is no drift: core would race it.
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
	// A selector that matches nothing at all is taken for a mistake, not for the wish to replace every node.
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

// goneFor is how long the agent must not have known a node group before its Nodes count as not selected. It is longer than a hub
// takes to be moved or restored, when MachineDeployments are away for a while.
const goneFor = time.Hour

// deselected reports whether the node class's selector does not match the group, or the group has not been there for long: a
// MachineDeployment without the opt-in label is selected by none.
func (c *CloudProvider) deselected(snapshot *catalogue.Snapshot, class *catalogue.Class, groupID string) bool {
	if group, ok := snapshot.Source(groupID); ok {
		return !class.Selects(group)
	}
	since, gone := snapshot.GoneSince(groupID)
	return gone && c.Clock.Since(since) >= goneFor
}

// Reboot is not offered: Cluster API has no such operation.
func (c *CloudProvider) Reboot(context.Context, *karpv1.NodeClaim, string) error {
	return cloudprovider.NewNodeRebootNotImplementedError()
}

// RepairPolicies returns the policies for the kubelet's own health. They do nothing unless the feature gate NodeRepair is on.
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
			// Core allows one policy without an expression, the fallback above.
			ReasonRegex:        ".*",
			TolerationDuration: c.RepairAfter,
			// The kubelet is silent: no pod there would ever confirm its eviction.
			TerminationGracePeriod: new(time.Duration(0)),
			Action:                 cloudprovider.ReplaceNode,
		},
	}
}
