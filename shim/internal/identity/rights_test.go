package identity

import (
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/apiservertest"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// The rights are those of the chart's role, and the identity secret exists and is empty, as the
// chart creates it.
func TestTheRightsOfTheChartSuffice(t *testing.T) {
	server := apiservertest.Start(t)
	admin := server.Client
	user, err := server.AddUser(envtest.User{Name: "shim"}, nil)
	require.NoError(t, err)
	limited, err := client.New(user.Config(), client.Options{Scheme: scheme.Scheme})
	require.NoError(t, err)

	w := newEnvironment(t)
	w.kube = admin
	in := metav1.ObjectMeta{Namespace: identitySecret.Namespace, Name: "identity"}
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: in.Namespace}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: in.Namespace, Name: identitySecret.Name}},
		&rbacv1.Role{ObjectMeta: in, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{identitySecret.Name}, Verbs: []string{"get", "update"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{bootstrapSecret.Name}, Verbs: []string{"get"}},
		}},
		&rbacv1.RoleBinding{
			ObjectMeta: in, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: in.Name},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "shim"}},
		},
	} {
		require.NoError(t, admin.Create(t.Context(), object))
	}
	r := w.replica()
	r.Reader, r.Writer = limited, limited
	require.Eventually(t, func() bool { return r.round(w.ctx) == nil }, patience, patience/100, "the API server knows the role")
	w.put(bootstrapSecret, w.agent.onboard("first"))
	r.looks()
	r.works()
	first := w.stored()
	w.clock.Step(lifetime / 2)
	r.looks()
	require.NotEqual(t, first, w.stored())
	require.Equal(t, w.stored(), r.present())
	require.Empty(t, r.announced)

	require.NoError(t, admin.Delete(t.Context(), w.secret(identitySecret)))
	served := len(w.agent.served())
	require.ErrorContains(t, r.round(w.ctx), "`helm upgrade` makes it again")
	require.Len(t, w.agent.served(), served, "nothing is issued that cannot be stored")
	w.put(identitySecret, nil)
	w.clock.Step(10 * time.Minute)
	r.looks()
	require.Equal(t, w.stored(), r.present())
	r.works()
}
