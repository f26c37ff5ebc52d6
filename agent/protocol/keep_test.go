package protocol

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// withFailed adds a claim that failed at the given time before now, and its Machine.
func (s *Snapshot) withFailed(id string, ago time.Duration, change func(*clusterv1.Machine)) *Snapshot {
	s.withMachine("m-"+id, id, infrastructure("NoHosts")).withClaim(id, v1alpha1.PhaseReleasing, "m-"+id)
	s.Claims[len(s.Claims)-1].Status.FailedAt = new(metav1.NewTime(s.Now.Add(-ago)))
	if change != nil {
		change(s.Machines[len(s.Machines)-1])
	}
	return s
}

// released returns the Machines whose releases the ledger begins.
func released(d *Decision) []types.UID {
	if d.Ledger == nil {
		return nil
	}
	var uids []types.UID
	for uid := range d.Ledger.Releasing {
		uids = append(uids, uid)
	}
	return uids
}

func TestAMachineThatFailedIsKeptForAsLongAsItsGroupSays(t *testing.T) {
	failed := func(keep, ago time.Duration, change func(*clusterv1.Machine)) *Snapshot {
		s := atRest(1, &Ledger{Version: 1, LastReplicas: 1}).withFailed("c", ago, change)
		s.Group.KeepFailed = keep
		return s
	}
	assert.NotEmpty(t, released(Decide(failed(0, time.Minute, nil))), "by default it goes at once")

	d := Decide(failed(time.Hour, 20*time.Minute, nil))
	assert.Nil(t, d.Ledger, "it keeps its replica, and takes no room in the ledger")
	assert.Empty(t, d.Actions)
	assert.Equal(t, 40*time.Minute+skew, d.RequeueAfter)

	assert.NotEmpty(t, released(Decide(failed(time.Hour, time.Hour+skew, nil))), "its time is over")
	s := failed(time.Hour, time.Minute, node)
	s.Claims[0].Status.FailedAt = nil
	assert.NotEmpty(t, released(Decide(s)), "one that was merely released is not kept")
	assert.NotEmpty(t, released(Decide(failed(time.Hour, 10*time.Minute, func(m *clusterv1.Machine) {
		meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
			Type: clusterv1.MachineInfrastructureReadyCondition, Status: metav1.ConditionFalse, Reason: clusterv1.MachineInfrastructureDeletedReason,
			LastTransitionTime: metav1.NewTime(m.CreationTimestamp.Add(-5 * time.Minute)),
		})
	}))), "one without infrastructure shows nothing, and each reconcile of its MachineSet ends with an error")
}

func TestTheFirstFewMachinesThatFailedAreKept(t *testing.T) {
	s := atRest(5, &Ledger{Version: 1, LastReplicas: 5})
	s.Group.KeepFailed = time.Hour
	for i := range 5 {
		s.withFailed(strconv.Itoa(i), time.Duration(10+i)*time.Minute, nil)
	}
	d := Decide(s)
	require.NotNil(t, d.Ledger)
	assert.ElementsMatch(t, []types.UID{"m-0", "m-1"}, released(d), "the last ones go")
	assert.Equal(t, int32(5), d.Replicas, "each that is kept has its replica")
}
