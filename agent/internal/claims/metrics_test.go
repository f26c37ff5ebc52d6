package claims

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clocktesting "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
)

// measured returns the sum of the values of counters and gauges, and of the counts of histograms,
// whose series have the labels; -1 if there is none.
func measured(t *testing.T, name string, labels prometheus.Labels, more ...prometheus.Collector) float64 {
	t.Helper()
	own := prometheus.NewRegistry()
	own.MustRegister(more...)
	families, err := prometheus.Gatherers{metrics.Registry, own}.Gather()
	require.NoError(t, err)
	sum, found := 0.0, false
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			has := prometheus.Labels{}
			for _, l := range m.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			matches := true
			for label, value := range labels {
				matches = matches && has[label] == value
			}
			if matches {
				found = true
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	if !found {
		return -1
	}
	return sum
}

// measuredCluster is a Cluster of its own, as the metrics belong to the process.
const measuredCluster = "measured"

func askingMeasured(id string, candidates ...string) Request {
	return Request{Namespace: namespace, Cluster: measuredCluster, ID: id, Holder: "karpenter", Candidates: candidates}
}

func measuring(t *testing.T) (*Engine, *clocktesting.FakeClock) {
	t.Helper()
	group := groupOf("measured-workers", 0, nil)
	group.Spec.ClusterName = measuredCluster
	e := engineWith(t, group, &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: measuredCluster}})
	now := clocktesting.NewFakeClock(newTestTime())
	e.Clock = now
	e.spawn = func(run func()) { run() }
	return e, now
}

