package pages_test

import (
	"context"
	"crypto/tls"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// The plugin's commands are followed in the page's order, with Karpenter installed by its chart, and
// an agent in which the claim of the page's pod waits for its infrastructure.
func TestThePluginsPageCanBeFollowed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/kubectl-plugin.md")
	require.NoError(t, err)
	charts := filepath.Join(root(t), "deploy/charts")
	servers := map[string]*server{"hub": start(t, filepath.Join(charts, "agent/crds")), "spoke": start(t, filepath.Join(charts, "shim/crds"))}
	spoke := servers["spoke"].client

	cluster := &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"}
	agent := fakeagent.New(fakeagent.WithClusters(cluster))
	t.Cleanup(agent.Close)
	authority, err := fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	certificate, key, err := authority.IssueServer("capi-agent.hub.svc")
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	require.NoError(t, err)
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	agent.ServeTLS(listener, &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: authority.Pool(), MinVersion: tls.VersionTLS13},
		func(string) []fakeagent.Grant { return nil })
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Cluster: cluster, Name: "workers", Zone: "a", InstanceType: "medium"})

	// The certificate is in a secret that the chart mounts.
	run(ctx, t, servers, `helm install karpenter deploy/charts/shim --namespace karpenter --create-namespace \
		--set agent.address=`+listener.Addr().String()+`,agent.serverName=capi-agent.hub.svc,cluster.namespace=team-a,cluster.name=production`)
	// Nothing runs the Deployment's pods here.
	deployment := &appsv1.Deployment{}
	require.NoError(t, spoke.Get(ctx, client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, deployment))
	deployment.Status.Replicas, deployment.Status.ReadyReplicas = *deployment.Spec.Replicas, *deployment.Spec.Replicas
	require.NoError(t, spoke.Status().Update(ctx, deployment))
	certificate, key, err = authority.IssueClient("spiffe://" + fakeagent.TrustDomain + "/cluster/team-a/production")
	require.NoError(t, err)
	require.NoError(t, spoke.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "karpenter", Name: "karpenter-agent-client"},
		Data:       map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": authority.PEM()},
	}))

	create(ctx, t, spoke, "{apiVersion: karpenter.cluster.x-k8s.io/v1alpha1, kind: ClusterAPINodeClass, metadata: {name: default}, spec: {}}")
	const class = "{group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}"
	create(ctx, t, spoke, "{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: default}, "+
		"spec: {template: {spec: {nodeClassRef: "+class+", requirements: []}}}}")
	pod := create(ctx, t, spoke, "{apiVersion: v1, kind: Pod, metadata: {namespace: default, name: web}, spec: {containers: [{name: c, image: i}]}}")
	pod.Object["status"] = map[string]any{"conditions": []any{map[string]any{
		"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available",
	}}}
	require.NoError(t, spoke.Status().Update(ctx, pod))
	nodeClaim := create(ctx, t, spoke, "{apiVersion: karpenter.sh/v1, kind: NodeClaim, metadata: {name: default-vb2lw}, "+
		"spec: {nodeClassRef: "+class+", requirements: []}}")
	nodeClaim.Object["status"] = map[string]any{
		"providerID": "capi-claim://team-a/production/" + string(nodeClaim.GetUID()),
		"conditions": []any{map[string]any{
			"type": "Launched", "status": "True", "reason": "Launched", "message": "", "lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
		}},
	}
	require.NoError(t, spoke.Status().Update(ctx, nodeClaim))
	require.NoError(t, spoke.Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: "web.planned"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web", UID: pod.GetUID()},
		Reason:         "Nominated", Message: "Pod should schedule on: nodeclaim/default-vb2lw", LastTimestamp: metav1.Now(),
	}))
	_, err = agent.Client().Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
		Cluster: cluster, ClaimId: string(nodeClaim.GetUID()), Holder: "karpenter", DisplayName: "default-vb2lw", Candidates: []string{"team-a/workers"},
	})
	require.NoError(t, err)
	machine := agent.Claim(cluster, string(nodeClaim.GetUID())).GetMachine().GetName()
	agent.FailMachine(cluster, machine, "InstanceProvisionFailed", "the quota for instances is exceeded")
	create(ctx, t, servers["hub"].client, "{apiVersion: v1, kind: Namespace, metadata: {name: team-a}}")
	create(ctx, t, servers["hub"].client,
		"{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: Spoke, metadata: {namespace: team-a, name: production}}")

	// The Machine of the page has another name here.
	script := strings.ReplaceAll(page.Script(), "workers-7k2xq", machine)
	output := run(ctx, t, servers, script)
	for _, part := range []string{
		"team-a/workers", "Pod default/web: waiting", "InstanceProvisionFailed: the quota for instances is exceeded",
		"planned for NodeClaim default-vb2lw", "NodeClaim default-vb2lw: waiting", "Machine " + machine + ": waiting", `"subject": "Pod default/web"`,
		"capacity.cpu", "held by karpenter: Bound", "team-a/production",
	} {
		require.Contains(t, output, part)
	}
}
