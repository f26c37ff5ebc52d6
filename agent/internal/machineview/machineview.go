// Package machineview maintains the Machines and claims of every Cluster as callers see them.
package machineview

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
	"unique"

	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/initialsync"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Config configures a [View].
type Config struct {
	// Machines receives the Machines, by name. REQUIRED.
	Machines *watchcache.Cache[*agentv1alpha1.Machine]
	// Claims receives the claims, by ID. REQUIRED.
	Claims *watchcache.Cache[*agentv1alpha1.Claim]
	// Scope determines which Clusters are served.
	Scope hub.Scope
}

// View fills the caches. Use [New].
type View struct {
	Config

	client client.Client
	live   client.Reader
	// clusters maps types.NamespacedName to *agentv1alpha1.ClusterRef.
	clusters sync.Map
}

// New returns a View. It fills its caches once it has been set up with a manager.
func New(c Config) *View { return &View{Config: c} }

// SetupWithManager adds the View to the manager. The indexes of package hub must have been
// added.
func (i *View) SetupWithManager(mgr manager.Manager) error {
	i.client, i.live = mgr.GetClient(), mgr.GetAPIReader()
	shownMachines := &machines{i, initialsync.New(i.Machines.SetReady), places{of: map[types.NamespacedName]types.NamespacedName{}}}
	shownClaims := &claims{i, initialsync.New(i.Claims.SetReady)}
	options := controller.Options{
		NeedLeaderElection: new(false), MaxConcurrentReconciles: 8, SkipNameValidation: new(true),
		// The first view is complete only once everything has been read, so failed reads are
		// retried soon.
		RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](10*time.Millisecond, 10*time.Second),
	}

	ofMachines, ofClaims := options, options
	ofMachines.NewQueue = fairqueue.New(fairqueue.OwnerOfMachine(mgr.GetCache()))
	ofClaims.NewQueue = fairqueue.New(fairqueue.OwnerOfClaim)
	err := builder.ControllerManagedBy(mgr).Named("inventory-machines").WithOptions(ofMachines).
		For(&clusterv1.Machine{}).
		Watches(&clusterv1.MachineDeployment{}, handler.EnqueueRequestsFromMapFunc(i.machinesOfDeployment), builder.WithPredicates(membershipChanges())).
		Complete(shownMachines)
	if err != nil {
		return fmt.Errorf("setting up the machines' controller: %w", err)
	}
	err = builder.ControllerManagedBy(mgr).Named("inventory-claims").WithOptions(ofClaims).
		For(&v1alpha1.MachineClaim{}).
		Watches(&clusterv1.Machine{}, handler.EnqueueRequestsFromMapFunc(i.claimsOfMachine)).
		Complete(shownClaims)
	if err != nil {
		return fmt.Errorf("setting up the claims' controller: %w", err)
	}
	err = mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			return nil // only because ctx ended
		}
		return i.expect(ctx, shownMachines.initialSync, shownClaims.initialSync)
	}))
	if err != nil {
		return fmt.Errorf("adding the view of machines: %w", err)
	}
	return nil
}

// expect lists the objects that make up the first complete views.
func (i *View) expect(ctx context.Context, machines, claims *initialsync.Tracker) error {
	var machineList clusterv1.MachineList
	var claimList v1alpha1.MachineClaimList
	if err := i.client.List(ctx, &machineList, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("listing Machines: %w", err)
	}
	if err := i.client.List(ctx, &claimList, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("listing MachineClaims: %w", err)
	}
	keys := make([]types.NamespacedName, 0, len(machineList.Items))
	for n := range machineList.Items {
		keys = append(keys, client.ObjectKeyFromObject(&machineList.Items[n]))
	}
	machines.Expect(keys)
	keys = make([]types.NamespacedName, 0, len(claimList.Items))
	for n := range claimList.Items {
		keys = append(keys, client.ObjectKeyFromObject(&claimList.Items[n]))
	}
	claims.Expect(keys)
	return nil
}

// membershipChanges passes updates that may change which Machines belong to a node group.
func membershipChanges() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		_, was := e.ObjectOld.GetLabels()[v1alpha1.MemberLabel]
		_, is := e.ObjectNew.GetLabels()[v1alpha1.MemberLabel]
		return was != is
	}}
}

func (i *View) machinesOfDeployment(ctx context.Context, md client.Object) []reconcile.Request {
	var list clusterv1.MachineList
	err := i.client.List(ctx, &list, client.InNamespace(md.GetNamespace()), client.MatchingFields{hub.ByDeployment: md.GetName()},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		log.FromContext(ctx).Error(err, "looking up Machines", "machineDeployment", client.ObjectKeyFromObject(md))
		return nil
	}
	requests := make([]reconcile.Request, 0, len(list.Items))
	for n := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[n])})
	}
	return requests
}

