package adoption

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	conditions "github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeutils "sigs.k8s.io/karpenter/pkg/utils/node"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	provider "github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/driftcheck"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

const (
	nodesName = "node.adoption"
	// nodesConcurrency is low because all reconciles share one listing of the machines.
	nodesConcurrency = 5
	// longLook is the interval for a Node that currently is not to be adopted: the reason may be in
	// the hub and may change there.
	longLook = 5 * time.Minute
	// defaultRate is the default number of Nodes adopted per NodeClass and minute.
	defaultRate = 60
)

// Catalogue holds the node groups, and which of them NodeClasses select.
type Catalogue interface {
	Snapshot() *catalogue.Snapshot
}

// NodesConfig configures [Nodes]. All fields are REQUIRED.
type NodesConfig struct {
	// Kube reads from a cache with an index on the NodeClaims' status.providerID.
	Kube client.Client
	// Provider describes node groups.
	Provider Provider
	// Unclaimed finds the Machines without a claim.
	Unclaimed *unclaimed.Finder
	// Catalogue holds the node groups, and which of them NodeClasses select.
	Catalogue Catalogue
	// Agent is asked whether a machine could be adopted.
	Agent *agentclient.Client
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Recorder records events.
	Recorder events.Recorder
	// Settled is [Controller.Settled]: existing NodeClaims adopt first. A Node adopted before them
	// might use up the room above the min size, and the machine of a NodeClaim could then be
	// adopted only by raising replicas.
	Settled func() bool
	// Clock provides the time.
	Clock clock.PassiveClock
}

// Nodes creates NodeClaims for Nodes without one, as NodeClasses request: see
// [v1alpha1.AdoptionPolicy].
type Nodes struct {
	NodesConfig

	mu      sync.Mutex
	rates   map[types.UID]*rate.Limiter // by NodeClass
	waiting map[types.UID]time.Time     // when each Node that waits for its turn was last looked at
}

// NewNodes returns the controller.
func NewNodes(c NodesConfig) *Nodes {
	return &Nodes{NodesConfig: c, rates: map[types.UID]*rate.Limiter{}, waiting: map[types.UID]time.Time{}}
}

// Reconcile checks one Node.
func (c *Nodes) Reconcile(ctx context.Context, node *corev1.Node) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, nodesName)
	if !mayBeAdopted(node) {
		return reconcile.Result{}, nil
	}
	if notReady(node) != "" {
		return reconcile.Result{RequeueAfter: look}, nil // it may belong to a claim that is about to be bound
	}
	requested := node.Annotations[v1alpha1.AdoptAnnotation] == yes
	classes, err := c.classes(ctx, requested)
	if err != nil || len(classes) == 0 {
		return reconcile.Result{}, err
	}
	nodeClaims := &karpv1.NodeClaimList{}
	if err := c.Kube.List(ctx, nodeClaims, nodeclaimutils.ForProviderID(node.Spec.ProviderID), client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("looking for the NodeClaim: %w", err)
	}
	if len(nodeClaims.Items) > 0 {
		return reconcile.Result{}, nil
	}
	if !c.Settled() {
		return reconcile.Result{RequeueAfter: soon}, nil
	}
	machine, err := c.Unclaimed.With(ctx, node.Spec.ProviderID)
	if err != nil {
		log.FromContext(ctx).V(1).Info("not known whether the Node's machine is to be adopted", "reason", err.Error())
		return reconcile.Result{RequeueAfter: look}, nil
	}
	if machine == nil || machine.GetDeletedAt() != nil || machine.GetNodeGroupId() == "" {
		// The machine of a new Node may not be listed yet.
		return reconcile.Result{RequeueAfter: min(max(look, c.Clock.Since(node.CreationTimestamp.Time)/4), longLook)}, nil
	}
	waits, err := c.waitsFor(ctx, machine)
	if err != nil || waits {
		return reconcile.Result{RequeueAfter: look}, err
	}
	return c.adopt(ctx, node, machine, classes, requested)
}

// waitsFor reports whether a NodeClaim that core has not launched yet takes precedence. That is one
// created for this machine, or one of another provider that is to adopt a machine of the same node
// group. Adopting this machine might leave the latter no room above the min size. Core launches or
// ends such a NodeClaim within minutes.
func (c *Nodes) waitsFor(ctx context.Context, machine *agentv1alpha1.Machine) (bool, error) {
	all := &karpv1.NodeClaimList{}
	if err := c.Kube.List(ctx, all, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("listing the NodeClaims: %w", err)
	}
	for i := range all.Items {
		name, ours := chosenFor(&all.Items[i], c.Cluster.GetNamespace())
		switch {
		case name == "":
		case ours:
			if name == machine.GetName() {
				return true, nil
			}
		default:
			chosen, err := c.Unclaimed.Named(ctx, name)
			if err != nil {
				log.FromContext(ctx).V(1).Info("not known whether a NodeClaim comes first", "reason", err.Error())
				return true, nil
			}
			if chosen.GetNodeGroupId() == machine.GetNodeGroupId() {
				return true, nil
			}
		}
	}
	return false, nil
}

