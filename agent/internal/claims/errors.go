package claims

import (
	"errors"
	"fmt"
	"strings"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

var (
	// ErrNotFound means that the API server was asked and has no such claim.
	ErrNotFound = errors.New("no such claim")
	// ErrConflict means that another writer was faster. The call can be repeated at once.
	ErrConflict = errors.New("lost a race against another writer")
	// ErrWriteRefused means that the API server or an admission policy refuses the agent's write
	// for its content, and not because of a race. Repeating the call helps only after a person has
	// acted.
	ErrWriteRefused = errors.New("the hub refuses the write")
	// ErrStaleToken means that a token is too old to conclude anything from.
	ErrStaleToken = errors.New("the token is too old; take a new one from ListClaims")
	// ErrInvalidToken means that a token was not made for this Cluster and holder.
	ErrInvalidToken = errors.New("the token was not made by ListClaims for this Cluster and holder")
	// ErrForeignHolder means that the caller may not act as the claim's holder.
	ErrForeignHolder = errors.New("the claim belongs to a holder that this identity may not act as")
	// ErrUnknownCluster means that the Cluster does not exist.
	ErrUnknownCluster = errors.New("the Cluster does not exist")
	// ErrClusterPaused means that the Cluster is paused. Its objects may be on their way to another
	// hub, so nothing is concluded from a missing one.
	ErrClusterPaused = errors.New("the Cluster is paused (spec.paused), and missing objects may be moving to another hub; unpause the Cluster")
	// ErrRestoring means that the Cluster was moved or restored, and that it is not known yet what
	// its claims have.
	ErrRestoring = errors.New("the Cluster was moved or restored, and the state of its claims is still being reconstructed; retry")
)

// ForeignSpokeError means that a live set or a new claim comes from another cluster than the one
// that the holder's claims come from.
type ForeignSpokeError struct {
	// Spoke is where the call comes from. Recorded is where claims were made, or where the shim ran
	// that last synchronized them.
	Spoke, Recorded string
	// ByClaims means that Recorded is known from claims that exist.
	ByClaims bool
}

func (e *ForeignSpokeError) Error() string {
	const (
		from    = "spoke_id: the call comes from the cluster whose namespace kube-system has the UID %s, "
		correct = "No claim is made or collected. Check the kubeconfig and the Cluster's name of the shim that calls. If the cluster was rebuilt, "
	)
	if e.ByClaims {
		return fmt.Sprintf(from+"which has none of the claims; they were made from the one with the UID %s. "+
			correct+"release the old claims, or set spec.spoke of the MachineClaims to the new UID", e.Spoke, e.Recorded)
	}
	return fmt.Sprintf(from+"but the shim of this Cluster last ran in the one with the UID %s. "+
		correct+"delete the Cluster's Spoke, or onboard the cluster again", e.Spoke, e.Recorded)
}

// EndedError means that a claim id has ended, or is being released, and can never be used again.
type EndedError struct {
	// Reason is how it ended, one of the Reason constants.
	Reason string
	// Message is the reason in a sentence.
	Message string
}

func (e *EndedError) Error() string {
	return fmt.Sprintf("the claim has ended: %s: %s", e.Reason, e.Message)
}

// NotReturnableError means that a claim has no Machine that could be returned to the user.
type NotReturnableError struct {
	// Message states why, and what to do.
	Message string
}

func (e *NotReturnableError) Error() string { return e.Message }

// NoRoomError means that no candidate has room. At least one of them would accept claims if it had
// room.
type NoRoomError struct {
	// Candidates has one entry for each candidate, in the caller's order.
	Candidates []eligibility.Refusal
}

func (e *NoRoomError) Error() string {
	return "no candidate has room: " + describe(e.Candidates)
}

// RefusedError means that every candidate is closed to claims until a person acts.
type RefusedError struct {
	// Candidates has one entry for each candidate, in the caller's order.
	Candidates []eligibility.Refusal
}

func (e *RefusedError) Error() string {
	return "no candidate is open to claims: " + describe(e.Candidates)
}

// UnknownGroupError means that none of the candidates exists in the Cluster.
type UnknownGroupError struct {
	// Candidates are their names.
	Candidates []string
}

func (e *UnknownGroupError) Error() string {
	return "no such node group in this Cluster: " + strings.Join(e.Candidates, ", ")
}

// UnseenError means that candidates are not in the agent's view, that there are more of them than
// one call looks up, and that no other candidate is open. They may exist.
type UnseenError struct {
	// Candidates is their number.
	Candidates int
}

func (e *UnseenError) Error() string {
	return fmt.Sprintf("%d candidates are not in the agent's view of the hub; list the node groups, and name those", e.Candidates)
}

func describe(refusals []eligibility.Refusal) string {
	parts := make([]string, 0, len(refusals))
	for _, r := range refusals {
		parts = append(parts, fmt.Sprintf("%s: %s (%s)", r.NodeGroup, r.Message, r.Reason))
	}
	return strings.Join(parts, "; ")
}

// refusedAll returns the error for candidates that all refused.
func refusedAll(refusals []eligibility.Refusal) error {
	names := make([]string, 0, len(refusals))
	gone, full := true, false
	for _, r := range refusals {
		names = append(names, r.NodeGroup)
		gone = gone && (r.Reason == eligibility.Gone || r.Reason == eligibility.NotMember)
		full = full || r.Reason.NoRoom()
	}
	switch {
	case gone:
		return &UnknownGroupError{Candidates: names}
	case full:
		return &NoRoomError{Candidates: refusals}
	default:
		return &RefusedError{Candidates: refusals}
	}
}

// isRefusal reports whether an error of [Engine.Create] answers the request: it cannot be met, and
// neither the agent nor the hub has failed.
func isRefusal(err error) bool {
	var (
		ended   *EndedError
		noRoom  *NoRoomError
		refused *RefusedError
		unknown *UnknownGroupError
		tooMany *TooManyError
		foreign *ForeignSpokeError
	)
	return errors.As(err, &ended) || errors.As(err, &noRoom) || errors.As(err, &refused) || errors.As(err, &unknown) ||
		errors.As(err, &tooMany) || errors.As(err, &foreign) || errors.Is(err, ErrForeignHolder) || errors.Is(err, ErrClusterPaused)
}
