package nodeclass_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/catalogue"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/connectivity"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/controllers/nodeclass"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/shimtest"
)

const grace = 2 * time.Minute

// connection is a connection in the state that the test sets.
type connection struct{ state agentclient.State }

func (c *connection) State() agentclient.State { return c.state }

func (c *connection) StateChanges() (<-chan struct{}, func()) { return nil, func() {} }

// certificate is a certificate in the state that the test sets.
type certificate struct {
	warning string
	found   bool
}

func (c *certificate) Warning() (string, string, bool) {
	return "AgentCertificateExpiring", c.warning, c.found
}

// compatibility is the result that the test sets.
type compatibility struct{ result connectivity.Compatibility }

func (f *compatibility) Result() connectivity.Compatibility { return f.result }

func (f *compatibility) Changes() <-chan struct{} { return nil }

// liveSets is the agent's answer that the test sets.
type liveSets struct {
	known   bool
	refused error
}

func (l *liveSets) Refused() (bool, error) { return l.known, l.refused }

func (l *liveSets) RefusalChanges() <-chan struct{} { return nil }

type env struct {
	*shimtest.Env
	t          *testing.T
	clock      *clocktesting.FakeClock
	connection *connection
	certificate
	compatibility compatibility
	liveSets      liveSets
	again         time.Duration // the last result's RequeueAfter
	controller    *nodeclass.Controller
}

func setUp(t *testing.T, groups ...*agentv1alpha1.NodeGroup) *env {
	t.Helper()
	w := shimtest.New(t, groups)
	e := &env{
		Env:        w,
		t:          t,
		clock:      clocktesting.NewFakeClock(time.Now()),
		connection: &connection{agentclient.State{Synced: true, Connected: true}},
	}
	e.controller = e.with(w.Catalogue)
	return e
}

func (e *env) with(c *catalogue.Catalogue) *nodeclass.Controller {
	return nodeclass.New(nodeclass.Config{
		Kube: e.Kube, Catalogue: c, Connection: e.connection, Certificate: &e.certificate, Compatibility: &e.compatibility,
		LiveSets: &e.liveSets, Cluster: e.Cluster, Recorder: e.Recorder, Grace: grace, Clock: e.clock,
	})
}

func (e *env) reconcile(name string) *v1alpha1.ClusterAPINodeClass {
	e.t.Helper()
	nodeClass := &v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	e.Get(nodeClass)
	result, err := e.controller.Reconcile(e.Context(), nodeClass)
	require.NoError(e.t, err)
	e.again = result.RequeueAfter
	e.Get(nodeClass)
	return nodeClass
}

func condition(nodeClass *v1alpha1.ClusterAPINodeClass, kind string) *status.Condition {
	return nodeClass.StatusConditions().Get(kind)
}

func TestANodeClassThatSelectsGroupsIsReady(t *testing.T) {
	e := setUp(t,
		&agentv1alpha1.NodeGroup{Name: "a", InstanceType: "m", Zone: "z1"},
		&agentv1alpha1.NodeGroup{Name: "b", InstanceType: "m", Zone: "z2"},
		&agentv1alpha1.NodeGroup{Name: "c", InstanceType: "l", Zone: "z2"},
	)
	nodeClass := e.reconcile(shimtest.NodeClassName)
	assert.True(t, condition(nodeClass, status.ConditionReady).IsTrue())
	assert.True(t, condition(nodeClass, v1alpha1.ConditionNodeGroupsFound).IsTrue())
	assert.True(t, condition(nodeClass, v1alpha1.ConditionAgentReachable).IsTrue())
	assert.True(t, condition(nodeClass, v1alpha1.ConditionNodeGroupsValid).IsTrue())
	assert.Equal(
		t,
		[]int32{3, 2, 2, 0},
		[]int32{nodeClass.Status.NodeGroups, nodeClass.Status.InstanceTypes, nodeClass.Status.Zones, nodeClass.Status.Problems},
	)
	assert.Contains(t, nodeClass.Finalizers, v1alpha1.NodeClassFinalizer)
	assert.Empty(t, e.Recorder.Reasons())

	version := nodeClass.ResourceVersion
	assert.Equal(t, version, e.reconcile(shimtest.NodeClassName).ResourceVersion, "nothing is written when nothing changed")
}

