package pages_test

import (
	"context"
	"crypto/tls"
	"maps"
	"net"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/pkg/certificates"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// pluginWorld is a spoke with Karpenter's Deployment, its hub, and the agent, as the page describes
// them: a node of default-8fjq2, a claim of default-vb2lw that waits for its infrastructure, and a
// machine of the user.
type pluginWorld struct {
	servers map[string]*server
	// machines are the machines of the agent, by the page's names for them.
	machines map[string]string
}

var pluginCluster = &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"}

// The plugin's commands are followed in the page's order. An output that the page shows is that of
// the command above it, except for ages, ids, and where lines break.
func TestThePluginsPageCanBeFollowed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	page, err := pages.Read(root(t), "docs/kubectl-plugin.md")
	require.NoError(t, err)
	w := newPluginWorld(ctx, t)

	var printed strings.Builder
	shown, last := map[string]int{}, ""
	for _, block := range page.Blocks() {
		switch block.Language {
		case "sh":
			script := block.Code
			for ofPage, machine := range w.machines {
				script = strings.ReplaceAll(script, ofPage, machine)
			}
			last = run(ctx, t, w.servers, script)
			for ofPage, machine := range w.machines {
				last = regexp.MustCompile(`\b`+machine+`\b`).ReplaceAllString(last, ofPage)
			}
			printed.WriteString(last)
		case "":
			if last != "" {
				shown[block.Section]++
				assert.Contains(t, steady(last), steady(block.Code), "%s shows what the commands above it print:\n%s", at(page, block), last)
			}
			last = ""
		default:
			last = "" // commands that are not run
		}
	}
	require.Equal(t, map[string]int{"Why is my pod pending": 1, "Node groups and claims": 4, "The fleet": 3, "Before an adoption": 1}, shown)
	// These outputs are not shown.
	for _, part := range []string{"NodeClaim default-vb2lw: waiting", "Machine workers-7k2xq: waiting", `"subject": "Pod default/web"`} {
		require.Contains(t, printed.String(), part)
	}
}

