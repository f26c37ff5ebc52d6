// Package adoption brings existing machines under the agent's control. Its subjects are NodeClaims
// that run on Machines without a claim, such as those that another Cluster API provider left
// behind. Each gets a claim on its own Machine, and the labels and annotations that Create would
// have set. Nothing is drained, replaced or removed in the process.
//
// The package also creates NodeClaims for users' Nodes ([Nodes]), reports what would be adopted
// ([Planner]), and returns machines to the user.
//
// Karpenter does not disrupt an adopted Node before a user allows it: each gets the annotation
// karpenter.sh/do-not-disrupt once, before its claim is made. Until every NodeClaim that existed at
// the start has been checked, core plans and disrupts nothing at all.
package adoption

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/karpenter/pkg/apis"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/claimsource"
	provider "github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

const (
	name = "nodeclaim.adoption"
	// concurrency is how many Machines are adopted at once. The agent batches the claims of one
	// node group.
	concurrency = 50
	// look is the interval for a NodeClaim whose Machine cannot be adopted, and during an outage.
	// soon is the interval while that is not known otherwise.
	look, soon = 30 * time.Second, time.Second
	// yes is the value of boolean labels and annotations that are set.
	yes = "true"
	// settleLook is how often [Controller.Start] checks whether all NodeClaims have been handled.
	settleLook = 100 * time.Millisecond
	// looksPerLog is the number of these checks per log entry: one every half minute.
	looksPerLog = 300
)

// Claims is a mirror of the shim's claims.
type Claims interface {
	claimsource.Claims
	claimsource.Synced
	State() agentclient.State
}

// Provider creates claims on existing Machines.
type Provider interface {
	Adopt(ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) (*agentv1alpha1.Claim, error)
	Describe(nodeClass string, claim *agentv1alpha1.Claim) *karpv1.NodeClaim
}

// Config configures a [Controller]. All fields are REQUIRED.
type Config struct {
	// Kube reads from a cache with indexes on the provider IDs of Nodes and NodeClaims.
	Kube client.Client
	// CloudProvider determines which NodeClaims belong to this provider.
	CloudProvider cloudprovider.CloudProvider
	// Provider creates claims on existing Machines.
	Provider Provider
	// Claims is a mirror of the shim's claims.
	Claims Claims
	// Unclaimed finds the Machines of NodeClaims that never had a claim.
	Unclaimed *unclaimed.Finder
	// Agent returns machines to the user.
	Agent *agentclient.Client
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Recorder records events.
	Recorder events.Recorder
	// Unmark tells core's cluster state that Nodes, by provider ID, are not about to be removed.
	Unmark func(providerIDs ...string)
}

// Controller adopts the Machines of NodeClaims without a claim, and returns Machines to the user.
type Controller struct {
	Config

	settled atomic.Bool
	mu      sync.Mutex
	seen    map[types.UID]bool // NodeClaims handled so far, until all are
}

// New returns the controller.
func New(c Config) *Controller { return &Controller{Config: c, seen: map[types.UID]bool{}} }

// Reconcile checks one NodeClaim. Create and Delete adopt for NodeClaims that are not launched or
// are being deleted.
func (c *Controller) Reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	uid := nodeClaim.UID
	result, err := c.reconcile(ctx, nodeClaim)
	if !isRejected(err) {
		return result, err
	}
	// Other NodeClaims must not wait for one that an admission webhook or the API server refuses to
	// change.
	log.FromContext(ctx).Error(err, "the adoption of a Machine cannot be completed")
	c.Recorder.Publish(incomplete(nodeClaim, err))
	c.sawToIt(uid)
	return reconcile.Result{RequeueAfter: look}, nil
}

// isRejected reports whether the API server refuses a request and would refuse it again.
func isRejected(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)
}

