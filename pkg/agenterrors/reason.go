package agenterrors

// Domain is the domain of every ErrorInfo of the agent's API.
const Domain = "agent.karpenter.cluster.x-k8s.io"

// Reason is the reason of an ErrorInfo: the cause, as a constant that programs can compare.
type Reason string

const (
	// ReasonInvalidField comes with INVALID_ARGUMENT: fields are malformed. [FieldViolations]
	// returns them.
	ReasonInvalidField Reason = "INVALID_FIELD"
	// ReasonThrottled comes with RESOURCE_EXHAUSTED: the caller has too much open or calls too
	// often. The call had no effect; [RetryDelay] returns when to retry.
	ReasonThrottled Reason = "THROTTLED"
	// ReasonTooLarge comes with RESOURCE_EXHAUSTED: the request is larger than the method accepts.
	ReasonTooLarge Reason = "TOO_LARGE"
	// ReasonInvalidToken comes with INVALID_ARGUMENT: the token was not issued by ListClaims for
	// this Cluster and holder.
	ReasonInvalidToken Reason = "INVALID_TOKEN"
	// ReasonStaleToken comes with FAILED_PRECONDITION: the token is too old, or was issued from an
	// incomplete view.
	ReasonStaleToken Reason = "STALE_TOKEN"
	// ReasonSpokeMismatch comes with FAILED_PRECONDITION: the live set or the new claim comes from
	// another cluster than the one that made the holder's claims, or that sent the last set.
	ReasonSpokeMismatch Reason = "SPOKE_MISMATCH"

	// ReasonUnauthenticated comes with UNAUTHENTICATED: the caller presented no usable identity.
	ReasonUnauthenticated Reason = "UNAUTHENTICATED"
	// ReasonPermissionDenied comes with PERMISSION_DENIED: the identity may not make this call, or
	// not for this Cluster.
	ReasonPermissionDenied Reason = "PERMISSION_DENIED"

	// ReasonClusterNotFound comes with NOT_FOUND.
	ReasonClusterNotFound Reason = "CLUSTER_NOT_FOUND"
	// ReasonNodeGroupNotFound comes with NOT_FOUND, or describes one of several candidates.
	ReasonNodeGroupNotFound Reason = "NODE_GROUP_NOT_FOUND"
	// ReasonClaimNotFound comes with NOT_FOUND.
	ReasonClaimNotFound Reason = "CLAIM_NOT_FOUND"
	// ReasonMachineNotFound comes with NOT_FOUND.
	ReasonMachineNotFound Reason = "MACHINE_NOT_FOUND"

	// ReasonNoRoom comes with RESOURCE_EXHAUSTED. It describes a candidate that is at its max size,
	// cools down after a failure, or cannot get another Machine now: a quota is exhausted, or
	// Cluster API creates none.
	ReasonNoRoom Reason = "NO_ROOM"
	// ReasonNotOpen describes a candidate that is paused, being deleted or otherwise not open to
	// claims. It comes with FAILED_PRECONDITION, unless another candidate has [ReasonNoRoom].
	ReasonNotOpen Reason = "NOT_OPEN"

	// ReasonTooManyClaims comes with RESOURCE_EXHAUSTED and RetryInfo: the Cluster has reached its
	// limit of claims, of retained ended claims, or of claims created or released recently.
	ReasonTooManyClaims Reason = "TOO_MANY_CLAIMS"

	// ReasonWriteRefused comes with FAILED_PRECONDITION: a policy or a webhook of the hub refuses
	// to create the claim's object. Only the hub shows the cause.
	ReasonWriteRefused Reason = "WRITE_REFUSED"

	// ReasonClaimEnded comes with ABORTED: the claim with this ID has ended or is being released.
	// The ID must not be used again.
	ReasonClaimEnded Reason = "CLAIM_ENDED"
	// ReasonNotReturnable comes with FAILED_PRECONDITION: the claim has no machine that can be
	// returned to the user.
	ReasonNotReturnable Reason = "NOT_RETURNABLE"
	// ReasonCertificatesNotIssued comes with FAILED_PRECONDITION: this agent issues no
	// certificates, or none for this Cluster.
	ReasonCertificatesNotIssued Reason = "CERTIFICATES_NOT_ISSUED"
	// ReasonConflict comes with ABORTED: the call lost a race against another writer, and may be
	// repeated at once.
	ReasonConflict Reason = "CONFLICT"

	// ReasonNotSynced comes with UNAVAILABLE: the agent's view of the hub is not complete yet.
	ReasonNotSynced Reason = "NOT_SYNCED"
	// ReasonShuttingDown comes with UNAVAILABLE.
	ReasonShuttingDown Reason = "SHUTTING_DOWN"
	// ReasonClusterPaused comes with UNAVAILABLE: the Cluster is paused, so missing objects may
	// have been moved to another hub.
	ReasonClusterPaused Reason = "CLUSTER_PAUSED"
	// ReasonRightsChanged comes with UNAVAILABLE: the caller of a watch may read other Clusters
	// than when the watch began. A new watch shows them.
	ReasonRightsChanged Reason = "RIGHTS_CHANGED"
	// ReasonHubUnreachable comes with UNAVAILABLE: the hub's API server did not respond.
	ReasonHubUnreachable Reason = "HUB_UNREACHABLE"
)

// These are keys of the metadata of an ErrorInfo.
const (
	// MetadataNodeGroup is the ID of the node group that the ErrorInfo describes.
	MetadataNodeGroup = "node_group"
	// MetadataReason is a more specific reason: the name of an UnavailableReason for a candidate,
	// the reason of the end for a claim.
	MetadataReason = "reason"
	// MetadataMessage is the reason as a sentence, for display.
	MetadataMessage = "message"
	// MetadataRetryAt is when a retry may succeed, as RFC 3339. It is absent if unknown.
	MetadataRetryAt = "retry_at"
	// MetadataClaimID is the ID of the claim that the ErrorInfo describes.
	MetadataClaimID = "claim_id"
	// MetadataPhase is the phase of that claim, `ENDED` or `RELEASING`.
	MetadataPhase = "phase"
)
