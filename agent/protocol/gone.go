package protocol

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// DecideGone computes what is left to do for the claims of a MachineDeployment that no longer
// exists. The snapshot has only its name. Cluster API removes its Machines, unless it was deleted
// with --cascade=orphan, and there are no replicas to decrement. Waiting claims are refused.
func DecideGone(s *Snapshot) *Decision {
	s.Deployment.DeletionTimestamp = new(metav1.NewTime(s.Now))
	s.prepare()
	d := &Decision{Refused: map[string]eligibility.Refusal{}}
	const gone = "its MachineDeployment was deleted"
	s.recreate(d)
	for _, c := range s.Claims {
		var m *clusterv1.Machine
		if c.Status.Machine != nil {
			m = s.machine(c.Status.Machine.UID)
		}
		switch phase := c.CurrentPhase(); {
		case phase == v1alpha1.PhaseEnded:
		case s.carried(c):
			s.actOnCarried(d, c)
		case m == nil && s.labelled(c.Spec.ClaimID) != nil: // its status was lost
			d.Actions = append(d.Actions, s.restore(c))
		case phase == v1alpha1.PhasePending:
			d.Refused[c.Spec.ClaimID] = eligibility.Refusal{
				NodeGroup: s.Deployment.Name, Reason: eligibility.Gone, Message: "the MachineDeployment was deleted",
			}
			// A refused call moves its claim on. The agent does so for a claim whose caller is
			// gone.
			if c.Status.Phase == v1alpha1.PhasePending {
				d.end(c, ReasonNodeGroupGone, gone)
			} else {
				s.moveOn(d, c, ReasonNodeGroupGone, gone)
			}
		case m == nil || DeletionCompleted(m):
			d.end(c, ReasonNodeGroupGone, gone+", and its Machine with it")
		case c.Returns() && Alive(m) && ClaimOf(m) == c.Spec.ClaimID: // there is no floor left
			d.Actions = append(d.Actions, Action{Kind: Return, Machine: m})
		case c.Returns() && Alive(m) && ClaimOf(m) == "":
			d.end(c, ReasonReturned, returned)
		case phase == v1alpha1.PhaseReleasing && Alive(m): // left behind (deleted with cascade=orphan)
			d.Actions = append(d.Actions, Action{Kind: BeginDelete, Machine: m, Release: Release{Drained: c.Status.Drained}})
		}
	}
	s.actOnMachines(d)
	for _, set := range s.Sets { // left behind as well
		if set.Annotations[clusterv1.PausedAnnotation] == v1alpha1.PausedByAgent {
			d.Actions = append(d.Actions, Action{Kind: UnpauseMachineSet, Set: set})
		}
	}
	return d
}
