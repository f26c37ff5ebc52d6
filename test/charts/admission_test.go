package charts_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// What the policies refuse, and to whom. Writes are dry runs, which also pass admission.

const (
	onlyTheAgent = "only the agent changes it"
	tooFew       = "machines of this node group are claimed"
)

// versions are the versions in which Cluster API serves its kinds.
var versions = []string{"v1beta1", clusterv1.GroupVersion.Version}

// Only the numbers of replicas matter, not the request's version or form.
func TestReplicasAreNotLoweredBelowWhatIsClaimed(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "versions-system"}
	h.namespaces(t, "versions")
	h.install(t, r, chartPath(t, charts[0]), confined("versions")...)
	tool := h.tool(t)

	writes := map[string]func(ctx context.Context, md *unstructured.Unstructured, replicas int) error{
		"a merge patch": func(ctx context.Context, md *unstructured.Unstructured, replicas int) error {
			return tool.Patch(ctx, md, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)), client.DryRunAll)
		},
		"a JSON patch": func(ctx context.Context, md *unstructured.Unstructured, replicas int) error {
			patch := fmt.Appendf(nil, `[{"op":"replace","path":"/spec/replicas","value":%d}]`, replicas)
			return tool.Patch(ctx, md, client.RawPatch(types.JSONPatchType, patch), client.DryRunAll)
		},
		"a replacement": func(ctx context.Context, md *unstructured.Unstructured, replicas int) error {
			if err := tool.Get(ctx, client.ObjectKeyFromObject(md), md); err != nil {
				return err
			}
			if err := unstructured.SetNestedField(md.Object, int64(replicas), "spec", "replicas"); err != nil {
				return err
			}
			return tool.Update(ctx, md, client.DryRunAll)
		},
		"a server-side apply": func(ctx context.Context, md *unstructured.Unstructured, replicas int) error {
			md.Object["spec"] = map[string]any{"replicas": int64(replicas)}
			return tool.Apply(ctx, client.ApplyConfigurationFromUnstructured(md), client.DryRunAll, client.ForceOwnership, client.FieldOwner("git-sync"))
		},
		"an update of the scale": func(ctx context.Context, md *unstructured.Unstructured, replicas int) error {
			to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: int32(replicas)}}
			return tool.SubResource("scale").Update(ctx, md, client.WithSubResourceBody(to), client.DryRunAll)
		},
		"a patch of the scale": func(ctx context.Context, md *unstructured.Unstructured, replicas int) error {
			patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
			return tool.SubResource("scale").Patch(ctx, md, patch, client.DryRunAll)
		},
	}
	claimed := map[string]int{"absent": 0, "0": 0, "2": 2, "many": 0, "-1": 0}
	for _, before := range []int{1, 3} {
		for number := range claimed {
			h.group(t, "versions", fmt.Sprintf("of-%d-claimed-%s", before, strings.ReplaceAll(number, "-", "m")), before, number)
		}
	}
	h.awaitPolicies(t, r, "versions")

	for _, version := range versions {
		for how, write := range writes {
			for number, atLeast := range claimed {
				t.Run(fmt.Sprintf("%s in %s with %s claimed", how, version, number), func(t *testing.T) {
					for _, before := range []int{1, 3} {
						for after := range 5 {
							md := inVersion(version, "versions", fmt.Sprintf("of-%d-claimed-%s", before, strings.ReplaceAll(number, "-", "m")))
							err := write(t.Context(), md, after)
							refused := after < before && after < atLeast
							refuses(t, err, lo.Ternary(refused, fmt.Sprintf("%d %s, and %d replicas", atLeast, tooFew, after), ""))
						}
					}
				})
			}
		}
	}
}

func TestTheLedgerIsTheAgentsInEveryVersion(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "ledgers-system"}
	h.namespaces(t, "ledgers")
	h.install(t, r, chartPath(t, charts[0]), confined("ledgers")...)
	h.group(t, "ledgers", "group", 3, "2")
	copied := newGroup("ledgers", "copied", 3, "2")
	copied.Annotations[agentv1.LedgerAnnotation] = ledgerOf("ledgers/group")
	if err := h.admin.Create(t.Context(), copied); err != nil {
		t.Fatal(err)
	}
	h.awaitPolicies(t, r, "ledgers")
	tool, agent := h.tool(t), h.agent(t, r, "ledgers")

	for _, version := range versions {
		for _, key := range []string{agentv1.LedgerAnnotation, agentv1.ClaimedAnnotation} {
			refusal := key + "]: " + onlyTheAgent
			for _, value := range []string{"null", `"1"`} {
				t.Run(fmt.Sprintf("%s to %s in %s", key, value, version), func(t *testing.T) {
					patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%s}}}`, key, value))
					refuses(t, tool.Patch(t.Context(), inVersion(version, "ledgers", "group"), patch, client.DryRunAll), refusal)
					refuses(t, agent.Patch(t.Context(), inVersion(version, "ledgers", "group"), patch, client.DryRunAll), "")
					refuses(t, tool.Patch(t.Context(), inVersion(version, "ledgers", "copied"), patch, client.DryRunAll), "")
				})
			}
			t.Run(fmt.Sprintf("%s left out of a replacement in %s", key, version), func(t *testing.T) {
				md := inVersion(version, "ledgers", "group")
				require.NoError(t, tool.Get(t.Context(), client.ObjectKeyFromObject(md), md))
				annotations := md.GetAnnotations()
				delete(annotations, key)
				md.SetAnnotations(annotations)
				refuses(t, tool.Update(t.Context(), md, client.DryRunAll), refusal)
			})
		}
		t.Run("the status in "+version+" is no way around it", func(t *testing.T) {
			md := inVersion(version, "ledgers", "group")
			patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}},"spec":{"replicas":0},"status":{"observedGeneration":9}}`,
				agentv1.LedgerAnnotation)
			require.NoError(t, tool.Status().Patch(t.Context(), md, client.RawPatch(types.MergePatchType, patch), client.DryRunAll))
			require.Contains(t, md.GetAnnotations(), agentv1.LedgerAnnotation)
			require.Contains(t, string(lo.Must(json.Marshal(md.Object["spec"]))), `"replicas":3`)
		})
	}
}

