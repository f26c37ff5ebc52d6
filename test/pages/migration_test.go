package pages_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

const (
	member       = "node.cluster.x-k8s.io/karpenter-member"
	minSize      = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"
	capacity     = "capacity.cluster-autoscaler.kubernetes.io/"
	claimLabel   = "agent.karpenter.cluster.x-k8s.io/claim"
	adopted      = "karpenter.cluster.x-k8s.io/adopted"
	nodeGroup    = "karpenter.cluster.x-k8s.io/node-group"
	toReturn     = "karpenter.cluster.x-k8s.io/return-machine"
	doNotDisrupt = "karpenter.sh/do-not-disrupt"
	toBeDeleted  = "ToBeDeletedByClusterAutoscaler"
	candidate    = "DeletionCandidateOfClusterAutoscaler"
	// removalLooks is how often a simulated controller checks an object being removed before it is
	// gone: some seconds, for a page that does not wait.
	removalLooks = 30
)

var (
	nodeKind      = schema.FromAPIVersionAndKind("v1", "Node")
	nodeClaimKind = schema.FromAPIVersionAndKind("karpenter.sh/v1", "NodeClaim")
	nodePoolKind  = schema.FromAPIVersionAndKind("karpenter.sh/v1", "NodePool")
	nodeClassKind = schema.FromAPIVersionAndKind("karpenter.cluster.x-k8s.io/v1alpha1", "ClusterAPINodeClass")
	groupKind     = schema.FromAPIVersionAndKind("cluster.x-k8s.io/v1beta2", "MachineDeployment")
	machineKind   = schema.FromAPIVersionAndKind("cluster.x-k8s.io/v1beta2", "Machine")
	claimKind     = schema.FromAPIVersionAndKind("agent.karpenter.cluster.x-k8s.io/v1alpha1", "MachineClaim")
	crdKind       = schema.FromAPIVersionAndKind("apiextensions.k8s.io/v1", "CustomResourceDefinition")
)

// migration follows a page on a hub and a spoke without controllers, whose work the test does.
type migration struct {
	t          *testing.T
	ctx        context.Context //nolint:containedctx // of one test, whose helpers would all take it
	page       pages.Page
	home       string
	hub, spoke *server
}

func migrate(t *testing.T, page string, hubCRDs, spokeCRDs []string) *migration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	m := &migration{t: t, ctx: ctx, home: t.TempDir()}
	var err error
	m.page, err = pages.Read(root(t), page)
	require.NoError(t, err)
	m.hub = start(t, append(hubCRDs, filepath.Join(root(t), "bin/capi-core-manifests/crds"))...)
	m.spoke = start(t, spokeCRDs...)
	return m
}

// do runs commands, preceded by those that every user of the page runs first.
func (m *migration) do(commands string) string {
	m.t.Helper()
	servers := map[string]*server{"hub": m.hub, "spoke": m.spoke}
	return runAt(m.ctx, m.t, m.home, servers, m.page.Script("Before you begin")+commands)
}

// steps returns the steps of a section, and verifies that there are as many as expected.
func (m *migration) steps(section string, count int) []string {
	m.t.Helper()
	steps := m.page.Steps(section)
	require.Len(m.t, steps, count, "the blocks below %q", section)
	return steps
}

func (m *migration) get(of *server, kind schema.GroupVersionKind, namespace, name string) *unstructured.Unstructured {
	m.t.Helper()
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	require.NoError(m.t, of.client.Get(m.ctx, client.ObjectKey{Namespace: namespace, Name: name}, object))
	return object
}

func (m *migration) names(of *server, kind schema.GroupVersionKind) []string {
	m.t.Helper()
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(kind)
	require.NoError(m.t, of.client.List(m.ctx, list))
	names := []string{}
	for i := range list.Items {
		names = append(names, list.Items[i].GetName())
	}
	return names
}

// change modifies an object as the client's user.
func (m *migration) change(by client.Client, object *unstructured.Unstructured, how func()) {
	m.t.Helper()
	before := object.DeepCopy()
	how()
	require.NoError(m.t, by.Patch(m.ctx, object, client.MergeFrom(before)))
}

func (m *migration) label(by client.Client, object *unstructured.Unstructured, key, value string) {
	m.t.Helper()
	m.change(by, object, func() { object.SetLabels(with(object.GetLabels(), key, value)) })
}

