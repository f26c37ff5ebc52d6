package agent_test

import (
	"context"
	"crypto/tls"
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
	apiclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
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
		ctx, cancel := context.WithTimeout(t.Context(), soon)
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
	valid := scraped(t, registry, time.Now())
	change("deny: [{")
	usable(0)
	scrapes.Record(t, "CapiAgentPolicyInvalid", valid, scraped(t, registry, time.Now()))
	require.Equal(t, codes.Unauthenticated, list("spoke"), "a mistake takes nothing back")
	change(denied)
	usable(1)
	require.NoError(t, plane.Client.Delete(t.Context(), policy))
	usable(0)
	within("other", codes.OK)
	require.Equal(t, codes.Unauthenticated, list("spoke"), "nor does its absence")
	again := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: "capi-agent-policy"}, Data: map[string]string{authz.PolicyKey: "identities: []"},
	}
	plane.Create(t, again)
	t.Cleanup(func() { require.NoError(t, plane.Client.Delete(context.Background(), again)) })
	within("spoke", codes.OK)
}

// Whatever the policy denies a stolen certificate by, it is in force on open streams and for new
// calls, and the certificate is accepted again once the policy no longer does.
func TestAStolenCertificateIsDeniedByAnyOfItsMarks(t *testing.T) {
	namespace := plane.Namespace(t)
	plane.Create(t, capitest.NewCluster(namespace, "spoke"), capitest.NewCluster(namespace, "other"))
	o := testOptions(namespace)
	o.Policy = agentNamespace + "/capi-agent-policy" // the only one that the agent may read
	policy := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: agentNamespace, Name: "capi-agent-policy"}, Data: map[string]string{authz.PolicyKey: "identities: []"},
	}
	plane.Create(t, policy)
	t.Cleanup(func() { require.NoError(t, plane.Client.Delete(context.Background(), policy)) })
	r := start(t, agent.Config{Options: o})
	change := func(text string) {
		t.Helper()
		policy.Data[authz.PolicyKey] = text
		require.NoError(t, plane.Client.Update(t.Context(), policy))
	}
	id := "spiffe://karpenter-capi/cluster/" + namespace + "/spoke"
	files := r.authority.Issue(t, t.TempDir(), r.authority, id)
	stolen, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(t, err)
	by, err := apiclient.New(apiclient.Options{
		Address: r.address, TLS: &apiclient.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, by.Close()) })
	ref := &agentv1alpha1.ClusterRef{Namespace: namespace, Name: "spoke"}
	list := func() codes.Code {
		_, err := by.NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: ref})
		return status.Code(err)
	}
	for _, c := range []struct {
		mark, policy string
		code         codes.Code
	}{
		{"id", "deny:\n- id: " + id, codes.Unauthenticated},
		{"serial number", "deny:\n- serial: " + stolen.Leaf.SerialNumber.Text(16), codes.Unauthenticated},
		{
			"time of issue", "deny:\n- {id: " + id + ", issuedBefore: " + stolen.Leaf.NotBefore.Add(time.Second).Format(time.RFC3339) + "}",
			codes.Unauthenticated,
		},
		{"list of Clusters", "clusters: [" + namespace + "/other]", codes.PermissionDenied},
	} {
		t.Run(c.mark, func(t *testing.T) {
			change("identities: []")
			require.EventuallyWithT(t, func(t *assert.CollectT) { assert.Equal(t, codes.OK, list()) }, soon, 20*time.Millisecond)
			stream, err := by.Machines.WatchMachines(t.Context(), &agentv1alpha1.WatchMachinesRequest{Cluster: ref})
			require.NoError(t, err)
			_, err = stream.Recv()
			require.NoError(t, err)
			change(c.policy)
			changed := time.Now()
			require.Equal(t, c.code, status.Code(drain(stream)))
			require.Less(t, time.Since(changed), soon, "on an open stream")
			require.EventuallyWithT(t, func(t *assert.CollectT) { assert.Equal(t, c.code, list()) }, soon-time.Since(changed), 20*time.Millisecond)
		})
	}
}
