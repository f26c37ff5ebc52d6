package main

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/shim/internal/apiservertest"

	"github.com/awslabs/operatorpkg/status"
	"github.com/go-logr/logr"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	"github.com/karpenter-capi/karpenter-capi/pkg/tracing/tracingtest"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

// asKarpenter is the environment variable that makes the test binary run as karpenter.
const asKarpenter = "TEST_AS_KARPENTER"

// byClusterAPI is the key of the taint that Cluster API removes from new Nodes.
const byClusterAPI = "node.cluster.x-k8s.io/uninitialized"

// patience is the timeout of every wait.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(asKarpenter) != "" {
		main()
		os.Exit(0)
	}
	log.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// spoke is a workload cluster's API server, with a fake agent as its hub, and karpenter as a
// separate process.
type spoke struct {
	client.Client

	t          *testing.T
	agent      *fakeagent.Agent
	address    string // of the agent
	kubeconfig string
	metrics    string
	health     string
	process    *exec.Cmd
	exited     chan struct{} // closed when the process has exited
	exitError  error
	log        string
}

func newSpoke(t *testing.T, groups ...*agentv1alpha1.NodeGroup) *spoke {
	t.Helper()
	server := apiservertest.Start(t, "shim")
	s := &spoke{
		Client:     server.Client,
		t:          t,
		kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"),
		metrics:    freeAddress(t),
		health:     freeAddress(t),
		address:    freeAddress(t),
	}
	require.NoError(t, os.WriteFile(s.kubeconfig, server.KubeconfigOf(t, "karpenter", "system:masters"), 0o600))

	s.agent = fakeagent.New()
	t.Cleanup(s.agent.Close)
	for _, g := range groups {
		s.agent.AddNodeGroup(g)
	}
	return s
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, listener.Close()) }()
	return listener.Addr().String()
}

// listen makes the agent reachable.
func (s *spoke) listen() {
	s.t.Helper()
	listener, err := net.Listen("tcp", s.address)
	require.NoError(s.t, err)
	s.agent.Serve(listener)
}

// start runs karpenter with additional flags.
func (s *spoke) start(args ...string) {
	s.t.Helper()
	logFile, err := os.Create(filepath.Join(s.t.TempDir(), "karpenter.log"))
	require.NoError(s.t, err)
	s.log = logFile.Name()
	cluster := fakeagent.DefaultCluster()
	s.process = exec.Command(os.Args[0], append([]string{
		"--agent-address=" + s.address, "--agent-plaintext-loopback",
		"--cluster-namespace=" + cluster.GetNamespace(), "--cluster-name=" + cluster.GetName(),
		"--metrics-bind-address=" + s.metrics, "--health-probe-bind-address=" + s.health,
		"--hub-unreachable-grace-period=3s", "--claim-sync-interval=2s", "--batch-idle-duration=100ms",
		"--leader-election-namespace=default",
	}, args...)...)
	s.process.Env = append(os.Environ(), asKarpenter+"=1", "KUBECONFIG="+s.kubeconfig)
	s.process.Stdout, s.process.Stderr = logFile, logFile
	require.NoError(s.t, s.process.Start())
	exited := make(chan struct{})
	s.exited = exited
	process := s.process
	go func() {
		s.exitError = process.Wait()
		close(exited)
		_ = logFile.Close()
	}()
	s.t.Cleanup(func() {
		_ = process.Process.Kill()
		<-exited
		if s.t.Failed() {
			text, _ := os.ReadFile(logFile.Name())
			s.t.Logf("karpenter's log:\n%s", lo.Substring(string(text), -20000, 20000))
		}
	})
	s.eventually(func() bool { return s.probe("readyz") == http.StatusOK }, "karpenter is ready")
}

func (s *spoke) probe(path string) int {
	response, err := http.Get("http://" + s.health + "/" + path)
	if err != nil {
		return 0
	}
	defer func() { _ = response.Body.Close() }()
	return response.StatusCode
}

func (s *spoke) eventually(condition func() bool, format string, args ...any) {
	s.t.Helper()
	require.Eventuallyf(s.t, condition, patience, 50*time.Millisecond, format, args...)
}

func (s *spoke) create(object client.Object) {
	s.t.Helper()
	require.NoError(s.t, s.Create(context.Background(), object))
}

func (s *spoke) get(object client.Object) error {
	return s.Get(context.Background(), client.ObjectKeyFromObject(object), object)
}

func (s *spoke) nodeClass() *v1alpha1.ClusterAPINodeClass {
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	assert.NoError(s.t, s.get(nodeClass))
	return nodeClass
}

