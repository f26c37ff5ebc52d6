package capitest

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/samber/lo"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// machines reconciles Machines, and simulates the infrastructure and the kubelet.
type machines struct{ *Model }

func (r *machines) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	machine := &clusterv1.Machine{}
	if err := r.client.Get(ctx, request.NamespacedName, machine); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	paused, err := r.paused(ctx, machine, machine.Spec.ClusterName)
	if err != nil {
		return reconcile.Result{}, err
	}
	before := machine.DeepCopy()
	setPaused(&machine.Status.Conditions, paused, machine.Generation)
	if paused {
		return reconcile.Result{}, r.status(ctx, before, machine)
	}
	machine.Status.ObservedGeneration = machine.Generation
	r.mu.Lock()
	behaviour, providerID := r.behaviour, r.providerID
	at, ok := r.times[machine.UID]
	if !ok {
		at = &times{}
		r.times[machine.UID] = at
	}
	r.mu.Unlock()
	// Only this controller accesses a Machine's times, and it never reconciles a Machine
	// concurrently.
	if !machine.DeletionTimestamp.IsZero() {
		return r.end(ctx, before, machine, at, behaviour(machine.DeepCopy()))
	}
	if err := r.upToDate(ctx, machine); err != nil {
		return reconcile.Result{}, err
	}
	return r.live(ctx, before, machine, at, behaviour(machine.DeepCopy()), providerID)
}

// live provisions the instance and lets its Node join.
func (r *machines) live(ctx context.Context, before, machine *clusterv1.Machine, at *times, b Behaviour, providerID func(*clusterv1.Machine) string,
) (reconcile.Result, error) {
	var again time.Duration
	conditions := &machine.Status.Conditions
	setCondition(conditions, clusterv1.MachineDeletingCondition, false, "", clusterv1.MachineNotDeletingReason, "", machine.Generation)
	machine.Status.Phase = string(clusterv1.MachinePhasePending)
	if machine.Spec.ProviderID == "" {
		machine.Status.Phase = string(clusterv1.MachinePhaseProvisioning)
		due, left := passed(&at.seen, b.Provision)
		again = left
		reason := lo.CoalesceOrEmpty(b.FailureReason, clusterv1.MachineInfrastructureNotReadyReason)
		setCondition(conditions, clusterv1.MachineInfrastructureReadyCondition, false, "", reason, b.FailureMessage, machine.Generation)
		if due && b.FailureReason == "" && !b.HoldProvision {
			written := machine.DeepCopy()
			written.Spec.ProviderID = providerID(machine)
			if err := r.client.Patch(ctx, written, client.MergeFrom(machine)); err != nil {
				return reconcile.Result{}, client.IgnoreNotFound(err)
			}
			machine.Spec.ProviderID = written.Spec.ProviderID
		}
	}
	if machine.Spec.ProviderID != "" {
		machine.Status.Phase = string(clusterv1.MachinePhaseProvisioned)
		machine.Status.Initialization.InfrastructureProvisioned = new(true)
		machine.Status.Initialization.BootstrapDataSecretCreated = new(true)
		machine.Status.FailureDomain = machine.Spec.FailureDomain
		setCondition(conditions, clusterv1.MachineInfrastructureReadyCondition, true,
			clusterv1.MachineInfrastructureReadyReason, "", "", machine.Generation)
		due, left := passed(&at.provisioned, b.Join)
		again = left
		if due && !b.HoldJoin {
			machine.Status.NodeRef = clusterv1.MachineNodeReference{Name: machine.Name}
		}
	}
	joined := machine.Status.NodeRef.IsDefined()
	if joined {
		machine.Status.Phase = string(clusterv1.MachinePhaseRunning)
	}
	awaited := ""
	switch {
	case joined:
	case machine.Spec.ProviderID == "":
		awaited = "Waiting for " + machine.Spec.InfrastructureRef.Kind + " to report spec.providerID"
	default:
		awaited = "Waiting for a Node with spec.providerID " + machine.Spec.ProviderID + " to exist"
	}
	setCondition(conditions, clusterv1.MachineNodeReadyCondition, joined,
		clusterv1.MachineNodeReadyReason, clusterv1.MachineNodeInspectionFailedReason, awaited, machine.Generation)
	setCondition(conditions, clusterv1.MachineReadyCondition, joined,
		clusterv1.MachineReadyReason, clusterv1.MachineNotReadyReason, "", machine.Generation)
	setCondition(conditions, clusterv1.MachineAvailableCondition, joined,
		clusterv1.MachineAvailableReason, clusterv1.NotAvailableReason, "", machine.Generation)
	return reconcile.Result{RequeueAfter: again}, r.status(ctx, before, machine)
}

