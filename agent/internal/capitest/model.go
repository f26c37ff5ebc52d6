package capitest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Behaviour is what the infrastructure does with a Machine. With the zero value every step succeeds
// at once.
type Behaviour struct {
	// Provision is the time from when the Machine is first seen until it has its provider ID.
	Provision time.Duration
	// Join is the time after that until the Node joins.
	Join time.Duration
	// Drain is how long the drain of a Node takes, unless draining is excluded.
	Drain time.Duration
	// Terminate is how long the deletion of the instance takes.
	Terminate time.Duration
	// FailureReason, if not empty, prevents the instance from being provisioned. The Machine's
	// InfrastructureReady condition is False with this reason and FailureMessage.
	FailureReason, FailureMessage string
	// HoldProvision prevents the instance from being provisioned, without a failure.
	HoldProvision bool
	// HoldJoin prevents the Node from joining.
	HoldJoin bool
	// HoldTerminate prevents the instance from being deleted.
	HoldTerminate bool
}

// Options configure a [Model].
type Options struct {
	// Namespaces limits the model to these namespaces. Empty means all.
	Namespaces []string
	// Behaviour returns the behaviour for a Machine. Nil means the zero Behaviour. It is called
	// concurrently, each time a Machine is reconciled, and must not modify the Machine.
	Behaviour func(*clusterv1.Machine) Behaviour
	// ProviderID returns the provider ID for a Machine. Nil means `test://<namespace>/<name>`.
	ProviderID func(*clusterv1.Machine) string
	// Log receives the controllers' log. Zero discards it.
	Log logr.Logger
}

// Model is a running model of Cluster API's controllers.
type Model struct {
	client  client.Client
	done    chan struct{}
	err     error
	touched chan event.GenericEvent

	mu         sync.Mutex
	behaviour  func(*clusterv1.Machine) Behaviour
	providerID func(*clusterv1.Machine) string
	blocked    map[types.NamespacedName]string // the message; "" for no message
	times      map[types.UID]*times
}

// times is when the infrastructure began each step of a Machine.
type times struct{ seen, provisioned, draining, terminating time.Time }

// Run starts the controllers and returns once their caches have synced. They stop when the context
// ends.
func Run(ctx context.Context, plane *ControlPlane, options Options) (*Model, error) {
	namespaces := map[string]cache.Config{}
	for _, namespace := range options.Namespaces {
		namespaces[namespace] = cache.Config{}
	}
	log := options.Log
	if log.GetSink() == nil {
		log = logr.Discard()
	}
	mgr, err := manager.New(plane.Config, manager.Options{
		Scheme:                  plane.Scheme,
		Logger:                  log,
		Metrics:                 server.Options{BindAddress: "0"},
		HealthProbeBindAddress:  "0",
		Cache:                   cache.Options{DefaultNamespaces: namespaces},
		Client:                  client.Options{FieldOwner: "capitest"},
		GracefulShutdownTimeout: new(10 * time.Second),
		Controller: config.Controller{
			SkipNameValidation: new(true), MaxConcurrentReconciles: 4, UsePriorityQueue: new(false), // see hub.Controllers
		},
	})
	if err != nil {
		return nil, fmt.Errorf("making the manager: %w", err)
	}
	m := &Model{
		client:     mgr.GetClient(),
		done:       make(chan struct{}),
		touched:    make(chan event.GenericEvent, 1024),
		behaviour:  func(*clusterv1.Machine) Behaviour { return Behaviour{} },
		providerID: func(machine *clusterv1.Machine) string { return "test://" + machine.Namespace + "/" + machine.Name },
		blocked:    map[types.NamespacedName]string{},
		times:      map[types.UID]*times{},
	}
	if options.Behaviour != nil {
		m.behaviour = options.Behaviour
	}
	if options.ProviderID != nil {
		m.providerID = options.ProviderID
	}
	if err := m.setup(mgr); err != nil {
		return nil, err
	}
	go func() {
		defer close(m.done)
		m.err = mgr.Start(ctx)
	}()
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		return nil, errors.Join(errors.New("the model's caches did not sync"), ctx.Err())
	}
	return m, nil
}

// Wait returns when the controllers have stopped.
func (m *Model) Wait() error {
	<-m.done
	return m.err
}

// RunForTest is like [Run], and stops the model at the end of the test.
func RunForTest(tb testing.TB, plane *ControlPlane, options Options) *Model {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	m, err := Run(ctx, plane, options)
	if err != nil {
		cancel()
		tb.Fatalf("starting the model of Cluster API: %v", err)
	}
	tb.Cleanup(func() {
		cancel()
		if err := m.Wait(); err != nil {
			tb.Errorf("the model of Cluster API: %v", err)
		}
	})
	return m
}

// SetBehaviour replaces the behaviour, also for existing Machines, and reconciles all of them
// again.
func (m *Model) SetBehaviour(behaviour func(*clusterv1.Machine) Behaviour) {
	m.mu.Lock()
	m.behaviour = behaviour
	m.mu.Unlock()
	m.lookAgain()
}

// BlockCreation prevents the MachineSets of a MachineDeployment from creating Machines, like failed
// preflight checks. Their ScalingUp condition has the message. An empty message ends it.
func (m *Model) BlockCreation(deployment types.NamespacedName, message string) {
	m.block(deployment, message != "", message)
}

// HoldCreation does the same without a message, like a slow Cluster API.
func (m *Model) HoldCreation(deployment types.NamespacedName, hold bool) {
	m.block(deployment, hold, "")
}

