package agent_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestStartWithThreeHundredNodeGroupsIsFast(t *testing.T) {
	const groups = 300
	namespace := plane.Namespace(t)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"))
	for i := range groups {
		name := fmt.Sprintf("group-%03d", i)
		template := capitest.NewInfrastructureTemplate(namespace, name, nil)
		plane.Create(t, template, capitest.NewMachineDeployment(namespace, name, "spoke", 0,
			capitest.Annotated(capacity.MemoryAnnotation, "16Gi")))
		template.Object["status"] = map[string]any{"capacity": map[string]any{"cpu": "4"}}
		plane.SetStatus(t, template)
	}
	o := testOptions(namespace)
	o.KubeAPIQPS, o.KubeAPIBurst = options.New().KubeAPIQPS, options.New().KubeAPIBurst
	begun := time.Now()
	r := start(t, agent.Config{Options: o})
	response, err := r.client(namespace, "spoke").NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"},
	})
	require.NoError(t, err)
	took := time.Since(begun)
	t.Logf("%d node groups were served after %s", groups, took)
	require.Less(t, took, 30*time.Second, "it takes seconds, whatever else the machine does")
	require.Len(t, response.GetNodeGroups(), groups)
	for _, group := range response.GetNodeGroups() {
		require.Empty(t, group.GetProblems(), group.GetId())
		require.Equal(t, "4", group.GetCapacity()["cpu"])
	}
}

func TestUnusablePolicyFileIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	require.NoError(t, os.WriteFile(path, []byte("identities:\n- id: nobody\n"), 0o600))
	o := testOptions(plane.Namespace(t))
	o.PolicyFile = path
	_, err := agent.New(context.Background(), agent.Config{Options: o, Hub: plane.Config})
	require.ErrorContains(t, err, "--policy-file: policy file "+path)
}