// chosenFor returns the name of the machine in the namespace that a NodeClaim will adopt when core
// launches it, or "". ours reports whether the NodeClaim was created for that machine.
func chosenFor(nodeClaim *karpv1.NodeClaim, namespace string) (machine string, ours bool) {
	observed := nodeClaim.StatusConditions(conditions.WithObservedOnly()) // otherwise it modifies the NodeClaim, which may be the cache's
	if !nodeClaim.DeletionTimestamp.IsZero() || observed.Get(karpv1.ConditionTypeLaunched).IsTrue() {
		return "", false
	}
	return machineOf(nodeClaim, namespace)
}

// machineOf returns the name of the machine in the namespace that was chosen for a NodeClaim before
// its launch, or "". ours reports whether the NodeClaim was created for that machine.
func machineOf(nodeClaim *karpv1.NodeClaim, namespace string) (machine string, ours bool) {
	if machine, ours := nodeClaim.Annotations[v1alpha1.AdoptMachineAnnotation]; ours {
		return machine, true
	}
	in, machine, _ := strings.Cut(nodeClaim.Annotations[v1alpha1.PeerMachineAnnotation], "/")
	return lo.Ternary(in == namespace, machine, ""), false
}

// mayBeAdopted reports whether a Node is a candidate for adoption.
func mayBeAdopted(object client.Object) bool {
	node, ok := object.(*corev1.Node)
	return ok && node.Spec.ProviderID != "" && node.DeletionTimestamp.IsZero() && node.Labels[karpv1.NodePoolLabelKey] == ""
}

// notReady returns why a Node is not adopted yet, or "" if nothing about the Node prevents it.
func notReady(node *corev1.Node) string {
	switch {
	case nodeutils.GetCondition(node, corev1.NodeReady).Status != corev1.ConditionTrue:
		return "is not Ready"
	case registration.IsUnregistered(node):
		return "has the taint " + karpv1.UnregisteredNoExecuteTaint.ToString()
	}
	return ""
}

// classes returns the NodeClasses whose policy is to adopt such a Node.
func (c *Nodes) classes(ctx context.Context, requested bool) ([]v1alpha1.ClusterAPINodeClass, error) {
	list := &v1alpha1.ClusterAPINodeClassList{}
	if err := c.Kube.List(ctx, list); err != nil {
		return nil, fmt.Errorf("listing the NodeClasses: %w", err)
	}
	c.forgetRates(list.Items)
	return lo.Filter(list.Items, func(class v1alpha1.ClusterAPINodeClass, _ int) bool { return wants(&class, requested) }), nil
}

func wants(class *v1alpha1.ClusterAPINodeClass, requested bool) bool {
	mode := class.Spec.Adoption.Machines
	return class.DeletionTimestamp.IsZero() && (mode == v1alpha1.AdoptAll || mode == v1alpha1.AdoptOnRequest && requested)
}

