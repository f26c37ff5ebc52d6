// Package nodegroupview maintains the node groups of every Cluster. Each is updated individually
// when one of its inputs changes: its MachineDeployment, its Cluster, its infrastructure template,
// what its Nodes report, whether its MachineSets create Machines, the quotas of its namespace, the
// price list.
package nodegroupview

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/samber/lo"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/infrastructure"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/initialsync"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/learned"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricelist"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/pricing"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// maxEventReason is the maximum length of an event's reason.
const maxEventReason = 128

// maxNote is how many bytes an event's text may have.
const maxNote = 1024

// templateRetry is how soon, at the latest, an unreadable template is read again.
const templateRetry = 30 * time.Second

// Config configures a [View].
type Config struct {
	// Cache receives the node groups, by ID. REQUIRED.
	Cache *watchcache.Cache[*agentv1alpha1.NodeGroup]
	// Held receives the node groups of the holder [v1alpha1.ClusterAutoscaler], by ID. Nil leaves
	// them out.
	Held *watchcache.Cache[nodegroup.NodeGroup]
	// Templates provides the watches of infrastructure templates, and reads only what it watches.
	// It is not the manager's cache ([infrastructure.Config]). REQUIRED.
	Templates cache.Cache
	// Scope determines which Clusters are served.
	Scope hub.Scope
	// Settings apply to the machines of all node groups.
	Settings capacity.Settings
	// Recorder records an event for each problem. REQUIRED.
	Recorder events.EventRecorder
	// Registerer registers the metrics. Nil registers none.
	Registerer prometheus.Registerer
	// CoolingDown returns the refusal of a group that cools down after a failed claim, and nil if
	// the group does not cool down. REQUIRED.
	CoolingDown func(ctx context.Context, group types.NamespacedName) (*eligibility.Refusal, error)
	// Learned provides what real Nodes reported. REQUIRED.
	Learned *learned.Nodes
	// Pricing is the pricing policy. Its list is replaced by the one of PriceList.
	Pricing pricing.Policy
	// PriceList may be nil.
	PriceList *pricelist.Follower
	// Clock determines when a cool-down is over, and when the versions of infrastructure templates
	// are looked up again. REQUIRED.
	Clock clock.PassiveClock
}

// View maintains the node groups. Use [New].
type View struct {
	Config

	client      client.Client
	templates   *infrastructure.Templates
	initialSync *initialsync.Tracker
	quotas      *quotas // nil before SetupWithManager
	problems    *prometheus.GaugeVec

	mu     sync.Mutex
	groups map[types.NamespacedName]*entry
}

// entry is the state kept for a MachineDeployment that has opted in.
type entry struct {
	cluster  types.NamespacedName
	uid      types.UID
	reported map[capacity.Problem]struct{}
	// template is the one that the group was last described with, nil if it could not be read, and
	// ref is the reference to it.
	ref      clusterv1.ContractVersionedObjectReference
	template *unstructured.Unstructured
}

// New returns a View. It fills its cache once it has been set up with a manager.
func New(c Config) (*View, error) {
	view := &View{
		Config:      c,
		initialSync: initialsync.New(c.complete),
		groups:      map[types.NamespacedName]*entry{},
		problems: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "capi_agent_node_group_problems",
			Help: "Number of unusable values in a node group's description.",
		}, []string{"namespace", "machine_deployment"}),
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(view.problems); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return view, nil
}

// complete marks the views as complete.
func (c Config) complete() {
	if c.Held != nil {
		c.Held.SetReady()
	}
	c.Cache.SetReady()
}

// set puts a group into the views.
func (c Config) set(group nodegroup.NodeGroup) {
	switch {
	case c.Held == nil:
	case group.Limits.Holder == v1alpha1.ClusterAutoscaler:
		c.Held.Set(group.Cluster, group.ID(), group)
	default:
		c.Held.Remove(group.Cluster, group.ID())
	}
	c.Cache.Set(group.Cluster, group.ID(), protoconv.NodeGroup(group))
}

// remove takes a group of a Cluster out of the views.
func (c Config) remove(cluster types.NamespacedName, id string) {
	if c.Held != nil {
		c.Held.Remove(cluster, id)
	}
	c.Cache.Remove(cluster, id)
}

