package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	texttemplate "text/template"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	fitRounds = 20
	fitSets   = 25 // of pods, in each round
	fitGroups = 4  // of each NodeClass, in each round
	fitLabel  = "fit"
	// placedWithin bounds what takes half a minute on an otherwise idle machine.
	placedWithin = slow * 5 * time.Minute
)

// fitGroup is a node group that only the infrastructure template describes.
var fitGroup = texttemplate.Must(texttemplate.New("").Parse(`
apiVersion: infrastructure.cluster.x-k8s.io/v1alpha1
kind: SimMachineTemplate
metadata: {namespace: fleet, name: {{.Name}}}
spec:
  template:
    spec:
      instanceType: {{.Name}}
      capacity: {cpu: "{{.CPU}}", memory: {{.Memory}}Mi, ephemeral-storage: 50Gi, pods: "{{.Pods}}"}
{{- if eq .Kubelet "reserved"}}
      kubeReserved: {cpu: 250m, memory: 700Mi}
{{- end}}
      bootDelay: 1s
      joinDelay: 1s
      terminationDelay: 1s
---
apiVersion: cluster.x-k8s.io/v1beta2
kind: MachineDeployment
metadata:
  namespace: fleet
  name: {{.Name}}
  labels: {node.cluster.x-k8s.io/karpenter-member: "", fleet.example.com/kubelet: {{.Kubelet}}}
spec:
  clusterName: spoke
  replicas: 0
  selector: {matchLabels: {cluster.x-k8s.io/deployment-name: {{.Name}}}}
  template:
    metadata: {labels: {cluster.x-k8s.io/deployment-name: {{.Name}}}}
    spec:
      clusterName: spoke
      version: v1.36.3
      bootstrap: {dataSecretName: spoke-bootstrap}
      infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: SimMachineTemplate, name: {{.Name}}}
`))

// fitPool is the NodePool of one set of pods. All pods of a set have the same requests, so that it
// does not matter how kube-scheduler distributes them over the planned Nodes; pods of several sets
// could take each other's room. Nothing is consolidated: only the first decisions are checked.
var fitPool = texttemplate.Must(texttemplate.New("").Parse(`
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: {{.Name}}}
spec:
  template:
    spec:
      requirements: [{key: karpenter.sh/capacity-type, operator: In, values: [on-demand]}]
      nodeClassRef: {group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: fit-{{.Kubelet}}}
  disruption: {consolidationPolicy: WhenEmpty, consolidateAfter: Never}
`))

// 500 random sets of pods against random catalogues: kube-scheduler places all of them on the Nodes
// that Karpenter planned, and Karpenter plans no pod twice.
func TestPodsFitTheNodesThatWerePlannedForThem(t *testing.T) {
	figure := shows(t, "fit: pods fit the Nodes that were planned for them, and none is planned twice")
	if testing.Short() {
		t.Skip("not in the short run")
	}
	leaveAsFound(t)
	apply(t, w.Spoke, manifests.FitSpoke)
	for set := range fitSets {
		pool := fitObjects(t, fitPool, map[string]any{"Name": fitPoolName(set), "Kubelet": fitKubelets[set%len(fitKubelets)]})
		require.NoError(t, manifests.ApplyObjects(within(t, soon), w.Spoke, pool...))
		t.Cleanup(func() {
			if err := w.Spoke.Delete(context.Background(), pool[0]); err != nil {
				t.Error(err)
			}
		})
	}
	random := rand.New(rand.NewPCG(500, 4))
	pods, nodes := 0, 0
	for round := range fitRounds {
		p, n := fitRound(t, random, round)
		pods, nodes = pods+p, nodes+n
	}
	figure("%d random sets, %d pods, %d nodes", fitRounds*fitSets, pods, nodes)
}

var fitKubelets = []string{"default", "reserved"}

func fitPoolName(set int) string { return fmt.Sprintf("fit-%d", set) }

func fitObjects(t *testing.T, from *texttemplate.Template, values map[string]any) []*unstructured.Unstructured {
	t.Helper()
	var text bytes.Buffer
	require.NoError(t, from.Execute(&text, values))
	objects, err := manifests.Parse(text.Bytes())
	require.NoError(t, err)
	return objects
}

