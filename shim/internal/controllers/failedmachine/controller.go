// Package failedmachine deletes NodeClaims whose machine will not come, as decided by the agent: it
// has released the claim, or the claim has ended. Core itself would wait a quarter of an hour for
// each of them, and would give up slow machines too early. The controller therefore also makes core
// wait as long as the agent does. It has no deadlines of its own.
//
// The controller never acts on silence. Before it deletes anything it confirms with the agent that
// the claim has ended or is unknown. While the agent is unreachable it deletes nothing and makes
// core wait. A NodeClaim that never had a claim is kept as long as its Machine exists. A registered
// NodeClaim whose Node is Ready is always kept: pods are running there, whatever the hub reports.
package failedmachine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeutils "sigs.k8s.io/karpenter/pkg/utils/node"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/claimsource"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/owners"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

const (
	name        = "nodeclaim.failedmachine"
	concurrency = 50
	// look is the interval for NodeClaims that wait for something.
	look = 30 * time.Second
	// claimLag is how long the mirror may lag behind the agent's answer to Create before the
	// controller asks the agent for the claim.
	claimLag = 10 * time.Second

	// registrationTimeout is core's timeout for a NodeClaim without a Node, counted from the last
	// change of the condition Registered. It is not configurable.
	registrationTimeout = 15 * time.Minute
	// extendAfter is the age at which that condition is rewritten, to make core wait longer.
	extendAfter = 5 * time.Minute
	// publishAfter is the age from which a NodeClaim gets events about its machine: most have their
	// Node by then.
	publishAfter = time.Minute
	// tellNodePoolEvery is the minimum interval between events on a NodePool about one node group.
	tellNodePoolEvery = 10 * time.Minute
)

// Claims is a mirror of the shim's claims.
type Claims interface {
	claimsource.Claims
	State() agentclient.State
}

// NodeGroups is a mirror of the agent's node groups.
type NodeGroups interface {
	Get(id string) (*agentv1alpha1.NodeGroup, bool)
}

// Config configures a [Controller]. All fields are REQUIRED.
type Config struct {
	// Kube reads from a cache with an index on Nodes' spec.providerID.
	Kube client.Client
	// Live reads from the API server.
	Live client.Reader
	// CloudProvider determines which NodeClaims belong to this provider.
	CloudProvider cloudprovider.CloudProvider
	// Claims is a mirror of the shim's claims.
	Claims Claims
	// NodeGroups is a mirror of the agent's node groups.
	NodeGroups NodeGroups
	// Agent confirms that a claim has ended or is unknown.
	Agent agentv1alpha1.ClaimServiceClient
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Recorder records events.
	Recorder events.Recorder
	// Unclaimed finds the Machines of NodeClaims that never had a claim.
	Unclaimed *unclaimed.Finder
	// Timeout bounds each call to the agent.
	Timeout time.Duration
	// Clock provides the time.
	Clock clock.PassiveClock
}

// Controller deletes NodeClaims whose machine will not come. See the package documentation.
type Controller struct {
	Config

	mu      sync.Mutex
	records map[string]record // by name of the NodeClaim, until it no longer needs one or is gone
}

// record is what the controller remembers of a NodeClaim.
type record struct {
	uid       types.UID
	published string    // the machine's progress in the last event
	looked    time.Time // when the controller first looked at the NodeClaim while it was launched and not registered
}

// New returns the controller.
func New(c Config) *Controller {
	return &Controller{Config: c, records: map[string]record{}}
}

// Reconcile checks one NodeClaim.
func (c *Controller) Reconcile(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	if !nodeclaimutils.IsManaged(nodeClaim, c.CloudProvider) || !nodeClaim.DeletionTimestamp.IsZero() || v1alpha1.ReturnsMachine(nodeClaim) {
		c.forget(nodeClaim.Name)
		return reconcile.Result{}, nil
	}
	launched := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeLaunched)
	if !launched.IsTrue() {
		return reconcile.Result{}, nil // Core is still requesting a machine, and has its own timeout.
	}
	registered := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).IsTrue()
	if !registered {
		c.looksAt(nodeClaim)
	}
	if !c.Claims.State().Synced {
		return c.wait(ctx, nodeClaim)
	}
	claim, known := c.Claims.Get(string(nodeClaim.UID))
	switch {
	case !known && c.Clock.Since(launched.LastTransitionTime.Time) < claimLag:
		return reconcile.Result{RequeueAfter: claimLag}, nil
	case !known, claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		return c.lost(ctx, nodeClaim, registered)
	case registered:
		c.forget(nodeClaim.Name)
		return reconcile.Result{}, nil
	}
	return c.awaitRegistration(ctx, nodeClaim, claim)
}