// SetupWithManager adds the View to the manager. The indexes of package hub must have been
// added.
func (c *View) SetupWithManager(mgr manager.Manager) error {
	c.client = mgr.GetClient()
	changedTemplates := make(chan event.TypedGenericEvent[template], 1024)
	c.templates = infrastructure.New(infrastructure.Config{
		Reader: mgr.GetAPIReader(),
		Cache:  c.Templates,
		Clock:  c.Clock,
		Changed: func(gk schema.GroupKind, key types.NamespacedName) {
			changedTemplates <- event.TypedGenericEvent[template]{Object: template{gk, key}}
		},
	})
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { return c.expect(ctx, mgr) })); err != nil {
		return fmt.Errorf("adding the view of node groups: %w", err)
	}
	c.quotas = newQuotas(mgr.GetClient(), mgr.GetCache(), c.Scope.Namespaces())
	if err := mgr.Add(c.quotas); err != nil {
		return fmt.Errorf("adding the quotas: %w", err)
	}
	controlled := builder.ControllerManagedBy(mgr).
		Named("catalogue").
		WithOptions(controller.Options{
			NeedLeaderElection: new(false), MaxConcurrentReconciles: 8, SkipNameValidation: new(true),
			NewQueue:    fairqueue.New(fairqueue.OwnerOfDeployment(mgr.GetCache())),
			RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](10*time.Millisecond, templateRetry),
		}).
		For(&clusterv1.MachineDeployment{}, builder.WithPredicates(statusIgnored())).
		Watches(&clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(c.deploymentsOfCluster), builder.WithPredicates(clusterChanges())).
		Watches(&v1alpha1.MachineClaim{}, handler.EnqueueRequestsFromMapFunc(deploymentOfFailedClaim)).
		Watches(&clusterv1.MachineSet{}, handler.EnqueueRequestsFromMapFunc(deploymentOfSet), builder.WithPredicates(blockedChanges())).
		WatchesRawSource(each(c.quotas.changes, c.deploymentsOfQuota)).
		WatchesRawSource(each(changedTemplates, c.deploymentsOfTemplate)).
		WatchesRawSource(each(c.Learned.Changes(), itself))
	if c.PriceList != nil {
		controlled = controlled.WatchesRawSource(each(c.PriceList.Changes(), c.allDeployments))
	}
	if err := controlled.Complete(c); err != nil {
		return fmt.Errorf("setting up the controller of node groups: %w", err)
	}
	return nil
}

// each returns a source of the requests for each event of a channel. The caches confine panics in
// the map functions of what they watch ([hub.NewCache]), and nothing else would do so for a
// channel.
func each[T any](changes <-chan event.TypedGenericEvent[T], requests handler.TypedMapFunc[T, reconcile.Request]) source.Source {
	return source.TypedChannel(changes, handler.TypedEnqueueRequestsFromMapFunc(func(ctx context.Context, object T) (mapped []reconcile.Request) {
		_ = panics.Confined(log.FromContext(ctx), panics.Objects, "a change is ignored because of a bug in the agent", func() error {
			mapped = requests(ctx, object)
			return nil
		}, "object", object)
		return mapped
	}))
}

// template names an infrastructure template.
type template struct {
	gk  schema.GroupKind
	key types.NamespacedName
}

// expect lists the MachineDeployments that make up the first complete view.
func (c *View) expect(ctx context.Context, mgr manager.Manager) error {
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		return nil // only because ctx ended
	}
	var list clusterv1.MachineDeploymentList
	if err := c.client.List(ctx, &list); err != nil {
		return fmt.Errorf("listing MachineDeployments: %w", err)
	}
	keys := make([]types.NamespacedName, 0, len(list.Items))
	for i := range list.Items {
		keys = append(keys, client.ObjectKeyFromObject(&list.Items[i]))
	}
	c.initialSync.Expect(keys)
	return nil
}

// statusIgnored drops updates that only change the status of a MachineDeployment, except for the
// beginning and the end of a rollout.
func statusIgnored() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.LabelChangedPredicate{}, predicate.AnnotationChangedPredicate{},
		predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero() ||
				rolling(e.ObjectOld) != rolling(e.ObjectNew)
		}})
}

func rolling(object client.Object) bool {
	md, ok := object.(*clusterv1.MachineDeployment)
	return ok && nodegroup.Rolling(md)
}

// clusterChanges drops updates that only change the status of a Cluster.
func clusterChanges() predicate.Predicate {
	return predicate.Or(predicate.GenerationChangedPredicate{}, predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		return e.ObjectOld.GetDeletionTimestamp().IsZero() != e.ObjectNew.GetDeletionTimestamp().IsZero()
	}})
}

// deploymentOfFailedClaim returns the group that cools down because of the claim. It returns none
// for claims that have not failed.
func deploymentOfFailedClaim(_ context.Context, object client.Object) []reconcile.Request {
	claim, ok := object.(*v1alpha1.MachineClaim)
	if !ok || claim.Status.FailedAt == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: claim.Namespace, Name: claim.Spec.NodeGroup}}}
}

