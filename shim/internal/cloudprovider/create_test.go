package cloudprovider_test

import (
	"context"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	corecloudprovider "sigs.k8s.io/karpenter/pkg/cloudprovider"
	coreoptions "sigs.k8s.io/karpenter/pkg/operator/options"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/scrapes"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const (
	onDemand = agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND
	spot     = agentv1alpha1.CapacityType_CAPACITY_TYPE_SPOT
)

func requiring(key string, values ...string) func(*karpv1.NodeClaim) {
	operator := corev1.NodeSelectorOpIn
	if len(values) == 0 {
		operator = corev1.NodeSelectorOpExists
	}
	return func(nc *karpv1.NodeClaim) {
		nc.Spec.Requirements = append(nc.Spec.Requirements, karpv1.NodeSelectorRequirementWithMinValues{Key: key, Operator: operator, Values: values})
	}
}

func requests(name corev1.ResourceName, quantity string) func(*karpv1.NodeClaim) {
	return func(nc *karpv1.NodeClaim) {
		nc.Spec.Resources.Requests = corev1.ResourceList{name: resource.MustParse(quantity)}
	}
}

func candidates(w *shimtest.Env) []string {
	sent := w.Agent.Requests("CreateClaim")
	request, _ := sent[len(sent)-1].(*agentv1alpha1.CreateClaimRequest)
	return request.GetCandidates()
}

func TestCreateClaimsAndReturnsAtOnceWithThePlaceholder(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{
		Name: "a", InstanceType: "m.large", Zone: "z1", Region: "eu", NodeLabels: map[string]string{"team": "red"},
		Capacity: map[string]string{"cpu": "4", "memory": "16Gi"},
	}})
	nodeClaim := w.NodeClaim("claim")
	created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)

	assert.Equal(t, "capi-claim://default/workload/"+string(nodeClaim.UID), created.Status.ProviderID)
	for key, want := range map[string]string{
		corev1.LabelInstanceTypeStable: "m.large", corev1.LabelTopologyZone: "z1", corev1.LabelTopologyRegion: "eu",
		karpv1.CapacityTypeLabelKey: "on-demand", corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux", "team": "red",
	} {
		assert.Equal(t, want, created.Labels[key], key)
	}
	assert.Equal(t, "default/a", created.Annotations[v1alpha1.NodeGroupAnnotation])
	assert.Equal(t, "16Gi", created.Status.Capacity.Memory().String())
	assert.Equal(t, "16284Mi", created.Status.Allocatable.Memory().String())
	assert.NotSame(t, nodeClaim, created, "core keeps what it gets")

	claim := w.Agent.Claim(w.Cluster, string(nodeClaim.UID))
	require.NotNil(t, claim)
	assert.Equal(t, "karpenter", claim.GetHolder())
	assert.Equal(t, "claim", claim.GetDisplayName())
}

func TestAttemptsToClaimAreCountedByResult(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	attempts := func(result string) float64 {
		return shimtest.Metric(t, "karpenter_capi_claims_total", map[string]string{"result": result})
	}
	for _, result := range []string{"claimed", "no_capacity", "node_class_not_ready"} {
		assert.GreaterOrEqual(t, attempts(result), 0.0, "it increases from zero")
	}
	refuse := func(name string) {
		w.Agent.Fail("CreateClaim", 1, agenterrors.PermissionDenied("no"))
		_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim(name))
		assertCreateError(t, err, cloudprovider.ReasonAgentRefused)
	}
	refuse("refused") // which creates the series
	none := shimtest.Scraped(t, time.Now())
	refused, all := attempts("AgentRefused"), shimtest.Metric(t, "karpenter_capi_claims_total", nil)

	claimed, noCapacity := attempts("claimed"), attempts("no_capacity")
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("first"))
	require.NoError(t, err)
	assert.InDelta(t, claimed+1, attempts("claimed"), 0)
	refuse("refused-again")
	w.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
	_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("second"))
	require.Error(t, err)
	assert.InDelta(t, noCapacity+1, attempts("no_capacity"), 0)
	share := (attempts("AgentRefused") - refused) / (shimtest.Metric(t, "karpenter_capi_claims_total", nil) - all)
	assert.Greater(t, share, 0.05)
	for _, alert := range []string{"KarpenterCapiLaunchesFail", "KarpenterCapiNoCapacity"} {
		scrapes.Record(t, alert, none, shimtest.Scraped(t, time.Now()))
	}
}

