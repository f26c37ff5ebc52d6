package shimtest

import (
	"context"
	"maps"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/controllers/state/informer"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"
	"sigs.k8s.io/karpenter/pkg/state/virtualpods"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
)

// NodePool creates a ready NodePool with the default name and node class, and applies the changes.
func (w *Env) NodePool(changes ...func(*karpv1.NodePool)) *karpv1.NodePool {
	w.t.Helper()
	nodePool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: NodePoolName, UID: uuid.NewUUID()}}
	nodePool.Spec.Template.Spec.NodeClassRef = NodeClassRef()
	nodePool.StatusConditions().SetTrue(karpv1.ConditionTypeValidationSucceeded)
	nodePool.StatusConditions().SetTrue(karpv1.ConditionTypeNodeClassReady)
	for _, change := range changes {
		change(nodePool)
	}
	w.Create(nodePool)
	return nodePool
}

// PendingPod creates a pod that requests this many CPUs and for which kube-scheduler found no Node,
// and applies the changes.
func (w *Env) PendingPod(name, cpu string, changes ...func(*corev1.Pod)) *corev1.Pod {
	w.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uuid.NewUUID()},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "app", Image: "app", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}},
		}}},
		Status: corev1.PodStatus{
			Phase:      corev1.PodPending,
			Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}},
		},
	}
	for _, change := range changes {
		change(pod)
	}
	w.Create(pod)
	return pod
}

// Node creates the Node of a NodeClaim that core has registered, with the given taints.
func (w *Env) Node(nodeClaim *karpv1.NodeClaim, taints ...corev1.Taint) *corev1.Node {
	w.t.Helper()
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeClaim.Name, Labels: map[string]string{karpv1.NodeRegisteredLabelKey: "true"}},
		Spec:       corev1.NodeSpec{ProviderID: nodeClaim.Status.ProviderID, Taints: taints},
		Status: corev1.NodeStatus{
			Capacity: nodeClaim.Status.Capacity, Allocatable: nodeClaim.Status.Allocatable,
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
	maps.Copy(node.Labels, nodeClaim.Labels)
	w.Create(node)
	return node
}

// Plan returns what core's provisioner plans for the pending pods, given the existing NodeClaims
// and Nodes. It creates nothing.
func (w *Env) Plan() scheduling.Results {
	w.t.Helper()
	results, err := w.provisioner().Schedule(w.coreContext())
	require.NoError(w.t, err)
	return results
}

func (w *Env) provisioner() *provisioning.Provisioner {
	w.t.Helper()
	cluster := state.NewCluster(w.Clock, w.Kube, w.CloudProvider)
	nodeClaims, nodes := &karpv1.NodeClaimList{}, &corev1.NodeList{}
	for _, list := range []client.ObjectList{nodeClaims, nodes} {
		require.NoError(w.t, w.Kube.List(w.Context(), list))
	}
	for i := range nodeClaims.Items {
		cluster.UpdateNodeClaim(&nodeClaims.Items[i])
	}
	// As in the real process, including what the client hides from core.
	observer := informer.NewNodeController(registration.PlanningClient(w.Kube), cluster)
	for i := range nodes.Items {
		_, err := observer.Reconcile(w.coreContext(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&nodes.Items[i])})
		require.NoError(w.t, err)
	}
	return provisioning.NewProvisioner(
		w.Kube, w.Recorder, w.CloudProvider, cluster, w.Clock, nil, virtualpods.NewVirtualPodCache(w.Kube),
	)
}

// coreContext returns a context with the options of core's scheduler, as in a real process.
func (w *Env) coreContext() context.Context {
	return coreoptions.ToContext(w.Context(), &coreoptions.Options{
		CPURequests:       1000,
		IgnoreDRARequests: true,
		PreferencePolicy:  coreoptions.PreferencePolicyRespect,
		MinValuesPolicy:   coreoptions.MinValuesPolicyStrict,
		FeatureGates:      coreoptions.FeatureGates{ReservedCapacity: true}, // the default
	})
}