func TestTheAgentIsConfinedInEveryVersion(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "confined-system"}
	h.namespaces(t, "confined")
	h.install(t, r, chartPath(t, charts[0]), confined("confined")...)
	h.group(t, "confined", "group", 3, "2")
	h.machine(t, "confined", "machine")
	h.awaitPolicies(t, r, "confined")
	agent := h.agent(t, r, "confined")

	annotation := func(key string) string { return fmt.Sprintf(`{"metadata":{"annotations":{%q:"x"}}}`, key) }
	const onlyReplicas, nothing = "the agent changes only replicas", "the agent does not change the spec of a Machine"
	for name, tc := range map[string]struct {
		kind, patch, says string
	}{
		"replicas":                {"MachineDeployment", `{"spec":{"replicas":0}}`, ""},
		"a pause":                 {"MachineDeployment", annotation(clusterv1.PausedAnnotation), ""},
		"another's annotation":    {"MachineDeployment", annotation("example.com/note"), "metadata.annotations: the agent"},
		"a template":              {"MachineDeployment", `{"spec":{"template":{"spec":{"version":"v9.9.9"}}}}`, onlyReplicas},
		"paused":                  {"MachineDeployment", `{"spec":{"paused":true}}`, onlyReplicas},
		"a mark on a Machine":     {"Machine", annotation(clusterv1.DeleteMachineAnnotation), ""},
		"who repairs a Machine":   {"Machine", annotation(clusterv1.MachineSkipRemediationAnnotation), ""},
		"its finalizer":           {"Machine", fmt.Sprintf(`{"metadata":{"finalizers":["example.com/keep",%q]}}`, agentv1.ReleaseFinalizer), ""},
		"another's finalizer":     {"Machine", `{"metadata":{"finalizers":null}}`, "only its own finalizer"},
		"a Machine's version":     {"Machine", `{"spec":{"version":"v9.9.9"}}`, nothing},
		"a Machine's provider ID": {"Machine", `{"spec":{"providerID":"sim://other"}}`, nothing},
		"another's label":         {"Machine", `{"metadata":{"labels":{"example.com/note":"x"}}}`, "metadata.labels: the agent"},
	} {
		for _, version := range versions {
			t.Run(name+" in "+version, func(t *testing.T) {
				object := inVersion(version, "confined", lo.Ternary(tc.kind == "Machine", "machine", "group"))
				object.SetKind(tc.kind)
				err := agent.Patch(t.Context(), object, client.RawPatch(types.MergePatchType, []byte(tc.patch)), client.DryRunAll)
				refuses(t, err, tc.says)
			})
		}
	}
}