func (c *View) deploymentsOfCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	return c.deployments(ctx, cluster.GetNamespace(), hub.DeploymentsByCluster, cluster.GetName())
}

func (c *View) deploymentsOfTemplate(ctx context.Context, t template) []reconcile.Request {
	return c.deployments(ctx, t.key.Namespace, hub.DeploymentsByTemplate, hub.TemplateIndex(t.gk.Group, t.gk.Kind, t.key.Name))
}

func (c *View) deploymentsOfQuota(ctx context.Context, quota types.NamespacedName) []reconcile.Request {
	return c.list(ctx, client.InNamespace(quota.Namespace), client.HasLabels{v1alpha1.MemberLabel})
}

func (c *View) allDeployments(ctx context.Context, _ types.NamespacedName) []reconcile.Request {
	return c.list(ctx, client.HasLabels{v1alpha1.MemberLabel})
}

// itself maps events that already name the MachineDeployment.
func itself(_ context.Context, deployment types.NamespacedName) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: deployment}}
}

func (c *View) deployments(ctx context.Context, namespace, index, value string) []reconcile.Request {
	return c.list(ctx, client.InNamespace(namespace), client.MatchingFields{index: value})
}

func (c *View) list(ctx context.Context, options ...client.ListOption) []reconcile.Request {
	var list clusterv1.MachineDeploymentList
	if err := c.client.List(ctx, &list, options...); err != nil {
		log.FromContext(ctx).Error(err, "looking up MachineDeployments")
		return nil
	}
	requests := make([]reconcile.Request, 0, len(list.Items))
	for i := range list.Items {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])})
	}
	return requests
}

// Reconcile updates one node group.
func (c *View) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	// Also after an error: one group must not keep the agent from serving the others.
	defer c.initialSync.Seen(request.NamespacedName)
	md := &clusterv1.MachineDeployment{}
	err := c.client.Get(ctx, request.NamespacedName, md)
	if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("reading the MachineDeployment: %w", err)
	}
	clusterName := types.NamespacedName{Namespace: request.Namespace, Name: md.Spec.ClusterName}
	if err != nil || !nodegroup.IsMember(md) || !c.Scope.Contains(clusterName) {
		c.forget(request.NamespacedName)
		return reconcile.Result{}, nil
	}
	cluster, err := c.cluster(ctx, clusterName)
	if err != nil {
		return reconcile.Result{}, err
	}
	ref := md.Spec.Template.Spec.InfrastructureRef
	object, templateErr := c.templates.Get(ctx, ref, md.Namespace)
	passing := templateErr != nil && !errors.Is(templateErr, infrastructure.ErrUnusable)
	if templateErr != nil {
		// While a provider is upgraded, its conversion webhook may not answer for minutes, and its
		// CRD may be missing. A group that lost its description meanwhile would be refused, or look
		// like another machine.
		object = c.lastTemplate(md)
	}
	described := capacity.Template{Object: object}
	if templateErr != nil {
		described.Problem = &capacity.Problem{
			Field: "spec.template.spec.infrastructureRef", Value: ref.Kind + "." + ref.APIGroup + "/" + ref.Name, Message: shown(templateErr),
		}
	}
	prices := c.Pricing
	if prices.List, err = c.PriceList.List(ctx); err != nil {
		return reconcile.Result{}, err
	}
	group := nodegroup.Of(md, nodegroup.Sources{
		Cluster: cluster, Template: described, Settings: c.Settings, Pricing: prices,
		Learned: c.Learned.Of(request.NamespacedName, &md.Spec.Template.Spec),
	})
	stranded := c.Learned.Stranded(request.NamespacedName)
	if stranded != nil {
		group.Problems = append(group.Problems, *stranded)
	}
	noMachines, err := c.NoMachines(ctx, md)
	if err != nil {
		return reconcile.Result{}, err
	}
	cooling, err := c.CoolingDown(ctx, request.NamespacedName)
	if err != nil {
		return reconcile.Result{}, err
	}
	group.Limits = group.Limits.With(noMachines).With(cooling)
	if passing && object == nil {
		group.Limits = group.Limits.With(&eligibility.Refusal{
			NodeGroup: md.Name, Reason: eligibility.Invalid, Message: "its infrastructure template has not been read yet, so its machines are unknown",
		})
	}
	c.publish(md, group, object)
	if passing {
		return reconcile.Result{}, templateErr
	}
	var again []time.Duration
	if cooling != nil {
		again = append(again, max(time.Second, cooling.RetryAt.Sub(c.Clock.Now())))
	}
	if templateErr != nil {
		// No watch reports what is missing here: the CRD or its label, the agent's rights, or a
		// template whose kind is not watched yet.
		again = append(again, templateRetry)
	}
	if stranded != nil {
		again = append(again, learned.ReportLife) // after the last report to this agent, nothing else ends the problem
	}
	return reconcile.Result{RequeueAfter: lo.Min(again)}, nil
}

