package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/bystander"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

const (
	// moveWithin bounds clusterctl, whose client is limited to about twenty requests a second.
	moveWithin = 5 * time.Minute
	// own is the number of unclaimed machines of the node group east.
	own = 2
	// syncInterval is how often the shim sends its NodeClaims to the agent; the product's default
	// is a minute.
	syncInterval = 10 * time.Second
	// more is the number of pods added to each Deployment after the move.
	more = 2
)

// TestAMoveToAnotherHubLosesNothing stops neither agents nor shim: both see the source's objects
// disappear while the Nodes run.
func TestAMoveToAnotherHubLosesNothing(t *testing.T) {
	figure := shows(t, "a move to another hub, with agents and shim running, loses no Node, no claim and no machine")
	nodes := lo.Ternary(testing.Short(), 6, 50)
	h := startHubs(t, "e2e-move")
	before, bystander := h.fill(t, nodes)
	destroyed := providerLogs(t, h.source, "instance stops")
	made := providerLogs(t, h.target, "instance exists")
	set := &agentv1.NodePoolSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: "of-others"},
		Spec: agentv1.NodePoolSetSpec{
			ClusterSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"pools": "of-others"}},
			NodeClasses:     []agentv1.PublishedTemplate{{Name: "general", Spec: runtime.RawExtension{Raw: []byte("{}")}}},
		},
	}
	require.NoError(t, h.source.Hub.Create(t.Context(), set))

	began := time.Now()
	h.move(t)
	require.NoError(t, h.target.Hub.Get(t.Context(), client.ObjectKeyFromObject(set), set), "NodePoolSets are moved with their namespace")
	figure("clusterctl moved %d Machines in %.0f s", nodes+own, time.Since(began).Seconds())
	// A user points the shim to the target some time later. Meanwhile it sends its claims to the
	// source, and requests them there.
	throughout(t, 2*syncInterval+gracePeriod, 500*time.Millisecond, func() {
		require.Empty(t, bystander.Incidents(), "what happened to what ran in the spoke, while the shim called the source's agents")
	})
	figure("and all was as before %.0f s later", h.takeOver(t, before, bystander).Seconds())
	poll(t, soon, h.sourceIsEmpty)
	require.Empty(t, destroyed(), "instances that the source destroyed")
	require.Empty(t, made(), "instances that the target made")

	h.grow(t, nodes, bystander)
	grown := h.holdings(t, h.target)
	require.Equal(t, map[string]int32{"east": int32(nodes/2 + more + own), "west": int32(nodes/2 + more)}, grown.replicas)

	h.shrink(t, nodes)
	shrunk := h.holdings(t, h.target)
	require.Equal(t, before.replicas, shrunk.replicas)
	// A new claim may have been assigned an unclaimed machine, and the one made for it has since
	// become the team's.
	require.ElementsMatch(t, slices.Concat(nodesWithPods(t, h.target), grown.unclaimed), lo.Keys(shrunk.nodes),
		"the Nodes that are left: those with pods, and those without a claim")
	for node, uid := range shrunk.nodes {
		require.Equal(t, uid, grown.nodes[node], "Node %s was made again", node)
	}
	require.Empty(t, h.faults())
}

