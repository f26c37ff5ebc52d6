package protocol

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

func TestAMachineThatFailedIsKeptForAsLongAsItsGroupSays(t *testing.T) {
	failed := func(keep, ago time.Duration) *Snapshot {
		s := scene(1, &Ledger{Version: 1, LastReplicas: 1, Releasing: map[types.UID]Release{"m": {Machine: "m", Claim: "c"}}}).
			withMachine("m", "c", infrastructure("NoHosts")).withClaim("c", v1alpha1.PhaseReleasing, "m")
		s.Claims[0].Status.FailedAt = new(metav1.NewTime(s.Now.Add(-ago)))
		s.Group.KeepFailed = keep
		return s
	}
	d := Decide(failed(0, time.Minute))
	assert.Contains(t, kinds(d), Hold, "by default it goes at once")

	d = Decide(failed(time.Hour, 20*time.Minute))
	assert.NotContains(t, kinds(d), Hold)
	assert.Equal(t, 40*time.Minute, d.Again)
	assert.Nil(t, d.Ledger, "it keeps its replica")

	assert.Contains(t, kinds(Decide(failed(time.Hour, time.Hour))), Hold)

	s := failed(time.Hour, time.Minute)
	s.Claims[0].Status.FailedAt = nil
	assert.Contains(t, kinds(Decide(s)), Hold, "one that was merely released is not kept")
}

func TestAClaimSaysThatItsFailedMachineIsKept(t *testing.T) {
	s := scene(1, &Ledger{Version: 1, LastReplicas: 1}).withMachine("m", "c", infrastructure("NoHosts")).withClaim("c", v1alpha1.PhaseBound, "m")
	s.Failure.Reasons, s.Group.KeepFailed = []string{"NoHosts"}, 2*time.Hour
	d := Decide(s)
	require.Equal(t, []ActionKind{Fail}, kinds(d))
	assert.Contains(t, d.Actions[0].Event.Message, "the Machine is kept for 2h0m0s, as the annotation agent.karpenter.cluster.x-k8s.io/keep-failed-machines asks for")
}
