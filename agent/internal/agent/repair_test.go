package agent_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// The policies of an earlier chart, which are in force here, do not let the agent mark a Machine
// for MachineHealthChecks. The claim does without.
func TestAClaimWhoseMachineMayNotBeMarkedIsBoundAndReleased(t *testing.T) {
	namespace := plane.Namespace(t)
	capitest.RunForTest(t, plane, capitest.Options{Namespaces: []string{namespace}, Behaviour: func(*clusterv1.Machine) capitest.Behaviour {
		return capitest.Behaviour{HoldJoin: true} // pods could run on one that joins before it is bound
	}})
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), capitest.NewInfrastructureTemplate(namespace, "group", nil),
		capitest.NewMachineDeployment(namespace, "group", "spoke", 0))
	c := start(t, agent.Config{Options: testOptions(namespace)}).client(namespace, "spoke")
	ref := &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}
	eventually(t, "the claim is durable", func(ctx context.Context) (bool, error) {
		_, err := c.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: ref, ClaimId: "claim", Holder: "karpenter", Candidates: []string{namespace + "/group"}, HolderRepairs: true,
		})
		return err == nil, nil
	})
	phase := func(wanted agentv1alpha1.ClaimPhase) {
		t.Helper()
		eventually(t, wanted.String(), func(ctx context.Context) (bool, error) {
			answer, err := c.Claims.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: ref, ClaimId: "claim"})
			return answer.GetClaim().GetPhase() == wanted, err
		})
	}
	phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND)
	eventually(t, "the label, and the refusal", func(ctx context.Context) (bool, error) {
		var machines clusterv1.MachineList
		claimed := ctrlclient.MatchingLabels{v1alpha1.ClaimLabel: "claim"}
		if err := plane.Client.List(ctx, &machines, ctrlclient.InNamespace(namespace), claimed); err != nil {
			return false, err
		}
		for _, m := range machines.Items {
			require.NotContains(t, m.Annotations, clusterv1.MachineSkipRemediationAnnotation, "or this test shows nothing")
		}
		var events corev1.EventList
		if err := plane.Client.List(ctx, &events, ctrlclient.InNamespace(namespace)); err != nil {
			return false, err
		}
		for _, event := range events.Items {
			if event.Reason == "WriteRefused" && event.InvolvedObject.Kind == "MachineDeployment" {
				return len(machines.Items) == 1, nil
			}
		}
		return false, nil
	})
	_, err := c.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: ref, ClaimId: "claim", Drained: true})
	require.NoError(t, err)
	phase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED)
}
