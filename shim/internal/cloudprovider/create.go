package cloudprovider

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/spoke"
)

const (
	// maxCandidates is the maximum that the agent's API allows in one claim.
	maxCandidates = 1000
	// conflictAttempts is how often a claim is attempted without delay when it loses a race in the
	// hub.
	conflictAttempts = 4
)

// Create claims a machine for the NodeClaim and returns as soon as the claim is durable in the hub.
// The returned provider ID is the claim's placeholder: core stops provisioning and disrupting in
// the whole cluster while any NodeClaim has no provider ID.
//
// Create is idempotent by the NodeClaim's UID. After a crash, a lost reply or a failed status patch
// it returns the same claim, whatever the candidates are by then.
//
// If the NodePool only requires that a label exists, or allows several values, core picks a value
// at random. Create then sets the label of the passed NodeClaim to the value that the machine will
// have, and core stores it.
func (c *CloudProvider) Create(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*karpv1.NodeClaim, error) {
	timeout := c.Timeout
	if mayTakeOver(nodeClaim) {
		timeout *= adoptionTimeouts
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ctx, end := c.trace(ctx, "Create", nodeClaim)
	created, err := c.create(ctx, nodeClaim)
	end(err)
	c.renew(nodeClaim, err)
	if cloudprovider.IsInsufficientCapacityError(err) || cloudprovider.IsNodeClassNotReadyError(err) { // core deletes the NodeClaim
		c.Static.Refused(ctx, nodeClaim, err)
	}
	claimsTotal.Inc(map[string]string{resultLabel: resultOf(err)})
	return created, err
}

func (c *CloudProvider) create(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*karpv1.NodeClaim, error) {
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		return nil, createError(catalogue.ErrNotSynced, ReasonCatalogueNotSynced)
	}
	if nodeClaim.Spec.NodeClassRef == nil {
		return nil, createError(errors.New("spec.nodeClassRef is not set"), ReasonNodeClassNotFound)
	}
	class, ok := snapshot.Class(nodeClaim.Spec.NodeClassRef.Name)
	if !ok {
		return nil, c.withoutClass(ctx, nodeClaim)
	}
	groups, err := c.overlaid(ctx, nodeClaim, class)
	if err != nil {
		return nil, createError(err, ReasonOverlaysNotReady)
	}
	candidates, refused := c.candidates(nodeClaim, groups)
	notReady, err := c.notReady(ctx, nodeClaim.Spec.NodeClassRef.Name)
	if err != nil {
		return nil, createError(err, ReasonNodeClassNotFound)
	}
	if notReady != nil {
		candidates = nil // only a claim that exists already is of use
	}

	claim, err := c.takeOver(ctx, nodeClaim)
	if err != nil {
		return nil, err
	}
	if claim == nil {
		claim, err = c.claim(ctx, nodeClaim, candidates, class.MaxNodeProvisionTime)
	}
	if err != nil {
		if errors.Is(err, errNoCandidate) && notReady != nil {
			return nil, cloudprovider.NewNodeClassNotReadyError(notReady)
		}
		if errors.Is(err, errNoCandidate) || agenterrors.IsTooMany(err) {
			c.Catalogue.MarkRefused(
				nodeClaim.Labels[karpv1.NodePoolLabelKey],
				scheduling.NewNodeSelectorRequirementsWithMinValues(nodeClaim.Spec.Requirements...),
			)
		}
		return nil, c.explain(err, candidates, refused)
	}
	if phase := claim.GetPhase(); phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING || phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return nil, c.explain(agenterrors.ClaimEnded(claim), nil, nil)
	}
	group, err := c.groupOf(ctx, claim, class, groups)
	if err != nil {
		return nil, createError(err, ReasonNodeGroupUnknown)
	}
	created := c.launched(claim, group)
	if claim.GetClaimId() == "" {
		asItIs(created, claim)
	}
	if _, adopted := nodeClaim.Labels[v1alpha1.AdoptedLabel]; !adopted { // an adopted NodeClaim already has the labels of its Node
		instancetype.CorrectChosenLabels(nodeClaim, created.Labels)
	}
	log.FromContext(ctx).Info("claimed a machine", "node-group", group.ID, "claim-phase", claim.GetPhase().String(), "candidates", len(candidates))
	return created, nil
}

// classWithin is how long after a NodeClaim its NodeClass may be created.
const classWithin = 15 * time.Second

