// Package shimtest is the test environment for the shim's packages: a fake agent with running
// mirrors, a catalogue, and a fake API server with the indexes of the real process.
package shimtest

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	ctrlcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	karpv1alpha1 "sigs.k8s.io/karpenter/pkg/apis/v1alpha1"
	"sigs.k8s.io/karpenter/pkg/events"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/operator"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/staticpool"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/unclaimed"
)

// Timeout bounds calls to the agent, and how long tests wait for asynchronous results.
const Timeout = 10 * time.Second

// NodeClassName and NodePoolName are the default names of the NodeClass and the NodePool in tests.
const (
	NodeClassName = "default"
	NodePoolName  = "pool"
)

// SpokeID identifies the workload cluster.
const SpokeID = "11111111-spoke"

var reservations sync.Once

// Env is the environment of the package under test. It ends with the test.
type Env struct {
	// Agent is the fake agent.
	Agent *fakeagent.Agent
	// Cluster is the Cluster that the shim acts for.
	Cluster *agentv1alpha1.ClusterRef
	// Client calls the agent.
	Client *agentclient.Client
	// NodeGroups and Claims are running mirrors.
	NodeGroups *agentclient.Mirror[*agentv1alpha1.NodeGroup]
	Claims     *agentclient.Mirror[*agentv1alpha1.Claim]
	// Kube is the fake API server, with status as a subresource.
	Kube client.WithWatch
	// Catalogue is running. It does not watch NodeClasses: see [Env.AddNodeClass].
	Catalogue *catalogue.Catalogue
	// CloudProvider is the real one, on top of the above.
	CloudProvider *cloudprovider.CloudProvider
	// Unclaimed finds Machines without a claim.
	Unclaimed *unclaimed.Finder
	// Recorder records events.
	Recorder *Recorder
	// Unsettled makes the CloudProvider wait for adoption.
	Unsettled atomic.Bool
	// Refused is the agent's error if it refuses the live sets of this cluster.
	Refused atomic.Pointer[error]
	// Clock is the clock of [WithClock].
	Clock clock.Clock

	t testing.TB
}

// Option configures a [Env].
type Option func(*settings)

type settings struct {
	agent       []fakeagent.Option
	interceptor interceptor.Funcs
	ttl         time.Duration
	clock       clock.Clock
	offerFull   bool
	nodeGroups  func(catalogue.NodeGroups) catalogue.NodeGroups
}

// WithAgent passes options to the fake agent.
func WithAgent(options ...fakeagent.Option) Option {
	return func(s *settings) { s.agent = append(s.agent, options...) }
}

// WithInterceptor injects faults into the fake API server.
func WithInterceptor(funcs interceptor.Funcs) Option {
	return func(s *settings) { s.interceptor = funcs }
}

// WithUnavailableTTL sets how long groups without room stay unavailable. Default one minute.
func WithUnavailableTTL(ttl time.Duration) Option {
	return func(s *settings) { s.ttl = ttl }
}

// WithFullReservations offers full reservations, as with core's feature gate TerminateFirstDrift.
func WithFullReservations() Option {
	return func(s *settings) { s.offerFull = true }
}

// WithClock sets the clock of the catalogue, the CloudProvider and core. Default is the real one.
func WithClock(clk clock.Clock) Option {
	return func(s *settings) { s.clock = clk }
}

// WithNodeGroups replaces the node groups that the catalogue reads by what change returns.
func WithNodeGroups(change func(mirror catalogue.NodeGroups) catalogue.NodeGroups) Option {
	return func(s *settings) { s.nodeGroups = change }
}

