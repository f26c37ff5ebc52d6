package protocol

import (
	"encoding/json"
	"fmt"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// describeLowering says what is wrong, who did it, as far as the API server knows, and what to do.
func (b *books) describeLowering() string {
	by := "another writer"
	if manager := b.replicasManager(); manager != "" {
		by = "field manager " + strconv.Quote(manager)
	}
	return fmt.Sprintf("%s set spec.replicas to %d, below the %d machines that are claimed, so Cluster API removed machines of its own choice; "+
		"the node group is frozen: take replicas out of the manifest, or have the tool ignore the field, then remove the annotation %s",
		by, b.Group.Replicas, b.claimed(), v1alpha1.ReplicasLoweredAnnotation)
}

// replicasManager returns the field manager that wrote spec.replicas last, "" when only the agent itself is known to have.
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
