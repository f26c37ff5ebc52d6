// Package configmap follows what one key of one ConfigMap of the hub says.
package configmap

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
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
)

// maxNote is how much of what is wrong an event says; the API server takes 1024 bytes.
const maxNote = 900

// Config is what a [Follower] needs.
type Config[T any] struct {
	// Name is the ConfigMap's. REQUIRED.
	Name types.NamespacedName
	// Key is the key in it. REQUIRED.
	Key string
	// What is the content's name for people, in lower case: "price list". The metric capi_agent_price_list_usable and the event
	// InvalidPriceList are named after it. REQUIRED.
	What string
	// Parse reads the content. It returns nil with an error only. REQUIRED.
	Parse func(content []byte) (*T, error)
	// Lasting content stays in use when the ConfigMap is deleted.
	Lasting bool
	// Changed is called after other content is in use, nil included. It must not call the follower. Nil is none.
	Changed func(*T)
	// Recorder takes an event when the content cannot be used. REQUIRED.
	Recorder events.EventRecorder
	// Registerer takes the metric. Nil registers none.
	Registerer prometheus.Registerer
}

// Follower has the newest content that can be used. It is safe for concurrent use.
type Follower[T any] struct {
	Config[T]

	reader  client.Reader
	usable  prometheus.Gauge
	current atomic.Pointer[T]
	first   chan struct{}

	mu      sync.Mutex
	read    bool
	version string // of the ConfigMap that was read last, good or bad
	problem string // why that one cannot be used; empty when it can
}

// caches is started before what reads from it.
type caches struct{ cache.Cache }

// GetCache makes the manager take it for what it is.
func (c caches) GetCache() cache.Cache { return c.Cache }

// New returns a follower that reads once the manager has started. It needs the right to get, list and watch that one ConfigMap, and no other.
func New[T any](mgr manager.Manager, c Config[T]) (*Follower[T], error) {
	f := &Follower[T]{Config: c, first: make(chan struct{}), usable: prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "capi_agent_" + lo.SnakeCase(c.What) + "_usable",
		Help: "1 while the " + c.What + " that is there now can be used; 0 when the last good one is used, or none.",
	})}
	if c.Registerer != nil {
		if err := c.Registerer.Register(f.usable); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	// A cache of its own: one of many ConfigMaps of a namespace is chosen by a field selector, which has room for one name.
	own, err := cache.New(mgr.GetConfig(), cache.Options{
		HTTPClient: mgr.GetHTTPClient(), Scheme: mgr.GetScheme(), Mapper: mgr.GetRESTMapper(),
		ByObject: map[client.Object]cache.ByObject{&corev1.ConfigMap{}: {Namespaces: map[string]cache.Config{
			c.Name.Namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", c.Name.Name)},
		}}},
	})
	if err != nil {
		return nil, fmt.Errorf("making the cache of the %s: %w", c.What, err)
	}
	f.reader = own
	if err := mgr.Add(caches{own}); err != nil {
		return nil, fmt.Errorf("adding the cache of the %s: %w", c.What, err)
	}
	err = builder.ControllerManagedBy(mgr).Named(lo.KebabCase(c.What)).
		WithOptions(controller.Options{NeedLeaderElection: new(false), SkipNameValidation: new(true)}).
		WatchesRawSource(source.Kind(own, &corev1.ConfigMap{}, &handler.TypedEnqueueRequestForObject[*corev1.ConfigMap]{})).
		Complete(f)
	if err != nil {
		return nil, fmt.Errorf("setting up the %s: %w", c.What, err)
	}
	// A ConfigMap that is not there has no event.
	err = mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		ctx = log.IntoContext(ctx, mgr.GetLogger())
		if _, err := f.Read(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "the "+c.What+" could not be read at the start")
		}
		return nil
	}))
	if err != nil {
		return nil, fmt.Errorf("adding the first reading of the %s: %w", c.What, err)
	}
	return f, nil
}

// Current returns the content that is used now; nil when there is none, or none yet.
func (f *Follower[T]) Current() *T { return f.current.Load() }

// First is closed once there is content that can be used.
func (f *Follower[T]) First() <-chan struct{} { return f.first }

// Problem says why what is there now cannot be used; "" when it can.
func (f *Follower[T]) Problem() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.read {
		return fmt.Sprintf("the %s in ConfigMap %s has not been read yet", f.What, f.Name)
	}
	return f.problem
}

// Read returns the content that is used now; nil when there is none. The first call waits until it has been read.
func (f *Follower[T]) Read(ctx context.Context) (*T, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.read {
		if err := f.load(ctx); err != nil {
			return nil, err
		}
	}
	return f.Current(), nil
}

// Reconcile reads the content anew.
func (f *Follower[T]) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return reconcile.Result{}, f.load(ctx)
}

// load reads the ConfigMap. Content that cannot be used leaves the last good one.
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
			logger.Info("there is no "+f.What, "lastOneStays", f.Lasting && f.Current() != nil)
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
	content, err := f.parse(configMap)
	if err != nil {
		f.usable.Set(0)
		f.problem = fmt.Sprintf("the %s in ConfigMap %s cannot be used: %v", f.What, f.Name, err)
		f.Recorder.Eventf(configMap, nil, corev1.EventTypeWarning, "Invalid"+lo.PascalCase(f.What), "Load",
			"%s", cut("the "+f.What+" is not used, and the last good one stays: "+strings.ReplaceAll(err.Error(), "\n", "; ")))
		logger.Info("the "+f.What+" cannot be used, and the last good one stays", "cause", err.Error())
		return nil
	}
	f.problem = ""
	f.use(content)
	f.usable.Set(1)
	logger.Info("another "+f.What+" is used", "content", fmt.Sprint(content))
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

func (f *Follower[T]) parse(configMap *corev1.ConfigMap) (*T, error) {
	content, present := configMap.Data[f.Key]
	if !present {
		return nil, fmt.Errorf("data[%s]: is missing", f.Key)
	}
	parsed, err := f.Parse([]byte(content))
	if err != nil {
		return nil, fmt.Errorf("data[%s]: %w", f.Key, err)
	}
	return parsed, nil
}

// cut shortens a text, between characters.
func cut(text string) string {
	if len(text) <= maxNote {
		return text
	}
	return strings.ToValidUTF8(text[:maxNote], "") + "…"
}
