package protocol

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// To an agent whose clock is a minute ahead, what was written a second ago looks older than each of
// these waits. If the wait guards a conclusion that cannot be taken back, the agent waits
// nevertheless.
func TestAClockThatIsAheadConcludesNothingEarly(t *testing.T) {
	const elapsed, ahead = time.Second, time.Minute
	written := metav1.NewTime(newTestTime().Add(-elapsed))
	late := func(s *Snapshot) *Snapshot {
		s.Now = newTestTime().Add(ahead)
		return s
	}
	t.Run("infrastructure that Cluster API's cache does not show yet is not gone", func(t *testing.T) {
		s := atRest(1, &Ledger{Version: 1, Seq: 4, LastReplicas: 1}).withClaim("a", v1alpha1.PhaseBound, "m").
			withMachine("m", "a", func(m *clusterv1.Machine) {
				infrastructure(clusterv1.MachineInfrastructureDoesNotExistReason)(m)
				m.CreationTimestamp, m.Status.Conditions[0].LastTransitionTime = written, written
			})
		d := Decide(late(s))
		assert.Empty(t, kinds(d))
		assert.Positive(t, d.RequeueAfter)
	})
	t.Run("what Cluster API stated before a pause is not stated", func(t *testing.T) {
		s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "", booting)
		m := s.Machines[0]
		m.CreationTimestamp = metav1.NewTime(written.Add(-time.Hour))
		m.Status.Conditions = append(m.Status.Conditions, metav1.Condition{
			Type: clusterv1.PausedCondition, Status: metav1.ConditionFalse, LastTransitionTime: written,
		})
		late(s).prepare()
		assert.False(t, s.nodeless(m))
	})
	t.Run("a claim whose Machine is still to be restored has not lost it", func(t *testing.T) {
		s := movedScene(1, &Ledger{Floor: 1}).withMachine("floor", "", node).withCarried("c")
		for _, o := range []interface{ SetCreationTimestamp(at metav1.Time) }{s.Deployment, s.Machines[0], s.Claims[0]} {
			o.SetCreationTimestamp(written)
		}
		d := Decide(late(s))
		assert.Empty(t, kinds(d))
		assert.Positive(t, d.RequeueAfter)
	})
	t.Run("and all of it comes in the end", func(t *testing.T) {
		s := movedScene(1, &Ledger{Floor: 1}).withMachine("floor", "", node).withCarried("c")
		s.Now = s.Machines[0].CreationTimestamp.Add(remadeSettles + 2*ahead)
		assert.Equal(t, []ActionKind{End}, kinds(Decide(s)))
	})
}
