// Package nodeclass reports on each ClusterAPINodeClass what it selects and whether it can be used,
// and keeps it from being removed while NodeClaims refer to it.
//
// Core launches nothing from a NodePool whose NodeClass is not Ready. Ready is False if the
// selector matches nothing, or if the agent has been unreachable for the grace period. During
// shorter outages Ready does not change, because the last known catalogue is good enough.
package nodeclass

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"
	podutils "sigs.k8s.io/karpenter/pkg/utils/pod"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/driftcheck"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

const (
	name        = "nodeclass"
	concurrency = 10
	// statusInterval is the minimum interval between writes of a status in which no condition
	// turned: prices and availability may change many times a second. NodeClaims are reconciled for
	// such a write only if it may decide about drift: see package driftcheck.
	statusInterval = 5 * time.Second
	// terminating is the interval for a NodeClass that is being deleted.
	terminating = 5 * time.Second
	// shownProblems is how many problems a condition lists, and longestProblem the maximum number
	// of characters of each.
	shownProblems  = 3
	longestProblem = 2000
	// longestMessage is the maximum number of characters of a condition's message, below the API
	// server's limit (32,768).
	longestMessage = 8000
	// anotherLook is how often the client certificate and the pods without a Node are checked.
	anotherLook = time.Minute
	// unplannedAfter is how long a pod must have waited before it shows that node groups need
	// zones: most have their Node by then.
	unplannedAfter = 2 * time.Minute
)

// Reasons of the conditions.
const (
	reasonNotSynced       = "CatalogueNotSynced"
	reasonPending         = "AwaitingCatalogue"
	reasonSelectorInvalid = "SelectorInvalid"
	reasonNoNodeGroups    = "NoNodeGroups"
	reasonConnecting      = "Connecting"
	reasonUnreachable     = "AgentUnreachable"
	reasonRefused         = "AgentRefused"
	reasonLiveSetRefused  = "LiveSetRefused"
	reasonReachable       = "AgentReachable"
	reasonProblems        = "ProblemsReported"
)

// Connection reports the state of the connection to the agent. The mirror of node groups implements
// it.
type Connection interface {
	State() agentclient.State
	StateChanges() (changes <-chan struct{}, stop func())
}

// Certificate is the client certificate for calls to the agent.
type Certificate interface {
	// Warning returns a message if the certificate has expired or soon will, with the remedy, and
	// "" otherwise. found is false if there is no certificate.
	Warning() (reason, message string, found bool)
}

// CompatibilityCheck reports whether the agent and this shim are compatible.
// [connectivity.CompatibilityCheck] implements it.
type CompatibilityCheck interface {
	Result() connectivity.Compatibility
	// Changes receives a value after the result has changed. It has one reader.
	Changes() <-chan struct{}
}

// LiveSets reports whether the agent accepts what this cluster reports of itself. The controller
// that synchronizes claims implements it.
type LiveSets interface {
	// Refused returns the agent's error if it refuses the cluster's live sets, else nil. known is
	// false until the agent has answered one.
	Refused() (known bool, err error)
	// RefusalChanges receives a value after the result of Refused has changed. It has one reader.
	RefusalChanges() <-chan struct{}
}

// Config configures a [Controller]. All fields are REQUIRED.
type Config struct {
	// Kube reads from a cache with indexes on NodeClaims' spec.nodeClassRef.
	Kube client.Client
	// Catalogue has the node groups that each NodeClass selects.
	Catalogue *catalogue.Catalogue
	// Connection, Certificate, Compatibility and LiveSets determine the conditions about the agent.
	Connection    Connection
	Certificate   Certificate
	Compatibility CompatibilityCheck
	LiveSets      LiveSets
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Recorder records events.
	Recorder events.Recorder
	// Grace is how long the agent may be unreachable before NodeClasses stop being Ready.
	Grace time.Duration
	// Clock provides the time.
	Clock clock.Clock
}

// Controller maintains the status and the finalizer of ClusterAPINodeClasses.
type Controller struct {
	Config

	started time.Time

	mu      sync.Mutex
	written map[string]time.Time // time of the last write of the status, by NodeClass
}

// New returns the controller.
func New(c Config) *Controller {
	return &Controller{Config: c, started: c.Clock.Now(), written: map[string]time.Time{}}
}