func (m *migration) annotate(by client.Client, object *unstructured.Unstructured, key, value string) {
	m.t.Helper()
	m.change(by, object, func() { object.SetAnnotations(with(object.GetAnnotations(), key, value)) })
}

func with(values map[string]string, key, value string) map[string]string {
	if values == nil {
		values = map[string]string{}
	}
	values[key] = value
	return values
}

// group creates a MachineDeployment.
func (m *migration) group(cluster, name string, replicas int, labels, annotations string) {
	m.t.Helper()
	create(m.ctx, m.t, m.hub.client, fmt.Sprintf(`{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment,
		metadata: {namespace: team-a, name: %[2]s, labels: {cluster.x-k8s.io/cluster-name: %[1]s%[4]s}, annotations: {%[5]s}},
		spec: {clusterName: %[1]s, replicas: %[3]d, selector: {matchLabels: {cluster.x-k8s.io/deployment-name: %[2]s}}, template: {
			metadata: {labels: {cluster.x-k8s.io/deployment-name: %[2]s}},
			spec: {clusterName: %[1]s, bootstrap: {dataSecretName: b}, infrastructureRef: {apiGroup: example.com, kind: T, name: t}}}}}`,
		cluster, name, replicas, labels, annotations))
}

// machine creates a Machine of a group, and its Node with the same name.
func (m *migration) machine(cluster, group, name string) {
	m.t.Helper()
	made := create(m.ctx, m.t, m.hub.client, fmt.Sprintf(`{apiVersion: cluster.x-k8s.io/v1beta2, kind: Machine,
		metadata: {namespace: team-a, name: %[3]s, labels: {cluster.x-k8s.io/cluster-name: %[1]s, cluster.x-k8s.io/deployment-name: %[2]s}},
		spec: {clusterName: %[1]s, providerID: "sim://%[3]s", bootstrap: {dataSecretName: b},
			infrastructureRef: {apiGroup: example.com, kind: T, name: t}}}`,
		cluster, group, name))
	require.NoError(m.t, unstructured.SetNestedField(made.Object, name, "status", "nodeRef", "name"))
	require.NoError(m.t, m.hub.client.Status().Update(m.ctx, made))
	if cluster == "production" {
		create(m.ctx, m.t, m.spoke.client, fmt.Sprintf(`{apiVersion: v1, kind: Node, metadata: {name: %[1]s}, spec: {providerID: "sim://%[1]s"}}`, name))
	}
}

// nodeClaim creates a NodeClaim on the Machine with the same name.
func (m *migration) nodeClaim(name string) *unstructured.Unstructured {
	m.t.Helper()
	made := create(m.ctx, m.t, m.spoke.client, `{apiVersion: karpenter.sh/v1, kind: NodeClaim,
		metadata: {name: `+name+`, finalizers: [karpenter.sh/termination]},
		spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}}}`)
	m.ready(made, "True")
	return made
}

func (m *migration) ready(nodeClaim *unstructured.Unstructured, status string) {
	m.t.Helper()
	nodeClaim.Object["status"] = map[string]any{"providerID": "sim://" + nodeClaim.GetName(), "nodeName": nodeClaim.GetName(), "conditions": []any{
		map[string]any{"type": "Ready", "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
	}}
	require.NoError(m.t, m.spoke.client.Status().Update(m.ctx, nodeClaim))
}

// deployment creates a Deployment with a pod, which is removed once the Deployment is scaled to 0.
func (m *migration) deployment(of *server, namespace, name, argument string) {
	m.t.Helper()
	create(m.ctx, m.t, of.client, fmt.Sprintf(`{apiVersion: apps/v1, kind: Deployment, metadata: {namespace: %s, name: %s},
		spec: {replicas: 1, selector: {matchLabels: {app: %[2]s-pod, tier: nodes}}, template: {metadata: {labels: {app: %[2]s-pod, tier: nodes}},
			spec: {containers: [{name: c, image: i, args: ["%[3]s"]}]}}}}`, namespace, name, argument))
	pod := create(m.ctx, m.t, of.client, fmt.Sprintf(`{apiVersion: v1, kind: Pod,
		metadata: {namespace: %s, name: %s-1, labels: {app: %[2]s-pod, tier: nodes}}, spec: {containers: [{name: c, image: i}]}}`, namespace, name))
	looks := 0
	m.play(func(ctx context.Context) error {
		deployment := &appsv1.Deployment{}
		if err := of.client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, deployment); err != nil || *deployment.Spec.Replicas > 0 {
			return err
		}
		if looks++; looks < removalLooks { // it is shutting down
			return nil
		}
		return client.IgnoreNotFound(of.client.Delete(ctx, pod))
	})
}

