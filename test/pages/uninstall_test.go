package pages_test

import (
	"context"
	"fmt"
	"net"
	"os"
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
	// optedIn is the metadata of a MachineDeployment from which machines may be claimed.
	optedIn = `, labels: {node.cluster.x-k8s.io/karpenter-member: ""}, annotations: {
		capacity.cluster-autoscaler.kubernetes.io/cpu: "4", capacity.cluster-autoscaler.kubernetes.io/memory: 16Gi,
		cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size: "10"}`
)

// The removal's commands run in a spoke with another Karpenter beside ours, and with finalizers,
// owners and taints of others.
func TestTheRemovalTouchesOnlyWhatIsOurs(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	script := keepingNodes(t, page)

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

// inEachSpoke returns the steps in a spoke: the values, those that let Karpenter remove the nodes, and those
// that keep them.
func inEachSpoke(t *testing.T, page pages.Page) (values string, removing, keeping []string) {
	t.Helper()
	steps := page.Steps("1. In each spoke")
	require.Len(t, steps, 7)
	return steps[0], steps[1:3], steps[3:]
}

func keepingNodes(t *testing.T, page pages.Page) string {
	t.Helper()
	values, _, keeping := inEachSpoke(t, page)
	return values + strings.Join(keeping, "")
}

// karpenterRemovesItsNodes makes a node group of a MachineDeployment, lets the shim claim a machine, and removes
// the shim with its nodes, as two pages say. The test does the work of the garbage collector.
func karpenterRemovesItsNodes(
	ctx context.Context, t *testing.T, installation pages.Page, hub, spoke *server, do func(string) string, agent, shim *process,
) {
	t.Helper()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	require.NoError(t, err)
	values, removing, _ := inEachSpoke(t, page)

	workers := machineDeployment(ctx, t, hub.client, "production", "workers", "")
	optIn := installation.Steps("Node groups")
	require.Len(t, optIn, 2)
	do(strings.Join(optIn, ""))
	use := installation.Steps("What Karpenter may use")
	require.Len(t, use, 2)
	do(use[0])
	require.NoError(t, await(ctx, func() error {
		for _, kind := range []schema.GroupVersionKind{nodeClassKind, nodePoolKind} {
			for _, object := range list(ctx, t, spoke.client, kind) {
				if !strings.Contains(fmt.Sprint(object.Object["status"]), "status:True type:Ready") {
					return fmt.Errorf("%s is not ready: %v", kind.Kind, object.Object["status"])
				}
			}
		}
		return nil
	}, agent, shim))
	ready := do(use[1])
	for _, line := range []string{
		`NAME +READY `, `clusterapinodeclass\.\S+/default +True `, `NAME +NODECLASS +NODES +READY `, `nodepool\.\S+/default +default +0 +True `,
	} {
		require.Regexp(t, "(?m)^"+line, ready)
	}

	pod := create(ctx, t, spoke.client, "{apiVersion: v1, kind: Pod, metadata: {namespace: default, name: web}, "+
		"spec: {containers: [{name: c, image: i, resources: {requests: {cpu: '1'}}}]}}")
	pod.Object["status"] = map[string]any{"conditions": []any{map[string]any{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}}}
	require.NoError(t, spoke.client.Status().Update(ctx, pod))
	require.NoError(t, await(ctx, func() error {
		require.NoError(t, hub.client.Get(ctx, client.ObjectKeyFromObject(workers), workers))
		if replicas, _, err := unstructured.NestedInt64(workers.Object, "spec", "replicas"); err != nil || replicas != 1 {
			return fmt.Errorf("the group has %d replicas: %w", replicas, err)
		}
		return nil
	}, agent, shim))
	theirs := create(ctx, t, spoke.client, "{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: theirs}, "+
		"spec: {template: {spec: {nodeClassRef: {group: karpenter.k8s.aws, kind: EC2NodeClass, name: default}, requirements: []}}}}")

	stop := playGarbageCollector(ctx, t, spoke.client)
	do(values + removing[0])
	stop()
	require.Empty(t, list(ctx, t, spoke.client, nodeClaimKind))
	for _, claim := range list(ctx, t, hub.client, claimKind) {
		phase, _, err := unstructured.NestedString(claim.Object, "status", "phase")
		require.NoError(t, err)
		require.Equal(t, "Ended", phase, claim.GetName())
	}
	require.NoError(t, spoke.client.Get(ctx, client.ObjectKeyFromObject(theirs), theirs), "the NodePool of another Karpenter")
	require.Len(t, list(ctx, t, spoke.client, nodePoolKind), 1)
	do(values + removing[1])
	shim.stop()
	require.Empty(t, list(ctx, t, spoke.client, nodeClassKind))
	require.True(t, apierrors.IsNotFound(spoke.client.Get(ctx, client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, &appsv1.Deployment{})))
}

// playGarbageCollector deletes the NodeClaims whose NodePool is gone, until the returned function is called.
func playGarbageCollector(ctx context.Context, t *testing.T, spoke client.Client) (stop func()) {
	t.Helper()
	return play(ctx, t, "collecting garbage", func(ctx context.Context) error {
		nodeClaims := &unstructured.UnstructuredList{}
		nodeClaims.SetGroupVersionKind(nodeClaimKind)
		if err := spoke.List(ctx, nodeClaims); err != nil {
			return err
		}
		for _, nodeClaim := range nodeClaims.Items {
			for _, owner := range nodeClaim.GetOwnerReferences() {
				pool := &unstructured.Unstructured{}
				pool.SetGroupVersionKind(nodePoolKind)
				err := spoke.Get(ctx, client.ObjectKey{Name: owner.Name}, pool)
				if apierrors.IsNotFound(err) && nodeClaim.GetDeletionTimestamp() == nil {
					err = spoke.Delete(ctx, &nodeClaim)
				}
				if client.IgnoreNotFound(err) != nil {
					return err
				}
			}
		}
		return nil
	})
}

// machineDeployment creates a MachineDeployment without machines. Its metadata may have more than its name.
func machineDeployment(ctx context.Context, t *testing.T, hub client.Client, cluster, name, metadata string) *unstructured.Unstructured {
	t.Helper()
	return create(ctx, t, hub, fmt.Sprintf(`{apiVersion: cluster.x-k8s.io/v1beta2, kind: MachineDeployment,
		metadata: {namespace: team-a, name: %[2]s%[3]s},
		spec: {clusterName: %[1]s, replicas: 0, selector: {matchLabels: {group: %[2]s}}, template: {metadata: {labels: {group: %[2]s}},
			spec: {clusterName: %[1]s, version: v1.34.0, bootstrap: {dataSecretName: bootstrap},
				infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: SimMachineTemplate, name: workers}}}}}`, cluster, name, metadata))
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
	steps, shown := page.Steps(withdraw), page.Outputs(withdraw)
	require.Len(t, steps, 3, "for a Cluster, for all, and the return of the agents that others use")
	require.Len(t, shown, 2, "for a Cluster, and for all")

	hub := start(t, "testdata/cert-manager.yaml", filepath.Join(root(t), "bin/capi-core-manifests/crds"))
	home := t.TempDir()
	values := strings.Replace(installation.Script("Before you begin"), "AGENT_HOST=agent.example.com", "AGENT_HOST=localhost", 1)
	do := func(commands string) string {
		t.Helper()
		return runAt(ctx, t, home, map[string]*server{"hub": hub}, values+commands)
	}
	require.NoError(t, hub.client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}}))
	groups := map[string]*unstructured.Unstructured{}
	for cluster, group := range map[string]string{"production": "workers", "staging": "batch"} {
		create(ctx, t, hub.client, "{apiVersion: cluster.x-k8s.io/v1beta2, kind: Cluster, metadata: {namespace: team-a, name: "+cluster+"}, "+
			"spec: {controlPlaneRef: {apiGroup: controlplane.cluster.x-k8s.io, kind: KamajiControlPlane, name: production}}}")
		groups[cluster] = machineDeployment(ctx, t, hub.client, cluster, group, optedIn)
	}
	playCertManager(ctx, t, hub.client, newAuthority(t).issue)
	do(installation.Script("The agent"))
	metrics := metricsAreReadBy(ctx, t, hub.client, installation, home, do)

	agent := runPod(ctx, t, hub, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent"}, "capi-agent", nil,
		"--listen-address=localhost:0", "--metrics-bind-address="+metrics, "--health-probe-bind-address=0")
	address := servedAddress(ctx, t, agent)
	for cluster, group := range groups {
		claimMachine(ctx, t, hub.client, address, cluster, group, agent)
	}
	read := installation.Steps("Metrics")
	require.Len(t, read, 1)
	require.Contains(t, do(strings.Replace(read[0], "localhost:8080", metrics, 1)), "\ncapi_agent_claims{")
	do("kubectl --context hub config view --minify --flatten >~/hub && capi-agent onboard --kubeconfig ~/hub team-a/staging")
	agent.stop()
	written := func(cluster string) bool {
		group := groups[cluster]
		require.NoError(t, hub.client.Get(ctx, client.ObjectKeyFromObject(group), group))
		return strings.Contains(fmt.Sprint(group.GetAnnotations()), claimOf(cluster))
	}

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
	require.Len(t, list(ctx, t, hub.client, claimKind), 2)

	require.Equal(t, uncounted(shown[0]), uncounted(do(steps[0])))
	require.False(t, written("production"))
	require.True(t, written("staging"), "another Cluster still uses the agent")
	require.Len(t, list(ctx, t, hub.client, claimKind), 1)
	require.Equal(t, uncounted(shown[1]), uncounted(do(steps[1])))
	require.False(t, written("staging"))
	require.Empty(t, list(ctx, t, hub.client, claimKind))
	for cluster, group := range groups {
		replicasOf, _, err := unstructured.NestedInt64(group.Object, "spec", "replicas")
		require.NoError(t, err)
		require.EqualValues(t, 1, replicasOf, "every claimed machine of %s is the user's", cluster)
	}

	do(steps[2])
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

	crdsWithoutAnOwnerAreAdopted(t, installation, do)
	require.EqualValues(t, 2, replicas(), "the agent is installed again")
}

