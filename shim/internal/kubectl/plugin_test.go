package kubectl_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/apiservertest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

const (
	serverName = "capi-agent.hub.svc"
	// reader is the path of an identity that may read all Clusters.
	reader   = "/team/observability"
	patience = 20 * time.Second
)

// environment is a workload cluster and a management cluster, real API servers without anything
// else, and a fake agent that is reached over TLS.
type environment struct {
	t          *testing.T
	spoke, hub client.Client
	// spokeFile, hubFile and limitedFile are kubeconfigs. The last one's user may read pods only.
	spokeFile, hubFile, limitedFile string
	agent                           *fakeagent.Agent
	authority                       *fakeagent.Authority
	address                         string
}

var cluster = fakeagent.DefaultCluster()

func newEnvironment(t *testing.T) *environment {
	t.Helper()
	t.Setenv("KUBECTL_CAPI_TIMEOUT", patience.String())
	w := &environment{t: t}
	var limited []byte
	w.spoke, w.spokeFile, limited = w.serve("shim")
	w.limitedFile = w.file("limited", limited)
	w.hub, w.hubFile, _ = w.serve("agent")

	w.agent = fakeagent.New(fakeagent.WithCoolDown(time.Hour))
	t.Cleanup(w.agent.Close)
	var err error
	w.authority, err = fakeagent.NewAuthority(time.Now())
	require.NoError(t, err)
	certificate, key, err := w.authority.IssueServer(serverName)
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(certificate, key)
	require.NoError(t, err)
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w.address = listener.Addr().String()
	security := &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: w.authority.Pool(), MinVersion: tls.VersionTLS13}
	w.agent.ServeTLS(listener, security, func(id string) []fakeagent.Grant {
		if id == "spiffe://"+fakeagent.TrustDomain+reader {
			return []fakeagent.Grant{{Role: fakeagent.RoleReader, AllClusters: true}}
		}
		return nil
	})
	w.agent.AddNodeGroup(&agentv1alpha1.NodeGroup{
		Name: "workers", InstanceType: "medium", Zone: "a", Replicas: 1, Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"},
		Price:    &agentv1alpha1.Price{PerHour: 0.2, Currency: "EUR"},
		Sources:  map[string]*agentv1alpha1.ValueSource{"capacity.cpu": {Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION, Detail: "capacity…/cpu"}},
		Problems: []*agentv1alpha1.Problem{{Field: "metadata.annotations[x]", Value: "many", Message: "write a number"}},
	})
	return w
}

// serve runs an API server with the CRDs of a chart. It returns a client and a kubeconfig of an
// administrator, and the kubeconfig of a user who may only read pods.
func (w *environment) serve(chart string) (kube client.Client, admin string, limited []byte) {
	w.t.Helper()
	server := apiservertest.Start(w.t, chart)
	return server.Client, w.file(chart, server.KubeconfigOf(w.t, "admin", "system:masters")), server.KubeconfigOf(w.t, "limited")
}

func (w *environment) file(name string, data []byte) string {
	w.t.Helper()
	path := filepath.Join(w.t.TempDir(), name)
	require.NoError(w.t, os.WriteFile(path, data, 0o600))
	return path
}

func (w *environment) create(objects ...client.Object) {
	w.t.Helper()
	for _, object := range objects {
		require.NoError(w.t, w.spoke.Create(w.t.Context(), object))
	}
}

// run runs the plugin for the workload cluster.
func (w *environment) run(args ...string) (string, error) {
	w.t.Helper()
	return w.runIn(w.t.Context(), append([]string{"--kubeconfig=" + w.spokeFile}, args...)...)
}

func (w *environment) runIn(ctx context.Context, args ...string) (string, error) {
	w.t.Helper()
	var out bytes.Buffer
	command := kubectl.Command("devel")
	command.SetArgs(args)
	command.SetOut(&out)
	command.SetErr(&out)
	err := command.ExecuteContext(ctx)
	return out.String(), err
}