func TestAnAgentThatDoesNotFitIsShownAndDoesNotCostReadiness(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	assert.Nil(t, condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentCompatible), "no agent has answered yet")

	e.compatibility.result = connectivity.Compatibility{Known: true, Reason: "VersionSkew", Message: "upgrade the agent"}
	nodeClass := e.reconcile(shimtest.NodeClassName)
	fits := condition(nodeClass, v1alpha1.ConditionAgentCompatible)
	assert.True(t, fits.IsFalse())
	assert.Equal(t, "VersionSkew", fits.Reason)
	assert.Equal(t, "upgrade the agent", fits.Message)
	assert.True(t, condition(nodeClass, status.ConditionReady).IsTrue())
	assert.Equal(t, []string{"VersionSkew"}, e.Recorder.Reasons())

	e.compatibility.result = connectivity.Compatibility{}
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentCompatible).IsFalse(), "a restart changes nothing")
	e.compatibility.result = connectivity.Compatibility{Known: true}
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentCompatible).IsTrue())
}

func TestASelectorThatMatchesNothingIsNamed(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	e.AddNodeClass("typo", &metav1.LabelSelector{MatchLabels: map[string]string{"team": "rde"}})
	nodeClass := e.reconcile("typo")
	found := condition(nodeClass, v1alpha1.ConditionNodeGroupsFound)
	assert.True(t, found.IsFalse())
	assert.Equal(t, "NoNodeGroups", found.Reason)
	assert.Contains(t, found.Message, "spec.scalableResourceSelector (team=rde) matches none of the 1 node groups of Cluster default/workload")
	assert.True(t, condition(nodeClass, status.ConditionReady).IsFalse())
	assert.Equal(t, []string{"NoNodeGroups"}, e.Recorder.Reasons())
}

func TestNodeGroupsOfWhichNoneCanBeUsedAreNotMissing(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a", Zone: "no label!"})
	nodeClass := e.reconcile(shimtest.NodeClassName)
	found := condition(nodeClass, v1alpha1.ConditionNodeGroupsFound)
	assert.True(t, found.IsFalse())
	assert.Equal(t, "none of the 1 node groups of Cluster default/workload that match can be used: the condition NodeGroupsValid has the reasons",
		found.Message)
	assert.Contains(t, condition(nodeClass, v1alpha1.ConditionNodeGroupsValid).Message, "no label!")
}

func TestAClusterWithoutNodeGroupsSaysWhatToDo(t *testing.T) {
	e := setUp(t)
	found := condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionNodeGroupsFound)
	assert.True(t, found.IsFalse())
	assert.Contains(t, found.Message, "node.cluster.x-k8s.io/karpenter-member")
}

func TestASelectorThatCannotBeUsedIsNamed(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	e.AddNodeClass("broken", &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "team", Operator: "Near"}}})
	found := condition(e.reconcile("broken"), v1alpha1.ConditionNodeGroupsFound)
	assert.Equal(t, "SelectorInvalid", found.Reason)
	assert.Contains(t, found.Message, "spec.scalableResourceSelector")
}

func TestProblemsAreShownAndDoNotCostReadiness(t *testing.T) {
	problem := func(field string) *agentv1alpha1.Problem {
		return &agentv1alpha1.Problem{Field: field, Value: "many", Message: "write a quantity"}
	}
	e := setUp(
		t,
		&agentv1alpha1.NodeGroup{Name: "a", Problems: []*agentv1alpha1.Problem{problem("f1"), problem("f2"), problem("f3"), problem("f4")}},
	)
	nodeClass := e.reconcile(shimtest.NodeClassName)
	valid := condition(nodeClass, v1alpha1.ConditionNodeGroupsValid)
	assert.True(t, valid.IsFalse())
	assert.Contains(t, valid.Message, `default/a: f1="many": write a quantity`)
	assert.Contains(t, valid.Message, "and 1 more")
	assert.EqualValues(t, 4, nodeClass.Status.Problems)
	assert.True(t, condition(nodeClass, status.ConditionReady).IsTrue())
	assert.Equal(t, []string{"ProblemsReported"}, e.Recorder.Reasons())
}