func TestCreateAgainIsTheSameClaim(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	nodeClaim := w.NodeClaim("claim")
	first, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	// Now there is a better group, and the first group is full. Neither may matter.
	w.Agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: "b", CapacityType: spot})
	w.Agent.Block("default/a", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "full", time.Time{})
	w.Eventually(func() bool { return w.Catalogue.Snapshot().Len() == 2 }, "the new group shows")
	second, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, first, second)
	assert.EqualValues(t, 1, w.Agent.NodeGroup("default/a").GetReplicas())
	assert.EqualValues(t, 0, w.Agent.NodeGroup("default/b").GetReplicas())
}

func TestALostReplyCostsNothing(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	nodeClaim := w.NodeClaim("claim")
	w.Agent.FailAfter("CreateClaim", 1, status.Error(codes.Unavailable, "gone"))
	_, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	assertCreateError(t, err, cloudprovider.ReasonAgentUnreachable)
	// Now nothing fits any more. The existing claim is still found.
	w.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Capacity["cpu"] = "1" })
	w.Eventually(func() bool {
		g, _ := w.Catalogue.Snapshot().Group("default/a")
		return g.Capacity.Cpu().String() == "1"
	}, "the group shrinks")
	requests("cpu", "2")(nodeClaim)
	created, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, w.Placeholder(nodeClaim.UID), created.Status.ProviderID)
	assert.EqualValues(t, 1, w.Agent.NodeGroup("default/a").GetReplicas())
}

func TestCandidatesFitAndAreOrderedByPriceThenByID(t *testing.T) {
	price := func(p float64) *agentv1alpha1.Price { return &agentv1alpha1.Price{PerHour: p} }
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "dear", Price: price(9)},
		{Name: "cheap-b", Price: price(1)},
		{Name: "cheap-a", Price: price(1)},
		{Name: "spot", CapacityType: spot, Price: price(0.5)},
		{Name: "dear-spot", CapacityType: spot, Price: price(5)}, // larger than needed, for example
		{Name: "arm", Architecture: "arm64", Price: price(0.1)},
		{Name: "small", Capacity: map[string]string{"cpu": "1", "memory": "1Gi"}, Price: price(0.1)},
		{Name: "tainted", Taints: []*agentv1alpha1.Taint{{Key: "dedicated", Effect: "NoSchedule"}}, Price: price(0.1)},
		{Name: "prepaid", CapacityType: agentv1alpha1.CapacityType_CAPACITY_TYPE_RESERVED, Price: price(50)},
	})
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim", requiring(corev1.LabelArchStable, "amd64"), requests("cpu", "2")))
	require.NoError(t, err)
	assert.Equal(t, []string{
		"default/prepaid", "default/spot", "default/cheap-a", "default/cheap-b", "default/dear-spot", "default/dear",
	}, candidates(w))

	_, err = w.CloudProvider.Create(
		w.Context(),
		w.NodeClaim("od", requiring(karpv1.CapacityTypeLabelKey, "on-demand"), requiring(corev1.LabelArchStable, "amd64"), requests("cpu", "2")),
	)
	require.NoError(t, err)
	assert.Equal(t, []string{"default/cheap-a", "default/cheap-b", "default/dear"}, candidates(w))
}

func TestALabelOfTheGroupThatTheNodeClaimDoesNotNameIsNoReasonToRefuse(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", NodeLabels: map[string]string{"node.cluster.x-k8s.io/pool": "x"}}})
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	assert.NoError(t, err)
}

func TestTheNodeClassesSelectorLimitsCandidates(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "red", Labels: map[string]string{"team": "red"}}, {Name: "blue"}})
	w.AddNodeClass("red", &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}})
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Name = "red" }))
	require.NoError(t, err)
	assert.Equal(t, []string{"default/red"}, candidates(w))
}

