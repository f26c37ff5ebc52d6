package cloudprovider

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/samber/lo"
	"google.golang.org/protobuf/types/known/durationpb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

// errNoNodeGroup means that a Machine belongs to no node group.
var errNoNodeGroup = errors.New("it belongs to no node group; label its MachineDeployment with node.cluster.x-k8s.io/karpenter-member")

// IsAdoptionRefused reports whether an error of [CloudProvider.Adopt] means that the Machine cannot
// be adopted until something changes. Any other error says nothing about the Machine, and the call
// should be retried.
func IsAdoptionRefused(err error) bool {
	if agenterrors.IsSpokeMismatch(err) { // it is the shim that is refused
		return false
	}
	return errors.Is(err, errNoNodeGroup) || agenterrors.IsRefused(err) || agenterrors.IsNoRoom(err) || agenterrors.IsEnded(err) ||
		agenterrors.IsTooMany(err) || agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) != agenterrors.ReasonClusterNotFound
}

// adoptionTimeouts is the factor by which an adoption's timeout exceeds that of other calls.
// Hundreds of adoptions arrive at once and queue in the agent; one that times out and is retried
// costs the hub more than one that waits.
const adoptionTimeouts = 6

// Adopt creates the NodeClaim's claim on the Machine that the NodeClaim already runs on, and
// returns it. Adopt is idempotent by the NodeClaim's UID. It returns the agent's errors, or an
// error if the Machine is in no node group; see [IsAdoptionRefused].
func (c *CloudProvider) Adopt(ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) (*agentv1alpha1.Claim, error) {
	return c.adopt(ctx, nodeClaim, machine, false)
}

// adopt is [CloudProvider.Adopt]. With aboveMinSize, the agent refuses an adoption that would have
// to raise replicas.
func (c *CloudProvider) adopt(
	ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine, aboveMinSize bool,
) (*agentv1alpha1.Claim, error) {
	if machine.GetNodeGroupId() == "" {
		return nil, errNoNodeGroup
	}
	ctx, cancel := context.WithTimeout(ctx, adoptionTimeouts*c.Timeout)
	defer cancel()
	var maxNodeProvisionTime *metav1.Duration
	if class := c.class(nodeClaim.Spec.NodeClassRef.Name); class != nil {
		maxNodeProvisionTime = class.MaxNodeProvisionTime
	}
	request := c.request(ctx, nodeClaim, []string{machine.GetNodeGroupId()}, maxNodeProvisionTime)
	request.AdoptMachine, request.AdoptAboveMinSize = machine.GetName(), aboveMinSize
	claim, err := c.send(ctx, request)
	adoptionsTotal.Inc(map[string]string{resultLabel: adoptionResult(err)})
	return claim, err
}

// adopting returns the NodeClaim's claim if it is to adopt a Machine and is not Bound to it yet,
// and nil otherwise.
func (c *CloudProvider) adopting(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*agentv1alpha1.Claim, error) {
	claim, known := c.Claims.Get(string(nodeClaim.UID))
	if !known && nodeClaim.Status.ProviderID != "" && !placeholder.Is(nodeClaim.Status.ProviderID) {
		var err error // the mirror may lag behind
		if claim, err = c.ask(ctx, string(nodeClaim.UID)); err != nil {
			if isClaimNotFound(err) {
				return nil, nil //nolint:nilnil // documented
			}
			return nil, err
		}
	}
	if claim.GetAdoptMachine() == "" || claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING {
		return nil, nil //nolint:nilnil // documented
	}
	return claim, nil
}

// Describe returns the claim's NodeClaim as core stores it after Create, for the given NodeClass:
// with its placeholder and with the labels, annotations and resources of its node group. It returns
// nil while the node group or the NodeClass is not known.
func (c *CloudProvider) Describe(nodeClass string, claim *agentv1alpha1.Claim) *karpv1.NodeClaim {
	class := c.class(nodeClass)
	if class == nil {
		return nil
	}
	group, ok := c.Catalogue.Snapshot().Group(claim.GetNodeGroupId())
	if !ok {
		return nil
	}
	return c.launched(claim, class.See(group))
}