// certificate returns a folder with a client certificate of the Cluster's own identity.
func (w *environment) certificate() (dir string) {
	w.t.Helper()
	certificate, key, err := w.authority.IssueClient("spiffe://" + fakeagent.TrustDomain + "/cluster/default/workload")
	require.NoError(w.t, err)
	dir = w.t.TempDir()
	for name, data := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": w.authority.PEM()} {
		require.NoError(w.t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	return dir
}

// top runs the command top until it is stopped, or the test ends.
func (w *environment) top(args ...string) (out *buffer, stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	out = &buffer{}
	command := kubectl.Command("devel")
	command.SetArgs(append([]string{"top"}, args...))
	command.SetOut(out)
	command.SetErr(out)
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(w.t, command.ExecuteContext(ctx)) })
	stop = func() { cancel(); running.Wait() }
	w.t.Cleanup(stop)
	return out, stop
}

// must runs the plugin, which must succeed.
func (w *environment) must(args ...string) string {
	w.t.Helper()
	out, err := w.run(args...)
	require.NoError(w.t, err, "%v\n%s", args, out)
	return out
}

// install creates Karpenter's Deployment and its secret, as the chart and the shim do.
func (w *environment) install() {
	w.t.Helper()
	certificate, key, err := w.authority.IssueClient("spiffe://" + fakeagent.TrustDomain + "/cluster/default/workload")
	require.NoError(w.t, err)
	labels := map[string]string{"app.kubernetes.io/part-of": "karpenter-capi", "app.kubernetes.io/name": "karpenter"}
	w.create(
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "karpenter"}},
		&corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "karpenter", Name: "karpenter-agent-identity"},
			Data:       map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": w.authority.PEM()},
		},
		&appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: "karpenter", Name: "karpenter", Labels: labels},
			Spec: appsv1.DeploymentSpec{
				Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{
					ObjectMeta: metav1.ObjectMeta{Labels: labels},
					Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "karpenter", Image: "karpenter", Args: []string{
						"--agent-address=" + w.address, "--agent-server-name=" + serverName,
						"--agent-identity-secret=karpenter/karpenter-agent-identity",
						"--cluster-namespace=" + cluster.GetNamespace(), "--cluster-name=" + cluster.GetName(),
					}}}},
				},
			},
		},
	)
	w.ready(1)
}

// ready sets how many of Karpenter's pods are ready.
func (w *environment) ready(pods int32) {
	w.t.Helper()
	deployment := &appsv1.Deployment{}
	require.NoError(w.t, w.spoke.Get(w.t.Context(), client.ObjectKey{Namespace: "karpenter", Name: "karpenter"}, deployment))
	deployment.Status.Replicas, deployment.Status.ReadyReplicas = pods, pods
	require.NoError(w.t, w.spoke.Status().Update(w.t.Context(), deployment))
}

// provisioner creates a NodePool and its NodeClass.
func (w *environment) provisioner() {
	w.create(
		&v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		&karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "default"}, Spec: karpv1.NodePoolSpec{Template: karpv1.NodeClaimTemplate{
			Spec: karpv1.NodeClaimTemplateSpec{NodeClassRef: classRef(), Requirements: []karpv1.NodeSelectorRequirementWithMinValues{}},
		}}},
	)
}

func classRef() *karpv1.NodeClassReference {
	return &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: "default"}
}

// pending creates a pod that the scheduler has found unschedulable.
func (w *environment) pending(name string) *corev1.Pod {
	w.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	w.create(pod)
	pod.Status.Conditions = []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "no nodes",
	}}
	require.NoError(w.t, w.spoke.Status().Update(w.t.Context(), pod))
	return pod
}

// plan publishes that Karpenter planned a pod for a NodeClaim.
func (w *environment) plan(pod *corev1.Pod, nodeClaim string) {
	w.create(&corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name + ".plan"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Reason:         "Nominated", Message: "Pod should schedule on: nodeclaim/" + nodeClaim, LastTimestamp: metav1.Now(),
	})
}