// end drains, waits for the hooks, terminates the instance and removes the finalizer, in Cluster
// API's order.
func (r *machines) end(ctx context.Context, before, machine *clusterv1.Machine, at *times, b Behaviour) (reconcile.Result, error) {
	machine.Status.Phase = string(clusterv1.MachinePhaseDeleting)
	if !controllerutil.ContainsFinalizer(machine, clusterv1.MachineFinalizer) {
		return reconcile.Result{}, nil // another actor's finalizer holds it
	}
	reason, again := r.waitsFor(machine, at, b)
	setCondition(&machine.Status.Conditions, clusterv1.MachineDeletingCondition, true,
		lo.CoalesceOrEmpty(reason, clusterv1.MachineDeletingDeletionCompletedReason), "", "", machine.Generation)
	if reason != "" {
		return reconcile.Result{RequeueAfter: again}, r.status(ctx, before, machine)
	}
	held := machine.DeepCopy()
	controllerutil.RemoveFinalizer(held, clusterv1.MachineFinalizer)
	if err := r.client.Patch(ctx, held, client.MergeFromWithOptions(machine, client.MergeFromWithOptimisticLock{})); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	r.mu.Lock()
	delete(r.times, machine.UID)
	r.mu.Unlock()
	// Once the last finalizer is gone, there is no object left to write to.
	return reconcile.Result{}, r.status(ctx, before, machine)
}

// waitsFor returns the reason of the Deleting condition, which is empty if there is nothing left to
// wait for, and when to check again.
func (r *machines) waitsFor(machine *clusterv1.Machine, at *times, b Behaviour) (string, time.Duration) {
	hook := func(prefix string) bool {
		return lo.SomeBy(lo.Keys(machine.Annotations), func(key string) bool { return strings.HasPrefix(key, prefix) })
	}
	if machine.Status.NodeRef.IsDefined() {
		if hook(clusterv1.PreDrainDeleteHookAnnotationPrefix) {
			return clusterv1.MachineDeletingWaitingForPreDrainHookReason, 0
		}
		if _, excluded := machine.Annotations[clusterv1.ExcludeNodeDrainingAnnotation]; !excluded {
			if due, left := passed(&at.draining, b.Drain); !due {
				return clusterv1.MachineDeletingDrainingNodeReason, left
			}
		}
	}
	if hook(clusterv1.PreTerminateDeleteHookAnnotationPrefix) {
		return clusterv1.MachineDeletingWaitingForPreTerminateHookReason, 0
	}
	if due, left := passed(&at.terminating, b.Terminate); !due || b.HoldTerminate {
		return clusterv1.MachineDeletingWaitingForInfrastructureDeletionReason, left
	}
	return "", 0
}

// upToDate compares the template of the Machine's MachineSet with that of its MachineDeployment.
func (r *machines) upToDate(ctx context.Context, machine *clusterv1.Machine) error {
	ms, md := &clusterv1.MachineSet{}, &clusterv1.MachineDeployment{}
	for object, name := range map[client.Object]string{
		ms: machine.Labels[clusterv1.MachineSetNameLabel], md: machine.Labels[clusterv1.MachineDeploymentNameLabel],
	} {
		err := r.client.Get(ctx, types.NamespacedName{Namespace: machine.Namespace, Name: name}, object)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("getting an owner of Machine %s: %w", machine.Name, err)
		}
	}
	same := templateHash(&ms.Spec.Template) == templateHash(&md.Spec.Template)
	message := ""
	if !same {
		message = "* " + InfrastructureMachineKind + " is not up-to-date"
	}
	setCondition(&machine.Status.Conditions, clusterv1.MachineUpToDateCondition, same,
		clusterv1.MachineUpToDateReason, clusterv1.MachineNotUpToDateReason, message, machine.Generation)
	return nil
}

func (r *machines) status(ctx context.Context, before, machine *clusterv1.Machine) error {
	if apiequality.Semantic.DeepEqual(before.Status, machine.Status) {
		return nil
	}
	// The patch may only contain the status: metadata may have been written since.
	base := before.DeepCopy()
	after := before.DeepCopy()
	after.Status = machine.Status
	return client.IgnoreNotFound(r.client.Status().Patch(ctx, after, client.MergeFrom(base)))
}

// passed reports whether a duration has passed since a moment, and how much of it is left. The
// first call sets the moment.
func passed(since *time.Time, duration time.Duration) (bool, time.Duration) {
	if since.IsZero() {
		*since = time.Now()
	}
	left := time.Until(since.Add(duration))
	if left <= 0 {
		return true, 0
	}
	return false, left
}

// Condition returns a Machine's condition of the given type, or nil.
func Condition(machine *clusterv1.Machine, kind string) *metav1.Condition {
	return meta.FindStatusCondition(machine.Status.Conditions, kind)
}
