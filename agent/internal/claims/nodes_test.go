package claims

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// nodeDeadline is the Node deadline of the engines that receive reports of Nodes.
const nodeDeadline = 30 * time.Minute

// hearing is a hub and one engine that holders report their Nodes to.
type hearing struct {
	*Engine

	t     *testing.T
	clock *testclock.FakeClock
	began time.Time
}

func newHearing(t *testing.T, objects ...client.Object) *hearing {
	t.Helper()
	h := &hearing{Engine: engineWith(t, objects...), t: t, began: newTestTime()}
	h.clock = testclock.NewFakeClock(h.began)
	h.Clock, h.parallel, h.Failure.NodeDeadline = h.clock, 1, nodeDeadline
	return h
}

// replica is another agent of the same hub.
func (h *hearing) replica() *Engine {
	return New(h.Config)
}

// report is one round of the holder: it takes a token, reads everything, and calls.
func (h *hearing) report(complete bool, nodes ...NodeReport) {
	h.t.Helper()
	_, token, err := h.List(h.t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
	require.NoError(h.t, err)
	_, err = h.Sync(h.t.Context(), SyncRequest{
		Namespace: namespace, Cluster: clusterName, Holder: holder, Token: token, LiveIDs: []string{"a"}, Nodes: nodes, NodesComplete: complete,
	})
	require.NoError(h.t, err)
}

func (h *hearing) status() v1alpha1.MachineClaimStatus {
	h.t.Helper()
	c, err := h.Get(h.t.Context(), Key{Namespace: namespace, Cluster: clusterName, ID: "a"})
	require.NoError(h.t, err)
	return c.Status
}

func (h *hearing) annotation(machine string) string {
	h.t.Helper()
	var m clusterv1.Machine
	require.NoError(h.t, h.Client.Get(h.t.Context(), client.ObjectKey{Namespace: namespace, Name: machine}, &m))
	return m.Annotations[v1alpha1.NodeRegisteredAtAnnotation]
}

// joining is a Machine with a provider ID whose Node Cluster API has not seen.
func joining(name, claim string) *clusterv1.Machine {
	m := machineOf(name)
	m.Spec.ProviderID = "sim://" + name
	m.CreationTimestamp = metav1.NewTime(newTestTime())
	if claim != "" {
		m.Labels[v1alpha1.ClaimLabel] = claim
	}
	return m
}

func boundTo(m *clusterv1.Machine, id, holder string) *v1alpha1.MachineClaim {
	return &v1alpha1.MachineClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: v1alpha1.ObjectName(clusterName, id), CreationTimestamp: m.CreationTimestamp,
			Labels: map[string]string{
				v1alpha1.NodeGroupLabel: "small", v1alpha1.ClusterLabel: clusterName, v1alpha1.HolderLabel: holder,
			},
		},
		Spec: v1alpha1.MachineClaimSpec{
			ClusterName: clusterName, ClaimID: id, Holder: holder, NodeGroup: "small", Candidates: []string{"small"},
		},
		Status: v1alpha1.MachineClaimStatus{
			Phase: v1alpha1.PhaseBound, Machine: &v1alpha1.MachineReference{Name: m.Name, UID: m.UID, ProviderID: m.Spec.ProviderID},
		},
	}
}

