package pages_test

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

const (
	termination = "karpenter.sh/termination"
	foreign     = "example.com/backup"
)

// The removal's commands run in a spoke with another Karpenter beside ours, and with finalizers,
// owners and taints of others.
func TestTheRemovalTouchesOnlyWhatIsOurs(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	script := page.Script("1. In each spoke")
	require.NotEmpty(t, script)

	spoke := start(t, filepath.Join(root(t), "deploy/charts/shim/files/crds"))
	servers := map[string]*server{"spoke": spoke}
	run(ctx, t, servers, `helm install karpenter deploy/charts/shim --namespace karpenter --create-namespace \
		--set agent.address=agent:8443,cluster.namespace=team-a,cluster.name=production,crds.install=false`)

	nodeClass := create(ctx, t, spoke.client, "{apiVersion: karpenter.cluster.x-k8s.io/v1alpha1, kind: ClusterAPINodeClass, spec: {}, "+
		"metadata: {name: default, finalizers: [karpenter.cluster.x-k8s.io/termination]}}")
	const (
		ourClass   = "{group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}"
		theirClass = "{group: karpenter.k8s.aws, kind: EC2NodeClass, name: default}"
	)
	nodePool := func(name, class string) *unstructured.Unstructured {
		return create(ctx, t, spoke.client, "{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: "+name+"}, "+
			"spec: {template: {spec: {nodeClassRef: "+class+", requirements: []}}}}")
	}
	nodeClaim := func(name, class string) *unstructured.Unstructured {
		return create(ctx, t, spoke.client, "{apiVersion: karpenter.sh/v1, kind: NodeClaim, metadata: {name: "+name+", finalizers: ["+termination+"]}, "+
			"spec: {nodeClassRef: "+class+", requirements: []}}")
	}
	node := func(name string, labels map[string]string, owner *unstructured.Unstructured) *corev1.Node {
		n := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: name, Labels: labels, Finalizers: []string{foreign, termination}, Annotations: map[string]string{"example.com/rack": "r1"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Rack", Name: "r1", UID: "1"}},
			},
			Spec: corev1.NodeSpec{Taints: []corev1.Taint{
				{Key: "karpenter.sh/disrupted", Effect: corev1.TaintEffectNoSchedule},
				{Key: "dedicated", Value: "blue", Effect: corev1.TaintEffectNoSchedule},
			}},
		}
		if owner != nil {
			n.OwnerReferences = append(n.OwnerReferences, metav1.OwnerReference{
				APIVersion: "karpenter.sh/v1", Kind: "NodeClaim", Name: owner.GetName(), UID: owner.GetUID(),
			})
		}
		require.NoError(t, spoke.client.Create(ctx, n))
		return n
	}
	ours := map[string]string{
		"karpenter.cluster.x-k8s.io/clusterapinodeclass": "default", "karpenter.sh/nodepool": "ours", adopted: "true",
		"topology.kubernetes.io/zone": "a", "example.com/karpenter.sh": "x",
	}
	theirs := map[string]string{"karpenter.k8s.aws/ec2nodeclass": "default", "karpenter.sh/nodepool": "theirs"}

	ourPool, theirPool := nodePool("ours", ourClass), nodePool("theirs", theirClass)
	ourClaim, endingClaim, theirClaim := nodeClaim("ours", ourClass), nodeClaim("ending", ourClass), nodeClaim("theirs", theirClass)
	require.NoError(t, spoke.client.Delete(ctx, endingClaim))
	ourNode, endingNode := node("ours", ours, ourClaim), node("ending", ours, endingClaim)
	for _, n := range []*corev1.Node{ourNode, endingNode} {
		n.Annotations[doNotDisrupt], n.Annotations[nodeGroup] = "true", "team-a/workers"
		require.NoError(t, spoke.client.Update(ctx, n))
	}
	theirNode, plainNode := node("theirs", theirs, theirClaim), node("plain", nil, nil)

	run(ctx, t, servers, script)

	gone := func(object client.Object) {
		err := spoke.client.Get(ctx, client.ObjectKeyFromObject(object), object)
		require.True(t, apierrors.IsNotFound(err), "%s %s: %v", object.GetObjectKind().GroupVersionKind().Kind, object.GetName(), err)
	}
	untouched := func(object client.Object) {
		before := object.GetResourceVersion()
		require.NoError(t, spoke.client.Get(ctx, client.ObjectKeyFromObject(object), object), object.GetName())
		require.Equal(t, before, object.GetResourceVersion(), object.GetName())
	}
	for _, object := range []client.Object{ourClaim, endingClaim, ourPool, nodeClass} {
		gone(object)
	}
	for _, object := range []client.Object{theirClaim, theirPool, theirNode, plainNode} {
		untouched(object)
	}
	for _, n := range []*corev1.Node{ourNode, endingNode} {
		require.NoError(t, spoke.client.Get(ctx, client.ObjectKeyFromObject(n), n))
		require.Equal(t, []string{foreign}, n.Finalizers)
		owners := lo.Map(n.OwnerReferences, func(o metav1.OwnerReference, _ int) string { return o.Kind })
		require.Equal(t, []string{"Rack"}, owners, "else the garbage collector deletes it with its NodeClaim")
		require.Equal(t, map[string]string{"topology.kubernetes.io/zone": "a", "example.com/karpenter.sh": "x"}, n.Labels,
			"with labels of Karpenter's it could never be adopted again")
		require.Equal(t, map[string]string{"example.com/rack": "r1"}, n.Annotations)
		taints := lo.Map(n.Spec.Taints, func(taint corev1.Taint, _ int) string { return taint.Key })
		require.Contains(t, taints, "dedicated")
		require.NotContains(t, taints, "karpenter.sh/disrupted")
	}
}

