package agenterrors

import (
	"errors"
	"fmt"
	"regexp"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// End is how a claim has ended, or is ending.
type End struct {
	// ClaimID is the ID of the claim.
	ClaimID string
	// Releasing is true while the claim's machine is being removed, and false once the claim has
	// ended.
	Releasing bool
	// Reason is the claim's reason, a CamelCase word such as `Released` or `MachineLost`. It may be
	// empty.
	Reason string
	// Message is the reason as a sentence, for display. It may be empty.
	Message string
}

// ReasonOf returns the reason of err's first ErrorInfo of this [Domain]. It returns "" if there is
// none: err is nil, does not come from an agent, or was created by the network in between.
func ReasonOf(err error) Reason {
	for _, info := range errorInfos(err) {
		return Reason(info.GetReason())
	}
	return ""
}

// IsNoRoom reports that no candidate currently has room. Callers should use other candidates or
// wait; see [Rejections] and [RetryDelay].
func IsNoRoom(err error) bool { return is(err, codes.ResourceExhausted) && len(Rejections(err)) > 0 }

// IsTooMany reports that the Cluster has reached a limit of claims. Callers should retry after
// [RetryDelay], or release claims.
func IsTooMany(err error) bool {
	return is(err, codes.ResourceExhausted) && ReasonOf(err) == ReasonTooManyClaims
}

// IsEnded reports that the claim with this ID has ended or is being released. The ID must never be
// used again; [EndedAs] returns how the claim ended.
func IsEnded(err error) bool { return is(err, codes.Aborted) && ReasonOf(err) == ReasonClaimEnded }

// IsNotReturnable reports that the claim has no machine that can be returned to the user: it has
// none yet, or the machine is being removed.
func IsNotReturnable(err error) bool { return ReasonOf(err) == ReasonNotReturnable }

// IsCertificatesNotIssued reports that this agent issues no certificates, or none for this Cluster.
// Callers should get them elsewhere, or have the Cluster onboarded.
func IsCertificatesNotIssued(err error) bool { return ReasonOf(err) == ReasonCertificatesNotIssued }

// IsConflict reports that the call lost a race against another writer. Callers should repeat it at
// once with the same ID.
func IsConflict(err error) bool { return is(err, codes.Aborted) && ReasonOf(err) != ReasonClaimEnded }

// IsNotFound reports that the requested object certainly does not exist. [ReasonOf] identifies its
// kind.
func IsNotFound(err error) bool { return is(err, codes.NotFound) && ReasonOf(err) != "" }

// IsRefused reports that the state of the hub forbids the call until that changes: for example
// because all candidates are paused, being deleted or not open to claims ([Rejections]), or because
// a token must be renewed ([ReasonStaleToken]).
func IsRefused(err error) bool { return is(err, codes.FailedPrecondition) }

// IsStaleToken reports that the SyncClaims token must be renewed.
func IsStaleToken(err error) bool { return ReasonOf(err) == ReasonStaleToken }

// IsSpokeMismatch reports that the live set or the new claim comes from another cluster than the
// one that made the holder's claims, or that sent the last set.
func IsSpokeMismatch(err error) bool { return ReasonOf(err) == ReasonSpokeMismatch }

// IsUnauthenticated reports that the caller presented no usable identity.
func IsUnauthenticated(err error) bool { return is(err, codes.Unauthenticated) }

// IsPermissionDenied reports that the identity may not make this call, or not for this Cluster.
func IsPermissionDenied(err error) bool { return is(err, codes.PermissionDenied) }

// IsInvalidArgument reports that the request is malformed. [FieldViolations] returns the fields.
func IsInvalidArgument(err error) bool { return is(err, codes.InvalidArgument) }

// IsUnavailable reports that the agent gave no conclusive response: it is unreachable, not synced,
// shutting down or too slow, or the caller was throttled ([IsThrottled]). The call may have had an
// effect. Callers should retry with backoff.
func IsUnavailable(err error) bool {
	return is(err, codes.Unavailable) || is(err, codes.DeadlineExceeded) || IsThrottled(err)
}

// IsThrottled reports that the caller requested too much at once. The call had no effect;
// [RetryDelay] returns when to retry.
func IsThrottled(err error) bool { return ReasonOf(err) == ReasonThrottled }

// Rejections returns why the candidates of a CreateClaim were rejected, in their order. Those for
// which the error has no room are missing at the end; with short names, there is room for some
// fifteen. All candidates of the call were rejected, the missing ones too. A newer agent may give
// reasons that this package does not have. It is empty for any other error.
func Rejections(err error) []Rejection {
	var rejections []Rejection
	for _, info := range errorInfos(err) {
		metadata := info.GetMetadata()
		if _, ok := metadata[MetadataNodeGroup]; !ok {
			continue
		}
		rejection := Rejection{
			NodeGroup: metadata[MetadataNodeGroup],
			Reason:    Reason(info.GetReason()),
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

// EndedAs returns how the claim ended, and false if err is not about an ended claim.
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

// FieldViolations returns the malformed fields of the request. It is empty for any other error.
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

// RetryDelay returns how long to wait, from the time of the response, before a retry may succeed.
// It returns false if err does not contain a delay.
func RetryDelay(err error) (time.Duration, bool) {
	for _, detail := range details(err) {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration(), true
		}
	}
	return 0, false
}

// Describe returns the code and the message of the error's gRPC status, or the text of any other
// error. It omits what differs between attempts, such as the request ID, the time and the caller's
// own port. Use it for conditions: each change of a condition is a write.
func Describe(err error) string {
	var said interface{ GRPCStatus() *status.Status }
	if errors.As(err, &said) {
		message := ownAddress.ReplaceAllString(said.GRPCStatus().Message(), "")
		return fmt.Sprintf("%s: %s", said.GRPCStatus().Code(), presentTime.ReplaceAllString(message, "now is $1"))
	}
	return err.Error()
}

// ownAddress matches the caller's own address in an error of package net: "read tcp
// 10.0.0.1:4242->10.0.0.2:8443: …".
var ownAddress = regexp.MustCompile(`\S+:\d+->`)

// presentTime matches the time in an error of package crypto/x509 about a certificate's validity.
var presentTime = regexp.MustCompile(`current time \S+ is (before|after)`)

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