// TestAMoveCarriesReleasesAndEndedClaims moves while a machine is being removed. `clusterctl move`
// refuses Machines without a Node, so no claim can be waiting for one during a move.
func TestAMoveCarriesReleasesAndEndedClaims(t *testing.T) {
	shows(t, "a release that is in flight in a move is completed in the other hub, and an ended claim stays ended")
	if testing.Short() {
		t.Skip("not in the short run: the test above moves as well")
	}
	h := startHubs(t, "e2e-move-releases")
	h.run(t, h.source, 3, 0)
	h.scale(t, 2, 0)
	require.NoError(t, h.source.Recorder.Await(within(t, 2*time.Minute), func(s timeline.State) string {
		return lo.Ternary(len(s.Live()) == 2, "", fmt.Sprintf("2 NodeClaims to be left: %d are", len(s.Live())))
	}))
	settle(t, h.source, settleWithin)
	ended := h.claims(t, h.source, agentv1.PhaseEnded)
	require.Len(t, ended, 1, "the claim of the pod that went is remembered")

	// The ReplicaSet chooses which of the two is removed.
	h.hold(t, h.source, true)
	h.scale(t, 1, 0)
	var releasing agentv1.MachineClaim
	poll(t, soon, func(ctx context.Context) (string, error) {
		claims := h.claims(t, h.source, agentv1.PhaseReleasing)
		if len(claims) != 1 || claims[0].Status.Machine == nil {
			return fmt.Sprintf("a claim to be released: %d are", len(claims)), nil
		}
		releasing = claims[0]
		var instance simv1.SimMachine
		err := h.source.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: releasing.Status.Machine.Name}, &instance)
		return lo.Ternary(instance.Status.StoppedAt != nil, "", "the instance of the released claim to be stopped"), err
	})
	bound := h.claims(t, h.source, agentv1.PhaseBound)
	require.Len(t, bound, 1)

	h.move(t)
	require.NoError(t, h.source.Sandbox.PointShim(within(t, soon), h.target.Sandbox.State().AgentAddress))

	machine := client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: releasing.Status.Machine.Name}
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		var m clusterv1.Machine
		err := h.target.Hub.Get(ctx, machine, &m)
		return lo.Ternary(!m.DeletionTimestamp.IsZero(), "",
			fmt.Sprintf("the release of Machine %s to go on in the target: it is not being deleted there (labels %v, annotations %v, finalizers %v)",
				m.Name, m.Labels, m.Annotations, m.Finalizers)), err
	})
	h.hold(t, h.target, false)
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		var m clusterv1.Machine
		if err := client.IgnoreNotFound(h.target.Hub.Get(ctx, machine, &m)); err != nil {
			return "", err
		}
		live := h.target.Recorder.State().Live()
		return lo.Ternary(m.Name == "" && len(live) == 1, "",
			fmt.Sprintf("Machine %s to go, and its NodeClaim: finalizers %v, %d NodeClaims", machine.Name, m.Finalizers, len(live))), nil
	})
	h.settle(t)
	left := h.holdings(t, h.target)
	require.Equal(t, map[string]int32{"east": own + 1, "west": 0}, left.replicas)
	require.Equal(t, bound[0].Status.Machine.Name, left.claims[bound[0].Spec.ClaimID].machine, "the claim that was not released")
	require.Len(t, left.claims, 1)

	for _, claim := range []agentv1.MachineClaim{ended[0], releasing} {
		_, err := h.agent(t).Claims.CreateClaim(within(t, soon), &agentv1alpha1.CreateClaimRequest{
			Cluster: theCluster(), ClaimId: claim.Spec.ClaimID, Holder: invariants.Holder, DisplayName: claim.Spec.DisplayName,
			Candidates: []string{sandbox.ClusterNamespace + "/east"},
		})
		require.Equal(t, codes.Aborted, status.Code(err), "the claim of %s had ended, and its id was taken again: %v", claim.Spec.DisplayName, err)
	}
	require.Empty(t, h.faults())
}

// hubs are a spoke with its hub, and a hub to which its Cluster is moved. Two agents serve each
// hub.
type hubs struct{ source, target *testenv.Env }

