package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	simv1 "github.com/karpenter-capi/karpenter-capi/deploy/sandbox/api/v1alpha1"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/test/invariants"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
	"github.com/karpenter-capi/karpenter-capi/test/timeline"
)

// An earlier etcd snapshot is restored, in the hub or in the spoke, while everything else has moved
// on. What both sides know must not be harmed. What only one of them knows is reported, and removed
// when a user requests it, as described in docs/disaster-recovery.md.

const (
	// perGroup is the initial number of pods in each node group.
	perGroup = 10
	// since is the number of machines removed from the node group east, and added to west, after
	// the snapshot.
	since = 3
	// quiet is as long as the agent keeps unclaimed machines, plus the shim's next claim syncs.
	quiet = spareGrace + 2*syncInterval
	// unheard is how long until a Node with a silent kubelet counts as lost and is given up.
	unheard = 4 * time.Minute
)

func TestASnapshotOfTheHubThatIsPutBackLosesNothing(t *testing.T) {
	figure := shows(t, "a hub's etcd snapshot of earlier is put back: what runs is kept, what is missing or too much is reported")
	if testing.Short() {
		t.Skip("not in the short run: an hour's work is undone twice")
	}
	h := startHub(t, "e2e-snapshot-hub")
	h.run(t, h.source, perGroup, perGroup)

	const (
		agentsLast = "with everything in the hub stopped, and the agents started last"
		agentsRun  = "with all but the agents stopped"
	)
	pods := map[string]int{"east": perGroup, "west": perGroup}
	var starts []time.Time
	for _, how := range []string{agentsLast, agentsRun} {
		t.Run(how, func(t *testing.T) {
			// One more machine is being made at the time of the snapshot, and joins after it.
			hangs := h.hangs(t, func() {
				pods["west"]++
				h.scale(t, pods["east"], pods["west"])
			})
			h.noted(t, hangs)
			had := h.holdings(t, h.source)
			file := filepath.Join(t.TempDir(), "hub.db")
			require.NoError(t, h.source.Sandbox.Snapshot(within(t, soon), sandbox.HubEtcd, file))

			taken := time.Now()
			h.joins(t, hangs)
			pods["east"], pods["west"] = pods["east"]-since, pods["west"]+since
			h.scale(t, pods["east"], pods["west"])
			h.atRest(t, pods)
			has := h.holdings(t, h.source)
			d := difference(had, has)
			require.Len(t, d.made, since)
			require.Len(t, d.removed, since)
			ran := podsOn(t, h.source, d.nodes())
			watching := watchSpoke(t, h.source)

			// Cluster API and Kubernetes' own controllers cause harm during a restore: their caches
			// go back one kind after the other, and a newer MachineSet makes Cluster API delete
			// older Machines.
			stopped := []string{sandbox.ClusterAPI, sandbox.SimProvider, sandbox.HubControllerManager}
			if how == agentsLast {
				stopped = slices.Concat(lo.Times(agents, sandbox.AgentName), stopped)
			}
			starts = append(starts, putBack(t, h.source.Sandbox, file, sandbox.HubEtcd, sandbox.HubAPIServer, stopped, nil))
			back := time.Now()
			figure("%s, the snapshot was %.0f s old", how, back.Sub(taken).Seconds())

			// Reported: claims whose NodeClaim is gone, and NodeClaims and Nodes that the hub does
			// not know.
			poll(t, settleWithin, h.reports(d))
			figure("what differs was reported %.0f s later", time.Since(back).Seconds())
			reported := h.reports(d)
			throughout(t, quiet, time.Second, func() {
				require.Empty(t, watching.Incidents(), "what happened to what ran in the spoke")
				missing, err := reported(t.Context())
				require.NoError(t, err)
				require.Empty(t, missing)
			})

			// Released: following the page's instructions.
			for id := range d.removed {
				h.release(t, id)
			}
			for _, lost := range d.made {
				nodeClaim := &karpenterv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: lost.nodeClaim}}
				require.NoError(t, h.source.Spoke.Delete(within(t, soon), nodeClaim))
				h.drained(t, nodeClaim)
				h.silence(t, lost.machine) // its instance is deleted in the infrastructure
			}
			h.atRest(t, pods)
			now := h.holdings(t, h.source)
			require.Equal(t, has.replicas, now.replicas)
			d.expectKept(t, now)
			require.Subset(t, podsOn(t, h.source, d.nodes()), ran, "pods on Nodes that both sides know")
		})
	}
	require.Empty(t, h.faultsBut(startsUp(starts...)))
}