// claimOf returns the id of a Cluster's claim.
func claimOf(cluster string) string { return "d8f2-" + cluster }

// claimMachine claims a machine of the group for its Cluster, and waits until the group's ledger has the claim.
func claimMachine(ctx context.Context, t *testing.T, hub client.Client, address, cluster string, group *unstructured.Unstructured, agent *process) {
	t.Helper()
	holder := identityIn(ctx, t, hub, client.ObjectKey{Namespace: "capi-agent-system", Name: "capi-agent-client-team-a-" + cluster})
	c := holder.connect(t, address)
	require.NoError(t, await(ctx, func() error { // once the agent has seen the hub
		_, err := c.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: cluster},
			ClaimId: claimOf(cluster), Holder: "karpenter", Candidates: []string{"team-a/" + group.GetName()},
		})
		return err
	}, agent))
	require.NoError(t, await(ctx, func() error {
		require.NoError(t, hub.Get(ctx, client.ObjectKeyFromObject(group), group))
		if !strings.Contains(fmt.Sprint(group.GetAnnotations()), claimOf(cluster)) {
			return fmt.Errorf("the group has no ledger: %v", group.GetAnnotations())
		}
		return nil
	}, agent))
}

// metricsAreReadBy lets the service account of the installation's page read the agent's metrics, and returns an
// address at which an agent may serve them.
func metricsAreReadBy(ctx context.Context, t *testing.T, hub client.Client, installation pages.Page, home string, do func(string) string) string {
	t.Helper()
	require.NoError(t, hub.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "monitoring"}}))
	require.NoError(t, hub.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "monitoring", Name: "prometheus-k8s"}}))
	values, found := lo.Find(installation.Blocks(), func(b pages.Block) bool { return b.Section == "Metrics" && b.Language == "yaml" })
	require.True(t, found)
	require.NoError(t, os.WriteFile(filepath.Join(home, "metrics.yaml"), []byte(values.Code), 0o600))
	// The hub has no CRDs of the Prometheus operator.
	do("helm --kube-context hub upgrade capi-agent deploy/charts/agent --namespace capi-agent-system --reset-then-reuse-values " +
		"--values ~/metrics.yaml --set metrics.serviceMonitor.enabled=false,metrics.prometheusRule.enabled=false")
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "localhost:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	_, port, err := net.SplitHostPort(listener.Addr().String())
	require.NoError(t, err)
	return "localhost:" + port
}