var (
	ages = regexp.MustCompile(`\b(\d+d|\d+h\d\dm|\d+m\d\ds|\d+m|\d+s)\b`)
	uids = regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`)
)

// steady returns an output without what differs from one time to the next: white space, ages and ids.
func steady(output string) string {
	text := strings.Join(strings.Fields(output), " ")
	// The ids first: a part of one may look like an age.
	return ages.ReplaceAllString(uids.ReplaceAllString(text, "<id>"), "<age>")
}

func TestSteadyOutputsAreEqual(t *testing.T) {
	require.Equal(t, steady("a  58s ago,\n  b 2m03s"), steady("a 9s ago, b 5d"))
	require.Equal(t, steady("id 0b6f1f0d-3a52-4c5e-9d6b-0f2f8b1f5a01"), steady("id 7c1e2a90-5a52-4c5e-9d6b-0f2f8b1f5a02"))
	require.Equal(t, steady("id 63e8657f-ddf8-429d-92f2-34c921f5ce84"), steady("id 7c1e2a90-5a52-4c5e-9d6b-0f2f8b1f5a02"), "429d is no age")
	require.NotEqual(t, steady("1 Node"), steady("2 Node"))
	require.NotEqual(t, steady("workers-9xk4d"), steady("workers-7k2xq"))
}

func newPluginWorld(ctx context.Context, t *testing.T) *pluginWorld {
	t.Helper()
	charts := filepath.Join(root(t), "deploy/charts")
	w := &pluginWorld{
		servers: map[string]*server{
			"hub": start(t, filepath.Join(charts, "agent/files/crds")), "spoke": start(t, filepath.Join(charts, "shim/files/crds")),
		},
		machines: map[string]string{},
	}
	spoke, hub := w.servers["spoke"].client, w.servers["hub"].client
	agent := fakeagent.New(fakeagent.WithClusters(pluginCluster), fakeagent.WithCoolDown(time.Hour))
	t.Cleanup(agent.Close)
	w.installPlugin(ctx, t, agent)

	source := func(kind agentv1alpha1.SourceKind, detail string) *agentv1alpha1.ValueSource {
		return &agentv1alpha1.ValueSource{Kind: kind, Detail: detail}
	}
	const (
		capacity     = "capacity.cluster-autoscaler.kubernetes.io/"
		annotation   = agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION
		byDefault    = agentv1alpha1.SourceKind_SOURCE_KIND_DEFAULT
		fromTemplate = agentv1alpha1.SourceKind_SOURCE_KIND_MACHINE_TEMPLATE
		fromList     = agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST
	)
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{
		Cluster: pluginCluster, Name: "spot", InstanceType: "large", Zone: "b", CapacityType: agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT,
		MaxSize: new(int32(20)), Capacity: map[string]string{"cpu": "8", "memory": "32Gi", "pods": "110"},
		Price: &agentv1alpha1.Price{PerHour: 0.09, Currency: "EUR"},
		Sources: map[string]*agentv1alpha1.ValueSource{
			"architecture": source(byDefault, "amd64"), "operating_system": source(byDefault, "linux"),
			"capacity.cpu": source(annotation, capacity+"cpu"), "capacity.memory": source(annotation, capacity+"memory"),
			"capacity.pods": source(byDefault, "110"), "capacity_type": source(annotation, "karpenter.sh/capacity-type"),
			"instance_type": source(annotation, "node.kubernetes.io/instance-type"), "price": source(fromList, "team-a/prices large spot"),
			"zone": source(fromTemplate, "spec.template.spec.failureDomain"),
		},
		Problems: []*agentv1alpha1.Problem{{
			Field: "metadata.annotations[" + capacity + "ephemeral-disk]", Value: "0", Message: "is zero; write for example 100Gi",
		}},
	})
	agent.AddNodeGroup(&agentv1alpha1.NodeGroup{
		Cluster: pluginCluster, Name: "workers", InstanceType: "medium", Zone: "a", MaxSize: new(int32(10)), Replicas: 1,
		Price:   &agentv1alpha1.Price{PerHour: 0.2, Currency: "EUR"},
		Sources: map[string]*agentv1alpha1.ValueSource{"price": source(fromList, "team-a/prices medium")},
	})
	agent.Block("team-a/spot", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, "no capacity in zone b", time.Now().Add(5*time.Minute))
	for _, machine := range machinesOf(ctx, t, agent) {
		w.machines["workers-2c8bv"] = machine
		agent.Join(pluginCluster, machine, "ip-10-0-4-2")
		node := create(ctx, t, spoke, "{apiVersion: v1, kind: Node, metadata: {name: ip-10-0-4-2}, spec: {providerID: "+
			agent.Machine(pluginCluster, machine).GetProviderId()+"}}")
		node.Object["status"] = map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}}
		require.NoError(t, spoke.Status().Update(ctx, node))
	}

	create(ctx, t, spoke, "{apiVersion: karpenter.cluster.x-k8s.io/v1alpha1, kind: ClusterAPINodeClass, metadata: {name: default}, "+
		"spec: {adoption: {machines: All}}}")
	create(ctx, t, spoke, "{apiVersion: karpenter.sh/v1, kind: NodePool, metadata: {name: default}, "+
		"spec: {template: {spec: {nodeClassRef: "+pluginClass+", requirements: []}}}}")
	running := w.launch(ctx, t, agent, "default-8fjq2", "workers-9xk4d")
	agent.Provision(pluginCluster, running, "sim://workers-9xk4d")
	agent.Join(pluginCluster, w.machines["workers-9xk4d"], "ip-10-0-3-7")
	create(ctx, t, spoke, "{apiVersion: v1, kind: Node, metadata: {name: ip-10-0-3-7}, spec: {providerID: 'sim://workers-9xk4d'}}")

	pod := create(ctx, t, spoke, "{apiVersion: v1, kind: Pod, metadata: {namespace: default, name: web}, spec: {containers: [{name: c, image: i}]}}")
	pod.Object["status"] = map[string]any{"conditions": []any{map[string]any{
		"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available",
	}}}
	require.NoError(t, spoke.Status().Update(ctx, pod))
	w.launch(ctx, t, agent, "default-vb2lw", "workers-7k2xq")
	agent.FailMachine(pluginCluster, w.machines["workers-7k2xq"], "InstanceProvisionFailed", "the quota for instances is exceeded")
	require.NoError(t, spoke.Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: "web.planned"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web", UID: pod.GetUID()},
		Reason:         "Nominated", Message: "Pod should schedule on: nodeclaim/default-vb2lw", LastTimestamp: metav1.Now(),
	}))

	for _, namespace := range []string{"team-a", "team-b"} {
		create(ctx, t, hub, "{apiVersion: v1, kind: Namespace, metadata: {name: "+namespace+"}}")
	}
	spokeOf(ctx, t, hub, "team-a", "production", "True", "Synchronized", "The shim synchronizes its claims.", map[string]any{
		"nodePools": []any{
			map[string]any{"name": "default", "ready": true, "nodes": 1, "pendingNodeClaims": 1, "pricePerHour": "0.4"},
			map[string]any{
				"name": "gpu", "set": "accelerators", "ready": false, "nodes": 0, "pendingNodeClaims": 0, "message": "the NodeClass gpu does not exist",
			},
		},
		"published": []any{map[string]any{"kind": "NodePool", "name": "gpu", "set": "accelerators", "revision": "a1", "applied": true}},
	})
	spokeOf(ctx, t, hub, "team-b", "staging", "False", "Silent", "The shim has not synchronized its claims for 15 minutes: it does not run.", nil)
	return w
}

const pluginClass = "{group: karpenter.cluster.x-k8s.io, kind: ClusterAPINodeClass, name: default}"

// installPlugin installs Karpenter by its chart, for an agent that is reached over TLS, and calls the
// agent as Karpenter does.
func (w *pluginWorld) installPlugin(ctx context.Context, t *testing.T, agent *fakeagent.Agent) {
	t.Helper()
	spoke := w.servers["spoke"].client
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

	// The certificate is in a secret that the chart mounts.
	run(ctx, t, w.servers, `helm install karpenter deploy/charts/shim --namespace karpenter --create-namespace \
		--set agent.address=`+listener.Addr().String()+`,agent.serverName=capi-agent.hub.svc,crds.install=false \
		--set cluster.namespace=team-a,cluster.name=production`)
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

	held := certificates.NewHeld(nil)
	require.NoError(t, held.Hold(certificates.PEM{Certificate: certificate, Key: key, Authorities: authority.PEM()}))
	karpenter, err := agentclient.New(agentclient.Options{
		Address: listener.Addr().String(), UserAgent: "karpenter/v0.1.0", TLS: &agentclient.TLS{ServerName: "capi-agent.hub.svc", Source: held},
	})
	require.NoError(t, err)
	defer func() { _ = karpenter.Close() }()
	claims, err := karpenter.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: pluginCluster, Holder: "karpenter"})
	require.NoError(t, err)
	_, err = karpenter.Claims.SyncClaims(ctx, &agentv1alpha1.SyncClaimsRequest{Cluster: pluginCluster, Holder: "karpenter", Token: claims.GetToken()})
	require.NoError(t, err)
}

// launch creates a NodeClaim and its claim, whose machine has another name on the page. It returns
// the claim's id.
func (w *pluginWorld) launch(ctx context.Context, t *testing.T, agent *fakeagent.Agent, name, machine string) string {
	t.Helper()
	spoke := w.servers["spoke"].client
	nodeClaim := create(ctx, t, spoke, "{apiVersion: karpenter.sh/v1, kind: NodeClaim, metadata: {name: "+name+
		", annotations: {karpenter.cluster.x-k8s.io/node-group: team-a/workers}, labels: {karpenter.sh/nodepool: default, "+
		"node.kubernetes.io/instance-type: medium, topology.kubernetes.io/zone: a, karpenter.sh/capacity-type: on-demand}}, "+
		"spec: {nodeClassRef: "+pluginClass+", requirements: []}}")
	id := string(nodeClaim.GetUID())
	nodeClaim.Object["status"] = map[string]any{
		"providerID": "capi-claim://team-a/production/" + id,
		"conditions": []any{map[string]any{
			"type": "Launched", "status": "True", "reason": "Launched", "message": "", "lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
		}},
	}
	require.NoError(t, spoke.Status().Update(ctx, nodeClaim))
	_, err := agent.Client().Claims.CreateClaim(ctx, &agentv1alpha1.CreateClaimRequest{
		Cluster: pluginCluster, ClaimId: id, Holder: "karpenter", DisplayName: name, Candidates: []string{"team-a/workers"},
	})
	require.NoError(t, err)
	w.machines[machine] = agent.Claim(pluginCluster, id).GetMachine().GetName()
	require.NotEmpty(t, w.machines[machine])
	return id
}

// machinesOf returns the names of the machines that the agent has.
func machinesOf(ctx context.Context, t *testing.T, agent *fakeagent.Agent) []string {
	t.Helper()
	response, err := agent.Client().Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{Cluster: pluginCluster})
	require.NoError(t, err)
	var names []string
	for _, machine := range response.GetMachines() {
		names = append(names, machine.GetName())
	}
	return names
}

// spokeOf creates a Spoke with a status.
func spokeOf(ctx context.Context, t *testing.T, hub client.Client, namespace, name, connected, reason, message string, more map[string]any) {
	t.Helper()
	onboarded := time.Now().Add(-41 * 24 * time.Hour).UTC().Format(time.RFC3339)
	object := create(ctx, t, hub, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: Spoke, "+
		"metadata: {namespace: "+namespace+", name: "+name+"}, "+
		"spec: {enrollment: {onboarding: a, publicKey: '"+strings.Repeat("a", 64)+"', time: '"+onboarded+"'}}}")
	status := map[string]any{
		"conditions": []any{map[string]any{
			"type": "Connected", "status": connected, "reason": reason, "message": message, "lastTransitionTime": time.Now().UTC().Format(time.RFC3339),
		}},
		"lastSyncTime": time.Now().UTC().Format(time.RFC3339), "shimVersion": "karpenter/v0.1.0", "spokeID": "7d0fb7d2-36f4-4b5c-9d1b-2f0c4f0f6f11",
		"certificate": map[string]any{"serial": "4f", "notAfter": time.Now().Add(13*time.Hour + 5*time.Minute).UTC().Format(time.RFC3339)},
	}
	maps.Copy(status, more)
	object.Object["status"] = status
	require.NoError(t, hub.Status().Update(ctx, object))
}