// withoutClass returns the error for a NodeClaim whose NodeClass is not in the catalogue. Core
// retries for as long as the class may come, or a claim exists, and plans and disrupts nothing
// meanwhile. So a name that is wrong ends the NodeClaim.
func (c *CloudProvider) withoutClass(ctx context.Context, nodeClaim *karpv1.NodeClaim) error {
	name := nodeClaim.Spec.NodeClassRef.Name
	missing := fmt.Errorf("ClusterAPINodeClass %q does not exist", name)
	err := c.Kube.Get(ctx, client.ObjectKey{Name: name}, &v1alpha1.ClusterAPINodeClass{})
	if !apierrors.IsNotFound(err) || c.Clock.Since(nodeClaim.CreationTimestamp.Time) < classWithin {
		return createError(missing, ReasonNodeClassNotFound)
	}
	if mayTakeOver(nodeClaim) { // its Machine exists, and no other NodeClaim would get it
		return createError(missing, ReasonNodeClassNotFound)
	}
	if _, err := c.ask(ctx, string(nodeClaim.UID)); !isClaimNotFound(err) {
		return createError(missing, ReasonNodeClassNotFound)
	}
	return cloudprovider.NewInsufficientCapacityError(missing)
}

// notReady returns why the NodeClass is not Ready; nil if it is, if that is not known of its
// present specification, or if the agent is the reason: a call may reach it after all.
func (c *CloudProvider) notReady(ctx context.Context, name string) (why, err error) {
	var class v1alpha1.ClusterAPINodeClass
	if err := c.Kube.Get(ctx, client.ObjectKey{Name: name}, &class); err != nil {
		return nil, fmt.Errorf("reading the NodeClass: %w", err)
	}
	ready, agent := class.StatusConditions().Get(status.ConditionReady), class.StatusConditions().Get(v1alpha1.ConditionAgentReachable)
	if !ready.IsFalse() || ready.ObservedGeneration != class.Generation || agent.IsFalse() {
		return nil, nil
	}
	return fmt.Errorf("ClusterAPINodeClass %q is not Ready: %s", name, ready.Message), nil
}

// candidates returns the groups that accept the NodeClaim, best first, and the reason why each
// other group does not.
func (c *CloudProvider) candidates(
	nodeClaim *karpv1.NodeClaim,
	groups []*instancetype.Group,
) (candidates []*instancetype.Group, refused map[string]error) {
	requirements := scheduling.NewNodeSelectorRequirementsWithMinValues(nodeClaim.Spec.Requirements...)
	declared := slices.Concat(nodeClaim.Spec.Taints, nodeClaim.Spec.StartupTaints)
	refused = map[string]error{}
	for _, g := range groups {
		if err := g.Accepts(requirements, nodeClaim.Spec.Resources.Requests, declared); err != nil {
			refused[g.ID] = err
			continue
		}
		candidates = append(candidates, g)
	}
	// Groups without room are listed last instead of being left out: the catalogue may be stale,
	// and the agent decides.
	return lo.Slice(instancetype.Order(candidates, c.Catalogue.Available), 0, maxCandidates), refused
}

// overlaid returns the class's groups with the prices and resources that NodeOverlays assign to
// them.
func (c *CloudProvider) overlaid(ctx context.Context, nodeClaim *karpv1.NodeClaim, class *catalogue.Class) ([]*instancetype.Group, error) {
	nodePool := nodeClaim.Labels[karpv1.NodePoolLabelKey]
	if c.Overlays == nil || nodePool == "" || !coreoptions.FromContext(ctx).FeatureGates.NodeOverlay {
		return class.Groups, nil
	}
	// Core's overlays refer to the offerings as the NodePool sees them.
	pool, err := c.Catalogue.NodePool(ctx, nodePool)
	if err != nil {
		return nil, err
	}
	types, err := c.Overlays.ApplyAll(nodePool, class.For(pool))
	if err != nil {
		return nil, fmt.Errorf("applying node overlays: %w", err)
	}
	byName := lo.KeyBy(types, func(t *cloudprovider.InstanceType) string { return t.Name })
	return lo.Map(class.Groups, func(g *instancetype.Group, _ int) *instancetype.Group {
		if instanceType, ok := byName[g.InstanceType]; ok {
			return g.Overlaid(instanceType)
		}
		return g
	}), nil
}

// claim creates the claim. Without candidates it only looks for an existing claim: the reply may
// have been lost while there still were candidates.
func (c *CloudProvider) claim(
	ctx context.Context, nodeClaim *karpv1.NodeClaim, candidates []*instancetype.Group, maxNodeProvisionTime *metav1.Duration,
) (*agentv1alpha1.Claim, error) {
	if len(candidates) == 0 {
		claim, err := c.ask(ctx, string(nodeClaim.UID))
		if isClaimNotFound(err) {
			return nil, errNoCandidate
		}
		return claim, err
	}
	ids := lo.Map(candidates, func(g *instancetype.Group, _ int) string { return g.ID })
	return c.send(ctx, c.request(ctx, nodeClaim, ids, maxNodeProvisionTime))
}

