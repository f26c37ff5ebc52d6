package agenterrors

import (
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Rejection is why a candidate of a CreateClaim was rejected.
type Rejection struct {
	// NodeGroup is the candidate's ID.
	NodeGroup string
	// Reason is [ReasonNoRoom], [ReasonNotOpen] or [ReasonNodeGroupNotFound].
	Reason Reason
	// Unavailable is the reason that NodeGroup.availability would have. It is UNSPECIFIED if the
	// node group was not found.
	Unavailable agentv1alpha1.UnavailableReason
	// Message is the reason as a sentence, for display.
	Message string
	// RetryAt is when a retry may succeed, or zero if unknown.
	RetryAt time.Time
}

// FieldViolation identifies an invalid field of a request.
type FieldViolation struct {
	// Field is the field's path, for example `cluster.namespace` or `candidates[2]`.
	Field string
	// Description states what is wrong, for display.
	Description string
}

// Rejected is the error of a CreateClaim without an acceptable candidate: RESOURCE_EXHAUSTED if at
// least one candidate merely has no room, else FAILED_PRECONDITION if at least one exists, else
// NOT_FOUND. It has an ErrorInfo for each rejection, in order, and RetryInfo if a retry time is
// known. now is the agent's clock, from which the delay in RetryInfo is computed. Without
// rejections it is NOT_FOUND.
func Rejected(now time.Time, rejections ...Rejection) error {
	code := codes.NotFound
	var retryAt time.Time
	details := make([]protoadapt.MessageV1, 0, len(rejections)+1)
	sentences := make([]string, 0, len(rejections))
	for i, r := range rejections {
		switch r.Reason {
		case ReasonNoRoom:
			code = codes.ResourceExhausted
		case ReasonNotOpen:
			if code == codes.NotFound {
				code = codes.FailedPrecondition
			}
		default:
		}
		metadata := map[string]string{MetadataNodeGroup: r.NodeGroup}
		if r.Unavailable != agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_UNSPECIFIED {
			metadata[MetadataReason] = r.Unavailable.String()
		}
		if r.Message != "" && i < maxRejectionMessages {
			metadata[MetadataMessage] = bounded(r.Message, maxText)
		}
		if !r.RetryAt.IsZero() {
			metadata[MetadataRetryAt] = r.RetryAt.UTC().Format(time.RFC3339Nano)
			if retryAt.IsZero() || r.RetryAt.Before(retryAt) {
				retryAt = r.RetryAt
			}
		}
		details = append(details, errorInfo(r.Reason, metadata))
		sentences = append(sentences, bounded(strings.TrimSuffix(r.NodeGroup+": "+r.Message, ": "), maxText))
	}
	if !retryAt.IsZero() {
		details = append(details, retryInfo(retryAt.Sub(now)))
	}
	message := "no candidate exists"
	switch code {
	case codes.ResourceExhausted:
		message = "no candidate has room"
	case codes.FailedPrecondition:
		message = "no candidate is open to claims"
	}
	if len(sentences) > 0 {
		message += ": " + abridge(sentences)
	}
	return made(code, message, details...)
}

// InvalidArgument means that the named fields of the request are malformed.
func InvalidArgument(violations ...FieldViolation) error {
	return invalidArgument(ReasonInvalidField, violations...)
}

// Throttled means that the caller has too much open or calls too often, and when to retry. The call
// had no effect.
func Throttled(message string, after time.Duration) error {
	return made(codes.ResourceExhausted, message, errorInfo(ReasonThrottled, nil), retryInfo(after))
}

// TooLarge means that the request is larger than the method accepts.
func TooLarge(message string) error {
	return made(codes.ResourceExhausted, message, errorInfo(ReasonTooLarge, nil))
}

// InvalidToken means that a SyncClaims token was not issued by ListClaims for this Cluster and
// holder.
func InvalidToken(description string) error {
	return invalidArgument(ReasonInvalidToken, FieldViolation{Field: "token", Description: description})
}

// StaleToken means that a SyncClaims token is too old, or was issued from an incomplete view.
func StaleToken(message string) error {
	return made(codes.FailedPrecondition, message, errorInfo(ReasonStaleToken, nil))
}

// SpokeMismatch means that a live set or a new claim comes from another cluster than the one that
// made the holder's claims, or that sent the last set.
func SpokeMismatch(message string) error {
	return made(codes.FailedPrecondition, message, errorInfo(ReasonSpokeMismatch, nil))
}

// Unauthenticated means that the caller presented no usable identity.
func Unauthenticated(message string) error {
	return made(codes.Unauthenticated, message, errorInfo(ReasonUnauthenticated, nil))
}

// PermissionDenied means that the identity may not make this call. The message must not reveal
// whether the Cluster exists.
func PermissionDenied(message string) error {
	return made(codes.PermissionDenied, message, errorInfo(ReasonPermissionDenied, nil))
}

// TooManyClaims means that the Cluster has reached its limit of claims, or of claims created or
// released recently, and when a retry may succeed.
func TooManyClaims(message string, retryAfter time.Duration) error {
	return made(codes.ResourceExhausted, message, errorInfo(ReasonTooManyClaims, nil), retryInfo(retryAfter))
}

// ClusterNotFound means that the Cluster does not exist.
func ClusterNotFound(cluster *agentv1alpha1.ClusterRef) error {
	return made(codes.NotFound, fmt.Sprintf("cluster %s/%s does not exist", cluster.GetNamespace(), cluster.GetName()),
		errorInfo(ReasonClusterNotFound, nil))
}

// NodeGroupNotFound means that the Cluster has no such node group, or that it has not opted in.
func NodeGroupNotFound(id string) error {
	return made(codes.NotFound, fmt.Sprintf("node group %q does not exist in this cluster or has not opted in", id),
		errorInfo(ReasonNodeGroupNotFound, map[string]string{MetadataNodeGroup: id}))
}

// ClaimNotFound means that the claim was certainly never made, or that its end is no longer
// retained.
func ClaimNotFound(claimID string) error {
	return made(codes.NotFound, fmt.Sprintf("claim %q was never created, or its tombstone was deleted", claimID),
		errorInfo(ReasonClaimNotFound, map[string]string{MetadataClaimID: claimID}))
}

// MachineNotFound means that the Cluster's node groups have no such machine.
func MachineNotFound(name string) error {
	return made(codes.NotFound, fmt.Sprintf("machine %q does not exist in this cluster's node groups", name),
		errorInfo(ReasonMachineNotFound, nil))
}

// ClaimEnded means that the claim with this ID has ended or is being released. It includes the
// claim's phase, reason and message.
func ClaimEnded(claim *agentv1alpha1.Claim) error {
	phase := strings.TrimPrefix(claim.GetPhase().String(), "CLAIM_PHASE_")
	metadata := map[string]string{MetadataClaimID: claim.GetClaimId(), MetadataPhase: phase}
	message := fmt.Sprintf("claim %q is %s and its id is never reused", claim.GetClaimId(), strings.ToLower(phase))
	if reason := claim.GetReason(); reason != "" {
		metadata[MetadataReason] = reason
		message += ": " + reason
	}
	if text := claim.GetMessage(); text != "" {
		metadata[MetadataMessage] = text
		message += ": " + text
	}
	return made(codes.Aborted, message, errorInfo(ReasonClaimEnded, metadata))
}

// NotReturnable means that the claim has no machine that can be returned to the user. The message
// states why.
func NotReturnable(message string) error {
	return made(codes.FailedPrecondition, message, errorInfo(ReasonNotReturnable, nil))
}

// CertificatesNotIssued means that the caller must get its certificates elsewhere.
func CertificatesNotIssued(message string) error {
	return made(codes.FailedPrecondition, message, errorInfo(ReasonCertificatesNotIssued, nil))
}

// Conflict means that the call lost a race against another writer. It can be repeated at once with
// the same ID.
func Conflict(message string) error {
	return made(codes.Aborted, message, errorInfo(ReasonConflict, nil))
}

// NotSynced means that the agent's view of the hub is not complete yet.
func NotSynced(message string) error {
	return made(codes.Unavailable, message, errorInfo(ReasonNotSynced, nil))
}

// ClusterPaused means that nothing is concluded from missing objects, because the Cluster is
// paused.
func ClusterPaused(message string) error {
	return made(codes.Unavailable, message, errorInfo(ReasonClusterPaused, nil))
}

// ShuttingDown means that the agent is shutting down.
func ShuttingDown() error {
	return made(codes.Unavailable, "the agent is shutting down", errorInfo(ReasonShuttingDown, nil))
}

// HubUnreachable means that the hub's API server did not respond. The call may have had an effect.
func HubUnreachable(message string) error {
	return made(codes.Unavailable, message, errorInfo(ReasonHubUnreachable, nil))
}

// RightsChanged means that the caller of a watch may read other Clusters than when the watch began.
func RightsChanged(message string) error {
	return made(codes.Unavailable, message, errorInfo(ReasonRightsChanged, nil))
}

func invalidArgument(reason Reason, violations ...FieldViolation) error {
	badRequest := &errdetails.BadRequest{}
	sentences := make([]string, 0, len(violations))
	for i, v := range violations {
		field, description := bounded(v.Field, maxText), bounded(v.Description, maxText)
		if i < maxViolations {
			badRequest.FieldViolations = append(badRequest.FieldViolations, &errdetails.BadRequest_FieldViolation{
				Field: field, Description: description,
			})
		}
		sentences = append(sentences, bounded(field+": "+description, maxText))
	}
	return made(codes.InvalidArgument, "invalid request: "+abridge(sentences), errorInfo(reason, nil), badRequest)
}

func errorInfo(reason Reason, metadata map[string]string) *errdetails.ErrorInfo {
	return &errdetails.ErrorInfo{
		Reason:   string(reason),
		Domain:   Domain,
		Metadata: lo.MapValues(metadata, func(value, _ string) string { return valid(value) }),
	}
}

func retryInfo(delay time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(max(delay, 0))}
}