func TestValuesThatCoreChoseAtRandomAreReplacedByTheMachines(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", NodeLabels: map[string]string{"team": "red", "rack": "r1", "floor": "2"}}})
	nodeClaim := w.NodeClaim("claim", requiring("team"), requiring("rack", "r0", "r1"), func(nc *karpv1.NodeClaim) {
		nc.Labels["team"], nc.Labels["rack"] = "8231", "r0" // as core fills them in
		nc.Labels["floor"] = "mine"                         // as the user wrote it, without a requirement
	})
	_, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	assert.Equal(t, "red", nodeClaim.Labels["team"])
	assert.Equal(t, "r1", nodeClaim.Labels["rack"])
	assert.Equal(t, "mine", nodeClaim.Labels["floor"])
}

func assertCreateError(t *testing.T, err error, reason string) {
	t.Helper()
	var create *corecloudprovider.CreateError
	require.ErrorAs(t, err, &create)
	assert.Equal(t, reason, create.ConditionReason)
	assert.Regexp(t, `^([A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?|)$`, create.ConditionReason, "or the API server rejects the status")
	assert.NotEmpty(t, create.ConditionMessage)
	assert.False(t, corecloudprovider.IsInsufficientCapacityError(err))
}

// The rows are those of the table in explain's comment.
func TestWhatCoreIsToldWhenTheAgentSaysNo(t *testing.T) {
	cluster := &agentv1alpha1.ClusterRef{Namespace: "default", Name: "workload"}
	malformed := agenterrors.InvalidArgument(agenterrors.FieldViolation{Field: "claim_id"})
	rejected := func(reason agenterrors.Reason) error {
		return agenterrors.Rejected(time.Now(), agenterrors.Rejection{NodeGroup: "default/a", Reason: reason})
	}
	for name, c := range map[string]struct {
		err    error
		reason string // of the CreateError; empty means InsufficientCapacity
	}{
		"RESOURCE_EXHAUSTED":          {err: rejected(agenterrors.ReasonNoRoom)},
		"RESOURCE_EXHAUSTED, a limit": {err: agenterrors.TooManyClaims("the Cluster has 20 claims, its limit", time.Minute)},
		"FAILED_PRECONDITION":         {err: rejected(agenterrors.ReasonNotOpen)},
		"SPOKE_MISMATCH":              {err: agenterrors.SpokeMismatch("elsewhere"), reason: cloudprovider.ReasonAgentRefused},
		"ABORTED, claim ended":        {err: agenterrors.ClaimEnded(&agentv1alpha1.Claim{Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED})},
		"ABORTED, conflict":           {err: agenterrors.Conflict("again"), reason: cloudprovider.ReasonClaimConflict},
		"NOT_FOUND, candidates":       {err: rejected(agenterrors.ReasonNodeGroupNotFound), reason: cloudprovider.ReasonNodeGroupsNotFound},
		"NOT_FOUND, Cluster":          {err: agenterrors.ClusterNotFound(cluster), reason: cloudprovider.ReasonNodeGroupsNotFound},
		"UNAVAILABLE":                 {err: agenterrors.NotSynced("soon"), reason: cloudprovider.ReasonAgentUnreachable},
		"DEADLINE_EXCEEDED":           {err: status.Error(codes.DeadlineExceeded, "slow"), reason: cloudprovider.ReasonAgentUnreachable},
		"UNAUTHENTICATED":             {err: agenterrors.Unauthenticated("who"), reason: cloudprovider.ReasonAgentRefused},
		"PERMISSION_DENIED":           {err: agenterrors.PermissionDenied("no"), reason: cloudprovider.ReasonAgentRefused},
		"INVALID_ARGUMENT":            {err: malformed, reason: cloudprovider.ReasonClaimRejected},
		"INTERNAL":                    {err: status.Error(codes.Internal, "oops"), reason: cloudprovider.ReasonClaimFailed},
	} {
		t.Run(name, func(t *testing.T) {
			w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
			w.Agent.Fail("CreateClaim", 100, c.err)
			created, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
			assert.Nil(t, created)
			require.Error(t, err)
			assert.False(t, corecloudprovider.IsNodeClassNotReadyError(err), "core would make the next NodeClaim at once")
			if c.reason == "" {
				assert.True(t, corecloudprovider.IsInsufficientCapacityError(err), err)
				return
			}
			assertCreateError(t, err, c.reason)
			var first, second *corecloudprovider.CreateError
			require.ErrorAs(t, err, &first)
			_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
			require.ErrorAs(t, err, &second)
			assert.Equal(t, first.ConditionMessage, second.ConditionMessage, "each change would be retried at once")
		})
	}
}