// drained waits until the Node of a NodeClaim that is being deleted has been drained. The NodeClaim
// waits for a person then, because nobody else removes the instance.
func (h hubs) drained(t *testing.T, nodeClaim *karpenterv1.NodeClaim) {
	t.Helper()
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		err := h.source.Spoke.Get(ctx, client.ObjectKeyFromObject(nodeClaim), nodeClaim)
		is := nodeClaim.StatusConditions().Get(karpenterv1.ConditionTypeDrained).IsTrue()
		return lo.Ternary(is, "", "the Node of NodeClaim "+nodeClaim.Name+" to be drained"), err
	})
}

// noted waits until each claim records that its Node was registered, except for the claim of a
// machine that has not joined. A claim without that record is collected once its NodeClaim is gone.
func (h hubs) noted(t *testing.T, hangs string) {
	t.Helper()
	poll(t, settleWithin, func(ctx context.Context) (string, error) {
		var claims agentv1.MachineClaimList
		err := h.source.Hub.List(ctx, &claims, client.InNamespace(sandbox.ClusterNamespace))
		left := lo.CountBy(claims.Items, func(c agentv1.MachineClaim) bool {
			return c.Status.Machine != nil && c.Status.Machine.Name != hangs && c.CurrentPhase() == agentv1.PhaseBound && c.Status.NodeRegisteredAt == nil
		})
		return lo.Ternary(left == 0, "", fmt.Sprintf("all claims to say that their Nodes were registered: %d do not", left)), err
	})
}

func TestASnapshotOfTheSpokeThatIsPutBackLosesNothing(t *testing.T) {
	figure := shows(t, "a spoke's etcd snapshot of earlier is put back: what runs is kept, what is missing or too much is reported")
	if testing.Short() {
		t.Skip("not in the short run: Nodes that nothing is heard of count as lost after a minute")
	}
	h := startHub(t, "e2e-snapshot-spoke")
	h.run(t, h.source, perGroup, perGroup)
	had := h.holdings(t, h.source)
	file := filepath.Join(t.TempDir(), "spoke.db")
	require.NoError(t, h.source.Sandbox.Snapshot(within(t, soon), sandbox.SpokeEtcd, file))

	taken := time.Now()
	h.scale(t, perGroup-since, perGroup+since)
	h.atRest(t, map[string]int{"east": perGroup - since, "west": perGroup + since})
	d := difference(had, h.holdings(t, h.source))
	require.Len(t, d.made, since)
	require.Len(t, d.removed, since)
	ran := podsOn(t, h.source, d.nodes())
	destroyed := providerLogs(t, h.source, "instance stops")
	madeNodes := lo.MapToSlice(d.made, func(_ string, c holding) corev1.Node { return h.node(t, c.machine) })

	stopped := []string{sandbox.SpokeKwok, sandbox.SpokeScheduler, sandbox.SpokeControllerManager}
	start := putBack(t, h.source.Sandbox, file, sandbox.SpokeEtcd, sandbox.SpokeAPIServer, stopped, func() {
		for _, gone := range d.removed {
			h.silence(t, gone.machine) // without a machine there is no kubelet
		}
		// A kubelet only creates its Node again when it is restarted.
		h.restartKubelet(t, madeNodes[0])
	})
	back := time.Now()
	figure("the snapshot was %.0f s old", back.Sub(taken).Seconds())

	// NodeClaims whose claim has ended are removed once their Nodes are silent, and their pods are
	// planned again. Claims whose NodeClaim is gone are kept, because as far as the hub knows pods
	// run on their machines.
	poll(t, unheard, func(ctx context.Context) (string, error) {
		for _, gone := range d.removed {
			err := h.source.Spoke.Get(ctx, client.ObjectKey{Name: gone.machine}, &corev1.Node{})
			if !apierrors.IsNotFound(err) {
				return "Node " + gone.machine + " to go, which has no machine", err
			}
		}
		return "", nil
	})
	figure("NodeClaims without a machine were given up %.0f s later", time.Since(back).Seconds())
	require.NoError(t, h.source.Recorder.Await(within(t, unheard), running(2*perGroup)))
	reported := h.reports(differences{removed: d.made})
	poll(t, settleWithin, reported)
	throughout(t, quiet, time.Second, func() {
		require.Empty(t, destroyed(), "instances")
		missing, err := reported(t.Context())
		require.NoError(t, err)
		require.Empty(t, missing)
	})

	for id := range d.made {
		h.release(t, id)
	}
	h.atRest(t, map[string]int{"east": perGroup, "west": perGroup})
	now := h.holdings(t, h.source)
	require.Equal(t, had.replicas, now.replicas)
	d.expectKept(t, now)
	require.Subset(t, podsOn(t, h.source, d.nodes()), ran, "pods on Nodes that both sides know")
	require.Empty(t, h.faultsBut(startsUp(start)))
}

