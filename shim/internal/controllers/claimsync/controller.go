// Package claimsync regularly reports to the agent which NodeClaims exist, so that the agent can
// release the claims of those that do not. Core forgets a NodeClaim that was deleted while it was
// being launched, and nothing else would release its machine.
//
// The order makes this safe: the controller gets a token from the agent, then reads the NodeClaims
// from the API server, then sends both to the agent. A claim that was made after the token was
// issued is not collected, whatever the set contains. The set also identifies the cluster that it
// was read from, so that a set from another cluster, read through a wrong kubeconfig, releases
// nothing.
//
// The report also describes the Nodes, from which the agent learns what machines are like and that
// their Nodes exist. The list of Nodes is read from the API server and complete, so that a Node
// missing from it does not exist. Besides the regular interval, a report is sent as soon as the
// shim follows an agent again, and when another controller calls [Controller.Soon].
package claimsync

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/awslabs/operatorpkg/reconciler"
	"github.com/awslabs/operatorpkg/singleton"
	"github.com/samber/lo"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/registration"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/spoke"
)

const name = "nodeclaim.claimsync"

const (
	// maxReportBytes keeps the message below gRPC's default limit of 4 MiB, with room for the live
	// claims.
	maxReportBytes = 3 << 20
	// maxReports, maxProviderID and maxReportResources are the API's limits on the number of
	// reports, on the length of a provider ID, and on the resources in one report.
	maxReports, maxProviderID, maxReportResources = 20_000, 2048, 128
	// gatherAsked is how long a requested round is delayed, so that further requests join it.
	gatherAsked = 2 * time.Second
	// nodesPerPage is how many complete Nodes are in memory at once.
	nodesPerPage = 500
)

// reportedLabels describe a machine and its location. Architecture and operating system are not
// among them: core labels a Node with what was planned, while the kubelet reports the actual
// values.
var reportedLabels = []string{corev1.LabelTopologyZone, corev1.LabelTopologyRegion, corev1.LabelInstanceTypeStable}

// Config configures a [Controller]. All fields but Repairs are REQUIRED.
type Config struct {
	// Live reads from the API server.
	Live client.Reader
	// CloudProvider determines which NodeClaims belong to this provider.
	CloudProvider cloudprovider.CloudProvider
	// Agent receives the reports.
	Agent agentv1alpha1.ClaimServiceClient
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Recorder records events.
	Recorder events.Recorder
	// Reconnected receives an event whenever the shim follows an agent again. Each begins a round.
	Reconnected <-chan event.GenericEvent
	// Repairs is that of package cloudprovider's Config.
	Repairs bool
	// Interval is the time between two rounds.
	Interval time.Duration
	// Timeout bounds each call to the agent.
	Timeout time.Duration
	// Clock provides the time.
	Clock clock.PassiveClock
}

// Controller reports the NodeClaims and Nodes to the agent.
type Controller struct {
	Config

	begin   sync.Once // the first round
	asked   chan event.GenericEvent
	verdict atomic.Pointer[verdict] // nil before the first answer
	turned  chan struct{}
}

// New returns the controller.
func New(c Config) *Controller {
	return &Controller{Config: c, asked: make(chan event.GenericEvent, 1), turned: make(chan struct{}, 1)}
}

// Soon requests a round within seconds, for Nodes that the agent should know of before the next
// interval. It does not block; requests made close together result in one round. It is safe for
// concurrent use.
func (c *Controller) Soon() {
	select {
	case c.asked <- event.GenericEvent{}:
	default: // a round is requested already
	}
}

// Refused returns the agent's error if it refuses this cluster's live sets, because the shim has
// the identity of another cluster's, and nil if the last set was accepted. known is false, and the
// error nil, until the agent has answered a set of this process. It is safe for concurrent use.
func (c *Controller) Refused() (known bool, err error) {
	verdict := c.verdict.Load()
	if verdict == nil {
		return false, nil
	}
	return true, verdict.refused
}

// RefusalChanges receives a value after the result of [Controller.Refused] has changed. It has one
// reader.
func (c *Controller) RefusalChanges() <-chan struct{} { return c.turned }

// verdict is the agent's answer to a live set.
type verdict struct{ refused error }

// setVerdict records whether the agent refuses the live sets, and reports a change.
func (c *Controller) setVerdict(refused error) {
	if before := c.verdict.Swap(&verdict{refused}); before != nil && before.refused == nil && refused == nil {
		return
	}
	select {
	case c.turned <- struct{}{}:
	default: // a change is waiting to be read
	}
}

