package agent_test

import (
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var adopting = flag.Int("adopting", 10, "how many running Machines of each of two node groups are adopted at once")

// TestManyMachinesAreAdoptedAtOnce adopts all Machines of two node groups with two agents running,
// as in a migration from another provider. Cluster API is idle meanwhile. The duration is only
// logged.
func TestManyMachinesAreAdoptedAtOnce(t *testing.T) {
	const groups = 2
	namespace := plane.Namespace(t)
	var machines [groups][]*clusterv1.Machine
	for number := range groups {
		_, md, set := makeGroup(t, namespace, number, *adopting)
		delete(md.Annotations, v1alpha1.LedgerAnnotation) // no Machine is claimed yet
		delete(md.Annotations, v1alpha1.ClaimedAnnotation)
		require.NoError(t, plane.Client.Update(t.Context(), md))
		machines[number] = make([]*clusterv1.Machine, *adopting)
		var writes errgroup.Group
		writes.SetLimit(32)
		for i := range *adopting {
			machine := machineOf(set, i)
			foreign := func(key, _ string) bool { return !strings.HasPrefix(key, v1alpha1.Group+"/") }
			machine.Labels, machine.Annotations = lo.PickBy(machine.Labels, foreign), lo.PickBy(machine.Annotations, foreign)
			machines[number][i] = machine
			writes.Go(func() error { return runMachine(t.Context(), machine) })
		}
		require.NoError(t, writes.Wait())
	}
	o := testOptions(namespace)
	o.KubeAPIQPS, o.KubeAPIBurst = options.New().KubeAPIQPS, options.New().KubeAPIBurst
	agents := lo.Times(groups, func(int) *running { return start(t, agent.Config{Options: o}) })

	began := time.Now()
	var calls errgroup.Group
	calls.SetLimit(100)
	for i := range *adopting {
		for number, own := range machines {
			cluster := clusterName(number)
			calls.Go(func() error {
				_, err := agents[number].client(namespace, cluster).Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
					Cluster: &agentv1alpha1.ClusterRef{Namespace: namespace, Name: cluster}, ClaimId: "for-" + own[i].Name, Holder: "karpenter",
					Candidates: []string{namespace + "/" + groupName(cluster)}, AdoptMachine: own[i].Name,
				})
				return err
			})
		}
	}
	require.NoError(t, calls.Wait())
	called := time.Since(began)
	for number, own := range machines {
		for _, machine := range own {
			require.EventuallyWithT(t, func(c *assert.CollectT) {
				var is clusterv1.Machine
				if assert.NoError(c, plane.Client.Get(t.Context(), ctrlclient.ObjectKeyFromObject(machine), &is)) {
					assert.Equal(c, "for-"+machine.Name, protocol.ClaimOf(&is))
				}
			}, patience, 20*time.Millisecond)
		}
		var md clusterv1.MachineDeployment
		key := ctrlclient.ObjectKey{Namespace: namespace, Name: groupName(clusterName(number))}
		require.NoError(t, plane.Client.Get(t.Context(), key, &md))
		require.EqualValues(t, *adopting, *md.Spec.Replicas, "nothing is raised")
	}
	t.Logf("%d Machines of %d node groups adopted at once: the calls took %s, the last Machine had its claim after %s",
		groups**adopting, groups, called.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
}
