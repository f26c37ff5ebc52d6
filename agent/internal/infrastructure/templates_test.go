package infrastructure

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
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

func FuzzNewestVersion(f *testing.F) {
	f.Add("v1_v2", "v1beta1")
	f.Fuzz(func(_ *testing.T, a, b string) {
		newestVersion(map[string]string{contracts[0]: a, contracts[1]: b})
	})
}
