package authz_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
)

// The fake agent rejects the same calls as the agent, so that tools can be tested with it.
func TestTheFakeAgentHasTheseRoles(t *testing.T) {
	for method, fake := range fakeagent.Rules() {
		t.Run(strings.TrimPrefix(method, "/"), func(t *testing.T) {
			rule, known := authz.Methods[method]
			require.True(t, known)
			require.Equal(t, rule.Anyone, fake.Anyone)
			require.Equal(t, rule.Everyone, fake.Everyone)
			require.Equal(t, rule.AsHolder, fake.AsHolder)
			require.Equal(t, rule.OfCluster, fake.OfCluster())
			require.Equal(t, rule.OfAnyCluster, fake.OfAnyCluster)
			for _, role := range roles {
				require.Equal(t, slices.Contains(rule.Roles, role), slices.Contains(fake.Roles, fakeagent.Role(role)), string(role))
			}
		})
	}
	for method := range authz.Methods {
		if strings.HasPrefix(method, "/capi.agent.") {
			require.Contains(t, fakeagent.Rules(), method)
		}
	}
}

func TestTheFakeAgentLetsRolesActAsTheseHolders(t *testing.T) {
	for _, role := range roles {
		for _, holder := range []string{"karpenter", "unknown", "cluster-autoscaler", "cluster-autoscaler-a", "cluster-autoscalers", "a-person", ""} {
			require.Equal(t, authz.Holders[role].Has(holder), fakeagent.Role(role).MayActAs(holder), "%s as %q", role, holder)
		}
	}
}

var roles = []authz.Role{authz.RoleCluster, authz.RoleReader, authz.RoleAutoscaler, authz.RoleAdmin, authz.RoleBootstrap}