// The feature gate PodDeletionCostManagement brings the right to patch every pod of the spoke.
func TestTheShimIsConfinedToTheDeletionCostOfPods(t *testing.T) {
	h := theHub(t)
	r := release{"karpenter-pods", "karpenter-pods"}
	h.namespaces(t, "pods")
	h.install(t, r, chartPath(t, charts[1]), "--set", "crds.install=false,agent.address=agent.example:8443,"+
		"cluster.namespace=team-a,cluster.name=production,settings.featureGates.PodDeletionCostManagement=true")
	const owner = "example.com/owner"
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "pods", Name: "pod", Labels: map[string]string{owner: "team"}, Annotations: map[string]string{owner: "team"},
			Finalizers: []string{"example.com/keep"},
		},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "registry.example/app:v1"}}},
	}
	require.NoError(t, h.admin.Create(t.Context(), pod))
	patch := func(c client.Client, patch string) error {
		object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name}}
		return c.Patch(t.Context(), object, client.RawPatch(types.StrategicMergePatchType, []byte(patch)), client.DryRunAll)
	}
	annotate := func(key, value string) string { return fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, key, value) }
	const image = `{"spec":{"containers":[{"name":"c","image":"registry.example/other:v1"}]}}`
	// The API server has added the first two.
	const tolerations = `{"spec":{"tolerations":[
		{"key":"node.kubernetes.io/not-ready","operator":"Exists","effect":"NoExecute","tolerationSeconds":300},
		{"key":"node.kubernetes.io/unreachable","operator":"Exists","effect":"NoExecute","tolerationSeconds":300},
		{"operator":"Exists"}]}}`
	shim := h.as(t, r.user(), "system:serviceaccounts", "system:serviceaccounts:"+r.namespace)
	eventually(t, func(c *assert.CollectT) {
		refuses(c, patch(shim, image), "pods."+r.name)
		require.NoError(c, patch(shim, `{}`)) // RBAC refused as well before
	})

	const onlyTheCost, metadata = "metadata.annotations: the shim changes only the deletion cost", "metadata: the shim changes no labels"
	require.NoError(t, h.admin.Patch(t.Context(), pod, client.RawPatch(types.MergePatchType, []byte(annotate(corev1.PodDeletionCost, `"1"`)))))
	for name, tc := range map[string]struct{ patch, says string }{
		"another cost":          {annotate(corev1.PodDeletionCost, `"-7"`), ""},
		"no cost":               {annotate(corev1.PodDeletionCost, "null"), ""},
		"no annotations":        {`{"metadata":{"annotations":null}}`, onlyTheCost},
		"another's annotation":  {annotate("example.com/note", `"x"`), onlyTheCost},
		"a changed annotation":  {annotate(owner, `"x"`), onlyTheCost},
		"a removed annotation":  {annotate(owner, "null"), onlyTheCost},
		"an image":              {image, "spec: the shim does not change the spec of a pod"},
		"a deadline":            {`{"spec":{"activeDeadlineSeconds":1}}`, "spec: the shim does not change the spec of a pod"},
		"a toleration":          {tolerations, "spec: the shim does not change the spec of a pod"},
		"a label":               {`{"metadata":{"labels":{"example.com/note":"x"}}}`, metadata},
		"a removed label":       {fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, owner), metadata},
		"a finalizer":           {`{"metadata":{"finalizers":["example.com/other"]}}`, metadata},
		"the removed finalizer": {`{"metadata":{"$deleteFromPrimitiveList/finalizers":["example.com/keep"]}}`, metadata},
		"an owner": {
			`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"n","uid":"u"}]}}`, metadata,
		},
	} {
		t.Run(name, func(t *testing.T) {
			refuses(t, patch(shim, tc.patch), tc.says)
			refuses(t, patch(h.tool(t), tc.patch), "")
		})
	}
	t.Run("a replacement and a status are not granted", func(t *testing.T) {
		require.NoError(t, h.admin.Get(t.Context(), client.ObjectKeyFromObject(pod), pod))
		refuses(t, shim.Update(t.Context(), pod, client.DryRunAll), `cannot update resource "pods"`)
		err := shim.Status().Patch(t.Context(), pod, client.RawPatch(types.MergePatchType, []byte(`{"status":{"reason":"x"}}`)), client.DryRunAll)
		refuses(t, err, `cannot patch resource "pods/status"`)
	})
}