func (s *spoke) nodeClaims() []karpv1.NodeClaim {
	list := &karpv1.NodeClaimList{}
	assert.NoError(s.t, s.List(context.Background(), list))
	return list.Items
}

// pool creates a NodeClass and a NodePool as a user would.
func (s *spoke) pool() {
	s.t.Helper()
	s.create(&v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	nodePool := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	nodePool.Spec.Template.Spec.NodeClassRef = &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: "default"}
	nodePool.Spec.Template.Spec.Requirements = []karpv1.NodeSelectorRequirementWithMinValues{}
	nodePool.Spec.Template.Spec.ExpireAfter = karpv1.MustParseNillableDuration("Never")
	nodePool.Spec.Disruption.ConsolidateAfter = karpv1.MustParseNillableDuration("Never")
	s.create(nodePool)
}

// pod creates a pod that kube-scheduler has marked unschedulable.
func (s *spoke) pod(name string) {
	s.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{"cpu": resource.MustParse("3")},
		}}}},
	}
	s.create(pod)
	pod.Status.Conditions = []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.Now()},
	}
	require.NoError(s.t, s.Status().Update(context.Background(), pod))
}

// launched waits for a launched NodeClaim other than the known ones.
func (s *spoke) launched(known ...string) *karpv1.NodeClaim {
	s.t.Helper()
	var nodeClaim karpv1.NodeClaim
	s.eventually(func() bool {
		var ok bool
		nodeClaim, ok = lo.Find(s.nodeClaims(), func(nc karpv1.NodeClaim) bool {
			return !lo.Contains(known, nc.Name) && nc.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue()
		})
		return ok
	}, "a NodeClaim is launched")
	return &nodeClaim
}

// provisioned sets the provider ID of the NodeClaim's machine and waits until the NodeClaim has it.
func (s *spoke) provisioned(nodeClaim *karpv1.NodeClaim) *agentv1alpha1.Machine {
	s.t.Helper()
	machine := s.agent.Provision(fakeagent.DefaultCluster(), string(nodeClaim.UID), "")
	s.eventually(func() bool {
		return assert.NoError(s.t, s.get(nodeClaim)) && nodeClaim.Status.ProviderID == machine.GetProviderId()
	}, "the NodeClaim has the provider ID")
	return machine
}

// registered creates the machine's Node and waits until core has registered it.
func (s *spoke) registered(nodeClaim *karpv1.NodeClaim, machine *agentv1alpha1.Machine) *corev1.Node {
	s.t.Helper()
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: machine.GetName()},
		Spec: corev1.NodeSpec{
			ProviderID: machine.GetProviderId(),
			Taints:     []corev1.Taint{karpv1.UnregisteredNoExecuteTaint, {Key: byClusterAPI, Effect: corev1.TaintEffectNoSchedule}},
		},
	}
	s.create(node)
	s.update(node, s.Status(), func() {
		node.Status.Conditions = []corev1.NodeCondition{
			{
				Type:               corev1.NodeReady,
				Status:             corev1.ConditionTrue,
				Reason:             "KubeletReady",
				LastHeartbeatTime:  metav1.Now(),
				LastTransitionTime: metav1.Now(),
			},
		}
		node.Status.Capacity, node.Status.Allocatable = nodeClaim.Status.Capacity, nodeClaim.Status.Allocatable
	})
	// The API server's admission taints every new Node. Normally the node lifecycle controller
	// removes that taint.
	s.update(node, clientWriter{s}, func() {
		node.Spec.Taints = lo.Reject(node.Spec.Taints, func(taint corev1.Taint, _ int) bool { return taint.Key == corev1.TaintNodeNotReady })
	})
	s.agent.Join(fakeagent.DefaultCluster(), machine.GetName(), node.Name)
	s.eventually(func() bool {
		if err := s.get(nodeClaim); err != nil {
			return false
		}
		initialized := nodeClaim.StatusConditions().Get(karpv1.ConditionTypeInitialized)
		return initialized != nil && strings.Contains(initialized.Message, byClusterAPI)
	}, "the NodeClaim is registered and waits for Cluster API")
	s.update(node, clientWriter{s}, func() {
		node.Spec.Taints = lo.Reject(node.Spec.Taints, func(taint corev1.Taint, _ int) bool { return taint.Key == byClusterAPI })
	})
	s.eventually(func() bool {
		return assert.NoError(s.t, s.get(nodeClaim)) && nodeClaim.StatusConditions().Get(karpv1.ConditionTypeInitialized).IsTrue()
	}, "the NodeClaim is registered and initialized")
	require.NoError(s.t, s.get(node))
	return node
}