// Reconcile runs one round. After an error the next round follows with backoff and begins with a
// new token.
func (c *Controller) Reconcile(ctx context.Context) (reconciler.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	// An alert on the age could not see that no round has ever succeeded.
	c.begin.Do(func() { lastSuccess.Set(float64(c.Clock.Now().Unix()), nil) })
	if err := c.sync(ctx); err != nil {
		errorsTotal.Inc(nil)
		return reconciler.Result{}, fmt.Errorf("syncing claims: %w", err)
	}
	lastSuccess.Set(float64(c.Clock.Now().Unix()), nil)
	return reconciler.Result{RequeueAfter: c.Interval}, nil
}

func (c *Controller) sync(ctx context.Context) error {
	token, err := c.token(ctx)
	if err != nil {
		return err
	}
	spokeID, err := spoke.ID(ctx, c.Live)
	if err != nil {
		return err
	}
	// Not from the cache: a NodeClaim missing from it would lose its machine.
	nodeClaims := &karpv1.NodeClaimList{}
	if err := c.Live.List(ctx, nodeClaims); err != nil {
		return fmt.Errorf("listing NodeClaims: %w", err)
	}
	if nodeClaims.Continue != "" {
		return fmt.Errorf("the list of NodeClaims is incomplete: %d were received, and there are more", len(nodeClaims.Items))
	}
	nodes, err := c.nodes(ctx)
	if err != nil {
		return err
	}
	reports, complete := fitting(nodes)
	request := &agentv1alpha1.SyncClaimsRequest{
		Cluster: c.Cluster,
		Holder:  v1alpha1.Holder,
		Token:   token,
		// NodeClaims that are being deleted count: their machines go once core has drained them.
		LiveClaimIds: lo.FilterMap(nodeClaims.Items, func(nc karpv1.NodeClaim, _ int) (string, bool) {
			return string(nc.UID), nodeclaimutils.IsManaged(&nc, c.CloudProvider)
		}),
		Nodes:         reports,
		NodesComplete: complete,
		SpokeId:       spokeID,
		HolderRepairs: &c.Repairs,
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	response, err := c.Agent.SyncClaims(ctx, request)
	if err != nil {
		if agenterrors.IsSpokeMismatch(err) {
			c.setVerdict(err)
		}
		return fmt.Errorf("sending the live set: %w", err)
	}
	c.setVerdict(nil)
	collectedTotal.Add(float64(len(response.GetCollectedClaimIds())), nil)
	unknownClaims.Set(float64(len(response.GetUnknownClaimIds())), nil)
	if collected := response.GetCollectedClaimIds(); len(collected) > 0 {
		log.FromContext(ctx).Info("the agent releases claims without a NodeClaim", "claims", collected)
	}
	keptClaims.Set(float64(len(response.GetKeptClaimIds())), nil)
	if kept := response.GetKeptClaimIds(); len(kept) > 0 {
		log.FromContext(ctx).Info("claims that no NodeClaim owns and that the agent keeps, as their Nodes were registered or another cluster "+
			"may have made them; release those that are not needed", "claims", kept)
		c.announce(ctx, "ClaimsKept", fmt.Sprintf("%d claims in the hub have no NodeClaim and are kept, as their Nodes were "+
			"registered or another cluster may have made them: %s. Each MachineClaim has the reason; release those that are not needed.",
			len(kept), abridged(kept)))
	}
	if unknown := response.GetUnknownClaimIds(); len(unknown) > 0 {
		log.FromContext(ctx).Info("NodeClaims without a claim in the hub", "claims", unknown)
	}
	return nil
}

// announce publishes an event for the user on every NodeClass, since there is no object for a
// claim without a NodeClaim.
func (c *Controller) announce(ctx context.Context, reason, message string) {
	classes := &v1alpha1.ClusterAPINodeClassList{}
	if err := c.Live.List(ctx, classes); err != nil {
		log.FromContext(ctx).Error(err, "listing the NodeClasses for an event", "reason", reason, "event", message)
	}
	for i := range classes.Items {
		c.Recorder.Publish(events.Event{
			InvolvedObject: &classes.Items[i],
			Type:           corev1.EventTypeWarning,
			Reason:         reason,
			Message:        lo.Substring(message, 0, 1024),
			DedupeValues:   []string{string(classes.Items[i].UID), message},
		})
	}
}

// abridged returns the first of many ids, and the number of others.
func abridged(ids []string) string {
	const shown = 5
	if len(ids) <= shown {
		return strings.Join(ids, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(ids[:shown], ", "), len(ids)-shown)
}

func (c *Controller) token(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	response, err := c.Agent.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: c.Cluster, Holder: v1alpha1.Holder})
	if err != nil {
		return "", fmt.Errorf("requesting a sync token: %w", err)
	}
	return response.GetToken(), nil
}

