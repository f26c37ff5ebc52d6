package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// conformsWithin bounds the whole run of the command.
const conformsWithin = 15 * time.Minute

// TestTheAgentConforms runs capi-agent-conformance as a user of docs/conformance.md does: against
// an agent whose machines Cluster API makes, with a Cluster that has no shim.
func TestTheAgentConforms(t *testing.T) {
	figure := shows(t, "capi-agent-conformance passes against the agent, with the machines of the real Cluster API")
	if testing.Short() {
		t.Skip("not in the short run: it takes a sandbox without a shim")
	}
	options := hasty(sandbox.Options{
		Name: "e2e-conforms", WithoutShim: true, NodePools: true,
		// Behaviours wait until the machines of those before them are gone.
		AgentArgs: []string{"--spare-grace-period=2s"},
	})
	box, err := sandbox.Start(within(t, startWithin), options)
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs: %s", box.State().Paths.Logs)
		}
		box.Stop()
	})
	hub, err := client.New(box.HubConfig(), client.Options{Scheme: testenv.Scheme()})
	require.NoError(t, err)
	require.NoError(t, manifests.Apply(within(t, soon), hub, manifests.MoveHub))
	atRest := replicasRun(hub, map[string]int32{"east": own, "west": 0})
	poll(t, settleWithin, atRest)

	certificate := func(caller, id string) []string {
		certFile, keyFile, err := box.AgentCertificate(caller, id)
		require.NoError(t, err)
		return []string{"--" + caller + "-cert-file=" + certFile, "--" + caller + "-key-file=" + keyFile}
	}
	state, dir := box.State(), t.TempDir()
	profiles := []conformance.Profile{conformance.ProfileReader, conformance.ProfileClaimer, conformance.ProfileAutoscaler}
	arguments := append([]string{
		"--address=" + state.AgentAddress, "--ca-file=" + state.Paths.AgentCA,
		"--cert-file=" + state.Paths.ClientCertificate, "--key-file=" + state.Paths.ClientKey,
		"--admin-cert-file=" + state.Paths.AdminCertificate, "--admin-key-file=" + state.Paths.AdminKey,
		"--cluster=" + box.Cluster().String(), "--node-group=fleet/east,fleet/west",
		"--profiles=" + strings.Join(lo.Map(profiles, func(p conformance.Profile, _ int) string { return string(p) }), ","),
		"--patience=" + (slow * settleWithin).String(),
		"--json=" + filepath.Join(dir, "verdict.json"), "--junit=" + filepath.Join(dir, "verdict.xml"),
	}, certificate("autoscaler", sandbox.AutoscalerIdentity)...)
	arguments = append(arguments, certificate("stranger", sandbox.ClusterIdentity(sandbox.ClusterNamespace, "stranger", ""))...)
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(within(t, slow*conformsWithin), filepath.Join(root(t), "bin", "capi-agent-conformance"), arguments...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	began := time.Now()
	require.NoError(t, cmd.Run(), "%s%s", &out, &errOut)
	figure("%.0f s", time.Since(began).Seconds())

	// Nothing is skipped: the command has every caller, and the agent every feature.
	wanted := lo.CountBy(conformance.Behaviours(), func(b conformance.Behaviour) bool { return lo.Contains(profiles, b.Profile) })
	line := fmt.Sprintf("conformance: PASS passed=%d failed=0 skipped=0", wanted)
	require.True(t, strings.HasSuffix(out.String(), "\n"+line+"\n"), "the last line is not %q:\n%s", line, &out)
	figure("%s", line)

	content, err := os.ReadFile(filepath.Join(dir, "verdict.json"))
	require.NoError(t, err)
	var verdict struct {
		Verdict string               `json:"verdict"`
		Passed  int                  `json:"passed"`
		Failed  int                  `json:"failed"`
		Skipped int                  `json:"skipped"`
		Results []conformance.Result `json:"results"`
	}
	require.NoError(t, json.Unmarshal(content, &verdict))
	require.Equal(t, "PASS", verdict.Verdict)
	require.Equal(t, []int{wanted, 0, 0}, []int{verdict.Passed, verdict.Failed, verdict.Skipped})
	require.Len(t, verdict.Results, wanted)

	content, err = os.ReadFile(filepath.Join(dir, "verdict.xml"))
	require.NoError(t, err)
	var suite struct {
		Tests    int `xml:"tests,attr"`
		Failures int `xml:"failures,attr"`
		Skipped  int `xml:"skipped,attr"`
	}
	require.NoError(t, xml.Unmarshal(content, &suite))
	require.Equal(t, []int{wanted, 0, 0}, []int{suite.Tests, suite.Failures, suite.Skipped})

	poll(t, settleWithin, atRest)
	require.Empty(t, faultsInLogs(&testenv.Env{Sandbox: box}, lo.Times(agents, sandbox.AgentName)...))
}

// replicasRun is satisfied once the MachineDeployments have these numbers of replicas, all with
// Nodes, and no other Machines.
func replicasRun(hub client.Client, wanted map[string]int32) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		for name, replicas := range wanted {
			var md clusterv1.MachineDeployment
			var machines clusterv1.MachineList
			if err := hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: name}, &md); err != nil {
				return "", err
			}
			if err := hub.List(ctx, &machines, client.InNamespace(sandbox.ClusterNamespace),
				client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: name}); err != nil {
				return "", err
			}
			run := lo.CountBy(machines.Items, func(m clusterv1.Machine) bool { return m.Status.NodeRef.IsDefined() })
			if *md.Spec.Replicas != replicas || len(machines.Items) != int(replicas) || run != int(replicas) {
				return fmt.Sprintf("%s to have %d Machines with Nodes: %d of %d do, with %d replicas",
					name, replicas, run, len(machines.Items), *md.Spec.Replicas), nil
			}
		}
		return "", nil
	}
}
