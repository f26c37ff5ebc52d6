package configmap

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// The first reading is no controller's. Content that panics is like any other that cannot be used.
func TestContentThatPanicsIsNotUsed(t *testing.T) {
	name := types.NamespacedName{Namespace: "fleet", Name: "list"}
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name}, Data: map[string]string{"key": "bad"}}
	kube := fake.NewClientBuilder().WithObjects(object).Build()
	recorder := events.NewFakeRecorder(10)
	f := &Follower[string]{
		Config: Config[string]{Name: name, Key: "key", What: "list", Recorder: recorder, Parse: func(content []byte) (*string, error) {
			if string(content) == "bad" {
				panic("a bug")
			}
			return new(string(content)), nil
		}},
		reader: kube, usable: prometheus.NewGauge(prometheus.GaugeOpts{Name: "usable", Help: "Whether it is."}), first: make(chan struct{}),
	}
	write := func(content string) {
		t.Helper()
		require.NoError(t, kube.Get(t.Context(), name, object))
		object.Data["key"] = content
		require.NoError(t, kube.Update(t.Context(), object))
	}
	content, err := f.Read(t.Context())
	require.NoError(t, err)
	require.Nil(t, content)
	require.Contains(t, f.Problem(), "a bug")
	require.Contains(t, <-recorder.Events, "InvalidList")

	write("good")
	_, err = f.Reconcile(t.Context(), reconcile.Request{})
	require.NoError(t, err)
	require.Equal(t, "good", *f.Current())
	require.Empty(t, f.Problem())

	write("bad")
	for range 2 { // a failed reconciliation is repeated
		_, err = f.Reconcile(t.Context(), reconcile.Request{})
		require.NoError(t, err)
		require.Contains(t, f.Problem(), "a bug")
		require.Zero(t, testutil.ToFloat64(f.usable))
	}
	require.Equal(t, "good", *f.Current(), "the last usable one stays in use")
}
