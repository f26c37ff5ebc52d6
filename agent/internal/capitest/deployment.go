package capitest

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// deployments reconciles MachineDeployments, and maintains their MachineSets.
type deployments struct{ *Model }

func (r *deployments) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	md := &clusterv1.MachineDeployment{}
	if err := r.client.Get(ctx, request.NamespacedName, md); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	owned, err := r.owned(ctx, md)
	if err != nil {
		return reconcile.Result{}, err
	}
	paused, err := r.paused(ctx, md, md.Spec.ClusterName)
	if err != nil {
		return reconcile.Result{}, err
	}
	if paused {
		return reconcile.Result{}, r.status(ctx, md, func() { setPaused(&md.Status.Conditions, true, md.Generation) })
	}
	if !md.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, r.remove(ctx, md, owned)
	}
	if controllerutil.AddFinalizer(md, clusterv1.MachineDeploymentFinalizer) {
		return reconcile.Result{}, r.client.Update(ctx, md)
	}
	current, old, err := r.ensureCurrent(ctx, md, owned)
	if err != nil {
		return reconcile.Result{}, err
	}
	before := lo.Map(append(slices.Clone(old), current), func(ms *clusterv1.MachineSet, _ int) *clusterv1.MachineSet { return ms.DeepCopy() })
	plan(md, current, old)
	for i, ms := range append(slices.Clone(old), current) {
		decorate(md, ms, ms == current)
		if apiequality.Semantic.DeepEqual(before[i], ms) {
			continue
		}
		if err := r.client.Update(ctx, ms); err != nil {
			return reconcile.Result{}, fmt.Errorf("writing MachineSet %s: %w", ms.Name, err)
		}
	}
	return reconcile.Result{}, r.status(ctx, md, func() { summarize(md, current, old) })
}

func (r *deployments) owned(ctx context.Context, md *clusterv1.MachineDeployment) ([]*clusterv1.MachineSet, error) {
	list := &clusterv1.MachineSetList{}
	if err := r.client.List(ctx, list, client.InNamespace(md.Namespace)); err != nil {
		return nil, fmt.Errorf("listing MachineSets: %w", err)
	}
	owned := lo.Filter(lo.ToSlicePtr(list.Items), func(ms *clusterv1.MachineSet, _ int) bool { return metav1.IsControlledBy(ms, md) })
	slices.SortFunc(owned, func(a, b *clusterv1.MachineSet) int {
		return cmp.Or(revision(a)-revision(b), strings.Compare(a.Name, b.Name))
	})
	return owned, nil
}

func (r *deployments) remove(ctx context.Context, md *clusterv1.MachineDeployment, owned []*clusterv1.MachineSet) error {
	for _, ms := range owned {
		if !ms.DeletionTimestamp.IsZero() {
			continue
		}
		if err := client.IgnoreNotFound(r.client.Delete(ctx, ms)); err != nil {
			return fmt.Errorf("deleting MachineSet %s: %w", ms.Name, err)
		}
	}
	if len(owned) == 0 && controllerutil.RemoveFinalizer(md, clusterv1.MachineDeploymentFinalizer) {
		return r.client.Update(ctx, md)
	}
	return nil
}

// ensureCurrent returns the MachineSet of the current template, which it creates if needed, and the
// other MachineSets, oldest first.
func (r *deployments) ensureCurrent(ctx context.Context, md *clusterv1.MachineDeployment, owned []*clusterv1.MachineSet,
) (current *clusterv1.MachineSet, old []*clusterv1.MachineSet, err error) {
	hash := templateHash(&md.Spec.Template)
	for _, ms := range owned {
		if templateHash(&ms.Spec.Template) == hash {
			current = ms
		} else {
			old = append(old, ms)
		}
	}
	if current != nil {
		return current, old, nil
	}
	labels := map[string]string{clusterv1.MachineDeploymentUniqueLabel: hash}
	maps.Copy(labels, md.Spec.Template.Labels)
	labels[clusterv1.ClusterNameLabel] = md.Spec.ClusterName
	labels[clusterv1.MachineDeploymentNameLabel] = md.Name
	selector := md.Spec.Selector.DeepCopy()
	selector.MatchLabels = lo.Assign(selector.MatchLabels, map[string]string{clusterv1.MachineDeploymentUniqueLabel: hash})
	current = &clusterv1.MachineSet{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: md.Namespace, Name: md.Name + "-" + hash, Labels: labels, Finalizers: []string{clusterv1.MachineSetFinalizer},
			Annotations:     map[string]string{clusterv1.RevisionAnnotation: strconv.Itoa(len(owned) + 1)},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(md, clusterv1.GroupVersion.WithKind("MachineDeployment"))},
		},
		Spec: clusterv1.MachineSetSpec{
			ClusterName: md.Spec.ClusterName, Replicas: ptr.To[int32](0), Selector: *selector, Template: *md.Spec.Template.DeepCopy(),
		},
	}
	current.Spec.Template.Labels = labels
	plan(md, current, old)
	decorate(md, current, true)
	if err := r.client.Create(ctx, current); err != nil {
		return nil, nil, fmt.Errorf("creating MachineSet %s: %w", current.Name, err)
	}
	return current, old, nil
}