type updater interface {
	Update(ctx context.Context, object client.Object, options ...client.SubResourceUpdateOption) error
}

// clientWriter updates an object through the signature of a status writer.
type clientWriter struct{ client.Writer }

func (w clientWriter) Update(ctx context.Context, object client.Object, _ ...client.SubResourceUpdateOption) error {
	return w.Writer.Update(ctx, object)
}

// update changes the object despite concurrent writes by karpenter.
func (s *spoke) update(object client.Object, writer updater, change func()) {
	s.t.Helper()
	require.NoError(s.t, retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := s.get(object); err != nil {
			return err
		}
		change()
		return writer.Update(context.Background(), object)
	}))
}

func (s *spoke) ready(want metav1.ConditionStatus) {
	s.t.Helper()
	s.eventually(func() bool {
		return s.nodeClass().StatusConditions().Get(status.ConditionReady).GetStatus() == want
	}, "the NodeClass's Ready is %s", want)
}

func group(name string) *agentv1alpha1.NodeGroup {
	return &agentv1alpha1.NodeGroup{
		Name: name, InstanceType: "m.large", Zone: "z1", NodeLabels: map[string]string{"team": "red"},
		Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"}, Price: &agentv1alpha1.Price{PerHour: 1},
	}
}

func TestACreatesTraceReachesTheAgent(t *testing.T) {
	collector := tracingtest.Start(t)
	collector.SetEnvironment(t)
	s := newSpoke(t, group("a"))
	s.listen()
	s.pool()
	s.agent.Fail("CreateClaim", 1, grpcstatus.Error(codes.Internal, "a failure"))
	s.start("--log-level=debug")
	s.ready(metav1.ConditionTrue)
	s.pod("one")
	nodeClaim := s.launched()

	const call = "capi.agent.v1alpha1.ClaimService/CreateClaim"
	s.eventually(func() bool { return len(collector.Named("CloudProvider.Create")) > 1 && len(collector.Named(call)) > 1 }, "the traces have arrived")
	creates, calls, received := collector.Named("CloudProvider.Create"), collector.Named(call), s.agent.Metadata("CreateClaim")
	require.Len(t, received, 2, "core repeats what failed")
	for i, create := range creates {
		assert.Equal(t, nodeClaim.Name, create.Attributes["karpenter.nodeclaim"])
		assert.Equal(t, "karpenter-capi-shim", create.Resource["service.name"])
		assert.Empty(t, create.Parent)
		assert.Equal(t, create.ID, calls[i].Parent)
		assert.Equal(t, []string{"00-" + create.Trace + "-" + calls[i].ID + "-01"}, received[i].Get("traceparent"))
	}
	for _, polled := range []string{"WatchClaims", "WatchNodeGroups", "ListClaims", "SyncClaims"} {
		for _, sent := range s.agent.Metadata(polled) {
			assert.Empty(t, sent.Get("traceparent"), polled)
		}
	}
	text, err := os.ReadFile(s.log)
	require.NoError(t, err)
	for i, says := range []string{"agent call failed", "claimed a machine"} {
		assert.True(t, lo.ContainsBy(strings.Split(string(text), "\n"), func(line string) bool {
			return strings.Contains(line, says) && strings.Contains(line, `"traceID":"`+creates[i].Trace+`"`)
		}), "%s, with the trace's id", says)
	}
}

