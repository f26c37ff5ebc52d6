package kubectl

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// hub reads the management cluster. It knows of its objects only what it shows: neither Cluster API
// nor the agent's own types are needed for that.
type hub struct {
	kube client.Reader
}

// get reads an object into the given structure. It returns false if there is none.
func (h *hub) get(ctx context.Context, kind schema.GroupVersionKind, namespace, name string, into any) (bool, error) {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(kind)
	err := h.kube.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, object)
	switch {
	case isNoSuchKind(err):
		return false, fmt.Errorf("reading %s %s/%s: %w: is it the hub? See --hub-kubeconfig and --hub-context", kind.Kind, namespace, name, err)
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("reading %s %s/%s: %w", kind.Kind, namespace, name, err)
	}
	return true, decode(object.Object, into)
}

// decode reads the fields that a structure has from an unstructured object.
func decode(object map[string]any, into any) error {
	return runtime.DefaultUnstructuredConverter.FromUnstructured(object, into)
}

// machineClaim is what is shown of a MachineClaim.
type machineClaim struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		ClaimID     string `json:"claimID"`
		Holder      string `json:"holder"`
		DisplayName string `json:"displayName"`
		NodeGroup   string `json:"nodeGroup"`
		Adopt       string `json:"adopt"`
	} `json:"spec"`
	Status struct {
		Phase   string `json:"phase"`
		Reason  string `json:"reason"`
		Message string `json:"message"`
		Machine *struct {
			Name       string `json:"name"`
			ProviderID string `json:"providerID"`
			NodeName   string `json:"nodeName"`
		} `json:"machine"`
		BoundAt    *metav1.Time `json:"boundAt"`
		FailedAt   *metav1.Time `json:"failedAt"`
		ReleasedAt *metav1.Time `json:"releasedAt"`
		EndedAt    *metav1.Time `json:"endedAt"`
		Returned   bool         `json:"returned"`
	} `json:"status"`
}

// phases are the phases of MachineClaims. An empty one is that of a new claim.
var phases = map[string]agentv1alpha1.ClaimPhase{
	"":          agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING,
	"Pending":   agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING,
	"Bound":     agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
	"Releasing": agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING,
	"Ended":     agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED,
}

// claim returns a claim from its MachineClaim, or nil.
func (h *hub) claim(ctx context.Context, cluster *agentv1alpha1.ClusterRef, id string) (*agentv1alpha1.Claim, error) {
	var object machineClaim
	found, err := h.get(ctx, machineClaimKind, cluster.GetNamespace(), cluster.GetName()+"."+id, &object)
	if err != nil || !found {
		return nil, err
	}
	claim := &agentv1alpha1.Claim{
		Cluster: cluster, ClaimId: id, Holder: object.Spec.Holder, DisplayName: object.Spec.DisplayName, AdoptMachine: object.Spec.Adopt,
		Phase: phases[object.Status.Phase], Reason: object.Status.Reason, Message: object.Status.Message, Returned: object.Status.Returned,
		CreatedAt: timestamppb.New(object.CreationTimestamp.Time), FailedAt: stamp(object.Status.FailedAt),
		ReleasedAt: stamp(object.Status.ReleasedAt), EndedAt: stamp(object.Status.EndedAt),
	}
	if object.Spec.NodeGroup == "" {
		claim.Phase = agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	} else {
		claim.NodeGroupId = cluster.GetNamespace() + "/" + object.Spec.NodeGroup
	}
	if at := stamp(object.Status.BoundAt); at != nil {
		claim.History = []*agentv1alpha1.ClaimEvent{{Time: at, Reason: "Bound"}}
	}
	if m := object.Status.Machine; m != nil {
		claim.Machine = &agentv1alpha1.Machine{
			Cluster: cluster, Name: m.Name, ProviderId: m.ProviderID, NodeName: m.NodeName, UpToDate: true, NodeGroupId: claim.GetNodeGroupId(),
		}
	}
	return claim, nil
}

func stamp(at *metav1.Time) *timestamppb.Timestamp {
	if at == nil || at.IsZero() {
		return nil
	}
	return timestamppb.New(at.Time)
}