// TestAGroupOfItsOwnIsUsed covers a node group that only Karpenter may claim from.
func TestAGroupOfItsOwnIsUsed(t *testing.T) {
	most := int32(1)
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", Holder: v1alpha1.Holder, MaxSize: &most}})
	nodePool := w.NodePool()
	offered := func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
		require.NoError(t, err)
		require.Len(t, types, 1)
		return len(types[0].Offerings.Available()) == 1
	}
	w.Eventually(offered, "the group is offered")
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	require.NoError(t, err)
	w.Eventually(func() bool { return !offered() }, "the group has reached its max size")
}

// A NodeClaim without a machine holds up all planning and all disruption of core, and those that
// would end claims as well.
func TestAClusterAtItsLimitIsLeftAloneForAWhile(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	nodePool := w.NodePool()
	offered := func() bool {
		types, err := w.CloudProvider.GetInstanceTypes(w.Context(), nodePool)
		require.NoError(t, err)
		return lo.ContainsBy(types, func(it *corecloudprovider.InstanceType) bool { return len(it.Offerings.Available()) > 0 })
	}
	require.True(t, offered())
	w.Agent.Fail("CreateClaim", 1, agenterrors.TooManyClaims("the Cluster has 20 claims, its limit", time.Minute))
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim", func(nc *karpv1.NodeClaim) {
		nc.Labels = map[string]string{karpv1.NodePoolLabelKey: nodePool.Name}
	}))
	require.True(t, corecloudprovider.IsInsufficientCapacityError(err), "%v", err)
	require.ErrorContains(t, err, "the Cluster has 20 claims, its limit")
	w.Eventually(func() bool { return !offered() }, "core would plan the same at once")
}

// The shim has the identity of another cluster's, whose machine it would get.
func TestNothingIsClaimedWhileTheLiveSetsOfThisClusterAreRefused(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Refused.Store(new(agenterrors.SpokeMismatch("spoke_id: elsewhere")))
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	assertCreateError(t, err, cloudprovider.ReasonAgentRefused)
	require.ErrorContains(t, err, "spoke_id: elsewhere")
	assert.Zero(t, w.Agent.Calls("CreateClaim"))
	w.Refused.Store(nil)
	_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	require.NoError(t, err)
}

// An adoption that was refused is not tried again before something about the Machine changes.
func TestARefusalOfTheShimSaysNothingAboutAMachine(t *testing.T) {
	assert.False(t, cloudprovider.IsAdoptionRefused(agenterrors.SpokeMismatch("elsewhere")))
	notOpen := agenterrors.Rejected(time.Now(), agenterrors.Rejection{NodeGroup: "default/a", Reason: agenterrors.ReasonNotOpen})
	assert.True(t, cloudprovider.IsAdoptionRefused(notOpen))
}

func TestALostRaceInTheHubIsRepeatedAtOnce(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Agent.Fail("CreateClaim", 2, agenterrors.Conflict("again"))
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	assert.NoError(t, err)
}

func TestGroupsWithoutRoomAreLeftAlone(t *testing.T) {
	maxSize := int32(1)
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a", MaxSize: &maxSize}, {Name: "b", Price: &agentv1alpha1.Price{PerHour: 1e6}}})
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("one", requiring(corev1.LabelInstanceTypeStable, "a")))
	require.NoError(t, err)
	_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("two", requiring(corev1.LabelInstanceTypeStable, "a")))
	require.True(t, corecloudprovider.IsInsufficientCapacityError(err), err)
	w.Eventually(func() bool {
		a, _ := w.Catalogue.Snapshot().Group("default/a")
		return !w.Catalogue.Snapshot().Available(a)
	}, "the offering is unavailable")
	b, _ := w.Catalogue.Snapshot().Group("default/b")
	assert.True(t, w.Catalogue.Available(b))
}

