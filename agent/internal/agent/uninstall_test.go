package agent_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/claims"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// TestUninstall uninstalls the agent from a hub in which one claim is bound and another is being
// released.
func TestUninstall(t *testing.T) {
	e := newEnv(t)
	id := e.CreateNodeGroup(t, conformance.MachineDeployment{Name: "workers", Labels: map[string]string{v1alpha1.MemberLabel: ""}})
	for _, claim := range []string{"stays", "goes"} {
		_, err := e.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: e.Cluster(), ClaimId: claim, Holder: "karpenter", Candidates: []string{id}, DisplayName: "default-" + claim,
		})
		require.NoError(t, err)
		e.ProvisionMachine(t, claim)
		eventually(t, claim+" runs", func(ctx context.Context) (bool, error) {
			response, err := e.Client().Claims.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: e.Cluster(), ClaimId: claim})
			if machine := response.GetClaim().GetMachine(); machine.GetProviderId() != "" {
				e.JoinNode(t, machine.GetName())
			}
			return response.GetClaim().GetMachine().GetNodeName() != "", err
		})
	}
	var claimed clusterv1.MachineList
	inNamespace := client.InNamespace(e.Cluster().GetNamespace())
	require.NoError(t, plane.Client.List(t.Context(), &claimed, inNamespace, client.MatchingLabels{v1alpha1.ClaimNameLabel: "default-stays"}))
	require.Len(t, claimed.Items, 1)
	_, err := e.Client().Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: e.Cluster(), ClaimId: "goes", Drained: true})
	require.NoError(t, err)
	e.running.stop()

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var said []string
	report := func(format string, _ ...any) { said = append(said, format) }
	require.NoError(t, agent.Uninstall(ctx, plane.Config, testOptions(e.namespace), claims.UninstallOptions{Report: report, DryRun: true}))
	require.Contains(t, said, "MachineDeployment %s: would be withdrawn")
	var all v1alpha1.MachineClaimList
	require.NoError(t, plane.Client.List(t.Context(), &all, inNamespace))
	require.Len(t, all.Items, 2, "a dry run changes nothing")
	require.NoError(t, agent.Uninstall(ctx, plane.Config, testOptions(e.namespace), claims.UninstallOptions{Report: report}))
	require.NotEmpty(t, said)
	require.NoError(t, agent.Uninstall(ctx, plane.Config, testOptions(e.namespace), claims.UninstallOptions{Report: report}), "it can be repeated")

	require.NoError(t, plane.Client.List(t.Context(), &all, inNamespace))
	require.Empty(t, all.Items)
	var deployments clusterv1.MachineDeploymentList
	require.NoError(t, plane.Client.List(t.Context(), &deployments, inNamespace))
	require.Len(t, deployments.Items, 1)
	require.EqualValues(t, 1, *deployments.Items[0].Spec.Replicas, "the release was finished")
	var machines clusterv1.MachineList
	require.NoError(t, plane.Client.List(t.Context(), &machines, inNamespace))
	var sets clusterv1.MachineSetList
	require.NoError(t, plane.Client.List(t.Context(), &sets, inNamespace))
	untouched := func(object client.Object) {
		marked := func(key string) bool {
			return strings.Contains(key, v1alpha1.Group) || strings.Contains(key, "karpenter-capi")
		}
		for key := range object.GetAnnotations() {
			require.False(t, marked(key), "%s has annotation %s", object.GetName(), key)
		}
		for key := range object.GetLabels() {
			require.False(t, marked(key), "%s has label %s", object.GetName(), key)
		}
		require.False(t, slices.ContainsFunc(object.GetFinalizers(), marked), "%s has finalizers %v", object.GetName(), object.GetFinalizers())
	}
	untouched(&deployments.Items[0])
	for i := range sets.Items {
		untouched(&sets.Items[i])
	}
	for i := range machines.Items {
		untouched(&machines.Items[i])
	}
	require.True(t, slices.ContainsFunc(machines.Items, func(m clusterv1.Machine) bool {
		return m.UID == claimed.Items[0].UID && m.DeletionTimestamp.IsZero()
	}), "the claimed Machine stays")
}

// A wrong name would look like success.
func TestUninstallKnowsWhatItIsToldToRemove(t *testing.T) {
	cluster := newEnv(t).Cluster()
	for name, c := range map[string]struct {
		namespace, cluster, want string
	}{
		"another namespace": {namespace: "typo", want: "--namespaces: the hub has no namespace typo"},
		"another Cluster": {
			cluster: cluster.GetNamespace() + "/typo", want: "--clusters: the hub has no Cluster " + cluster.GetNamespace() + "/typo",
		},
		"both exist": {cluster: cluster.GetNamespace() + "/" + cluster.GetName(), namespace: cluster.GetNamespace()},
	} {
		t.Run(name, func(t *testing.T) {
			o := testOptions("")
			o.Namespaces, o.Clusters = lo.Compact([]string{c.namespace}), lo.Compact([]string{c.cluster})
			err := agent.Uninstall(t.Context(), plane.Config, o, claims.UninstallOptions{DryRun: true, Report: t.Logf})
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.want)
		})
	}
}