// claimsOfMachine returns the claims that show a Machine: the claim in the Machine's label, and
// claims that name the Machine and may be about to get the label. For updates it is also called
// with the old object, so that a removed label is noticed.
func (i *View) claimsOfMachine(ctx context.Context, object client.Object) []reconcile.Request {
	machine, ok := object.(*clusterv1.Machine)
	if !ok {
		return nil
	}
	keys := map[types.NamespacedName]struct{}{}
	if id := protocol.ClaimOf(machine); id != "" {
		keys[types.NamespacedName{Namespace: machine.Namespace, Name: v1alpha1.ObjectName(machine.Spec.ClusterName, id)}] = struct{}{}
	}
	var list v1alpha1.MachineClaimList
	err := i.client.List(ctx, &list, client.InNamespace(machine.Namespace), client.MatchingFields{hub.JoiningByMachine: machine.Name},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		log.FromContext(ctx).Error(err, "looking up claims", "machine", client.ObjectKeyFromObject(machine))
	}
	for n := range list.Items {
		keys[client.ObjectKeyFromObject(&list.Items[n])] = struct{}{}
	}
	requests := make([]reconcile.Request, 0, len(keys))
	for key := range keys {
		requests = append(requests, reconcile.Request{NamespacedName: key})
	}
	return requests
}

// places remembers in which Cluster an object was shown, until the object is gone.
type places struct {
	mu sync.Mutex
	of map[types.NamespacedName]types.NamespacedName
}

func (p *places) set(key, cluster types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of[key] = cluster
}

func (p *places) take(key types.NamespacedName) (types.NamespacedName, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	cluster, ok := p.of[key]
	delete(p.of, key)
	return cluster, ok
}

type machines struct {
	*View

	initialSync *initialsync.Tracker
	shown       places
}

// Reconcile updates one Machine.
func (m *machines) Reconcile(ctx context.Context, request reconcile.Request) (_ reconcile.Result, err error) {
	defer func() { m.initialSync.SeenUnless(err, request.NamespacedName) }()
	machine := &clusterv1.Machine{}
	err = m.client.Get(ctx, request.NamespacedName, machine)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading the Machine: %w", err)
	}
	cluster := types.NamespacedName{Namespace: machine.Namespace, Name: machine.Spec.ClusterName}
	visible := err == nil && m.Scope.Contains(cluster)
	if visible {
		if visible, err = m.ofNodeGroup(ctx, machine); err != nil {
			return reconcile.Result{}, err
		}
	}
	if !visible {
		if cluster, shown := m.shown.take(request.NamespacedName); shown {
			m.Machines.Remove(cluster, request.Name)
		}
		return reconcile.Result{}, nil
	}
	m.shown.set(request.NamespacedName, cluster)
	message := protoconv.Machine(machine)
	m.share(cluster, message)
	m.Machines.Set(cluster, machine.Name, message)
	return reconcile.Result{}, nil
}

// ofNodeGroup reports whether a Machine belongs to a MachineDeployment that has opted in.
func (i *View) ofNodeGroup(ctx context.Context, machine *clusterv1.Machine) (bool, error) {
	md := &clusterv1.MachineDeployment{}
	err := i.client.Get(ctx, types.NamespacedName{
		Namespace: machine.Namespace, Name: machine.Labels[clusterv1.MachineDeploymentNameLabel],
	}, md)
	if apierrors.IsNotFound(err) {
		return protocol.ClaimOf(machine) != "", nil // its MachineDeployment was deleted first
	}
	if err != nil {
		return false, fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	return nodegroup.IsMember(md), nil
}

type claims struct {
	*View

	initialSync *initialsync.Tracker
}

// message converts a claim from the caches. These lag independently of each other: a Machine that
// the claim names may be missing still, and a Machine that was already shown with the claim's label
// may appear without the label again.
func (c *claims) message(ctx context.Context, cluster types.NamespacedName, claim *v1alpha1.MachineClaim) (*agentv1alpha1.Claim, error) {
	machine, err := c.machine(ctx, c.client, claim)
	if err != nil {
		return nil, err
	}
	if claim.CurrentPhase() != v1alpha1.PhaseBound || labelled(machine, claim) {
		return protoconv.Claim(claim, machine), nil
	}
	if shown := c.shownBound(cluster, claim); shown != nil {
		message := protoconv.Claim(claim, nil)
		message.Machine = shown
		return message, nil
	}
	if machine == nil || machine.UID != claim.Status.Machine.UID {
		if machine, err = c.machine(ctx, c.live, claim); err != nil {
			return nil, err
		}
	}
	return protoconv.Claim(claim, machine), nil
}

// shownBound returns the claim's Machine as it is already shown with the claim, or nil if it is
// not.
func (c *claims) shownBound(cluster types.NamespacedName, claim *v1alpha1.MachineClaim) *agentv1alpha1.Machine {
	shown, found := c.Claims.Peek(cluster, claim.Spec.ClaimID)
	bound := found && shown.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	if !bound || claim.Status.Machine == nil || shown.GetMachine().GetUid() != string(claim.Status.Machine.UID) {
		return nil
	}
	return shown.GetMachine()
}

// Reconcile updates one claim.
func (c *claims) Reconcile(ctx context.Context, request reconcile.Request) (_ reconcile.Result, err error) {
	defer func() { c.initialSync.SeenUnless(err, request.NamespacedName) }()
	claim := &v1alpha1.MachineClaim{}
	err = c.client.Get(ctx, request.NamespacedName, claim)
	if apierrors.IsNotFound(err) {
		// The ID of a claim contains no dots, and the object's name begins with the Cluster's name.
		if dot := strings.LastIndex(request.Name, "."); dot >= 0 {
			c.Claims.Remove(types.NamespacedName{Namespace: request.Namespace, Name: request.Name[:dot]}, request.Name[dot+1:])
		}
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("reading the claim: %w", err)
	}
	cluster := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Spec.ClusterName}
	if !c.Scope.Contains(cluster) || claim.Name != v1alpha1.ObjectName(cluster.Name, claim.Spec.ClaimID) {
		return reconcile.Result{}, nil
	}
	message, err := c.message(ctx, cluster, claim)
	if err != nil {
		return reconcile.Result{}, err
	}
	c.shareClaim(cluster, message)
	c.Claims.Set(cluster, claim.Spec.ClaimID, message)
	return reconcile.Result{}, nil
}