func TestASilentAgentCostsReadinessAfterTheGracePeriod(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a", Zone: "z1"})
	require.True(t, condition(e.reconcile(shimtest.NodeClassName), status.ConditionReady).IsTrue())

	e.connection.state = agentclient.State{Synced: true, Since: e.clock.Now(), LastError: grpcstatus.Error(codes.Unavailable, "connection refused")}
	e.clock.Step(grace - time.Second)
	nodeClass := e.reconcile(shimtest.NodeClassName)
	assert.True(t, condition(nodeClass, status.ConditionReady).IsTrue(), "a short silence is no news")
	assert.Equal(t, time.Second, e.again, "nothing tells that it has become a long one")

	e.clock.Step(2 * time.Second)
	nodeClass = e.reconcile(shimtest.NodeClassName)
	reachable := condition(nodeClass, v1alpha1.ConditionAgentReachable)
	assert.True(t, reachable.IsFalse())
	assert.Equal(t, "AgentUnreachable", reachable.Reason)
	assert.Contains(t, reachable.Message, "connection refused")
	assert.True(t, condition(nodeClass, status.ConditionReady).IsFalse())
	assert.EqualValues(t, 1, nodeClass.Status.NodeGroups, "what was known stays")
	assert.Zero(t, e.again, "state changes are announced")
	version := nodeClass.ResourceVersion
	e.clock.Step(time.Hour)
	assert.Equal(t, version, e.reconcile(shimtest.NodeClassName).ResourceVersion, "the message does not change with time")
	for _, agent := range []string{"10.0.0.1:8443", "10.0.0.2:8443", "[fd00::1]:8443"} {
		e.connection.state.LastError = grpcstatus.Error(codes.Unavailable, "dial tcp "+agent+": connection refused")
		nodeClass = e.reconcile(shimtest.NodeClassName)
		e.clock.Step(time.Hour)
	}
	assert.Contains(t, condition(nodeClass, v1alpha1.ConditionAgentReachable).Message, "10.0.0.1:8443", "nor with the address that is tried")

	e.connection.state = agentclient.State{Synced: true, Connected: true}
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), status.ConditionReady).IsTrue(), "and it resumes by itself")
	e.reconcile(shimtest.NodeClassName)
	assert.Equal(t, []string{"AgentUnreachable", "AgentUnreachable", "AgentReachable"}, e.Recorder.Reasons(), "one for each cause")
}

func TestACertificateThatEndsIsACondition(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a", Zone: "z1"})
	nodeClass := e.reconcile(shimtest.NodeClassName)
	assert.True(t, condition(nodeClass, v1alpha1.ConditionAgentCertificateValid).IsUnknown(), "the agent is called without one")
	assert.Zero(t, e.again)

	e.found = true
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentCertificateValid).IsTrue())
	assert.Equal(t, time.Minute, e.again, "nothing tells that it ends")

	e.warning = "It ends. Do something."
	nodeClass = e.reconcile(shimtest.NodeClassName)
	valid := condition(nodeClass, v1alpha1.ConditionAgentCertificateValid)
	assert.True(t, valid.IsFalse())
	assert.Equal(t, "AgentCertificateExpiring", valid.Reason)
	assert.Equal(t, "It ends. Do something.", valid.Message)
	assert.True(t, condition(nodeClass, status.ConditionReady).IsTrue(), "it can still be used")
	assert.Empty(t, e.Recorder.Reasons(), "who looks after the certificate warns, again and again")

	e.certificate = certificate{}
	nodeClass = e.reconcile(shimtest.NodeClassName)
	assert.True(t, condition(nodeClass, v1alpha1.ConditionAgentCertificateValid).IsUnknown())
}

func TestAnAgentThatRefusesUsIsAnotherReason(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	e.connection.state = agentclient.State{LastError: grpcstatus.Error(codes.PermissionDenied, "not your Cluster"), Since: e.clock.Now()}
	e.clock.Step(grace + time.Second)
	assert.Equal(t, "AgentRefused", condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentReachable).Reason)
	e.connection.state.LastError = errors.New("silent")
	assert.Equal(t, "AgentUnreachable", condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentReachable).Reason)
}

