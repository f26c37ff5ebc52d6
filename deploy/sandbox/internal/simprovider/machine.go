package simprovider

import (
	"context"
	"errors"
	"fmt"
	"path"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
)

const (
	// deleteForMove marks an object that `clusterctl move` deletes: its instance lives on in
	// another hub.
	deleteForMove = "clusterctl.cluster.x-k8s.io/delete-for-move"
	// bootstrapPoll is how often the bootstrap Secret is looked up: the provider does not watch
	// Secrets.
	bootstrapPoll = time.Second
	// silencePatience is how long an instance that stops, or is gone, waits until its workload
	// cluster is reachable. A machine that loses its power does not wait either.
	silencePatience = 20 * time.Second
)

// machineReconciler advances simulated instances through their lifecycle.
type machineReconciler struct {
	hub       client.Client
	workloads clusters
	clock     clock.Clock
}

func (r *machineReconciler) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		For(&simv1.SimMachine{}).
		// These two show changes of the owner reference, of the bootstrap data's name, and of a
		// Cluster's pause.
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			machine, ok := o.(*clusterv1.Machine)
			if !ok {
				return nil
			}
			ref := machine.Spec.InfrastructureRef
			if ref.APIGroup != simv1.GroupVersion.Group || ref.Kind != "SimMachine" {
				return nil
			}
			return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: ref.Name}}}
		})).
		// The Cluster's status changes with every Machine and does not matter to a running machine.
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(r.machinesOf),
			builder.WithPredicates(predicate.Or(predicate.GenerationChangedPredicate{}, predicate.AnnotationChangedPredicate{}))).
		WithOptions(controller.Options{MaxConcurrentReconciles: 20}).
		Complete(r)
}

// machinesOf returns the instances of a Cluster.
func (r *machineReconciler) machinesOf(ctx context.Context, cluster client.Object) []reconcile.Request {
	machines := &simv1.SimMachineList{}
	if err := r.hub.List(ctx, machines, client.InNamespace(cluster.GetNamespace()),
		client.MatchingLabels{clusterv1.ClusterNameLabel: cluster.GetName()}); err != nil {
		log.FromContext(ctx).Error(err, "listing the instances of a Cluster")
		return nil
	}
	return lo.Map(machines.Items, func(m simv1.SimMachine, _ int) reconcile.Request {
		return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&m)}
	})
}

// Reconcile takes the instance's next step, if one is due.
func (r *machineReconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	m := &simv1.SimMachine{}
	if err := r.hub.Get(ctx, req.NamespacedName, m); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	stored := m.DeepCopy()
	result, err := r.reconcile(ctx, m)
	if apierrors.IsNotFound(err) && m.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	if conflict := new(conflictError); errors.As(err, conflict) || apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	}
	if controllerutil.ContainsFinalizer(stored, simv1.MachineFinalizer) && !controllerutil.ContainsFinalizer(m, simv1.MachineFinalizer) {
		return result, err // gone: there is no status to write
	}
	if equality.Semantic.DeepEqual(stored.Status, m.Status) {
		return result, err
	}
	base := m.DeepCopy()
	base.Status = stored.Status
	patch := client.MergeFrom(base)
	if withoutStatus(stored) {
		// The cache may be stale.
		patch = client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{})
	}
	patchErr := r.hub.Status().Patch(ctx, m, patch)
	if err == nil && apierrors.IsConflict(patchErr) {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	}
	if client.IgnoreNotFound(patchErr) != nil {
		err = errors.Join(err, fmt.Errorf("writing the status: %w", patchErr))
	}
	return result, err
}

// conflictError means that the object was changed since it was read.
type conflictError struct{ error }