// startHubs names the two sandboxes after the test, so that the logs of one test are kept when
// another one begins.
func startHubs(t *testing.T, name string) hubs {
	t.Helper()
	ofSource, ofTarget := ofHub(name), ofHub(name+"-target")
	ofTarget.HubOnly = true
	authority, err := sandbox.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	// The Cluster keeps its onboarding, so the shim's certificate is valid in the target as well.
	ofSource.Authority, ofTarget.Authority = authority, authority
	ctx := within(t, startWithin)
	var (
		source   *testenv.Env
		target   *sandbox.Sandbox
		starting errgroup.Group
	)
	starting.Go(func() (err error) {
		source, err = testenv.Start(ctx, ofSource, nil)
		return err
	})
	starting.Go(func() (err error) {
		target, err = sandbox.Start(ctx, ofTarget)
		return err
	})
	err = starting.Wait()
	t.Cleanup(func() {
		for _, box := range []*sandbox.Sandbox{target, lo.FromPtr(source).Sandbox} {
			if box != nil && t.Failed() {
				t.Logf("logs: %s", box.State().Paths.Logs)
			}
		}
		if target != nil {
			target.Stop()
		}
		if source != nil {
			source.Stop()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	moved, err := source.OnHub(ctx, target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(moved.Recorder.Stop)
	moved.Checker.Expected = whoseMachines
	return hubs{source: source, target: moved}
}

// ofHub returns the options of a separate sandbox.
func ofHub(name string) sandbox.Options {
	return sandbox.Options{
		Name: name, Agents: agents,
		AgentArgs: []string{"--spare-grace-period=" + spareGrace.String()},
		ShimEnv:   []string{"HUB_UNREACHABLE_GRACE_PERIOD=" + gracePeriod.String(), "CLAIM_SYNC_INTERVAL=" + syncInterval.String()},
	}
}

// startHub is startHubs with a single hub: source and target are the same.
func startHub(t *testing.T, name string, changes ...func(*sandbox.Options)) hubs {
	t.Helper()
	options := ofHub(name)
	for _, change := range changes {
		change(&options)
	}
	alone, err := testenv.Start(within(t, startWithin), options, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("logs: %s", alone.Sandbox.State().Paths.Logs)
		}
		alone.Stop()
	})
	alone.Checker.Expected = whoseMachines
	return hubs{source: alone, target: alone}
}

// whoseMachines returns what the team knows. It does not use the ledger, because that is what is
// moved or restored.
func whoseMachines() invariants.Expected {
	return invariants.Expected{Shares: map[string]invariants.Share{"east": {Own: own}, "west": {}}}
}

// run creates the node groups and pods for each, and waits until the pods run and everything is at
// rest.
func (h hubs) run(t *testing.T, in *testenv.Env, east, west int) {
	t.Helper()
	require.NoError(t, manifests.Apply(within(t, soon), in.Hub, manifests.MoveHub))
	h.occupy(t, in, east, west)
}

// occupy creates pods for each node group, and waits until they run and everything is at rest.
func (h hubs) occupy(t *testing.T, in *testenv.Env, east, west int) {
	t.Helper()
	for _, file := range []string{manifests.MoveSpoke, manifests.MoveWorkload} {
		require.NoError(t, manifests.Apply(within(t, soon), in.Spoke, file))
	}
	require.NoError(t, in.AwaitNodePool(within(t, soon), "move"))
	h.scale(t, east, west)
	require.NoError(t, in.Recorder.Await(within(t, 5*time.Minute), running(east+west)))
	require.NoError(t, in.Recorder.Await(within(t, 2*time.Minute), everyMachineRuns))
	settle(t, in, settleWithin)
}

// fill runs pods in the source, half of them in each node group, and returns their holdings and
// their observer.
func (h hubs) fill(t *testing.T, nodes int) (before holdings, watching *bystander.Bystander) {
	t.Helper()
	h.run(t, h.source, nodes/2, nodes/2)
	before = h.holdings(t, h.source)
	require.Len(t, before.claims, nodes, "a claim for each pod")
	return before, watchSpoke(t, h.source)
}

// takeOver points the shim to the target and waits until the target has what the source had. It
// returns how long that took.
func (h hubs) takeOver(t *testing.T, before holdings, watching *bystander.Bystander) time.Duration {
	t.Helper()
	require.NoError(t, h.source.Sandbox.PointShim(within(t, soon), h.target.Sandbox.State().AgentAddress))
	began := time.Now()
	poll(t, 2*settleWithin, h.holds(before))
	require.NoError(t, h.target.AwaitNodePool(within(t, soon), "move"))
	h.settle(t)
	took := time.Since(began)
	// As long as the agent keeps unclaimed machines, plus the shim's next claim sync.
	throughout(t, spareGrace+syncInterval, 500*time.Millisecond, func() {
		require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke")
	})
	require.Equal(t, before, h.holdings(t, h.target), "claims with their Machines, provider IDs, replicas, Nodes")
	return took
}

// grow adds pods to each Deployment, given the present total.
func (h hubs) grow(t *testing.T, pods int, watching *bystander.Bystander) {
	t.Helper()
	h.scale(t, pods/2+more, pods/2+more)
	require.NoError(t, h.target.Recorder.Await(within(t, 3*time.Minute), running(pods+2*more)))
	// This includes the machine that replaces one assigned to a new claim.
	require.NoError(t, h.target.Recorder.Await(within(t, 2*time.Minute), everyMachineRuns))
	h.settle(t)
	require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke, when pods were added")
}

// shrink leaves this many pods, half of them in each Deployment, and waits until they have exactly
// as many machines.
func (h hubs) shrink(t *testing.T, pods int) {
	t.Helper()
	h.scale(t, pods/2, pods/2)
	require.NoError(t, h.target.Recorder.Await(within(t, 3*time.Minute), func(s timeline.State) string {
		if missing := running(pods)(s); missing != "" {
			return missing
		}
		return lo.Ternary(len(s.Live()) == pods, "", fmt.Sprintf("%d NodeClaims to be left: %d are", pods, len(s.Live())))
	}))
	h.settle(t)
}

// scale sets the numbers of pods of the Deployments east and west.
func (h hubs) scale(t *testing.T, east, west int) {
	t.Helper()
	for name, pods := range map[string]int{"east": east, "west": west} {
		if err := h.source.Scale(within(t, soon), client.ObjectKey{Namespace: "default", Name: name}, int32(pods)); err != nil {
			t.Fatal(err)
		}
	}
}

// move moves the Cluster from the source to the target.
func (h hubs) move(t *testing.T) {
	t.Helper()
	cmd := exec.CommandContext(within(t, moveWithin), filepath.Join(root(t), "bin", "clusterctl"), "move",
		"--kubeconfig", h.source.Sandbox.State().Paths.HubKubeconfig,
		"--to-kubeconfig", h.target.Sandbox.State().Paths.HubKubeconfig,
		"--namespace", sandbox.ClusterNamespace)
	home := t.TempDir()
	// It would look for a newer version on the internet.
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home, "CLUSTERCTL_DISABLE_VERSIONCHECK=true")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("clusterctl move: %v\n%s", err, out)
	}
}