func (m *Model) block(deployment types.NamespacedName, block bool, message string) {
	m.mu.Lock()
	if block {
		m.blocked[deployment] = message
	} else {
		delete(m.blocked, deployment)
	}
	m.mu.Unlock()
	m.lookAgain()
}

// lookAgain reconciles every Machine and MachineSet again.
func (m *Model) lookAgain() {
	select {
	case m.touched <- event.GenericEvent{Object: &clusterv1.Cluster{}}:
	case <-m.done:
	}
}

func (m *Model) setup(mgr manager.Manager) error {
	everyMachine, everySet := make(chan event.GenericEvent, 4096), make(chan event.GenericEvent, 4096)
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error { return m.spread(ctx, everyMachine, everySet) })); err != nil {
		return fmt.Errorf("adding the model: %w", err)
	}
	for _, c := range []struct {
		name       string
		object     client.Object
		reconciler reconcile.Reconciler
		watches    []source.Source
	}{
		{"machinedeployment", &clusterv1.MachineDeployment{}, &deployments{m}, []source.Source{
			source.Kind[client.Object](mgr.GetCache(), &clusterv1.MachineSet{}, handler.EnqueueRequestForOwner(
				mgr.GetScheme(), mgr.GetRESTMapper(), &clusterv1.MachineDeployment{}, handler.OnlyControllerOwner())),
			source.Kind[client.Object](mgr.GetCache(), &clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(m.deploymentsOfCluster)),
		}},
		{"machineset", &clusterv1.MachineSet{}, &sets{m}, []source.Source{
			source.Kind[client.Object](mgr.GetCache(), &clusterv1.Machine{}, handler.EnqueueRequestForOwner(
				mgr.GetScheme(), mgr.GetRESTMapper(), &clusterv1.MachineSet{}, handler.OnlyControllerOwner())),
			source.Kind[client.Object](mgr.GetCache(), &clusterv1.Cluster{}, handler.EnqueueRequestsFromMapFunc(m.setsOfCluster)),
			source.Channel(everySet, &handler.EnqueueRequestForObject{}),
		}},
		{"machine", &clusterv1.Machine{}, &machines{m}, []source.Source{
			source.Kind[client.Object](mgr.GetCache(), &clusterv1.MachineDeployment{}, handler.EnqueueRequestsFromMapFunc(m.machinesOfDeployment)),
			source.Channel(everyMachine, &handler.EnqueueRequestForObject{}),
		}},
	} {
		ctl, err := controller.New("capitest-"+c.name, mgr, controller.Options{Reconciler: c.reconciler})
		if err != nil {
			return fmt.Errorf("making controller %s: %w", c.name, err)
		}
		for _, watch := range append(c.watches, source.Kind(mgr.GetCache(), c.object, &handler.EnqueueRequestForObject{})) {
			if err := ctl.Watch(watch); err != nil {
				return fmt.Errorf("watching for controller %s: %w", c.name, err)
			}
		}
	}
	return nil
}

func (m *Model) spread(ctx context.Context, everyMachine, everySet chan<- event.GenericEvent) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.touched:
		}
		all, groups := &clusterv1.MachineList{}, &clusterv1.MachineSetList{}
		if err := errors.Join(m.client.List(ctx, all), m.client.List(ctx, groups)); err != nil {
			return fmt.Errorf("listing from the cache: %w", err)
		}
		for i := range all.Items {
			select {
			case <-ctx.Done():
				return nil
			case everyMachine <- event.GenericEvent{Object: &all.Items[i]}:
			}
		}
		for i := range groups.Items {
			select {
			case <-ctx.Done():
				return nil
			case everySet <- event.GenericEvent{Object: &groups.Items[i]}:
			}
		}
	}
}

func (m *Model) deploymentsOfCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	return m.requests(ctx, &clusterv1.MachineDeploymentList{}, cluster.GetNamespace(), clusterv1.ClusterNameLabel, cluster.GetName())
}

func (m *Model) setsOfCluster(ctx context.Context, cluster client.Object) []reconcile.Request {
	return m.requests(ctx, &clusterv1.MachineSetList{}, cluster.GetNamespace(), clusterv1.ClusterNameLabel, cluster.GetName())
}

func (m *Model) machinesOfDeployment(ctx context.Context, deployment client.Object) []reconcile.Request {
	return m.requests(ctx, &clusterv1.MachineList{}, deployment.GetNamespace(), clusterv1.MachineDeploymentNameLabel, deployment.GetName())
}

func (m *Model) requests(ctx context.Context, list client.ObjectList, namespace, label, value string) []reconcile.Request {
	if err := m.client.List(ctx, list, client.InNamespace(namespace), client.MatchingLabels{label: value}); err != nil {
		return nil
	}
	var requests []reconcile.Request
	add := func(object client.Object) {
		requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(object)})
	}
	switch list := list.(type) {
	case *clusterv1.MachineDeploymentList:
		for i := range list.Items {
			add(&list.Items[i])
		}
	case *clusterv1.MachineSetList:
		for i := range list.Items {
			add(&list.Items[i])
		}
	case *clusterv1.MachineList:
		for i := range list.Items {
			add(&list.Items[i])
		}
	}
	return requests
}

// paused reports whether an object or its Cluster is paused.
func (m *Model) paused(ctx context.Context, object client.Object, cluster string) (bool, error) {
	if _, ok := object.GetAnnotations()[clusterv1.PausedAnnotation]; ok {
		return true, nil
	}
	c := &clusterv1.Cluster{}
	if err := m.client.Get(ctx, types.NamespacedName{Namespace: object.GetNamespace(), Name: cluster}, c); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	return ptr.Deref(c.Spec.Paused, false), nil
}