func TestPodsBecomeNodesThroughKillsAndOutages(t *testing.T) {
	s := newSpoke(t, group("a"))
	s.listen()
	s.pool()
	s.start()
	s.ready(metav1.ConditionTrue)
	assert.EqualValues(t, 1, s.nodeClass().Status.NodeGroups)

	t.Log("a pod becomes a node")
	s.pod("one")
	first := s.launched()
	assert.Equal(t, placeholder.ProviderID("default", "workload", string(first.UID)), first.Status.ProviderID)
	node := s.registered(first, s.provisioned(first))
	for key, want := range map[string]string{
		corev1.LabelInstanceTypeStable: "m.large", corev1.LabelTopologyZone: "z1", karpv1.CapacityTypeLabelKey: "on-demand", "team": "red",
		karpv1.NodeRegisteredLabelKey: "true",
	} {
		assert.Equal(t, want, node.Labels[key], key)
	}
	assert.Equal(t, "default/a", node.Annotations[v1alpha1.NodeGroupAnnotation])

	t.Log("killed while a machine is on its way")
	s.pod("two")
	second := s.launched(first.Name)
	require.NoError(t, s.process.Process.Kill())
	<-s.exited
	machine := s.agent.Provision(fakeagent.DefaultCluster(), string(second.UID), "")
	s.start()
	s.eventually(func() bool {
		return assert.NoError(t, s.get(second)) && second.Status.ProviderID == machine.GetProviderId()
	}, "the next process takes over")
	s.registered(second, machine)
	assert.Len(t, s.nodeClaims(), 2)
	assert.EqualValues(t, 2, s.agent.NodeGroup("default/a").GetReplicas())

	t.Log("the hub goes away")
	s.agent.SetSynced(false)
	s.agent.DropStreams()
	s.ready(metav1.ConditionFalse)
	assert.Equal(t, http.StatusOK, s.probe("healthz"))
	assert.Equal(t, http.StatusOK, s.probe("readyz"))
	// Delete the pod as well, or core would launch another node for it.
	require.NoError(
		t,
		s.Delete(context.Background(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "two"}}, client.GracePeriodSeconds(0)),
	)
	require.NoError(t, s.Delete(context.Background(), second))
	deleting := func() bool {
		require.NoError(t, s.get(second))
		return second.StatusConditions().Get(karpv1.ConditionTypeDrained).IsTrue()
	}
	s.eventually(deleting, "the Node is drained")
	require.Never(t, func() bool {
		return s.get(second) != nil || s.get(node) != nil || s.get(first) != nil || !first.DeletionTimestamp.IsZero()
	}, 3*time.Second, 100*time.Millisecond, "termination waits, and nothing else is deleted")

	t.Log("and comes back")
	s.agent.SetSynced(true)
	s.ready(metav1.ConditionTrue)
	s.eventually(func() bool { return client.IgnoreNotFound(s.get(second)) == nil && len(s.nodeClaims()) == 1 }, "the termination ends")
	s.eventually(func() bool { return s.agent.NodeGroup("default/a").GetReplicas() == 1 }, "the machine is given back")

	t.Log("a claim without an owner is collected")
	_, err := s.agent.Client().Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: fakeagent.DefaultCluster(), ClaimId: "leaked", Holder: v1alpha1.Holder, Candidates: []string{"default/a"},
	})
	require.NoError(t, err)
	s.eventually(func() bool {
		return s.agent.Claim(fakeagent.DefaultCluster(), "leaked").GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
	}, "the leaked claim is collected")

	t.Log("told to end")
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "karpenter-leader-election"}}
	require.NoError(t, s.get(lease))
	assert.NotEmpty(t, ptr.Deref(lease.Spec.HolderIdentity, ""))
	require.NoError(t, s.process.Process.Signal(syscall.SIGTERM))
	select {
	case <-s.exited:
		require.NoError(t, s.exitError, "exit status 0")
	case <-time.After(patience):
		t.Fatal("karpenter did not end")
	}
	require.NoError(t, s.get(lease))
	assert.Empty(t, ptr.Deref(lease.Spec.HolderIdentity, ""), "the lease is released")
	text, err := os.ReadFile(s.log)
	require.NoError(t, err)
	assert.NotContains(t, string(text), "panic")
}

func TestWithoutAHubTheProcessIsHealthyAndGoesOnWhenThereIsOne(t *testing.T) {
	s := newSpoke(t, group("a"))
	s.pool()
	s.start()
	s.ready(metav1.ConditionFalse)
	reachable := s.nodeClass().StatusConditions().Get(v1alpha1.ConditionAgentReachable)
	assert.Equal(t, "AgentUnreachable", reachable.Reason)
	assert.Equal(t, http.StatusOK, s.probe("healthz"))
	s.pod("one")
	s.listen()
	s.ready(metav1.ConditionTrue)
	nodeClaim := s.launched()
	s.registered(nodeClaim, s.provisioned(nodeClaim))
}

// The process runs as an administrator of the spoke here, so that it may review other users'
// access.
func TestMetricsAreForThoseWhoMayReadThem(t *testing.T) {
	s := newSpoke(t)
	reader, other := s.serviceAccount("reader"), s.serviceAccount("other")
	s.create(&rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader"},
		Rules:      []rbacv1.PolicyRule{{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}}},
	})
	s.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "metrics-reader"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "metrics-reader"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: metav1.NamespaceDefault, Name: "reader"}},
	})
	s.start("--enable-profiling")
	s.eventually(func() bool { return s.scrape("/metrics", reader) == http.StatusOK }, "the reader reads")
	assert.Equal(t, http.StatusForbidden, s.scrape("/debug/pprof/heap", reader))
	assert.Equal(t, http.StatusForbidden, s.scrape("/metrics", other))
	assert.Equal(t, http.StatusUnauthorized, s.scrape("/metrics", ""))
	assert.Equal(t, http.StatusUnauthorized, s.scrape("/debug/pprof/heap", ""))
}