// conditioned is an object with conditions.
type conditioned struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		ProviderID string `json:"providerID"`
	} `json:"spec"`
	Status struct {
		Phase   string `json:"phase"`
		NodeRef struct {
			Name string `json:"name"`
		} `json:"nodeRef"`
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

// Labels and annotations of Machines.
const (
	deploymentLabel = "cluster.x-k8s.io/deployment-name"
	claimLabel      = "agent.karpenter.cluster.x-k8s.io/claim"
	floorAnnotation = "agent.karpenter.cluster.x-k8s.io/floor"
)

// machine returns a Machine as the agent would show it, or nil.
func (h *hub) machine(ctx context.Context, cluster *agentv1alpha1.ClusterRef, name string) (*agentv1alpha1.Machine, error) {
	var object conditioned
	found, err := h.get(ctx, machineKind, cluster.GetNamespace(), name, &object)
	if err != nil || !found {
		return nil, err
	}
	machine := &agentv1alpha1.Machine{
		Cluster: cluster, Name: name, Uid: string(object.UID), ClaimId: object.Labels[claimLabel], ProviderId: object.Spec.ProviderID,
		NodeName: object.Status.NodeRef.Name, Phase: object.Status.Phase, CreatedAt: timestamppb.New(object.CreationTimestamp.Time),
		DeletedAt: stamp(object.DeletionTimestamp), UpToDate: true,
	}
	if group := object.Labels[deploymentLabel]; group != "" {
		machine.NodeGroupId = cluster.GetNamespace() + "/" + group
	}
	conditions := object.Status.Conditions
	infrastructure := apimeta.FindStatusCondition(conditions, "InfrastructureReady")
	if infrastructure != nil && infrastructure.Status != metav1.ConditionTrue {
		machine.InfrastructureReason, machine.InfrastructureMessage = infrastructure.Reason, infrastructure.Message
	}
	if deleting := apimeta.FindStatusCondition(conditions, "Deleting"); deleting != nil && deleting.Status == metav1.ConditionTrue {
		machine.DeletingReason, machine.DeletingMessage = deleting.Reason, deleting.Message
	}
	if _, marked := object.Annotations[floorAnnotation]; marked && machine.GetClaimId() == "" {
		machine.Owner = agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR
	}
	return machine, nil
}

// telling are the conditions that say something if they have the given status.
var telling = map[string]map[string]metav1.ConditionStatus{
	kindMachine: {
		"BootstrapConfigReady": metav1.ConditionFalse, "InfrastructureReady": metav1.ConditionFalse, "NodeHealthy": metav1.ConditionFalse,
		"HealthCheckSucceeded": metav1.ConditionFalse, "Deleting": metav1.ConditionTrue, "Paused": metav1.ConditionTrue,
	},
	"MachineDeployment": {
		"ScalingUp": metav1.ConditionTrue, "RollingOut": metav1.ConditionTrue, "Remediating": metav1.ConditionTrue, "Paused": metav1.ConditionTrue,
	},
}

// newWarnings is how old a warning may be to be shown, and mostWarnings how many are.
const (
	newWarnings  = 30 * time.Minute
	mostWarnings = 3
)

// notes returns what the Machine and the MachineDeployment say. Empty names are left out.
func (h *hub) notes(ctx context.Context, namespace, machine, group string) ([]explain.Note, error) {
	var notes []explain.Note
	for _, object := range []struct {
		kind schema.GroupVersionKind
		name string
	}{{machineDeploymentKind, group}, {machineKind, machine}} {
		if object.name == "" {
			continue
		}
		var found conditioned
		exists, err := h.get(ctx, object.kind, namespace, object.name, &found)
		if err != nil {
			return nil, err
		}
		if !exists {
			continue
		}
		of := object.kind.Kind + " " + namespace + "/" + object.name
		for _, condition := range found.Status.Conditions {
			if status, tells := telling[object.kind.Kind][condition.Type]; tells && status == condition.Status {
				notes = append(notes, explain.Note{Object: of, Message: fmt.Sprintf("%s is %s (%s): %s", condition.Type, condition.Status, condition.Reason,
					cmp.Or(condition.Message, "no message"))})
			}
		}
		warnings, err := h.warnings(ctx, object.kind.Kind, namespace, object.name)
		if err != nil {
			return nil, err
		}
		for _, warning := range warnings {
			notes = append(notes, explain.Note{Object: of, Message: "warning " + warning})
		}
	}
	return notes, nil
}

func (h *hub) warnings(ctx context.Context, kind, namespace, name string) ([]string, error) {
	list := &corev1.EventList{}
	selector := fields.Set{"involvedObject.kind": kind, "involvedObject.name": name, "type": corev1.EventTypeWarning}.AsSelector()
	if err := h.kube.List(ctx, list, client.InNamespace(namespace), client.MatchingFieldsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("reading the events of %s %s/%s: %w", kind, namespace, name, err)
	}
	slices.SortFunc(list.Items, func(x, y corev1.Event) int { return explain.When(&y).Compare(explain.When(&x)) })
	var warnings []string
	for i := range list.Items {
		event := &list.Items[i]
		age := time.Since(explain.When(event))
		if len(warnings) == mostWarnings || age > newWarnings {
			break
		}
		// With its age: the cause may have been removed since.
		warnings = append(warnings, fmt.Sprintf("%s (%s ago): %s", event.Reason, explain.Age(age), event.Message))
	}
	return warnings, nil
}