func (c *Controller) reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	if !nodeclaimutils.IsManaged(nodeClaim, c.CloudProvider) {
		return reconcile.Result{}, nil
	}
	if !c.Claims.State().Synced { // the source of all NodeClaims follows
		return reconcile.Result{}, nil
	}
	if nodeClaim.DeletionTimestamp.IsZero() && v1alpha1.ReturnsMachine(nodeClaim) {
		c.sawToIt(nodeClaim.UID)
		return c.returnMachine(ctx, nodeClaim)
	}
	if !nodeClaim.DeletionTimestamp.IsZero() || !nodeClaim.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue() {
		c.sawToIt(nodeClaim.UID)
		return reconcile.Result{}, nil
	}
	if claim, known := c.Claims.Get(string(nodeClaim.UID)); known && isLive(claim) {
		if claim.GetAdoptMachine() != "" {
			return c.complete(ctx, nodeClaim, claim)
		}
		c.sawToIt(nodeClaim.UID)
		node, err := c.node(ctx, nodeClaim)
		if err != nil || node == nil {
			return reconcile.Result{}, err
		}
		return reconcile.Result{}, client.IgnoreNotFound(c.endProtection(ctx, node))
	}
	if id := nodeClaim.Status.ProviderID; id == "" || placeholder.Is(id) {
		c.sawToIt(nodeClaim.UID)
		return reconcile.Result{}, nil
	}
	// Its machine may have been adopted for the other one already.
	if duplicate, err := c.isDuplicate(ctx, nodeClaim); err != nil {
		return reconcile.Result{}, err
	} else if duplicate {
		return reconcile.Result{RequeueAfter: look}, nil
	}
	machine, err := c.Unclaimed.Of(ctx, nodeClaim)
	switch {
	case errors.Is(err, unclaimed.ErrUnknownMachine):
		return c.keep(ctx, nodeClaim)
	case isPassing(ctx, err):
		log.FromContext(ctx).V(1).Info("not known whether the NodeClaim's machine is to be adopted", "reason", err.Error())
		return reconcile.Result{RequeueAfter: c.retryAfter(err)}, nil
	case err != nil: // the NodeClaim still keeps core from planning: its Node may have to be protected
		log.FromContext(ctx).Error(err, "not known whether the NodeClaim's machine is to be adopted")
		c.Recorder.Publish(incomplete(nodeClaim, err))
		return reconcile.Result{RequeueAfter: look}, nil
	case machine == nil, machine.GetDeletedAt() != nil:
		c.sawToIt(nodeClaim.UID)
		return reconcile.Result{}, nil
	}
	return c.adopt(ctx, nodeClaim, machine)
}

func isLive(claim *agentv1alpha1.Claim) bool {
	return claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING || claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
}

func (c *Controller) adopt(ctx context.Context, nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) (reconcile.Result, error) {
	node, err := c.node(ctx, nodeClaim)
	if err != nil {
		return reconcile.Result{}, err
	}
	policy, err := c.policy(ctx, nodeClaim)
	if err != nil {
		return reconcile.Result{}, err
	}
	if node != nil {
		if err := c.protect(ctx, node, policy); err != nil {
			return nodeGone(err)
		}
	}
	if wasAdopted(nodeClaim) {
		if err := c.protect(ctx, nodeClaim, policy); err != nil {
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
	}
	claim, err := c.Provider.Adopt(ctx, nodeClaim, machine)
	switch {
	case err == nil:
	case isPassing(ctx, err):
		log.FromContext(ctx).V(1).Info("not known whether the Machine can be adopted", "machine", machine.GetName(), "reason", err.Error())
		return reconcile.Result{RequeueAfter: c.retryAfter(err)}, nil
	default: // the Node is protected, so that other NodeClaims need not wait for this one
		log.FromContext(ctx).Error(err, "a Machine cannot be adopted", "machine", machine.GetName())
		c.Recorder.Publish(lo.Ternary(provider.IsAdoptionRefused(err), c.Unclaimed.Event(nodeClaim, machine, err), incomplete(nodeClaim, err)))
		c.sawToIt(nodeClaim.UID)
		return reconcile.Result{RequeueAfter: look}, nil
	}
	log.FromContext(ctx).Info("adopted a Machine", "machine", machine.GetName(), "node-group", machine.GetNodeGroupId())
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeNormal,
		Reason:         "MachineAdopted",
		Message:        adopted(machine, policy),
		DedupeValues:   []string{string(nodeClaim.UID)},
	})
	return c.complete(ctx, nodeClaim, claim)
}

// isPassing reports whether an error says nothing about the Machine and the call should be retried.
func isPassing(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || agenterrors.IsUnavailable(err) || agenterrors.IsConflict(err))
}

// retryAfter returns when a call is retried after a passing error. An outage, or a pause of the
// Cluster, may last: thousands of NodeClaims would each be retried once a second.
func (c *Controller) retryAfter(err error) time.Duration {
	switch reason := agenterrors.ReasonOf(err); {
	case !c.Claims.State().Connected, reason == agenterrors.ReasonClusterPaused, reason == agenterrors.ReasonHubUnreachable:
		return look
	}
	return soon
}

