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

// renewAfter is the age at which the conditions of a waiting NodeClaim are rewritten. It is below
// the shortest launch timeout.
const renewAfter = 15 * time.Second

// renew restarts core's launch and registration timeouts, after a call of Create, for a NodeClaim
// that is to adopt a Machine. Core counts from the NodeClaim's creation, so the timeouts may have
// expired before this process makes its first call. Core also checks them in the same pass that
// calls Create, and would then release the Machine or leave it without a claim. Core stores the
// changes made here even if Create fails.
//
// Neither the time before this process began counts, nor the time during which it is not known
// whether the Machine can be adopted.
func (c *CloudProvider) renew(nodeClaim *karpv1.NodeClaim, result error) {
	if nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation] == "" && nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation] == "" {
		return
	}
	now := c.Clock.Now().Truncate(time.Second) // the precision of stored conditions
	c.began.CompareAndSwap(nil, &now)
	since := *c.began.Load()
	if result == nil || isAwaited(result) {
		since = now.Add(-renewAfter)
	}
	nodeClaim.StatusConditions() // adds missing conditions, dated to the NodeClaim's creation
	for i := range nodeClaim.Status.Conditions {
		condition := &nodeClaim.Status.Conditions[i]
		timed := condition.Type == karpv1.ConditionTypeLaunched || condition.Type == karpv1.ConditionTypeRegistered
		if timed && condition.LastTransitionTime.Time.Before(since) {
			condition.LastTransitionTime = metav1.NewTime(now)
		}
	}
}

// isAwaited reports whether Create failed without learning what is available.
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
