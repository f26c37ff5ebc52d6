package cloudprovider

import (
	"errors"
	"fmt"

	"github.com/samber/lo"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// Reasons of a NodeClaim's condition Launched while Create fails.
const (
	// ReasonCatalogueNotSynced means that the agent was not heard of since the process started.
	ReasonCatalogueNotSynced = "CatalogueNotSynced"
	// ReasonNodeClassNotFound means that the NodeClaim's node class does not exist.
	ReasonNodeClassNotFound = "NodeClassNotFound"
	// ReasonOverlaysNotReady means that NodeOverlays could not be applied yet.
	ReasonOverlaysNotReady = "NodeOverlaysNotReady"
	// ReasonNodeGroupUnknown means that the claim exists, and that its node group could not be read.
	ReasonNodeGroupUnknown = "NodeGroupUnknown"
	// ReasonNodeGroupsNotFound means that the agent knows none of the candidates, or not the Cluster.
	ReasonNodeGroupsNotFound = "NodeGroupsNotFound"
	// ReasonAgentUnreachable means that no answer came. The claim may exist.
	ReasonAgentUnreachable = "AgentUnreachable"
	// ReasonAgentRefused means that the agent does not know this client, or that it may not act for the Cluster.
	ReasonAgentRefused = "AgentRefused"
	// ReasonClaimConflict means that races in the hub were lost again and again.
	ReasonClaimConflict = "ClaimConflict"
	// ReasonClaimRejected means that the agent holds the request for malformed.
	ReasonClaimRejected = "ClaimRejected"
	// ReasonTooManyClaims means that the Cluster has as many claims as the agent lets it have, or as many were made lately.
	ReasonTooManyClaims = "TooManyClaims"
	// ReasonAdoptionFailed means that it is not known whether the Machine that was chosen for the NodeClaim can be adopted.
	ReasonAdoptionFailed = "AdoptionFailed"
	// ReasonAdoptionRefused means that the Machine that another provider chose for the NodeClaim cannot be adopted, and has no provider ID yet.
	ReasonAdoptionRefused = "AdoptionRefused"
	// ReasonClaimFailed means anything else.
	ReasonClaimFailed = "ClaimFailed"
)

// errNoCandidate means that no node group fits, and that no claim was made earlier when one did.
var errNoCandidate = errors.New("no candidate")

// maxConditionMessage keeps a condition readable; the log has everything.
const maxConditionMessage = 1024

// explain turns the agent's answer to a claim into what core acts on:
//
//	agent                          | core                     | effect
//	no candidate in the catalogue  | InsufficientCapacity     | NodeClaim deleted, pods scheduled anew; the NodePool does without for a while
//	RESOURCE_EXHAUSTED, no room    | InsufficientCapacity     | the same; the candidates are left alone for a while
//	RESOURCE_EXHAUSTED, too many   | CreateError              | repeated with core's backoff
//	FAILED_PRECONDITION            | InsufficientCapacity     | the same: paused or closed groups are of no use to this NodeClaim
//	ABORTED, claim ended           | InsufficientCapacity     | NodeClaim deleted: its id can never be claimed again
//	ABORTED, conflict              | CreateError              | repeated at once a few times, then with core's backoff
//	NOT_FOUND                      | CreateError              | repeated, with the candidates of a newer catalogue
//	UNAVAILABLE, DEADLINE_EXCEEDED | CreateError              | repeated with the same id; the claim may exist
//	UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT, others | CreateError | repeated; somebody has to act
//
// Core never gets NodeClassNotReady: it would delete the NodeClaim and make the next one at once, for as long as the node
// class is ready. A NodeClaim whose creation keeps failing is given up after the launch timeout.
func (c *CloudProvider) explain(err error, candidates []*instancetype.Group, refused map[string]error) error {
	switch {
	case errors.Is(err, errNoCandidate):
		return cloudprovider.NewInsufficientCapacityError(errors.New(summary(refused)))
	case agenterrors.IsNoRoom(err), agenterrors.IsRefused(err):
		rejected := lo.Map(agenterrors.Rejections(err), func(r agenterrors.Rejection, _ int) string { return r.NodeGroup })
		if len(rejected) == 0 {
			rejected = lo.Map(candidates, func(g *instancetype.Group, _ int) string { return g.ID })
		}
		c.Catalogue.MarkUnavailable(rejected...)
		return cloudprovider.NewInsufficientCapacityError(err)
	case agenterrors.IsEnded(err):
		return cloudprovider.NewInsufficientCapacityError(fmt.Errorf("the claim cannot be made again: %w", err))
	case agenterrors.IsTooMany(err):
		return createError(err, ReasonTooManyClaims)
	case agenterrors.IsConflict(err):
		return createError(err, ReasonClaimConflict)
	case agenterrors.IsNotFound(err):
		c.Catalogue.Refresh()
		return createError(err, ReasonNodeGroupsNotFound)
	case agenterrors.IsUnavailable(err):
		return createError(err, ReasonAgentUnreachable)
	case agenterrors.IsUnauthenticated(err), agenterrors.IsPermissionDenied(err):
		return createError(err, ReasonAgentRefused)
	case agenterrors.IsInvalidArgument(err):
		return createError(err, ReasonClaimRejected)
	}
	return createError(err, ReasonClaimFailed)
}

func createError(err error, reason string) error {
	return cloudprovider.NewCreateError(err, reason, lo.Substring(err.Error(), 0, maxConditionMessage))
}

// isClaimNotFound reports that the agent is certain that there is no such claim. That it knows no such Cluster does not say so:
// a mistake in a setting, or a hub that is being restored, must not end Nodes.
func isClaimNotFound(err error) bool {
	return agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound
}

// resultOf is the label value of [claimsTotal].
func resultOf(err error) string {
	var create *cloudprovider.CreateError
	switch {
	case err == nil:
		return "claimed"
	case cloudprovider.IsInsufficientCapacityError(err):
		return "no_capacity"
	case errors.As(err, &create):
		return create.ConditionReason
	}
	return "error"
}
