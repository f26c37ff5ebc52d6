package agenterrors

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// End is how a claim ended, or is ending.
type End struct {
	// ClaimID is the claim's id.
	ClaimID string
	// Releasing is true while the claim's machine is still on its way out, false once it has ended.
	Releasing bool
	// Reason is the claim's reason, one CamelCase word such as `Released` or `MachineLost`. May be empty.
	Reason string
	// Message is the same in a sentence, for people. May be empty.
	Message string
}

// ReasonOf returns the reason of err's first ErrorInfo of this [Domain], or "" when it has none: err is nil, does not come
// from an agent, or was made by the network in between.
func ReasonOf(err error) Reason {
	for _, info := range errorInfos(err) {
		return Reason(info.GetReason())
	}
	return ""
}

// IsNoRoom reports that no candidate has room now. Use other candidates, or wait; see [Rejections] and [RetryDelay].
func IsNoRoom(err error) bool { return is(err, codes.ResourceExhausted) && len(Rejections(err)) > 0 }

// IsTooMany reports that the Cluster has as many claims as it may have. Repeat after [RetryDelay], or release claims.
func IsTooMany(err error) bool {
	return is(err, codes.ResourceExhausted) && ReasonOf(err) == ReasonTooManyClaims
}

// IsEnded reports that the claim's id has ended or is being released. Never repeat this id; [EndedAs] says how it ended.
func IsEnded(err error) bool { return is(err, codes.Aborted) && ReasonOf(err) == ReasonClaimEnded }

// IsNotReturnable reports that the claim has no machine that could be left to the user: it has none yet, or that is being removed.
func IsNotReturnable(err error) bool { return ReasonOf(err) == ReasonNotReturnable }

// IsCertificatesNotIssued reports that this agent issues no certificates, or not for this Cluster. Take them from elsewhere, or have the Cluster
// onboarded.
func IsCertificatesNotIssued(err error) bool { return ReasonOf(err) == ReasonCertificatesNotIssued }

// IsConflict reports that a race against another writer was lost. Repeat at once with the same id.
func IsConflict(err error) bool { return is(err, codes.Aborted) && ReasonOf(err) != ReasonClaimEnded }

// IsNotFound reports that the agent is certain that what was asked for does not exist; [ReasonOf] says what.
func IsNotFound(err error) bool { return is(err, codes.NotFound) && ReasonOf(err) != "" }

// IsRefused reports that the state of the hub forbids the call until someone acts: paused, being deleted, not open to claims
// ([Rejections]), or a token that must be taken anew ([ReasonStaleToken]).
func IsRefused(err error) bool { return is(err, codes.FailedPrecondition) }

// IsStaleToken reports that a SyncClaims token must be taken anew.
func IsStaleToken(err error) bool { return ReasonOf(err) == ReasonStaleToken }

// IsSpokeMismatch reports that the live set was read in another cluster than the one that made the holder's claims.
func IsSpokeMismatch(err error) bool { return ReasonOf(err) == ReasonSpokeMismatch }

// IsUnauthenticated reports that the caller presented no usable identity.
func IsUnauthenticated(err error) bool { return is(err, codes.Unauthenticated) }

// IsPermissionDenied reports that the identity may not do this, or not for this Cluster.
func IsPermissionDenied(err error) bool { return is(err, codes.PermissionDenied) }

// IsInvalidArgument reports that the request is malformed; [FieldViolations] says where.
func IsInvalidArgument(err error) bool { return is(err, codes.InvalidArgument) }

// IsUnavailable reports that the agent gave no answer that anything may be concluded from: unreachable, not synced, shutting
// down, too slow, or asked too often ([IsThrottled]). What was asked for may have happened. Repeat with backoff.
func IsUnavailable(err error) bool {
	return is(err, codes.Unavailable) || is(err, codes.DeadlineExceeded) || IsThrottled(err)
}

// IsThrottled reports that the caller asks for too much at once. Nothing was done; [RetryDelay] tells when to call again.
func IsThrottled(err error) bool { return ReasonOf(err) == ReasonThrottled }

// Rejections returns why each candidate of a CreateClaim cannot be had, best first. Empty for any other error.
func Rejections(err error) []Rejection {
	var rejections []Rejection
	for _, info := range errorInfos(err) {
		reason := Reason(info.GetReason())
		switch reason {
		case ReasonNoRoom, ReasonNotOpen, ReasonNodeGroupNotFound:
		default:
			continue
		}
		metadata := info.GetMetadata()
		rejection := Rejection{
			NodeGroup: metadata[MetadataNodeGroup],
			Reason:    reason,
			Unavailable: agentv1alpha1.UnavailableReason(
				agentv1alpha1.UnavailableReason_value[metadata[MetadataReason]]),
			Message: metadata[MetadataMessage],
		}
		if at, err := time.Parse(time.RFC3339Nano, metadata[MetadataRetryAt]); err == nil {
			rejection.RetryAt = at
		}
		rejections = append(rejections, rejection)
	}
	return rejections
}

// EndedAs returns how the claim ended, and false when err is not about an ended claim.
func EndedAs(err error) (End, bool) {
	for _, info := range errorInfos(err) {
		if Reason(info.GetReason()) != ReasonClaimEnded {
			continue
		}
		metadata := info.GetMetadata()
		return End{
			ClaimID:   metadata[MetadataClaimID],
			Releasing: metadata[MetadataPhase] == "RELEASING",
			Reason:    metadata[MetadataReason],
			Message:   metadata[MetadataMessage],
		}, true
	}
	return End{}, false
}

// FieldViolations returns the fields of the request that are malformed. Empty for any other error.
func FieldViolations(err error) []FieldViolation {
	var violations []FieldViolation
	for _, detail := range details(err) {
		badRequest, ok := detail.(*errdetails.BadRequest)
		if !ok {
			continue
		}
		for _, v := range badRequest.GetFieldViolations() {
			violations = append(violations, FieldViolation{Field: v.GetField(), Description: v.GetDescription()})
		}
	}
	return violations
}

// RetryDelay returns how long to wait before the call may be worth repeating, counted from when the agent answered, and
// false when err does not say.
func RetryDelay(err error) (time.Duration, bool) {
	for _, detail := range details(err) {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration(), true
		}
	}
	return 0, false
}

func is(err error, code codes.Code) bool {
	return err != nil && status.Code(err) == code
}

func errorInfos(err error) []*errdetails.ErrorInfo {
	var infos []*errdetails.ErrorInfo
	for _, detail := range details(err) {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == Domain {
			infos = append(infos, info)
		}
	}
	return infos
}

func details(err error) []any {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return nil
	}
	return s.Details()
}