func (r *machineReconciler) reconcile(ctx context.Context, m *simv1.SimMachine) (reconcile.Result, error) {
	now := r.clock.Now()
	machine, cluster, err := r.owners(ctx, m)
	if err != nil {
		return reconcile.Result{}, err
	}
	if _, moved := m.Annotations[deleteForMove]; moved {
		return reconcile.Result{}, nil
	}
	if isPaused(cluster, m) {
		r.notReady(m, simv1.ReasonPaused, "the Cluster or this object is paused")
		return reconcile.Result{}, nil
	}

	if m.DeletionTimestamp == nil {
		if machine == nil || cluster == nil {
			r.notReady(m, simv1.ReasonWaitingForMachine, "waiting for the owner reference to a Machine of a Cluster")
			return reconcile.Result{}, nil
		}
		if !controllerutil.ContainsFinalizer(m, simv1.MachineFinalizer) {
			if err := r.patchObject(ctx, m, func() { controllerutil.AddFinalizer(m, simv1.MachineFinalizer) }); err != nil {
				return reconcile.Result{}, fmt.Errorf("adding the finalizer: %w", err)
			}
		}
	}
	if withoutStatus(m) {
		// Written before any action that depends on it: the write triggers the next reconcile.
		return reconcile.Result{}, r.recognise(ctx, m, machine, cluster, now)
	}
	if m.DeletionTimestamp == nil {
		if m.Status.BootedAt == nil {
			ready, err := r.bootstrapDataReady(ctx, machine)
			if err != nil {
				return reconcile.Result{}, err
			}
			if !ready {
				r.notReady(m, simv1.ReasonWaitingForBootstrapData, "waiting for the bootstrap data Secret")
				return reconcile.Result{RequeueAfter: bootstrapPoll}, nil
			}
		}
	}

	for {
		next, wait := lifecycle(m, now)
		r.report(m)
		if next == actionNone {
			return reconcile.Result{RequeueAfter: wait}, nil
		}
		if done, err := r.act(ctx, m, machine, cluster, next, now); done || err != nil {
			return reconcile.Result{}, err
		}
	}
}

// act takes one step and records it in m. done reports that m no longer exists.
func (r *machineReconciler) act(
	ctx context.Context, m *simv1.SimMachine, machine *clusterv1.Machine, cluster *clusterv1.Cluster, next action, now time.Time,
) (done bool, err error) {
	at := new(metav1.NewMicroTime(now))
	switch next {
	case actionOrder:
		m.Status.BootStartedAt = at

	case actionProvision:
		id := fmt.Sprintf("sim://%s/%s", machine.Spec.ClusterName, machine.Name)
		if err := r.patchObject(ctx, m, func() { m.Spec.ProviderID = id }); err != nil {
			return false, fmt.Errorf("writing the providerID: %w", err)
		}
		exists(m, machine.Name, zone(m, machine), at)
		log.FromContext(ctx).Info("instance exists", "providerID", id)

	case actionJoin:
		workload, err := r.workloads.client(ctx, client.ObjectKeyFromObject(cluster))
		if err != nil {
			return false, err
		}
		version := machine.Spec.Version
		if version == "" {
			if version, err = r.workloads.serverVersion(ctx, client.ObjectKeyFromObject(cluster)); err != nil {
				return false, err
			}
		}
		node := newNode(m, machine.Name, zone(m, machine))
		if err := registerNode(ctx, workload, node, nodeStatus(m, machine.Name, version, now)); err != nil {
			return false, err
		}
		m.Status.JoinedAt = at
		log.FromContext(ctx).Info("node joined", "node", node.Name)

	case actionStop:
		if m.Status.JoinedAt != nil && cluster != nil {
			if err := r.silence(ctx, m, client.ObjectKeyFromObject(cluster), now); err != nil {
				if now.Sub(m.DeletionTimestamp.Time) < silencePatience {
					return false, err
				}
				log.FromContext(ctx).Error(err, "stopping although the spoke does not answer")
			}
		}
		m.Status.StoppedAt = at
		log.FromContext(ctx).Info("instance stops")

	case actionRelease:
		// Cluster API deletes the Node if it has ever seen it.
		unseen := machine == nil || !machine.Status.NodeRef.IsDefined()
		if m.Status.BootedAt != nil && unseen && cluster != nil { // it may have joined without a record of it
			if err := r.removeNode(ctx, m, client.ObjectKeyFromObject(cluster)); err != nil {
				if now.Sub(m.Status.StoppedAt.Time) < silencePatience {
					return false, err
				}
				log.FromContext(ctx).Error(err, "gone although the spoke does not answer")
			}
		}
		if err := r.patchObject(ctx, m, func() { controllerutil.RemoveFinalizer(m, simv1.MachineFinalizer) }); err != nil {
			return false, fmt.Errorf("removing the finalizer: %w", err)
		}
		log.FromContext(ctx).Info("instance is gone")
		return true, nil

	case actionNone:
	}
	return false, nil
}

