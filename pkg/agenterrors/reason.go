package agenterrors

// Domain is the domain of every ErrorInfo of the agent's API.
const Domain = "agent.karpenter.cluster.x-k8s.io"

// Reason is the reason of an ErrorInfo: what happened, as a constant that programs can compare.
type Reason string

const (
	// ReasonInvalidField comes with INVALID_ARGUMENT: fields are malformed, and [FieldViolations] names them.
	ReasonInvalidField Reason = "INVALID_FIELD"
	// ReasonThrottled comes with RESOURCE_EXHAUSTED: the caller has too much open, or calls too often. Nothing was done;
	// [RetryDelay] tells when to call again.
	ReasonThrottled Reason = "THROTTLED"
	// ReasonTooLarge comes with RESOURCE_EXHAUSTED: the request has more bytes than the method takes.
	ReasonTooLarge Reason = "TOO_LARGE"
	// ReasonInvalidToken comes with INVALID_ARGUMENT: the token was not made by ListClaims for this Cluster and holder.
	ReasonInvalidToken Reason = "INVALID_TOKEN"
	// ReasonStaleToken comes with FAILED_PRECONDITION: the token is too old, or was made from an incomplete view.
	ReasonStaleToken Reason = "STALE_TOKEN"
	// ReasonSpokeMismatch comes with FAILED_PRECONDITION: the live set was read in another cluster than the one that made the holder's claims.
	ReasonSpokeMismatch Reason = "SPOKE_MISMATCH"

	// ReasonUnauthenticated comes with UNAUTHENTICATED: the caller presented no usable identity.
	ReasonUnauthenticated Reason = "UNAUTHENTICATED"
	// ReasonPermissionDenied comes with PERMISSION_DENIED: the identity may not do this, or not for this Cluster.
	ReasonPermissionDenied Reason = "PERMISSION_DENIED"

	// ReasonClusterNotFound comes with NOT_FOUND.
	ReasonClusterNotFound Reason = "CLUSTER_NOT_FOUND"
	// ReasonNodeGroupNotFound comes with NOT_FOUND, or describes one candidate among others.
	ReasonNodeGroupNotFound Reason = "NODE_GROUP_NOT_FOUND"
	// ReasonClaimNotFound comes with NOT_FOUND.
	ReasonClaimNotFound Reason = "CLAIM_NOT_FOUND"
	// ReasonMachineNotFound comes with NOT_FOUND.
	ReasonMachineNotFound Reason = "MACHINE_NOT_FOUND"

	// ReasonNoRoom describes one candidate that is at its max size, was left alone after a failure, or for which no Machine can be made now:
	// a quota is used up, or Cluster API makes none. It comes with RESOURCE_EXHAUSTED.
	ReasonNoRoom Reason = "NO_ROOM"
	// ReasonNotOpen describes one candidate that is paused, being deleted or not open to claims. When all candidates are, it
	// comes with FAILED_PRECONDITION.
	ReasonNotOpen Reason = "NOT_OPEN"

	// ReasonTooManyClaims comes with RESOURCE_EXHAUSTED and RetryInfo: the Cluster has as many claims, or as many ended ones that are
	// remembered, as it may have, or as many were made or released lately as may be.
	ReasonTooManyClaims Reason = "TOO_MANY_CLAIMS"

	// ReasonClaimEnded comes with ABORTED: the claim id has ended or is being released, and must not be used again.
	ReasonClaimEnded Reason = "CLAIM_ENDED"
	// ReasonNotReturnable comes with FAILED_PRECONDITION: the claim has no machine that could be left to the user.
	ReasonNotReturnable Reason = "NOT_RETURNABLE"
	// ReasonCertificatesNotIssued comes with FAILED_PRECONDITION: this agent issues no certificates, or not for this Cluster.
	ReasonCertificatesNotIssued Reason = "CERTIFICATES_NOT_ISSUED"
	// ReasonConflict comes with ABORTED: a race against another writer was lost, and the call may be repeated at once.
	ReasonConflict Reason = "CONFLICT"

	// ReasonNotSynced comes with UNAVAILABLE: the agent's view of the hub is not complete yet.
	ReasonNotSynced Reason = "NOT_SYNCED"
	// ReasonShuttingDown comes with UNAVAILABLE.
	ReasonShuttingDown Reason = "SHUTTING_DOWN"
	// ReasonClusterPaused comes with UNAVAILABLE: the Cluster is paused, so that what is missing may be on its way to another hub.
	ReasonClusterPaused Reason = "CLUSTER_PAUSED"
	// ReasonHubUnreachable comes with UNAVAILABLE: the hub's API server did not answer.
	ReasonHubUnreachable Reason = "HUB_UNREACHABLE"
)

// Keys of the metadata of an ErrorInfo.
const (
	// MetadataNodeGroup holds the id of the node group that the ErrorInfo describes.
	MetadataNodeGroup = "node_group"
	// MetadataReason holds why in more detail: the name of an UnavailableReason for a candidate, the reason of the claim's
	// end for a claim.
	MetadataReason = "reason"
	// MetadataMessage holds the same in a sentence, for people.
	MetadataMessage = "message"
	// MetadataRetryAt holds when it may be worth asking again, RFC 3339. Absent when unknown.
	MetadataRetryAt = "retry_at"
	// MetadataClaimID holds the id of the claim that the ErrorInfo describes.
	MetadataClaimID = "claim_id"
	// MetadataPhase holds the phase of that claim, `ENDED` or `RELEASING`.
	MetadataPhase = "phase"
)