// Without the right, there is nothing to confine.
func TestTheShimIsConfinedWhereItMayPatchPods(t *testing.T) {
	for set, confined := range map[string]bool{
		"settings.featureGates.PodDeletionCostManagement=false":                               false,
		"settings.featureGates.PodDeletionCostManagement=true":                                true,
		"settings.featureGates.PodDeletionCostManagement=true,admission=null":                 true, // the values of an older release
		"settings.featureGates.PodDeletionCostManagement=true,admission.confineShim=false":    false,
		"settings.featureGates.PodDeletionCostManagement=true,rbac.create=false":              false,
		"settings.featureGates.PodDeletionCostManagement=true,serviceAccount.name=of-another": true,
	} {
		t.Run(set, func(t *testing.T) {
			objects := render(t, charts[1], filepath.Join(chartPath(t, charts[1]), "ci", "defaults-values.yaml"), "--set", set)
			policies := of[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy")
			require.Len(t, policies, lo.Ternary(confined, 1, 0))
			require.Len(t, of[admissionv1.ValidatingAdmissionPolicyBinding](t, objects, "ValidatingAdmissionPolicyBinding"), len(policies))
			for _, policy := range policies {
				account := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.ServiceAccountName
				require.Contains(t, policy.Spec.MatchConditions[0].Expression, "'system:serviceaccount:karpenter:"+account+"'")
			}
		})
	}
}

// Each does its usual work in a hub, and only the removal of claimed machines is refused.
func TestOthersGoOnWithTheirWork(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "others-system"}
	h.namespaces(t, "others")
	h.install(t, r, chartPath(t, charts[0]), confined("others")...)
	h.group(t, "others", "group", 3, "2")
	h.awaitPolicies(t, r, "others")

	account := func(namespace, name string) client.Client {
		return h.as(t, "system:serviceaccount:"+namespace+":"+name, unrestricted, "system:serviceaccounts")
	}
	clusterAPI, collector := account("capi-system", "capi-manager"), account("kube-system", "generic-garbage-collector")
	person, autoscaler := h.as(t, "jane", unrestricted), account("kube-system", "cluster-autoscaler")
	annotation := func(key, value string) string { return fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, key, value) }
	merge := func(c client.Client, patch string) func(context.Context, *unstructured.Unstructured) error {
		return func(ctx context.Context, md *unstructured.Unstructured) error {
			return c.Patch(ctx, md, client.RawPatch(types.MergePatchType, []byte(patch)), client.DryRunAll)
		}
	}
	apply := func(spec map[string]any) func(context.Context, *unstructured.Unstructured) error {
		return func(ctx context.Context, md *unstructured.Unstructured) error {
			md.Object["spec"] = spec
			return clusterAPI.Apply(ctx, client.ApplyConfigurationFromUnstructured(md),
				client.DryRunAll, client.ForceOwnership, client.FieldOwner("capi-topology"))
		}
	}
	scale := func(replicas int32) func(context.Context, *unstructured.Unstructured) error {
		return func(ctx context.Context, md *unstructured.Unstructured) error {
			to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: replicas}}
			return autoscaler.SubResource("scale").Update(ctx, md, client.WithSubResourceBody(to), client.DryRunAll)
		}
	}
	for name, tc := range map[string]struct {
		write func(context.Context, *unstructured.Unstructured) error
		says  string
	}{
		"the MachineDeployment controller adds its finalizer": {merge(clusterAPI, `{"metadata":{"finalizers":["cluster.x-k8s.io/md"]}}`), ""},
		"the MachineDeployment controller counts a revision":  {merge(clusterAPI, annotation(clusterv1.RevisionAnnotation, "2")), ""},
		"the storage version is migrated":                     {merge(clusterAPI, `{}`), ""},
		"the topology controller rolls a version out":         {merge(clusterAPI, `{"spec":{"template":{"spec":{"version":"v9.9.9"}}}}`), ""},
		"the topology controller owns more replicas":          {apply(map[string]any{"replicas": int64(4)}), ""},
		"the topology controller owns fewer than are claimed": {apply(map[string]any{"replicas": int64(1)}), tooFew},
		"the garbage collector takes an owner off":            {merge(collector, `{"metadata":{"ownerReferences":null}}`), ""},
		"the garbage collector blocks on dependents":          {merge(collector, `{"metadata":{"finalizers":["foregroundDeletion"]}}`), ""},
		"the autoscaler scales up":                            {scale(5), ""},
		"the autoscaler scales down to what is claimed":       {scale(2), ""},
		"the autoscaler scales below what is claimed":         {scale(1), tooFew},
		"a person pauses":                                       {merge(person, annotation(clusterv1.PausedAnnotation, "")), ""},
		"a person takes it from Karpenter":                      {merge(person, fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, agentv1.MemberLabel)), ""},
		"a person raises the max size":                          {merge(person, annotation(clusterv1.AutoscalerMaxSizeAnnotation, "9")), ""},
		"clusterctl marks what it moves":                        {merge(person, annotation(clusterctlv1.DeleteForMoveAnnotation, "")), ""},
		"clusterctl takes all finalizers off what it moved":     {merge(person, `{"metadata":{"finalizers":null}}`), ""},
		"clusterctl deletes what it moved":                      {deletes(person), ""},
		"clusterctl meets what an earlier move left, as it was": {again(person, nil), ""},
		"clusterctl meets what an earlier move left, other since": {again(person, func(md *unstructured.Unstructured) {
			md.SetAnnotations(map[string]string{agentv1.LedgerAnnotation: ledgerOf("others/group") + " ", agentv1.ClaimedAnnotation: "2"})
		}), onlyTheAgent},
	} {
		for _, version := range versions {
			t.Run(name+", in "+version, func(t *testing.T) {
				refuses(t, tc.write(t.Context(), inVersion(version, "others", "group")), tc.says)
			})
		}
	}
	t.Run("clusterctl and a restore create what has a ledger", func(t *testing.T) {
		for _, name := range []string{"moved", "elsewhere"} {
			md := newGroup("others", name, 1, "5")
			refuses(t, person.Create(t.Context(), md, client.DryRunAll), "")
		}
	})
	for replicas, says := range map[int]string{4: "", 2: "", 1: tooFew} {
		t.Run(fmt.Sprintf("kubectl scale to %d", replicas), func(t *testing.T) {
			kubectl := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin", "kubectl"), "--kubeconfig", h.kubeconfig,
				"--as", "jane", "--as-group", unrestricted, "--namespace", "others",
				"scale", "machinedeployment", "group", fmt.Sprintf("--replicas=%d", replicas), "--dry-run=server")
			output, err := kubectl.CombinedOutput()
			if says == "" {
				require.NoError(t, err, string(output))
			} else {
				require.Error(t, err)
				require.Contains(t, string(output), says)
			}
		})
	}
}