// The holder's report of a Machine's Node is recorded on the Machine's claim.
func TestReportsOfNodesAreKeptOnTheClaim(t *testing.T) {
	const none, late = time.Duration(0), nodeDeadline + time.Minute
	registered, unregistered := NodeReport{ProviderID: "sim://m"}, NodeReport{ProviderID: "sim://m", Unregistered: true}
	other := NodeReport{ProviderID: "sim://other"}
	for _, test := range []struct {
		name string
		// change is applied to the Machine and its claim before.
		change   func(*clusterv1.Machine, *v1alpha1.MachineClaim)
		after    time.Duration
		complete bool
		nodes    []NodeReport
		// registered and absent are the recorded times, counted from the Machine's creation; -1
		// means not recorded.
		registered, absent time.Duration
	}{
		{"a registered Node", nil, time.Minute, false, []NodeReport{other, registered}, time.Minute, -1},
		{"a registered Node of a list that was cut off, after the deadline", nil, late, false, []NodeReport{registered}, late, -1},
		{"the first report counts", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			at := metav1.NewTime(newTestTime())
			c.Status.NodeRegisteredAt = &at
		}, late, true, []NodeReport{registered}, none, -1},
		{"two Nodes with one provider ID, one of them registered", nil, late, true, []NodeReport{registered, unregistered}, late, -1},
		{"a Node that Cluster API sees too", func(m *clusterv1.Machine, _ *v1alpha1.MachineClaim) {
			m.Status.NodeRef.Name = "m"
		}, time.Minute, true, []NodeReport{registered}, time.Minute, -1},
		{"a claim that is being released", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			c.Status.Phase = v1alpha1.PhaseReleasing
		}, time.Minute, true, []NodeReport{registered}, time.Minute, -1},
		{"a Node that joined and is not registered", nil, late, true, []NodeReport{unregistered}, -1, -1},
		{"no Node after the deadline", nil, late, true, []NodeReport{other}, -1, late},
		{"no Nodes at all after the deadline", nil, late, true, nil, -1, late},
		{"no Node before the deadline", nil, nodeDeadline - time.Second, true, nil, -1, -1},
		{"no Node before the claim's own deadline", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			c.Spec.MaxNodeProvisionTimeSeconds = new(int32(late / time.Second))
		}, late, true, nil, -1, -1},
		{"no Node after the claim's own deadline", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			c.Spec.MaxNodeProvisionTimeSeconds = new(int32(60))
		}, 2 * time.Minute, true, nil, -1, 2 * time.Minute},
		{"no Node in a list that was cut off", nil, late, false, []NodeReport{other}, -1, -1},
		{"no Node, but Cluster API has seen it", func(m *clusterv1.Machine, _ *v1alpha1.MachineClaim) {
			m.Status.NodeRef.Name = "m"
		}, late, true, nil, -1, -1},
		{"no Node, but it was registered once", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			at := metav1.NewTime(newTestTime())
			c.Status.NodeRegisteredAt = &at
		}, late, true, nil, none, -1},
		{"a Machine that has no provider ID yet", func(m *clusterv1.Machine, _ *v1alpha1.MachineClaim) {
			m.Spec.ProviderID = ""
		}, late, true, nil, -1, -1},
		{"a Machine of another Cluster with that provider ID", func(m *clusterv1.Machine, _ *v1alpha1.MachineClaim) {
			m.Spec.ClusterName = "another"
		}, late, true, []NodeReport{registered}, -1, -1},
		{"a statement of absence that a Node refutes", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			at := metav1.NewTime(newTestTime().Add(late - time.Second))
			c.Status.NodeAbsentAt = &at
		}, late, false, []NodeReport{unregistered}, -1, -1},
		{"a statement of absence that a registered Node refutes", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			at := metav1.NewTime(newTestTime().Add(late - time.Second))
			c.Status.NodeAbsentAt = &at
		}, late, true, []NodeReport{registered}, late, -1},
		{"a recent statement of absence", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			at := metav1.NewTime(newTestTime().Add(late - 59*time.Second))
			c.Status.NodeAbsentAt = &at
		}, late, true, nil, -1, late - 59*time.Second},
		{"an old statement of absence", func(_ *clusterv1.Machine, c *v1alpha1.MachineClaim) {
			at := metav1.NewTime(newTestTime().Add(late - time.Minute))
			c.Status.NodeAbsentAt = &at
		}, late, true, nil, -1, late},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := joining("m", "a")
			c := boundTo(m, "a", holder)
			if test.change != nil {
				test.change(m, c)
			}
			h := newHearing(t, groupOf("small", 1, nil), m, c)
			h.clock.Step(test.after)
			h.report(test.complete, test.nodes...)
			sinceCreation := func(at *metav1.Time) time.Duration {
				if at == nil {
					return -1
				}
				return at.Sub(newTestTime())
			}
			status := h.status()
			assert.Equal(t, test.registered, sinceCreation(status.NodeRegisteredAt), "registered")
			assert.Equal(t, test.absent, sinceCreation(status.NodeAbsentAt), "absent")
		})
	}
}