// nodes describes all Nodes with a provider ID, registered or not, newest first. It reads them from
// the API server, because the agent also draws conclusions from a missing Node.
func (c *Controller) nodes(ctx context.Context) ([]described, error) {
	var all []described
	for next := ""; ; {
		page := &corev1.NodeList{} // a new list each time: reading into a used one keeps fields that the next page lacks
		if err := c.Live.List(ctx, page, client.Limit(nodesPerPage), client.Continue(next)); err != nil {
			return nil, fmt.Errorf("listing Nodes: %w", err)
		}
		for i := range page.Items {
			if node := &page.Items[i]; reported(node.Spec.ProviderID) {
				all = append(all, described{report: report(node), created: node.CreationTimestamp.Time})
			}
		}
		if next = page.Continue; next == "" {
			break
		}
	}
	slices.SortStableFunc(all, func(a, b described) int { return b.created.Compare(a.created) })
	return all, nil
}

// reported reports whether a Node with the provider ID can belong to a Machine. Cluster API's limit
// is below that of the agent's API, and a single Node with a longer ID must not invalidate the
// whole message.
func reported(providerID string) bool {
	return providerID != "" && len(providerID) <= maxProviderID && !placeholder.Is(providerID)
}

// described is the report of one Node, with the Node's age.
type described struct {
	report  *agentv1alpha1.NodeReport
	created time.Time
}

// fitting returns the reports that fit into one message, and whether every Node is in it. That the
// Nodes exist takes precedence. If the descriptions are too large, those of the oldest Nodes are
// left out: the agent has received them before.
func fitting(nodes []described) (reports []*agentv1alpha1.NodeReport, complete bool) {
	reports = make([]*agentv1alpha1.NodeReport, 0, len(nodes))
	size := 0
	for _, node := range nodes {
		bare := &agentv1alpha1.NodeReport{ProviderId: node.report.GetProviderId(), Unregistered: node.report.GetUnregistered()}
		if size += sizeOf(bare); size > maxReportBytes || len(reports) == maxReports {
			return reports, false
		}
		reports = append(reports, bare)
	}
	for i, node := range nodes {
		if size += sizeOf(node.report) - sizeOf(reports[i]); size > maxReportBytes {
			break
		}
		reports[i] = node.report
	}
	return reports, true
}

// sizeOf returns a report's size in the message, including the tag and length of its field.
func sizeOf(report *agentv1alpha1.NodeReport) int { return proto.Size(report) + 5 }

func report(node *corev1.Node) *agentv1alpha1.NodeReport {
	labels := lo.PickByKeys(node.Labels, reportedLabels)
	for label, is := range map[string]string{
		corev1.LabelArchStable: node.Status.NodeInfo.Architecture, corev1.LabelOSStable: node.Status.NodeInfo.OperatingSystem,
	} {
		if is != "" {
			labels[label] = is
		}
	}
	described := &agentv1alpha1.NodeReport{
		ProviderId:   node.Spec.ProviderID,
		Unregistered: registration.IsUnregistered(node),
		Labels:       labels,
	}
	// Before core considers the Node initialized, a device plugin may not have reported its
	// resources yet.
	learnable := max(len(node.Status.Capacity), len(node.Status.Allocatable)) <= maxReportResources
	if learnable && (node.Labels[karpv1.NodeRegisteredLabelKey] == "" || node.Labels[karpv1.NodeInitializedLabelKey] == "true") {
		described.Capacity = wire.Quantities(node.Status.Capacity)
		described.Allocatable = wire.Quantities(node.Status.Allocatable)
	}
	return described
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	after := func(d time.Duration) handler.Funcs {
		return handler.Funcs{
			GenericFunc: func(_ context.Context, _ event.GenericEvent, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				queue.AddAfter(reconcile.Request{}, d) // the singleton's key, so that there are never two requests
			},
		}
	}
	return controllerruntime.NewControllerManagedBy(m).
		Named(name).
		WatchesRawSource(singleton.Source()).
		WatchesRawSource(source.Channel(c.Reconnected, after(0))).
		WatchesRawSource(source.Channel(c.asked, after(gatherAsked))).
		WithOptions(controller.Options{
			// The default backoff grows to a quarter of an hour, which is too long after an outage.
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](time.Second, min(c.Interval, 30*time.Second)),
		}).
		Complete(singleton.AsReconciler(c))
}