// lost handles a NodeClaim whose claim has ended or is not known, according to the mirror.
func (c *Controller) lost(ctx context.Context, nodeClaim *karpv1.NodeClaim, registered bool) (reconcile.Result, error) {
	if registered {
		ready, err := c.hasReadyNode(ctx, nodeClaim)
		if err != nil {
			return reconcile.Result{}, err
		}
		if ready {
			return reconcile.Result{RequeueAfter: look}, nil
		}
	}
	claim, known, err := c.ask(ctx, nodeClaim)
	switch {
	case err != nil:
		return c.unanswered(ctx, nodeClaim, err)
	case !known, unclaimed.NeverMade(claim):
		return c.unknown(ctx, nodeClaim)
	case claim.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED:
		reason, message := verdict(claim)
		return c.giveUp(ctx, nodeClaim, reason, message)
	}
	return reconcile.Result{RequeueAfter: look}, nil // The mirror was stale.
}

// awaitRegistration handles a NodeClaim that has a claim and no registered Node yet.
func (c *Controller) awaitRegistration(ctx context.Context, nodeClaim *karpv1.NodeClaim, claim *agentv1alpha1.Claim) (reconcile.Result, error) {
	if released(claim) || claim.GetMachine().GetDeletedAt() != nil {
		// This is the state in the mirror, which may be stale.
		now, known, err := c.ask(ctx, nodeClaim)
		switch {
		case err != nil:
			return c.unanswered(ctx, nodeClaim, err)
		case !known:
			return c.unknown(ctx, nodeClaim)
		case released(now):
			reason, message := verdict(now)
			return c.giveUp(ctx, nodeClaim, reason, message)
		case now.GetMachine().GetDeletedAt() != nil:
			return c.giveUp(ctx, nodeClaim, machineDeleted, fmt.Sprintf(
				"Another actor deleted Machine %s in the hub before its Node was registered.", now.GetMachine().GetName()))
		}
		return reconcile.Result{RequeueAfter: look}, nil
	}
	if !c.Claims.State().Connected {
		return c.wait(ctx, nodeClaim)
	}
	c.publishProgress(nodeClaim, claim)
	joined, err := c.joinedAt(ctx, nodeClaim, claim)
	switch {
	case err != nil:
		return reconcile.Result{}, err
	case !joined.IsZero(): // core registers it, and gets its full timeout for that
		return reconcile.Result{RequeueAfter: look}, c.extendRegistration(ctx, nodeClaim, joined)
	case c.comes(claim):
		return reconcile.Result{RequeueAfter: look}, c.extendRegistration(ctx, nodeClaim, c.Clock.Now().Add(-extendAfter))
	}
	return reconcile.Result{RequeueAfter: look}, nil
}

// unknown handles a NodeClaim for which the agent is certain to have no claim.
func (c *Controller) unknown(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	switch machine, err := c.Unclaimed.Of(ctx, nodeClaim); {
	case errors.Is(err, unclaimed.ErrUnknownMachine): // package adoption reports it; core has its own timeout for one without a Node
		return reconcile.Result{RequeueAfter: look}, nil
	case err != nil:
		return c.unanswered(ctx, nodeClaim, err)
	case machine != nil: // it will be adopted
		return reconcile.Result{RequeueAfter: look}, nil
	}
	switch shared, err := c.shared(ctx, nodeClaim); {
	case err != nil:
		return c.unanswered(ctx, nodeClaim, err)
	case shared: // core would also drain the other NodeClaim's Node
		return reconcile.Result{RequeueAfter: look}, nil
	}
	return c.giveUp(ctx, nodeClaim, claimUnknown, "The hub has no claim of this NodeClaim.")
}

// shared reports whether another NodeClaim has the same provider ID and a live claim, as can happen
// with the NodeClaims of other providers.
func (c *Controller) shared(ctx context.Context, nodeClaim *karpv1.NodeClaim) (bool, error) {
	others, err := owners.Others(ctx, c.Kube, nodeClaim, nodeClaim.Status.ProviderID)
	if err != nil {
		return false, err
	}
	for _, other := range others {
		claim, known, err := c.ask(ctx, other)
		if err != nil {
			return false, fmt.Errorf("asking for the claim of NodeClaim %s: %w", other.Name, err)
		}
		if known && claim.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
			return true, nil
		}
	}
	return false, nil
}