// Reconcile checks one NodeClass.
func (c *Controller) Reconcile(ctx context.Context, nodeClass *v1alpha1.ClusterAPINodeClass) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	if !nodeClass.DeletionTimestamp.IsZero() {
		return c.finalize(ctx, nodeClass)
	}
	if !controllerutil.ContainsFinalizer(nodeClass, v1alpha1.NodeClassFinalizer) {
		stored := nodeClass.DeepCopy()
		controllerutil.AddFinalizer(nodeClass, v1alpha1.NodeClassFinalizer)
		// The patch replaces the whole list of finalizers, so it must apply to the version that was
		// read.
		if err := c.Kube.Patch(ctx, nodeClass, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
			return retryConflict(fmt.Errorf("adding the finalizer: %w", err))
		}
	}
	stored := nodeClass.DeepCopy()
	var pods []string
	if c.zoneless(nodeClass) {
		var err error
		if pods, err = c.unplanned(ctx); err != nil {
			return reconcile.Result{}, err
		}
	}
	c.describe(nodeClass, pods)
	again := reconcile.Result{RequeueAfter: c.lookAgain(nodeClass)}
	if equality.Semantic.DeepEqual(stored.Status, nodeClass.Status) {
		return again, nil
	}
	if !driftcheck.ConditionTurned(stored, nodeClass) {
		if wait := c.tooSoon(nodeClass); wait > 0 {
			return reconcile.Result{RequeueAfter: min(wait, cmp.Or(again.RequeueAfter, wait))}, nil
		}
	}
	if err := c.Kube.Status().Patch(ctx, nodeClass, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
		return retryConflict(fmt.Errorf("patching the status: %w", err))
	}
	c.mu.Lock()
	c.written[nodeClass.Name] = c.Clock.Now()
	c.mu.Unlock()
	c.announce(ctx, stored, nodeClass)
	return again, nil
}

// graceEnds returns the rest of the grace period of an unreachable agent, or zero if the agent is
// connected or the period is over.
func (c *Controller) graceEnds() time.Duration {
	state := c.Connection.State()
	if state.Connected {
		return 0
	}
	return max(0, c.Grace-c.Clock.Since(c.silentSince(state)))
}

// lookAgain returns when a condition may turn without any event, or zero if none can.
func (c *Controller) lookAgain(nodeClass *v1alpha1.ClusterAPINodeClass) time.Duration {
	grace := c.graceEnds()
	_, _, certified := c.Certificate.Warning()
	if !certified && !c.zoneless(nodeClass) {
		return grace
	}
	return min(cmp.Or(grace, anotherLook), anotherLook)
}

func (c *Controller) silentSince(state agentclient.State) time.Time {
	if state.Since.IsZero() {
		return c.started
	}
	return state.Since
}

// tooSoon returns how long the write of a status in which no condition turned must still wait.
func (c *Controller) tooSoon(nodeClass *v1alpha1.ClusterAPINodeClass) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.written[nodeClass.Name].Add(statusInterval).Sub(c.Clock.Now())
}

// retryConflict handles an error of a write. After a conflict, the cache first has to receive the
// version that the write conflicts with.
func retryConflict(err error) (reconcile.Result, error) {
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: time.Second}, nil
	}
	return reconcile.Result{}, client.IgnoreNotFound(err)
}

// zoneless reports whether a NodeClass has node groups, and none of them has a zone.
func (c *Controller) zoneless(nodeClass *v1alpha1.ClusterAPINodeClass) bool {
	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		return false
	}
	class, found := snapshot.Class(nodeClass.Name)
	return found && instancetype.Zoneless(class.Groups)
}

// unplanned returns the names of the pods that have been waiting for a Node in some zone for a
// while.
func (c *Controller) unplanned(ctx context.Context) ([]string, error) {
	waiting := &corev1.PodList{}
	if err := c.Kube.List(ctx, waiting, client.MatchingFields{"spec.nodeName": ""}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("listing the pods without a Node: %w", err)
	}
	return lo.FilterMap(waiting.Items, func(p corev1.Pod, _ int) (string, bool) {
		scheduled, found := lo.Find(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled })
		waits := found && scheduled.Status == corev1.ConditionFalse && c.Clock.Since(scheduled.LastTransitionTime.Time) >= unplannedAfter
		return p.Namespace + "/" + p.Name, waits && podutils.IsProvisionable(&p) && instancetype.NeedsZone(&p)
	}), nil
}