// play repeatedly does the work of a controller.
func (m *migration) play(do func(context.Context) error) {
	m.t.Helper()
	play(m.ctx, m.t, "playing a controller", do)
}

// completeJobs simulates the Job controller, with pods that succeed at once.
func (m *migration) completeJobs() {
	m.play(func(ctx context.Context) error {
		jobs := &batchv1.JobList{}
		if err := m.spoke.client.List(ctx, jobs); err != nil {
			return err
		}
		for i := range jobs.Items {
			job := &jobs.Items[i]
			if job.Status.CompletionTime != nil {
				continue
			}
			now := metav1.Now()
			job.Status.StartTime, job.Status.CompletionTime, job.Status.Succeeded = &now, &now, 1
			for _, condition := range []batchv1.JobConditionType{batchv1.JobSuccessCriteriaMet, batchv1.JobComplete} {
				job.Status.Conditions = append(job.Status.Conditions, batchv1.JobCondition{
					Type: condition, Status: corev1.ConditionTrue, LastTransitionTime: now,
				})
			}
			if err := m.spoke.client.Status().Update(ctx, job); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
				return err
			}
		}
		return nil
	})
}

// adopt does what agent and shim do with an adopted NodeClaim or Node.
func (m *migration) adopt(kind schema.GroupVersionKind, group, name string) {
	m.t.Helper()
	object := m.get(m.spoke, kind, "", name)
	m.label(m.spoke.client, object, adopted, "true")
	m.annotate(m.spoke.client, object, doNotDisrupt, "true")
	m.annotate(m.spoke.client, object, nodeGroup, "team-a/"+group)
}

// annotations returns the annotations of an object in the spoke.
func (m *migration) annotations(kind schema.GroupVersionKind, name string) map[string]string {
	m.t.Helper()
	return m.get(m.spoke, kind, "", name).GetAnnotations()
}

