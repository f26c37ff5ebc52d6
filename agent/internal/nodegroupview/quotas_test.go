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
)

// withoutQuotas gives the View an account that may do everything in its namespace except
// reading ResourceQuotas.
func withoutQuotas(f *fixture) {
	meta := metav1.ObjectMeta{Namespace: f.namespace, Name: "agent"}
	all := []string{rbacv1.VerbAll}
	role := &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"cluster.x-k8s.io", "agent.karpenter.cluster.x-k8s.io", "events.k8s.io"}, Resources: all, Verbs: all},
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: all},
	}}
	subject := rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "agent-of-" + f.namespace}
	plane.Create(f.T, role, &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{subject},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
	})
	f.config = rest.CopyConfig(plane.Config)
	f.config.Impersonate = rest.ImpersonationConfig{UserName: subject.Name, Groups: []string{"system:authenticated"}}
}

func TestWithoutRightsOnQuotasGroupsAreShownAllTheSame(t *testing.T) {
	f := start(t, withoutQuotas, func(f *fixture) {
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