// plan sets the replicas of every MachineSet. It never considers Machines, only the numbers in the
// MachineSets.
func plan(md *clusterv1.MachineDeployment, current *clusterv1.MachineSet, old []*clusterv1.MachineSet) {
	want := ptr.Deref(md.Spec.Replicas, 0)
	if spec(current) > want {
		current.Spec.Replicas = new(want)
	}
	onDelete := md.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType
	surge, unavailable := int32(0), int32(0)
	if !onDelete {
		surge = scaled(md.Spec.Rollout.Strategy.RollingUpdate.MaxSurge, 1, want, true)
		unavailable = scaled(md.Spec.Rollout.Strategy.RollingUpdate.MaxUnavailable, 0, want, false)
	}
	// Machines that are being deleted are counted in the status, and so occupy slots until they are
	// gone.
	occupied := lo.SumBy(append(slices.Clone(old), current), func(ms *clusterv1.MachineSet) int32 { return max(spec(ms), observed(ms)) })
	switch {
	case len(activeSets(old)) == 0 && !onDelete:
		current.Spec.Replicas = new(want)
	case spec(current) < want && occupied < want+surge:
		current.Spec.Replicas = new(min(want, spec(current)+want+surge-occupied))
	}
	if onDelete {
		for _, ms := range old {
			ms.Spec.Replicas = new(min(spec(ms), observed(ms)))
		}
		excess := spec(current) + lo.SumBy(old, spec) - want
		for _, ms := range old {
			take := min(max(excess, 0), spec(ms))
			ms.Spec.Replicas = new(spec(ms) - take)
			excess -= take
		}
		return
	}
	available := lo.SumBy(append(slices.Clone(old), current), func(ms *clusterv1.MachineSet) int32 {
		return min(spec(ms), ptr.Deref(ms.Status.AvailableReplicas, 0))
	})
	spareAvailable := max(available-(want-unavailable), 0)
	for _, ms := range old {
		missing := max(spec(ms)-ptr.Deref(ms.Status.AvailableReplicas, 0), 0)
		take := min(spec(ms), missing+spareAvailable)
		spareAvailable -= max(take-missing, 0)
		ms.Spec.Replicas = new(spec(ms) - take)
	}
}

// decorate writes what a MachineDeployment copies to its MachineSets.
func decorate(md *clusterv1.MachineDeployment, ms *clusterv1.MachineSet, current bool) {
	annotations := map[string]string{
		clusterv1.RevisionAnnotation:        ms.Annotations[clusterv1.RevisionAnnotation],
		clusterv1.DesiredReplicasAnnotation: strconv.Itoa(int(ptr.Deref(md.Spec.Replicas, 0))),
	}
	if value, ok := ms.Annotations[clusterv1.PausedAnnotation]; ok {
		annotations[clusterv1.PausedAnnotation] = value
	}
	for key, value := range md.Annotations {
		switch key {
		case clusterv1.RevisionAnnotation, clusterv1.DesiredReplicasAnnotation, clusterv1.PausedAnnotation,
			corev1.LastAppliedConfigAnnotation:
		default:
			annotations[key] = value
		}
	}
	if !current && md.Spec.Rollout.Strategy.Type == clusterv1.OnDeleteMachineDeploymentStrategyType {
		annotations[clusterv1.DisableMachineCreateAnnotation] = "true"
	}
	ms.Annotations = annotations
	ms.Spec.Deletion.Order = md.Spec.Deletion.Order
	ms.Spec.MachineNaming = md.Spec.MachineNaming
	if current {
		unique := ms.Spec.Template.Labels[clusterv1.MachineDeploymentUniqueLabel]
		ms.Spec.Template.Labels = lo.Assign(md.Spec.Template.Labels, map[string]string{
			clusterv1.ClusterNameLabel: md.Spec.ClusterName, clusterv1.MachineDeploymentNameLabel: md.Name, clusterv1.MachineDeploymentUniqueLabel: unique,
		})
		ms.Spec.Template.Annotations = maps.Clone(md.Spec.Template.Annotations)
	}
}