// ask reads the claim from the agent. known is false only if the agent is certain that there is
// none.
func (c *Controller) ask(ctx context.Context, nodeClaim *karpv1.NodeClaim) (claim *agentv1alpha1.Claim, known bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	response, err := c.Agent.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: c.Cluster, ClaimId: string(nodeClaim.UID)})
	if agenterrors.IsNotFound(err) && agenterrors.ReasonOf(err) == agenterrors.ReasonClaimNotFound {
		return nil, false, nil
	}
	return response.GetClaim(), err == nil, err
}

// unanswered waits. It returns no error because this is normal while the hub is unreachable.
func (c *Controller) unanswered(ctx context.Context, nodeClaim *karpv1.NodeClaim, err error) (reconcile.Result, error) {
	log.FromContext(ctx).V(1).Info("nothing is deleted, because the agent did not answer", "reason", err.Error())
	return c.wait(ctx, nodeClaim)
}

// wait makes core wait as well: a Node may still join while the agent is unreachable.
func (c *Controller) wait(ctx context.Context, nodeClaim *karpv1.NodeClaim) (reconcile.Result, error) {
	if nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered).IsTrue() {
		return reconcile.Result{RequeueAfter: look}, nil
	}
	state := c.Claims.State()
	if c.Clock.Since(nodeClaim.CreationTimestamp.Time) > registrationTimeout && !state.Connected && c.Clock.Since(state.Since) >= look {
		c.Recorder.Publish(events.Event{
			InvolvedObject: nodeClaim,
			Type:           corev1.EventTypeWarning,
			Reason:         "AgentSilent",
			Message: "The agent in the hub does not answer, so it is not known whether a machine will come. The NodeClaim is kept " +
				"until it does.",
			DedupeValues:  []string{string(nodeClaim.UID)},
			DedupeTimeout: 10 * time.Minute,
		})
	}
	return reconcile.Result{RequeueAfter: look}, c.extendRegistration(ctx, nodeClaim, c.Clock.Now().Add(-extendAfter))
}

// hasReadyNode reports whether a Node of the NodeClaim is Ready. If the cache has no such Node, it
// reads from the API server: after a restore of the cluster the cache may already have the
// NodeClaim but not its Node.
func (c *Controller) hasReadyNode(ctx context.Context, nodeClaim *karpv1.NodeClaim) (bool, error) {
	nodes, err := nodeclaimutils.AllNodesForNodeClaim(ctx, c.Kube, nodeClaim)
	if err != nil {
		return false, err
	}
	if lo.SomeBy(nodes, isReady) {
		return true, nil
	}
	if nodeClaim.Status.NodeName == "" {
		return false, nil
	}
	// Also look up the Node by name: the NodeClaim may temporarily carry the placeholder, which no
	// Node has.
	for _, reader := range []client.Reader{c.Kube, c.Live} {
		node := &corev1.Node{}
		err := reader.Get(ctx, client.ObjectKey{Name: nodeClaim.Status.NodeName}, node)
		if client.IgnoreNotFound(err) != nil {
			return false, fmt.Errorf("getting Node %s: %w", nodeClaim.Status.NodeName, err)
		}
		if err == nil && isReady(node) {
			return true, nil
		}
	}
	return false, nil
}

func isReady(node *corev1.Node) bool {
	return nodeutils.GetCondition(node, corev1.NodeReady).Status == corev1.ConditionTrue
}