// describe sets the status. The pods are those of [Controller.unplanned], which only matter to a
// NodeClass without zones.
func (c *Controller) describe(nodeClass *v1alpha1.ClusterAPINodeClass, pods []string) {
	conditions := nodeClass.StatusConditions(status.WithClock(c.Clock))
	c.describeConnection(conditions)
	c.describeCertificate(conditions)
	c.describeCompatibility(conditions)

	snapshot := c.Catalogue.Snapshot()
	if snapshot == nil {
		if before := conditions.Get(v1alpha1.ConditionNodeGroupsFound); !before.IsUnknown() && c.Clock.Since(c.started) < c.Grace {
			conditions.Set(*before) // A restart alone does not change the condition.
			return
		}
		conditions.SetUnknownWithReason(v1alpha1.ConditionNodeGroupsFound, reasonNotSynced, "the agent's node groups are not known yet")
		return
	}
	class, ok := snapshot.Class(nodeClass.Name)
	if !ok || class.Generation != nodeClass.Generation {
		conditions.SetUnknownWithReason(v1alpha1.ConditionNodeGroupsFound, reasonPending, "the selector has not been evaluated yet")
		return
	}
	nodeClass.Status.NodeGroups = int32(len(class.Groups))
	nodeClass.Status.AvailableNodeGroups = int32(class.Available())
	nodeClass.Status.Selected = slices.Clone(class.Selected)
	nodeClass.Status.InstanceTypes = int32(class.InstanceTypeNames())
	nodeClass.Status.Zones = int32(class.Zones())
	problems := class.Problems
	if problem := instancetype.UnplannedPods(class.Groups, pods); problem != "" {
		problems = append(slices.Clip(problems), problem)
	}
	nodeClass.Status.Problems = int32(len(problems))
	switch {
	case class.SelectorError != nil:
		conditions.SetFalse(v1alpha1.ConditionNodeGroupsFound, reasonSelectorInvalid, lo.Ellipsis(class.SelectorError.Error(), longestMessage))
	case len(class.Groups) == 0:
		conditions.SetFalse(v1alpha1.ConditionNodeGroupsFound, reasonNoNodeGroups, lo.Ellipsis(c.nothingFound(nodeClass, class, snapshot), longestMessage))
	default:
		conditions.SetTrue(v1alpha1.ConditionNodeGroupsFound)
	}
	if len(problems) > 0 {
		shown := lo.Map(lo.Slice(problems, 0, shownProblems), func(problem string, _ int) string { return lo.Ellipsis(problem, longestProblem) })
		message := strings.Join(shown, "; ")
		if more := len(problems) - shownProblems; more > 0 {
			message += fmt.Sprintf("; and %d more", more)
		}
		conditions.SetFalse(v1alpha1.ConditionNodeGroupsValid, reasonProblems, message)
	} else {
		conditions.SetTrue(v1alpha1.ConditionNodeGroupsValid)
	}
}

func (c *Controller) nothingFound(nodeClass *v1alpha1.ClusterAPINodeClass, class *catalogue.Class, snapshot *catalogue.Snapshot) string {
	cluster := c.Cluster.GetNamespace() + "/" + c.Cluster.GetName()
	if unusable := len(class.Selected); unusable > 0 {
		return fmt.Sprintf("none of the %d node groups of Cluster %s that match can be used: the condition %s has the reasons",
			unusable, cluster, v1alpha1.ConditionNodeGroupsValid)
	}
	if snapshot.Len() == 0 {
		return fmt.Sprintf("Cluster %s has no usable node groups: give MachineDeployments the label node.cluster.x-k8s.io/karpenter-member", cluster)
	}
	return fmt.Sprintf(
		"spec.scalableResourceSelector (%s) matches none of the %d node groups of Cluster %s: correct it, or the labels of the MachineDeployments",
		metav1.FormatLabelSelector(nodeClass.Spec.ScalableResourceSelector),
		snapshot.Len(),
		cluster,
	)
}

