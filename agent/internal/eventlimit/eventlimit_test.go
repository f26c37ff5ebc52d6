package eventlimit_test

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/eventlimit"
)

type recorded []string

func (r *recorded) Eventf(_, _ kruntime.Object, _, _, _, note string, args ...any) {
	*r = append(*r, fmt.Sprintf(note, args...))
}

func TestEventsAboutOneClusterAreBounded(t *testing.T) {
	now, registry, all := clocktesting.NewFakeClock(time.Now()), prometheus.NewRegistry(), &recorded{}
	recorder, err := eventlimit.New(all, now, registry)
	require.NoError(t, err)
	event := func(about kruntime.Object, reason string) (is bool) {
		before := len(*all)
		recorder.Eventf(about, nil, corev1.EventTypeWarning, reason, "Act", "about %s", "it")
		return len(*all) > before
	}
	claim := func(namespace, cluster, name string) kruntime.Object {
		return &v1alpha1.MachineClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v1alpha1.MachineClaimSpec{ClusterName: cluster},
		}
	}
	for i := range 5000 {
		require.True(t, event(claim("fleet", "a", strconv.Itoa(i)), "OwnerMissing"))
	}
	named, other := metav1.ObjectMeta{Namespace: "fleet", Name: "a"}, metav1.ObjectMeta{Namespace: "fleet", Name: "other"}
	for _, object := range []kruntime.Object{
		claim("fleet", "a", "another"),
		&clusterv1.Cluster{ObjectMeta: named}, &v1alpha1.Spoke{ObjectMeta: named},
		&clusterv1.MachineDeployment{Spec: clusterv1.MachineDeploymentSpec{ClusterName: "a"}, ObjectMeta: other},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Labels: map[string]string{clusterv1.ClusterNameLabel: "a"}}},
	} {
		require.False(t, event(object, "OwnerMissing"), "%T", object)
	}
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP capi_agent_events_dropped_total Events that were not recorded in the hub, because there were too many with the same reason about one Cluster.
# TYPE capi_agent_events_dropped_total counter
capi_agent_events_dropped_total 5
`)))

	require.True(t, event(claim("fleet", "a", "1"), "Failed"), "another reason")
	require.True(t, event(claim("fleet", "b", "1"), "OwnerMissing"), "another Cluster")
	require.True(t, event(claim("other", "a", "1"), "OwnerMissing"), "a Cluster of another namespace")
	now.Step(2 * time.Second)
	require.True(t, event(claim("fleet", "a", "1"), "OwnerMissing"))
	require.True(t, event(claim("fleet", "a", "2"), "OwnerMissing"))
	require.False(t, event(claim("fleet", "a", "3"), "OwnerMissing"))
	now.Step(2 * time.Hour)
	for i := range 5000 {
		require.True(t, event(claim("fleet", "a", strconv.Itoa(i)), "OwnerMissing"))
	}
	require.False(t, event(claim("fleet", "a", "3"), "OwnerMissing"))
}

// A caller that has the same event recorded over and over occupies no memory with it.
func TestDroppedEventsTakeNoMemory(t *testing.T) {
	now, all := clocktesting.NewFakeClock(time.Now()), &recorded{}
	recorder, err := eventlimit.New(all, now, nil)
	require.NoError(t, err)
	about := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "a"}}
	live := func() int64 {
		var memory runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&memory)
		return int64(memory.HeapAlloc)
	}
	before := live()
	for range 200_000 {
		recorder.Eventf(about, nil, corev1.EventTypeWarning, "LiveSetRefused", "Sync", "refused")
	}
	require.Less(t, live()-before, int64(2<<20))
	runtime.KeepAlive(recorder)
	require.Len(t, *all, 5000)
}