// The other provider has its Deployment, and NodeClaims on Machines, one of which lacks its label.
func TestTheMigrationFromTheOtherProvider(t *testing.T) {
	crds := filepath.Join(root(t), "deploy/charts/shim/files/crds")
	m := migrate(t, "docs/migrate-from-karpenter-provider-cluster-api.md", []string{"testdata/cert-manager.yaml"}, []string{
		filepath.Join(crds, "karpenter.sh_nodeclaims.yaml"), filepath.Join(crds, "karpenter.sh_nodepools.yaml"),
		filepath.Join(crds, "karpenter.cluster.x-k8s.io_clusterapinodeclasses.yaml"), "testdata/capacitybuffers.yaml",
	})
	playHub(m.ctx, t, m.hub.client)
	m.completeJobs()
	sizes := capacity + "cpu: '4', " + capacity + "memory: 16Gi"
	m.group("production", "workers", 2, ", "+member+": ''", sizes)
	m.group("production", "small", 1, ", "+member+": ''", sizes+", "+minSize+": '3'")
	m.group("production", "selected", 0, "", sizes)
	m.group("staging", "theirs", 1, ", "+member+": ''", minSize+": '2'")
	for _, name := range []string{"a", "b"} {
		m.machine("production", "workers", name)
		m.nodeClaim(name)
	}
	m.machine("production", "small", "spare")
	m.machine("staging", "theirs", "foreign")
	m.label(m.hub.client, m.get(m.hub, machineKind, "team-a", "a"), member, "")
	m.annotate(m.spoke.client, m.get(m.spoke, nodeKind, "", "b"), doNotDisrupt, "true") // the user's own
	create(m.ctx, t, m.spoke.client, "{apiVersion: karpenter.cluster.x-k8s.io/v1alpha1, kind: ClusterAPINodeClass, metadata: {name: default}, spec: {}}")
	create(m.ctx, t, m.spoke.client, "{apiVersion: v1, kind: Namespace, metadata: {name: karpenter}}")
	m.deployment(m.spoke, "karpenter", "karpenter", "--cluster-api-kubeconfig=/hub")
	buffers := m.get(m.spoke, crdKind, "", "capacitybuffers.autoscaling.x-k8s.io").GetResourceVersion()

	look := m.steps("1. Look first", 4)
	require.ElementsMatch(t, []string{
		"workers replicas=2 min=0 opted-in=true",
		"small replicas=1 min=3 opted-in=true RAISED BY 2",
		"selected replicas=0 min=0 opted-in=false",
	}, strings.Split(strings.TrimSpace(m.do(look[0])), "\n"), "the groups of this Cluster, and what the agent would do to them")
	m.do(look[1])
	agent := &appsv1.Deployment{}
	require.NoError(t, m.hub.client.Get(m.ctx, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent"}, agent))
	require.Contains(t, agent.Spec.Template.Spec.Containers[0].Args, "--clusters=team-a/production")
	require.Empty(t, strings.TrimSpace(m.do(look[2])), "no release owns the CRDs")
	m.do(look[3])
	require.Contains(t, m.names(m.spoke, crdKind), "nodeoverlays.karpenter.sh")
	require.Equal(t, "karpenter-capi", strings.TrimSpace(m.do(look[2])), "the shim's release owns them")
	require.Equal(t, buffers, m.get(m.spoke, crdKind, "", "capacitybuffers.autoscaling.x-k8s.io").GetResourceVersion(), "the autoscaler's CRD")
	require.Empty(t, m.shims(), "before the other provider is stopped, the shim does not run")
	other := m.other()
	require.EqualValues(t, 1, *other.Spec.Replicas)

	m.do(m.steps("2. Stop the other provider", 1)[0])
	require.Zero(t, *m.other().Spec.Replicas)
	require.True(t, apierrors.IsNotFound(m.spoke.client.Get(m.ctx, client.ObjectKey{Namespace: "karpenter", Name: "karpenter-1"}, &corev1.Pod{})),
		"its pod is gone before the page goes on")
	saved, err := os.ReadFile(filepath.Join(m.home, "do-not-disrupt.txt"))
	require.NoError(t, err)
	require.Equal(t, "Node/b\n", string(saved))

	m.do(m.steps("3. Start Karpenter", 1)[0])
	shims := m.shims()
	require.Len(t, shims, 1)
	require.Subset(t, shims[0].Spec.Template.Spec.Containers[0].Env, []corev1.EnvVar{
		{Name: "LEADER_ELECTION_NAMESPACE", Value: "karpenter"},
		{Name: "LEADER_ELECTION_NAME", Value: "karpenter-leader-election"},
	}, "the lease is the other provider's")
	role := client.ObjectKey{Namespace: "karpenter", Name: shims[0].Name + "." + shims[0].Namespace}
	require.NoError(t, m.spoke.client.Get(m.ctx, role, &rbacv1.Role{}), "the shim may keep its lease there")
	everythingMountedIsThere(t, "spoke", m.spoke.client)

	// Agent and shim adopt.
	byAgent := m.as(m.hub, "system:serviceaccount:capi-agent-system:capi-agent")
	for _, name := range []string{"a", "b"} {
		id := string(m.get(m.spoke, nodeClaimKind, "", name).GetUID())
		m.label(byAgent, m.get(m.hub, machineKind, "team-a", name), claimLabel, id)
		create(m.ctx, t, m.hub.client, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: MachineClaim, "+
			"metadata: {namespace: team-a, name: production."+name+"}, spec: {clusterName: production, claimID: "+id+", holder: karpenter}}")
		m.adopt(nodeClaimKind, "workers", name)
		m.adopt(nodeKind, "workers", name)
	}
	m.label(byAgent, m.get(m.hub, machineKind, "team-a", "foreign"), claimLabel, "theirs")
	create(m.ctx, t, m.hub.client, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: MachineClaim, "+
		"metadata: {namespace: team-a, name: staging.x}, spec: {clusterName: staging, claimID: theirs, holder: karpenter}}")
	class := m.get(m.spoke, nodeClassKind, "", "default")
	m.change(m.spoke.client, class, func() { class.SetFinalizers([]string{foreign, "karpenter.cluster.x-k8s.io/termination"}) })

	m.do(m.steps("4. Allow disruption", 1)[0])
	require.NotContains(t, m.annotations(nodeKind, "a"), doNotDisrupt)
	require.NotContains(t, m.annotations(nodeClaimKind, "a"), doNotDisrupt)
	require.NotContains(t, m.annotations(nodeClaimKind, "b"), doNotDisrupt)
	require.Equal(t, "true", m.annotations(nodeKind, "b")[doNotDisrupt], "the user had protected it before")

	back := m.steps("Going back", 7)
	late := m.nodeClaim("late")
	m.ready(late, "False")
	leaving := m.nodeClaim("leaving")
	require.NoError(t, m.spoke.client.Delete(m.ctx, leaving))
	require.ElementsMatch(t, []string{"late", "leaving"}, strings.Fields(m.do(back[0])))
	for _, nodeClaim := range []*unstructured.Unstructured{late, leaving} {
		m.do("kubectl patch nodeclaim " + nodeClaim.GetName() + ` --type merge --patch '{"metadata": {"finalizers": null}}'`)
		require.NoError(t, client.IgnoreNotFound(m.spoke.client.Delete(m.ctx, nodeClaim)))
	}
	require.Empty(t, m.do(back[0]))
	m.do(back[1])
	require.Empty(t, m.shims())
	m.do(back[2])
	for name, taken := range map[string]bool{"a": true, "b": true, "spare": false, "foreign": false} {
		_, is := m.get(m.hub, machineKind, "team-a", name).GetLabels()[member]
		require.Equal(t, taken, is, "Machine %s", name)
	}
	m.do(back[3])
	for _, kind := range []schema.GroupVersionKind{nodeKind, nodeClaimKind} {
		for _, name := range []string{"a", "b"} {
			require.NotContains(t, m.get(m.spoke, kind, "", name).GetLabels(), adopted)
		}
	}
	require.Equal(t, []string{foreign}, m.get(m.spoke, nodeClassKind, "", "default").GetFinalizers())
	require.Contains(t, m.do(back[4]), "nothing of the agent is left")
	require.Equal(t, []string{"staging.x"}, m.names(m.hub, claimKind))
	labels := m.get(m.hub, machineKind, "team-a", "a").GetLabels()
	require.Contains(t, labels, member)
	require.NotContains(t, labels, claimLabel)
	require.Contains(t, m.get(m.hub, machineKind, "team-a", "foreign").GetLabels(), claimLabel, "another Cluster's")
	require.Contains(t, m.get(m.hub, groupKind, "team-a", "workers").GetLabels(), member, "the other provider needs it")
	require.Empty(t, m.do(back[5]))
	m.do(`kubectl --context hub --namespace team-a annotate machinedeployment small ` + capacity + `memory-`)
	require.Equal(t, "small\n", m.do(back[5]), "a Machine of it would fail every listing of the other provider's")
	m.do(back[6])
	require.EqualValues(t, 1, *m.other().Spec.Replicas)
	require.ElementsMatch(t, []string{"a", "b"}, m.names(m.spoke, nodeClaimKind))
}

func (m *migration) other() *appsv1.Deployment {
	m.t.Helper()
	deployment := &appsv1.Deployment{}
	require.NoError(m.t, m.spoke.client.Get(m.ctx, client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, deployment))
	return deployment
}

// shims returns the Deployments of this project's chart in the spoke.
func (m *migration) shims() []appsv1.Deployment {
	m.t.Helper()
	list := &appsv1.DeploymentList{}
	require.NoError(m.t, m.spoke.client.List(m.ctx, list, client.MatchingLabels{"app.kubernetes.io/part-of": "karpenter-capi"}))
	return list.Items
}

// as returns a client for another user.
func (m *migration) as(of *server, user string) client.Client {
	m.t.Helper()
	config := rest.CopyConfig(of.config)
	config.Impersonate.UserName = user
	c, err := client.New(config, client.Options{})
	require.NoError(m.t, err)
	return c
}

// Of two node groups of the autoscaler, one is migrated and comes back. The other one and the
// user's own settings stay unchanged.
func TestTheMigrationFromTheClusterAutoscaler(t *testing.T) {
	const discovery = "autoscaler.example.com/scale"
	m := migrate(t, "docs/migrate-from-cluster-autoscaler.md", nil, []string{filepath.Join(root(t), "deploy/charts/shim/files/crds")})
	create(m.ctx, t, m.hub.client, "{apiVersion: v1, kind: Namespace, metadata: {name: team-a}}")
	m.deployment(m.spoke, "kube-system", "cluster-autoscaler", "--node-group-auto-discovery=clusterapi:namespace=team-a")
	m.group("production", "workers", 3, "", minSize+": '4'")
	m.group("production", "others", 1, "", minSize+": '1'")
	m.group("production", "moved", 0, ", "+member+": ''", minSize+": '0'")
	m.group("staging", "theirs", 1, "", minSize+": '1'")
	for group, names := range map[string][]string{"workers": {"a", "b", "c"}, "others": {"d"}} {
		for _, name := range names {
			m.machine("production", group, name)
		}
	}
	m.annotate(m.spoke.client, m.get(m.spoke, nodeKind, "", "b"), doNotDisrupt, "true")
	m.do(`kubectl taint nodes a ` + toBeDeleted + `=1:NoSchedule
		kubectl taint nodes b d ` + candidate + `=1:PreferNoSchedule
		kubectl taint nodes b dedicated=blue:NoSchedule`)
	create(m.ctx, t, m.spoke.client, "{apiVersion: karpenter.cluster.x-k8s.io/v1alpha1, kind: ClusterAPINodeClass, metadata: {name: default}, spec: {}}")
	create(m.ctx, t, m.spoke.client, "{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: default}, "+
		"spec: {template: {spec: {requirements: [], nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}}}}}")

	move := m.steps("Move a node group", 4)
	require.Contains(t, m.do(move[0]), "--node-group-auto-discovery=clusterapi:namespace=team-a\n")
	m.do(move[1])
	for name, value := range map[string]string{"workers": "on", "others": "on", "moved": "", "theirs": ""} {
		require.Equal(t, value, m.get(m.hub, groupKind, "team-a", name).GetLabels()[discovery], name)
	}
	changed := m.do(move[2])
	require.Contains(t, changed, `"replicas": 3`)
	require.Contains(t, changed, `-min-size": "4"`)
	labels := m.get(m.hub, groupKind, "team-a", "workers").GetLabels()
	require.NotContains(t, labels, discovery, "it is neither's meanwhile")
	require.NotContains(t, labels, member, "it is neither's meanwhile")

	leaving, workers := m.get(m.spoke, nodeKind, "", "a"), m.get(m.hub, groupKind, "team-a", "workers")
	itsMachine := m.get(m.hub, machineKind, "team-a", "a")
	looks := 0
	m.play(func(ctx context.Context) error { // the autoscaler completes the removal of a Node
		if err := m.hub.client.Get(ctx, client.ObjectKeyFromObject(workers), workers); err != nil {
			return err
		}
		if err := m.spoke.client.Get(ctx, client.ObjectKeyFromObject(leaving), leaving); err != nil {
			return client.IgnoreNotFound(err)
		}
		if _, early := workers.GetLabels()[member]; early {
			return errors.New("the group was opted in while the autoscaler was still removing a Node")
		}
		if looks++; looks < removalLooks {
			return nil
		}
		return errors.Join(m.spoke.client.Delete(ctx, leaving), m.hub.client.Delete(ctx, itsMachine))
	})
	m.do(move[3])
	labels = m.get(m.hub, groupKind, "team-a", "workers").GetLabels()
	require.Contains(t, labels, member)
	require.NotContains(t, labels, discovery)
	labels = m.get(m.hub, groupKind, "team-a", "others").GetLabels()
	require.Equal(t, "on", labels[discovery])
	require.NotContains(t, labels, member)
	require.Equal(t, []string{"dedicated"}, m.taints("b"))
	require.Equal(t, []string{candidate}, m.taints("d"), "of a group that stays the autoscaler's")

	nodes := m.steps("What happens to the Nodes", 3)
	m.do(nodes[0])
	expire, _, err := unstructured.NestedString(m.get(m.spoke, nodePoolKind, "", "default").Object, "spec", "template", "spec", "expireAfter")
	require.NoError(t, err)
	require.Equal(t, "Never", expire)
	m.do(nodes[1])
	require.Equal(t, "OnRequest", m.adoption())
	for name, asked := range map[string]bool{"b": true, "c": true, "d": false} {
		_, is := m.get(m.spoke, nodeKind, "", name).GetAnnotations()["karpenter.cluster.x-k8s.io/adopt"]
		require.Equal(t, asked, is, "Node %s", name)
	}

	// The shim adopts them, and makes a Node in each of two groups.
	for _, name := range []string{"b", "c"} {
		m.nodeClaim(name)
		m.adopt(nodeClaimKind, "workers", name)
		m.adopt(nodeKind, "workers", name)
	}
	for name, group := range map[string]string{"new": "workers", "elsewhere": "moved"} {
		m.annotate(m.spoke.client, m.nodeClaim(name), nodeGroup, "team-a/"+group)
	}
	m.nodeClaim("adopted-elsewhere")
	m.adopt(nodeClaimKind, "moved", "adopted-elsewhere")

	m.do(nodes[2])
	require.NotContains(t, m.annotations(nodeKind, "c"), doNotDisrupt)
	require.NotContains(t, m.annotations(nodeClaimKind, "b"), doNotDisrupt)
	require.NotContains(t, m.annotations(nodeClaimKind, "c"), doNotDisrupt)
	require.Equal(t, "true", m.annotations(nodeKind, "b")[doNotDisrupt], "the user had protected it before")
	require.Equal(t, "true", m.annotations(nodeClaimKind, "adopted-elsewhere")[doNotDisrupt], "its group has not been approved")

	m.play(func(ctx context.Context) error { // the shim returns machines
		for _, name := range []string{"b", "c", "new", "elsewhere", "adopted-elsewhere"} {
			nodeClaim := &unstructured.Unstructured{}
			nodeClaim.SetGroupVersionKind(nodeClaimKind)
			if err := m.spoke.client.Get(ctx, client.ObjectKey{Name: name}, nodeClaim); err != nil || nodeClaim.GetAnnotations()[toReturn] != "true" {
				if client.IgnoreNotFound(err) != nil {
					return err
				}
				continue
			}
			class := &unstructured.Unstructured{}
			class.SetGroupVersionKind(nodeClassKind)
			if err := m.spoke.client.Get(ctx, client.ObjectKey{Name: "default"}, class); err != nil {
				return err
			}
			if mode, _, _ := unstructured.NestedString(class.Object, "spec", "adoption", "machines"); mode != "Never" {
				return fmt.Errorf("NodeClaim %s is returned while its Node would be adopted again", name)
			}
			nodeClaim.SetFinalizers(nil)
			if err := m.spoke.client.Update(ctx, nodeClaim); err != nil {
				return err
			}
			if err := m.spoke.client.Delete(ctx, nodeClaim); err != nil {
				return err
			}
		}
		return nil
	})
	m.do(m.steps("Going back", 1)[0])
	require.Equal(t, "Never", m.adoption())
	require.ElementsMatch(t, []string{"elsewhere", "adopted-elsewhere"}, m.names(m.spoke, nodeClaimKind), "only this group's are returned, all of them")
	labels = m.get(m.hub, groupKind, "team-a", "workers").GetLabels()
	require.Equal(t, "on", labels[discovery])
	require.NotContains(t, labels, member)
	labels = m.get(m.hub, groupKind, "team-a", "moved").GetLabels()
	require.Contains(t, labels, member)
	require.NotContains(t, labels, discovery)
}

func (m *migration) adoption() string {
	m.t.Helper()
	mode, _, err := unstructured.NestedString(m.get(m.spoke, nodeClassKind, "", "default").Object, "spec", "adoption", "machines")
	require.NoError(m.t, err)
	return mode
}

func (m *migration) taints(node string) []string {
	m.t.Helper()
	n := &corev1.Node{}
	require.NoError(m.t, m.spoke.client.Get(m.ctx, client.ObjectKey{Name: node}, n))
	var keys []string
	for _, taint := range n.Spec.Taints {
		if !strings.HasPrefix(taint.Key, "node.kubernetes.io/") {
			keys = append(keys, taint.Key)
		}
	}
	return keys
}

// Every command block of the migration pages is a step of one of the tests above, in the order in
// which it is run.
func TestEveryCommandOfTheMigrationPagesIsRun(t *testing.T) {
	for path, sections := range map[string][]string{
		"docs/migrate-from-karpenter-provider-cluster-api.md": {
			"Before you begin", "1. Look first", "2. Stop the other provider", "3. Start Karpenter", "4. Allow disruption", "Going back",
		},
		"docs/migrate-from-cluster-autoscaler.md": {"Before you begin", "Move a node group", "What happens to the Nodes", "Going back"},
	} {
		page, err := pages.Read(root(t), path)
		require.NoError(t, err)
		var found []string
		for _, block := range page.Blocks() {
			if block.Language == "sh" && !slices.Contains(found, block.Section) {
				found = append(found, block.Section)
			}
		}
		require.Equal(t, sections, found, path)
	}
}
