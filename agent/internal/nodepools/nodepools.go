// Package nodepools publishes the objects of NodePoolSets to the Clusters that they select, and
// reports in their status whether the spokes have applied them.
package nodepools

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/fairqueue"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/initialsync"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/watchcache"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Config configures a [Publisher].
type Config struct {
	// Cache receives what is published to each Cluster, by [Key]. REQUIRED.
	Cache *watchcache.Cache[*agentv1alpha1.PublishedObject]
	// Scope determines which Clusters are served.
	Scope hub.Scope
	// Recorder records events on NodePoolSets. REQUIRED.
	Recorder events.EventRecorder
	// Registerer receives the metrics. If nil, there are none.
	Registerer prometheus.Registerer
}

// Publisher fills the cache. Use [New].
type Publisher struct {
	Config

	client      client.Client
	live        client.Reader
	initialSync *initialsync.Tracker
	clusters    *prometheus.GaugeVec
	// counted are the sets that the metric shows, by namespace. Only the controller's single worker
	// uses it.
	counted map[string][]string
}

// Equal reports whether two objects are the same to every subscriber.
func Equal(a, b *agentv1alpha1.PublishedObject) bool { return proto.Equal(a, b) }

// New returns a publisher. It fills its cache once it has been set up with a manager.
func New(c Config) (*Publisher, error) {
	p := &Publisher{
		Config: c, initialSync: initialsync.New(c.Cache.SetReady), counted: map[string][]string{},
		clusters: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "capi_agent_node_pool_set_clusters",
			Help: "Number of Clusters that a NodePoolSet selects, by state: applied, failing, or waiting for the first report.",
		}, []string{"namespace", "node_pool_set", "state"}),
	}
	if c.Registerer != nil {
		if err := c.Registerer.Register(p.clusters); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return p, nil
}

// SetupWithManager adds the publisher to the manager. A request names a namespace: the Clusters and
// the NodePoolSets of a namespace concern each other, and both are few.
func (p *Publisher) SetupWithManager(mgr manager.Manager) error {
	p.client, p.live = mgr.GetClient(), mgr.GetAPIReader()
	namespace := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, object client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: object.GetNamespace()}}}
	})
	err := builder.ControllerManagedBy(mgr).Named("nodepoolsets").
		WithOptions(controller.Options{
			NeedLeaderElection: new(false), SkipNameValidation: new(true), NewQueue: fairqueue.New(fairqueue.OwnerOfNamespace),
		}).
		Watches(&v1alpha1.NodePoolSet{}, namespace, builder.WithPredicates(predicate.Funcs{UpdateFunc: writesAnew})).
		Watches(&clusterv1.Cluster{}, namespace,
			builder.WithPredicates(predicate.Or(predicate.LabelChangedPredicate{}, predicate.GenerationChangedPredicate{}))).
		Watches(&v1alpha1.Spoke{}, namespace, builder.WithPredicates(predicate.Funcs{UpdateFunc: reportsAnew})).
		Complete(p)
	if err != nil {
		return fmt.Errorf("setting up the controller of NodePoolSets: %w", err)
	}
	err = mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			return nil // only because ctx ended
		}
		return p.expect(ctx)
	}))
	if err != nil {
		return fmt.Errorf("adding the publisher: %w", err)
	}
	return nil
}

// reportsAnew reports whether a Spoke shows that something else became of what is published. A
// Spoke is also written for each time that its shim synchronizes.
func reportsAnew(e event.UpdateEvent) bool {
	before, is := e.ObjectOld.(*v1alpha1.Spoke)
	after, also := e.ObjectNew.(*v1alpha1.Spoke)
	return !is || !also || !equality.Semantic.DeepEqual(before.Status.Published, after.Status.Published)
}

// writesAnew reports whether a NodePoolSet is another one, or has another status: an older write of
// another agent is corrected.
func writesAnew(e event.UpdateEvent) bool {
	before, is := e.ObjectOld.(*v1alpha1.NodePoolSet)
	after, also := e.ObjectNew.(*v1alpha1.NodePoolSet)
	return !is || !also || before.Generation != after.Generation || !equality.Semantic.DeepEqual(before.Status, after.Status)
}

// expect lists the namespaces whose publication makes the first complete view.
func (p *Publisher) expect(ctx context.Context) error {
	var list v1alpha1.NodePoolSetList
	if err := p.client.List(ctx, &list); err != nil {
		return fmt.Errorf("listing NodePoolSets: %w", err)
	}
	keys := make([]types.NamespacedName, 0, len(list.Items))
	for i := range list.Items {
		keys = append(keys, types.NamespacedName{Name: list.Items[i].Namespace})
	}
	p.initialSync.Expect(keys)
	return nil
}

