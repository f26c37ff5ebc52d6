package cloudprovider

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

// errNoNodeGroup means that a Machine belongs to no node group.
var errNoNodeGroup = errors.New("it belongs to no node group; label its MachineDeployment with node.cluster.x-k8s.io/karpenter-member")

// IsAdoptionRefused reports whether a Machine cannot be adopted until something changes, by the error of [CloudProvider.Adopt]. Any other error
// says nothing of the Machine: the call is to be repeated.
func IsAdoptionRefused(err error) bool {
	return errors.Is(err, errNoNodeGroup) || agenterrors.IsRefused(err) || agenterrors.IsNoRoom(err) || agenterrors.IsEnded(err)
}

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
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
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

// takeOver has a NodeClaim adopt the Machine that it was made for, or that another provider had chosen for it when it was replaced. It returns nil
// for a NodeClaim without such a Machine, and where another provider's choice is on its way out, another claim's, or this claim's already.
func (c *CloudProvider) takeOver(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*agentv1alpha1.Claim, error) {
	if name, ours := nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation]; ours {
		return c.takeOverOurs(ctx, nodeClaim, name)
	}
	namespace, name, ok := strings.Cut(nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation], "/")
	if !ok || namespace != c.Cluster.GetNamespace() {
		return nil, nil //nolint:nilnil // documented
	}
	machine, err := c.Unclaimed.Named(ctx, name)
	if err != nil {
		return nil, createError(fmt.Errorf("looking for the machine that another provider chose: %w", err), ReasonAdoptionFailed)
	}
	if machine == nil || machine.GetDeletedAt() != nil || machine.GetNodeGroupId() == "" {
		return nil, nil //nolint:nilnil // documented
	}
	claim, err := c.Adopt(ctx, nodeClaim, machine)
	if err != nil {
		return nil, createError(err, ReasonAdoptionFailed)
	}
	return claim, nil
}

// takeOverOurs has a NodeClaim that was made for a Machine adopt that. It never gets another one: where it cannot have the Machine any more, it is
// of no use, and core deletes it.
func (c *CloudProvider) takeOverOurs(ctx context.Context, nodeClaim *karpv1.NodeClaim, name string) (*agentv1alpha1.Claim, error) {
	machine, err := c.Unclaimed.Named(ctx, name)
	if err != nil {
		return nil, createError(fmt.Errorf("looking for the machine to adopt: %w", err), ReasonAdoptionFailed)
	}
	if machine == nil { // its own claim may have it
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
