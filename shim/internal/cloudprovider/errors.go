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
	// ReasonCatalogueNotSynced means that the agent has not been reached since the process started.
	ReasonCatalogueNotSynced = "CatalogueNotSynced"
	// ReasonNodeClassNotFound means that the NodeClaim's NodeClass does not exist.
	ReasonNodeClassNotFound = "NodeClassNotFound"
	// ReasonOverlaysNotReady means that NodeOverlays could not be applied yet.
	ReasonOverlaysNotReady = "NodeOverlaysNotReady"
	// ReasonNodeGroupUnknown means that the claim exists but its node group could not be read.
	ReasonNodeGroupUnknown = "NodeGroupUnknown"
	// ReasonNodeGroupsNotFound means that the agent knows none of the candidates, or does not know
	// the Cluster.
	ReasonNodeGroupsNotFound = "NodeGroupsNotFound"
	// ReasonAgentUnreachable means that no answer arrived. The claim may exist.
	ReasonAgentUnreachable = "AgentUnreachable"
	// ReasonAgentRefused means that the agent does not know this client, or that the client may not
	// act for the Cluster.
	ReasonAgentRefused = "AgentRefused"
	// ReasonClaimConflict means that the claim lost races in the hub repeatedly.
	ReasonClaimConflict = "ClaimConflict"
	// ReasonClaimRejected means that the agent considers the request malformed.
	ReasonClaimRejected = "ClaimRejected"
	// ReasonAdoptionFailed means that it is not known whether the Machine chosen for the NodeClaim
	// can be adopted.
	ReasonAdoptionFailed = "AdoptionFailed"
	// ReasonAdoptionRefused means that the Machine that another provider chose for the NodeClaim
	// cannot be adopted and has no provider ID yet.
	ReasonAdoptionRefused = "AdoptionRefused"
	// ReasonClaimFailed means any other error.
	ReasonClaimFailed = "ClaimFailed"
)

// errNoCandidate means that no node group fits, and that no earlier call created a claim.
var errNoCandidate = errors.New("no candidate")

// maxConditionMessage keeps conditions readable. The log has the full message.
const maxConditionMessage = 1024

// explain converts the agent's answer to a claim into the error that core acts on:
//
//	agent                          | core                     | effect
//	no candidate in the catalogue  | InsufficientCapacity     | core deletes the NodeClaim and reschedules its pods; see catalogue.MarkRefused
//	RESOURCE_EXHAUSTED, no room    | InsufficientCapacity     | as above; the candidates are marked unavailable for a while
//	RESOURCE_EXHAUSTED, too many   | InsufficientCapacity     | as without a candidate: a NodeClaim that waits for its launch holds up all of core
//	SPOKE_MISMATCH                 | CreateError              | retried; needs an operator's action
//	FAILED_PRECONDITION            | InsufficientCapacity     | as above: groups that are paused or closed, or a hub that refuses claims
//	ABORTED, claim ended           | InsufficientCapacity     | core deletes the NodeClaim: its id can never be claimed again
//	ABORTED, conflict              | CreateError              | retried a few times without delay, then with core's backoff
//	NOT_FOUND                      | CreateError              | retried with the candidates of a newer catalogue
//	UNAVAILABLE, DEADLINE_EXCEEDED | CreateError              | retried with the same id; the claim may exist
//	UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT, others | CreateError | retried; needs an operator's action
//
// explain never returns NodeClassNotReady, which is for a NodeClass whose condition says so. Core
// would delete the NodeClaim and create the next one at once, for as long as the NodeClass is
// ready. Core gives up a NodeClaim whose creation keeps failing after the launch timeout.
func (c *CloudProvider) explain(err error, candidates []*instancetype.Group, refused map[string]error) error {
	switch {
	case errors.Is(err, errNoCandidate):
		return cloudprovider.NewInsufficientCapacityError(errors.New(summary(refused)))
	case agenterrors.IsSpokeMismatch(err):
		return createError(err, ReasonAgentRefused)
	case agenterrors.IsNoRoom(err), agenterrors.IsRefused(err):
		// The agent has rejected all of them, whatever the error has room to name.
		c.Catalogue.MarkUnavailable(lo.Map(candidates, func(g *instancetype.Group, _ int) string { return g.ID })...)
		return cloudprovider.NewInsufficientCapacityError(err)
	case agenterrors.IsEnded(err):
		return cloudprovider.NewInsufficientCapacityError(fmt.Errorf("the claim cannot be created again: %w", err))
	case agenterrors.IsTooMany(err):
		return cloudprovider.NewInsufficientCapacityError(err)
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

// createError returns an error that core shows as a condition and retries. A message that differs
// between attempts would be a change of the NodeClaim, which core retries without backoff.
func createError(err error, reason string) error {
	return cloudprovider.NewCreateError(err, reason, lo.Ellipsis(agenterrors.Describe(err), maxConditionMessage))
}

// isClaimNotFound reports whether the agent is certain that there is no such claim. An unknown
// Cluster does not count: a misconfiguration, or a hub that is being restored, must not end Nodes.
func isClaimNotFound(err error) bool {
	return agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound
}

// resultOf is the label value of [claimsTotal].
func resultOf(err error) string {
	var create *cloudprovider.CreateError
	switch {
	case err == nil:
		return resultClaimed
	case cloudprovider.IsInsufficientCapacityError(err):
		return resultNoCapacity
	case cloudprovider.IsNodeClassNotReadyError(err):
		return resultNodeClassNotReady
	case errors.As(err, &create):
		return create.ConditionReason
	}
	return resultError
}