func (c *Controller) describeConnection(conditions status.ConditionSet) {
	state := c.Connection.State()
	before := conditions.Get(v1alpha1.ConditionAgentReachable)
	if state.Connected {
		switch known, err := c.LiveSets.Refused(); {
		case err != nil:
			// Machines of new claims would join the cluster whose identity the shim has.
			message := "the agent refuses the live set of this cluster: " + agenterrors.Describe(err)
			conditions.SetFalse(v1alpha1.ConditionAgentReachable, reasonLiveSetRefused, lo.Ellipsis(message, longestMessage))
		case !known && before.IsFalse() && before.Reason == reasonLiveSetRefused:
			conditions.Set(*before) // A restart alone does not change the condition.
		default:
			conditions.SetTrue(v1alpha1.ConditionAgentReachable)
		}
		return
	}
	since := c.silentSince(state)
	if c.Clock.Since(since) < c.Grace {
		// The outage may be short: keep the condition, for the new generation as well.
		if before.IsUnknown() {
			conditions.SetUnknownWithReason(v1alpha1.ConditionAgentReachable, reasonConnecting, "connecting to the agent")
		} else {
			conditions.Set(*before)
		}
		return
	}
	reason := reasonUnreachable
	if code := grpcstatus.Code(state.LastError); code == codes.PermissionDenied || code == codes.Unauthenticated {
		reason = reasonRefused
	}
	message := fmt.Sprintf("no connection to the agent since %s", since.UTC().Format(time.RFC3339))
	if state.LastError != nil {
		message += ": " + agenterrors.Describe(state.LastError)
	}
	message = lo.Ellipsis(message, longestMessage)
	// Attempts at the addresses of several agents fail in turn. That is no change, which would be a
	// write.
	if before.IsFalse() && before.Reason == reason && address.ReplaceAllString(before.Message, "") == address.ReplaceAllString(message, "") {
		message = before.Message
	}
	conditions.SetFalse(v1alpha1.ConditionAgentReachable, reason, message)
}

// address matches an IP address and a port.
var address = regexp.MustCompile(`(\d+(\.\d+){3}|\[[0-9a-fA-F:.]+\]):\d+`)

func (c *Controller) describeCertificate(conditions status.ConditionSet) {
	switch reason, warning, found := c.Certificate.Warning(); {
	case !found:
		lo.Must0(conditions.Clear(v1alpha1.ConditionAgentCertificateValid)) // fails only for conditions that Ready depends on
	case warning != "":
		conditions.SetFalse(v1alpha1.ConditionAgentCertificateValid, reason, warning)
	default:
		conditions.SetTrue(v1alpha1.ConditionAgentCertificateValid)
	}
}

func (c *Controller) describeCompatibility(conditions status.ConditionSet) {
	switch result := c.Compatibility.Result(); {
	case !result.Known:
		if before := conditions.Get(v1alpha1.ConditionAgentCompatible); before != nil {
			conditions.Set(*before) // A restart alone does not change the condition.
		}
	case result.Compatible():
		conditions.SetTrue(v1alpha1.ConditionAgentCompatible)
	default:
		conditions.SetFalse(v1alpha1.ConditionAgentCompatible, result.Reason, lo.Ellipsis(result.Message, longestMessage))
	}
}

// announce publishes events on conditions that became worse, and when the agent is reachable again.
// An expiring certificate is not announced here, but at regular intervals.
func (c *Controller) announce(ctx context.Context, before, after *v1alpha1.ClusterAPINodeClass) {
	for _, kind := range []string{
		v1alpha1.ConditionNodeGroupsFound, v1alpha1.ConditionAgentReachable, v1alpha1.ConditionAgentCompatible, v1alpha1.ConditionNodeGroupsValid,
	} {
		was, is := find(before, kind), find(after, kind)
		if kind == v1alpha1.ConditionAgentReachable && was.IsFalse() && is.IsTrue() {
			c.Recorder.Publish(events.Event{
				InvolvedObject: after,
				Type:           corev1.EventTypeNormal,
				Reason:         reasonReachable,
				Message:        "The agent is reachable again.",
				DedupeValues:   []string{string(after.UID), is.LastTransitionTime.String()},
			})
		}
		if !is.IsFalse() || (was.IsFalse() && was.Reason == is.Reason && was.Message == is.Message) {
			continue
		}
		log.FromContext(ctx).Info("ClusterAPINodeClass condition is False", "condition", kind, "reason", is.Reason, "cause", is.Message)
		c.Recorder.Publish(events.Event{
			InvolvedObject: after,
			Type:           corev1.EventTypeWarning,
			Reason:         is.Reason,
			Message:        lo.Substring(is.Message, 0, 1024),
			DedupeValues:   []string{string(after.UID), is.Message},
		})
	}
}