// The time of absence is before the list was read, because a Node may join during the read.
func TestAbsenceIsOfTheTimeBeforeTheNodesWereRead(t *testing.T) {
	m := joining("m", "a")
	h := newHearing(t, groupOf("small", 1, nil), m, boundTo(m, "a", holder))
	h.clock.Step(nodeDeadline - time.Second)
	_, token, err := h.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
	require.NoError(t, err)
	h.clock.Step(time.Minute)
	_, err = h.Sync(t.Context(), SyncRequest{
		Namespace: namespace, Cluster: clusterName, Holder: holder, Token: token, LiveIDs: []string{"a"}, NodesComplete: true,
	})
	require.NoError(t, err)
	assert.Nil(t, h.status().NodeAbsentAt, "the Nodes may have been read before the deadline")
}

// A replica that the holder never called decides from the same facts.
func TestAReplicaThatGotNoReportSeesWhatItSaid(t *testing.T) {
	m, floor := joining("m", "a"), joining("floor", "")
	h := newHearing(t, groupOf("small", 2, nil), m, floor, boundTo(m, "a", holder))
	h.report(true, NodeReport{ProviderID: "sim://m"}, NodeReport{ProviderID: "sim://floor"})

	s, err := h.replica().read(t.Context(), uncached, client.ObjectKey{Namespace: namespace, Name: "small"})
	require.NoError(t, err)
	require.Len(t, s.Claims, 1)
	assert.NotNil(t, s.Claims[0].Status.NodeRegisteredAt)
	for _, read := range s.Machines {
		if read.Name == floor.Name {
			assert.NotEmpty(t, read.Annotations[v1alpha1.NodeRegisteredAtAnnotation])
		}
	}
	require.Len(t, s.Machines, 2)
}

// The report is recorded on the Machine itself if none of the holder's claims has it.
func TestReportsOfNodesAreKeptOnMachinesWithoutAClaim(t *testing.T) {
	for _, test := range []struct {
		name    string
		machine func(*clusterv1.Machine)
		group   *clusterv1.MachineDeployment
		report  NodeReport
		noted   bool
	}{
		{name: "registered", report: NodeReport{ProviderID: "sim://m"}, noted: true},
		{name: "not registered yet", report: NodeReport{ProviderID: "sim://m", Unregistered: true}},
		{name: "another Node", report: NodeReport{ProviderID: "sim://n"}},
		{
			name: "claimed by another holder", report: NodeReport{ProviderID: "sim://m"}, noted: true,
			machine: func(m *clusterv1.Machine) { m.Labels[v1alpha1.ClaimLabel] = "b" },
		},
		{
			name: "Cluster API sees the Node", report: NodeReport{ProviderID: "sim://m"},
			machine: func(m *clusterv1.Machine) { m.Status.NodeRef.Name = "m" },
		},
		{
			name: "of no MachineDeployment", report: NodeReport{ProviderID: "sim://m"},
			machine: func(m *clusterv1.Machine) { delete(m.Labels, clusterv1.MachineDeploymentNameLabel) },
		},
		{
			name: "of a MachineDeployment that is not ours", report: NodeReport{ProviderID: "sim://m"},
			group: &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "small"}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, group := joining("m", ""), test.group
			if test.machine != nil {
				test.machine(m)
			}
			if group == nil {
				group = groupOf("small", 1, nil)
			}
			h := newHearing(t, group, m, boundTo(m, "b", "cluster-autoscaler"))
			h.report(true, test.report)
			if !test.noted {
				assert.Empty(t, h.annotation("m"))
				return
			}
			assert.Equal(t, newTestTime().Format(time.RFC3339), h.annotation("m"))
			h.clock.Step(time.Hour)
			h.report(true, test.report)
			assert.Equal(t, newTestTime().Format(time.RFC3339), h.annotation("m"), "once")
		})
	}
}

