package claims

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// settledAfter is how long a holder's live sets must have agreed on whether it repairs before its
// claims follow: each change writes all of them and their Machines.
const settledAfter = 5 * time.Minute

// repairSetting is whether a holder repairs according to its live sets, and since when.
type repairSetting struct {
	repairs bool
	since   time.Time
}

// settled returns whether the holder repairs, once its live sets have agreed on that for a while.
func (e *Engine) settled(s *liveSet) (repairs, is bool) {
	holder := holderKey{types.NamespacedName{Namespace: s.Namespace, Name: s.Cluster}, s.Holder}
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.HolderRepairs == nil || !s.matched { // a holder without claims takes no memory
		delete(e.repairs, holder)
		return false, false
	}
	setting, known := e.repairs[holder]
	if !known || setting.repairs != *s.HolderRepairs {
		setting = repairSetting{*s.HolderRepairs, e.Clock.Now()}
		e.repairs[holder] = setting
	}
	return setting.repairs, e.Clock.Since(setting.since) >= settledAfter
}

// noteRepairs records on the claims of the live set whether their holder repairs their Nodes. The
// next step of a node group follows on its Machines. Claims with other notes are left to a later
// set.
func (e *Engine) noteRepairs(s *liveSet, claims []v1alpha1.MachineClaim, others []note) []note {
	repairs, is := e.settled(s)
	if !is || e.prunesRepairs.Load() {
		return nil
	}
	noted := map[client.Object]bool{}
	for _, n := range others {
		noted[n.of] = true
	}
	var notes []note
	for i := range claims {
		c := &claims[i]
		if s.live[c.Spec.ClaimID] && c.Spec.HolderRepairs != repairs && c.Status.Phase != v1alpha1.PhaseReleasing && !noted[c] {
			notes = append(notes, note{of: c, write: func(ctx context.Context) error { return e.recordRepairs(ctx, c, repairs) }})
		}
	}
	return notes
}

// recordRepairs writes to the claim whether its holder repairs its Node.
func (e *Engine) recordRepairs(ctx context.Context, c *v1alpha1.MachineClaim, repairs bool) error {
	after := c.DeepCopy()
	after.Spec.HolderRepairs = repairs
	if err := e.Client.Update(ctx, after); err != nil {
		return err
	}
	if after.Spec.HolderRepairs != repairs && !e.prunesRepairs.Swap(true) {
		log.FromContext(ctx).Info("the CustomResourceDefinition of MachineClaims has no spec.holderRepairs, so MachineHealthChecks may remediate " +
			"Machines that their holder repairs as well; upgrade it, and restart the agent")
	}
	return nil
}