func deletes(c client.Client) func(context.Context, *unstructured.Unstructured) error {
	return func(ctx context.Context, md *unstructured.Unstructured) error {
		return c.Delete(ctx, md, client.DryRunAll)
	}
}

// again does what clusterctl does with an object that already exists: it replaces it with the
// source's.
func again(c client.Client, change func(*unstructured.Unstructured)) func(context.Context, *unstructured.Unstructured) error {
	return func(ctx context.Context, md *unstructured.Unstructured) error {
		if err := c.Get(ctx, client.ObjectKeyFromObject(md), md); err != nil {
			return err
		}
		if change != nil {
			change(md)
		}
		return c.Update(ctx, md, client.DryRunAll)
	}
}

// The deletion of a namespace and of its Cluster removes node groups regardless of claims: no
// policy refuses a DELETE, nor its consequences.
func TestAGroupThatIsDeletedGoes(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "deleted-system"}
	h.namespaces(t, "deleted")
	h.install(t, r, chartPath(t, charts[0]), confined("deleted")...)
	md := h.group(t, "deleted", "group", 3, "2")
	controllerutil.AddFinalizer(md, clusterv1.MachineDeploymentFinalizer)
	require.NoError(t, h.admin.Update(t.Context(), md))
	h.awaitPolicies(t, r, "deleted")

	clusterAPI := h.as(t, "system:serviceaccount:capi-system:capi-manager", unrestricted)
	require.NoError(t, clusterAPI.Delete(t.Context(), md, client.PropagationPolicy(metav1.DeletePropagationForeground)))
	for _, patch := range []string{`{"metadata":{"finalizers":["foregroundDeletion"]}}`, `{"metadata":{"finalizers":null}}`} {
		require.NoError(t, clusterAPI.Patch(t.Context(), md, client.RawPatch(types.MergePatchType, []byte(patch))))
	}
	require.True(t, apierrors.IsNotFound(h.admin.Get(t.Context(), client.ObjectKeyFromObject(md), md)))
}

// What a release creates outside its namespace has a name that no other release uses.
func TestReleasesShareNoNames(t *testing.T) {
	for kind, test := range map[string]struct {
		values  []string
		outside int
		// own is the name that releases of the chart have in examples.
		own string
	}{
		"agent": {[]string{"defaults", "confined", "priced"}, 8, "capi-agent"}, // a ClusterRole with its binding, three policies with theirs
		"shim":  {[]string{"defaults", "enrollment"}, 2, "karpenter"},          // a ClusterRole with its binding
	} {
		owner := map[string]release{}
		for _, r := range []release{
			{"capi-agent", "one"},
			{"capi-agent", "two"},
			{"capi-agent-one", "two"},
			{"capi-agent", "one-two"},
			{"capi-agent-two", "one"},
			{"a", "b-capi-agent"},
			{"a-b", "capi-agent"},
			{"a", "capi-agent"},
			{"capi-agent.one", "two"},
			{"b", "a"},
			{"karpenter", "one"},
			{"karpenter", "two"},
		} {
			c := chart{name: kind, release: r.name, namespace: r.namespace}
			for _, values := range test.values {
				outside := 0
				// The CRDs are of one release alone, and extra objects are the user's.
				for _, object := range render(t, c, valuesFile(t, kind, values),
					"--set", "crds.install=false,extraObjects=null,metrics.dashboard.enabled=true,metrics.dashboard.namespace=monitoring") {
					if object.GetNamespace() == r.namespace {
						continue
					}
					outside++
					require.NotEqual(t, test.own, object.GetName(), "another product may have a %s of this name", object.GetKind())
					key := fmt.Sprintf("%s %s/%s", object.GetKind(), object.GetNamespace(), object.GetName())
					if other, taken := owner[key]; taken {
						require.Equal(t, r, other, "%s is of both", key)
					}
					owner[key] = r
				}
				require.GreaterOrEqual(t, outside, test.outside)
			}
		}
	}
}