// launched creates a NodeClaim with a claim.
func (w *environment) launched(name string) (*karpv1.NodeClaim, *agentv1alpha1.Claim) {
	w.t.Helper()
	nodeClaim := &karpv1.NodeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{v1alpha1.NodeGroupAnnotation: "default/workers"}},
		Spec:       karpv1.NodeClaimSpec{NodeClassRef: classRef(), Requirements: []karpv1.NodeSelectorRequirementWithMinValues{}},
	}
	w.create(nodeClaim)
	nodeClaim.Status.ProviderID = "capi-claim://default/workload/" + string(nodeClaim.UID)
	nodeClaim.StatusConditions().SetTrue(karpv1.ConditionTypeLaunched)
	require.NoError(w.t, w.spoke.Status().Update(w.t.Context(), nodeClaim))
	response, err := w.agent.Client().Claims.CreateClaim(w.t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: cluster, ClaimId: string(nodeClaim.UID), Holder: v1alpha1.Holder, DisplayName: name, Candidates: []string{"default/workers"},
	})
	require.NoError(w.t, err)
	return nodeClaim, response.GetClaim()
}

// explanation parses what the plugin writes as JSON.
func explanation(t *testing.T, out string) explain.Explanation {
	t.Helper()
	var e explain.Explanation
	require.NoError(t, json.Unmarshal([]byte(out), &e), out)
	return e
}

func objects(e explain.Explanation) []string {
	var kinds []string
	for _, step := range e.Steps {
		kinds = append(kinds, step.Object)
	}
	return kinds
}