// Another Karpenter's release may have our default name: the removal must stop before it touches
// anything of that release.
func TestTheRemovalRefusesAnotherKarpentersRelease(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	spoke := start(t, filepath.Join(root(t), "deploy/charts/shim/files/crds"))
	create(ctx, t, spoke.client, "{apiVersion: v1, kind: Namespace, metadata: {name: karpenter}}")
	create(ctx, t, spoke.client, `{apiVersion: apps/v1, kind: Deployment,
		metadata: {namespace: karpenter, name: karpenter, labels: {app.kubernetes.io/name: karpenter, app.kubernetes.io/instance: karpenter}},
		spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`)
	steps := page.Steps("1. In each spoke")
	require.NotEmpty(t, steps)

	output := run(ctx, t, map[string]*server{"spoke": spoke}, "if ( "+steps[0]+" ); then echo went on; else echo refused; fi")
	require.Equal(t, "refused", strings.TrimSpace(output))
}

// Helm does not remove the CRDs of a chart.
func TestTheRemovalNamesEveryCRDOfTheAgent(t *testing.T) {
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	crds, err := filepath.Glob(filepath.Join(root(t), "deploy/charts/agent/files/crds/*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, crds)
	for _, file := range crds {
		group, plural, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".yaml"), "_")
		require.Regexp(t, fmt.Sprintf(`delete crd .*\b%s\.%s\b`, plural, regexp.QuoteMeta(group)), page.Text)
	}
}

// The order keeps the Nodes: once their owner is gone, the garbage collector deletes those that
// still refer to it.
func TestTheRemovalDetachesNodesBeforeItTouchesNodeClaims(t *testing.T) {
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	script := page.Script("1. In each spoke")
	detached := strings.Index(script, "get nodes --selector")
	stopped := strings.Index(script, "wait pod --for=delete")
	claims := strings.Index(script, "get nodeclaims -o json")
	require.IsNonDecreasing(t, []int{0, stopped, detached, claims})
}