// crdsWithoutAnOwnerAreAdopted installs the agent in a hub that has CRDs from elsewhere, though not all of them.
func crdsWithoutAnOwnerAreAdopted(t *testing.T, installation pages.Page, do func(string) string) {
	t.Helper()
	install, own := installation.Steps("The agent")[0], installation.Steps("CRDs")
	require.Len(t, own, 1)
	do("kubectl --context hub apply --server-side " +
		"-f deploy/charts/agent/files/crds/agent.karpenter.cluster.x-k8s.io_machineclaims.yaml " +
		"-f deploy/charts/agent/files/crds/agent.karpenter.cluster.x-k8s.io_spokes.yaml")
	refused := regexp.MustCompile("`(exists\\s+and\\s+cannot\\s+be\\s+imported\\s[^`]+)`").FindStringSubmatch(installation.Text)
	require.NotNil(t, refused, "the error that the page names")
	require.Contains(t, do("if ( "+install+" ); then false; fi"), strings.Join(strings.Fields(refused[1]), " "))

	do(own[0])
	do(install)
}

var (
	counts = regexp.MustCompile(`(?m)(^| )\d+ `)
	hosts  = regexp.MustCompile(`https://\S+`)
	again  = regexp.MustCompile(`(?m)^.*: refused, and repeated until .*\n`)
)

// uncounted returns an output of the removal without numbers, addresses, and what the API server refuses for some
// seconds at most.
func uncounted(output string) string {
	return hosts.ReplaceAllString(counts.ReplaceAllString(again.ReplaceAllString(output, ""), "${1}N "), "<hub>")
}

func TestOutputsOfTheRemovalAreCompared(t *testing.T) {
	require.Equal(t, uncounted("hub: https://a:6443\ndeleted 1 MachineClaims\n2 Spokes removed\n"),
		uncounted("hub: https://b\nMachineDeployment a/b: refused, and repeated until 15s after the start: c\n"+
			"deleted 12 MachineClaims\n1 Spokes removed\n"))
	require.NotEqual(t, uncounted("deleted 1 MachineClaims"), uncounted("would delete 1 MachineClaims"))
	require.NotEqual(t, uncounted("MachineDeployment team-a/v1: withdrawn"), uncounted("MachineDeployment team-a/v2: withdrawn"))
}