// Reconcile publishes the NodePoolSets of a namespace, and writes their status.
func (p *Publisher) Reconcile(ctx context.Context, request reconcile.Request) (_ reconcile.Result, err error) {
	// Also after a panic: no agent may stay unready because of one namespace. Shims remove nothing
	// that is missing from the view before [Publisher.List] has confirmed it.
	defer func() { p.initialSync.SeenUnless(err, request.NamespacedName) }()
	in := client.InNamespace(request.Name)
	var (
		sets     v1alpha1.NodePoolSetList
		clusters clusterv1.ClusterList
		spokes   v1alpha1.SpokeList
	)
	for _, list := range []client.ObjectList{&sets, &clusters, &spokes} {
		if err := p.client.List(ctx, list, in); err != nil {
			return reconcile.Result{}, fmt.Errorf("listing %T: %w", list, err)
		}
	}
	byAge(sets.Items)
	statuses := map[string]*v1alpha1.SpokeStatus{}
	for i := range spokes.Items {
		statuses[spokes.Items[i].Name] = &spokes.Items[i].Status
	}
	outcomes, all := map[string]*outcome{}, entriesOf(sets.Items)
	for name, entries := range all {
		outcomes[name] = newOutcome(name, entries)
	}
	served := map[types.NamespacedName]bool{}
	for i := range clusters.Items {
		name := client.ObjectKeyFromObject(&clusters.Items[i])
		if !p.Scope.Contains(name) {
			continue
		}
		served[name] = true
		published, not := plan(clusters.Items[i].Labels, sets.Items, all)
		p.publish(name, published)
		for j := range sets.Items {
			if selects(&sets.Items[j], clusters.Items[i].Labels) {
				outcomes[sets.Items[j].Name].add(name.Name, published, not, statuses[name.Name])
			}
		}
	}
	for _, name := range p.Cache.Clusters() {
		if name.Namespace == request.Name && !served[name] {
			p.publish(name, nil)
		}
	}
	// The view is complete now. Whether a status can be written depends on what users wrote, on
	// rights and on admission policies, and nothing that is served depends on it.
	p.initialSync.Seen(request.NamespacedName)
	p.count(request.Name, sets.Items, outcomes)
	var failed []error
	for i := range sets.Items {
		failed = append(failed, p.write(ctx, &sets.Items[i], outcomes[sets.Items[i].Name]))
	}
	return reconcile.Result{}, errors.Join(failed...)
}

// count updates the metric of a namespace's sets.
func (p *Publisher) count(namespace string, sets []v1alpha1.NodePoolSet, outcomes map[string]*outcome) {
	before := p.counted[namespace]
	delete(p.counted, namespace)
	for i := range sets {
		name := sets[i].Name
		p.counted[namespace] = append(p.counted[namespace], name)
		o := outcomes[name]
		p.clusters.WithLabelValues(namespace, name, "applied").Set(float64(o.applied))
		p.clusters.WithLabelValues(namespace, name, "failing").Set(float64(len(o.failing)))
		p.clusters.WithLabelValues(namespace, name, "waiting").Set(float64(len(o.waiting)))
	}
	for _, name := range before {
		if !slices.Contains(p.counted[namespace], name) {
			p.clusters.DeletePartialMatch(prometheus.Labels{"namespace": namespace, "node_pool_set": name})
		}
	}
}

// publish makes the objects the Cluster's whole view.
func (p *Publisher) publish(cluster types.NamespacedName, objects []*agentv1alpha1.PublishedObject) {
	gone := map[string]bool{}
	p.Cache.Each(cluster, func(object *agentv1alpha1.PublishedObject) { gone[Key(object)] = true })
	for _, object := range objects {
		delete(gone, Key(object))
		p.Cache.Set(cluster, Key(object), object)
	}
	for key := range gone {
		p.Cache.Remove(cluster, key)
	}
}

// List returns what is published to a Cluster, and the names of the NodePoolSets that exist, as the
// hub's API server has them now. The Cluster must have been read before: otherwise NodePoolSets
// that move with it may be missing.
func (p *Publisher) List(ctx context.Context, cluster *clusterv1.Cluster) ([]*agentv1alpha1.PublishedObject, []string, error) {
	var sets v1alpha1.NodePoolSetList
	if err := p.live.List(ctx, &sets, client.InNamespace(cluster.Namespace)); err != nil {
		return nil, nil, fmt.Errorf("listing NodePoolSets: %w", err)
	}
	byAge(sets.Items)
	published, _ := plan(cluster.Labels, sets.Items, entriesOf(sets.Items))
	var names []string
	for i := range sets.Items {
		if sets.Items[i].DeletionTimestamp.IsZero() {
			names = append(names, sets.Items[i].Name)
		}
	}
	slices.Sort(names)
	return published, names, nil
}

// write writes a set's status if it has changed.
func (p *Publisher) write(ctx context.Context, set *v1alpha1.NodePoolSet, o *outcome) error {
	if !set.DeletionTimestamp.IsZero() {
		return nil
	}
	before := set.DeepCopy()
	set.Status.ObservedGeneration = set.Generation
	set.Status.Clusters, set.Status.AppliedClusters, set.Status.FailingClusters = &o.clusters, &o.applied, new(int32(len(o.failing)))
	condition := o.condition()
	condition.ObservedGeneration = set.Generation
	meta.SetStatusCondition(&set.Status.Conditions, condition)
	if equality.Semantic.DeepEqual(before.Status, set.Status) {
		return nil
	}
	if err := p.client.Status().Patch(ctx, set, client.MergeFrom(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("writing the status of the NodePoolSet %s: %w", client.ObjectKeyFromObject(set), err)
	}
	was := meta.FindStatusCondition(before.Status.Conditions, v1alpha1.ReadyCondition)
	if condition.Status == metav1.ConditionFalse && (was == nil || was.Reason != condition.Reason || was.Message != condition.Message) {
		p.Recorder.Eventf(set, nil, "Warning", condition.Reason, "Publish", "%s", cut(condition.Message, maxNote))
	}
	return nil
}