func find(nodeClass *v1alpha1.ClusterAPINodeClass, kind string) *status.Condition {
	condition, ok := lo.Find(nodeClass.Status.Conditions, func(condition status.Condition) bool { return condition.Type == kind })
	if !ok {
		return nil
	}
	return &condition
}

// finalize removes the finalizer once no NodeClaim refers to the NodeClass.
func (c *Controller) finalize(ctx context.Context, nodeClass *v1alpha1.ClusterAPINodeClass) (reconcile.Result, error) {
	if !controllerutil.ContainsFinalizer(nodeClass, v1alpha1.NodeClassFinalizer) {
		return reconcile.Result{}, nil
	}
	nodeClaims := &karpv1.NodeClaimList{}
	if err := c.Kube.List(ctx, nodeClaims, nodeclaimutils.ForNodeClass(nodeClass), client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, fmt.Errorf("listing the NodeClaims that refer to the NodeClass: %w", err)
	}
	if len(nodeClaims.Items) > 0 {
		names := lo.Map(lo.Slice(nodeClaims.Items, 0, 5), func(nc karpv1.NodeClaim, _ int) string { return nc.Name })
		c.Recorder.Publish(events.Event{
			InvolvedObject: nodeClass,
			Type:           corev1.EventTypeNormal,
			Reason:         "WaitingOnNodeClaims",
			Message: fmt.Sprintf(
				"Waiting for %d NodeClaims that refer to the NodeClass, such as %s.",
				len(nodeClaims.Items),
				strings.Join(names, ", "),
			),
			DedupeValues: []string{string(nodeClass.UID)},
		})
		if err := c.noteConnection(ctx, nodeClass); err != nil {
			return reconcile.Result{}, err
		}
		return reconcile.Result{RequeueAfter: terminating}, nil
	}
	stored := nodeClass.DeepCopy()
	controllerutil.RemoveFinalizer(nodeClass, v1alpha1.NodeClassFinalizer)
	if err := c.Kube.Patch(ctx, nodeClass, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
		return retryConflict(fmt.Errorf("removing the finalizer: %w", err))
	}
	c.mu.Lock()
	delete(c.written, nodeClass.Name)
	c.mu.Unlock()
	return reconcile.Result{}, nil
}

// noteConnection writes whether the agent is reachable, for a NodeClass that is being deleted: what
// happens to its NodeClaims depends on it (package outage).
func (c *Controller) noteConnection(ctx context.Context, nodeClass *v1alpha1.ClusterAPINodeClass) error {
	stored := nodeClass.DeepCopy()
	c.describeConnection(nodeClass.StatusConditions(status.WithClock(c.Clock)))
	if !driftcheck.ConditionTurned(stored, nodeClass) {
		return nil
	}
	if err := c.Kube.Status().Patch(ctx, nodeClass, client.MergeFromWithOptions(stored, client.MergeFromWithOptimisticLock{})); err != nil {
		if apierrors.IsConflict(err) {
			return nil // it is tried again soon
		}
		return client.IgnoreNotFound(fmt.Errorf("patching the status: %w", err))
	}
	c.announce(ctx, stored, nodeClass)
	return nil
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		For(&v1alpha1.ClusterAPINodeClass{}).
		WatchesRawSource(c.on(func() (<-chan struct{}, func()) { return c.Catalogue.Changes(), func() {} })).
		WatchesRawSource(c.on(c.Connection.StateChanges)).
		WatchesRawSource(c.on(func() (<-chan struct{}, func()) { return c.Compatibility.Changes(), func() {} })).
		WatchesRawSource(c.on(func() (<-chan struct{}, func()) { return c.LiveSets.RefusalChanges(), func() {} })).
		WithOptions(controller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(reconcile.AsReconciler(m.GetClient(), c))
}

// on returns a source that enqueues every NodeClass on each change.
func (c *Controller) on(tell func() (changes <-chan struct{}, stop func())) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		changes, stop := tell()
		go func() {
			defer stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-changes:
				}
				nodeClasses := &v1alpha1.ClusterAPINodeClassList{}
				if err := c.Kube.List(ctx, nodeClasses); err != nil {
					log.FromContext(ctx).Error(err, "listing NodeClasses")
					continue
				}
				for i := range nodeClasses.Items {
					queue.Add(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&nodeClasses.Items[i])})
				}
			}
		}()
		return nil
	})
}