// exists records that the instance with the name was created in a zone.
func exists(m *simv1.SimMachine, name, zone string, at *metav1.MicroTime) {
	m.Status.BootedAt = at
	m.Status.Initialization.Provisioned = new(true)
	m.Status.FailureDomain = zone
	m.Status.Addresses = []clusterv1.MachineAddress{
		{Type: clusterv1.MachineInternalIP, Address: nodeAddress(name)},
		{Type: clusterv1.MachineHostName, Address: name},
	}
}

// withoutStatus reports whether the instance exists but its object has no record of its creation.
func withoutStatus(m *simv1.SimMachine) bool {
	return m.Spec.ProviderID != "" && m.Status.BootStartedAt == nil
}

// recognise rebuilds the status of an existing instance whose object has lost it: `clusterctl move`
// and backups carry no status. A real provider asks its infrastructure. Here the provider ID shows
// that the instance exists, and the Node whether the kubelet has registered. A request
// to stop the instance is lost; it is repeated when the object is deleted.
func (r *machineReconciler) recognise(
	ctx context.Context, m *simv1.SimMachine, machine *clusterv1.Machine, cluster *clusterv1.Cluster, now time.Time,
) error {
	name := path.Base(m.Spec.ProviderID)
	// An instance being deleted is stopped next, which needs no further wait and is harmless if the
	// kubelet never registered.
	joined := m.DeletionTimestamp != nil
	if !joined {
		workload, err := r.workloads.client(ctx, client.ObjectKeyFromObject(cluster))
		if err != nil {
			return err
		}
		node := &corev1.Node{}
		if err := workload.Get(ctx, client.ObjectKey{Name: name}, node); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("looking for the Node of %s: %w", m.Spec.ProviderID, err)
		}
		joined = node.Spec.ProviderID == m.Spec.ProviderID
	}
	at := new(metav1.NewMicroTime(now))
	m.Status.BootStartedAt = at
	exists(m, name, zone(m, machine), at)
	if joined {
		m.Status.JoinedAt = at
	}
	r.report(m)
	log.FromContext(ctx).Info("instance is known by its providerID", "providerID", m.Spec.ProviderID, "joined", joined)
	return nil
}

func (r *machineReconciler) silence(ctx context.Context, m *simv1.SimMachine, cluster client.ObjectKey, now time.Time) error {
	workload, err := r.workloads.client(ctx, cluster)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	if len(m.Status.Addresses) == 0 {
		return nil
	}
	return silenceNode(ctx, workload, hostName(m), now)
}

