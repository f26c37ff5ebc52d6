package cloudprovider_test

import (
	"flag"
	"fmt"
	"strconv"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

var manyNodes = flag.Int("nodes", 1000, "how many Nodes the larger of the two spokes has; a tenth of them terminate")

// How often core calls Delete for each Node that terminates, and Get for each that is not Ready
// meanwhile.
const deletesPerMinute, getsPerMinute = 12, 60

// confirmations is how often core asks whether the claim of a Node has ended, once it has: its
// controller of Nodes' termination does, and so does that of NodeClaims' lifecycle.
const confirmations = 2

// A tenth of a spoke's Nodes terminates at once, and is not Ready meanwhile. What that costs the
// agent for each of them depends neither on the number of Nodes, nor on how long their machines
// take to go.
func TestWhatManyNodesThatTerminateAskOfTheAgent(t *testing.T) {
	for _, nodes := range []int{*manyNodes / 10, *manyNodes} {
		t.Run(strconv.Itoa(nodes), func(t *testing.T) {
			w := shimtest.New(t, oneGroup(), slowTermination())
			nodeClaims := lo.Times(nodes, func(n int) *karpv1.NodeClaim { return w.NodeClaim(fmt.Sprint("claim-", n)) })
			each(t, nodeClaims, func(nc *karpv1.NodeClaim) error {
				created, err := w.CloudProvider.Create(w.Context(), nc)
				if err != nil {
					return err
				}
				nc.Status = created.Status
				nc.StatusConditions().SetTrue(karpv1.ConditionTypeDrained)
				nc.StatusConditions().SetTrue(karpv1.ConditionTypeVolumesDetached)
				machine := w.Agent.Provision(w.Cluster, string(nc.UID), "sim:///"+nc.Name)
				nc.Status.ProviderID = machine.GetProviderId()
				w.Agent.Join(w.Cluster, machine.GetName(), nc.Name)
				return nil
			})
			mirrored := func(nc *karpv1.NodeClaim) *agentv1alpha1.Claim {
				claim, _ := w.Claims.Get(string(nc.UID))
				return claim
			}
			w.Eventually(func() bool {
				return lo.EveryBy(nodeClaims, func(nc *karpv1.NodeClaim) bool { return mirrored(nc).GetMachine().GetNodeName() != "" })
			}, "the mirror has all Nodes")
			going := nodeClaims[:nodes/10]
			are := func(phase agentv1alpha1.ClaimPhase) func() bool {
				return func() bool {
					return lo.EveryBy(going, func(nc *karpv1.NodeClaim) bool { return mirrored(nc).GetPhase() == phase })
				}
			}
			calls := func() int {
				return lo.SumBy([]string{"ReleaseClaim", "GetClaim", "ListClaims", "GetMachine", "ListMachines"}, w.Agent.Calls)
			}
			remove := func(nc *karpv1.NodeClaim) error { return w.CloudProvider.Delete(w.Context(), nc) }

			before := calls()
			each(t, going, remove)
			w.Eventually(are(agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING), "the mirror shows the releases")
			assert.Equal(t, len(going), calls()-before, "one call releases a claim")

			before = calls()
			for range deletesPerMinute {
				each(t, going, remove)
			}
			for range getsPerMinute {
				each(t, going, func(nc *karpv1.NodeClaim) error {
					_, err := w.CloudProvider.Get(w.Context(), nc.Status.ProviderID)
					return err
				})
			}
			assert.Equal(t, before, calls(), "a minute in which nothing changes costs nothing")

			for _, nc := range going {
				w.Agent.Terminate(w.Cluster, mirrored(nc).GetMachine().GetName())
			}
			w.Eventually(are(agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED), "the mirror shows the ends")
			for range confirmations {
				each(t, going, func(nc *karpv1.NodeClaim) error {
					if err := remove(nc); !corecloudprovider.IsNodeClaimNotFoundError(err) {
						return fmt.Errorf("want not found, got %w", err)
					}
					return nil
				})
			}
			assert.Equal(t, confirmations*len(going), calls()-before, "one call each confirms that it has ended")
		})
	}
}

// each calls do for each NodeClaim, for some of them at once, as core does.
func each(t *testing.T, nodeClaims []*karpv1.NodeClaim, do func(*karpv1.NodeClaim) error) {
	t.Helper()
	var group errgroup.Group
	group.SetLimit(20)
	for _, nc := range nodeClaims {
		group.Go(func() error { return do(nc) })
	}
	require.NoError(t, group.Wait())
}
