package pages_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// cloudConfig is what the cluster-autoscaler's provider externalgrpc reads, with its names.
type cloudConfig struct {
	Address     string           `json:"address"`
	Key         string           `json:"key"`
	Cert        string           `json:"cert"`
	Cacert      string           `json:"cacert"`
	GRPCTimeout *metav1.Duration `json:"grpc_timeout"`
}

// The page is followed on a hub whose cert-manager issues the page's Certificate. No pod runs, but
// everything that the cluster-autoscaler's pod would need must exist.
func TestTheClusterAutoscalersPageCanBeFollowed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/cluster-autoscaler.md")
	require.NoError(t, err)
	servers := map[string]*server{
		"hub":   start(t, "testdata/cert-manager.yaml", clusterAPI(t, "cluster.x-k8s.io_machinedeployments.yaml")),
		"spoke": start(t),
	}
	hub, spoke := servers["hub"].client, servers["spoke"].client
	playHub(ctx, t, hub)
	create(ctx, t, hub, "{apiVersion: v1, kind: Namespace, metadata: {name: capi-agent-system}}")

	group := manifest(t, page, "Node groups")
	takesClaimsOfTheAutoscaler(ctx, t, hub, group)

	identity := identityOf(t, manifest(t, page, "A certificate", "policy"))
	certificate := manifest(t, page, "A certificate", "kind")
	uris, _, err := unstructured.NestedStringSlice(certificate.Object, "spec", "uris")
	require.NoError(t, err)
	require.Equal(t, []string{identity}, uris, "the policy is about the certificate's holder")
	require.NoError(t, hub.Create(ctx, certificate, client.FieldValidation("Strict")))
	secret, _, err := unstructured.NestedString(certificate.Object, "spec", "secretName")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return hub.Get(ctx, client.ObjectKey{Namespace: certificate.GetNamespace(), Name: secret}, &corev1.Secret{}) == nil
	}, 30*time.Second, 50*time.Millisecond)

	require.Len(t, page.Steps("Run it"), 2)
	run(ctx, t, servers, page.Script())

	everythingMountedIsThere(t, "spoke", spoke)
	findsItsFiles(ctx, t, spoke)
	mayDoWhatItDoes(ctx, t, spoke)
}

// manifest returns the manifest in a section's only YAML block, or in the only one with a field.
func manifest(t *testing.T, page pages.Page, section string, field ...string) *unstructured.Unstructured {
	t.Helper()
	var found []*unstructured.Unstructured
	for _, block := range page.Blocks() {
		if block.Language != "yaml" || block.Section != section {
			continue
		}
		objects, err := decode(block.Code)
		require.NoError(t, err, at(page, block))
		for _, object := range objects {
			if len(field) == 0 || object.Object[field[0]] != nil {
				found = append(found, object)
			}
		}
	}
	require.Len(t, found, 1, "%s, %s %v", page.Path, section, field)
	return found[0]
}

// takesClaimsOfTheAutoscaler completes the manifest of a node group, and verifies that the agent
// reads from it what the page describes.
func takesClaimsOfTheAutoscaler(ctx context.Context, t *testing.T, hub client.Client, group *unstructured.Unstructured) {
	t.Helper()
	complete := group.DeepCopy()
	complete.Object["spec"] = map[string]any{
		"clusterName": "production",
		"selector":    map[string]any{},
		"template": map[string]any{"spec": map[string]any{
			"clusterName":       "production",
			"bootstrap":         map[string]any{"dataSecretName": "bootstrap"},
			"infrastructureRef": map[string]any{"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "MachineTemplate", "name": "batch"},
		}},
	}
	require.NoError(t, hub.Create(ctx, complete, client.FieldValidation("Strict"), client.DryRunAll))

	md := &clusterv1.MachineDeployment{}
	require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(complete.Object, md))
	md.Spec.Replicas = ptr.To[int32](0) // which Cluster API sets
	read := eligibility.Of(md, &clusterv1.Cluster{})
	require.Equal(t, "cluster-autoscaler", read.Holder)
	require.Empty(t, read.Problems)
	require.Nil(t, read.Refusal())
	require.Zero(t, read.Min)
	require.EqualValues(t, 20, ptr.Deref(read.Max, 0))
	for _, name := range []string{"cpu", "memory"} {
		quantity, err := resource.ParseQuantity(md.Annotations[capacity+name])
		require.NoError(t, err, name)
		require.Positive(t, quantity.Sign(), name)
	}
}

