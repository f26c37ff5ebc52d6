package charts_test

import (
	"context"
	"fmt"
	"path"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// rights returns each combination of a verb and a resource, and of a name where there is one, that
// the roles among the objects grant the service account of a release.
func rights(t *testing.T, r release, objects []*unstructured.Unstructured) []authorizationv1.ResourceAttributes {
	t.Helper()
	role := func(kind, namespace, name string) []rbacv1.PolicyRule {
		if kind == "ClusterRole" {
			namespace = ""
		}
		found, ok := lo.Find(objects, func(o *unstructured.Unstructured) bool {
			return o.GetKind() == kind && o.GetNamespace() == namespace && o.GetName() == name
		})
		require.True(t, ok, "the %s %s/%s is of the same release", kind, namespace, name)
		return rules(t, []*unstructured.Unstructured{found})
	}
	account := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: r.name, Namespace: r.namespace}
	var granted []authorizationv1.ResourceAttributes
	for _, binding := range of[rbacv1.ClusterRoleBinding](t, objects, "ClusterRoleBinding") {
		if lo.Contains(binding.Subjects, account) {
			granted = append(granted, combinations(t, "", role(binding.RoleRef.Kind, "", binding.RoleRef.Name))...)
		}
	}
	for _, binding := range of[rbacv1.RoleBinding](t, objects, "RoleBinding") {
		if lo.Contains(binding.Subjects, account) {
			of := role(binding.RoleRef.Kind, binding.Namespace, binding.RoleRef.Name)
			granted = append(granted, combinations(t, binding.Namespace, of)...)
		}
	}
	require.NotEmpty(t, granted)
	return granted
}

func combinations(t *testing.T, namespace string, rules []rbacv1.PolicyRule) []authorizationv1.ResourceAttributes {
	t.Helper()
	var all []authorizationv1.ResourceAttributes
	for _, rule := range rules {
		require.Empty(t, rule.NonResourceURLs)
		names := rule.ResourceNames
		if len(names) == 0 {
			names = []string{""}
		}
		for _, of := range lo.CrossJoin4(rule.Verbs, rule.APIGroups, rule.Resources, names) {
			resource, subresource, _ := strings.Cut(of.C, "/")
			all = append(all, authorizationv1.ResourceAttributes{
				Namespace: namespace, Verb: of.A, Group: of.B, Resource: resource, Subresource: subresource, Name: of.D,
			})
		}
	}
	return all
}

// lacks returns those of the rights that the API server does not grant the service account of a
// release, in words.
func (h *hub) lacks(t require.TestingT, r release, rights []authorizationv1.ResourceAttributes) []string {
	var lacked []string
	for _, right := range rights {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:               r.user(),
			Groups:             []string{"system:serviceaccounts", "system:serviceaccounts:" + r.namespace, "system:authenticated"},
			ResourceAttributes: &right,
		}}
		require.NoError(t, h.admin.Create(context.Background(), review))
		if !review.Status.Allowed {
			of := schema.GroupResource{Group: right.Group, Resource: path.Join(right.Resource, right.Subresource)}
			lacked = append(lacked, fmt.Sprintf("%s %s %s/%s", right.Verb, of, right.Namespace, right.Name))
		}
	}
	return lacked
}

// gains returns what the service account of a release may do with the objects of an upgrade, and not
// yet with those that it has. Of an admission policy that the upgrade changes, it assumes that it
// permits more.
func (h *hub) gains(t *testing.T, r release, has, upgrade []*unstructured.Unstructured) []string {
	t.Helper()
	gained := h.lacks(t, r, rights(t, r, upgrade))
	before, after := policies(has), policies(upgrade)
	for name := range lo.Assign(before, after) {
		if !equality.Semantic.DeepEqual(before[name], after[name]) {
			gained = append(gained, "what "+name+" no longer refuses")
		}
	}
	return gained
}

// policies returns the specs of the admission policies and of their bindings among objects.
func policies(objects []*unstructured.Unstructured) map[string]any {
	found := map[string]any{}
	for _, object := range objects {
		if object.GroupVersionKind().Group == admissionv1.GroupName {
			found[object.GetKind()+" "+object.GetName()] = object.Object["spec"]
		}
	}
	return found
}
