package protocol

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

const (
	// restoredWithin is the window for counting repeated writes of one number. Many tools reconcile
	// every ten minutes.
	restoredWithin = time.Hour
	// restoredOften is how often the number must be set again within it for the writer to count as
	// a tool.
	restoredOften = 2
)

// writtenBack records what another writer set replicas to, and reports whether it is a tool that
// keeps them at its own number: the number is set again whenever the agent has changed it. A person
// who scales rarely sets the same number again and again. Numbers below the min size do not count,
// because the agent raises them. A topology that sets replicas, and a group that is no longer a
// member or is being deleted, are reported for other reasons.
func (b *books) writtenBack() bool {
	was := b.next.Written
	next := Written{Replicas: b.Group.Replicas}
	b.next.Written = &next
	others := b.Group.Has(eligibility.ReplicasOwned) || b.Group.Has(eligibility.NotMember) || b.Group.Has(eligibility.Deleting)
	if was == nil || was.Replicas != next.Replicas || next.Replicas < b.next.Min || others {
		return false
	}
	next.Restored, next.Since = 1, b.Now.Unix()
	if ago := b.Now.Sub(time.Unix(was.Since, 0)).Abs(); was.Restored > 0 && ago < restoredWithin {
		next.Restored, next.Since = was.Restored+1, was.Since
	}
	return next.Restored >= restoredOften
}

// freeze keeps replicas and floor as they are from the next ledger on, until a person ends the
// freeze.
func (b *books) freeze(reason, why string) {
	b.next.Lowered, b.d.Urgent = true, true
	b.d.Lowered, b.d.LoweredReason = why, reason
}

// describeLowering explains what is wrong, which writer the managed fields name, and what to do.
func (b *books) describeLowering() string {
	return fmt.Sprintf("%s set spec.replicas to %d, below the %d machines that are claimed, so Cluster API removed machines of its own choice; %s",
		b.otherWriter(), b.Group.Replicas, b.claimed(b.Ledger != nil), unfreeze)
}

func (b *books) describeRestoring() string {
	return fmt.Sprintf("%s keeps setting spec.replicas to %d: twice within an hour after the agent had changed it; %s",
		b.otherWriter(), b.Group.Replicas, unfreeze)
}

const unfreeze = "the node group is frozen: take replicas out of the manifest, or have the tool ignore the field, then remove the annotation " +
	v1alpha1.ReplicasLoweredAnnotation

// otherWriter describes the writer of spec.replicas.
func (s *Snapshot) otherWriter() string {
	if manager := s.replicasManager(); manager != "" {
		return "field manager " + strconv.Quote(manager)
	}
	return "another writer"
}

// replicasManager returns the field manager that last wrote spec.replicas, ignoring the agent's
// own; "" if no other is known.
func (s *Snapshot) replicasManager() string {
	var last *metav1.ManagedFieldsEntry
	for i := range s.Deployment.ManagedFields {
		entry := &s.Deployment.ManagedFields[i]
		if entry.Manager == v1alpha1.FieldManager || entry.FieldsV1 == nil || !ownsSpecReplicas(entry.FieldsV1.GetRawBytes()) {
			continue
		}
		if last == nil || entry.Time != nil && (last.Time == nil || last.Time.Before(entry.Time)) {
			last = entry
		}
	}
	if last == nil {
		return ""
	}
	return last.Manager
}

// ownsSpecReplicas reports whether a set of managed fields contains spec.replicas.
func ownsSpecReplicas(fields []byte) bool {
	var owned struct {
		Spec struct {
			Replicas *struct{} `json:"f:replicas"`
		} `json:"f:spec"`
	}
	return json.Unmarshal(fields, &owned) == nil && owned.Spec.Replicas != nil
}