// settle waits until nothing violates an invariant in the target.
func (h hubs) settle(t *testing.T) {
	t.Helper()
	violations, err := h.target.Checker.Settle(within(t, settleWithin))
	require.NoError(t, err)
	require.Empty(t, violations, "in the target:\n"+invariants.Describe(violations))
}

// holdings record ownership by names that a move preserves.
type holdings struct {
	// claims that are Bound, by id.
	claims map[string]holding
	// replicas by node group.
	replicas map[string]int32
	// nodes by name, with their UIDs. unclaimed are the names of those whose Machine has no claim.
	nodes     map[string]types.UID
	unclaimed []string
}

// holding is what a claim holds.
type holding struct{ nodeClaim, group, machine, providerID string }

func (h hubs) holdings(t *testing.T, of *testenv.Env) holdings {
	t.Helper()
	state, err := invariants.Read(within(t, soon), of.Hub, of.Spoke, of.Checker.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	is := holdings{claims: map[string]holding{}, replicas: map[string]int32{}, nodes: map[string]types.UID{}}
	machines := lo.KeyBy(state.Machines, func(m clusterv1.Machine) types.UID { return m.UID })
	for _, c := range state.Claims {
		if c.CurrentPhase() == agentv1.PhaseBound && c.Status.Machine != nil {
			m := machines[c.Status.Machine.UID]
			is.claims[c.Spec.ClaimID] = holding{c.Spec.DisplayName, c.Spec.NodeGroup, m.Name, m.Spec.ProviderID}
		}
	}
	for _, md := range state.Deployments {
		is.replicas[md.Name] = ptr.Deref(md.Spec.Replicas, -1)
	}
	for _, n := range state.Nodes {
		is.nodes[n.Name] = n.UID
	}
	for _, m := range state.Machines {
		if m.Labels[agentv1.ClaimLabel] == "" {
			is.unclaimed = append(is.unclaimed, m.Status.NodeRef.Name)
		}
	}
	slices.Sort(is.unclaimed)
	return is
}

// holds returns a condition for poll: each claim is Bound in the target to its previous Machine.
func (h hubs) holds(before holdings) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		state, err := invariants.Read(ctx, h.target.Hub, h.target.Spoke, h.target.Checker.Cluster)
		if err != nil {
			return "", err
		}
		claims := lo.KeyBy(state.Claims, func(c agentv1.MachineClaim) string { return c.Spec.ClaimID })
		machines := lo.KeyBy(state.Machines, func(m clusterv1.Machine) string { return m.Name })
		var lost []string
		for _, id := range slices.Sorted(maps.Keys(before.claims)) {
			had := before.claims[id]
			claim, made := claims[id]
			machine, moved := machines[had.machine]
			what := fmt.Sprintf("the claim of NodeClaim %s (%s) on Machine %s: ", had.nodeClaim, id, had.machine)
			switch {
			case !made:
				lost = append(lost, what+"there is no MachineClaim")
			case !moved:
				lost = append(lost, what+"the Machine is gone")
			case claim.CurrentPhase() != agentv1.PhaseBound:
				lost = append(lost, what+fmt.Sprintf("it is %s (%s: %s)", claim.CurrentPhase(), claim.Status.Reason, claim.Status.Message))
			case claim.Status.Machine == nil || claim.Status.Machine.UID != machine.UID:
				lost = append(lost, what+fmt.Sprintf("it has another one: %+v", claim.Status.Machine))
			}
		}
		if len(lost) == 0 {
			return "", nil
		}
		return fmt.Sprintf("%d of %d claims to have in the target what they had in the source:\n  %s",
			len(lost), len(before.claims), strings.Join(lo.Slice(lost, 0, 5), "\n  ")), nil
	}
}

