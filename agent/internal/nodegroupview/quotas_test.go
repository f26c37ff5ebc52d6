package nodegroupview_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricelist"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// agentsRole returns the role of the account that limited gives the View.
func agentsRole(f *fixture, core ...string) *rbacv1.Role {
	all := []string{rbacv1.VerbAll}
	return &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "agent"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"cluster.x-k8s.io", "agent.karpenter.cluster.x-k8s.io", "events.k8s.io"}, Resources: all, Verbs: all},
		{APIGroups: []string{""}, Resources: core, Verbs: all},
	}}
}

// limited gives the View an account that may do in its namespace what it needs, but of the core
// group only with these resources.
func limited(core ...string) func(*fixture) {
	return func(f *fixture) {
		role := agentsRole(f, core...)
		subject := rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "agent-of-" + f.namespace}
		plane.Create(f.T, role, &rbacv1.RoleBinding{
			ObjectMeta: role.ObjectMeta, Subjects: []rbacv1.Subject{subject},
			RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
		})
		f.config = rest.CopyConfig(plane.Config)
		f.config.Impersonate = rest.ImpersonationConfig{UserName: subject.Name, Groups: []string{"system:authenticated"}}
	}
}

func TestWithoutRightsOnQuotasGroupsAreShownAllTheSame(t *testing.T) {
	f := start(t, limited("configmaps"), func(f *fixture) {
		quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "machines"}}
		plane.Create(t, quota)
		one := corev1.ResourceList{eligibility.MachineCount: resource.MustParse("1")}
		quota.Status = corev1.ResourceQuotaStatus{Hard: one, Used: one}
		plane.SetStatus(t, quota)
		plane.Create(t, capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described))
	})
	require.True(t, f.until("small", shown).GetAvailability().GetAvailable())
	require.Never(t, func() bool { return !f.group("small").GetAvailability().GetAvailable() }, time.Second, 10*time.Millisecond, "it stays so")
}

// A price list is a convenience. All Clusters need the agent.
func TestWithoutRightsOnThePriceListPricesAreEstimated(t *testing.T) {
	f := start(t, limited("resourcequotas"), func(f *fixture) {
		f.pricesPatience = 100 * time.Millisecond
		plane.Create(t, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: "prices"},
			Data:       map[string]string{pricelist.Key: "currency: EUR\nprices: [{instanceType: small, perHour: 7}]"},
		}, capitest.NewInfrastructureTemplate(f.namespace, "small", nil),
			capitest.NewMachineDeployment(f.namespace, "small", "spoke", 0, described))
	})
	group := f.until("small", shown)
	require.Equal(t, agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE, group.GetSources()["price"].GetKind())
	require.Zero(t, gauge(t, f.prices, "capi_agent_price_list_usable"))

	role := agentsRole(f)
	f.change(role, func() { role.Rules = agentsRole(f, "resourcequotas", "configmaps").Rules })
	require.Eventually(t, func() bool { return f.group("small").GetPrice().GetPerHour() == 7 }, time.Minute, 10*time.Millisecond,
		"the watch is tried again after half a minute at most")
	group = f.group("small")
	require.Equal(t, "EUR", group.GetPrice().GetCurrency())
}