func TestThePlugin(t *testing.T) {
	w := newEnvironment(t)

	// Nothing is installed: each error says what to do.
	w.provisioner()
	early := w.pending("early")
	out, err := w.run("groups")
	require.ErrorContains(t, err, "there is no Deployment of Karpenter with an agent", out)
	assert.Contains(t, kubectl.Describe(err), "--shim=<namespace>/<name>")
	e := explanation(t, w.must("why", "pod", "early", "-o", "json"))
	assert.Equal(t, explain.Unknown, e.State)
	assert.Contains(t, e.Verdict, "the agent could not be queried")

	w.install()

	t.Run("a pod for which a group has room", func(t *testing.T) {
		e := explanation(t, w.must("why", "pod", early.Name, "-o", "json"))
		assert.Equal(t, explain.Waiting, e.State, "%+v", e)
		assert.Contains(t, e.Verdict, "Node group default/workers fits the pod and has room")
		assert.Equal(t, []string{"Pod", "NodeGroup"}, objects(e))
	})

	nodeClaim, claim := w.launched("default-a")
	machine := claim.GetMachine().GetName()
	if machine == "" {
		machine = w.agent.Claim(cluster, string(nodeClaim.UID)).GetMachine().GetName()
	}
	pod := w.pending("web")
	w.plan(pod, nodeClaim.Name)
	w.agent.FailMachine(cluster, machine, "InstanceProvisionFailed", "the quota for instances is exceeded")

	t.Run("every entry leads to the same cause, within a second", func(t *testing.T) {
		for _, entry := range [][]string{
			{"why", "pod", "web"},
			{"why", "pod/default/web"},
			{"why", "nodeclaim", nodeClaim.Name},
			{"why", "machine", machine},
			{"why", "machine", "default/" + machine},
		} {
			// The machine may be busy with other work, so the fastest of a few answers counts.
			var e explain.Explanation
			fastest := patience
			for attempt := 0; attempt < 10 && fastest >= time.Second; attempt++ {
				began := time.Now()
				e = explanation(t, w.must(append(entry, "-o", "json")...))
				fastest = min(fastest, time.Since(began))
			}
			assert.Less(t, fastest, time.Second, "%v", entry)
			t.Logf("%v answered in %s", entry, fastest)
			assert.Equal(t, explain.Waiting, e.State, "%v: %+v", entry, e)
			assert.Contains(t, e.Verdict, "InstanceProvisionFailed: the quota for instances is exceeded")
			for _, object := range []string{"NodeClaim", "Claim", "NodeGroup", "Machine", "Infrastructure", "Node"} {
				assert.Contains(t, objects(e), object, "%v", entry)
			}
		}
		e := explanation(t, w.must("why", "nodeclaim", nodeClaim.Name, "-o", "json"))
		assert.Contains(t, e.Steps[0].Message, "1 are planned for it: default/web")
		text := w.must("why", "pod", "web")
		assert.Contains(t, text, "Pod default/web: waiting\n")
		assert.Contains(t, text, "\nNext:\n  - kubectl --context <hub>")
		assert.Contains(t, w.must("why", "pod", "web", "-o", "yaml"), "subject: Pod default/web\n")
	})

	t.Run("node groups", func(t *testing.T) {
		text := w.must("groups")
		assert.Regexp(t, `default/workers +medium +a +on-demand +2 +0 +none +1 +0\.2 EUR +- +yes +1`, text)
		assert.Contains(t, w.must("groups", "-o", "wide"), "cpu=4,memory=16Gi,pods=110")
		one := w.must("groups", "workers")
		assert.Regexp(t, `capacity\.cpu +4 +Annotation +capacity…/cpu`, one)
		assert.Contains(t, one, `metadata.annotations[x] = "many": write a number`)
		assert.Contains(t, w.must("groups", "-o", "json"), `"id": "default/workers"`)
		_, err := w.run("groups", "none")
		require.ErrorContains(t, err, "there is no node group none")
	})

	t.Run("claims", func(t *testing.T) {
		assert.Regexp(t, `default-a +default/workers +Bound +\S+ +`+machine, w.must("claims"))
		assert.Contains(t, w.must("claims", "-o", "wide"), string(nodeClaim.UID))
		assert.Contains(t, w.must("claims", nodeClaim.Name), "held by karpenter: Bound")
		assert.Contains(t, w.must("claims", "-o", "yaml"), "displayName: default-a")
	})

	t.Run("adoption", func(t *testing.T) {
		var plan struct {
			Left []json.RawMessage `json:"left"`
		}
		require.NoError(t, json.Unmarshal([]byte(w.must("adopt", "-o", "json")), &plan))
		assert.Len(t, plan.Left, 1, "the user's own machine")
	})

	t.Run("completion", func(t *testing.T) {
		assert.Contains(t, w.must("__complete", "why", ""), "nodeclaim\n")
		assert.Contains(t, w.must("__complete", "why", "pod", ""), "web\n")
		assert.Contains(t, w.must("__complete", "why", "machine", ""), machine+"\n")
		assert.Contains(t, w.must("__complete", "groups", ""), "workers\n")
		assert.Contains(t, w.must("__complete", "claims", ""), "default-a\n")
		assert.NotContains(t, w.must("__complete", "claims", nodeClaim.Name, ""), "default-a\n", "one name only")
	})

	t.Run("a certificate of one's own, at another address", func(t *testing.T) {
		dir := w.certificate()
		flags := []string{"groups", "--agent-address=" + w.address, "--tls-dir=" + dir, "--server-name=" + serverName}
		assert.Contains(t, w.must(flags...), "default/workers")
		_, err = w.run(append(flags, "--server-name=another")...)
		require.ErrorContains(t, err, "do not accept each other's certificates")
		_, err = w.run(append(flags, "--cluster=default/another")...)
		require.ErrorContains(t, err, "refuses the Cluster default/another")
		_, err = w.run("groups", "--agent-address=127.0.0.1:1", "--tls-dir="+dir, "--cluster=default/workload", "--timeout=2s")
		require.ErrorContains(t, err, "the agent at 127.0.0.1:1 does not answer")
		assert.Contains(t, kubectl.Describe(err), "port-forward")
		assert.Contains(t, w.must("groups", "--agent-address="+w.address), "default/workers", "the certificate and its name are Karpenter's")
	})

	t.Run("a user who may read pods only", func(t *testing.T) {
		w.create(
			&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "limited"}, Rules: []rbacv1.PolicyRule{
				{APIGroups: []string{""}, Resources: []string{"pods", "events", "nodes"}, Verbs: []string{"get", "list"}},
				{APIGroups: []string{"karpenter.sh", v1alpha1.Group}, Resources: []string{"*"}, Verbs: []string{"get", "list"}},
			}},
			&rbacv1.ClusterRoleBinding{
				ObjectMeta: metav1.ObjectMeta{Name: "limited"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "limited"},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "limited"}},
			},
		)
		require.Eventually(t, func() bool {
			out, err := w.runIn(t.Context(), "--kubeconfig="+w.limitedFile, "why", "nodeclaim", nodeClaim.Name, "-o", "json")
			return err == nil && strings.Contains(out, "looking for Karpenter's Deployment")
		}, patience, patience/100)
		out, stop := w.top("--kubeconfig="+w.limitedFile, "--agent-address="+w.address, "--server-name="+serverName, "--tls-dir="+w.certificate(),
			"--cluster=default/workload")
		require.Eventually(t, func() bool { return strings.Contains(out.String(), "Spoke      not watched: ") }, patience, patience/200, "%s", out)
		stop()
		assert.Contains(t, out.String(), "forbidden")
	})

	t.Run("the hub's own words", func(t *testing.T) {
		create(t, w.hub, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: Spoke, metadata: {namespace: default, name: workload}}",
			map[string]any{
				"conditions": []any{map[string]any{
					"type": "Connected", "status": "True", "reason": "Synchronized", "message": "", "lastTransitionTime": time.Now().Format(time.RFC3339),
				}},
				"shimVersion": "v0.1.0",
				"certificate": map[string]any{"serial": "ab", "notAfter": time.Now().Add(30*time.Hour + 5*time.Minute).UTC().Format(time.RFC3339)},
			})
		wrong, err := w.run("why", "nodeclaim", nodeClaim.Name, "--agent-address=127.0.0.1:1", "--tls-dir="+w.certificate(), "--cluster=default/workload",
			"--hub-kubeconfig="+w.spokeFile, "-o", "json")
		require.NoError(t, err)
		assert.Contains(t, wrong, "is it the hub?")
		assert.NotContains(t, wrong, "the agent has no claim for it", "it was not asked")
		hub := "--hub-kubeconfig=" + w.hubFile
		assert.Regexp(t, `default/workload +True \(Synchronized\) +- +v0\.1\.0 +30h0\dm`, w.must("spokes", hub))
		assert.Contains(t, w.must("spokes", "workload", hub), "No NodePools are reported")
		for namespace, more := range map[string]int{"default": 0, "kube-public": 3} {
			create(t, w.hub, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: Spoke, metadata: {namespace: "+namespace+", name: pools}}",
				map[string]any{
					"nodePools": []any{
						map[string]any{
							"name": "gpu", "set": "general", "ready": false, "nodes": 2, "pendingNodeClaims": 1, "message": "its NodeClass\nis not ready",
						},
						map[string]any{"name": "own", "ready": true, "nodes": 3, "pendingNodeClaims": 0, "pricePerHour": "0.41"},
					},
					"moreNodePools": more,
					"published": []any{map[string]any{
						"kind": "NodePool", "name": "gpu", "set": "general", "revision": "ab", "applied": false, "message": "another field manager owns it",
					}},
				})
		}
		one := w.must("spokes", "default/pools", hub)
		assert.Regexp(t, `gpu +general +no +2 +1 +unknown +its NodeClass is not ready`, one)
		assert.Regexp(t, `own +- +yes +3 +0 +0\.41`, one)
		assert.Regexp(t, `NodePool/gpu +general +no +another field manager owns it`, one)
		assert.Contains(t, w.must("spokes", "kube-public/pools", hub), "and 3 more")
		wide := w.must("spokes", hub, "-o", "wide")
		assert.Regexp(t, `default/pools +unknown +- +- +- +- +2 +5 `, wide)
		assert.Regexp(t, `kube-public/pools +unknown +- +- +- +- +5 +- `, wide, "the Nodes of three are not known")
		assert.Contains(t, w.must("spokes", "pools", hub, "--namespace=kube-public", "-o", "json"), `"pricePerHour": "0.41"`)
		_, err = w.run("spokes", "pools", hub)
		require.ErrorContains(t, err, "2 namespaces have a Spoke pools")
		_, err = w.run("spokes", "absent", hub)
		require.ErrorContains(t, err, "there is no Spoke absent")
		assert.Contains(t, w.must("__complete", "spokes", hub, ""), "default/workload\n")
		id := string(nodeClaim.UID)
		create(t, w.hub, "{apiVersion: agent.karpenter.cluster.x-k8s.io/v1alpha1, kind: MachineClaim, metadata: {namespace: default, name: workload."+id+
			"}, spec: {clusterName: workload, claimID: "+id+", holder: karpenter, displayName: default-a, nodeGroup: workers}}",
			map[string]any{"phase": "Bound", "reason": "Bound", "machine": map[string]any{"name": machine, "uid": "u"}})
		e := explanation(t, w.must("why", "nodeclaim", nodeClaim.Name, "-o", "json", "--hub-kubeconfig="+w.hubFile, "--agent-address=127.0.0.1:1"))
		assert.Equal(t, explain.Waiting, e.State, "%+v", e)
		assert.Contains(t, e.Verdict, "Machine "+machine+" waits for its infrastructure", "the MachineClaim is read instead of the agent")
	})

	t.Run("the fleet without the hub", func(t *testing.T) {
		assert.Regexp(t, `default/workload +never +- +- +- +1 +2 +1\n$`, w.must("spokes"), "Karpenter's certificate is for its own Cluster")

		production := &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"}
		w.agent.AddCluster(production)
		shim := w.agent.ClientFor(production).Claims
		claims, err := shim.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: production, Holder: v1alpha1.Holder})
		require.NoError(t, err)
		_, err = shim.SyncClaims(t.Context(), &agentv1alpha1.SyncClaimsRequest{
			Cluster: production, Holder: v1alpha1.Holder, Token: claims.GetToken(), SpokeId: "1f0d",
		})
		require.NoError(t, err)
		// Neither caller has a workload cluster.
		as := func(identity string, args ...string) (string, error) {
			certificate, key, err := w.authority.IssueClient("spiffe://" + fakeagent.TrustDomain + identity)
			require.NoError(t, err)
			dir := t.TempDir()
			for name, data := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": w.authority.PEM()} {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
			}
			return w.runIn(t.Context(), append(args, "--kubeconfig="+w.file("none", nil), "--agent-address="+w.address,
				"--server-name="+serverName, "--tls-dir="+dir)...)
		}
		all, err := as(reader, "spokes", "-o", "wide")
		require.NoError(t, err)
		assert.Regexp(t, `default/workload +never +- +- +- +1 +2 +1 +0 +- +-\n`, all)
		assert.Regexp(t, `team-a/production +yes +\d+s ago +\S+ +- +0 +0 +0 +0 +- +1f0d\n`, all)
		one, err := as(reader, "spokes", "production")
		require.NoError(t, err)
		assert.Regexp(t, `^team-a/production\n\nconnected +yes\n`, one)
		assert.Contains(t, one, "see --hub-kubeconfig")
		w.agent.SetPaused(production, true)
		one, err = as(reader, "spokes", "team-a/production")
		require.NoError(t, err)
		assert.Regexp(t, `state +paused\n`, one)
		structured, err := as(reader, "spokes", "-o", "json", "--namespace=team-a")
		require.NoError(t, err)
		assert.Contains(t, structured, `"name": "production"`)
		assert.NotContains(t, structured, `"name": "workload"`)
		assert.Contains(t, w.must("__complete", "spokes", ""), "default/workload\n")
		_, err = as(reader, "spokes", "absent")
		require.ErrorContains(t, err, "reports no Cluster absent")
		_, err = as("/team/unknown", "spokes")
		require.ErrorContains(t, err, "refuses: ")
		assert.Contains(t, kubectl.Describe(err), "of a reader: --tls-dir")
		w.agent.Fail("ListClusters", 1, status.Error(codes.Unimplemented, "unknown service"))
		_, err = as(reader, "spokes")
		require.ErrorContains(t, err, "is of an earlier version: unknown service")
	})

	t.Run("a claim that has failed", func(t *testing.T) {
		w.agent.GiveUp(cluster, string(nodeClaim.UID), "the quota for instances is exceeded")
		require.NoError(t, w.spoke.Delete(t.Context(), nodeClaim))
		require.Eventually(t, func() bool {
			e := explanation(t, w.must("why", "pod", "web", "-o", "json"))
			return e.State == explain.Blocked && strings.Contains(e.Verdict, "CoolingDown")
		}, patience, patience/100)
		text := w.must("why", "pod", "web")
		assert.Contains(t, text, "the quota for instances is exceeded")
		assert.Contains(t, w.must("claims", "--all"), "default-a")
		assert.NotContains(t, w.must("__complete", "claims", ""), "default-a\n")
		assert.Contains(t, w.must("__complete", "claims", "--all", ""), "default-a\n")
	})

	t.Run("a Karpenter that does not run", func(t *testing.T) {
		w.ready(0)
		e := explanation(t, w.must("why", "pod", "early", "-o", "json"))
		assert.Contains(t, e.Verdict, "Karpenter does not run")
	})

	t.Run("what does not exist", func(t *testing.T) {
		for args, says := range map[string]string{
			"why pod none": "there is no Pod default/none", "why node none": "there is no Node none", "why machine none": "reports no Machine none",
			"why nodeclaim none": "there is no NodeClaim none", "why deployment web": "is not a kind", "why web": "names no object",
			"groups -o table": "must be wide, json or yaml", "why pod web --cluster=x": "write namespace/name",
		} {
			_, err := w.run(strings.Fields(args)...)
			require.ErrorContains(t, err, says, args)
		}
	})
}