// share replaces parts of a Machine's message by copies shared with other messages.
func (i *View) share(cluster types.NamespacedName, message *agentv1alpha1.Machine) {
	message.Cluster = i.reference(cluster)
	message.NodeGroupId = unique.Make(message.GetNodeGroupId()).Value()
}

// shareClaim does the same for a claim's message. Its Machine is usually shown already. It also
// drops what watches do not show.
func (i *View) shareClaim(cluster types.NamespacedName, message *agentv1alpha1.Claim) {
	message.Cluster = i.reference(cluster)
	message.NodeGroupId = unique.Make(message.GetNodeGroupId()).Value()
	if message.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		message.History = nil // caches do not keep it
	}
	if message.GetMachine() == nil {
		return
	}
	if shown, ok := i.Machines.Peek(cluster, message.GetMachine().GetName()); ok && EqualMachines(shown, message.GetMachine()) {
		message.Machine = shown
	} else {
		i.share(cluster, message.GetMachine())
	}
}

// reference returns the shared reference to a Cluster. References to deleted Clusters are kept, as
// they are few.
func (i *View) reference(cluster types.NamespacedName) *agentv1alpha1.ClusterRef {
	if known, ok := i.clusters.Load(cluster); ok {
		return known.(*agentv1alpha1.ClusterRef) //nolint:forcetypeassert // nothing else is in it
	}
	reference, _ := i.clusters.LoadOrStore(cluster, protoconv.Cluster(cluster))
	return reference.(*agentv1alpha1.ClusterRef) //nolint:forcetypeassert // nothing else is in it
}

// machine returns the Machine that a claim names, or nil.
func (i *View) machine(ctx context.Context, from client.Reader, claim *v1alpha1.MachineClaim) (*clusterv1.Machine, error) {
	if claim.Status.Machine == nil {
		return nil, nil
	}
	machine := &clusterv1.Machine{}
	err := from.Get(ctx, types.NamespacedName{Namespace: claim.Namespace, Name: claim.Status.Machine.Name}, machine)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading Machine %s: %w", claim.Status.Machine.Name, err)
	}
	return machine, nil
}

// labelled reports whether the Machine, which may be nil, is the one that the claim names and
// carries the claim's label.
func labelled(machine *clusterv1.Machine, claim *v1alpha1.MachineClaim) bool {
	return machine != nil && claim.Status.Machine != nil && machine.UID == claim.Status.Machine.UID &&
		machine.Labels[v1alpha1.ClaimLabel] == claim.Spec.ClaimID
}

// Show converts a claim that was read live, with its Machine. If the cache does not show the
// binding yet, the Machine is read live as well.
func (i *View) Show(ctx context.Context, claim *v1alpha1.MachineClaim) (*agentv1alpha1.Claim, error) {
	machine, err := i.machine(ctx, i.client, claim)
	if err != nil {
		return nil, err
	}
	if claim.CurrentPhase() == v1alpha1.PhaseBound && !labelled(machine, claim) {
		if machine, err = i.machine(ctx, i.live, claim); err != nil {
			return nil, err
		}
	}
	return protoconv.Claim(claim, machine), nil
}

// EqualMachines reports whether two Machines are the same to watchers.
func EqualMachines(a, b *agentv1alpha1.Machine) bool { return proto.Equal(a, b) }

// EqualClaims reports whether two claims are the same to watchers.
func EqualClaims(a, b *agentv1alpha1.Claim) bool { return proto.Equal(a, b) }
