// Package configmap follows the content of one key of a ConfigMap in the hub.
//
// The watch is controller-runtime's. What is written by hand is that the last usable content stays
// in use, and that a mistake becomes an event and a metric.
package configmap

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
)

// never is longer than any process runs. controller-runtime has no value for it.
const never = 100 * 365 * 24 * time.Hour

// maxNote is the maximum length of an event's text about a problem. The API server accepts 1024
// bytes.
const maxNote = 900

// Config configures a [Follower].
type Config[T any] struct {
	// Name is the name of the ConfigMap. REQUIRED.
	Name types.NamespacedName
	// Key is the followed key. REQUIRED.
	Key string
	// What is the display name of the content in lower case, such as "price list". The metric
	// capi_agent_price_list_usable and the event InvalidPriceList are derived from it. REQUIRED.
	What string
	// Parse parses the content. It returns nil only with an error. REQUIRED.
	Parse func(content []byte) (*T, error)
	// Lasting keeps the content in use when the ConfigMap is deleted.
	Lasting bool
	// Patience is how long [Follower.Read] waits for the content, from its first call on. Without
	// it, there is no content until it can be read. Zero means as long as that takes.
	Patience time.Duration
	// Changed is called after the content in use has changed, also to nil. It must not call the
	// follower. It may be nil.
	Changed func(*T)
	// WatchFailed is called when the ConfigMap could not be listed or watched, before another
	// attempt. Nil logs it.
	WatchFailed toolscache.WatchErrorHandlerWithContext
	// Recorder records an event if the content cannot be used. REQUIRED.
	Recorder events.EventRecorder
	// Registerer registers the metric. Nil registers none.
	Registerer prometheus.Registerer
}

// Follower provides the latest usable content. It is safe for concurrent use.
type Follower[T any] struct {
	Config[T]

	reader  client.Reader
	usable  prometheus.Gauge
	current atomic.Pointer[T]
	first   chan struct{}

	mu      sync.Mutex
	until   time.Time // when the patience ends
	read    bool
	version string // of the last ConfigMap read, usable or not
	problem string // why the last ConfigMap read cannot be used; empty if it can
}

// New returns a follower. It reads the content once the manager has started. It needs the right to
// get, list and watch that one ConfigMap only.
func New[T any](mgr manager.Manager, c Config[T]) (*Follower[T], error) {
	f := &Follower[T]{Config: c, first: make(chan struct{}), usable: prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "capi_agent_" + lo.SnakeCase(c.What) + "_usable",
		Help: "1 if the current " + c.What + " is usable. 0 if the last usable one is in use instead, or none.",
	})}
	if c.Registerer != nil {
		if err := c.Registerer.Register(f.usable); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	// The follower has its own cache. A single ConfigMap of a namespace is selected by a field
	// selector, which can hold only one name.
	own, err := hub.AddCache(mgr, cache.Options{
		DefaultWatchErrorHandler: c.WatchFailed,
		ByObject: map[client.Object]cache.ByObject{&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{
			c.Name.Namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", c.Name.Name)},
		}}},
	})
	if err != nil {
		return nil, fmt.Errorf("following the %s: %w", c.What, err)
	}
	f.reader = own
	err = builder.ControllerManagedBy(mgr).Named(lo.KebabCase(c.What)).
		// A ConfigMap that cannot be read, for lack of a right for example, must not end the agent.
		WithOptions(controller.Options{NeedLeaderElection: new(false), SkipNameValidation: new(true), CacheSyncTimeout: never}).
		WatchesRawSource(source.Kind(own, &corev1.ConfigMap{}, &handler.TypedEnqueueRequestForObject[*corev1.ConfigMap]{})).
		Complete(f)
	if err != nil {
		return nil, fmt.Errorf("setting up the %s: %w", c.What, err)
	}
	// A missing ConfigMap causes no event.
	err = mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		ctx = log.IntoContext(ctx, mgr.GetLogger())
		if err := f.firstRead(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "the "+c.What+" could not be read at the start")
		}
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("adding the first reading of the %s: %w", c.What, err)
	}
	return f, nil
}

// Current returns the content in use, or nil if there is none or it has not been read yet.
func (f *Follower[T]) Current() *T { return f.current.Load() }

// First returns a channel that is closed once there has been usable content.
func (f *Follower[T]) First() <-chan struct{} { return f.first }

// Problem returns why the current content of the ConfigMap cannot be used, or "" if it can.
func (f *Follower[T]) Problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.read {
		return fmt.Sprintf("the %s in ConfigMap %s has not been read yet", f.What, f.Name)
	}
	return f.problem
}