func valuesFile(t *testing.T, kind, name string) string {
	t.Helper()
	if name == "priced" {
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte("pricing: {list: team-a/prices}\nclusters: [team-a/production]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	return filepath.Join(chartPath(t, chart{name: kind}), "ci", name+"-values.yaml")
}

// Two agents with the same name serve two teams. The policies of one do not apply to the node
// groups of the other, and are not removed with the other.
func TestReleasesShareAHub(t *testing.T) {
	h := theHub(t)
	one, two := release{"capi-agent", "one-system"}, release{"capi-agent", "two-system"}
	h.namespaces(t, "one", "two", "both")
	h.install(t, one, chartPath(t, charts[0]), confined("one")...)
	// The second serves Clusters in the first's namespace.
	h.install(t, two, chartPath(t, charts[0]), without("--set", "namespaces={two},clusters={one/staging}")...)
	for _, namespace := range []string{"one", "two"} {
		h.group(t, namespace, "group", 3, "2")
	}
	h.awaitPolicies(t, one, "one")
	h.awaitPolicies(t, two, "two")
	// RBAC also applies. These clients are unrestricted by RBAC, to test the policies alone.
	agents := map[release]client.Client{one: h.as(t, one.user(), unrestricted), two: h.as(t, two.user(), unrestricted)}
	lower := client.RawPatch(types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"0"}},"spec":{"replicas":0}}`, agentv1.ClaimedAnnotation))
	patch := func(c client.Client, namespace string) error {
		return c.Patch(t.Context(), inVersion("v1beta2", namespace, "group"), lower, client.DryRunAll)
	}

	t.Run("each agent writes its own node groups, and not the other's", func(t *testing.T) {
		refuses(t, patch(h.agent(t, one, "one"), "one"), "")
		refuses(t, patch(h.agent(t, two, "two"), "two"), "")
		refuses(t, patch(agents[one], "two"), "node-groups."+two.hubName())
		refuses(t, patch(agents[two], "one"), "node-groups."+one.hubName())
	})
	t.Run("a removal leaves the other's", func(t *testing.T) {
		before := h.guards(t, two)
		require.Len(t, before, 9)
		h.uninstall(t, one)
		require.Empty(t, h.guards(t, one))
		require.Equal(t, before, h.guards(t, two), "the same objects")
		tool := h.tool(t)
		eventually(t, func(c *assert.CollectT) { refuses(c, patch(tool, "one"), "") })
		refuses(t, patch(tool, "two"), "node-groups."+two.hubName())
		refuses(t, patch(h.agent(t, two, "two"), "two"), "")
	})
}

// If two releases serve the same node groups, neither agent may write unless each names the other.
func TestReleasesThatServeTheSameExemptEachOther(t *testing.T) {
	h := theHub(t)
	one, two := release{"capi-agent", "left-system"}, release{"capi-agent", "right-system"}
	h.namespaces(t, "same")
	h.install(t, one, chartPath(t, charts[0]), confined("same")...)
	h.install(t, two, chartPath(t, charts[0]), confined("same")...)
	h.group(t, "same", "group", 3, "2")
	// Each agent is exempt from its own release's policies, so a refusal comes from the other's.
	for r, other := range map[release]release{one: two, two: one} {
		h.awaitGuard(t, h.as(t, other.user(), unrestricted), "node-groups."+r.hubName(), "scale."+r.hubName(), "same")
	}
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"0"}}}`, agentv1.ClaimedAnnotation))
	agents := map[release]client.Client{one: h.agent(t, one, "same"), two: h.agent(t, two, "same")}
	for _, agent := range agents {
		refuses(t, agent.Patch(t.Context(), inVersion("v1beta2", "same", "group"), patch, client.DryRunAll), onlyTheAgent)
	}

	for r, other := range map[release]release{one: two, two: one} {
		h.upgrade(t, r, append(confined("same"), "--set", "admission.exempt.users={"+other.user()+"}")...)
	}
	eventually(t, func(c *assert.CollectT) {
		for _, agent := range agents {
			refuses(c, agent.Patch(t.Context(), inVersion("v1beta2", "same", "group"), patch, client.DryRunAll), "")
		}
	})
	refuses(t, h.tool(t).Patch(t.Context(), inVersion("v1beta2", "same", "group"), patch, client.DryRunAll), onlyTheAgent)
}

// An upgrade renames the policies. At every moment there are policies, and neither the old nor the
// new agent is ever refused.
func TestAnUpgradeLeavesNoGap(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "capi-agent-system"}
	h.namespaces(t, "upgraded")
	h.install(t, r, filepath.Join(root(t), "test", "charts", "testdata", "earlier"))
	earlier := func(name string) bool { return strings.HasPrefix(name, "capi-agent") && !strings.Contains(name, ".") }
	require.Len(t, h.named(t, earlier), 8)
	h.group(t, "upgraded", "group", 3, "2")
	h.awaitGuard(t, h.tool(t), "capi-agent-node-groups", "capi-agent-scale", "upgraded")

	ctx, cancel := context.WithCancel(t.Context())
	tool, agent := h.tool(t), h.agent(t, r, "upgraded")
	observed := make(chan []string)
	tries := 0
	go func() {
		var wrong []string
		for ctx.Err() == nil {
			tries++
			lower := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":1}}`))
			if err := tool.Patch(t.Context(), inVersion("v1beta2", "upgraded", "group"), lower, client.DryRunAll); !apierrors.IsForbidden(err) {
				wrong = append(wrong, fmt.Sprintf("a tool lowers: %v", err))
			}
			to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: 1}}
			err := tool.SubResource("scale").Update(t.Context(), inVersion("v1beta2", "upgraded", "group"), client.WithSubResourceBody(to), client.DryRunAll)
			if !apierrors.IsForbidden(err) {
				wrong = append(wrong, fmt.Sprintf("a tool scales: %v", err))
			}
			if err := agent.Patch(t.Context(), inVersion("v1beta2", "upgraded", "group"), lower, client.DryRunAll); err != nil {
				wrong = append(wrong, fmt.Sprintf("the agent lowers: %v", err))
			}
		}
		observed <- wrong
	}()
	h.upgrade(t, r, without()...)
	require.Len(t, h.guards(t, r), 9)
	h.awaitGuard(t, h.tool(t), "node-groups.capi-agent.capi-agent-system", "scale.capi-agent.capi-agent-system", "upgraded")
	cancel()
	require.Empty(t, <-observed)
	require.Greater(t, tries, 5, "rounds while it went on")
	require.Empty(t, h.named(t, earlier), "what the release no longer has")

	h.uninstall(t, r)
	require.Empty(t, h.guards(t, r))
	eventually(t, func(c *assert.CollectT) {
		lower := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":1}}`))
		refuses(c, tool.Patch(t.Context(), inVersion("v1beta2", "upgraded", "group"), lower, client.DryRunAll), "")
	})
}

