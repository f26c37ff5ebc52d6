package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// soon is the time within which a denial must be in force.
const soon = 15 * time.Second

// A stolen certificate is denied by a single change of an object in the hub. Only another valid
// policy reverts that.
func TestAPolicyInTheHubIsInForceAtOnceAndForGood(t *testing.T) {
	namespace := plane.Namespace(t)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), capitest.NewCluster(namespace, "other"))
	o := testOptions(namespace)
	o.Policy = agentNamespace + "/capi-agent-policy" // as in the chart ^ It also waits until the agent has seen the last change.
	registry := prometheus.NewRegistry()
	r := start(t, agent.Config{Options: o, Registerer: registry})
	list := func(cluster string) codes.Code {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := r.client(namespace, cluster).NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{
			Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: cluster},
		})
		return status.Code(err)
	}
	within := func(cluster string, wanted codes.Code) {
		t.Helper()
		require.EventuallyWithT(t, func(c *assert.CollectT) { assert.Equal(c, wanted, list(cluster)) }, soon, 100*time.Millisecond)
	}
	require.NotEqual(t, codes.OK, list("spoke"), "nothing is served before there is a policy")

	policy := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: "capi-agent-policy"}, Data: map[string]string{authz.PolicyKey: "nonsense: true"},
	}
	plane.Create(t, policy)
	change := func(text string) {
		t.Helper()
		policy.Data[authz.PolicyKey] = text
		require.NoError(t, plane.Client.Update(t.Context(), policy))
	}
	warned := func() bool {
		var events eventsv1.EventList
		require.NoError(t, plane.Client.List(t.Context(), &events, client.InNamespace(agentNamespace)))
		return slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Kind == "ConfigMap" && e.Reason == "InvalidPolicy" && strings.Contains(e.Note, "nonsense")
		})
	}
	require.Eventually(t, warned, soon, 50*time.Millisecond)
	require.NotEqual(t, codes.OK, list("spoke"), "nor before it is valid")
	change("identities: []")
	within("spoke", codes.OK)

	stream, err := r.client(namespace, "spoke").Machines.WatchMachines(t.Context(), &agentv1alpha1.WatchMachinesRequest{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"},
	})
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := stream.Recv(); err != nil {
				ended <- err
				return
			}
		}
	}()
	denied := fmt.Sprintf("deny:\n- id: spiffe://karpenter-capi/cluster/%s/spoke\n", namespace)
	change(denied)
	within("spoke", codes.Unauthenticated)
	select {
	case err := <-ended:
		require.Equal(t, codes.Unauthenticated, status.Code(err), err)
	case <-time.After(soon):
		t.Fatal("the stream goes on")
	}

	// usable waits for the value of the policy metric, and thus until the agent has seen the last
	// change.
	usable := func(wanted float64) {
		t.Helper()
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			families, err := registry.Gather()
			assert.NoError(c, err)
			for _, family := range families {
				if family.GetName() == "capi_agent_policy_usable" {
					assert.InDelta(c, wanted, family.GetMetric()[0].GetGauge().GetValue(), 0)
					return
				}
			}
			assert.Fail(c, "no metric")
		}, soon, 50*time.Millisecond)
	}
	change("deny: [{")
	usable(0)
	require.Equal(t, codes.Unauthenticated, list("spoke"), "a mistake takes nothing back")
	change(denied)
	usable(1)
	require.NoError(t, plane.Client.Delete(t.Context(), policy))
	usable(0)
	within("other", codes.OK)
	require.Equal(t, codes.Unauthenticated, list("spoke"), "nor does its absence")
	plane.Create(t, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: "capi-agent-policy"}, Data: map[string]string{authz.PolicyKey: "identities: []"},
	})
	within("spoke", codes.OK)
}