// Read returns the content in use, or nil if there is none. Until the content has been read, it
// waits for that, but not longer than the patience.
func (f *Follower[T]) Read(ctx context.Context) (*T, error) {
	read, until := f.state()
	if read {
		return f.Current(), nil
	}
	waiting := ctx
	if !until.IsZero() {
		var cancel context.CancelFunc
		waiting, cancel = context.WithDeadline(ctx, until)
		defer cancel()
	}
	outOfPatience := func() bool { return ctx.Err() == nil && waiting.Err() != nil }
	if err := f.firstRead(waiting); err != nil && !outOfPatience() {
		return nil, err
	}
	return f.Current(), nil
}

// state reports whether the content has been read, and until when a caller waits for that.
func (f *Follower[T]) state() (read bool, until time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.until.IsZero() && f.Patience > 0 {
		f.until = time.Now().Add(f.Patience)
	}
	return f.read, f.until
}

// firstRead waits until the content can be read, and reads it.
func (f *Follower[T]) firstRead(ctx context.Context) error {
	// The cache answers once it is synced. f.mu must not be held until then.
	if err := f.reader.Get(ctx, f.Name, &corev1.ConfigMap{}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the %s: %w", f.What, err)
	}
	_, err := f.Reconcile(ctx, reconcile.Request{})
	return err
}

// Reconcile reads the content again.
func (f *Follower[T]) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return reconcile.Result{}, f.load(ctx)
}

// load reads the ConfigMap. If the content cannot be used, the last usable one stays in use.
func (f *Follower[T]) load(ctx context.Context) error {
	configMap := &corev1.ConfigMap{}
	err := f.reader.Get(ctx, f.Name, configMap)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading the %s: %w", f.What, err)
	}
	logger := log.FromContext(ctx).WithValues("configMap", f.Name)
	if apierrors.IsNotFound(err) {
		f.usable.Set(0)
		if !f.read || f.version != "" {
			logger.Info("the ConfigMap of the "+f.What+" does not exist", "lastOneStays", f.Lasting && f.Current() != nil)
		}
		f.read, f.version, f.problem = true, "", fmt.Sprintf("ConfigMap %s, which has the %s, does not exist", f.Name, f.What)
		if !f.Lasting && f.Current() != nil {
			f.use(nil)
		}
		return nil
	}
	version := string(configMap.UID) + "/" + configMap.ResourceVersion
	if f.read && f.version == version {
		return nil
	}
	f.read, f.version = true, version
	content, err := f.parse(ctx, configMap)
	if err != nil {
		f.usable.Set(0)
		f.problem = fmt.Sprintf("the %s in ConfigMap %s cannot be used: %v", f.What, f.Name, err)
		f.Recorder.Eventf(configMap, nil, corev1.EventTypeWarning, "Invalid"+lo.PascalCase(f.What), "Load",
			"%s", cut("the "+f.What+" is not used, and the last valid one stays in use: "+strings.ReplaceAll(err.Error(), "\n", "; ")))
		logger.Info("the "+f.What+" cannot be used, and the last valid one stays in use", "cause", err.Error())
		return nil
	}
	f.problem = ""
	f.use(content)
	f.usable.Set(1)
	logger.Info("the "+f.What+" was loaded", "content", fmt.Sprint(content))
	return nil
}

func (f *Follower[T]) use(content *T) {
	f.current.Store(content)
	if content != nil {
		select {
		case <-f.first:
		default:
			close(f.first)
		}
	}
	if f.Changed != nil {
		f.Changed(content)
	}
}

func (f *Follower[T]) parse(ctx context.Context, configMap *corev1.ConfigMap) (*T, error) {
	content, present := configMap.Data[f.Key]
	if !present {
		return nil, fmt.Errorf("data[%s]: is missing", f.Key)
	}
	var parsed *T
	err := panics.Confined(log.FromContext(ctx), panics.Objects, "the "+f.What+" is not used because of a bug in the agent", func() (err error) {
		parsed, err = f.Parse([]byte(content))
		return err
	}, "configMap", f.Name.String())
	if err != nil {
		return nil, fmt.Errorf("data[%s]: %w", f.Key, err)
	}
	return parsed, nil
}

// cut shortens a text at a character boundary.
func cut(text string) string {
	if len(text) <= maxNote {
		return text
	}
	return strings.ToValidUTF8(text[:maxNote], "") + "…"
}
