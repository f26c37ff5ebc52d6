package capitest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// sets reconciles MachineSets, and maintains their Machines.
type sets struct{ *Model }

func (r *sets) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	ms := &clusterv1.MachineSet{}
	if err := r.client.Get(ctx, request.NamespacedName, ms); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	paused, err := r.paused(ctx, ms, ms.Spec.ClusterName)
	if err != nil {
		return reconcile.Result{}, err
	}
	if paused {
		return reconcile.Result{}, r.status(ctx, ms, func() { setPaused(&ms.Status.Conditions, true, ms.Generation) })
	}
	owned, err := r.owned(ctx, ms)
	if err != nil {
		return reconcile.Result{}, err
	}
	if !ms.DeletionTimestamp.IsZero() {
		return reconcile.Result{}, r.remove(ctx, ms, owned)
	}
	message, err := r.scale(ctx, ms, owned)
	if err != nil {
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, r.status(ctx, ms, func() { r.summarize(ms, owned, message) })
}

func (r *sets) owned(ctx context.Context, ms *clusterv1.MachineSet) ([]*clusterv1.Machine, error) {
	list := &clusterv1.MachineList{}
	if err := r.client.List(ctx, list, client.InNamespace(ms.Namespace)); err != nil {
		return nil, fmt.Errorf("listing Machines: %w", err)
	}
	return lo.Filter(lo.ToSlicePtr(list.Items), func(machine *clusterv1.Machine, _ int) bool { return metav1.IsControlledBy(machine, ms) }), nil
}

func (r *sets) remove(ctx context.Context, ms *clusterv1.MachineSet, owned []*clusterv1.Machine) error {
	for _, machine := range owned {
		if err := r.delete(ctx, machine); err != nil {
			return err
		}
	}
	if len(owned) == 0 && controllerutil.RemoveFinalizer(ms, clusterv1.MachineSetFinalizer) {
		return client.IgnoreNotFound(r.client.Update(ctx, ms))
	}
	return nil
}

// scale creates or deletes Machines until their number, including those being deleted, equals the
// MachineSet's replicas. If creation is blocked, it returns the message.
func (r *sets) scale(ctx context.Context, ms *clusterv1.MachineSet, owned []*clusterv1.Machine) (string, error) {
	diff := len(owned) - int(spec(ms))
	if diff < 0 {
		if _, disabled := ms.Annotations[clusterv1.DisableMachineCreateAnnotation]; disabled {
			return "", nil
		}
		r.mu.Lock()
		message, blocked := r.blocked[types.NamespacedName{Namespace: ms.Namespace, Name: ms.Labels[clusterv1.MachineDeploymentNameLabel]}]
		r.mu.Unlock()
		if blocked {
			return message, nil
		}
		for range -diff {
			if err := r.create(ctx, ms); err != nil {
				return "", err
			}
		}
		return "", nil
	}
	// Machines that are already being deleted sort first. They count as victims although nothing is
	// done to them.
	slices.SortFunc(owned, func(a, b *clusterv1.Machine) int {
		return cmp.Or(priority(b)-priority(a), byAge(ms, a, b), strings.Compare(a.Name, b.Name))
	})
	for _, machine := range owned[:diff] {
		if err := r.delete(ctx, machine); err != nil {
			return "", err
		}
	}
	return "", nil
}

func priority(machine *clusterv1.Machine) int {
	switch {
	case !machine.DeletionTimestamp.IsZero():
		return 100
	case lo.HasKey(machine.Annotations, clusterv1.DeleteMachineAnnotation):
		return 80
	case !machine.Status.NodeRef.IsDefined():
		return 50
	default:
		return 20
	}
}

func byAge(ms *clusterv1.MachineSet, a, b *clusterv1.Machine) int {
	switch ms.Spec.Deletion.Order {
	case clusterv1.OldestMachineSetDeletionOrder:
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	case clusterv1.NewestMachineSetDeletionOrder:
		return b.CreationTimestamp.Compare(a.CreationTimestamp.Time)
	default:
		return 0
	}
}

