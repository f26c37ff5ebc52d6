// Package nodepools applies the NodePools and NodeClasses that the hub publishes, and reports the
// status of all NodePools to the hub.
//
// Only objects that this package created are ever changed or deleted: they carry a label with the
// name of the NodePoolSet. A user takes such an object over by removing the label. Nothing is
// removed before the agent has confirmed, from the hub's API server, that it is not published
// although its NodePoolSet exists.
package nodepools

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	controllerruntime "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

const (
	name = "nodepools.published"
	// FieldManager is the manager of the fields that the hub publishes.
	FieldManager = "karpenter-capi-published"
	// interval is how often the status is computed. A changed one is reported at once.
	interval = 15 * time.Second
	// repeatInterval is how often an unchanged status is reported. The hub may have lost it.
	repeatInterval = 5 * time.Minute
	// askInterval is how often the hub is asked for the missing NodePoolSet of an object.
	askInterval = 5 * time.Minute
	// maxReported is how many NodePools are reported in detail.
	maxReported = 64
)

// Published is the mirror of what the hub publishes.
type Published interface {
	List() ([]*agentv1alpha1.PublishedObject, uint64)
	Get(key string) (*agentv1alpha1.PublishedObject, bool)
	State() agentclient.State
	Subscribe() *agentclient.Subscription
}

// InstanceTypes knows the prices of a NodePool's machines. Karpenter's CloudProvider implements it.
type InstanceTypes interface {
	GetInstanceTypes(ctx context.Context, nodePool *karpv1.NodePool) ([]*cloudprovider.InstanceType, error)
}

// Config configures a [Controller]. All fields are REQUIRED.
type Config struct {
	// Kube reads from a cache. Live reads from the API server.
	Kube client.Client
	Live client.Reader
	// Published is what the hub publishes.
	Published Published
	// Agent confirms removals, and receives the status.
	Agent agentv1alpha1.NodePoolServiceClient
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// InstanceTypes knows the prices.
	InstanceTypes InstanceTypes
	// Recorder records events.
	Recorder events.Recorder
	// Timeout bounds calls to the agent.
	Timeout time.Duration
	// Clock provides the time.
	Clock clock.PassiveClock
}

// Controller applies and reports. Its fields are used by one goroutine at a time.
type Controller struct {
	Config

	// applied is what the API server had after each object was last applied, by key.
	applied map[string]applied
	// kept is when the hub was last seen without the NodePoolSet of an object that is published no
	// longer, by the object's key.
	kept map[string]time.Time
	// reported is the last report that the agent accepted, at reportedAt. The next one is not sent
	// before nextReport.
	reported               *agentv1alpha1.ReportNodePoolsRequest
	reportedAt, nextReport time.Time
	// unserved is true once it was logged that the agent does not serve this.
	unserved bool
}

// New returns the controller.
func New(c Config) *Controller {
	return &Controller{Config: c, applied: map[string]applied{}, kept: map[string]time.Time{}}
}

// Reconcile applies everything that is published, removes what no longer is, and reports. Without a
// complete view of what is published, it does nothing.
func (c *Controller) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	ctx = injection.WithControllerName(ctx, name)
	again := reconcile.Result{RequeueAfter: interval}
	state := c.Published.State()
	if !state.Synced {
		if grpcstatus.Code(state.LastError) == codes.Unimplemented && !c.unserved {
			c.unserved = true
			log.FromContext(ctx).Info("the agent does not publish NodePools: it is too old, or runs without --publish-node-pools")
		}
		return again, nil
	}
	objects, _ := c.Published.List()
	results := make([]*agentv1alpha1.AppliedObject, 0, len(objects))
	for _, object := range objects { // NodeClasses come before NodePools
		if object.GetProblem() != "" {
			continue
		}
		message := c.apply(ctx, object)
		results = append(results, &agentv1alpha1.AppliedObject{
			Kind: object.GetKind(), Name: object.GetName(), Set: object.GetSet(), Revision: object.GetRevision(),
			Applied: message == "", Message: truncated(message),
		})
	}
	if err := c.removeUnpublished(ctx); err != nil {
		return reconcile.Result{}, err
	}
	report, err := c.status(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	report.Objects = results
	c.report(ctx, report)
	return again, nil
}

// report sends the report if it is news. A failed call is repeated with what is current at the next
// interval: the hub shows an older status meanwhile, and nothing depends on it.
func (c *Controller) report(ctx context.Context, report *agentv1alpha1.ReportNodePoolsRequest) {
	now := c.Clock.Now()
	if now.Before(c.nextReport) || proto.Equal(report, c.reported) && now.Sub(c.reportedAt) < repeatInterval {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	if _, err := c.Agent.ReportNodePools(ctx, report); err != nil {
		if delay, told := agenterrors.RetryDelay(err); told {
			c.nextReport = now.Add(delay)
		}
		log.FromContext(ctx).V(1).Info("the status of the NodePools is not reported", "cause", err.Error())
		return
	}
	c.reported, c.reportedAt = report, c.Clock.Now()
}

// truncated limits a message to what a report may contain.
func truncated(message string) string {
	const most = 1024
	if runes := []rune(message); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return message
}

// Register adds the controller to the manager.
func (c *Controller) Register(_ context.Context, m manager.Manager) error {
	one := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return []reconcile.Request{{}} })
	changes := builder.WithPredicates(predicate.Or(
		predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{},
	))
	err := controllerruntime.NewControllerManagedBy(m).
		Named(name).
		Watches(&karpv1.NodePool{}, one, changes).
		Watches(&v1alpha1.ClusterAPINodeClass{}, one, changes).
		WatchesRawSource(source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			queue.Add(reconcile.Request{})
			go func() {
				subscription := c.Published.Subscribe()
				defer subscription.Close()
				for {
					select {
					case <-ctx.Done():
						return
					case <-subscription.Changed():
						subscription.Take()
						queue.Add(reconcile.Request{})
					}
				}
			}()
			return nil
		})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Complete(c)
	if err != nil {
		return fmt.Errorf("setting up %s: %w", name, err)
	}
	return nil
}