// New returns an environment whose agent has the given node groups, and whose API server has one
// NodeClass that selects all of them.
func New(tb testing.TB, groups []*agentv1alpha1.NodeGroup, options ...Option) *Env {
	tb.Helper()
	reservations.Do(instancetype.Reservations)
	s := settings{
		ttl: time.Minute, clock: clock.RealClock{},
		nodeGroups: func(mirror catalogue.NodeGroups) catalogue.NodeGroups { return mirror },
	}
	for _, option := range options {
		option(&s)
	}
	agent := fakeagent.New(s.agent...)
	tb.Cleanup(agent.Close)
	for _, g := range groups {
		agent.AddNodeGroup(g)
	}
	w := &Env{Agent: agent, Cluster: fakeagent.DefaultCluster(), Recorder: &Recorder{}, Clock: s.clock, t: tb}
	w.Client = agent.ClientFor(w.Cluster)
	w.NodeGroups = w.Client.MirrorNodeGroups(w.Cluster)
	w.Claims = w.Client.MirrorClaims(w.Cluster, v1alpha1.Holder)
	w.Kube = FakeKube(s.interceptor)
	w.Catalogue = catalogue.New(s.clock, s.nodeGroups(w.NodeGroups), w.Kube, s.ttl)
	w.Catalogue.OfferFullReservations = s.offerFull
	require.NoError(tb, w.Catalogue.Watch(w.Context(), informersOf(tb, w.Kube)))
	w.Unclaimed = unclaimed.New(s.clock, w.Kube, w.Client, w.Claims, w.Cluster, Timeout)
	w.CloudProvider = cloudprovider.New(cloudprovider.Config{
		Cluster: w.Cluster, Kube: w.Kube, Client: w.Client, Claims: w.Claims, Catalogue: w.Catalogue,
		Unclaimed: w.Unclaimed, Recorder: w.Recorder, Static: staticpool.New(w.Kube, w.Recorder, s.ttl),
		Timeout: Timeout, Clock: s.clock, RepairAfter: 20 * time.Minute, Settled: func() bool { return !w.Unsettled.Load() },
		Refused: func() error {
			if refused := w.Refused.Load(); refused != nil {
				return *refused
			}
			return nil
		},
	})

	ctx, cancel := context.WithCancel(w.Context())
	var running sync.WaitGroup
	tb.Cleanup(func() { cancel(); running.Wait() })
	for _, run := range []func(context.Context) error{w.NodeGroups.Run, w.Claims.Run, w.Catalogue.Start} {
		running.Go(func() { _ = run(ctx) })
	}
	w.AddNodeClass(NodeClassName, nil)
	w.Eventually(func() bool {
		state := w.Claims.State()
		return state.Synced || state.LastError != nil // an agent that cannot be reached
	}, "the claims are known")
	return w
}

// Restart replaces the catalogue and the CloudProvider by new ones, as in a process that starts
// now.
func (w *Env) Restart() {
	w.t.Helper()
	w.Catalogue = catalogue.New(w.Clock, w.NodeGroups, w.Kube, time.Minute)
	require.NoError(w.t, w.Catalogue.Watch(w.Context(), informersOf(w.t, w.Kube)))
	config := w.CloudProvider.Config
	config.Catalogue = w.Catalogue
	w.CloudProvider = cloudprovider.New(config)
	ctx, cancel := context.WithCancel(w.Context())
	var running sync.WaitGroup
	w.t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { _ = w.Catalogue.Start(ctx) })
	w.Eventually(func() bool { return w.Catalogue.Snapshot() != nil }, "the catalogue knows the node groups")
}

// FakeKube returns a fake API server with the indexes of the real process.
func FakeKube(funcs interceptor.Funcs) client.WithWatch {
	builder := fake.NewClientBuilder().WithScheme(scheme.Scheme).
		WithObjects(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem, UID: SpokeID}}).
		WithStatusSubresource(
			&karpv1.NodeClaim{}, &karpv1.NodePool{}, &v1alpha1.ClusterAPINodeClass{}, &corev1.Node{}, &karpv1alpha1.NodeOverlay{},
		).
		WithInterceptorFuncs(funcs)
	for _, index := range operator.Indexes() {
		builder = builder.WithIndex(index.Object, index.Field, index.Values)
	}
	return builder.Build()
}

// informers creates informers on a fake API server.
type informers struct {
	ctrlcache.Informers

	tb   testing.TB
	kube client.WithWatch
}

