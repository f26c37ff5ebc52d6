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
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