// sourceIsEmpty is a condition for poll: nothing of the Cluster is left in the source.
func (h hubs) sourceIsEmpty(ctx context.Context) (string, error) {
	var left []string
	for _, list := range []client.ObjectList{
		&clusterv1.ClusterList{}, &clusterv1.MachineDeploymentList{}, &clusterv1.MachineSetList{}, &clusterv1.MachineList{},
		&simv1.SimMachineList{}, &simv1.SimMachineTemplateList{}, &simv1.SimClusterList{}, &simv1.SimControlPlaneList{},
		&agentv1.MachineClaimList{}, &agentv1.NodePoolSetList{}, &corev1.SecretList{},
	} {
		if err := h.source.Hub.List(ctx, list, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
			return "", err
		}
		objects, err := meta.ExtractList(list)
		if err != nil {
			return "", err
		}
		if len(objects) > 0 {
			left = append(left, fmt.Sprintf("%d in a %T", len(objects), list))
		}
	}
	return lo.Ternary(len(left) == 0, "", "nothing to be left in the source: "+strings.Join(left, ", ")), nil
}

// claims returns the claims in a phase.
func (h hubs) claims(t *testing.T, of *testenv.Env, phase agentv1.Phase) []agentv1.MachineClaim {
	t.Helper()
	var list agentv1.MachineClaimList
	if err := of.Hub.List(t.Context(), &list, client.InNamespace(sandbox.ClusterNamespace)); err != nil {
		t.Fatal(err)
	}
	return lo.Filter(list.Items, func(c agentv1.MachineClaim, _ int) bool { return c.CurrentPhase() == phase })
}

// hold makes every instance hang when it is told to stop, or no longer hang.
func (h hubs) hold(t *testing.T, in *testenv.Env, stuck bool) {
	t.Helper()
	var instances simv1.SimMachineList
	require.NoError(t, in.Hub.List(t.Context(), &instances, client.InNamespace(sandbox.ClusterNamespace)))
	patch := mergePatch(lo.Ternary(stuck, `{"spec":{"stuckAt":"Termination"}}`, `{"spec":{"stuckAt":null}}`))
	for i := range instances.Items {
		require.NoError(t, in.Hub.Patch(t.Context(), &instances.Items[i], patch))
	}
}

// agent returns an administrator's client of the target's first agent.
func (h hubs) agent(t *testing.T) *agentclient.Client {
	t.Helper()
	paths := h.target.Sandbox.State().Paths
	return h.agentAs(t, paths.AdminCertificate, paths.AdminKey)
}

// agentAs is agent with another certificate.
func (h hubs) agentAs(t *testing.T, certFile, keyFile string) *agentclient.Client {
	t.Helper()
	state := h.target.Sandbox.State()
	c, err := agentclient.New(agentclient.Options{
		Address: state.AgentAddress,
		TLS:     &agentclient.TLS{CertFile: certFile, KeyFile: keyFile, CAFile: state.Paths.AgentCA},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func (h hubs) faults() []string { return h.faultsBut(nil) }

// faultsBut ignores the lines that are expected, which may be nil.
func (h hubs) faultsBut(expected func(line string) bool) []string {
	ofAgents := lo.Times(agents, sandbox.AgentName)
	return append(faultsInLogsBut(expected, h.source, append(ofAgents, sandbox.Shim)...), faultsInLogsBut(expected, h.target, ofAgents...)...)
}

// providerLogs returns a function that returns the lines with a text that the infrastructure
// provider has logged since.
func providerLogs(t *testing.T, of *testenv.Env, text string) func() []string {
	t.Helper()
	read := func() string {
		data, err := os.ReadFile(of.Status(sandbox.SimProvider).Log)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	old := len(read())
	return func() []string {
		return lo.Filter(strings.Split(read()[old:], "\n"), func(line string, _ int) bool { return strings.Contains(line, text) })
	}
}

// nodesWithPods returns the names of the Nodes on which the tests' pods run.
func nodesWithPods(t *testing.T, of *testenv.Env) []string {
	t.Helper()
	var pods corev1.PodList
	if err := of.Spoke.List(t.Context(), &pods, client.InNamespace("default")); err != nil {
		t.Fatal(err)
	}
	return lo.FilterMap(pods.Items, func(p corev1.Pod, _ int) (string, bool) { return p.Spec.NodeName, p.DeletionTimestamp.IsZero() })
}

// watchSpoke observes the spoke until the test ends.
func watchSpoke(t *testing.T, of *testenv.Env) *bystander.Bystander {
	t.Helper()
	watching, err := bystander.Watch(t.Context(), of)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watching.Stop)
	return watching
}