// The rest of the removal is followed in the hub, from a release whose agent has begun a claim. What the
// agents of the other Clusters need is left, and what those need who stay.
func TestTheHubIsClearedAsThePageSays(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	installation, err := pages.Read(root(t), "docs/install.md")
	require.NoError(t, err)
	const stop, withdraw, remove = "2. In the hub: stop the agents", "3. Remove what the agents wrote", "4. Remove the agent and its CRDs"
	steps := page.Steps(withdraw)
	require.Len(t, steps, 2, "the command, and the return of the agents that others use")

	hub := start(t, "testdata/cert-manager.yaml", filepath.Join(root(t), "bin/capi-core-manifests/crds"))
	home := t.TempDir()
	do := func(commands string) string {
		t.Helper()
		return runAt(ctx, t, home, map[string]*server{"hub": hub}, commands)
	}
	require.NoError(t, hub.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}}))
	create(ctx, t, hub.client, "{apiVersion: cluster.x-k8s.io/v1beta2, kind: Cluster, metadata: {namespace: team-a, name: production}, "+
		"spec: {controlPlaneRef: {apiGroup: controlplane.cluster.x-k8s.io, kind: KamajiControlPlane, name: production}}}")
	workers := create(ctx, t, hub.client, `{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment,
		metadata: {namespace: team-a, name: workers, labels: {node.cluster.x-k8s.io/karpenter-member: ""}, annotations: {
			capacity.cluster-autoscaler.kubernetes.io/cpu: "4", capacity.cluster-autoscaler.kubernetes.io/memory: 16Gi,
			cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size: "10"}},
		spec: {clusterName: production, replicas: 0, selector: {matchLabels: {group: workers}}, template: {metadata: {labels: {group: workers}},
			spec: {clusterName: production, version: v1.34.0, bootstrap: {dataSecretName: bootstrap},
				infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: SimMachineTemplate, name: workers}}}}}`)
	authority := newAuthority(t)
	playCertManager(ctx, t, hub.client, authority.issue)
	values := strings.Replace(installation.Script("Before you begin"), "AGENT_HOST=agent.example.com", "AGENT_HOST=localhost", 1)
	do(values + installation.Script("The agent"))

	agent := runPod(ctx, t, hub, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent"}, "capi-agent", nil,
		"--listen-address=localhost:0", "--metrics-bind-address=0", "--health-probe-bind-address=0")
	address := servedAddress(ctx, t, agent)
	holder := identityIn(ctx, t, hub.client, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent-client-team-a-production"})
	c := holder.connect(t, address)
	require.NoError(t, await(ctx, func() error { // once the agent has seen the hub
		_, err := c.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"},
			ClaimId: "d8f2", Holder: "karpenter", Candidates: []string{"team-a/workers"},
		})
		return err
	}, agent))
	written := func() bool {
		require.NoError(t, hub.client.Get(ctx, client.ObjectKeyFromObject(workers), workers))
		return strings.Contains(fmt.Sprint(workers.GetAnnotations()), "d8f2")
	}
	require.NoError(t, await(ctx, func() error {
		if !written() {
			return fmt.Errorf("the group has no ledger: %v", workers.GetAnnotations())
		}
		return nil
	}, agent))
	agent.stop()

	do(page.Script(stop))
	deployment := &appsv1.Deployment{}
	release := client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent"}
	replicas := func() int32 {
		require.NoError(t, hub.client.Get(ctx, release, deployment))
		return *deployment.Spec.Replicas
	}
	require.Zero(t, replicas())
	bindings := func() []string {
		all := &admissionv1.ValidatingAdmissionPolicyBindingList{}
		require.NoError(t, hub.client.List(ctx, all))
		return lo.Map(all.Items, func(b admissionv1.ValidatingAdmissionPolicyBinding, _ int) string { return b.Name })
	}
	lifted := []string{"node-groups.capi-agent.capi-agent-system", "scale.capi-agent.capi-agent-system"}
	require.Empty(t, lo.Intersect(bindings(), lifted))
	require.NotEmpty(t, list(ctx, t, hub.client, claimKind))

	said := do(steps[0])
	require.Contains(t, said, "MachineDeployment team-a/workers: withdrawn")
	require.Contains(t, said, "deleted 1 MachineClaims")
	require.Contains(t, said, "nothing of the agent is left")
	require.False(t, written())
	require.Empty(t, list(ctx, t, hub.client, claimKind))
	replicasOf, _, err := unstructured.NestedInt64(workers.Object, "spec", "replicas")
	require.NoError(t, err)
	require.EqualValues(t, 1, replicasOf, "every claimed machine is the user's")

	do(steps[1])
	require.EqualValues(t, 2, replicas())
	require.Subset(t, bindings(), lifted)

	do(page.Script(remove))
	require.True(t, apierrors.IsNotFound(hub.client.Get(ctx, release, deployment)))
	crds := list(ctx, t, hub.client, schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	require.NotEmpty(t, crds, "those of Cluster API")
	for _, crd := range crds {
		require.NotContains(t, crd.GetName(), claimKind.Group)
	}
	require.Empty(t, bindings())
}