// A report of thousands of Nodes does not cause thousands of writes at once, and none of it is
// lost.
func TestTheWritesOfOneReportAreBounded(t *testing.T) {
	objects := []client.Object{groupOf("small", notesPerSync+50, nil)}
	var nodes []NodeReport
	for i := range notesPerSync + 50 {
		id := fmt.Sprint("c", i)
		m := joining(fmt.Sprint("m", i), id)
		objects = append(objects, m, boundTo(m, id, holder))
		nodes = append(nodes, NodeReport{ProviderID: m.Spec.ProviderID})
	}
	h := newHearing(t, objects...)
	for _, want := range []int{notesPerSync, notesPerSync + 50} {
		h.report(true, nodes...)
		claims, _, err := h.List(t.Context(), ListOptions{Namespace: namespace, Cluster: clusterName, Holder: holder})
		require.NoError(t, err)
		noted := 0
		for i := range claims {
			if claims[i].Status.NodeRegisteredAt != nil {
				noted++
			}
		}
		assert.Equal(t, want, noted)
	}
}

// A failed write is no reason to keep claims whose owners are gone.
func TestANoteThatCannotBeWrittenIsLeftToTheNextReport(t *testing.T) {
	m := joining("m", "a")
	h := newHearing(t, groupOf("small", 1, nil), m, boundTo(m, "a", holder))
	under, ok := h.Client.(client.WithWatch)
	require.True(t, ok)
	refuse := true
	h.Client = interceptor.NewClient(under, interceptor.Funcs{
		SubResourceUpdate: func(
			ctx context.Context, c client.Client, subresource string, object client.Object, options ...client.SubResourceUpdateOption,
		) error {
			if refuse {
				return errors.New("the API server is away")
			}
			return c.SubResource(subresource).Update(ctx, object, options...)
		},
	})
	h.report(true, NodeReport{ProviderID: "sim://m"})
	assert.Nil(t, h.status().NodeRegisteredAt)
	refuse = false
	h.report(true, NodeReport{ProviderID: "sim://m"})
	assert.NotNil(t, h.status().NodeRegisteredAt)
}

// The record protects a running Node from the next live set, which may be an older one. A
// concurrent write on the claim must not prevent it.
func TestANoteThatANodeIsRegisteredOutlivesALostRace(t *testing.T) {
	m := joining("m", "a")
	h := newHearing(t, groupOf("small", 1, nil), m, boundTo(m, "a", holder))
	under, ok := h.Client.(client.WithWatch)
	require.True(t, ok)
	raced := false
	h.Client = interceptor.NewClient(under, interceptor.Funcs{
		SubResourceUpdate: func(
			ctx context.Context, c client.Client, subresource string, object client.Object, options ...client.SubResourceUpdateOption,
		) error {
			if !raced {
				raced = true
				other := &v1alpha1.MachineClaim{}
				if err := c.Get(ctx, client.ObjectKeyFromObject(object), other); err != nil {
					return err
				}
				other.Status.Message = "another agent was first"
				if err := c.SubResource(subresource).Update(ctx, other); err != nil {
					return err
				}
			}
			return c.SubResource(subresource).Update(ctx, object, options...)
		},
	})
	h.report(true, NodeReport{ProviderID: "sim://m"})
	assert.True(t, raced)
	assert.NotNil(t, h.status().NodeRegisteredAt)
	assert.Equal(t, "another agent was first", h.status().Message)
}
