package authz_test

import (
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
)

// The fake agent rejects the same calls as the agent, so that tools can be tested with it.
func TestTheFakeAgentHasTheseRoles(t *testing.T) {
	for method, fake := range fakeagent.Rules() {
		t.Run(strings.TrimPrefix(method, "/"), func(t *testing.T) {
			g := NewWithT(t)
			rule, known := authz.Methods[method]
			g.Expect(known).To(BeTrue())
			g.Expect(fake.Anyone).To(Equal(rule.Anyone))
			g.Expect(fake.Everyone).To(Equal(rule.Everyone))
			g.Expect(fake.AsHolder).To(Equal(rule.AsHolder))
			g.Expect(fake.OfCluster()).To(Equal(rule.OfCluster))
			g.Expect(fake.OfAnyCluster).To(Equal(rule.OfAnyCluster))
			for _, role := range roles {
				g.Expect(slices.Contains(fake.Roles, fakeagent.Role(role))).To(Equal(slices.Contains(rule.Roles, role)), string(role))
			}
		})
	}
	for method := range authz.Methods {
		if strings.HasPrefix(method, "/capi.agent.") {
			NewWithT(t).Expect(fakeagent.Rules()).To(HaveKey(method))
		}
	}
}

func TestTheFakeAgentLetsRolesActAsTheseHolders(t *testing.T) {
	for _, role := range roles {
		for _, holder := range []string{"karpenter", "unknown", "cluster-autoscaler", "cluster-autoscaler-a", "cluster-autoscalers", "a-person", ""} {
			NewWithT(t).Expect(fakeagent.Role(role).MayActAs(holder)).To(Equal(authz.Holders[role].Has(holder)), "%s as %q", role, holder)
		}
	}
}

var roles = []authz.Role{authz.RoleCluster, authz.RoleReader, authz.RoleAutoscaler, authz.RoleAdmin, authz.RoleBootstrap}
