package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// TestTheHubRefusesUnintendedWrites acts as users whom the agent chart's admission policies do not
// exempt. Every write is a dry run, which also passes admission.
func TestTheHubRefusesUnintendedWrites(t *testing.T) {
	shows(t, "admission: no user lowers replicas below what is claimed or edits the ledger, and the agent writes only what it needs")
	useCrowd(t)
	scale(t, "crowd", 1)
	await(t, 3*time.Minute, running(1))
	require.Equal(t, "1", crowdDeployment(t).Annotations[agentv1.ClaimedAnnotation])

	tool := administrator(t, "git-sync")
	agent := impersonate(t, "system:serviceaccount:karpenter-capi-system:capi-agent", "system:serviceaccounts", "system:authenticated")
	group := func() client.Object { return crowdDeployment(t) }
	machine := func() client.Object { return &listCrowd(t)[0] }
	set := func() client.Object {
		var sets clusterv1.MachineSetList
		require.NoError(t, w.Hub.List(t.Context(), &sets, client.InNamespace(sandbox.ClusterNamespace),
			client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: "crowd"}))
		return &sets.Items[0]
	}
	const (
		claimed  = "spec.replicas: 1 machines of this node group are claimed, and 0 replicas"
		noLedger = agentv1.LedgerAnnotation + "]: only the agent changes it"
		noNumber = agentv1.ClaimedAnnotation + "]: only the agent changes it"
		noLabels = "metadata.labels: the agent"
	)
	unlabel := func(key string) string { return fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, key) }
	annotation := func(key, value string) string { return fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, key, value) }
	for name, tc := range map[string]struct {
		as     client.Client
		object func() client.Object
		patch  string
		says   string // empty if it is allowed
	}{
		"a tool lowers below what is claimed":  {tool, group, `{"spec":{"replicas":0}}`, claimed},
		"a tool raises":                        {tool, group, `{"spec":{"replicas":9}}`, ""},
		"a tool changes something else":        {tool, group, annotation("example.com/note", `"x"`), ""},
		"a tool removes the ledger":            {tool, group, annotation(agentv1.LedgerAnnotation, "null"), noLedger},
		"a tool edits the ledger":              {tool, group, annotation(agentv1.LedgerAnnotation, `"{}"`), noLedger},
		"a tool says that nothing is claimed":  {tool, group, annotation(agentv1.ClaimedAnnotation, `"0"`), noNumber},
		"a person clears a frozen group":       {tool, group, annotation(agentv1.ReplicasLoweredAnnotation, "null"), ""},
		"a person who is exempt lowers":        {w.Hub, group, `{"spec":{"replicas":0}}`, ""},
		"the agent writes replicas":            {agent, group, `{"spec":{"replicas":0}}`, ""},
		"the agent pauses":                     {agent, group, annotation(clusterv1.PausedAnnotation, `"x"`), ""},
		"the agent changes a template":         {agent, group, `{"spec":{"template":{"spec":{"version":"v9.9.9"}}}}`, "the agent changes only replicas"},
		"the agent pauses for good":            {agent, group, `{"spec":{"paused":true}}`, "the agent changes only replicas"},
		"the agent takes a member's label":     {agent, group, unlabel(agentv1.MemberLabel), noLabels},
		"the agent annotates for others":       {agent, group, annotation("example.com/note", `"x"`), "metadata.annotations: the agent"},
		"the agent writes a MachineSet":        {agent, set, `{"spec":{"replicas":0}}`, ""},
		"the agent changes a MachineSet":       {agent, set, `{"spec":{"template":{"spec":{"version":"v9.9.9"}}}}`, "the agent changes only replicas"},
		"the agent marks a Machine":            {agent, machine, annotation(clusterv1.DeleteMachineAnnotation, `"x"`), ""},
		"the agent changes a Machine":          {agent, machine, `{"spec":{"version":"v9.9.9"}}`, "the agent does not change the spec of a Machine"},
		"the agent takes a foreign finalizer":  {agent, machine, `{"metadata":{"finalizers":[]}}`, "only its own finalizer"},
		"the agent disowns a Machine":          {agent, machine, `{"metadata":{"ownerReferences":[]}}`, "no owner"},
		"the agent labels for others":          {agent, machine, `{"metadata":{"labels":{"example.com/note":"x"}}}`, noLabels},
		"the agent takes a label of a Machine": {agent, machine, unlabel(clusterv1.MachineDeploymentNameLabel), noLabels},
	} {
		t.Run(name, func(t *testing.T) {
			expectRefusal(t, tc.as.Patch(t.Context(), tc.object(), client.RawPatch(types.MergePatchType, []byte(tc.patch)), client.DryRunAll), tc.says)
		})
	}
	for replicas, says := range map[int32]string{0: "spec.replicas: 1 machines of this node group are claimed", 1: "", 5: ""} {
		t.Run(fmt.Sprintf("a tool scales to %d", replicas), func(t *testing.T) {
			to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}
			md := crowdDeployment(t)
			// The API server's informer of the policy's parameters lags slightly.
			require.EventuallyWithT(t, func(c *assert.CollectT) {
				refuses(c, tool.SubResource("scale").Update(t.Context(), md, client.WithSubResourceBody(to), client.DryRunAll), says)
			}, soon, 10*time.Millisecond)
		})
	}
	t.Run("a tool replaces the MachineDeployment", func(t *testing.T) {
		md := crowdDeployment(t)
		md.Annotations = nil
		expectRefusal(t, tool.Update(t.Context(), md, client.DryRunAll), "Replacing the whole object removes it")
	})
}

func expectRefusal(t *testing.T, err error, says string) {
	t.Helper()
	refuses(t, err, says)
}

// refuses verifies that a request was refused with these words, or, if there are none, not at all.
func refuses(t require.TestingT, err error, says string) {
	if says == "" {
		require.NoError(t, err)
		return
	}
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	require.ErrorContains(t, err, says)
}

// administrator returns a client of the hub for a user who may do everything, but is not in
// system:masters.
func administrator(t *testing.T, user string) client.Client {
	t.Helper()
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}
	if err := w.Hub.Create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		if err := w.Hub.Delete(ctx, binding); err != nil {
			t.Error(err)
		}
	})
	return impersonate(t, user, "system:authenticated")
}

func impersonate(t *testing.T, user string, groups ...string) client.Client {
	t.Helper()
	config := w.Sandbox.HubConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	c, err := client.New(config, client.Options{Scheme: w.Hub.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