func summarize(md *clusterv1.MachineDeployment, current *clusterv1.MachineSet, old []*clusterv1.MachineSet) {
	all := append(slices.Clone(old), current)
	sum := func(count func(*clusterv1.MachineSet) *int32) *int32 {
		return new(lo.SumBy(all, func(ms *clusterv1.MachineSet) int32 { return ptr.Deref(count(ms), 0) }))
	}
	status := &md.Status
	status.ObservedGeneration = md.Generation
	status.Replicas = sum(func(ms *clusterv1.MachineSet) *int32 { return ms.Status.Replicas })
	status.ReadyReplicas = sum(func(ms *clusterv1.MachineSet) *int32 { return ms.Status.ReadyReplicas })
	status.AvailableReplicas = sum(func(ms *clusterv1.MachineSet) *int32 { return ms.Status.AvailableReplicas })
	status.UpToDateReplicas = new(observed(current))
	setPaused(&status.Conditions, false, md.Generation)
	want, have := ptr.Deref(md.Spec.Replicas, 0), ptr.Deref(status.Replicas, 0)
	setCondition(&status.Conditions, clusterv1.MachineDeploymentScalingUpCondition, have < want,
		clusterv1.MachineDeploymentScalingUpReason, clusterv1.MachineDeploymentNotScalingUpReason, "", md.Generation)
	setCondition(&status.Conditions, clusterv1.MachineDeploymentScalingDownCondition, have > want,
		clusterv1.MachineDeploymentScalingDownReason, clusterv1.MachineDeploymentNotScalingDownReason, "", md.Generation)
	setCondition(&status.Conditions, clusterv1.MachineDeploymentRollingOutCondition, len(activeSets(old)) > 0,
		clusterv1.MachineDeploymentRollingOutReason, clusterv1.MachineDeploymentNotRollingOutReason, "", md.Generation)
}

func (r *deployments) status(ctx context.Context, md *clusterv1.MachineDeployment, change func()) error {
	before := md.DeepCopy()
	change()
	if apiequality.Semantic.DeepEqual(before.Status, md.Status) {
		return nil
	}
	return client.IgnoreNotFound(r.client.Status().Patch(ctx, md, client.MergeFrom(before)))
}

func activeSets(all []*clusterv1.MachineSet) []*clusterv1.MachineSet {
	return lo.Filter(all, func(ms *clusterv1.MachineSet, _ int) bool { return spec(ms) > 0 || observed(ms) > 0 })
}

func spec(ms *clusterv1.MachineSet) int32     { return ptr.Deref(ms.Spec.Replicas, 0) }
func observed(ms *clusterv1.MachineSet) int32 { return ptr.Deref(ms.Status.Replicas, 0) }

func revision(ms *clusterv1.MachineSet) int {
	n, _ := strconv.Atoi(ms.Annotations[clusterv1.RevisionAnnotation])
	return n
}

func scaled(value *intstr.IntOrString, otherwise int, of int32, up bool) int32 {
	n, err := intstr.GetScaledValueFromIntOrPercent(new(ptr.Deref(value, intstr.FromInt(otherwise))), int(of), up)
	if err != nil {
		return int32(otherwise)
	}
	return int32(n)
}

// templateHash covers the fields whose change requires a new MachineSet. Other changes to the
// template are made in place.
func templateHash(template *clusterv1.MachineTemplateSpec) string {
	compared := clusterv1.MachineSpec{
		Version: template.Spec.Version, Bootstrap: template.Spec.Bootstrap,
		InfrastructureRef: template.Spec.InfrastructureRef, FailureDomain: template.Spec.FailureDomain,
	}
	text, err := json.Marshal(compared)
	if err != nil {
		panic(err) // strings always encode
	}
	hash := fnv.New32a()
	_, _ = hash.Write(text)
	return rand.SafeEncodeString(strconv.FormatUint(uint64(hash.Sum32()), 10))
}

func setPaused(conditions *[]metav1.Condition, paused bool, generation int64) {
	setCondition(conditions, clusterv1.PausedCondition, paused, clusterv1.PausedReason, clusterv1.NotPausedReason, "", generation)
}

func setCondition(conditions *[]metav1.Condition, kind string, is bool, reason, otherwise, message string, generation int64) {
	condition := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, Reason: otherwise, Message: message, ObservedGeneration: generation,
	}
	if is {
		condition.Status, condition.Reason = metav1.ConditionTrue, reason
	}
	meta.SetStatusCondition(conditions, condition)
}
