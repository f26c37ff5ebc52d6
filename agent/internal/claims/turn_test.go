package claims

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
)

// Otherwise, calls that wait for room in a ledger would block the caller's other calls.
func TestACallThatWaitsForRoomLetsOthersOfItsCallerAskTheHub(t *testing.T) {
	e := engineWith(t, groupOf("small", 1, map[string]string{
		v1alpha1.LedgerAnnotation: `{"v":1,"seq":1,"floor":0,"lastReplicas":1,"spare":0,"pending":{"first":{}}}`,
	}), &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, "first"), Labels: map[string]string{v1alpha1.NodeGroupLabel: "small"},
		},
		Spec:   v1alpha1.MachineClaimSpec{ClusterName: clusterName, ClaimID: "first", NodeGroup: "small", Candidates: []string{"small"}},
		Status: v1alpha1.MachineClaimStatus{Phase: v1alpha1.PhasePending},
	})
	e.ledgerBudget = 200 // an entry takes up to 140
	o := limits.Defaults()
	o.HubCallsAtOnce = 1
	l, err := limits.New(o, clock.RealClock{}, nil)
	require.NoError(t, err)
	begin := func() *limits.Call {
		call, err := l.Begin("shim", "/m", false)
		require.NoError(t, err)
		return call
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	waiting := begin()
	require.NoError(t, waiting.AskHub(ctx))
	asking, give := context.WithCancel(ctx)
	created := make(chan error, 1)
	go func() {
		_, err := e.Create(WithTurn(asking, waiting), Request{
			Namespace: namespace, Cluster: clusterName, ID: "second", Holder: "spoke", Candidates: []string{"small"},
		})
		created <- err
	}()

	require.NoError(t, begin().AskHub(ctx))
	select {
	case err := <-created:
		t.Fatalf("the claim does not wait: %v", err)
	default:
	}
	give()
	require.ErrorIs(t, <-created, context.Canceled)
	waiting.End()
}