// A scale is judged by the API server's view of MachineDeployments, which may be slightly stale. A
// stale number must not be used. Callers scale to what was claimed until just now, while the agent
// raises it.
func TestAScaleIsNotJudgedByTheNumberOfBefore(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "late-system"}
	h.namespaces(t, "late")
	h.install(t, r, chartPath(t, charts[0]), confined("late")...)
	md := h.group(t, "late", "group", 0, "0")
	h.awaitPolicies(t, r, "late")
	tool, agent := h.tool(t), h.agent(t, r, "late")

	var claimed atomic.Int32 // soon, or already
	var callers errgroup.Group
	ctx, cancel := context.WithCancel(t.Context())
	for range 4 {
		callers.Go(func() error {
			for ctx.Err() == nil {
				to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: claimed.Load() - 1}}
				_ = tool.SubResource("scale").Update(ctx, inVersion("v1beta2", "late", "group"), client.WithSubResourceBody(to)) // checked below
			}
			return nil
		})
	}
	const most = 50
	for next := int32(1); next <= most; next++ {
		claimed.Store(next)
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"%d"}},"spec":{"replicas":%d}}`, agentv1.ClaimedAnnotation, next, next)
		require.NoError(t, agent.Patch(ctx, md, client.RawPatch(types.MergePatchType, patch)))
		require.NoError(t, h.admin.Get(ctx, client.ObjectKeyFromObject(md), md))
		require.GreaterOrEqual(t, *md.Spec.Replicas, next, "replicas, with %d claimed", next)
	}
	cancel()
	require.NoError(t, callers.Wait())
	// The API server's view is sufficient to scale down to what is claimed.
	require.NoError(t, h.admin.Patch(t.Context(), md, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":400}}`))))
	eventually(t, func(c *assert.CollectT) {
		to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: most}}
		refuses(c, tool.SubResource("scale").Update(t.Context(), inVersion("v1beta2", "late", "group"), client.WithSubResourceBody(to)), "")
	})
}

// The policies guard neither a MachineDeployment without a ledger nor one that Cluster API has just
// created: a missing parameter is not a refusal.
func TestAScaleOfAGroupWithoutALedgerIsPermitted(t *testing.T) {
	h := theHub(t)
	r := release{"capi-agent", "plain-system"}
	h.namespaces(t, "plain")
	h.install(t, r, chartPath(t, charts[0]), confined("plain")...)
	h.awaitPolicies(t, r, "plain")
	tool := h.tool(t)
	for i := range 20 {
		md := newGroup("plain", fmt.Sprintf("plain-%d", i), 3, "absent")
		md.Annotations = nil
		require.NoError(t, h.admin.Create(t.Context(), md))
		require.NoError(t, tool.SubResource("scale").Update(t.Context(), md, client.WithSubResourceBody(&autoscalingv1.Scale{}), client.DryRunAll))
	}
}

// The chart may be installed before Cluster API. Until the API server knows the kind of the
// policy's parameters, every scale is refused.
func TestThePoliciesWaitForClusterAPI(t *testing.T) {
	h := ownHub(t)
	r := release{"capi-agent", "capi-agent-system"}
	h.install(t, r, chartPath(t, charts[0]), without()...)
	if err := h.installClusterAPI(root(t)); err != nil {
		t.Fatal(err)
	}
	h.namespaces(t, "early")
	h.group(t, "early", "group", 3, "2")
	tool := h.tool(t)
	eventually(t, func(c *assert.CollectT) {
		lower := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":0}}`))
		refuses(c, tool.Patch(t.Context(), inVersion("v1beta2", "early", "group"), lower, client.DryRunAll), "node-groups."+r.hubName())
	})
	letThrough := false
	eventually(t, func(c *assert.CollectT) {
		to := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: 1}}
		err := tool.SubResource("scale").Update(t.Context(), inVersion("v1beta2", "early", "group"), client.WithSubResourceBody(to), client.DryRunAll)
		if letThrough = err == nil; letThrough {
			return
		}
		refuses(c, err, "scale."+r.hubName())
		refuses(c, err, tooFew)
	})
	require.False(t, letThrough)
}

// group creates a MachineDeployment with a ledger.
func (h *hub) group(t *testing.T, namespace, name string, replicas int, claimed string) *clusterv1.MachineDeployment {
	t.Helper()
	md := newGroup(namespace, name, replicas, claimed)
	if err := h.admin.Create(t.Context(), md); err != nil {
		t.Fatal(err)
	}
	return md
}