func informersOf(tb testing.TB, kube client.WithWatch) *informers {
	tb.Helper()
	return &informers{tb: tb, kube: kube}
}

// IsWatchListSemanticsUnSupported makes informers list before they watch.
func (*informers) IsWatchListSemanticsUnSupported() bool { return true }

// GetInformer returns an informer that runs until the test ends.
func (i *informers) GetInformer(_ context.Context, object client.Object, _ ...ctrlcache.InformerGetOption) (ctrlcache.Informer, error) {
	kind, err := i.kube.GroupVersionKindFor(object)
	if err != nil {
		return nil, err
	}
	list := func() (client.ObjectList, error) {
		made, err := scheme.Scheme.New(kind.GroupVersion().WithKind(kind.Kind + "List"))
		if err != nil {
			return nil, err
		}
		return made.(client.ObjectList), nil //nolint:forcetypeassert // that is what lists are
	}
	var watching watch.Interface // begun before the list, as a fake API server does not replay events
	informer := toolscache.NewSharedIndexInformer(toolscache.ToListWatcherWithWatchListSemantics(&toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, _ metav1.ListOptions) (runtime.Object, error) {
			objects, err := list()
			if err != nil {
				return nil, err
			}
			if watching, err = i.kube.Watch(context.WithoutCancel(ctx), objects); err != nil {
				return nil, err
			}
			return objects, i.kube.List(ctx, objects)
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) { return watching, nil },
	}, i), object, 0, toolscache.Indexers{})
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { informer.RunWithContext(ctx) })
	i.tb.Cleanup(func() { stop(); running.Wait() })
	return informer, nil
}

// Context returns a context with core's options.
func (w *Env) Context() context.Context {
	return coreoptions.ToContext(context.Background(), &coreoptions.Options{CPURequests: 1000})
}

// AddNodeClass creates a NodeClass and waits until the catalogue knows it.
func (w *Env) AddNodeClass(name string, selector *metav1.LabelSelector) *v1alpha1.ClusterAPINodeClass {
	w.t.Helper()
	nodeClass := &v1alpha1.ClusterAPINodeClass{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: uuid.NewUUID(), Generation: 1},
		Spec:       v1alpha1.ClusterAPINodeClassSpec{ScalableResourceSelector: selector},
	}
	w.Create(nodeClass)
	w.Catalogue.Refresh()
	w.Eventually(func() bool {
		snapshot := w.Catalogue.Snapshot()
		if snapshot == nil {
			return !w.NodeGroups.State().Synced && w.NodeGroups.State().LastError != nil // an agent that cannot be reached
		}
		_, ok := snapshot.Class(name)
		return ok
	}, "the catalogue knows NodeClass %s", name)
	return nodeClass
}

// Eventually waits for the condition.
func (w *Env) Eventually(condition func() bool, format string, args ...any) {
	w.t.Helper()
	require.Eventuallyf(w.t, condition, Timeout, 5*time.Millisecond, format, args...)
}

// Create creates the object in the fake API server.
func (w *Env) Create(object client.Object) {
	w.t.Helper()
	require.NoError(w.t, w.Kube.Create(w.Context(), object))
}

// Update writes the object to the fake API server.
func (w *Env) Update(object client.Object) {
	w.t.Helper()
	require.NoError(w.t, w.Kube.Update(w.Context(), object))
}

// Get reads the object again.
func (w *Env) Get(object client.Object) {
	w.t.Helper()
	require.NoError(w.t, w.Kube.Get(w.Context(), client.ObjectKeyFromObject(object), object))
}

// Exists reports whether the object exists and is not being deleted.
func (w *Env) Exists(object client.Object) bool {
	w.t.Helper()
	err := w.Kube.Get(w.Context(), client.ObjectKeyFromObject(object), object)
	require.NoError(w.t, client.IgnoreNotFound(err))
	return err == nil && object.GetDeletionTimestamp().IsZero()
}