// Machines of new claims would join the cluster whose identity the shim has, so Karpenter must not
// launch anything, and the user must learn why.
func TestARefusedLiveSetCostsReadinessAtOnce(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentReachable).IsTrue(), "no set was answered yet")
	e.liveSets.known, e.liveSets.refused = true, agenterrors.SpokeMismatch("the live set was read in another cluster")
	nodeClass := e.reconcile(shimtest.NodeClassName)
	reachable := condition(nodeClass, v1alpha1.ConditionAgentReachable)
	assert.True(t, reachable.IsFalse())
	assert.Equal(t, "LiveSetRefused", reachable.Reason)
	assert.Contains(t, reachable.Message, "the live set was read in another cluster")
	assert.True(t, condition(nodeClass, status.ConditionReady).IsFalse())
	assert.Equal(t, []string{"LiveSetRefused"}, e.Recorder.Reasons())

	e.liveSets = liveSets{}
	assert.Equal(t, nodeClass.ResourceVersion, e.reconcile(shimtest.NodeClassName).ResourceVersion, "a restart changes nothing")
	e.liveSets.known = true
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentReachable).IsTrue())
}

func TestARestartWithoutTheAgent(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	require.True(t, condition(e.reconcile(shimtest.NodeClassName), status.ConditionReady).IsTrue())

	e.connection.state = agentclient.State{Since: e.clock.Now()}
	e.controller = e.with(catalogue.New(e.clock, e.NodeGroups, e.Kube, time.Minute)) // without a snapshot
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), status.ConditionReady).IsTrue(), "a restart is no news")
	e.clock.Step(grace + time.Second)
	nodeClass := e.reconcile(shimtest.NodeClassName)
	assert.True(t, condition(nodeClass, status.ConditionReady).IsFalse())
	assert.True(t, condition(nodeClass, v1alpha1.ConditionNodeGroupsFound).IsUnknown())

	fresh := e.NodeClaim("x") // only for its UID
	e.Create(&v1alpha1.ClusterAPINodeClass{ObjectMeta: metav1.ObjectMeta{Name: "new", UID: fresh.UID}})
	e.connection.state = agentclient.State{Since: e.clock.Now()}
	assert.True(t, condition(e.reconcile("new"), status.ConditionReady).IsUnknown())
}

func TestTheSelectorOfThePresentGenerationCounts(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	nodeClass := e.reconcile(shimtest.NodeClassName)
	nodeClass.Generation = 2
	_, err := e.controller.Reconcile(e.Context(), nodeClass)
	require.NoError(t, err)
	assert.True(t, condition(nodeClass, v1alpha1.ConditionNodeGroupsFound).IsUnknown(), "the catalogue has not seen it yet")
}

// Core plans no such pod, and says so on the pod alone.
func TestPodsThatNeedAZoneShowThatNodeGroupsHaveNone(t *testing.T) {
	for name, c := range map[string]struct {
		zone  string
		spec  corev1.PodSpec
		waits time.Duration
		told  bool
	}{
		"it must spread":             {spec: spreading(corev1.DoNotSchedule), waits: 3 * time.Minute, told: true},
		"it chooses a zone":          {spec: choosing("a"), waits: 3 * time.Minute, told: true},
		"it prefers to spread":       {spec: spreading(corev1.ScheduleAnyway), waits: 3 * time.Minute},
		"it has just come":           {spec: spreading(corev1.DoNotSchedule), waits: time.Minute},
		"the node groups have zones": {zone: "a", spec: spreading(corev1.DoNotSchedule), waits: 3 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a", Zone: c.zone}, &agentv1alpha1.NodeGroup{Name: "b", Zone: c.zone})
			e.Create(&corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: c.spec,
				Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{
					Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
					LastTransitionTime: metav1.NewTime(e.clock.Now().Add(-c.waits)),
				}}},
			})
			nodeClass := e.reconcile(shimtest.NodeClassName)
			valid := condition(nodeClass, v1alpha1.ConditionNodeGroupsValid)
			assert.Equal(t, c.told, valid.IsFalse(), valid.Message)
			assert.Equal(t, lo.Ternary(c.zone == "", time.Minute, 0), e.again, "it looks again where that matters")
			if c.told {
				assert.Contains(t, valid.Message, "default/a, default/b: no zone")
				assert.Contains(t, valid.Message, "such as shop/web: set spec.template.spec.failureDomain")
				assert.EqualValues(t, 1, nodeClass.Status.Problems)
			}
		})
	}
}

