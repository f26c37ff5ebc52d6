package shimtest

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/controllers/state/informer"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"
	"sigs.k8s.io/karpenter/pkg/state/virtualpods"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
)

// NodePool creates a ready NodePool with the default name and NodeClass, and applies the changes.
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
	_, provisioner := w.observed()
	results, err := provisioner.Schedule(w.coreContext())
	require.NoError(w.t, err)
	return results
}

// Disrupt returns what core's disruption decides about the existing Nodes: the commands of the
// first of its methods that has any. It omits the validation some seconds later, and executes
// nothing.
func (w *Env) Disrupt() ([]disruption.Command, error) {
	w.t.Helper()
	ctx := w.coreContext()
	cluster, provisioner := w.observed()
	queue := disruption.NewQueue(w.Kube, w.Recorder, cluster, w.Clock, provisioner)
	consolidation := disruption.MakeConsolidation(w.Clock, cluster, w.Kube, provisioner, w.CloudProvider, w.Recorder, queue)
	for _, method := range []disruption.Method{
		disruption.NewEmptiness(consolidation, disruption.WithValidator(unvalidated{})),
		disruption.NewStaticDrift(cluster, provisioner, w.CloudProvider, w.Recorder),
		disruption.NewDrift(w.Kube, cluster, provisioner, w.Recorder, w.Clock),
		disruption.NewMultiNodeConsolidation(consolidation, disruption.WithValidator(unvalidated{})),
		disruption.NewSingleNodeConsolidation(consolidation, disruption.WithValidator(unvalidated{})),
	} {
		candidates, err := disruption.GetCandidates(
			ctx, cluster, w.Kube, w.Recorder, w.Clock, w.CloudProvider, method.ShouldDisrupt, method.Class(), queue,
		)
		require.NoError(w.t, err)
		budgets, err := disruption.BuildDisruptionBudgetMapping(ctx, cluster, w.Clock, w.Kube, w.CloudProvider, w.Recorder, method.Reason())
		require.NoError(w.t, err)
		commands, err := method.ComputeCommands(ctx, budgets, candidates...)
		commands = slices.DeleteFunc(commands, func(c disruption.Command) bool { return c.Decision() == disruption.NoOpDecision })
		if err != nil || len(commands) > 0 {
			return commands, err
		}
	}
	return nil, nil
}

// unvalidated accepts every command at once.
type unvalidated struct{}

func (unvalidated) Validate(_ context.Context, command disruption.Command, _ time.Duration) (disruption.Command, error) {
	return command, nil
}

// observed returns core's view of the existing NodeClaims and Nodes, and a provisioner with it.
func (w *Env) observed() (*state.Cluster, *provisioning.Provisioner) {
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
	return cluster, provisioning.NewProvisioner(
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
