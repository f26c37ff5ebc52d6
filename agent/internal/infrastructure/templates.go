// Package infrastructure reads the infrastructure templates and objects of any provider, without
// provider-specific code.
//
// A reference to a template contains no version, so the version is taken from the contract labels
// of the CRD. Each kind is watched from its first use. It is read live until its watch has synced,
// or permanently if the watch cannot sync, for example because the agent may only get a provider's
// objects.
//
// Cluster API's controllers/external is not used: its ObjectTracker keeps watching the version that
// it saw first, ignores paused objects, and has no fallback for a watch that cannot sync.
package infrastructure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	apimachineryversion "k8s.io/apimachinery/pkg/version"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/contract"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

// contracts are the CRD labels that list the versions for a contract of Cluster API, newest first.
// Cluster API still accepts the older one.
var contracts = []string{"cluster.x-k8s.io/v1beta2", "cluster.x-k8s.io/v1beta1"}

// kindLife is how long the version of a kind is cached. It changes when the provider is upgraded.
const kindLife = 5 * time.Minute

// youngWatch is how long a new watch may take to sync before templates are read live instead.
const youngWatch = 2 * time.Second

const (
	// liveWithin is how long a template's live read may take. The API server gives a conversion
	// webhook that hangs as long as the request has.
	liveWithin = 5 * time.Second
	// liveRest is how long no template of a kind is read live after such a read took too long. Few
	// workers describe all node groups, so those of one kind must not occupy them one after the
	// other.
	liveRest = 20 * time.Second
)

// errResting is the error of a live read that is not made because others of its kind took too long.
var errResting = errors.New("the API server did not answer for a template of this kind in time")

// ErrUnusable means that a retry does not help until a user has changed something.
var ErrUnusable = errors.New("unusable")

// Config configures [Templates].
type Config struct {
	// Reader reads directly from the API server. REQUIRED.
	Reader client.Reader
	// Cache provides the watches, and reads only what it watches
	// ([cache.Options].ReaderFailOnMissingInformer). It is for templates alone: controllers wait
	// for all kinds of their cache, and the watch of a template may never sync. REQUIRED.
	Cache cache.Cache
	// Changed is called from the watches with each template that may have changed. REQUIRED.
	Changed func(gk schema.GroupKind, template types.NamespacedName)
	// Clock provides the time. Nil means the system clock.
	Clock clock.PassiveClock
}

// Templates reads infrastructure templates. It is safe for concurrent use.
type Templates struct {
	Config

	liveWithin time.Duration // set by tests

	mu    sync.Mutex
	kinds map[schema.GroupKind]*kind
	// rests is until when the templates of a kind are not read live.
	rests map[schema.GroupKind]time.Time
}

// New returns templates. None is watched yet.
func New(c Config) *Templates {
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	return &Templates{Config: c, liveWithin: liveWithin, kinds: map[schema.GroupKind]*kind{}, rests: map[schema.GroupKind]time.Time{}}
}

type kind struct {
	gvk      schema.GroupVersionKind
	resolved time.Time
	informer cache.Informer
	watched  time.Time
}

// Get returns the template that a reference names, in a namespace. An error that wraps
// [ErrUnusable] states what a user must change, without the API server's words, as callers see it;
// after any other error a retry may help. The
// template is shared and must not be modified.
func (t *Templates) Get(ctx context.Context, ref clusterv1.ContractVersionedObjectReference, namespace string) (*unstructured.Unstructured, error) {
	if ref.Kind == "" || ref.Name == "" || ref.APIGroup == "" {
		return nil, fmt.Errorf("%w: the reference to the infrastructure template is not complete", ErrUnusable)
	}
	k, err := t.kind(ctx, schema.GroupKind{Group: ref.APIGroup, Kind: ref.Kind})
	if err != nil {
		return nil, err
	}
	template := &unstructured.Unstructured{}
	template.SetGroupVersionKind(k.gvk)
	key := types.NamespacedName{Namespace: namespace, Name: ref.Name}
	if t.synced(ctx, k) {
		err = t.Cache.Get(ctx, key, template)
		_, ended := errors.AsType[*cache.ErrResourceNotCached](err) // meanwhile, see unwatch
		if ended || apierrors.IsNotFound(err) {                     // its watch may be behind that of the MachineDeployment
			err = t.live(ctx, key, template)
		}
	} else {
		err = t.live(ctx, key, template)
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%w: %s %s does not exist", ErrUnusable, ref.Kind, key)
	case apierrors.IsForbidden(err):
		log.FromContext(ctx).Error(err, "an infrastructure template cannot be read", "kind", ref.Kind, "template", key)
		return nil, fmt.Errorf("%w: the agent may not get, list and watch %s", ErrUnusable, contract.CalculateCRDName(ref.APIGroup, ref.Kind))
	case err != nil:
		return nil, fmt.Errorf("reading %s %s: %w", ref.Kind, key, err)
	}
	return template, nil
}