func choosing(zone string) corev1.PodSpec {
	return corev1.PodSpec{NodeSelector: map[string]string{corev1.LabelTopologyZone: zone}}
}

func spreading(otherwise corev1.UnsatisfiableConstraintAction) corev1.PodSpec {
	return corev1.PodSpec{TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{
		MaxSkew: 1, TopologyKey: corev1.LabelTopologyZone, WhenUnsatisfiable: otherwise,
	}}}
}

func TestANodeClassStaysWhileNodeClaimsReferToIt(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	nodeClass := e.reconcile(shimtest.NodeClassName)
	nodeClaim := e.NodeClaim("claim")
	e.Create(nodeClaim)
	e.Create(e.NodeClaim("other", func(nc *karpv1.NodeClaim) { nc.Spec.NodeClassRef.Name = "another" }))
	require.NoError(t, e.Kube.Delete(e.Context(), nodeClass))
	e.reconcile(shimtest.NodeClassName)
	assert.Equal(t, []string{"WaitingOnNodeClaims"}, e.Recorder.Reasons())

	require.NoError(t, e.Kube.Delete(e.Context(), nodeClaim))
	e.Get(nodeClass)
	_, err := e.controller.Reconcile(e.Context(), nodeClass)
	require.NoError(t, err)
	assert.False(t, e.Exists(nodeClass))
}

// Package outage decides by the condition what core may do with the NodeClaims of the NodeClass.
func TestANodeClassThatIsBeingDeletedShowsWhetherTheAgentIsReachable(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	nodeClass := e.reconcile(shimtest.NodeClassName)
	e.Create(e.NodeClaim("claim"))
	require.NoError(t, e.Kube.Delete(e.Context(), nodeClass))
	reachable := func() bool {
		nodeClass := e.reconcile(shimtest.NodeClassName)
		assert.NotZero(t, e.again)
		return condition(nodeClass, v1alpha1.ConditionAgentReachable).IsTrue()
	}
	require.True(t, reachable())
	e.connection.state = agentclient.State{Synced: true, Since: e.clock.Now(), LastError: grpcstatus.Error(codes.Unavailable, "connection refused")}
	e.clock.Step(2 * grace)
	require.False(t, reachable())
	e.connection.state = agentclient.State{Synced: true, Connected: true}
	require.True(t, reachable())
	assert.Subset(t, e.Recorder.Reasons(), []string{"AgentUnreachable", "AgentReachable"})
}

func TestTheStatusShowsWhatWasSelected(t *testing.T) {
	e := setUp(t,
		&agentv1alpha1.NodeGroup{
			Name: "a", InstanceType: "m", Zone: "z1", Price: &agentv1alpha1.Price{PerHour: 0.25, Currency: "EUR"},
			RolloutStrategy: agentv1alpha1.RolloutStrategy_ROLLOUT_STRATEGY_ON_DELETE, RollingOut: true,
			Sources: map[string]*agentv1alpha1.ValueSource{"price": {Kind: agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST}},
		},
		&agentv1alpha1.NodeGroup{
			Name: "b", Sources: map[string]*agentv1alpha1.ValueSource{"price": {Kind: agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE}},
		},
		&agentv1alpha1.NodeGroup{Name: "c", InstanceType: "no label!"},
	)
	e.Agent.Block("default/b", agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED, "quota machines: 10 of 10", time.Time{})
	e.Eventually(func() bool {
		group, _ := e.Catalogue.Snapshot().Group("default/b")
		return !e.Catalogue.Snapshot().Available(group)
	}, "the quota shows")
	nodeClass := e.reconcile(shimtest.NodeClassName)
	selected := nodeClass.Status.Selected
	require.Len(t, selected, 3)
	assert.Equal(t, v1alpha1.SelectedNodeGroup{
		Name: "default/a", InstanceType: "m", Zone: "z1", CapacityType: "on-demand", Price: "0.25", Currency: "EUR", PriceSource: "PriceList",
		Available: true, RolloutStrategy: "OnDelete", RollingOut: true,
	}, selected[0])
	assert.Equal(t, v1alpha1.SelectedNodeGroup{
		Name: "default/b", InstanceType: "b", CapacityType: "on-demand", Price: "1", PriceSource: "Estimate",
		Reason: "QuotaExceeded", Message: "quota machines: 10 of 10", RolloutStrategy: "RollingUpdate",
	}, selected[1])
	assert.Equal(t, v1alpha1.ReasonUnusable, selected[2].Reason)
	assert.EqualValues(t, 1, nodeClass.Status.AvailableNodeGroups)
}