func TestAClaimsLifeIsMeasuredByCluster(t *testing.T) {
	of := prometheus.Labels{"namespace": namespace, "cluster": measuredCluster}
	with := func(label, value string) prometheus.Labels {
		return prometheus.Labels{"namespace": namespace, "cluster": measuredCluster, label: value}
	}
	e, now := measuring(t)
	none := scraped(t, e)
	record := func(alert string) {
		t.Helper()
		scrapes.Record(t, alert, none, scraped(t, e), scrapes.Only("cluster", measuredCluster))
	}
	c, err := e.Create(t.Context(), askingMeasured("a", "measured-workers"))
	require.NoError(t, err)
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_creates_total", with("result", "durable")), 0)
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_create_seconds", of), 0)
	for _, result := range []string{"refused", "cancelled", "failed"} {
		assert.Zero(t, measured(t, "capi_agent_claim_creates_total", with("result", result)), "it increases from zero")
	}
	for _, reason := range []string{protocol.ReasonMachineLost, protocol.ReasonReleased, protocol.ReasonCancelled} {
		assert.Zero(t, measured(t, "capi_agent_claims_ended_total", with("reason", reason)), "it increases from zero")
	}
	for _, class := range []string{"Capacity", "Quota", "Configuration", "GivenUp", "TimedOut", "Reported"} {
		assert.Zero(t, measured(t, "capi_agent_claims_ended_total", with("class", class)), "it increases from zero")
	}

	_, err = e.Create(t.Context(), askingMeasured("b", "no-such-group"))
	require.Error(t, err)
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_creates_total", with("result", "refused")), 0)
	_, err = e.Create(t.Context(), Request{Namespace: namespace, Cluster: "no-such-cluster", ID: "b", Candidates: []string{"x"}})
	require.ErrorIs(t, err, ErrUnknownCluster)
	assert.InDelta(t, -1, measured(t, "capi_agent_claim_creates_total", prometheus.Labels{"cluster": "no-such-cluster"}), 0, "callers make no series")

	hub := e.Client.(client.WithWatch) //nolint:forcetypeassert // the fake is one
	e.Client = interceptor.NewClient(hub, interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			return errors.New("the hub is full")
		},
	})
	_, err = e.Create(t.Context(), askingMeasured("c", "measured-workers"))
	require.Error(t, err)
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_creates_total", with("result", "failed")), 0)
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_create_seconds", of), 0, "only of what became durable")
	failed := measured(t, "capi_agent_claim_creates_total", with("result", "failed"))
	durable := measured(t, "capi_agent_claim_creates_total", with("result", "durable"))
	assert.Greater(t, failed/(failed+durable), 0.05)
	record("CapiAgentClaimsNotDurable")
	e.Client = hub

	now.Step(time.Minute)
	machine := machineOf("measured-machine")
	require.NoError(t, hub.Create(t.Context(), machine))
	require.NoError(t, e.label(t.Context(), c, machine))
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_bound_seconds", of), 0)
	require.NoError(t, hub.Get(t.Context(), client.ObjectKeyFromObject(c), c)) // the agent has written its status
	require.NoError(t, e.noteRegistered(c).write(t.Context()))
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_node_joined_seconds", of), 0)
	c.Status.FailureClass = "Configuration"
	require.NoError(t, e.endClaim(t.Context(), c, v1alpha1.Event{Reason: protocol.ReasonFailed}))
	assert.InDelta(t, 1, measured(t, "capi_agent_claims_ended_total", prometheus.Labels{
		"namespace": namespace, "cluster": measuredCluster, "machine_deployment": "measured-workers", "reason": protocol.ReasonFailed,
		"class": "Configuration",
	}), 0)
	assert.Greater(t, measured(t, "capi_agent_claims_ended_total", with("reason", protocol.ReasonFailed))/durable, 0.05)
	record("CapiAgentClaimsFail")

	// Those of owners that exist stay.
	kept := measured(t, "capi_agent_claims_ended_total", nil, e.Collector())
	assert.Positive(t, kept)
	group := groupOf("measured-workers", 0, nil)
	require.NoError(t, hub.Delete(t.Context(), group))
	measured(t, "", nil, e.Collector())
	assert.InDelta(t, -1, measured(t, "capi_agent_claims_ended_total", prometheus.Labels{"machine_deployment": "measured-workers"}), 0)
	assert.InDelta(t, 1, measured(t, "capi_agent_claim_bound_seconds", of), 0)
	require.NoError(t, hub.Delete(t.Context(), &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: measuredCluster}}))
	measured(t, "", nil, e.Collector())
	for _, name := range []string{"capi_agent_claim_creates_total", "capi_agent_claim_create_seconds", "capi_agent_claim_bound_seconds"} {
		assert.InDelta(t, -1, measured(t, name, of), 0, name)
	}
}

// A histogram that appears with its first observation has no rate that a rule could see.
func TestTheSeriesOfAClusterExistBeforeItsFirstClaim(t *testing.T) {
	member := groupOf("first-workers", 0, nil)
	member.Labels, member.Spec.ClusterName = map[string]string{v1alpha1.MemberLabel: ""}, "first-cluster"
	other := groupOf("other-workers", 0, nil) // does not take part
	other.Labels, other.Spec.ClusterName = nil, "other-cluster"
	cluster := func(name string) *clusterv1.Cluster {
		return &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	}
	e := engineWith(t, member, other, cluster("first-cluster"), cluster("other-cluster"))
	measured(t, "", nil, e.Collector())
	for _, name := range []string{
		"capi_agent_claim_creates_total", "capi_agent_claim_create_seconds", "capi_agent_claim_bound_seconds", "capi_agent_claim_node_joined_seconds",
		"capi_agent_claims_ended_total",
	} {
		assert.InDelta(t, 0, measured(t, name, prometheus.Labels{"namespace": namespace, "cluster": "first-cluster"}), 0, name)
		assert.InDelta(t, -1, measured(t, name, prometheus.Labels{"namespace": namespace, "cluster": "other-cluster"}), 0, name)
	}
}

