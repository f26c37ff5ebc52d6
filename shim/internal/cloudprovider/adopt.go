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

// IsAdoptionRefused reports whether a Machine cannot be adopted until something changes, by the error of [CloudProvider.Adopt]. Any other error
// says nothing of the Machine: the call is to be repeated.
func IsAdoptionRefused(err error) bool {
	return errors.Is(err, errNoNodeGroup) || agenterrors.IsRefused(err) || agenterrors.IsNoRoom(err) || agenterrors.IsEnded(err) ||
		agenterrors.IsTooMany(err) || agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) != agenterrors.ReasonClusterNotFound
}

// adoptionTimeouts is how many times as long as another call an adoption may take. Hundreds come at once, and wait for each other in the agent;
// one that is given up and asked for again costs the hub more than one that waits.
const adoptionTimeouts = 6

// Adopt makes the NodeClaim's claim on the Machine that the NodeClaim runs on already, and returns the claim. It is idempotent by the
// NodeClaim's UID. Errors: the agent's, and one for a Machine that is in no node group; see [IsAdoptionRefused].
func (c *CloudProvider) Adopt(ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) (*agentv1alpha1.Claim, error) {
	return c.adopt(ctx, nodeClaim, machine, false)
}

// adopt is [CloudProvider.Adopt]. aboveMinSize refuses that where replicas would have to be raised.
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

// adopting reports whether the NodeClaim's claim is to adopt a Machine that it does not have yet.
func (c *CloudProvider) adopting(ctx context.Context, nodeClaim *karpv1.NodeClaim) (bool, error) {
	claim, known := c.Claims.Get(string(nodeClaim.UID))
	if !known && nodeClaim.Status.ProviderID != "" && !placeholder.Is(nodeClaim.Status.ProviderID) {
		var err error // the mirror may lag behind
		if claim, err = c.ask(ctx, string(nodeClaim.UID)); err != nil {
			if isClaimNotFound(err) {
				return false, nil
			}
			return false, err
		}
	}
	return claim.GetAdoptMachine() != "" && claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING, nil
}

// Describe returns the claim's NodeClaim, of a node class, as core has it after Create: with the labels, the annotations and the resources that
// the node group of its Machine gives it, and its placeholder. It returns nil while the node group, or the node class, is not known.
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

// class returns what the catalogue knows of a node class, nil for nothing.
func (c *CloudProvider) class(name string) *catalogue.Class {
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		return nil
	}
	class, _ := snapshot.Class(name)
	return class
}

// request asks for a claim of the NodeClaim's.
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
	}
	if maxNodeProvisionTime != nil {
		request.MaxNodeProvisionTime = durationpb.New(maxNodeProvisionTime.Duration)
	}
	return request
}

// send makes a claim. One that lost a race in the hub is repeated at once, a few times.
func (c *CloudProvider) send(ctx context.Context, request *agentv1alpha1.CreateClaimRequest) (*agentv1alpha1.Claim, error) {
	for attempt := 1; ; attempt++ {
		response, err := c.Client.Claims.CreateClaim(ctx, request)
		if err == nil || !agenterrors.IsConflict(err) || attempt == conflictAttempts {
			return response.GetClaim(), err
		}
	}
}

// mayTakeOver reports whether [CloudProvider.takeOver] has a Machine to look for.
func mayTakeOver(nodeClaim *karpv1.NodeClaim) bool {
	return nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation] != "" || nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation] != ""
}

// takeOver has a NodeClaim adopt the Machine that it was made for, or that another provider had chosen for it when it was replaced. It returns nil
// for a NodeClaim without such a Machine, and where another provider's choice is on its way out, another claim's or NodeClaim's, or this claim's
// already. Where that choice cannot be adopted now, the claim has no id, and [asItIs] applies.
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

// asItIs describes to core a NodeClaim whose Machine cannot be adopted now, like one that another provider has launched: with the Machine's own
// provider ID. Its adoption is tried again from then on, and it ends no sooner than it can be adopted, or the Machine is gone.
func asItIs(nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) {
	nodeClaim.Status.ProviderID = claim.GetMachine().GetProviderId()
	nodeClaim.Annotations = nil
}

// chosen returns the Machine without a claim that has the name, nil when there is none, and another NodeClaim that runs on it, nil when there is
// none.
func (c *CloudProvider) chosen(
	ctx context.Context, nodeClaim *karpv1.NodeClaim, name string,
) (machine *agentv1alpha1.Machine, owner *karpv1.NodeClaim, err error) {
	if machine, err = c.Unclaimed.Named(ctx, name); err != nil {
		return nil, nil, fmt.Errorf("looking for the machine to adopt: %w", err)
	}
	others, err := owners.Others(ctx, c.Kube, nodeClaim, machine.GetProviderId())
	return machine, lo.FirstOrEmpty(others), err
}

// takeOverOurs has a NodeClaim that was made for a Machine adopt that. It never gets another one: where it cannot have the Machine any more, it is
// of no use, and core deletes it.
func (c *CloudProvider) takeOverOurs(ctx context.Context, nodeClaim *karpv1.NodeClaim, name string) (*agentv1alpha1.Claim, error) {
	machine, owner, err := c.chosen(ctx, nodeClaim, name)
	switch {
	case err != nil:
		return nil, createError(err, ReasonAdoptionFailed)
	case owner != nil:
		return nil, cloudprovider.NewInsufficientCapacityError(fmt.Errorf("machine %s is that of NodeClaim %s", name, owner.Name))
	case machine == nil: // its own claim may have it
		claim, err := c.ask(ctx, string(nodeClaim.UID))
		switch {
		case err == nil:
			return claim, nil
		case isClaimNotFound(err):
			return nil, cloudprovider.NewInsufficientCapacityError(fmt.Errorf("machine %s is gone, or another claim's", name))
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

// claimLeft claims the machine of a NodeClaim without a claim, so that it can be released; machine is nil for one that the agent does not show. It
// reports whether there is nothing to do but wait. A NodeClaim whose machine is another one's gets no claim.
func (c *CloudProvider) claimLeft(ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) (wait bool, err error) {
	owner, err := owners.Of(ctx, c.Kube, nodeClaim)
	switch {
	case err != nil:
		return false, err
	case owner.UID != nodeClaim.UID:
		return false, nil
	case machine == nil && v1alpha1.ReturnsMachine(nodeClaim): // the user detaches it
		return false, nil
	case machine == nil:
		c.Recorder.Publish(c.Unclaimed.Unknown(nodeClaim))
		return false, unclaimed.ErrUnknownMachine
	case machine.GetDeletedAt() != nil:
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
