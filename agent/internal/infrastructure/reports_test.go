package infrastructure

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
)

// slow is a hub that blocks reads of infrastructure objects until answer is closed.
type slow struct {
	objects

	answer chan struct{}
}

func (s *slow) Get(ctx context.Context, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
	if _, infrastructure := into.(*unstructured.Unstructured); infrastructure {
		<-s.answer
	}
	return s.objects.Get(ctx, key, into, options...)
}

// A zone may run out of capacity when many Machines are on their way.
func TestAllReportsAreReadHoweverManyAreAskedForAtOnce(t *testing.T) {
	hub := &slow{answer: make(chan struct{})}
	reports := NewReports(hub, clocktesting.NewFakeClock(time.Now()))
	const machines = 10 * readsAtOnce
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet"}}
	m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: "infrastructure.cluster.x-k8s.io", Kind: "AWSMachine", Name: "worker-infra",
	}
	for i := range machines {
		m.UID = types.UID(strconv.Itoa(i))
		_, known := reports.Of(t.Context(), m, "InstanceReady")
		require.False(t, known)
	}
	close(hub.answer)
	require.Eventually(t, func() bool { return hub.reads.Load() == machines }, 10*time.Second, 10*time.Millisecond)
}

// patience is how long a test waits for what happens in the background.
const patience = 20 * time.Second

// objects is a hub with a CRD for every kind, and one object with this status.
type objects struct {
	client.Reader

	status any
	err    error
	reads  atomic.Int32
}

func (o *objects) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	switch into := into.(type) {
	case *metav1.PartialObjectMetadata:
		into.Labels = map[string]string{"cluster.x-k8s.io/v1beta1": "v1beta2"}
		return nil
	case *unstructured.Unstructured:
		o.reads.Add(1)
		if key.Namespace != "fleet" || key.Name != "worker-infra" || into.GetAPIVersion() != "infrastructure.cluster.x-k8s.io/v1beta2" {
			return errors.New("another object")
		}
		into.Object["status"] = o.status
		return o.err
	}
	return errors.New("another type")
}

func TestReportsAreThoseOfTheInfrastructureObject(t *testing.T) {
	condition := func(conditionType, status, reason, message string) map[string]any {
		return map[string]any{"type": conditionType, "status": status, "reason": reason, "message": message}
	}
	m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "worker", UID: "uid"}}
	m.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: "infrastructure.cluster.x-k8s.io", Kind: "AWSMachine", Name: "worker-infra",
	}
	broken := condition("InstanceReady", "False", "InstanceProvisionFailed", "no capacity")
	for name, c := range map[string]struct {
		status any
		err    error
		want   protocol.Report
	}{
		"as providers of v1beta1 have it": {
			status: map[string]any{"conditions": []any{condition("Ready", "False", "a", "b"), broken}},
			want:   protocol.Report{Reason: "InstanceProvisionFailed", Message: "no capacity"},
		},
		"as providers have it that write both": {
			status: map[string]any{
				"conditions": []any{condition("InstanceReady", "False", "older", "")}, "v1beta2": map[string]any{"conditions": []any{broken}},
			},
			want: protocol.Report{Reason: "InstanceProvisionFailed", Message: "no capacity"},
		},
		"it is true":         {status: map[string]any{"conditions": []any{condition("InstanceReady", "True", "", "")}}},
		"no such condition":  {status: map[string]any{"conditions": []any{condition("Ready", "False", "a", "b")}}},
		"no conditions":      {status: map[string]any{}},
		"of another form":    {status: map[string]any{"conditions": []any{"text", map[string]any{"type": int64(1)}}}},
		"no list":            {status: map[string]any{"conditions": "text"}},
		"cannot be read":     {status: map[string]any{}, err: errors.New("forbidden")},
		"no status":          {},
		"status of one word": {status: "broken"},
	} {
		t.Run(name, func(t *testing.T) {
			clk := clocktesting.NewFakeClock(time.Now())
			hub := &objects{status: c.status, err: c.err}
			reports := NewReports(hub, clk)
			of := func() (protocol.Report, bool) { return reports.Of(t.Context(), m, "InstanceReady") }
			_, known := of()
			require.False(t, known, "nothing waits for it")
			require.Eventually(t, func() bool { _, known := of(); return known }, patience, 10*time.Millisecond)
			report, _ := of()
			require.Equal(t, c.want, report)
			require.Never(t, func() bool { // a call may have seen nothing just before the first read ended
				_, _ = of()
				return hub.reads.Load() > 2
			}, 100*time.Millisecond, time.Millisecond, "answered from memory")
			reads := hub.reads.Load()
			clk.Step(protocol.ReportLife)
			stale := c.want
			stale.Stale = true
			report, _ = of()
			require.Equal(t, stale, report)
			require.Eventually(t, func() bool { return hub.reads.Load() > reads }, patience, 10*time.Millisecond, "read again meanwhile")
			require.Eventually(t, func() bool { report, _ := of(); return report == c.want }, patience, 10*time.Millisecond)
		})
	}
}
