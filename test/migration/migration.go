// Package migration transforms the work of agent and shim into what karpenter-provider-cluster-api
// would have left behind.
package migration

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// MachineAnnotation is that provider's annotation on NodeClaims: the Machine that it chose, as
// namespace/name.
const MachineAnnotation = "cluster.x-k8s.io/machine"

// Strip removes what belongs to this project: MachineClaims, ledgers, labels and annotations,
// and the protection of adopted Nodes. Neither agent nor shim may be running.
func Strip(ctx context.Context, w *testenv.Env) error {
	machines, err := stripHub(ctx, w)
	if err != nil {
		return fmt.Errorf("stripping the hub: %w", err)
	}
	if err := stripSpoke(ctx, w, machines); err != nil {
		return fmt.Errorf("stripping the spoke: %w", err)
	}
	return nil
}

// stripHub returns the Machines that had claims, as namespace/name, by provider ID.
func stripHub(ctx context.Context, w *testenv.Env) (map[string]string, error) {
	in := client.InNamespace(sandbox.ClusterNamespace)
	var claims agentv1.MachineClaimList
	if err := w.Hub.List(ctx, &claims, in); err != nil {
		return nil, err
	}
	for i := range claims.Items {
		if err := client.IgnoreNotFound(w.Hub.Delete(ctx, &claims.Items[i])); err != nil {
			return nil, err
		}
	}
	var deployments clusterv1.MachineDeploymentList
	if err := w.Hub.List(ctx, &deployments, in); err != nil {
		return nil, err
	}
	for i := range deployments.Items {
		md := &deployments.Items[i]
		stored := md.DeepCopy()
		md.Annotations = without(md.Annotations, agentv1.Group)
		if err := w.Hub.Patch(ctx, md, client.MergeFrom(stored)); err != nil {
			return nil, err
		}
	}
	claimed := map[string]string{}
	var machines clusterv1.MachineList
	if err := w.Hub.List(ctx, &machines, in); err != nil {
		return nil, err
	}
	for i := range machines.Items {
		m := &machines.Items[i]
		if m.Labels[agentv1.ClaimLabel] == "" {
			continue
		}
		claimed[m.Spec.ProviderID] = m.Namespace + "/" + m.Name
		stored := m.DeepCopy()
		m.Annotations, m.Labels = without(m.Annotations, agentv1.Group), without(m.Labels, agentv1.Group)
		m.Labels[agentv1.MemberLabel] = ""
		if err := w.Hub.Patch(ctx, m, client.MergeFrom(stored)); err != nil {
			return nil, err
		}
	}
	return claimed, nil
}

func stripSpoke(ctx context.Context, w *testenv.Env, machines map[string]string) error {
	var nodeClaims karpenterv1.NodeClaimList
	if err := w.Spoke.List(ctx, &nodeClaims); err != nil {
		return err
	}
	for i := range nodeClaims.Items {
		nc := &nodeClaims.Items[i]
		stored := nc.DeepCopy()
		strip(nc)
		nc.Annotations[MachineAnnotation] = machines[nc.Status.ProviderID]
		if err := w.Spoke.Patch(ctx, nc, client.MergeFrom(stored)); err != nil {
			return err
		}
	}
	var nodes corev1.NodeList
	if err := w.Spoke.List(ctx, &nodes); err != nil {
		return err
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if machines[n.Spec.ProviderID] == "" {
			continue
		}
		stored := n.DeepCopy()
		strip(n)
		if err := w.Spoke.Patch(ctx, n, client.MergeFrom(stored)); err != nil {
			return err
		}
	}
	return nil
}

// strip makes a NodeClaim or a Node look like one that the shim has never seen.
func strip(object client.Object) {
	class := karpenterv1.NodeClassLabelKey(schema.GroupKind{Group: shimv1.Group, Kind: "ClusterAPINodeClass"}) // set by core, with that provider too
	labels := object.GetLabels()
	kept := lo.PickByKeys(labels, []string{class})
	labels = lo.Assign(lo.OmitByKeys(without(labels, shimv1.Group), []string{karpenterv1.NodeDoNotSyncTaintsLabelKey}), kept)
	labels[corev1.LabelInstanceTypeStable] = "" // that provider sets no name if the template has none
	object.SetLabels(labels)
	object.SetAnnotations(lo.OmitByKeys(without(object.GetAnnotations(), shimv1.Group), []string{karpenterv1.DoNotDisruptAnnotationKey}))
}

