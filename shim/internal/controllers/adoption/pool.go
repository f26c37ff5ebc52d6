package adoption

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	provisioning "sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/scheduling"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// pick returns the NodePool of the NodeClass that the Node with these labels fits, so that core
// would not treat the Node as drifted. Of several it picks the one with the greatest weight, then
// the first by name. If there is none, the error states why.
func pick(pools []karpv1.NodePool, class string, node *corev1.Node, labels map[string]string) (*karpv1.NodePool, error) {
	own := lo.Filter(lo.ToSlicePtr(pools), func(pool *karpv1.NodePool, _ int) bool {
		ref := pool.Spec.Template.Spec.NodeClassRef
		return ref != nil && ref.Group == v1alpha1.Group && ref.Name == class && pool.DeletionTimestamp.IsZero()
	})
	if len(own) == 0 {
		return nil, fmt.Errorf("no NodePool refers to ClusterAPINodeClass %s", class)
	}
	slices.SortFunc(own, func(a, b *karpv1.NodePool) int {
		return cmp.Or(cmp.Compare(lo.FromPtr(b.Spec.Weight), lo.FromPtr(a.Spec.Weight)), strings.Compare(a.Name, b.Name))
	})
	var reasons []error
	for _, pool := range own {
		err := fits(pool, node, labels)
		if err == nil {
			return pool, nil
		}
		reasons = append(reasons, fmt.Errorf("NodePool %s: %w", pool.Name, err))
	}
	return nil, errors.Join(reasons...)
}

// fits returns nil if a Node with these labels can belong to the NodePool, or the reason why not.
func fits(pool *karpv1.NodePool, node *corev1.Node, labels map[string]string) error {
	if pool.Spec.Replicas != nil {
		return errors.New("it already has the Nodes of its spec.replicas")
	}
	template := &pool.Spec.Template
	for _, taint := range template.Spec.Taints {
		if !lo.ContainsBy(node.Spec.Taints, func(has corev1.Taint) bool { return has.MatchTaint(&taint) && has.Value == taint.Value }) {
			return fmt.Errorf("the Node does not have its taint %s", taint.ToString())
		}
	}
	for key, value := range template.Labels { // core adds missing ones
		if has, is := labels[key]; is && has != value {
			return fmt.Errorf("the Node has the label %s=%s, and its Nodes have %s=%s", key, has, key, value)
		}
	}
	requirements := scheduling.NewNodeSelectorRequirementsWithMinValues(template.Spec.Requirements...)
	return scheduling.NewLabelRequirements(lo.Assign(labels, template.Labels)).Compatible(requirements)
}

// nodeClaimFor returns a NodeClaim, not created yet, that adopts a Machine into the NodePool. It
// has the Machine's name, so that there is at most one. labels are those that core will write to
// the Node, including ones that the Node does not have yet.
func nodeClaimFor(
	pool *karpv1.NodePool, machine string, node *corev1.Node, labels map[string]string, policy v1alpha1.AdoptionPolicy,
) *karpv1.NodeClaim {
	template := provisioning.NewNodeClaimTemplate(pool)
	template.IsStaticNodeClaim = true // its instance type is known
	known := lo.PickBy(lo.Assign(node.Labels, labels), func(key, _ string) bool {
		chosen := key == corev1.LabelInstanceTypeStable || key == corev1.LabelTopologyZone || key == karpv1.CapacityTypeLabelKey
		return chosen || template.Requirements.Has(key)
	})
	template.Requirements.Add(scheduling.NewLabelRequirements(known).Values()...)
	nodeClaim := template.ToNodeClaim()
	for i := range nodeClaim.Spec.Requirements { // a machine has one value of each, and the API server validates the number
		nodeClaim.Spec.Requirements[i].MinValues = nil
	}
	nodeClaim.ObjectMeta = metav1.ObjectMeta{
		Name: machine, Labels: lo.Assign(labels, nodeClaim.Labels), OwnerReferences: nodeClaim.OwnerReferences,
		Annotations: lo.Assign(nodeClaim.Annotations, map[string]string{v1alpha1.AdoptMachineAnnotation: machine}),
	}
	nodeClaim.Spec.StartupTaints = nil // the Node has started
	markAdopted(nodeClaim, policy)
	return nodeClaim
}