// class returns the catalogue's entry for a NodeClass, or nil if there is none.
func (c *CloudProvider) class(name string) *catalogue.Class {
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		return nil
	}
	class, _ := snapshot.Class(name)
	return class
}

// request returns the CreateClaimRequest for the NodeClaim.
func (c *CloudProvider) request(
	ctx context.Context, nodeClaim *karpv1.NodeClaim, candidates []string, maxNodeProvisionTime *metav1.Duration,
) *agentv1alpha1.CreateClaimRequest {
	request := &agentv1alpha1.CreateClaimRequest{
		Cluster:     c.Cluster,
		ClaimId:     string(nodeClaim.UID),
		Holder:      v1alpha1.Holder,
		Candidates:  candidates,
		DisplayName: nodeClaim.Name,
		SpokeId:     c.spoke(ctx),

		HolderRepairs: c.Repairs,
	}
	if maxNodeProvisionTime != nil {
		request.MaxNodeProvisionTime = durationpb.New(maxNodeProvisionTime.Duration)
	}
	return request
}

// send creates a claim. If it loses a race in the hub, send retries a few times without delay.
func (c *CloudProvider) send(ctx context.Context, request *agentv1alpha1.CreateClaimRequest) (*agentv1alpha1.Claim, error) {
	if err := c.Refused(); err != nil {
		return nil, fmt.Errorf("the agent refuses the live sets of this cluster: %w", err)
	}
	for attempt := 1; ; attempt++ {
		response, err := c.Client.Claims.CreateClaim(ctx, request)
		if err == nil || !agenterrors.IsConflict(err) || attempt == conflictAttempts {
			return response.GetClaim(), err
		}
	}
}

// mayTakeOver reports whether the NodeClaim names a Machine for [CloudProvider.takeOver].
func mayTakeOver(nodeClaim *karpv1.NodeClaim) bool {
	return nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation] != "" || nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation] != ""
}

// takeOver adopts the Machine that the NodeClaim was made for, or that another provider had chosen
// for it before this provider replaced that one.
//
// It returns nil for a NodeClaim without such a Machine. It also returns nil if the other
// provider's choice is being deleted, belongs to another claim or NodeClaim, or already belongs to
// this claim. If that choice cannot be adopted now, the returned claim has no id; see [asItIs].
func (c *CloudProvider) takeOver(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*agentv1alpha1.Claim, error) {
	if name, ours := nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation]; ours {
		return c.takeOverOurs(ctx, nodeClaim, name)
	}
	namespace, name, ok := strings.Cut(nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation], "/")
	if !ok || namespace != c.Cluster.GetNamespace() {
		return nil, nil //nolint:nilnil // documented
	}
	machine, owner, err := c.chosen(ctx, nodeClaim, name)
	if err != nil {
		return nil, createError(err, ReasonAdoptionFailed)
	}
	if machine == nil || machine.GetDeletedAt() != nil || machine.GetNodeGroupId() == "" || owner != nil {
		return nil, nil //nolint:nilnil // documented
	}
	claim, err := c.Adopt(ctx, nodeClaim, machine)
	switch {
	case err == nil:
		return claim, nil
	case !IsAdoptionRefused(err):
		return nil, createError(err, ReasonAdoptionFailed)
	}
	c.Recorder.Publish(c.Unclaimed.Event(nodeClaim, machine, err))
	if machine.GetProviderId() == "" {
		return nil, createError(err, ReasonAdoptionRefused)
	}
	return asClaimed(machine), nil
}