// putBack stops the named components, and an etcd with its API server. It restores the snapshot,
// and starts everything in the opposite order. first runs before the other components are started.
// It returns when the start began.
func putBack(t *testing.T, in *sandbox.Sandbox, file, etcd, server string, others []string, first func()) (began time.Time) {
	t.Helper()
	all := append(slices.Clone(others), server, etcd)
	for _, component := range all {
		require.NoError(t, in.StopComponent(component))
	}
	require.NoError(t, in.PutBack(within(t, soon), etcd, file))
	began = time.Now()
	for _, component := range slices.Backward(all) {
		require.NoError(t, in.StartComponent(within(t, settleWithin), component), component)
		if component == server && first != nil {
			first()
		}
	}
	return began
}

// startsWithin bounds how long an API server that starts may refuse what its roles allow.
const startsWithin = 30 * time.Second

// startsUp returns a function that reports whether a log line is about a refusal of an API server
// that began to start at one of the moments: it has not read its bindings yet, or their roles.
func startsUp(starts ...time.Time) func(line string) bool {
	return func(line string) bool {
		var entry struct {
			OfShim  time.Time `json:"time"`
			OfAgent time.Time `json:"ts"`
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil || !strings.Contains(line, "is forbidden:") {
			return false
		}
		return slices.ContainsFunc(starts, func(start time.Time) bool {
			since := lo.CoalesceOrEmpty(entry.OfShim, entry.OfAgent).Sub(start)
			return since >= 0 && since < startsWithin
		})
	}
}

// differences are the changes of claims between two moments, each with its last holding.
type differences struct {
	kept, made, removed map[string]holding
	uids                map[string]types.UID // of the Nodes of claims not made since
}

func difference(before, after holdings) differences {
	had, has := slices.Collect(maps.Keys(before.claims)), slices.Collect(maps.Keys(after.claims))
	d := differences{
		kept: lo.PickByKeys(after.claims, had), made: lo.OmitByKeys(after.claims, had), removed: lo.OmitByKeys(before.claims, has),
	}
	// A Node has its Machine's name.
	d.uids = lo.OmitByKeys(after.nodes, lo.MapToSlice(d.made, func(_ string, c holding) string { return c.machine }))
	return d
}

func (d differences) nodes() []string { return slices.Collect(maps.Keys(d.uids)) }

func (d differences) expectKept(t require.TestingT, now holdings) {
	require.Equal(t, d.kept, lo.PickByKeys(now.claims, slices.Collect(maps.Keys(d.kept))), "claims that both sides know")
	require.Equal(t, d.uids, lo.PickByKeys(now.nodes, d.nodes()), "Nodes that both sides know")
}

// reports returns a condition for poll: only the claims made and removed since violate invariants,
// and the claims of the removed NodeClaims are reported without an owner.
func (h hubs) reports(d differences) func(context.Context) (string, error) {
	expected := map[string]invariants.Rule{}
	for id := range d.removed {
		expected["MachineClaim "+agentv1.ObjectName(sandbox.ClusterName, id)] = invariants.ClaimHasNodeClaim
	}
	for _, c := range d.made {
		expected["NodeClaim "+c.nodeClaim] = invariants.NodeClaimHasClaim
		expected["Node "+c.machine] = invariants.NodeHasMachine
	}
	return func(ctx context.Context) (string, error) {
		state, err := invariants.Read(ctx, h.source.Hub, h.source.Spoke, testenv.Cluster)
		if err != nil {
			return "", err
		}
		violations := state.AtRest()
		found := lo.SliceToMap(violations, func(v invariants.Violation) (string, invariants.Rule) { return v.Object, v.Rule })
		if len(found) != len(violations) || !maps.Equal(found, expected) {
			return fmt.Sprintf("just this to be reported: %v; there is\n%s", expected, invariants.Describe(violations)), nil
		}
		for _, c := range state.Claims {
			if _, surplus := d.removed[c.Spec.ClaimID]; surplus && c.Status.Reason != "OwnerMissing" {
				return fmt.Sprintf("MachineClaim %s to have the reason OwnerMissing: it has %s", c.Name, c.Status.Reason), nil
			}
		}
		return "", nil
	}
}

// atRest waits until each node group has the machines of these pods and of the team, all pods and
// machines run, and nothing violates an invariant.
func (h hubs) atRest(t *testing.T, pods map[string]int) {
	t.Helper()
	poll(t, unheard, func(ctx context.Context) (string, error) {
		for name, n := range pods {
			var md clusterv1.MachineDeployment
			if err := h.source.Hub.Get(ctx, client.ObjectKey{Namespace: sandbox.ClusterNamespace, Name: name}, &md); err != nil {
				return "", err
			}
			wanted := n + lo.Ternary(name == "east", own, 0)
			if is := ptr.Deref(md.Spec.Replicas, -1); int(is) != wanted {
				return fmt.Sprintf("MachineDeployment %s to have %d replicas: it has %d", name, wanted, is), nil
			}
		}
		return "", nil
	})
	require.NoError(t, h.source.Recorder.Await(within(t, unheard), func(s timeline.State) string {
		if missing := running(pods["east"] + pods["west"])(s); missing != "" {
			return missing
		}
		return everyMachineRuns(s)
	}))
	h.settle(t)
}

// release releases a claim as an administrator.
func (h hubs) release(t *testing.T, id string) {
	t.Helper()
	_, err := h.agent(t).Claims.ReleaseClaim(within(t, soon), &agentv1alpha1.ReleaseClaimRequest{
		Cluster: theCluster(), ClaimId: id, Reason: "its NodeClaim is gone",
	})
	require.NoError(t, err)
}

// joins ends what hangs began.
func (h hubs) joins(t *testing.T, machine string) {
	t.Helper()
	m := &simv1.SimMachine{ObjectMeta: metav1.ObjectMeta{Namespace: sandbox.ClusterNamespace, Name: machine}}
	require.NoError(t, h.source.Hub.Patch(within(t, soon), m, mergePatch(`{"spec":{"stuckAt":null}}`)))
}

func (h hubs) node(t *testing.T, name string) corev1.Node {
	t.Helper()
	var n corev1.Node
	require.NoError(t, h.source.Spoke.Get(within(t, soon), client.ObjectKey{Name: name}, &n))
	return n
}

// silence detaches a Node from kwok, so that its kubelet falls silent.
func (h hubs) silence(t *testing.T, node string) {
	t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}
	patch := mergePatch(fmt.Sprintf(`{"metadata":{"labels":{%q:null}}}`, sandbox.KubeletLabel))
	require.NoError(t, h.source.Spoke.Patch(within(t, soon), n, patch))
}