func without(values map[string]string, group string) map[string]string {
	return lo.OmitBy(values, func(key, _ string) bool { return strings.HasPrefix(key, group+"/") })
}

// AnotherMachine raises the group's replicas by one, as that provider does, and returns the new
// Machine once its Node exists.
func AnotherMachine(ctx context.Context, w *testenv.Env, group string) (*clusterv1.Machine, error) {
	machines := func(ctx context.Context) (map[string]clusterv1.Machine, error) {
		var list clusterv1.MachineList
		err := w.Hub.List(ctx, &list, client.InNamespace(sandbox.ClusterNamespace), client.MatchingLabels{clusterv1.MachineDeploymentNameLabel: group})
		return lo.KeyBy(list.Items, func(m clusterv1.Machine) string { return m.Name }), err
	}
	before, err := machines(ctx)
	if err != nil {
		return nil, err
	}
	md := &clusterv1.MachineDeployment{}
	if err := w.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: group}, md); err != nil {
		return nil, err
	}
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, ptr.Deref(md.Spec.Replicas, 0)+1)
	if err := w.Hub.Patch(ctx, md, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return nil, err
	}
	var made *clusterv1.Machine
	err = testenv.Poll(ctx, func(ctx context.Context) (string, error) {
		now, err := machines(ctx)
		for _, m := range lo.OmitByKeys(now, slices.Collect(maps.Keys(before))) {
			if m.Status.NodeRef.IsDefined() {
				made = &m
				return "", nil
			}
		}
		return "another Machine of " + group + " to have its Node", err
	})
	return made, err
}

// AddNodeClaim creates a NodeClaim on a Machine, as a copy of another one with the change applied.
func AddNodeClaim(
	ctx context.Context, w *testenv.Env, like *karpenterv1.NodeClaim, name string, m *clusterv1.Machine, change func(*karpenterv1.NodeClaim),
) (*karpenterv1.NodeClaim, error) {
	made := &karpenterv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: maps.Clone(like.Labels), Annotations: map[string]string{}, OwnerReferences: like.OwnerReferences,
		},
		Spec:   *like.Spec.DeepCopy(),
		Status: *like.Status.DeepCopy(),
	}
	made.Status.ProviderID, made.Status.NodeName = m.Spec.ProviderID, m.Status.NodeRef.Name
	change(made)
	status := made.Status
	if err := w.Spoke.Create(ctx, made); err != nil {
		return nil, err
	}
	made.Status = status
	return made, w.Spoke.Status().Update(ctx, made)
}

// NotLaunched turns a NodeClaim into one whose launch that provider has begun: it has chosen the
// Machine.
func NotLaunched(m *clusterv1.Machine) func(*karpenterv1.NodeClaim) {
	return func(nc *karpenterv1.NodeClaim) {
		nc.Annotations[MachineAnnotation] = m.Namespace + "/" + m.Name
		nc.Status = karpenterv1.NodeClaimStatus{}
	}
}

// Terminating turns a NodeClaim into one that core terminates once it is deleted.
func Terminating(nc *karpenterv1.NodeClaim) {
	nc.Finalizers = []string{karpenterv1.TerminationFinalizer}
}

// AllowDisruption removes the protection of adopted Nodes and NodeClaims, as described in
// docs/migrate-from-karpenter-provider-cluster-api.md.
func AllowDisruption(ctx context.Context, w *testenv.Env) error {
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, karpenterv1.DoNotDisruptAnnotationKey))
	adopted := client.HasLabels{shimv1.AdoptedLabel}
	var nodes corev1.NodeList
	if err := w.Spoke.List(ctx, &nodes, adopted); err != nil {
		return err
	}
	for i := range nodes.Items {
		if err := client.IgnoreNotFound(w.Spoke.Patch(ctx, &nodes.Items[i], patch)); err != nil {
			return err
		}
	}
	var nodeClaims karpenterv1.NodeClaimList
	if err := w.Spoke.List(ctx, &nodeClaims, adopted); err != nil {
		return err
	}
	for i := range nodeClaims.Items {
		if err := client.IgnoreNotFound(w.Spoke.Patch(ctx, &nodeClaims.Items[i], patch)); err != nil {
			return err
		}
	}
	return nil
}