// serviceAccount creates a ServiceAccount and returns a token for it.
func (s *spoke) serviceAccount(name string) string {
	s.t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name}}
	s.create(account)
	request := &authenticationv1.TokenRequest{}
	require.NoError(s.t, s.SubResource("token").Create(s.t.Context(), account, request))
	return request.Status.Token
}

// scrape returns the HTTP status of the metrics server's answer, or 0 while it does not listen.
func (s *spoke) scrape(path, token string) int {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, "https://"+s.metrics+path, http.NoBody)
	require.NoError(s.t, err)
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	// The process generates its certificate itself.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return 0
	}
	assert.NoError(s.t, response.Body.Close())
	return response.StatusCode
}

func TestConditionsOfTheNodeClassAreMetricsAndEvents(t *testing.T) {
	s := newSpoke(t, group("a"))
	s.create(&v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	s.start("--metrics-secure=false")
	s.ready(metav1.ConditionFalse)
	s.listen()
	s.ready(metav1.ConditionTrue)
	s.eventually(func() bool {
		response, err := http.Get("http://" + s.metrics + "/metrics")
		if err != nil {
			return false
		}
		defer func() { _ = response.Body.Close() }()
		text, err := io.ReadAll(response.Body)
		return assert.NoError(t, err) && lo.ContainsBy(strings.Split(string(text), "\n"), func(line string) bool {
			return strings.HasPrefix(line, "operator_clusterapinodeclass_status_condition_count{") && strings.HasSuffix(line, " 1") &&
				strings.Contains(line, `name="default"`) && strings.Contains(line, `type="Ready"`) && strings.Contains(line, `status="True"`)
		})
	}, "the condition is a metric")
	s.eventually(func() bool {
		events := &corev1.EventList{}
		require.NoError(t, s.List(t.Context(), events))
		return lo.ContainsBy(events.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.Kind == "ClusterAPINodeClass" && e.Reason == "Ready" && strings.Contains(e.Message, "Status condition transitioned")
		})
	}, "its transition is an event")

	// The alert is that Prometheus has no metrics of the shim.
	running, err := scrapes.Get(t, "http://"+s.metrics+"/metrics")
	require.NoError(t, err)
	require.NoError(t, s.process.Process.Kill())
	<-s.exited
	killed, err := scrapes.Get(t, "http://"+s.metrics+"/metrics")
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	scrapes.Record(t, "KarpenterCapiDown", running, killed)
}

func TestWrongFlagsAreToldAndNotPanicked(t *testing.T) {
	process := exec.Command(os.Args[0], "--agent-timeout=soon")
	process.Env = append(os.Environ(), asKarpenter+"=1")
	output, err := process.CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	assert.Equal(t, 2, exit.ExitCode())
	assert.NotContains(t, string(output), "goroutine")
	assert.Contains(t, string(output), "agent-timeout")

	process = exec.Command(os.Args[0])
	process.Env = []string{asKarpenter + "=1"}
	output, err = process.CombinedOutput()
	require.Error(t, err)
	for _, want := range []string{"--agent-address is required", "--cluster-name is required"} {
		assert.Contains(t, string(output), want)
	}
	assert.NotContains(t, string(output), "goroutine")
}

func TestTheNodeClassIsValidated(t *testing.T) {
	s := newSpoke(t)
	for name, c := range map[string]struct {
		expression metav1.LabelSelectorRequirement
		want       string
	}{
		"operator": {
			metav1.LabelSelectorRequirement{Key: "team", Operator: "Near", Values: []string{"red"}},
			"operator must be one of In, NotIn, Exists, DoesNotExist",
		},
		"values": {metav1.LabelSelectorRequirement{Key: "team", Operator: metav1.LabelSelectorOpIn}, "values must be set"},
	} {
		err := s.Create(t.Context(), &v1alpha1.ClusterAPINodeClass{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1alpha1.ClusterAPINodeClassSpec{
				ScalableResourceSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{c.expression}},
			},
		})
		require.ErrorContains(t, err, c.want)
	}
	for name, selector := range map[string]*metav1.LabelSelector{
		"absent": nil, "empty": {}, "labels": {MatchLabels: map[string]string{"team": "red"}},
		"expressions": {MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: "team", Operator: metav1.LabelSelectorOpIn, Values: []string{"red"}}, {Key: "old", Operator: metav1.LabelSelectorOpDoesNotExist},
		}},
	} {
		assert.NoError(t, s.Create(t.Context(), &v1alpha1.ClusterAPINodeClass{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1alpha1.ClusterAPINodeClassSpec{ScalableResourceSelector: selector},
		}), name)
	}
}