func TestAGroupWithoutMemoryIsNotAvailable(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a", Capacity: map[string]string{"cpu": "4"}})
	nodeClass := e.reconcile(shimtest.NodeClassName)
	require.Len(t, nodeClass.Status.Selected, 1)
	assert.False(t, nodeClass.Status.Selected[0].Available)
	assert.Equal(t, v1alpha1.ReasonNoCapacity, nodeClass.Status.Selected[0].Reason)
	assert.Contains(t, nodeClass.Status.Selected[0].Message, "write the annotation capacity.cluster-autoscaler.kubernetes.io/memory")
	nodeClass.Status.Selected[0].Name = "mine"
	class, _ := e.Catalogue.Snapshot().Class(shimtest.NodeClassName)
	assert.Equal(t, "default/a", class.Selected[0].Name)
}

func TestChangesThatTurnNoConditionAreWrittenOnceInAWhile(t *testing.T) {
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
	price := func() string { return e.reconcile(shimtest.NodeClassName).Status.Selected[0].Price }
	become := func(perHour float64) {
		e.Agent.UpdateNodeGroup("default/a", func(g *agentv1alpha1.NodeGroup) { g.Price.PerHour = perHour })
		e.Eventually(func() bool {
			group, _ := e.Catalogue.Snapshot().Group("default/a")
			return group.Price == perHour
		}, "the price shows")
	}
	assert.Equal(t, "1", price())
	become(2)
	assert.Equal(t, "1", price(), "it was written a moment ago")
	become(3)
	e.clock.Step(5 * time.Second)
	assert.Equal(t, "3", price())

	e.connection.state = agentclient.State{LastError: errors.New("silent"), Since: e.clock.Now().Add(-grace)}
	assert.True(t, condition(e.reconcile(shimtest.NodeClassName), status.ConditionReady).IsFalse(), "a condition that turns is written at once")
}

// Nothing but the cache can bring the version that the write conflicts with.
func TestAConflictIsRetriedOnceTheCacheMayHaveCaughtUp(t *testing.T) {
	for name, disturbance := range map[string]interceptor.Funcs{
		"of the finalizer": {
			Patch: func(_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch, _ ...client.PatchOption) error {
				return apierrors.NewConflict(corev1.Resource("clusterapinodeclasses"), o.GetName(), errors.New("it was modified"))
			},
		},
		"of the status": {
			SubResourcePatch: func(_ context.Context, _ client.Client, _ string, o client.Object, _ client.Patch, _ ...client.SubResourcePatchOption) error {
				return apierrors.NewConflict(corev1.Resource("clusterapinodeclasses"), o.GetName(), errors.New("it was modified"))
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a"})
			e.Kube = interceptor.NewClient(e.Kube, disturbance)
			e.controller = e.with(e.Catalogue)
			e.reconcile(shimtest.NodeClassName)
			assert.Equal(t, time.Second, e.again)
		})
	}
}

// The API server refuses messages of more than 32,768 characters, and the whole status with them.
func TestMessagesAreNoLongerThanTheAPIServerAllows(t *testing.T) {
	long := strings.Repeat("long ", 10000)
	e := setUp(t, &agentv1alpha1.NodeGroup{Name: "a", Problems: []*agentv1alpha1.Problem{
		{Field: "f1", Message: long}, {Field: "f2", Message: long}, {Field: "f3", Message: long}, {Field: "f4", Message: long},
	}})
	valid := condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionNodeGroupsValid)
	assert.Contains(t, valid.Message, "default/a: f3")
	assert.Contains(t, valid.Message, "and 1 more")
	assert.Less(t, len(valid.Message), 32768)

	e.connection.state = agentclient.State{LastError: errors.New(long), Since: e.clock.Now().Add(-grace)}
	reachable := condition(e.reconcile(shimtest.NodeClassName), v1alpha1.ConditionAgentReachable)
	assert.Contains(t, reachable.Message, "long")
	assert.Less(t, len(reachable.Message), 32768)
}