func (c *Controller) giveUp(ctx context.Context, nodeClaim *karpv1.NodeClaim, reason, message string) (reconcile.Result, error) {
	if err := c.Kube.Delete(ctx, nodeClaim, client.Preconditions{UID: &nodeClaim.UID}); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(fmt.Errorf("deleting the NodeClaim: %w", err))
	}
	c.forget(nodeClaim.Name)
	log.FromContext(ctx).Info("gave up a NodeClaim", "reason", reason, "cause", message)
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodeClaim,
		Type:           corev1.EventTypeWarning,
		Reason:         reason,
		Message:        lo.Substring(message, 0, 1024),
		DedupeValues:   []string{string(nodeClaim.UID)},
	})
	if reason == machineFailed {
		c.tellNodePool(ctx, nodeClaim, message)
	}
	givenUpTotal.Inc(map[string]string{reasonLabel: reason})
	metrics.NodeClaimsDisruptedTotal.Inc(map[string]string{
		metrics.ReasonLabel:              "machine_failed",
		metrics.NodePoolLabel:            nodeClaim.Labels[karpv1.NodePoolLabelKey],
		metrics.CapacityTypeLabel:        nodeClaim.Labels[karpv1.CapacityTypeLabelKey],
		metrics.ConsolidationPolicyLabel: "",
		metrics.TerminationModeLabel:     nodeclaimutils.DisruptionTerminationMode(nodeClaim),
	})
	return reconcile.Result{}, nil
}

// tellNodePool publishes the failure of a machine on the NodePool, because the NodeClaim is being
// deleted. A NodePool whose machines keep failing gets one event for each node group in an
// interval, with the first failure in it.
func (c *Controller) tellNodePool(ctx context.Context, nodeClaim *karpv1.NodeClaim, message string) {
	nodePool := &karpv1.NodePool{}
	key := client.ObjectKey{Name: nodeClaim.Labels[karpv1.NodePoolLabelKey]}
	if key.Name == "" {
		return // created by a user
	}
	if err := c.Kube.Get(ctx, key, nodePool); err != nil {
		if !apierrors.IsNotFound(err) {
			log.FromContext(ctx).Error(err, "reading the NodePool for an event", "NodePool", key.Name)
		}
		return
	}
	c.Recorder.Publish(events.Event{
		InvolvedObject: nodePool,
		Type:           corev1.EventTypeWarning,
		Reason:         machineFailed,
		Message:        lo.Substring(message, 0, 1024),
		DedupeValues:   []string{string(nodePool.UID), nodeClaim.Annotations[v1alpha1.NodeGroupAnnotation]},
		DedupeTimeout:  tellNodePoolEvery,
	})
}

// extendRegistration makes core wait for the Node beyond its own timeout. It sets the transition
// time of the condition that core counts from to now, if that is before since. Core writes the
// whole list of conditions without a lock, so the old time may come back; the next check corrects
// it.
func (c *Controller) extendRegistration(ctx context.Context, nodeClaim *karpv1.NodeClaim, since time.Time) error {
	condition := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeRegistered)
	if condition == nil || !condition.LastTransitionTime.Time.Before(since) {
		return nil
	}
	current := &karpv1.NodeClaim{}
	if err := c.Live.Get(ctx, client.ObjectKeyFromObject(nodeClaim), current); err != nil {
		return client.IgnoreNotFound(err)
	}
	condition = current.StatusConditions().Get(karpv1.ConditionTypeRegistered)
	if current.UID != nodeClaim.UID || condition.IsTrue() || !condition.LastTransitionTime.Time.Before(since) {
		return nil
	}
	stored := current.DeepCopy()
	current.SetConditions(lo.Map(current.GetConditions(), func(each status.Condition, _ int) status.Condition {
		if each.Type == karpv1.ConditionTypeRegistered {
			each.LastTransitionTime = metav1.NewTime(c.Clock.Now())
		}
		return each
	}))
	err := c.Kube.Status().Patch(ctx, current, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("extending the time for registration: %w", err)
	}
	extensionsTotal.Inc(nil)
	log.FromContext(ctx).Info("waiting longer for a Node, because the agent waits for it or does not answer")
	return nil
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		For(&karpv1.NodeClaim{}, builder.WithPredicates(nodeclaimutils.IsManagedPredicateFuncs(c.CloudProvider))).
		WatchesRawSource(claimsource.NodeClaims(c.Claims)).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(c.requests(m.GetClient()))
}

// requests returns the reconciler of requests. It is [reconcile.AsReconciler], but also forgets
// NodeClaims that no longer exist: the controller may not have seen them while they were being
// deleted.
func (c *Controller) requests(kube client.Reader) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		nodeClaim := &karpv1.NodeClaim{}
		if err := kube.Get(ctx, request.NamespacedName, nodeClaim); err != nil {
			if apierrors.IsNotFound(err) {
				c.forget(request.Name)
			}
			return reconcile.Result{}, client.IgnoreNotFound(err)
		}
		return c.Reconcile(ctx, nodeClaim)
	})
}