// buffer is an output that can be read while it is written.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(data []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(data)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// Without a terminal there is one line for each change, and nothing that controls one.
func TestTopTellsChanges(t *testing.T) {
	w := newEnvironment(t)
	w.install()
	w.provisioner()
	out, stop := w.top("--kubeconfig="+w.spokeFile, "--timeout="+patience.String())
	says := func(parts ...string) {
		t.Helper()
		for _, part := range parts {
			require.Eventually(t, func() bool { return strings.Contains(out.String(), part) }, patience, patience/200, "%q in\n%s", part, out)
		}
	}
	says("Pods       0 waiting, 0 starting, 0 running")
	w.pending("web")
	says("1 waiting, 0 starting, 0 running")
	nodeClaim, _ := w.launched("default-a")
	says("NodeClaim  default-a  created", "NodeClaim  default-a  launched after", "Claim      default-a  Bound on default/workers",
		"NodeGroup  default/workers  1 -> 2 machines")
	w.agent.Provision(cluster, string(nodeClaim.UID), "sim://a")
	says("has its provider ID sim://a")
	require.NoError(t, w.spoke.Delete(t.Context(), nodeClaim))
	says("NodeClaim  default-a  gone")
	w.agent.DropStreams()
	stop()
	assert.NotContains(t, out.String(), "\x1b")
}

// create creates an object with a status from its manifest.
func create(t *testing.T, kube client.Client, manifest string, status map[string]any) {
	t.Helper()
	object := &unstructured.Unstructured{}
	require.NoError(t, yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096).Decode(object))
	require.NoError(t, kube.Create(t.Context(), object))
	object.Object["status"] = status
	require.NoError(t, kube.Status().Update(t.Context(), object))
}