func TestNothingFitsIsNoCapacityWithTheReasons(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}, {Name: "b"}})
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("big", requests("cpu", "1000")))
	assert.True(t, corecloudprovider.IsInsufficientCapacityError(err))
	require.ErrorContains(t, err, "none of 2 node groups fits: not enough resources (2)")
	assert.Zero(t, w.Agent.Calls("CreateClaim"))
}

func TestAMissingClusterIsNoReasonToGiveTheNodeClaimUp(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.Agent.Fail("GetClaim", 1, agenterrors.ClusterNotFound(w.Cluster))
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("big", requests("cpu", "1000")))
	assertCreateError(t, err, cloudprovider.ReasonNodeGroupsNotFound)
}

func TestAnEndedClaimIsNeverMadeAgain(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	nodeClaim := w.NodeClaim("claim")
	_, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	require.NoError(t, err)
	_ = w.CloudProvider.Delete(w.Context(), nodeClaim)
	_, err = w.CloudProvider.Create(w.Context(), nodeClaim)
	assert.True(t, corecloudprovider.IsInsufficientCapacityError(err), "which makes core delete the NodeClaim")
}

func TestEveryCallIsBounded(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	w.CloudProvider.Timeout = 50 * time.Millisecond
	for _, method := range []string{"CreateClaim", "ReleaseClaim", "GetClaim", "ListClaims"} {
		w.Agent.Delay(method, time.Hour)
	}
	nodeClaim := w.NodeClaim("claim")
	_, err := w.CloudProvider.Create(w.Context(), nodeClaim)
	assertCreateError(t, err, cloudprovider.ReasonAgentUnreachable)
	err = w.CloudProvider.Delete(w.Context(), nodeClaim)
	require.Error(t, err)
	assert.False(t, corecloudprovider.IsNodeClaimNotFoundError(err))
	_, err = w.CloudProvider.Get(w.Context(), w.Placeholder(nodeClaim.UID))
	require.Error(t, err)
	assert.False(t, corecloudprovider.IsNodeClaimNotFoundError(err))
	_, err = w.CloudProvider.List(w.Context())
	assert.Error(t, err)
}

func TestCreateBeforeTheAgentWasHeardOfIsRetried(t *testing.T) {
	w := shimtest.New(t, nil)
	w.CloudProvider.Catalogue = catalogue.New(clock.RealClock{}, w.NodeGroups, w.Kube, time.Minute) // not running
	_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	assertCreateError(t, err, cloudprovider.ReasonCatalogueNotSynced)
	_, err = w.CloudProvider.GetInstanceTypes(w.Context(), &karpv1.NodePool{Spec: karpv1.NodePoolSpec{Template: karpv1.NodeClaimTemplate{
		Spec: karpv1.NodeClaimTemplateSpec{NodeClassRef: w.NodeClaim("x").Spec.NodeClassRef},
	}}})
	assert.ErrorIs(t, err, catalogue.ErrNotSynced, "an empty answer would make core take nodes for drifted")
}

func TestAMissingNodeClassIsWaitedForBriefly(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	create := func(name string, age time.Duration, changes ...func(*karpv1.NodeClaim)) error {
		_, err := w.CloudProvider.Create(w.Context(), w.NodeClaim(name, func(nc *karpv1.NodeClaim) {
			for _, change := range changes {
				change(nc)
			}
			nc.Spec.NodeClassRef.Name = "later"
			nc.CreationTimestamp = metav1.NewTime(time.Now().Add(-age))
			nc.UID = types.UID(name)
		}))
		return err
	}
	assertCreateError(t, create("new", 0), cloudprovider.ReasonNodeClassNotFound)
	err := create("old", time.Minute)
	assert.True(t, corecloudprovider.IsInsufficientCapacityError(err), "while it waited, core would plan and disrupt nothing: %v", err)
	require.ErrorContains(t, err, `ClusterAPINodeClass "later" does not exist`)

	assertCreateError(t, create("taken over", time.Minute, func(nc *karpv1.NodeClaim) {
		nc.Annotations = map[string]string{v1alpha1.PeerMachineAnnotation: "default/m"}
	}), cloudprovider.ReasonNodeClassNotFound)

	_, err = w.Client.Claims.CreateClaim(w.Context(), &agentv1alpha1.CreateClaimRequest{
		Cluster: w.Cluster, ClaimId: "claimed", Holder: "karpenter", Candidates: []string{"default/a"},
	})
	require.NoError(t, err)
	assertCreateError(t, create("claimed", time.Minute), cloudprovider.ReasonNodeClassNotFound)
	w.Disconnect()
	assertCreateError(t, create("unknown", time.Minute), cloudprovider.ReasonNodeClassNotFound)
}