// live reads a template from the API server, unless that recently took too long for one of its
// kind.
func (t *Templates) live(ctx context.Context, key types.NamespacedName, template *unstructured.Unstructured) error {
	gk := template.GroupVersionKind().GroupKind()
	t.mu.Lock()
	resting := t.Clock.Now().Before(t.rests[gk])
	t.mu.Unlock()
	if resting {
		return errResting
	}
	bounded, cancel := context.WithTimeout(ctx, t.liveWithin)
	defer cancel()
	err := t.Reader.Get(bounded, key, template)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		t.mu.Lock()
		t.rests[gk] = t.Clock.Now().Add(liveRest)
		t.mu.Unlock()
	}
	return err
}

// synced waits briefly for a new watch, so that a start with many templates does not read each of
// them live.
func (t *Templates) synced(ctx context.Context, k kind) bool {
	left := youngWatch - t.Clock.Since(k.watched)
	if k.informer.HasSynced() || left <= 0 {
		return k.informer.HasSynced()
	}
	err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, left, true, func(context.Context) (bool, error) {
		return k.informer.HasSynced(), nil
	})
	return err == nil
}

// kind returns the version of a kind, and starts to watch it.
func (t *Templates) kind(ctx context.Context, gk schema.GroupKind) (kind, error) {
	t.mu.Lock()
	known := t.kinds[gk]
	t.mu.Unlock()
	if known != nil && t.Clock.Since(known.resolved) < kindLife {
		return *known, nil
	}
	gvk, err := resolve(ctx, t.Reader, gk)
	if err != nil {
		if known != nil && !errors.Is(err, ErrUnusable) {
			return *known, nil // the version hardly ever changes, and the next call looks again
		}
		return kind{}, err
	}
	fresh := &kind{gvk: gvk, resolved: t.Clock.Now()}
	if known != nil && known.gvk == gvk {
		fresh.informer, fresh.watched = known.informer, known.watched
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if current := t.kinds[gk]; current != known {
		return *current, nil // another call was faster
	}
	if fresh.informer == nil {
		if fresh.informer, err = t.watch(ctx, gvk); err != nil {
			return kind{}, err
		}
		fresh.watched = t.Clock.Now()
		if known != nil {
			t.unwatch(ctx, known.gvk)
		}
	}
	t.kinds[gk] = fresh
	return *fresh, nil
}

// resolve returns the version of a kind for the newest contract.
func resolve(ctx context.Context, reader client.Reader, gk schema.GroupKind) (schema.GroupVersionKind, error) {
	crd := &metav1.PartialObjectMetadata{}
	crd.SetGroupVersionKind(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"})
	name := contract.CalculateCRDName(gk.Group, gk.Kind)
	err := reader.Get(ctx, types.NamespacedName{Name: name}, crd)
	switch {
	case apierrors.IsNotFound(err):
		return schema.GroupVersionKind{}, fmt.Errorf("%w: the CustomResourceDefinition %s does not exist", ErrUnusable, name)
	case apierrors.IsForbidden(err):
		log.FromContext(ctx).Error(err, "a CustomResourceDefinition cannot be read", "customResourceDefinition", name)
		return schema.GroupVersionKind{}, fmt.Errorf("%w: the agent may not get CustomResourceDefinitions", ErrUnusable)
	case err != nil:
		return schema.GroupVersionKind{}, fmt.Errorf("reading CustomResourceDefinition %s: %w", name, err)
	}
	version := newestVersion(crd.Labels)
	if version == "" {
		return schema.GroupVersionKind{}, fmt.Errorf("%w: the CustomResourceDefinition %s has no contract label %s", ErrUnusable, name, contracts[0])
	}
	return gk.WithVersion(version), nil
}

// newestVersion returns the newest version in a CRD's contract labels, or "" if there is none.
func newestVersion(labels map[string]string) string {
	for _, label := range contracts {
		versions := slices.DeleteFunc(strings.Split(labels[label], "_"), func(version string) bool { return version == "" })
		if len(versions) > 0 {
			return slices.MaxFunc(versions, apimachineryversion.CompareKubeAwareVersionStrings)
		}
	}
	return ""
}

// unwatch ends the watch of a version that is no longer read: a provider may cease to serve it.
func (t *Templates) unwatch(ctx context.Context, gvk schema.GroupVersionKind) {
	template := &unstructured.Unstructured{}
	template.SetGroupVersionKind(gvk)
	if err := t.Cache.RemoveInformer(ctx, template); err != nil {
		log.FromContext(ctx).Error(err, "the watch of an infrastructure template's former version cannot be ended", "kind", gvk.String())
	}
}

func (t *Templates) watch(ctx context.Context, gvk schema.GroupVersionKind) (cache.Informer, error) {
	template := &unstructured.Unstructured{}
	template.SetGroupVersionKind(gvk)
	informer, err := t.Cache.GetInformer(ctx, template, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", gvk.Kind, err)
	}
	notify := func(object any) {
		if gone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
			object = gone.Obj
		}
		if template, ok := object.(client.Object); ok {
			t.Changed(gvk.GroupKind(), client.ObjectKeyFromObject(template))
		}
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: notify, UpdateFunc: func(_, object any) { notify(object) }, DeleteFunc: notify,
	})
	if err != nil {
		return nil, fmt.Errorf("watching %s: %w", gvk.Kind, err)
	}
	return informer, nil
}