// asItIs adjusts a NodeClaim whose Machine cannot be adopted now, so that core sees it as one that
// another provider launched: with the Machine's own provider ID. Adoption is retried from then on,
// and the NodeClaim does not end before its Machine is adopted or gone.
func asItIs(nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) {
	nodeClaim.Status.ProviderID = claim.GetMachine().GetProviderId()
	nodeClaim.Annotations = nil
}

// chosen returns the unclaimed Machine with the name, or nil, and another NodeClaim that runs on
// it, or nil.
func (c *CloudProvider) chosen(
	ctx context.Context, nodeClaim *karpv1.NodeClaim, name string,
) (machine *agentv1alpha1.Machine, owner *karpv1.NodeClaim, err error) {
	if machine, err = c.Unclaimed.Named(ctx, name); err != nil {
		return nil, nil, fmt.Errorf("looking for the machine to adopt: %w", err)
	}
	others, err := owners.Others(ctx, c.Kube, nodeClaim, machine.GetProviderId())
	return machine, lo.FirstOrEmpty(others), err
}

// takeOverOurs adopts the Machine that the NodeClaim was made for. Such a NodeClaim never gets
// another Machine: if it can no longer have this one, it is of no use, and core deletes it.
func (c *CloudProvider) takeOverOurs(ctx context.Context, nodeClaim *karpv1.NodeClaim, name string) (*agentv1alpha1.Claim, error) {
	machine, owner, err := c.chosen(ctx, nodeClaim, name)
	switch {
	case err != nil:
		return nil, createError(err, ReasonAdoptionFailed)
	case owner != nil:
		return nil, cloudprovider.NewInsufficientCapacityError(fmt.Errorf("machine %s belongs to NodeClaim %s", name, owner.Name))
	case machine == nil: // its own claim may have it
		claim, err := c.ask(ctx, string(nodeClaim.UID))
		switch {
		case err == nil:
			return claim, nil
		case isClaimNotFound(err):
			return nil, cloudprovider.NewInsufficientCapacityError(fmt.Errorf("machine %s is gone, or belongs to another claim", name))
		}
		return nil, createError(err, ReasonAdoptionFailed)
	}
	claim, err := c.adopt(ctx, nodeClaim, machine, true)
	switch {
	case err == nil:
		return claim, nil
	case IsAdoptionRefused(err):
		return nil, cloudprovider.NewInsufficientCapacityError(err)
	}
	return nil, createError(err, ReasonAdoptionFailed)
}

// claimLeft claims the Machine of a NodeClaim without a claim, so that the Machine can be released.
// machine is nil if the agent does not report it. wait reports whether the only thing left to do is
// to wait. A NodeClaim whose Machine belongs to another NodeClaim gets no claim.
func (c *CloudProvider) claimLeft(ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) (wait bool, err error) {
	owner, err := owners.Of(ctx, c.Kube, nodeClaim)
	switch {
	case err != nil:
		return false, err
	case owner.UID != nodeClaim.UID:
		return false, nil
	case machine == nil && v1alpha1.ReturnsMachine(nodeClaim): // the user detaches the NodeClaim from it
		return false, nil
	case machine == nil:
		c.Recorder.Publish(c.Unclaimed.Unknown(nodeClaim))
		return false, unclaimed.ErrUnknownMachine
	case machine.GetDeletedAt() != nil:
		c.tellStuck(nodeClaim, machine)
		return true, nil
	}
	if _, err := c.Adopt(ctx, nodeClaim, machine); err != nil {
		if IsAdoptionRefused(err) {
			c.Recorder.Publish(c.Unclaimed.Event(nodeClaim, machine, err))
		}
		return false, fmt.Errorf("the NodeClaim has no claim, and its machine %s cannot be adopted: %w", machine.GetName(), err)
	}
	return false, nil
}

// adoptionResult is the label value of [adoptionsTotal].
func adoptionResult(err error) string {
	switch {
	case err == nil:
		return "adopted"
	case IsAdoptionRefused(err):
		return "refused"
	}
	return "error"
}