// lastTemplate returns the template that a group was last described with, nil if there is none or
// if the group refers to another one now.
func (c *View) lastTemplate(md *clusterv1.MachineDeployment) *unstructured.Unstructured {
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.groups[client.ObjectKeyFromObject(md)]
	if known == nil || known.uid != md.UID || known.ref != md.Spec.Template.Spec.InfrastructureRef {
		return nil
	}
	return known.template
}

// shown returns what callers see of an error about a template. The API server's text stays in the
// hub, where the log has it.
func shown(err error) string {
	if errors.Is(err, infrastructure.ErrUnusable) {
		return err.Error()
	}
	return "the template cannot be read now; its last content applies if it was read before. The agent tries again, and its log has the cause"
}

func (c *View) cluster(ctx context.Context, name types.NamespacedName) (*clusterv1.Cluster, error) {
	cluster := &clusterv1.Cluster{}
	err := c.client.Get(ctx, name, cluster)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the Cluster: %w", err)
	}
	return cluster, nil
}

// publish puts a group into the cache and reports each of its problems once for as long as the
// problem lasts.
func (c *View) publish(md *clusterv1.MachineDeployment, group nodegroup.NodeGroup, template *unstructured.Unstructured) {
	fresh, all := c.know(md, group, template)
	c.problems.WithLabelValues(group.Key.Namespace, group.Key.Name).Set(float64(all))
	c.set(group)
	for _, problem := range fresh {
		note := fmt.Sprintf("%s: %.256q %s", problem.Field, problem.Value, problem.Message)
		c.Recorder.Eventf(md, nil, corev1.EventTypeWarning, eventReason(problem.Field), "DescribeNodeGroup", "%s",
			strings.ToValidUTF8(note[:min(len(note), maxNote)], ""))
	}
}

// know records what is published of a group. It returns the problems that were not reported yet,
// and the number of all.
func (c *View) know(
	md *clusterv1.MachineDeployment, group nodegroup.NodeGroup, template *unstructured.Unstructured,
) (fresh []capacity.Problem, all int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	known := c.groups[group.Key]
	if known == nil || known.uid != md.UID {
		if known != nil && known.cluster != group.Cluster {
			c.remove(known.cluster, group.ID())
		}
		known = &entry{uid: md.UID, reported: map[capacity.Problem]struct{}{}}
		c.groups[group.Key] = known
	}
	if known.cluster != group.Cluster {
		c.remove(known.cluster, group.ID())
		known.cluster = group.Cluster
	}
	present := make(map[capacity.Problem]struct{}, len(group.Problems))
	for _, problem := range group.Problems {
		if _, reported := known.reported[problem]; !reported {
			fresh = append(fresh, problem)
		}
		present[problem] = struct{}{}
	}
	known.reported = present
	known.ref, known.template = md.Spec.Template.Spec.InfrastructureRef, template
	return fresh, len(present)
}

// eventReason derives the reason from the field. Events with the same object and reason are
// aggregated, and only the text of the first one is kept.
func eventReason(field string) string {
	parts := strings.FieldsFunc(field, func(r rune) bool { return strings.ContainsRune("./[] ", r) })
	var reason strings.Builder
	reason.WriteString("Invalid")
	if len(parts) > 0 {
		for word := range strings.SplitSeq(parts[len(parts)-1], "-") {
			reason.WriteString(strings.ToUpper(word[:min(1, len(word))]) + word[min(1, len(word)):])
		}
	}
	return reason.String()[:min(reason.Len(), maxEventReason)]
}

func (c *View) forget(key types.NamespacedName) {
	c.Learned.Forget(key)
	c.mu.Lock()
	known := c.groups[key]
	delete(c.groups, key)
	c.mu.Unlock()
	if known == nil {
		return
	}
	c.problems.DeleteLabelValues(key.Namespace, key.Name)
	c.remove(known.cluster, nodegroup.ID(key))
}

// Equal reports whether two node groups are the same to watchers.
func Equal(a, b *agentv1alpha1.NodeGroup) bool { return proto.Equal(a, b) }

// EqualHeld reports whether two node groups are the same to the cluster-autoscaler.
func EqualHeld(a, b nodegroup.NodeGroup) bool { return reflect.DeepEqual(a, b) }
