package hub_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/panics"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

const patience = 20 * time.Second

// heard are the events that a handler got, with the versions of the objects.
type heard struct {
	mu  sync.Mutex
	all []string
}

func (h *heard) add(event string, object any) {
	machine, ok := object.(*clusterv1.Machine)
	if !ok {
		event += " of something else"
		machine = &clusterv1.Machine{}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, event+" "+machine.Name+" "+machine.Spec.Version)
}

// of returns the events of a Machine.
func (h *heard) of(name string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var events []string
	for _, event := range h.all {
		if fields := strings.Fields(event); fields[1] == name {
			events = append(events, fields[0]+" "+fields[2])
		}
	}
	return events
}

// fails panics for the version of a Machine that is named so.
func fails(what string, object any) {
	if machine, ok := object.(*clusterv1.Machine); ok && machine.Spec.Version == what {
		panic("a bug")
	}
}

func machineOf(name, version string) *clusterv1.Machine {
	return &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Spec: clusterv1.MachineSpec{Version: version}}
}

// The goroutines are client-go's own: the cache is a real one, and only the API server is not.
func TestAPanicInACacheCostsOneObjectAlone(t *testing.T) {
	scheme, err := hub.Scheme()
	require.NoError(t, err)
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(clusterv1.GroupVersion.WithKind("Machine"), meta.RESTScopeNamespace)
	source := cachetesting.NewFakeControllerSource()
	for _, version := range []string{"transform", "index", "add", "fine"} {
		source.Add(machineOf(version, version))
	}
	lines := &lines{}
	caches, err := hub.NewCache(funcr.New(lines.add, funcr.Options{}))(&rest.Config{Host: "https://hub"}, cache.Options{
		Scheme: scheme, Mapper: mapper,
		DefaultTransform: func(object any) (any, error) {
			fails("transform", object)
			if machine, ok := object.(*clusterv1.Machine); ok {
				machine.Spec.ClusterName = "transformed"
			}
			return object, nil
		},
		NewInformer: func(
			_ toolscache.ListerWatcher, of runtime.Object, resync time.Duration, indexers toolscache.Indexers,
		) toolscache.SharedIndexInformer {
			return toolscache.NewSharedIndexInformer(source, of, resync, indexers)
		},
	})
	require.NoError(t, err)
	require.NoError(t, caches.IndexField(t.Context(), &clusterv1.Machine{}, "version", func(object client.Object) []string {
		fails("index", object)
		machine, _ := object.(*clusterv1.Machine)
		return []string{machine.Spec.Version}
	}))
	informer, err := caches.GetInformer(t.Context(), &clusterv1.Machine{})
	require.NoError(t, err)
	events, others := &heard{}, &heard{}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(object any, _ bool) {
			fails("add", object)
			events.add("added", object)
		},
		UpdateFunc: func(before, after any) {
			fails("update-before", before)
			fails("update-after", after)
			fails("add", after)
			events.add("changed", after)
		},
		DeleteFunc: func(object any) {
			fails("delete", object)
			events.add("deleted", object)
		},
	})
	require.NoError(t, err)
	_, err = informer.AddEventHandlerWithOptions(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { others.add("added", object) },
		UpdateFunc: func(_, object any) { others.add("changed", object) },
		DeleteFunc: func(object any) { others.add("deleted", object) },
	}, toolscache.HandlerOptions{})
	require.NoError(t, err)
	scraped := func() scrapes.Scrape {
		return scrapes.Take(t, promhttp.HandlerFor(metrics.Registry, promhttp.HandlerOpts{}), time.Now())
	}
	none, counted := scraped(), testutil.ToFloat64(panics.Objects)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(t, caches.Start(ctx)) })
	defer running.Wait()
	defer cancel()
	require.True(t, caches.WaitForCacheSync(t.Context()), "the view is complete")
	require.Eventually(t, registration.HasSynced, patience, time.Millisecond)

	var list clusterv1.MachineList
	require.NoError(t, caches.List(t.Context(), &list))
	clusters := map[string]string{}
	for i := range list.Items {
		clusters[list.Items[i].Name] = list.Items[i].Spec.ClusterName
	}
	require.Equal(t, map[string]string{"transform": "", "index": "transformed", "add": "transformed", "fine": "transformed"}, clusters)
	for version, found := range map[string]int{"fine": 1, "index": 0} {
		require.NoError(t, caches.List(t.Context(), &list, client.MatchingFields{"version": version}))
		require.Len(t, list.Items, found, version)
	}
	require.Empty(t, events.of("add"))
	require.Equal(t, []string{"added fine"}, events.of("fine"))
	require.Eventually(t, func() bool { return slices.Equal(others.of("add"), []string{"added add"}) }, patience, time.Millisecond, "another handler")
	for _, part := range []string{"ignored", `"object"="fleet/add"`, "a bug", "confined_test.go"} {
		require.Contains(t, lines.String(), part)
	}
	require.Greater(t, testutil.ToFloat64(panics.Objects), counted)
	shown, err := testutil.GatherAndCount(metrics.Registry, "capi_agent_panics_total")
	require.NoError(t, err)
	require.Equal(t, 4, shown, "from the start, one for each part")
	scrapes.Record(t, "CapiAgentPanicked", none, scraped())

	// The next version of an object.
	source.Modify(machineOf("transform", "v2"))
	source.Modify(machineOf("index", "v2"))
	source.Modify(machineOf("add", "v2"))
	for name, want := range map[string][]string{
		"transform": {"added transform", "changed v2"}, "index": {"added index", "changed v2"}, "add": {"changed v2"},
	} {
		require.Eventually(t, func() bool { return slices.Equal(events.of(name), want) }, patience, time.Millisecond, name)
	}
	require.NoError(t, caches.List(t.Context(), &list, client.MatchingFields{"version": "v2"}))
	require.Len(t, list.Items, 3)

	// A bad version is ignored, and hides no good one.
	source.Modify(machineOf("fine", "update-before"))
	source.Modify(machineOf("fine", "v3"))
	source.Modify(machineOf("fine", "update-after"))
	source.Modify(machineOf("fine", "v4"))
	source.Modify(machineOf("fine", "add"))
	source.Modify(machineOf("fine", "v5"))
	source.Modify(machineOf("fine", "delete"))
	source.Delete(machineOf("fine", "delete"))
	source.Add(machineOf("fine", "v6"))
	want := []string{
		"added fine", "changed update-before",
		"deleted update-before", "added v3",
		"deleted v3", "added update-after", "changed v4",
		"deleted v4", "changed v5", "changed delete",
		"added v6",
	}
	require.Eventually(t, func() bool { return len(events.of("fine")) == len(want) }, patience, time.Millisecond)
	require.Equal(t, want, events.of("fine"))
}

type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) add(_, line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.WriteString(line + "\n")
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
