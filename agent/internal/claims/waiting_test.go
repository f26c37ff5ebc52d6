package claims

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	testclock "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eligibility"
)

// waits is a group in which two claims wait for as long as that, five minutes being their deadline.
func waits(long time.Duration) *snapshot {
	s := scene(2, &Ledger{Version: 1, Seq: 9, LastReplicas: 2, Pending: map[string]Named{"a": {}, "b": {}}}).
		withClaim("a", v1alpha1.PhasePending, "").withClaim("b", v1alpha1.PhasePending, "")
	s.sets[0].Generation++ // Machines are still being made
	s.failure = Failure{ObjectDeadline: 5 * time.Minute}
	s.now = s.now.Add(long)
	return s
}

func TestAClaimDoesNotFailWhenAMachineIsBeingGivenToIt(t *testing.T) {
	s := waits(5*time.Minute).withMachine("m", "", nil)
	d := decide(s)
	require.NotNil(t, d.ledger)
	require.Equal(t, types.UID("m"), d.ledger.Pending["a"].UID, "by a write that may be put off for others")
	require.Equal(t, []actionKind{fail}, kinds(d))
	assert.Equal(t, "b", d.actions[0].claim.Spec.ClaimID)
}

func TestADeadlineThatPassedWhileNoAgentLookedBeginsAnew(t *testing.T) {
	s := waits(time.Hour)
	d := decide(s)
	require.Equal(t, []actionKind{waitAnew, waitAnew}, kinds(d))

	clock := testclock.NewFakeClock(s.now)
	claim := claimIn("", "a", v1alpha1.PhasePending, "")
	e := engineWith(t, claim)
	e.Clock = clock
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	d.actions[0].claim = claim
	require.NoError(t, e.do(t.Context(), d.actions[0]))
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	require.NotNil(t, claim.Status.WaitingSince)

	for _, c := range s.claims {
		c.Status.WaitingSince = claim.Status.WaitingSince
	}
	d = decide(s)
	assert.Empty(t, kinds(d), "another agent sees it as well")
	assert.Equal(t, 5*time.Minute, d.again)
	s.now = s.now.Add(5 * time.Minute)
	assert.Equal(t, []actionKind{fail, fail}, kinds(decide(s)))
}

func TestAnAgentThatJustStartedLetsNoClaimFail(t *testing.T) {
	s := waits(5 * time.Minute)
	s.started = s.now.Add(-time.Minute)
	d := decide(s)
	assert.Empty(t, kinds(d), "its holder has not reported yet which Nodes a claim may have")
	assert.Equal(t, time.Minute, d.again)
	s.now = s.now.Add(time.Minute)
	assert.Equal(t, []actionKind{fail, fail}, kinds(decide(s)), "it has now")
	assert.False(t, New(Config{}).started.IsZero())
}

func TestAClaimOfAPausedGroupDoesNotFail(t *testing.T) {
	s := waits(5 * time.Minute)
	group := s.group
	s.group = group.With(&eligibility.Refusal{Reason: eligibility.Paused})
	assert.Empty(t, kinds(decide(s)), "Cluster API makes no Machines then")
	s.now, s.group = s.now.Add(time.Hour), group
	assert.Equal(t, []actionKind{waitAnew, waitAnew}, kinds(decide(s)), "and has its time once it is not paused any more")
}

// A claim may have waited for room in the ledger before.
func TestAClaimsWaitCountsFromWhenItWasEntered(t *testing.T) {
	s := waits(5 * time.Minute)
	for _, c := range s.claims {
		c.Status.WaitingSince = new(metav1.NewTime(s.now.Add(-time.Minute)))
	}
	d := decide(s)
	assert.Empty(t, kinds(d))
	assert.Equal(t, 4*time.Minute, d.again)

	e := engineWith(t, groupOf("small", 0, nil))
	e.spawn = func(run func()) { run() }
	c, err := e.Create(t.Context(), Request{Namespace: namespace, Cluster: clusterName, ID: "a", Holder: "spoke", Candidates: []string{"small"}})
	require.NoError(t, err)
	require.NoError(t, e.Client.Get(t.Context(), client.ObjectKeyFromObject(c), c))
	assert.NotNil(t, c.Status.WaitingSince)
}

// Two hundred claims that come one after the other while a MachineSet is blocked are explained once each, though Cluster API says it with
// another number each time.
func TestExplanationsOfABlockedGroupAreFew(t *testing.T) {
	s := waits(time.Minute)
	writes := 0
	for replicas := range 200 {
		s.sets[0].Status.Conditions = []metav1.Condition{{
			Type: clusterv1.MachineSetScalingUpCondition, Status: "True",
			Message: "Scaling up from 0 to " + string(rune('0'+replicas%10)) + " replicas is blocked because:\n* the control plane is upgrading",
		}}
		for _, a := range decide(s).actions {
			require.Equal(t, explain, a.kind)
			(&Engine{Config: Config{Clock: testclock.NewFakeClock(s.now)}}).note(a.claim, a.event)
			writes++
		}
		s.now = s.now.Add(time.Second)
	}
	assert.Equal(t, 2, writes)
}