// identityOf verifies the chart's values with a policy as the agent does, and returns the identity
// that they give access to.
func identityOf(t *testing.T, values *unstructured.Unstructured) string {
	t.Helper()
	text, err := yaml.Marshal(values.Object)
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	command := func(name string, args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin", name), args...).CombinedOutput()
		require.NoError(t, err, "%s %v\n%s", name, args, out)
		return string(out)
	}
	rendered, err := decode(command("helm", "template", "capi-agent", filepath.Join(root(t), "deploy/charts/agent"), "--values", file))
	require.NoError(t, err)
	var rules string
	for _, object := range rendered {
		if data, _, _ := unstructured.NestedStringMap(object.Object, "data"); object.GetKind() == "ConfigMap" && data["policy.yaml"] != "" {
			rules = data["policy.yaml"]
		}
	}
	require.NotEmpty(t, rules, "the chart renders the policy")
	require.NoError(t, os.WriteFile(file, []byte(rules), 0o600))
	require.Contains(t, command("capi-agent", "policy", "check", file), "valid:")

	var policy struct {
		Identities []struct {
			ID          string   `json:"id"`
			Roles       []string `json:"roles"`
			Clusters    []string `json:"clusters"`
			AllClusters bool     `json:"allClusters"`
		} `json:"identities"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(rules), &policy))
	require.Len(t, policy.Identities, 1)
	given := policy.Identities[0]
	require.Equal(t, []string{"autoscaler"}, given.Roles)
	require.False(t, given.AllClusters)
	require.Len(t, given.Clusters, 1, "the agent takes the Cluster from the identity")
	require.NotContains(t, given.Clusters[0], "*")
	return given.ID
}

// findsItsFiles verifies that the configuration which the cluster-autoscaler's flag names is one of
// the provider externalgrpc, and that it names files of the mounted secret.
func findsItsFiles(ctx context.Context, t *testing.T, spoke client.Client) {
	t.Helper()
	deployments := &appsv1.DeploymentList{}
	require.NoError(t, spoke.List(ctx, deployments))
	require.Len(t, deployments.Items, 1)
	deployment := deployments.Items[0]
	container := deployment.Spec.Template.Spec.Containers[0]
	flags := map[string]string{}
	for _, arg := range container.Args {
		name, value, _ := strings.Cut(arg, "=")
		flags[name] = value
	}
	require.Equal(t, "externalgrpc", flags["--cloud-provider"])
	require.Equal(t, deployment.Namespace, flags["--namespace"], "where its lease and its status are")

	// mounted returns the content of a file.
	mounted := func(file string) string {
		t.Helper()
		for _, mount := range container.VolumeMounts {
			if filepath.Dir(file) != mount.MountPath {
				continue
			}
			for _, volume := range deployment.Spec.Template.Spec.Volumes {
				key := client.ObjectKey{Namespace: deployment.Namespace}
				switch {
				case volume.Name != mount.Name:
				case volume.ConfigMap != nil:
					config := &corev1.ConfigMap{}
					key.Name = volume.ConfigMap.Name
					require.NoError(t, spoke.Get(ctx, key, config))
					return config.Data[filepath.Base(file)]
				case volume.Secret != nil:
					secret := &corev1.Secret{}
					key.Name = volume.Secret.SecretName
					require.NoError(t, spoke.Get(ctx, key, secret))
					return string(secret.Data[filepath.Base(file)])
				}
			}
		}
		return ""
	}
	var config cloudConfig
	require.NoError(t, yaml.UnmarshalStrict([]byte(mounted(flags["--cloud-config"])), &config))
	host, port, err := net.SplitHostPort(config.Address)
	require.NoError(t, err)
	require.NotEmpty(t, host)
	require.NotEmpty(t, port)
	require.Greater(t, ptr.Deref(config.GRPCTimeout, metav1.Duration{}).Duration, 5*time.Second, "more than the default")
	for file, base := range map[string]string{config.Cert: "tls.crt", config.Key: "tls.key", config.Cacert: "ca.crt"} {
		require.Equal(t, base, filepath.Base(file))
		require.NotEmpty(t, mounted(file), file)
	}
}

// mayDoWhatItDoes verifies the rights of the cluster-autoscaler's account: what its informers,
// those of the scheduler's plugins, its leader election and its scale-down call in version 1.36 with
// the page's flags, and nothing that would be worth an attack.
func mayDoWhatItDoes(ctx context.Context, t *testing.T, spoke client.Client) {
	t.Helper()
	may := func(verb, group, resource, subresource, namespace, name string) bool {
		t.Helper()
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User: "system:serviceaccount:cluster-autoscaler:cluster-autoscaler",
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: verb, Group: group, Resource: resource, Subresource: subresource, Namespace: namespace, Name: name,
			},
		}}
		require.NoError(t, spoke.Create(ctx, review))
		return review.Status.Allowed
	}
	for group, resources := range map[string][]string{
		"":                {"namespaces", "nodes", "persistentvolumeclaims", "persistentvolumes", "pods", "replicationcontrollers", "services"},
		"apps":            {"daemonsets", "replicasets", "statefulsets"},
		"batch":           {"jobs"},
		"policy":          {"poddisruptionbudgets"},
		"resource.k8s.io": {"deviceclasses", "resourceclaims", "resourceslices"},
		"storage.k8s.io":  {"csidrivers", "csinodes", "csistoragecapacities", "storageclasses", "volumeattachments"},
	} {
		for _, resource := range resources {
			for _, verb := range []string{"list", "watch"} {
				require.True(t, may(verb, group, resource, "", "", ""), "%s %s", verb, resource)
			}
		}
	}
	const own, status = "cluster-autoscaler", "cluster-autoscaler-status"
	for _, call := range []struct {
		verb, group, resource, subresource, namespace, name string
		allowed                                             bool
	}{
		{verb: "get", resource: "nodes", name: "a", allowed: true},
		{verb: "update", resource: "nodes", name: "a", allowed: true},
		{verb: "delete", resource: "nodes", name: "a"},
		{verb: "get", resource: "pods", namespace: "default", name: "a", allowed: true},
		{verb: "create", resource: "pods", subresource: "eviction", namespace: "default", name: "a", allowed: true},
		{verb: "create", resource: "pods", namespace: "default"},
		{verb: "delete", resource: "pods", namespace: "default", name: "a"},
		{verb: "create", resource: "events", namespace: "default", allowed: true},
		{verb: "patch", resource: "events", namespace: "default", name: "a", allowed: true},
		{verb: "create", group: "coordination.k8s.io", resource: "leases", namespace: own, allowed: true},
		{verb: "get", group: "coordination.k8s.io", resource: "leases", namespace: own, name: own, allowed: true},
		{verb: "update", group: "coordination.k8s.io", resource: "leases", namespace: own, name: own, allowed: true},
		{verb: "update", group: "coordination.k8s.io", resource: "leases", namespace: "kube-system", name: own},
		{verb: "create", resource: "configmaps", namespace: own, allowed: true},
		{verb: "get", resource: "configmaps", namespace: own, name: status, allowed: true},
		{verb: "update", resource: "configmaps", namespace: own, name: status, allowed: true},
		{verb: "delete", resource: "configmaps", namespace: own, name: status, allowed: true},
		{verb: "update", resource: "configmaps", namespace: own, name: "agent"},
		{verb: "get", resource: "secrets", namespace: own, name: "agent-client"},
	} {
		require.Equal(t, call.allowed, may(call.verb, call.group, call.resource, call.subresource, call.namespace, call.name), "%+v", call)
	}
}