// adopted returns a message for the user: what was adopted, and whether Karpenter disrupts it.
func adopted(machine *agentv1alpha1.Machine, policy v1alpha1.AdoptionPolicy) string {
	message := fmt.Sprintf("Adopted Machine %s of node group %s.", machine.GetName(), machine.GetNodeGroupId())
	if policy.Disruption == v1alpha1.DisruptAllowed {
		return message
	}
	return fmt.Sprintf("%s Karpenter does not disrupt its Node while that has the annotation %s=true, unless the NodeClaim expires, or the Node "+
		"is unhealthy and the feature gate NodeRepair is on.", message, karpv1.DoNotDisruptAnnotationKey)
}

// node returns the NodeClaim's Node, or nil if it has none.
func (c *Controller) node(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*corev1.Node, error) {
	nodes, err := nodeclaimutils.AllNodesForNodeClaim(ctx, c.Kube, nodeClaim)
	if err != nil || len(nodes) == 0 {
		return nil, err
	}
	return nodes[0], nil
}

// rightfulOf is [owners.Rightful].
func rightfulOf(nodeClaims []*karpv1.NodeClaim, node *corev1.Node) *karpv1.NodeClaim {
	return owners.Rightful(nodeClaims, node)
}

// duplicate returns an event about a NodeClaim whose machine belongs to another one, with
// instructions to end it without draining the Node.
func (c *Controller) duplicate(nodeClaim, rightful *karpv1.NodeClaim) events.Event {
	own := placeholder.ProviderID(c.Cluster.GetNamespace(), c.Cluster.GetName(), string(nodeClaim.UID))
	return events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "DuplicateNodeClaim",
		Message: fmt.Sprintf("The machine with provider ID %s belongs to NodeClaim %s, which has the same provider ID. If this NodeClaim were "+
			"deleted now, Karpenter would drain the Node of both. To delete only this one, first give it a unique provider ID: kubectl patch "+
			`nodeclaim %s --subresource=status --type=merge --patch '{"status":{"providerID":"%s"}}'`,
			nodeClaim.Status.ProviderID, rightful.Name, nodeClaim.Name, own),
		DedupeValues:  []string{string(nodeClaim.UID), string(rightful.UID)},
		DedupeTimeout: 10 * time.Minute,
	}
}

// incomplete returns an event with the reason why an adopted NodeClaim or its Node lacks what those
// of new machines have.
func incomplete(nodeClaim *karpv1.NodeClaim, why error) events.Event {
	reason := agenterrors.Describe(why)
	return events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         "AdoptionIncomplete",
		Message:        lo.Substring(fmt.Sprintf("The adoption of the machine cannot be completed: %s", reason), 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID), reason},
		DedupeTimeout:  10 * time.Minute,
	}
}

// isDuplicate reports whether the machine belongs to another NodeClaim. If so, it publishes an
// event, and nothing else needs to be done about this NodeClaim.
func (c *Controller) isDuplicate(ctx context.Context, nodeClaim *karpv1.NodeClaim) (bool, error) {
	rightful, err := owners.Of(ctx, c.Kube, nodeClaim)
	if err != nil || rightful.UID == nodeClaim.UID {
		return false, err
	}
	c.Recorder.Publish(c.duplicate(nodeClaim, rightful))
	c.sawToIt(nodeClaim.UID)
	return true, nil
}

// policy returns the adoption policy of the NodeClaim's NodeClass, or the defaults if the class
// does not exist.
func (c *Controller) policy(ctx context.Context, nodeClaim *karpv1.NodeClaim) (v1alpha1.AdoptionPolicy, error) {
	class := &v1alpha1.ClusterAPINodeClass{}
	if err := c.Kube.Get(ctx, client.ObjectKey{Name: nodeClaim.Spec.NodeClassRef.Name}, class); client.IgnoreNotFound(err) != nil {
		return v1alpha1.AdoptionPolicy{}, fmt.Errorf("getting the NodeClass: %w", err)
	}
	return class.Spec.Adoption, nil
}

// protections are the annotations with which [Controller.keep] protects a Node, by the annotations
// that record that it has set them. The one against expiry is its own record: package outage heeds
// it.
var protections = map[string]string{
	v1alpha1.KeptAnnotation:           karpv1.DoNotDisruptAnnotationKey,
	v1alpha1.KeptFromRepairAnnotation: karpv1.DoNotRepairAnnotationKey,
	v1alpha1.KeptFromExpiryAnnotation: v1alpha1.KeptFromExpiryAnnotation,
}

// keep protects the Node of a NodeClaim whose machine the agent does not report, whatever the
// NodeClass's policy, because the machine could not be removed. The machine is adopted once the
// agent reports it.
func (c *Controller) keep(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	node, err := c.node(ctx, nodeClaim)
	if err != nil {
		return reconcile.Result{}, err
	}
	if added := missing(node); len(added) > 0 {
		stored := node.DeepCopy()
		node.Annotations = lo.Assign(node.Annotations, added)
		// A user may just have protected it.
		if err := c.Kube.Patch(ctx, node, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
			return nodeGone(fmt.Errorf("protecting %s from disruption: %w", node.Name, err))
		}
	}
	c.Recorder.Publish(c.Unclaimed.Unknown(nodeClaim))
	c.sawToIt(nodeClaim.UID)
	return reconcile.Result{RequeueAfter: look}, nil
}