// restartKubelet registers a Node as its kubelet does when it starts: with Karpenter's taint, and
// without what others have written to it.
func (h hubs) restartKubelet(t *testing.T, was corev1.Node) {
	t.Helper()
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: was.Name,
			Labels: lo.PickBy(was.Labels, func(key, _ string) bool {
				return key == sandbox.KubeletLabel || strings.HasPrefix(key, "kubernetes.io/") || strings.HasPrefix(key, "topology.kubernetes.io/")
			}),
		},
		Spec: corev1.NodeSpec{ProviderID: was.Spec.ProviderID, Taints: []corev1.Taint{karpenterv1.UnregisteredNoExecuteTaint}},
	}
	require.NoError(t, h.source.Spoke.Create(within(t, soon), n))
	n.Status = was.Status
	require.NoError(t, h.source.Spoke.Status().Update(within(t, soon), n))
}

// podsOn returns the UIDs of the tests' pods on these Nodes, sorted.
func podsOn(t *testing.T, of *testenv.Env, nodes []string) []types.UID {
	t.Helper()
	var pods corev1.PodList
	if err := of.Spoke.List(within(t, soon), &pods, client.InNamespace("default")); err != nil {
		t.Fatal(err)
	}
	uids := lo.FilterMap(pods.Items, func(p corev1.Pod, _ int) (types.UID, bool) { return p.UID, slices.Contains(nodes, p.Spec.NodeName) })
	slices.Sort(uids)
	return uids
}