// spoke returns the ID of the cluster that creates the claim, or "" if it cannot be read now. The
// next claim sync reports it.
func (c *CloudProvider) spoke(ctx context.Context) string {
	id, err := spoke.ID(ctx, c.Kube)
	if err != nil {
		log.FromContext(ctx).Error(err, "claiming without the spoke's identity")
	}
	return id
}

// groupOf returns the group that the agent chose. It need not be a candidate: a repeated call
// returns the first answer.
func (c *CloudProvider) groupOf(
	ctx context.Context, claim *agentv1alpha1.Claim, class *catalogue.Class, groups []*instancetype.Group,
) (*instancetype.Group, error) {
	id := claim.GetNodeGroupId()
	if group, ok := lo.Find(groups, func(g *instancetype.Group) bool { return g.ID == id }); ok {
		return group, nil
	}
	if group, ok := c.Catalogue.Snapshot().Group(id); ok {
		return class.See(group), nil
	}
	response, err := c.Client.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: c.Cluster, Id: id})
	if err != nil {
		return nil, fmt.Errorf("getting the claimed node group %s: %w", id, err)
	}
	group, err := instancetype.NewGroup(response.GetNodeGroup())
	if group == nil {
		return nil, err
	}
	return class.See(group), nil
}

func (c *CloudProvider) launched(claim *agentv1alpha1.Claim, group *instancetype.Group) *karpv1.NodeClaim {
	labels := maps.Clone(group.Labels)
	if zone := claim.GetMachine().GetZone(); group.Zone == instancetype.ZoneNone && zone != instancetype.ZoneNone {
		c.Catalogue.ObserveZone(group.ID, zone)
		labels[corev1.LabelTopologyZone] = zone
	}
	return &karpv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name:        claim.GetDisplayName(),
			UID:         types.UID(claim.GetClaimId()),
			Labels:      labels,
			Annotations: map[string]string{v1alpha1.NodeGroupAnnotation: group.ID},
		},
		Status: karpv1.NodeClaimStatus{
			// Always the placeholder, even if the real ID is known, so that only one controller
			// ever swaps it.
			ProviderID:  c.placeholderOf(claim.GetClaimId()),
			Capacity:    maps.Clone(group.Capacity),
			Allocatable: maps.Clone(group.Allocatable),
		},
	}
}

// nodeClaimOf returns the claim's machine as core's NodeClaim, with one of its provider IDs.
func (c *CloudProvider) nodeClaimOf(claim *agentv1alpha1.Claim, providerID string) *karpv1.NodeClaim {
	nodeClaim := &karpv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name:        claim.GetDisplayName(),
			UID:         types.UID(claim.GetClaimId()),
			Annotations: map[string]string{v1alpha1.NodeGroupAnnotation: claim.GetNodeGroupId()},
		},
		Status: karpv1.NodeClaimStatus{ProviderID: providerID, NodeName: claim.GetMachine().GetNodeName()},
	}
	if created := claim.GetCreatedAt(); created != nil {
		nodeClaim.CreationTimestamp = metav1.NewTime(created.AsTime())
	}
	// Core treats a machine that is being deleted as gone, and removes its NodeClaim once the Node
	// is not Ready.
	switch {
	case claim.GetReleasedAt() != nil:
		nodeClaim.DeletionTimestamp = &metav1.Time{Time: claim.GetReleasedAt().AsTime()}
	case claim.GetMachine().GetDeletedAt() != nil:
		nodeClaim.DeletionTimestamp = &metav1.Time{Time: claim.GetMachine().GetDeletedAt().AsTime()}
	case claim.GetMachine().GetInfrastructureReason() == claimreasons.InfrastructureDeleted:
		nodeClaim.DeletionTimestamp = &metav1.Time{Time: c.Clock.Now()}
	}
	if snapshot := c.Catalogue.Snapshot(); snapshot != nil {
		if group, ok := snapshot.Group(claim.GetNodeGroupId()); ok {
			nodeClaim.Labels = maps.Clone(group.Labels)
			nodeClaim.Status.Capacity = maps.Clone(group.Capacity)
			nodeClaim.Status.Allocatable = maps.Clone(group.Allocatable)
		}
	}
	return nodeClaim
}

// summary returns one sentence with the reasons why groups were refused, the most common ones
// first.
func summary(refused map[string]error) string {
	if len(refused) == 0 {
		return "the NodeClass selects no usable node group"
	}
	counts := lo.CountValues(lo.MapToSlice(refused, func(_ string, err error) string { return err.Error() }))
	reasons := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})
	return fmt.Sprintf(
		"none of %d node groups fits: %s",
		len(refused),
		strings.Join(lo.Map(lo.Slice(reasons, 0, 3), func(reason string, _ int) string {
			return fmt.Sprintf("%s (%d)", reason, counts[reason])
		}), "; "),
	)
}