func (c *Nodes) adopt(
	ctx context.Context, node *corev1.Node, machine *agentv1alpha1.Machine, classes []v1alpha1.ClusterAPINodeClass, requested bool,
) (reconcile.Result, error) {
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		return reconcile.Result{RequeueAfter: soon}, nil // the agent has not been reached yet
	}
	pools := &karpv1.NodePoolList{}
	if err := c.Kube.List(ctx, pools); err != nil {
		return reconcile.Result{}, fmt.Errorf("listing the NodePools: %w", err)
	}
	class, nodeClaim, err := propose(snapshot, c.Provider, pools.Items, node, machine, classes)
	if err != nil {
		c.report(node, machine, err)
		return reconcile.Result{RequeueAfter: look}, nil
	}
	if class == nil {
		return reconcile.Result{RequeueAfter: longLook}, nil // no NodeClass selects its node group
	}
	now := c.Clock.Now()
	limiter := c.rate(class)
	turn := limiter.ReserveN(now, 1)
	left := turn.DelayFrom(now)
	if left > 0 {
		turn.CancelAt(now)
	}
	if delay := c.turnIn(node, now, left, limiter.Limit()); delay > 0 {
		return reconcile.Result{RequeueAfter: delay}, nil
	}
	if err := allowed(ctx, c.Agent, c.Cluster, machine, true); err != nil {
		turn.CancelAt(now) // leave the turn to another Node
		switch {
		case !provider.IsAdoptionRefused(err):
			log.FromContext(ctx).V(1).Info("not known whether the machine may be adopted", "reason", err.Error())
		case requested:
			c.report(node, machine, fmt.Errorf("%s", status.Convert(err).Message()))
		}
		return reconcile.Result{RequeueAfter: look}, nil // with All, a Node of the min size needs no event
	}
	if err := c.make(ctx, node, nodeClaim, class.Spec.Adoption); err != nil {
		turn.CancelAt(now)
		switch {
		case apierrors.IsAlreadyExists(err):
			return reconcile.Result{RequeueAfter: look}, nil
		case isRefused(err):
			c.report(node, machine, err)
			return reconcile.Result{RequeueAfter: look}, nil
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	log.FromContext(ctx).Info("created a NodeClaim to adopt a machine", "machine", machine.GetName(), "node-group", machine.GetNodeGroupId(),
		"node-pool", nodeClaim.Labels[karpv1.NodePoolLabelKey])
	c.Recorder.Publish(events.Event{
		InvolvedObject: node,
		Type:           corev1.EventTypeNormal,
		Reason:         "MachineAdopted",
		Message:        fmt.Sprintf("%s It belongs to NodePool %s.", adopted(machine, class.Spec.Adoption), nodeClaim.Labels[karpv1.NodePoolLabelKey]),
		DedupeValues:   []string{string(node.UID)},
	})
	return reconcile.Result{RequeueAfter: look}, nil
}

// make prepares the Node and creates its NodeClaim. If the API server would refuse the NodeClaim,
// the Node is not changed.
func (c *Nodes) make(ctx context.Context, node *corev1.Node, nodeClaim *karpv1.NodeClaim, policy v1alpha1.AdoptionPolicy) error {
	if err := wouldBeCreated(ctx, c.Kube, nodeClaim); err != nil {
		return err
	}
	stored := node.DeepCopy()
	// Otherwise registration would restore taints of the NodePool that the Node has lost since it
	// started.
	node.Labels = lo.Assign(node.Labels, map[string]string{karpv1.NodeDoNotSyncTaintsLabelKey: yes})
	markAdopted(node, policy) // even if adopted before: an earlier permission to disrupt applied to that adoption
	if err := c.Kube.Patch(ctx, node, client.MergeFrom(stored)); err != nil {
		return fmt.Errorf("preparing the Node: %w", err)
	}
	if err := c.Kube.Create(ctx, nodeClaim); err != nil {
		return fmt.Errorf("creating its NodeClaim: %w", err)
	}
	return nil
}

// wouldBeCreated returns nil if the API server would create the NodeClaim, or the reason why not.
func wouldBeCreated(ctx context.Context, kube client.Writer, nodeClaim *karpv1.NodeClaim) error {
	if err := kube.Create(ctx, nodeClaim.DeepCopy(), client.DryRunAll); err != nil {
		return fmt.Errorf("its NodeClaim cannot be created: %w", err)
	}
	return nil
}

// isRefused reports whether the API server refuses the object itself, by schema or admission, so
// that a retry is pointless.
func isRefused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsBadRequest(err)
}

// lacksRight reports whether the user may not create such objects, rather than this one.
func lacksRight(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "cannot create resource")
}

// propose returns the first of the NodeClasses that selects the machine's node group, and the
// NodeClaim that would adopt the machine. Both are nil if no class selects it. The error is for the
// user: no NodePool fits, or the node group cannot be described.
func propose(
	snapshot *catalogue.Snapshot, describer Provider, pools []karpv1.NodePool, node *corev1.Node, machine *agentv1alpha1.Machine,
	classes []v1alpha1.ClusterAPINodeClass,
) (*v1alpha1.ClusterAPINodeClass, *karpv1.NodeClaim, error) {
	source, known := snapshot.Source(machine.GetNodeGroupId())
	if !known {
		return nil, nil, nil
	}
	for i := range classes {
		class := &classes[i]
		if selects, ok := snapshot.Class(class.Name); !ok || !selects.Selects(source) {
			continue
		}
		described := describer.Describe(class.Name, &agentv1alpha1.Claim{NodeGroupId: machine.GetNodeGroupId(), Machine: machine})
		if described == nil {
			return nil, nil, fmt.Errorf("node group %s cannot be described to Karpenter; see the status of ClusterAPINodeClass %s",
				machine.GetNodeGroupId(), class.Name)
		}
		labels := facts(described.Labels, node)
		pool, err := pick(pools, class.Name, node, lo.Assign(node.Labels, labels))
		if err != nil {
			return nil, nil, err
		}
		return class, nodeClaimFor(pool, machine.GetName(), node, labels, class.Spec.Adoption), nil
	}
	return nil, nil, nil
}