// NodeClassRef returns a reference to the default NodeClass.
func NodeClassRef() *karpv1.NodeClassReference {
	return &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: NodeClassName}
}

// NodeClaim returns a NodeClaim of the default NodePool and NodeClass with the changes applied.
func (w *Env) NodeClaim(name string, changes ...func(*karpv1.NodeClaim)) *karpv1.NodeClaim {
	nodeClaim := &karpv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: uuid.NewUUID(), Labels: map[string]string{karpv1.NodePoolLabelKey: NodePoolName},
			CreationTimestamp: metav1.NewTime(w.Clock.Now()), // so that ages are measured by one clock
		},
		Spec: karpv1.NodeClaimSpec{NodeClassRef: NodeClassRef()},
	}
	for _, change := range changes {
		change(nodeClaim)
	}
	return nodeClaim
}

// Launched creates a NodeClaim in its state after core called Create: claimed, with the
// placeholder. The mirror knows its claim.
func (w *Env) Launched(name string, changes ...func(*karpv1.NodeClaim)) *karpv1.NodeClaim {
	w.t.Helper()
	nodeClaim := w.NodeClaim(name)
	created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(w.t, err)
	nodeClaim.Labels = lo.Assign(created.Labels, nodeClaim.Labels)
	nodeClaim.Annotations = created.Annotations
	nodeClaim.Status = created.Status
	nodeClaim.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	for _, change := range changes {
		change(nodeClaim)
	}
	w.Create(nodeClaim)
	w.Eventually(func() bool { _, ok := w.Claims.Get(string(nodeClaim.UID)); return ok }, "the mirror knows the claim of %s", name)
	return nodeClaim
}

// Registered marks the NodeClaim as registered. For use with [Env.Launched].
func Registered(nodeClaim *karpv1.NodeClaim) {
	nodeClaim.StatusConditions().SetTrue(karpv1.ConditionTypeRegistered)
}

// Placeholder returns the NodeClaim's placeholder.
func (w *Env) Placeholder(uid types.UID) string {
	return placeholder.ProviderID(w.Cluster.GetNamespace(), w.Cluster.GetName(), string(uid))
}

// Provision sets the provider ID of the NodeClaim's machine and waits until the mirror has it.
func (w *Env) Provision(nodeClaim *karpv1.NodeClaim, providerID string) *agentv1alpha1.Machine {
	w.t.Helper()
	machine := w.Agent.Provision(w.Cluster, string(nodeClaim.UID), providerID)
	w.Eventually(func() bool {
		claim, _ := w.Claims.Get(string(nodeClaim.UID))
		return claim.GetMachine().GetProviderId() == machine.GetProviderId()
	}, "the mirror shows the provider ID of %s", nodeClaim.Name)
	return machine
}

// Recorder records events. The zero value is ready to use.
type Recorder struct {
	mu     sync.Mutex
	events []events.Event
}

// Publish records the events.
func (r *Recorder) Publish(published ...events.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, published...)
}

// Reasons returns the reasons of the events so far.
func (r *Recorder) Reasons() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return lo.Map(r.events, func(e events.Event, _ int) string { return e.Reason })
}

// Messages returns the messages of the events so far.
func (r *Recorder) Messages() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return lo.Map(r.events, func(e events.Event, _ int) string { return e.Message })
}

// Disconnect makes the agent unreachable until [Env.Reconnect].
func (w *Env) Disconnect() {
	w.t.Helper()
	w.Agent.SetSynced(false) // every call but GetStatus returns UNAVAILABLE
	w.Agent.DropStreams()
	w.Eventually(func() bool { return !w.NodeGroups.State().Connected && !w.Claims.State().Connected }, "the streams are lost")
}

// Reconnect reverts [Env.Disconnect].
func (w *Env) Reconnect() {
	w.t.Helper()
	w.Agent.SetSynced(true)
	w.Eventually(func() bool { return w.NodeGroups.State().Connected && w.Claims.State().Connected }, "the streams are back")
}