func (r *sets) create(ctx context.Context, ms *clusterv1.MachineSet) error {
	labels := maps.Clone(ms.Spec.Template.Labels)
	labels[clusterv1.MachineSetNameLabel] = ms.Name
	machine := &clusterv1.Machine{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ms.Namespace, Name: ms.Name + "-" + rand.String(5), Labels: labels, Annotations: maps.Clone(ms.Spec.Template.Annotations),
			Finalizers:      []string{clusterv1.MachineFinalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(ms, clusterv1.GroupVersion.WithKind("MachineSet"))},
		},
		Spec: *ms.Spec.Template.Spec.DeepCopy(),
	}
	machine.Spec.InfrastructureRef.Kind, machine.Spec.InfrastructureRef.Name = InfrastructureMachineKind, machine.Name
	if err := r.client.Create(ctx, machine); err != nil {
		return fmt.Errorf("creating a Machine of %s: %w", ms.Name, err)
	}
	return r.seen(ctx, machine, func(_ *clusterv1.Machine, found bool) bool { return found })
}

func (r *sets) delete(ctx context.Context, machine *clusterv1.Machine) error {
	if !machine.DeletionTimestamp.IsZero() {
		return nil
	}
	if err := client.IgnoreNotFound(r.client.Delete(ctx, machine)); err != nil {
		return fmt.Errorf("deleting Machine %s: %w", machine.Name, err)
	}
	return r.seen(ctx, machine, func(cached *clusterv1.Machine, found bool) bool {
		return !found || !cached.DeletionTimestamp.IsZero() || cached.UID != machine.UID
	})
}

// seen returns once the cache shows the controller's own write, so that the next reconcile does not
// repeat it. There is no such guard for the writes of others, as in Cluster API.
func (r *sets) seen(ctx context.Context, machine *clusterv1.Machine, shows func(cached *clusterv1.Machine, found bool) bool) error {
	err := wait.PollUntilContextTimeout(ctx, 2*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		cached := &clusterv1.Machine{}
		err := r.client.Get(ctx, client.ObjectKeyFromObject(machine), cached)
		if client.IgnoreNotFound(err) != nil {
			return false, err
		}
		return shows(cached, err == nil), nil
	})
	if err != nil {
		return fmt.Errorf("waiting to see Machine %s: %w", machine.Name, err)
	}
	return nil
}

func (r *sets) summarize(ms *clusterv1.MachineSet, owned []*clusterv1.Machine, blocked string) {
	count := func(is func(*clusterv1.Machine) bool) *int32 {
		return new(int32(lo.CountBy(owned, is)))
	}
	holds := func(condition string) func(*clusterv1.Machine) bool {
		return func(machine *clusterv1.Machine) bool {
			return meta.IsStatusConditionTrue(machine.Status.Conditions, condition)
		}
	}
	status := &ms.Status
	status.ObservedGeneration = ms.Generation
	status.Replicas = new(int32(len(owned)))
	status.ReadyReplicas = count(holds(clusterv1.MachineReadyCondition))
	status.AvailableReplicas = count(holds(clusterv1.MachineAvailableCondition))
	status.UpToDateReplicas = count(holds(clusterv1.MachineUpToDateCondition))
	setPaused(&status.Conditions, false, ms.Generation)
	want := int(spec(ms))
	message := ""
	if blocked != "" {
		message = fmt.Sprintf("Scaling up from %d to %d replicas is blocked because:\n* %s", len(owned), want, blocked)
	}
	setCondition(&status.Conditions, clusterv1.MachineSetScalingUpCondition, len(owned) < want,
		clusterv1.MachineSetScalingUpReason, clusterv1.MachineSetNotScalingUpReason, message, ms.Generation)
	setCondition(&status.Conditions, clusterv1.MachineSetScalingDownCondition, len(owned) > want,
		clusterv1.MachineSetScalingDownReason, clusterv1.MachineSetNotScalingDownReason, "", ms.Generation)
}

func (r *sets) status(ctx context.Context, ms *clusterv1.MachineSet, change func()) error {
	before := ms.DeepCopy()
	change()
	if apiequality.Semantic.DeepEqual(before.Status, ms.Status) {
		return nil
	}
	return client.IgnoreNotFound(r.client.Status().Patch(ctx, ms, client.MergeFrom(before)))
}