func fitRound(t *testing.T, random *rand.Rand, round int) (pods, nodes int) {
	t.Helper()
	ctx := within(t, 2*placedWithin+settleWithin)
	groups := fitCatalogue(t, random, round)
	require.NoError(t, manifests.ApplyObjects(ctx, w.Hub, groups...))
	for set := range fitSets {
		require.NoError(t, w.AwaitNodePool(ctx, fitPoolName(set)))
	}
	wanted := map[string]int{}
	for set := range fitSets {
		for _, pod := range fitSet(random, fitPoolName(set), fmt.Sprintf("fit-%d-%d", round, set)) {
			require.NoError(t, w.Spoke.Create(ctx, pod))
			wanted[fitPoolName(set)]++
			pods++
		}
	}
	await(t, placedWithin, running(pods))

	var claims karpenterv1.NodeClaimList
	require.NoError(t, w.Spoke.List(ctx, &claims))
	planned := map[string]int{}
	for i := range claims.Items {
		planned[claims.Items[i].Labels[karpenterv1.NodePoolLabelKey]] += int(claims.Items[i].Spec.Resources.Requests.Pods().Value())
	}
	require.Equal(t, wanted, planned, "the pods that NodeClaims were made for, by NodePool")
	nodes = len(claims.Items)

	require.NoError(t, w.Spoke.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace("default"), client.HasLabels{fitLabel}))
	require.NoError(t, w.Spoke.DeleteAllOf(ctx, &karpenterv1.NodeClaim{}))
	await(t, placedWithin, noMachines)
	for _, object := range slices.Backward(groups) {
		require.NoError(t, w.Hub.Delete(ctx, object))
	}
	require.NoError(t, testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		for _, object := range groups {
			if err := w.Hub.Get(ctx, client.ObjectKeyFromObject(object), object.DeepCopy()); client.IgnoreNotFound(err) != nil || err == nil {
				return object.GetKind() + " " + object.GetName() + " to be gone", client.IgnoreNotFound(err)
			}
		}
		return "", nil
	}))
	return pods, nodes
}

func noMachines(s timeline.State) string {
	if missing := nothingLives(s); missing != "" {
		return missing
	}
	for _, group := range s.Groups {
		if group.Machines > 0 || group.Replicas > 0 {
			return fmt.Sprintf("the %d Machines of %s to go", group.Machines, group.Name)
		}
	}
	return ""
}

// fitCatalogue returns node groups of random sizes for each NodeClass. One of them is large enough
// for every pod.
func fitCatalogue(t *testing.T, random *rand.Rand, round int) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	for _, kubelet := range fitKubelets {
		for i := range fitGroups {
			cpu := []int{2, 4, 8, 16, 32}[random.IntN(5)]
			memory := cpu * []int{1024, 2048, 4096, 8192}[random.IntN(4)]
			if i == 0 {
				cpu, memory = 16, 64<<10
			}
			all = append(all, fitObjects(t, fitGroup, map[string]any{
				"Name": fmt.Sprintf("fit-%d-%s-%d", round, kubelet, i), "Kubelet": kubelet,
				"CPU": cpu, "Memory": memory - random.IntN(200), "Pods": []int{8, 30, 110}[random.IntN(3)],
			})...)
		}
	}
	return all
}

// fitSet returns one to four pods with the same requests.
func fitSet(random *rand.Rand, pool, name string) []*corev1.Pod {
	requests := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(50+random.Int64N(7000), resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity((32+random.Int64N(14<<10))<<20, resource.BinarySI),
	}
	var pods []*corev1.Pod
	for i := range 1 + random.IntN(4) {
		pods = append(pods, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "default", Name: fmt.Sprintf("%s-%d", name, i), Labels: map[string]string{fitLabel: name},
			},
			Spec: corev1.PodSpec{
				TerminationGracePeriodSeconds: new(int64),
				NodeSelector:                  map[string]string{karpenterv1.NodePoolLabelKey: pool},
				Containers: []corev1.Container{{
					Name: "app", Image: "registry.k8s.io/pause:3.10", Resources: corev1.ResourceRequirements{Requests: requests},
				}},
			},
		})
	}
	return pods
}
