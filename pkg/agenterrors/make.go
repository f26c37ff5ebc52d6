package agenterrors

import (
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
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
// NOT_FOUND. It has an ErrorInfo for each of the first rejections, in order, as many as it has room
// for, and RetryInfo if a retry time is known, that of the soonest of all. now is the agent's
// clock, from which the delay in RetryInfo is computed. Without rejections it is NOT_FOUND.
func Rejected(now time.Time, rejections ...Rejection) error {
	code := codes.NotFound
	var retryAt time.Time
	sentences := make([]string, 0, len(rejections))
	for _, r := range rejections {
		switch r.Reason {
		case ReasonNoRoom:
			code = codes.ResourceExhausted
		case ReasonNotOpen:
			if code == codes.NotFound {
				code = codes.FailedPrecondition
			}
		default:
		}
		if !r.RetryAt.IsZero() && (retryAt.IsZero() || r.RetryAt.Before(retryAt)) {
			retryAt = r.RetryAt
		}
		sentences = append(sentences, strings.TrimSuffix(r.NodeGroup+": "+r.Message, ": "))
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
	var details []protoadapt.MessageV1
	if !retryAt.IsZero() {
		details = append(details, retryInfo(retryAt.Sub(now)))
	}
	return made(code, message, append(details, infosOf(rejections, roomFor(code, message, details...))...)...)
}

// infosOf returns an ErrorInfo for each of the first rejections. The names and reasons come before
// the messages: a caller can use them.
func infosOf(rejections []Rejection, room int) []protoadapt.MessageV1 {
	var infos []*errdetails.ErrorInfo
	for _, r := range rejections {
		metadata := map[string]string{MetadataNodeGroup: r.NodeGroup}
		if r.Unavailable != agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_UNSPECIFIED {
			metadata[MetadataReason] = r.Unavailable.String()
		}
		if !r.RetryAt.IsZero() {
			metadata[MetadataRetryAt] = r.RetryAt.UTC().Format(time.RFC3339Nano)
		}
		info := errorInfo(r.Reason, metadata)
		if room -= sizeOf(info); room < 0 && len(infos) > 0 {
			break
		}
		infos = append(infos, info)
	}
	for i, info := range infos {
		if rejections[i].Message == "" {
			continue
		}
		without := sizeOf(info)
		info.Metadata[MetadataMessage] = bounded(rejections[i].Message)
		if room -= sizeOf(info) - without; room < 0 {
			delete(info.GetMetadata(), MetadataMessage)
			break
		}
	}
	return lo.Map(infos, func(info *errdetails.ErrorInfo, _ int) protoadapt.MessageV1 { return info })
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

// WriteRefused means that the hub refuses the creation of the claim's object, whatever the
// candidates. The message states where the cause is shown.
func WriteRefused(message string) error {
	return made(codes.FailedPrecondition, message, errorInfo(ReasonWriteRefused, nil))
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
	sentences := make([]string, 0, len(violations))
	for _, v := range violations {
		sentences = append(sentences, bounded(v.Field)+": "+v.Description)
	}
	message := "invalid request: " + abridge(sentences)
	info, badRequest := errorInfo(reason, nil), &errdetails.BadRequest{}
	room := roomFor(codes.InvalidArgument, message, info, badRequest)
	for i, v := range lo.Slice(violations, 0, maxViolations) {
		violation := &errdetails.BadRequest_FieldViolation{Field: bounded(v.Field), Description: bounded(v.Description)}
		if room -= sizeOf(violation); room < 0 && i > 0 {
			break
		}
		badRequest.FieldViolations = append(badRequest.FieldViolations, violation)
	}
	return made(codes.InvalidArgument, message, info, badRequest)
}

func errorInfo(reason Reason, metadata map[string]string) *errdetails.ErrorInfo {
	return &errdetails.ErrorInfo{
		Reason:   string(reason),
		Domain:   Domain,
		Metadata: lo.MapValues(metadata, func(value, _ string) string { return bounded(value) }),
	}
}

func retryInfo(delay time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(max(delay, 0))}
}

func made(code codes.Code, message string, details ...protoadapt.MessageV1) error {
	s := status.New(code, boundedHeader(message, maxMessage))
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
	// maxHeaders is how many bytes of headers an error takes at most. gRPC for Java accepts 8 KiB,
	// gRPC for C++ and Python refuses some errors from there on, and gRPC for Go announces the same
	// limit. The remainder is for the headers that every response has.
	maxHeaders = 7 << 10
	// maxViolations is how many malformed fields an error lists at most.
	maxViolations = 16
	// maxText is the maximum length in bytes of a text that quotes a caller or an infrastructure
	// provider.
	maxText = 512
	// maxMessage is the maximum length of the header with an error's message, in which a character
	// that is not ASCII takes three bytes for each of its own.
	maxMessage = 1024
)

// roomFor returns how many more bytes of details an error of this kind has room for. It may be
// negative.
func roomFor(code codes.Code, message string, details ...protoadapt.MessageV1) int {
	message = boundedHeader(message, maxMessage)
	s := &statuspb.Status{Code: int32(code), Message: message}
	used := proto.Size(s)
	for _, detail := range details {
		used += sizeOf(detail)
	}
	return base64.RawStdEncoding.DecodedLen(maxHeaders-headerLength(message)) - used
}

// sizeOf returns how many bytes a detail takes at most, before it is encoded for a header.
func sizeOf(detail protoadapt.MessageV1) int {
	const envelope = 64 // the name of the type, and lengths
	return proto.Size(protoadapt.MessageV2Of(detail)) + envelope
}

// headerLength returns how many bytes a message takes in its header, percent-encoded.
func headerLength(message string) int {
	length := 0
	for i := range len(message) {
		if c := message[i]; c < ' ' || c > '~' || c == '%' {
			length += len("%00")
		} else {
			length++
		}
	}
	return length
}

// boundedHeader is like [valid], and truncates a message to most bytes of its header.
func boundedHeader(message string, most int) string {
	const cut = "…"
	message = valid(message)
	if headerLength(message) <= most {
		return message
	}
	length := headerLength(cut)
	for i, r := range message {
		if length += headerLength(string(r)); length > most {
			return message[:i] + cut
		}
	}
	return message
}

// bounded is like [valid], and truncates the text to [maxText] bytes.
func bounded(s string) string {
	const cut = "…"
	if len(s) <= maxText {
		return valid(s)
	}
	return valid(s[:maxText-len(cut)]) + cut
}

// abridge joins sentences for a readable message: five at most, and those for which it has room.
// Programs read the details instead.
func abridge(sentences []string) string {
	const most, reserve = 5, 64 // reserve is for what comes before and after them
	shown, length := 0, 0
	for i, sentence := range lo.Slice(sentences, 0, most) {
		sentences[i] = boundedHeader(sentence, maxText)
		if length += headerLength(sentences[i]) + len("; "); length > maxMessage-reserve && shown > 0 {
			break
		}
		shown++
	}
	joined := strings.Join(sentences[:shown], "; ")
	if shown == len(sentences) {
		return joined
	}
	return fmt.Sprintf("%s; and %d more", joined, len(sentences)-shown)
}