// allowed asks the agent whether the machine could be adopted now. With aboveMinSize, the agent
// refuses an adoption that would raise replicas.
func allowed(
	ctx context.Context, agent *agentclient.Client, cluster *agentv1alpha1.ClusterRef, machine *agentv1alpha1.Machine, aboveMinSize bool,
) error {
	_, err := agent.Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
		Cluster: cluster, ClaimId: "would-" + machine.GetUid(), Holder: v1alpha1.Holder, Candidates: []string{machine.GetNodeGroupId()},
		AdoptMachine: machine.GetName(), AdoptAboveMinSize: aboveMinSize, ValidateOnly: true,
	})
	return err
}

// rate returns the rate limiter of a NodeClass's adoptions.
func (c *Nodes) rate(class *v1alpha1.ClusterAPINodeClass) *rate.Limiter {
	perMinute := lo.FromPtrOr(class.Spec.Adoption.NodesPerMinute, defaultRate)
	limit := rate.Limit(float64(perMinute) / time.Minute.Seconds())
	c.mu.Lock()
	defer c.mu.Unlock()
	limiter := c.rates[class.UID]
	if limiter == nil || limiter.Limit() != limit {
		limiter = rate.NewLimiter(limit, 1)
		c.rates[class.UID] = limiter
	}
	return limiter
}

// turnIn returns when to look again at a Node whose turn comes after left; 0 if it is its turn. If
// many wait, their looks are spread: on average two Nodes come back for each turn, instead of all
// for the next one.
func (c *Nodes) turnIn(node *corev1.Node, now time.Time, left time.Duration, limit rate.Limit) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if left == 0 {
		delete(c.waiting, node.UID)
		return 0
	}
	c.waiting[node.UID] = now
	// Deleted Nodes, and those that no longer wait for a turn, are not looked at here again.
	maps.DeleteFunc(c.waiting, func(_ types.UID, seen time.Time) bool { return now.Sub(seen) > 2*longLook })
	others := len(c.waiting) - 1
	if others == 0 {
		return left
	}
	spread := min(float64(others)/float64(limit)/2, longLook.Seconds())
	return wait.Jitter(left, spread/left.Seconds())
}

// forgetRates removes the rate limiters of NodeClasses that are not among those that exist.
func (c *Nodes) forgetRates(existing []v1alpha1.ClusterAPINodeClass) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.rates, func(uid types.UID, _ *rate.Limiter) bool {
		return !slices.ContainsFunc(existing, func(class v1alpha1.ClusterAPINodeClass) bool { return class.UID == uid })
	})
}

// report publishes on a Node why it is not adopted although its NodeClass requests that.
func (c *Nodes) report(node *corev1.Node, machine *agentv1alpha1.Machine, why error) {
	message := strings.ReplaceAll(why.Error(), "\n", "; ")
	c.Recorder.Publish(events.Event{
		InvolvedObject: node,
		Type:           corev1.EventTypeWarning,
		Reason:         "MachineNotAdopted",
		Message:        lo.Substring(fmt.Sprintf("Machine %s is not adopted: %s", machine.GetName(), message), 0, 1024),
		DedupeValues:   []string{string(node.UID), message},
		DedupeTimeout:  10 * time.Minute,
	})
}

// Register adds the controller to the manager. A change of a NodeClass or a NodePool enqueues all
// candidate Nodes.
func (c *Nodes) Register(_ context.Context, m manager.Manager) error {
	every := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		nodes := &corev1.NodeList{}
		if err := c.Kube.List(ctx, nodes, client.UnsafeDisableDeepCopy); err != nil {
			log.FromContext(ctx).Error(err, "listing the Nodes to adopt")
			return nil
		}
		return lo.FilterMap(nodes.Items, func(node corev1.Node, _ int) (reconcile.Request, bool) {
			return reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&node)}, mayBeAdopted(&node)
		})
	})
	changed := builder.WithPredicates(predicate.GenerationChangedPredicate{})
	// Which node groups a NodeClass selects changes without its spec, and is known later than its
	// spec.
	concerned := builder.WithPredicates(predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return driftcheck.Concerns(e.ObjectOld, e.ObjectNew)
	}})
	return controllerruntime.NewControllerManagedBy(m).
		Named(nodesName).
		For(&corev1.Node{}, builder.WithPredicates(predicate.NewPredicateFuncs(mayBeAdopted))).
		Watches(&v1alpha1.ClusterAPINodeClass{}, every, concerned).
		Watches(&karpv1.NodePool{}, every, changed).
		WithOptions(controller.Options{MaxConcurrentReconciles: nodesConcurrency}).
		Complete(reconcile.AsReconciler(m.GetClient(), c))
}
