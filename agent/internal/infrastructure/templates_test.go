package infrastructure

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/cache/informertest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllertest"
)

func TestNewestVersionOfTheNewestContract(t *testing.T) {
	for want, labels := range map[string]map[string]string{
		"":         {"cluster.x-k8s.io/provider": "x"},
		"v1":       {"cluster.x-k8s.io/v1beta2": "v1"},
		"v1beta2":  {"cluster.x-k8s.io/v1beta2": "v1alpha3_v1beta2_v1beta1"},
		"v2":       {"cluster.x-k8s.io/v1beta2": "v1_v2", "cluster.x-k8s.io/v1beta1": "v3"},
		"v1beta1":  {"cluster.x-k8s.io/v1beta1": "v1beta1"},
		"v1alpha9": {"cluster.x-k8s.io/v1beta2": "_", "cluster.x-k8s.io/v1beta1": "_v1alpha9"},
	} {
		require.Equal(t, want, newestVersion(labels))
	}
}

// reader always fails.
type reader struct {
	client.Reader
	err error
}

func (r reader) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return r.err
}

func TestPermanentErrorsAreUnusableAndOthersMayPass(t *testing.T) {
	gr := schema.GroupResource{Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions"}
	ref := clusterv1.ContractVersionedObjectReference{APIGroup: "g", Kind: "K", Name: "n"}
	for name, c := range map[string]struct {
		ref      clusterv1.ContractVersionedObjectReference
		err      error
		unusable bool
	}{
		"incomplete reference": {clusterv1.ContractVersionedObjectReference{Kind: "K"}, nil, true},
		"no such CRD":          {ref, apierrors.NewNotFound(gr, "ks.g"), true},
		"no right":             {ref, apierrors.NewForbidden(gr, "ks.g", errors.New("no")), true},
		"API server away":      {ref, errors.New("connection refused"), false},
	} {
		t.Run(name, func(t *testing.T) {
			templates := New(Config{Reader: reader{err: c.err}})
			_, err := templates.Get(t.Context(), c.ref, "fleet")
			require.Equal(t, c.unusable, errors.Is(err, ErrUnusable), "%v", err)
			require.Error(t, err)
		})
	}
}

// hanging is an API server whose conversion webhook for a kind does not answer.
type hanging struct {
	client.Reader
	kind  string
	reads atomic.Int32
}

func (h *hanging) Get(ctx context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	if crd, is := into.(*metav1.PartialObjectMetadata); is {
		crd.Labels = map[string]string{contracts[0]: "v1"}
		return nil
	}
	if into.GetObjectKind().GroupVersionKind().Kind != h.kind {
		into.SetName(key.Name)
		return nil
	}
	h.reads.Add(1)
	<-ctx.Done()
	return ctx.Err()
}

// Few workers describe all node groups of all Clusters, and an agent serves none before each was
// described once.
func TestAKindWhoseReadsHangOccupiesNobodyForLong(t *testing.T) {
	now := clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	server := &hanging{kind: "Hanging"}
	templates := New(Config{Reader: server, Cache: &informertest.FakeInformers{}, Clock: now, Changed: func(schema.GroupKind, types.NamespacedName) {}})
	templates.liveWithin = 100 * time.Millisecond
	get := func(kind string) error {
		_, err := templates.Get(t.Context(), clusterv1.ContractVersionedObjectReference{APIGroup: "g", Kind: kind, Name: "n"}, "fleet")
		return err
	}
	for _, kind := range []string{"Hanging", "Other"} {
		gk := schema.GroupKind{Group: "g", Kind: kind}
		_, err := templates.kind(t.Context(), gk)
		require.NoError(t, err)
		templates.kinds[gk].informer = &controllertest.FakeInformer{} // which has not synced
	}
	now.Step(youngWatch)
	for range 50 {
		err := get("Hanging")
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrUnusable, "it may pass")
	}
	require.Equal(t, int32(1), server.reads.Load(), "the others do not wait for the same")
	require.NoError(t, get("Other"))
	now.Step(liveRest)
	require.ErrorIs(t, get("Hanging"), context.DeadlineExceeded, "it is tried again")

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	now.Step(liveRest)
	_, err := templates.Get(ended, clusterv1.ContractVersionedObjectReference{APIGroup: "g", Kind: "Hanging", Name: "n"}, "fleet")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, get("Hanging"), context.DeadlineExceeded, "a caller that has gone shows nothing")
}

func FuzzNewestVersion(f *testing.F) {
	f.Add("v1_v2", "v1beta1")
	f.Fuzz(func(_ *testing.T, a, b string) {
		newestVersion(map[string]string{contracts[0]: a, contracts[1]: b})
	})
}