func TestNothingIsLaunchedForANodeClassThatIsNotReady(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	first := w.NodeClaim("first")
	_, err := w.CloudProvider.Create(w.Context(), first)
	require.NoError(t, err)
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	w.Get(nodeClass)
	nodeClass.StatusConditions().SetFalse(v1alpha1.ConditionNodeGroupsFound, "NotFound", "nothing is selected")
	nodeClass.StatusConditions().SetTrue(v1alpha1.ConditionAgentReachable)
	require.True(t, nodeClass.StatusConditions().Root().IsFalse())
	require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClass))
	static := &karpv1.NodePool{ObjectMeta: metav1.ObjectMeta{Name: "static"}, Spec: karpv1.NodePoolSpec{Replicas: new(int64(1))}}
	require.NoError(t, w.Kube.Create(w.Context(), static))
	_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("second", func(nc *karpv1.NodeClaim) {
		nc.Labels = map[string]string{karpv1.NodePoolLabelKey: static.Name}
	}))
	require.True(t, corecloudprovider.IsNodeClassNotReadyError(err), "%v", err)
	require.ErrorContains(t, err, "NodeGroupsFound")
	require.Contains(t, w.Recorder.Reasons(), "NoRoomForReplicas", "core would create the next NodeClaim of the static NodePool at once")
	require.Equal(t, 1, w.Agent.Calls("CreateClaim"))
	_, err = w.CloudProvider.Create(w.Context(), first)
	require.NoError(t, err, "it has its claim already")
	require.Equal(t, 1, w.Agent.Calls("CreateClaim"))

	// The agent must be asked: the reply to the call that created a claim may have been lost.
	w.Agent.Fail("GetClaim", 100, agenterrors.NotSynced("later"))
	_, err = w.CloudProvider.Create(w.Context(), first)
	assertCreateError(t, err, cloudprovider.ReasonAgentUnreachable)
	w.Agent.Fail("GetClaim", 0, nil)

	nodeClass.StatusConditions().SetFalse(v1alpha1.ConditionAgentReachable, "Unreachable", "no agent answers")
	require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClass))
	_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("third"))
	require.NoError(t, err, "an agent that answers after all is asked")

	nodeClass.StatusConditions().SetTrue(v1alpha1.ConditionAgentReachable)
	require.NoError(t, w.Kube.Status().Update(w.Context(), nodeClass))
	nodeClass.Generation++ // the fake API server does not do this
	require.NoError(t, w.Kube.Update(w.Context(), nodeClass))
	_, err = w.CloudProvider.Create(w.Context(), w.NodeClaim("fourth"))
	require.NoError(t, err, "the condition is about an earlier specification")
}

func TestAMachineOfAZonelessGroupIsWhereItReallyIs(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{{Name: "a"}})
	created, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	require.NoError(t, err)
	zone, ok := created.Labels[corev1.LabelTopologyZone]
	assert.True(t, ok, "core needs the label to consolidate")
	assert.Empty(t, zone)
}

// overlays adds a device and a price to every instance type with the name dear.
type overlays struct {
	store func(string, []*corecloudprovider.InstanceType) ([]*corecloudprovider.InstanceType, error)
}

func (o overlays) ApplyAll(pool string, types []*corecloudprovider.InstanceType) ([]*corecloudprovider.InstanceType, error) {
	return o.store(pool, types)
}