// missing returns the protections that the Node does not have, with their marks. node may be nil.
func missing(node *corev1.Node) map[string]string {
	added := map[string]string{}
	for mark, protection := range protections {
		// A Node that is protected already gets no mark: endProtection would end that protection.
		// Core heeds no other value.
		if node != nil && node.Annotations[mark] != yes && node.Annotations[protection] != yes {
			added[mark], added[protection] = yes, yes
		}
	}
	return added
}

// endProtection ends the protection of a Node by [Controller.keep], once its claim is known:
// another Cluster's machines were seen, because of a wrong kubeconfig or certificate, or the hub
// did not have the claim. Protections by users, and those of an adoption, have no such mark, and
// stay.
func (c *Controller) endProtection(ctx context.Context, node *corev1.Node) error {
	if !v1alpha1.IsKept(node) {
		return nil
	}
	stored := node.DeepCopy()
	unkeep(node)
	// The cache may be older than what an adoption has set.
	if err := c.Kube.Patch(ctx, node, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("ending the protection of Node %s: %w", node.Name, err)
	}
	log.FromContext(ctx).Info("ended the protection of a Node whose machine was unknown", "Node", node.Name)
	return nil
}

func unkeep(object client.Object) {
	for mark, protection := range protections {
		if object.GetAnnotations()[mark] == yes {
			object.SetAnnotations(lo.OmitByKeys(object.GetAnnotations(), []string{mark, protection}))
		}
	}
}

// protect marks a Node or NodeClaim as adopted, and protects it from disruption unless the
// NodeClass allows that. It does so once per adoption, so that later changes by users are kept. If
// the object carries the mark of a completed adoption, that adoption's claim no longer exists, and
// protect applies again. It ends a protection by [Controller.keep] with the same write.
func (c *Controller) protect(ctx context.Context, object client.Object, policy v1alpha1.AdoptionPolicy) error {
	_, marked := object.GetLabels()[v1alpha1.AdoptedLabel]
	begun := marked && !wasAdopted(object)
	if begun && !v1alpha1.IsKept(object) {
		return nil
	}
	stored, _ := object.DeepCopyObject().(client.Object)
	if v1alpha1.IsKept(object) {
		unkeep(object)
	}
	if !begun {
		object.SetAnnotations(lo.OmitByKeys(object.GetAnnotations(), []string{v1alpha1.NodeGroupAnnotation}))
		markAdopted(object, policy)
	}
	if err := c.Kube.Patch(ctx, object, client.MergeFrom(stored)); err != nil {
		return fmt.Errorf("protecting %s from disruption: %w", object.GetName(), err)
	}
	return nil
}

// wasAdopted reports whether an adoption of the Node or NodeClaim was completed, which sets this
// annotation.
func wasAdopted(object client.Object) bool {
	return object.GetAnnotations()[v1alpha1.NodeGroupAnnotation] != ""
}

func markAdopted(object client.Object, policy v1alpha1.AdoptionPolicy) {
	object.SetLabels(lo.Assign(object.GetLabels(), map[string]string{v1alpha1.AdoptedLabel: yes}))
	if policy.Disruption == v1alpha1.DisruptAllowed {
		return
	}
	object.SetAnnotations(lo.Assign(object.GetAnnotations(), map[string]string{karpv1.DoNotDisruptAnnotationKey: yes}))
}