func made(code codes.Code, message string, details ...protoadapt.MessageV1) error {
	s := status.New(code, bounded(message, maxMessage))
	detailed, err := s.WithDetails(details...)
	if err != nil {
		// This needs a detail that cannot be marshalled. The code and the message still tell what
		// to do.
		return s.Err()
	}
	return detailed.Err()
}

// valid replaces what protobuf strings cannot hold, because errors quote users' input.
func valid(s string) string {
	return strings.ToValidUTF8(s, "\uFFFD")
}

// An error is sent in HTTP/2 headers. The other side, and every proxy in between, limits their
// size, and a larger error would break the connection instead of being read.
const (
	// maxViolations is how many malformed fields an error lists.
	maxViolations = 16
	// maxText is the maximum length in bytes of a text that quotes a caller or an infrastructure
	// provider.
	maxText = 512
	// maxMessage is the maximum length of an error's message in bytes.
	maxMessage = 4096
	// maxRejectionMessages is how many candidates' messages an error includes. The names, reasons
	// and retry times of all candidates are included.
	maxRejectionMessages = 64
)

// bounded is like [valid], and truncates the text to most bytes.
func bounded(s string, most int) string {
	const cut = "…"
	if len(s) <= most {
		return valid(s)
	}
	return valid(s[:most-len(cut)]) + cut
}

// abridge joins sentences for a readable message. Programs read the details instead.
func abridge(sentences []string) string {
	const shown = 5
	if len(sentences) <= shown {
		return strings.Join(sentences, "; ")
	}
	return fmt.Sprintf("%s; and %d more", strings.Join(sentences[:shown], "; "), len(sentences)-shown)
}