func TestNodeOverlaysCountInCreate(t *testing.T) {
	w := shimtest.New(t, []*agentv1alpha1.NodeGroup{
		{Name: "cheap", Price: &agentv1alpha1.Price{PerHour: 1}},
		{
			Name: "dear", Price: &agentv1alpha1.Price{PerHour: 2},
			Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110", "example.com/shared": "1"},
		},
	})
	w.NodePool()
	w.CloudProvider.Overlays = overlays{func(pool string, types []*corecloudprovider.InstanceType) ([]*corecloudprovider.InstanceType, error) {
		assert.Equal(t, shimtest.NodePoolName, pool)
		var out []*corecloudprovider.InstanceType
		for _, it := range types {
			overlaid := &corecloudprovider.InstanceType{}
			it.DeepCopyInto(overlaid)
			if it.Name == "dear" {
				overlaid.ApplyCapacityOverlay(corev1.ResourceList{
					"example.com/device": resource.MustParse("1"), "example.com/shared": resource.MustParse("8"),
				})
				overlaid.Offerings[0].ApplyPriceOverlay("0.5")
			}
			out = append(out, overlaid)
		}
		return out, nil
	}}
	ctx := coreoptions.ToContext(context.Background(), &coreoptions.Options{FeatureGates: coreoptions.FeatureGates{NodeOverlay: true}})
	_, err := w.CloudProvider.Create(ctx, w.NodeClaim("any"))
	require.NoError(t, err)
	assert.Equal(t, []string{"default/dear", "default/cheap"}, candidates(w))
	created, err := w.CloudProvider.Create(ctx, w.NodeClaim("device", requests("example.com/device", "1")))
	require.NoError(t, err)
	assert.Equal(t, []string{"default/dear"}, candidates(w))
	assert.Contains(t, created.Status.Capacity, corev1.ResourceName("example.com/device"))
	created, err = w.CloudProvider.Create(ctx, w.NodeClaim("shared", requests("example.com/shared", "8")))
	require.NoError(t, err, "core planned with the NodeOverlay's number")
	assert.Equal(t, resource.MustParse("8"), created.Status.Capacity["example.com/shared"])
}

func TestAClaimWaitsAsLongAsItsNodeClassSays(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	made := func(name string) *agentv1alpha1.Claim {
		nodeClaim := w.NodeClaim(name)
		_, err := w.CloudProvider.Create(w.Context(), nodeClaim)
		require.NoError(t, err)
		return w.Agent.Claim(w.Cluster, string(nodeClaim.UID))
	}
	assert.Nil(t, made("a").GetMaxNodeProvisionTime(), "as long as the agent says")
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	w.Get(nodeClass)
	nodeClass.Spec.MaxNodeProvisionTime = &metav1.Duration{Duration: 90 * time.Minute}
	nodeClass.Generation++ // the fake API server does not do this
	require.NoError(t, w.Kube.Update(w.Context(), nodeClass))
	w.Catalogue.Refresh()
	w.Eventually(func() bool {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return class.MaxNodeProvisionTime != nil
	}, "the catalogue has the NodeClass as it is now")
	assert.Equal(t, 90*time.Minute, made("b").GetMaxNodeProvisionTime().AsDuration())
}

func TestCreatePromisesWhatWasPlannedForTheNodeClass(t *testing.T) {
	w := shimtest.New(t, oneGroup())
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: shimtest.NodeClassName}}
	w.Get(nodeClass)
	nodeClass.Spec.Kubelet = &v1alpha1.Kubelet{
		MaxPods: new(int32(42)), KubeReserved: map[string]v1alpha1.ReservedQuantity{"cpu": "500m", "memory": "1Gi"},
	}
	require.NoError(t, w.Kube.Update(w.Context(), nodeClass))
	w.Catalogue.Refresh()
	class := func() *catalogue.Class {
		class, _ := w.Catalogue.Snapshot().Class(shimtest.NodeClassName)
		return class
	}
	w.Eventually(func() bool { return class().Groups[0].Capacity.Pods().String() == "42" }, "the description counts")
	planned := class().InstanceTypes(nil, nil)[0].Allocatable()
	created, err := w.CloudProvider.Create(w.Context(), w.NodeClaim("claim"))
	require.NoError(t, err)
	assert.Equal(t, "3500m", created.Status.Allocatable.Cpu().String())
	assert.Equal(t, "42", created.Status.Capacity.Pods().String())
	for name, quantity := range planned {
		promised := created.Status.Allocatable[name]
		assert.Zero(t, promised.Cmp(quantity), name)
	}
}