// complete adds to the NodeClaim of an adopted Machine, and to its Node, what Create and
// registration set for a new machine. It does so once, so that later changes by others are kept.
// Values that the Node itself carries are not changed, and the NodeClaim takes them over.
func (c *Controller) complete(ctx context.Context, nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) (reconcile.Result, error) {
	node, err := c.node(ctx, nodeClaim)
	if err != nil {
		return reconcile.Result{}, err
	}
	if node != nil {
		if err := c.endProtection(ctx, node); err != nil {
			return nodeGone(err)
		}
	}
	if _, marked := nodeClaim.Labels[v1alpha1.AdoptedLabel]; !marked || !wasAdopted(nodeClaim) {
		described := c.Provider.Describe(nodeClaim.Spec.NodeClassRef.Name, claim)
		if described == nil {
			c.Recorder.Publish(incomplete(nodeClaim, fmt.Errorf("node group %s cannot be described to Karpenter; see the status of "+
				"ClusterAPINodeClass %s, if that exists", claim.GetNodeGroupId(), nodeClaim.Spec.NodeClassRef.Name)))
			c.sawToIt(nodeClaim.UID)
			return reconcile.Result{RequeueAfter: look}, nil
		}
		policy, err := c.policy(ctx, nodeClaim)
		if err != nil {
			return reconcile.Result{}, err
		}
		stored := nodeClaim.DeepCopy()
		nodeClaim.Labels = lo.Assign(nodeClaim.Labels, facts(described.Labels, node))
		nodeClaim.Annotations = lo.Assign(nodeClaim.Annotations, described.Annotations)
		markAdopted(nodeClaim, policy)
		if err := c.Kube.Patch(ctx, nodeClaim, client.MergeFrom(stored)); err != nil {
			return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("completing the NodeClaim: %w", err))
		}
	}
	group := nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]
	registered := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).IsTrue() // else registration does the rest
	if node != nil && registered && node.Annotations[v1alpha1.NodeGroupAnnotation] != group {
		stored := node.DeepCopy()
		node.Labels = lo.Assign(node.Labels, lo.PickBy(nodeClaim.Labels, func(key, _ string) bool {
			return node.Labels[key] == "" || isKarpenters(key)
		}))
		node.Annotations = lo.Assign(node.Annotations, map[string]string{v1alpha1.NodeGroupAnnotation: group})
		if err := c.Kube.Patch(ctx, node, client.MergeFrom(stored)); err != nil {
			return nodeGone(fmt.Errorf("completing Node %s: %w", node.Name, err))
		}
	}
	c.sawToIt(nodeClaim.UID)
	return reconcile.Result{}, nil
}

// nodeGone handles an error of a write to a NodeClaim's Node. If the Node no longer exists, the
// NodeClaim is handled again, as one without a Node: the end of a Node does not trigger that.
func nodeGone(err error) (reconcile.Result, error) {
	if apierrors.IsNotFound(err) {
		return reconcile.Result{RequeueAfter: soon}, nil
	}
	return reconcile.Result{}, err
}

// facts returns the labels of a node group's Nodes, with the Node's own values if it has any. node
// may be nil.
func facts(described map[string]string, node *corev1.Node) map[string]string {
	if node == nil {
		return described
	}
	return lo.Assign(described, lo.PickBy(node.Labels, func(key, value string) bool {
		_, is := described[key]
		return is && value != "" && !isKarpenters(key)
	}))
}

// isKarpenters reports whether a Node label belongs to Karpenter.
func isKarpenters(label string) bool {
	return strings.HasPrefix(label, apis.Group+"/") || strings.HasPrefix(label, v1alpha1.Group+"/")
}

// sawToIt records that the NodeClaim no longer keeps core from planning and disrupting.
func (c *Controller) sawToIt(uid types.UID) {
	if c.settled.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[uid] = true
}

// Settled reports whether every NodeClaim that existed when this process became active has been
// handled.
func (c *Controller) Settled() bool { return c.settled.Load() }

// Start waits until [Controller.Settled] is true, and then returns.
func (c *Controller) Start(ctx context.Context) error {
	looks := 0
	err := wait.PollUntilContextCancel(ctx, settleLook, true, func(ctx context.Context) (bool, error) {
		nodeClaims, err := nodeclaimutils.ListManaged(ctx, c.Kube, c.CloudProvider, client.UnsafeDisableDeepCopy)
		if err != nil {
			log.FromContext(ctx).Error(err, "listing the NodeClaims to adopt")
			return false, nil
		}
		c.mu.Lock()
		left := lo.Reject(nodeClaims, func(nc *karpv1.NodeClaim, _ int) bool { return c.seen[nc.UID] })
		c.mu.Unlock()
		awaited.Set(float64(len(left)), nil)
		if looks++; len(left) > 0 && looks%looksPerLog == 0 {
			log.FromContext(ctx).Info("nothing is planned or disrupted before NodeClaims are adopted", "count", len(left), "first", left[0].Name)
		}
		return len(left) == 0 && c.Claims.State().Synced, nil
	})
	if err != nil {
		return nil //nolint:nilerr // the process ends
	}
	c.settled.Store(true)
	return nil
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	if err := m.Add(c); err != nil {
		return err
	}
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(c.CloudProvider))).
		WatchesRawSource(claimsource.NodeClaims(c.Claims)).
		WatchesRawSource(claimsource.AllNodeClaims(c.Claims, c.Kube)).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(reconcile.AsReconciler(m.GetClient(), c))
}
