package protocol

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

// DecideGone computes what is left to do for the claims of a MachineDeployment that does not exist any more, of which the snapshot has
// only the name. Cluster API removes its Machines; no replicas are there to be given back. Claims that wait are refused.
func DecideGone(s *Snapshot) *Decision {
	s.Deployment.DeletionTimestamp = new(metav1.NewTime(s.Now))
	s.prepare()
	d := &Decision{Refused: map[string]eligibility.Refusal{}}
	const gone = "its MachineDeployment was deleted"
	for _, c := range s.Claims {
		var m *clusterv1.Machine
		if c.Status.Machine != nil {
			m = s.machine(c.Status.Machine.UID)
		}
		switch phase := c.CurrentPhase(); {
		case phase == v1alpha1.PhaseEnded:
		case s.carried(c):
			s.actOnCarried(d, c)
		case phase == v1alpha1.PhasePending:
			d.Refused[c.Spec.ClaimID] = eligibility.Refusal{
				NodeGroup: s.Deployment.Name, Reason: eligibility.Gone, Message: "the MachineDeployment was deleted",
			}
			// A call that is refused moves its claim on; the agent does it for one whose caller is gone.
			if c.Status.Phase == v1alpha1.PhasePending {
				d.end(c, ReasonNodeGroupGone, gone)
			} else {
				s.moveOn(d, c, ReasonNodeGroupGone, gone)
			}
		case m == nil || DeletionCompleted(m):
			d.end(c, ReasonNodeGroupGone, gone+", and its Machine with it")
		case c.Returns() && Alive(m) && ClaimOf(m) == c.Spec.ClaimID: // there is no floor any more
			d.Actions = append(d.Actions, Action{Kind: Return, Machine: m})
		case c.Returns() && Alive(m) && ClaimOf(m) == "":
			d.end(c, ReasonReturned, returned)
		case phase == v1alpha1.PhaseReleasing && Alive(m): // it was left behind (deleted with cascade=orphan)
			d.Actions = append(d.Actions, Action{Kind: Hold, Machine: m, Release: Release{Drained: c.Status.Drained}})
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
