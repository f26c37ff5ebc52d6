package cloudprovider

import (
	"errors"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// renewAfter is the age at which the conditions of a NodeClaim that waits are rewritten. It is below the shortest launch timeout.
const renewAfter = 15 * time.Second

// renew restarts the time-outs by which core gives up a NodeClaim that is to adopt a Machine, after a call of Create. Core counts from the
// NodeClaim's creation, so that they may be over when this process makes its first call, and it checks them in the pass that calls Create: the
// Machine would be released, or be left without a claim. Core stores what is changed here, also when Create fails.
//
// The time before this process began does not count, nor does that in which it is not known whether the Machine can be adopted.
func (c *CloudProvider) renew(nodeClaim *karpv1.NodeClaim, result error) {
	if nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation] == "" && nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation] == "" {
		return
	}
	now := c.Clock.Now().Truncate(time.Second) // as conditions are stored
	c.began.CompareAndSwap(nil, &now)
	since := *c.began.Load()
	if result == nil || isAwaited(result) {
		since = now.Add(-renewAfter)
	}
	nodeClaim.StatusConditions() // adds those that are missing, as old as the NodeClaim
	for i := range nodeClaim.Status.Conditions {
		condition := &nodeClaim.Status.Conditions[i]
		timed := condition.Type == karpv1.ConditionTypeLaunched || condition.Type == karpv1.ConditionTypeRegistered
		if timed && condition.LastTransitionTime.Time.Before(since) {
			condition.LastTransitionTime = metav1.NewTime(now)
		}
	}
}

// isAwaited reports whether Create failed because it is not known what can be had.
func isAwaited(err error) bool {
	if agenterrors.IsUnavailable(err) {
		return true
	}
	var create *cloudprovider.CreateError
	if !errors.As(err, &create) {
		return false
	}
	switch create.ConditionReason {
	case ReasonCatalogueNotSynced, ReasonAgentUnreachable, ReasonAdoptionFailed, ReasonClaimConflict:
		return true
	}
	return false
}