func newGroup(namespace, name string, replicas int, claimed string) *clusterv1.MachineDeployment {
	labels := map[string]string{clusterv1.MachineDeploymentNameLabel: name}
	md := &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{agentv1.MemberLabel: ""},
			Annotations: map[string]string{agentv1.LedgerAnnotation: ledgerOf(namespace + "/" + name), agentv1.ClaimedAnnotation: claimed},
		},
		Spec: clusterv1.MachineDeploymentSpec{
			ClusterName: "production", Replicas: new(int32(replicas)), Selector: metav1.LabelSelector{MatchLabels: labels},
			Template: clusterv1.MachineTemplateSpec{ObjectMeta: clusterv1.ObjectMeta{Labels: labels}, Spec: machineSpec()},
		},
	}
	if claimed == "absent" {
		delete(md.Annotations, agentv1.ClaimedAnnotation)
	}
	return md
}

func (h *hub) machine(t *testing.T, namespace, name string) {
	t.Helper()
	m := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Finalizers: []string{"example.com/keep"}},
		Spec:       machineSpec(),
	}
	if err := h.admin.Create(t.Context(), m); err != nil {
		t.Fatal(err)
	}
}

func machineSpec() clusterv1.MachineSpec {
	return clusterv1.MachineSpec{
		ClusterName: "production", Bootstrap: clusterv1.Bootstrap{DataSecretName: new("data")},
		InfrastructureRef: clusterv1.ContractVersionedObjectReference{
			APIGroup: "infrastructure.cluster.x-k8s.io", Kind: "SimMachineTemplate", Name: "small",
		},
	}
}

func ledgerOf(group string) string {
	return fmt.Sprintf(`{"v":1,"seq":1,"of":%q,"floor":0,"lastReplicas":0,"spare":0}`, group)
}

func inVersion(version, namespace, name string) *unstructured.Unstructured {
	md := &unstructured.Unstructured{}
	md.SetAPIVersion(clusterv1.GroupVersion.Group + "/" + version)
	md.SetKind("MachineDeployment")
	md.SetNamespace(namespace)
	md.SetName(name)
	return md
}

// awaitPolicies waits until the policies of a release are in force in a namespace, and the API
// server has seen all MachineDeployments there.
func (h *hub) awaitPolicies(t *testing.T, r release, namespace string) {
	t.Helper()
	h.awaitGuard(t, h.tool(t), "node-groups."+r.hubName(), "scale."+r.hubName(), namespace)
	h.machine(t, namespace, "probe")
	own := h.as(t, r.user(), unrestricted)
	eventually(t, func(c *assert.CollectT) {
		object := inVersion("v1beta2", namespace, "probe")
		object.SetKind("Machine")
		patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"version":"v9.9.9"}}`))
		refuses(c, own.Patch(t.Context(), object, patch, client.DryRunAll), "own-writes."+r.hubName())
	})
}

// awaitGuard waits until both policies refuse a write and the scale of a MachineDeployment that is
// created last.
func (h *hub) awaitGuard(t *testing.T, tool client.Client, nodeGroups, scale, namespace string) {
	t.Helper()
	probe := newGroup(namespace, "probe-"+regexp.MustCompile(`[^a-z-]`).ReplaceAllString(scale, "-"), 1, "1")
	if err := h.admin.Create(t.Context(), probe); err != nil {
		t.Fatal(err)
	}
	eventually(t, func(c *assert.CollectT) {
		lower := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"replicas":0}}`))
		refuses(c, tool.Patch(t.Context(), inVersion("v1beta2", namespace, probe.Name), lower, client.DryRunAll), nodeGroups)
		to := &autoscalingv1.Scale{}
		err := tool.SubResource("scale").Update(t.Context(), inVersion("v1beta2", namespace, probe.Name), client.WithSubResourceBody(to), client.DryRunAll)
		refuses(c, err, scale)
		refuses(c, err, tooFew)
	})
}

// guards returns a release's objects without a namespace, with their UIDs.
func (h *hub) guards(t *testing.T, r release) map[string]types.UID {
	t.Helper()
	return h.named(t, func(name string) bool { return strings.HasSuffix(name, r.hubName()) })
}

func (h *hub) named(t *testing.T, wanted func(name string) bool) map[string]types.UID {
	t.Helper()
	found := map[string]types.UID{}
	for _, list := range []client.ObjectList{
		&admissionv1.ValidatingAdmissionPolicyList{}, &admissionv1.ValidatingAdmissionPolicyBindingList{},
		&rbacv1.ClusterRoleList{}, &rbacv1.ClusterRoleBindingList{},
	} {
		if err := h.admin.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		err := meta.EachListItem(list, func(o runtime.Object) error {
			object, err := meta.Accessor(o)
			if err == nil && wanted(object.GetName()) {
				found[fmt.Sprintf("%T %s", o, object.GetName())] = object.GetUID()
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return found
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