// removeNode deletes the Node of an instance that is gone, as a cloud controller manager does.
func (r *machineReconciler) removeNode(ctx context.Context, m *simv1.SimMachine, cluster client.ObjectKey) error {
	workload, err := r.workloads.client(ctx, cluster)
	if err != nil {
		return client.IgnoreNotFound(err)
	}
	node := &corev1.Node{}
	if err := workload.Get(ctx, client.ObjectKey{Name: hostName(m)}, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	if node.Spec.ProviderID != m.Spec.ProviderID {
		return nil
	}
	return client.IgnoreNotFound(workload.Delete(ctx, node, client.Preconditions{UID: &node.UID}))
}

// hostName returns the name of the instance's Node: that of its Machine, which is also known once
// the Machine is gone.
func hostName(m *simv1.SimMachine) string {
	host, _ := lo.Find(m.Status.Addresses, func(a clusterv1.MachineAddress) bool { return a.Type == clusterv1.MachineHostName })
	return host.Address
}

// owners returns the instance's Machine and Cluster. Each is nil if it does not exist, or no
// longer.
func (r *machineReconciler) owners(ctx context.Context, m *simv1.SimMachine) (*clusterv1.Machine, *clusterv1.Cluster, error) {
	var machine *clusterv1.Machine
	owner, found := lo.Find(m.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.Kind == "Machine" && o.Controller != nil && *o.Controller
	})
	if found {
		machine = &clusterv1.Machine{}
		if err := r.hub.Get(ctx, client.ObjectKey{Namespace: m.Namespace, Name: owner.Name}, machine); err != nil {
			if !apierrors.IsNotFound(err) {
				return nil, nil, fmt.Errorf("reading the Machine: %w", err)
			}
			machine = nil
		}
	}
	name := m.Labels[clusterv1.ClusterNameLabel]
	if machine != nil {
		name = machine.Spec.ClusterName
	}
	if name == "" {
		return machine, nil, nil
	}
	cluster := &clusterv1.Cluster{}
	if err := r.hub.Get(ctx, client.ObjectKey{Namespace: m.Namespace, Name: name}, cluster); err != nil {
		if !apierrors.IsNotFound(err) {
			return nil, nil, fmt.Errorf("reading the Cluster: %w", err)
		}
		cluster = nil
	}
	return machine, cluster, nil
}

func (r *machineReconciler) bootstrapDataReady(ctx context.Context, machine *clusterv1.Machine) (bool, error) {
	if machine.Spec.Bootstrap.DataSecretName == nil {
		return false, nil
	}
	key := client.ObjectKey{Namespace: machine.Namespace, Name: *machine.Spec.Bootstrap.DataSecretName}
	if err := r.hub.Get(ctx, key, &corev1.Secret{}); err != nil {
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return false, fmt.Errorf("reading the bootstrap data: %w", err)
	}
	return true, nil
}

// patchObject writes the changes to metadata and spec, and keeps the in-memory status of m. It
// returns a conflict if the object has changed since it was read.
func (r *machineReconciler) patchObject(ctx context.Context, m *simv1.SimMachine, change func()) error {
	base := m.DeepCopy()
	status := m.Status.DeepCopy()
	change()
	err := r.hub.Patch(ctx, m, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
	m.Status = *status
	if apierrors.IsConflict(err) {
		return conflictError{err}
	}
	return err
}

// report sets the Ready condition from the status.
func (r *machineReconciler) report(m *simv1.SimMachine) {
	switch {
	case m.DeletionTimestamp != nil:
		r.notReady(m, simv1.ReasonTerminating, "the instance is being terminated")
	case m.Status.BootedAt != nil:
		r.ready(m, metav1.ConditionTrue, simv1.ReasonRunning, "the instance is running")
	case m.Spec.Failure != nil:
		r.notReady(m, m.Spec.Failure.Reason, m.Spec.Failure.Message)
	default:
		r.notReady(m, simv1.ReasonBooting, "the instance is booting")
	}
}

func (r *machineReconciler) notReady(m *simv1.SimMachine, reason, message string) {
	r.ready(m, metav1.ConditionFalse, reason, message)
}

func (r *machineReconciler) ready(m *simv1.SimMachine, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&m.Status.Conditions, metav1.Condition{
		Type: clusterv1.ReadyCondition, Status: status, Reason: reason, Message: message,
		ObservedGeneration: m.Generation, LastTransitionTime: metav1.NewTime(r.clock.Now()),
	})
}

// zone returns the zone of the instance: that of its Machine, if set, or else that of its spec.
func zone(m *simv1.SimMachine, machine *clusterv1.Machine) string {
	if machine == nil {
		return m.Spec.Zone
	}
	return lo.CoalesceOrEmpty(machine.Spec.FailureDomain, m.Spec.Zone)
}

func isPaused(cluster *clusterv1.Cluster, o client.Object) bool {
	if _, ok := o.GetAnnotations()[clusterv1.PausedAnnotation]; ok {
		return true
	}
	return cluster != nil && ptr.Deref(cluster.Spec.Paused, false)
}
