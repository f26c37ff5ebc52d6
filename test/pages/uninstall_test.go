package pages_test

import (
	"context"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
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
	g := NewWithT(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	g.Expect(err).NotTo(HaveOccurred())
	script := page.Script("1. In each spoke")
	g.Expect(script).NotTo(BeEmpty())

	spoke := start(t, filepath.Join(root(t), "deploy/charts/shim/crds"))
	servers := map[string]*server{"spoke": spoke}
	run(ctx, t, servers, `helm install karpenter deploy/charts/shim --namespace karpenter --create-namespace \
		--set agent.address=agent:8443,cluster.namespace=team-a,cluster.name=production`)

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
		g.Expect(spoke.client.Create(ctx, n)).To(Succeed())
		return n
	}
	ours := map[string]string{
		"karpenter.cluster.x-k8s.io/clusterapinodeclass": "default", "karpenter.sh/nodepool": "ours", adopted: "true",
		"topology.kubernetes.io/zone": "a", "example.com/karpenter.sh": "x",
	}
	theirs := map[string]string{"karpenter.k8s.aws/ec2nodeclass": "default", "karpenter.sh/nodepool": "theirs"}

	ourPool, theirPool := nodePool("ours", ourClass), nodePool("theirs", theirClass)
	ourClaim, endingClaim, theirClaim := nodeClaim("ours", ourClass), nodeClaim("ending", ourClass), nodeClaim("theirs", theirClass)
	g.Expect(spoke.client.Delete(ctx, endingClaim)).To(Succeed())
	ourNode, endingNode := node("ours", ours, ourClaim), node("ending", ours, endingClaim)
	for _, n := range []*corev1.Node{ourNode, endingNode} {
		n.Annotations[doNotDisrupt], n.Annotations[nodeGroup] = "true", "team-a/workers"
		g.Expect(spoke.client.Update(ctx, n)).To(Succeed())
	}
	theirNode, plainNode := node("theirs", theirs, theirClaim), node("plain", nil, nil)

	run(ctx, t, servers, script)

	gone := func(object client.Object) {
		err := spoke.client.Get(ctx, client.ObjectKeyFromObject(object), object)
		g.Expect(apierrors.IsNotFound(err)).To(BeTrue(), "%s %s: %v", object.GetObjectKind().GroupVersionKind().Kind, object.GetName(), err)
	}
	untouched := func(object client.Object) {
		before := object.GetResourceVersion()
		g.Expect(spoke.client.Get(ctx, client.ObjectKeyFromObject(object), object)).To(Succeed(), object.GetName())
		g.Expect(object.GetResourceVersion()).To(Equal(before), object.GetName())
	}
	for _, object := range []client.Object{ourClaim, endingClaim, ourPool, nodeClass} {
		gone(object)
	}
	for _, object := range []client.Object{theirClaim, theirPool, theirNode, plainNode} {
		untouched(object)
	}
	for _, n := range []*corev1.Node{ourNode, endingNode} {
		g.Expect(spoke.client.Get(ctx, client.ObjectKeyFromObject(n), n)).To(Succeed())
		g.Expect(n.Finalizers).To(ConsistOf(foreign))
		g.Expect(n.OwnerReferences).To(HaveExactElements(HaveField("Kind", "Rack")), "else the garbage collector deletes it with its NodeClaim")
		g.Expect(n.Labels).To(Equal(map[string]string{"topology.kubernetes.io/zone": "a", "example.com/karpenter.sh": "x"}),
			"with labels of Karpenter's it could never be adopted again")
		g.Expect(n.Annotations).To(Equal(map[string]string{"example.com/rack": "r1"}))
		g.Expect(n.Spec.Taints).To(ContainElement(HaveField("Key", "dedicated")))
		g.Expect(n.Spec.Taints).NotTo(ContainElement(HaveField("Key", "karpenter.sh/disrupted")))
	}
}

// Another Karpenter's release may have our default name: the removal must stop before it touches
// anything of that release.
func TestTheRemovalRefusesAnotherKarpentersRelease(t *testing.T) {
	g := NewWithT(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/uninstall.md")
	g.Expect(err).NotTo(HaveOccurred())
	spoke := start(t, filepath.Join(root(t), "deploy/charts/shim/crds"))
	create(ctx, t, spoke.client, "{apiVersion: v1, kind: Namespace, metadata: {name: karpenter}}")
	create(ctx, t, spoke.client, `{apiVersion: apps/v1, kind: Deployment,
		metadata: {namespace: karpenter, name: karpenter, labels: {app.kubernetes.io/name: karpenter, app.kubernetes.io/instance: karpenter}},
		spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`)
	steps := page.Steps("1. In each spoke")
	g.Expect(steps).NotTo(BeEmpty())

	output := run(ctx, t, map[string]*server{"spoke": spoke}, "if ( "+steps[0]+" ); then echo went on; else echo refused; fi")
	g.Expect(strings.TrimSpace(output)).To(Equal("refused"))
}

// Helm does not remove the CRDs of a chart.
func TestTheRemovalNamesEveryCRDOfTheAgent(t *testing.T) {
	g := NewWithT(t)
	page, err := pages.Read(root(t), "docs/uninstall.md")
	g.Expect(err).NotTo(HaveOccurred())
	crds, err := filepath.Glob(filepath.Join(root(t), "deploy/charts/agent/crds/*.yaml"))
	g.Expect(err).NotTo(HaveOccurred())
	g.Expect(crds).NotTo(BeEmpty())
	for _, file := range crds {
		group, plural, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".yaml"), "_")
		g.Expect(page.Text).To(MatchRegexp(`delete crd .*\b%s\.%s\b`, plural, regexp.QuoteMeta(group)))
	}
}

// The order keeps the Nodes: once their owner is gone, the garbage collector deletes those that
// still refer to it.
func TestTheRemovalDetachesNodesBeforeItTouchesNodeClaims(t *testing.T) {
	g := NewWithT(t)
	page, err := pages.Read(root(t), "docs/uninstall.md")
	g.Expect(err).NotTo(HaveOccurred())
	script := page.Script("1. In each spoke")
	detached := strings.Index(script, "get nodes --selector")
	stopped := strings.Index(script, "wait pod --for=delete")
	claims := strings.Index(script, "get nodeclaims -o json")
	g.Expect([]int{0, stopped, detached, claims}).To(And(HaveEach(BeNumerically(">=", 0)), Satisfy(slices.IsSorted[[]int])))
}