func TestTheClassesOfEndedClaimsAreFew(t *testing.T) {
	of := func(class string) *v1alpha1.MachineClaim {
		return &v1alpha1.MachineClaim{Status: v1alpha1.MachineClaimStatus{FailureClass: class}}
	}
	assert.Equal(t, "Capacity", classLabel(of("Capacity"), protocol.ReasonFailed))
	assert.Equal(t, "Unknown", classLabel(of(""), protocol.ReasonFailed), "an older agent gave it up")
	assert.Equal(t, "Unknown", classLabel(of("OfANewerAgent"), protocol.ReasonFailed))
	assert.Empty(t, classLabel(of("Capacity"), protocol.ReasonMachineLost))
	assert.Empty(t, classLabel(of(""), protocol.ReasonReleased))
}

func TestALimitThatIsReachedIsCounted(t *testing.T) {
	e, _ := measuring(t)
	e.Bounds = Bounds{Claims: 1}
	_, err := e.Create(t.Context(), askingMeasured("a", "measured-workers"))
	require.NoError(t, err)
	limit := prometheus.Labels{"cluster": measuredCluster, "limit": "live"}
	before := measured(t, "capi_agent_claims_refused_total", limit)
	assert.GreaterOrEqual(t, before, 0.0, "it increases from zero")
	accepted := scraped(t, e)
	_, err = e.Create(t.Context(), askingMeasured("b", "measured-workers"))
	requireTooMany(t, err, BoundLive)
	assert.InDelta(t, before+1, measured(t, "capi_agent_claims_refused_total", limit), 0)
	scrapes.Record(t, "CapiAgentClaimsLimited", accepted, scraped(t, e), scrapes.Only("cluster", measuredCluster))
}

func TestWhatWaitsForAPersonIsShown(t *testing.T) {
	frozen := protocol.Ledger{Version: protocol.LedgerVersion, Seq: 1, Lowered: true}
	kept := heldClaim("kept", newTestTime())
	kept.Status.Phase = v1alpha1.PhaseBound
	nothing := scraped(t, engineWith(t, kept, groupOf("a", 0, nil), groupOf("unreadable", 0, nil), groupOf("frozen", 0, nil)))
	kept.Status.Reason = protocol.ReasonOwnerMissing
	e := engineWith(t, kept, groupOf("a", 0, nil), groupOf("unreadable", 0, map[string]string{v1alpha1.LedgerAnnotation: "{"}),
		groupOf("frozen", 0, map[string]string{v1alpha1.LedgerAnnotation: frozen.Encode()}))
	assert.InDelta(t, 1, measured(t, "capi_agent_node_group_frozen", prometheus.Labels{"machine_deployment": "frozen"}, e.Collector()), 0)
	assert.InDelta(t, 1, measured(t, "capi_agent_claims_owner_missing", prometheus.Labels{"cluster": clusterName}, e.Collector()), 0)
	assert.InDelta(t, 1, measured(t, "capi_agent_ledger_unreadable", prometheus.Labels{"machine_deployment": "unreadable"}, e.Collector()), 0)
	for _, alert := range []string{"CapiAgentNodeGroupFrozen", "CapiAgentLedgerUnreadable", "CapiAgentClaimsOwnerMissing"} {
		scrapes.Record(t, alert, nothing, scraped(t, e))
	}
}

func TestWritesAreCountedByTheirResult(t *testing.T) {
	machines := schema.GroupResource{Resource: "machines"}
	for want, errs := range map[string][]error{
		"ok":        {nil},
		"lost_race": {fmt.Errorf("writing: %w", ErrConflict), apierrors.NewConflict(machines, "m", nil), apierrors.NewNotFound(machines, "m")},
		"refused":   {apierrors.NewForbidden(machines, "m", nil), fmt.Errorf("writing: %w", ErrWriteRefused)},
		"failed":    {context.DeadlineExceeded, apierrors.NewInternalError(errors.New("etcd")), apierrors.NewTooManyRequests("later", 1)},
	} {
		for _, err := range errs {
			assert.Equal(t, want, result(err), "%v", err)
		}
	}
}
