package protocol

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

const (
	// LedgerBudget is how many bytes all entries of one ledger may take. Every write of a
	// MachineDeployment and of its MachineSets carries the whole ledger, so the limit stays well
	// below what Kubernetes allows. It is enough for about 700 claims or 350 releases.
	LedgerBudget = 160 << 10
	// annotationMargin is reserved for the annotations that Cluster API adds to a MachineDeployment
	// and to its MachineSets.
	annotationMargin = 8 << 10
	// LedgerHeader bounds the size of a ledger without entries.
	LedgerHeader = 1 << 10
	// longestName bounds the name of a Machine that Cluster API generates.
	longestName = 63
	// uidLength is the length of a UID that an API server generates.
	uidLength = 36
)

// budget is how many bytes the entries of one decision may still add to the ledger. An entry counts
// with the largest size that it can reach, so no later step of a claim or a release is held up.
type budget struct {
	left int
	// claims and releases are what is left of each kind's share. Neither share is the whole budget,
	// so slow releases do not keep claims out, nor the other way round.
	claims, releases int
	// longestSet is the length of the longest name of a MachineSet.
	longestSet int
}

// newBudget returns the budget left beside the ledger's present entries. limit is how many bytes
// all entries may take.
func (s *Snapshot) newBudget(l *Ledger, limit int) *budget {
	limit = max(0, min(limit, s.ledgerLimit()-LedgerHeader))
	share := limit / 4 * 3
	b := &budget{left: limit, claims: share, releases: share}
	for _, set := range s.Sets {
		b.longestSet = max(b.longestSet, len(set.Name))
	}
	b.left -= len(l.Marking) * sizeOfMark
	for _, r := range l.Returning {
		b.left -= sizeOfReturn(r.Machine, r.Claim)
	}
	for id, entry := range l.Pending {
		size := sizeOfClaim(id, entry)
		b.left -= size
		b.claims -= size
	}
	for uid, r := range l.Releasing {
		size := b.sizeOfRelease(uid, r)
		b.left -= size
		b.releases -= size
	}
	return b
}

// claim reserves room for a claim's entry and reports whether there was any. Once one claim finds
// no room, later ones find none either, so that claims are served in order.
func (b *budget) claim(id string, entry Assignment) bool {
	return b.take(&b.claims, sizeOfClaim(id, entry))
}

// release reserves room for a release's record and reports whether there was any, in order as
// [budget.claim] does.
func (b *budget) release(uid types.UID, r Release) bool {
	return b.take(&b.releases, b.sizeOfRelease(uid, r))
}

func (b *budget) take(share *int, size int) bool {
	if size > b.left || size > *share {
		*share = 0
		return false
	}
	b.left -= size
	*share -= size
	return true
}

// sizeOfMark is the size of the entry of a Machine that is about to be marked as the floor's.
const sizeOfMark = len(`"",`) + uidLength

// sizeOfReturn is the size of the record of a Machine that a claim has returned.
func sizeOfReturn(machine, claimID string) int {
	return len(`"":{"m":"","c":""},`) + uidLength + len(machine) + len(claimID)
}

// give reserves room for the record of a returned Machine and reports whether there was any.
func (b *budget) give(machine, claimID string) bool {
	size := sizeOfReturn(machine, claimID)
	if b.left < size {
		return false
	}
	b.left -= size
	return true
}

// mark reserves room for the entry of a Machine that is about to be marked, and reports whether
// there was any.
func (b *budget) mark() bool {
	if b.left < sizeOfMark {
		return false
	}
	b.left -= sizeOfMark
	return true
}

// sizeOfClaim is the size of a pending claim's entry once it names a Machine.
func sizeOfClaim(id string, entry Assignment) int {
	return len(`"":{"m":"","u":"","adopted":true},`) + len(id) + max(longestName, len(entry.Machine)) + max(uidLength, len(entry.UID))
}

// sizeOfRelease is the size of a release's record once replicas were decremented for it under
// pause, including its part of the MachineSet's [v1alpha1.ReleasedAnnotation].
func (b *budget) sizeOfRelease(uid types.UID, r Release) int {
	const rest = `"":{"m":"","c":"","drained":true,"set":"","back":true,"as":"","gen":9223372036854775807},,`
	return len(rest) + 2*len(uid) + max(uidLength, len(r.LoweredAs)) + len(r.Machine) + len(r.Claim) + max(b.longestSet, len(r.Set))
}

// ledgerLimit is the maximum length of the ledger's text. Kubernetes limits the total size of an
// object's annotations, and Cluster API copies the MachineDeployment's annotations to its
// MachineSets, which have annotations of their own.
func (s *Snapshot) ledgerLimit() int {
	beside := annotationBytes(s.Deployment.Annotations, nil)
	for _, set := range s.Sets {
		beside = max(beside, annotationBytes(s.Deployment.Annotations, set.Annotations))
	}
	return validation.TotalAnnotationSizeLimitB - annotationMargin - len(v1alpha1.LedgerAnnotation) - beside
}

// annotationBytes is the size of the annotations in either map, without those that grow with the
// ledger.
func annotationBytes(a, b map[string]string) int {
	size := 0
	for key, value := range a {
		if key != v1alpha1.LedgerAnnotation {
			size += len(key) + max(len(value), len(b[key]))
		}
	}
	for key, value := range b {
		if _, both := a[key]; !both && key != v1alpha1.LedgerAnnotation && key != v1alpha1.ReleasedAnnotation {
			size += len(key) + len(value)
		}
	}
	return size
}

// crowded returns the refusal of a group whose annotations leave no room for a ledger, nil when
// there is room.
func (s *Snapshot) crowded() *eligibility.Refusal {
	if s.ledgerLimit() >= 8*LedgerHeader { // a release still finds room beside the maximum number of claims
		return nil
	}
	key := slices.MaxFunc(append(slices.Collect(maps.Keys(s.Deployment.Annotations)), ""), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(s.Deployment.Annotations[a]), len(s.Deployment.Annotations[b])), cmp.Compare(a, b))
	})
	return &eligibility.Refusal{
		NodeGroup: s.Deployment.Name, Reason: eligibility.Invalid,
		Message: fmt.Sprintf("the annotations of the MachineDeployment and its MachineSets leave no room for the ledger of claims "+
			"(Kubernetes allows %d bytes for all of an object's); remove some, or shorten metadata.annotations[%s]",
			validation.TotalAnnotationSizeLimitB, key),
	}
}
