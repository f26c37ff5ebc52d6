package protoconv_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
	"github.com/karpenter-capi/karpenter-capi/agent/failures"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/nodegroup"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/protoconv"
	"github.com/karpenter-capi/karpenter-capi/agent/protocol"
	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestMachineDriftsOnlyWhenItsTemplateChanged(t *testing.T) {
	for name, c := range map[string]struct {
		condition *metav1.Condition
		upToDate  bool
	}{
		"not known yet":    {nil, true},
		"up to date":       {&metav1.Condition{Status: metav1.ConditionTrue, Reason: clusterv1.MachineUpToDateReason}, true},
		"template changed": {&metav1.Condition{Status: metav1.ConditionFalse, Reason: clusterv1.MachineNotUpToDateReason, Message: "* version"}, false},
		"kubelet differs":  {&metav1.Condition{Status: metav1.ConditionFalse, Reason: clusterv1.MachineUpToDateUpdatingReason}, true},
		"unknown":          {&metav1.Condition{Status: metav1.ConditionUnknown, Reason: clusterv1.MachineNotUpToDateReason}, true},
	} {
		t.Run(name, func(t *testing.T) {
			machine := &clusterv1.Machine{}
			if c.condition != nil {
				c.condition.Type = clusterv1.MachineUpToDateCondition
				machine.Status.Conditions = []metav1.Condition{*c.condition}
			}
			shown := protoconv.Machine(machine)
			require.Equal(t, c.upToDate, shown.GetUpToDate())
			require.Equal(t, !c.upToDate, shown.GetNotUpToDateMessage() != "")
		})
	}
}

// Callers cannot import Cluster API.
func TestCallersKnowClusterAPIsReasonForInfrastructureThatIsGone(t *testing.T) {
	require.Equal(t, clusterv1.MachineInfrastructureDeletedReason, claimreasons.InfrastructureDeleted)
}

func TestInfrastructureFailureIsShownAsItsProviderSaysIt(t *testing.T) {
	machine := &clusterv1.Machine{}
	machine.Status.Conditions = []metav1.Condition{{
		Type: clusterv1.MachineInfrastructureReadyCondition, Status: metav1.ConditionFalse, Reason: "OutOfStock", Message: "none left",
	}}
	shown := protoconv.Machine(machine)
	require.Equal(t, "OutOfStock", shown.GetInfrastructureReason())
	require.Equal(t, "none left", shown.GetInfrastructureMessage())
	machine.Status.Conditions[0].Status = metav1.ConditionTrue
	require.Empty(t, protoconv.Machine(machine).GetInfrastructureReason())
}

// docs/security.md names the conditions of a Machine whose texts callers see. All others stay in
// the hub, as do annotations.
func TestOnlyThreeConditionsOfAMachineAreShown(t *testing.T) {
	machine := &clusterv1.Machine{}
	machine.Name, machine.Annotations = "m", map[string]string{"example.com/note": "the text of an annotation"}
	for condition, status := range map[string]metav1.ConditionStatus{
		clusterv1.MachineInfrastructureReadyCondition: metav1.ConditionFalse, clusterv1.MachineDeletingCondition: metav1.ConditionTrue,
		clusterv1.MachineUpToDateCondition: metav1.ConditionFalse, clusterv1.MachineBootstrapConfigReadyCondition: metav1.ConditionFalse,
		clusterv1.MachineNodeReadyCondition: metav1.ConditionFalse, clusterv1.MachineNodeHealthyCondition: metav1.ConditionUnknown,
		clusterv1.MachineReadyCondition: metav1.ConditionFalse, clusterv1.MachineAvailableCondition: metav1.ConditionFalse,
		clusterv1.PausedCondition: metav1.ConditionTrue, "ProvidersOwn": metav1.ConditionFalse,
	} {
		machine.Status.Conditions = append(machine.Status.Conditions, metav1.Condition{
			Type: condition, Status: status, Reason: "Because", Message: "the text of " + condition,
		})
		if condition == clusterv1.MachineUpToDateCondition {
			machine.Status.Conditions[len(machine.Status.Conditions)-1].Reason = clusterv1.MachineNotUpToDateReason
		}
	}
	shown := map[string]string{}
	protoconv.Machine(machine).ProtoReflect().Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		if text := value.String(); strings.Contains(text, "the text of") {
			shown[string(field.Name())] = text
		}
		return true
	})
	require.Equal(t, map[string]string{
		"infrastructure_message": "the text of InfrastructureReady", "deleting_message": "the text of Deleting",
		"not_up_to_date_message": "the text of UpToDate",
	}, shown)
}

// A webhook's text may name what a spoke must not know.
func TestWhyTheHubRefusesAWriteStaysInTheHub(t *testing.T) {
	const secret = `admission webhook "guard.internal.example" denied the request: account 1234`
	claim := &v1alpha1.MachineClaim{Status: v1alpha1.MachineClaimStatus{
		Reason: protocol.ReasonWriteRefused, Message: secret,
		History: []v1alpha1.Event{{Reason: "Bound", Message: "bound to m"}, {Reason: protocol.ReasonWriteRefused, Message: secret}},
	}}
	for of, shown := range map[string]*agentv1alpha1.Claim{
		"a claim": protoconv.Claim(claim, nil), "an end": protoconv.EndedClaim("fleet", "spoke", "a", protocol.ReasonWriteRefused, secret),
	} {
		require.Equal(t, "WriteRefused", shown.GetReason(), of)
		require.Contains(t, shown.GetMessage(), "the hub refuses a write", of)
		require.NotContains(t, shown.String(), "guard", of)
		require.NotContains(t, shown.String(), "1234", of)
	}
	require.Equal(t, "bound to m", protoconv.Claim(claim, nil).GetHistory()[0].GetMessage(), "the agent's own words are passed on")
	require.Equal(t, secret, claim.Status.Message, "the hub's object keeps them all")
}

func TestWhyAClaimFailed(t *testing.T) {
	shown := func(class string) agentv1alpha1.FailureClass {
		return protoconv.Claim(&v1alpha1.MachineClaim{
			Status: v1alpha1.MachineClaimStatus{FailedAt: new(metav1.Now()), FailureClass: class},
		}, nil).GetFailureClass()
	}
	seen := map[agentv1alpha1.FailureClass]bool{}
	for _, class := range failures.Final() {
		seen[shown(string(class))] = true
	}
	require.Len(t, seen, len(agentv1alpha1.FailureClass_name)-1, "each class has a value of its own")
	require.NotContains(t, seen, agentv1alpha1.FailureClass_FAILURE_CLASS_UNSPECIFIED)
	require.Equal(t, agentv1alpha1.FailureClass_FAILURE_CLASS_CAPACITY, shown("Capacity"))
	for _, class := range []string{"", "OfANewerAgent"} {
		require.Equal(t, agentv1alpha1.FailureClass_FAILURE_CLASS_UNSPECIFIED, shown(class))
	}
	late := &v1alpha1.MachineClaim{Status: v1alpha1.MachineClaimStatus{FailureClass: "Capacity"}}
	require.Equal(t, agentv1alpha1.FailureClass_FAILURE_CLASS_UNSPECIFIED, protoconv.Claim(late, nil).GetFailureClass(), "it did not fail")
}

func TestAvailability(t *testing.T) {
	retryAt := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		limits eligibility.Group
		want   *agentv1alpha1.Availability
	}{
		"open": {eligibility.Group{Replicas: 1}, &agentv1alpha1.Availability{Available: true}},
		"full": {
			eligibility.Group{Replicas: 1, Max: ptr.To[int32](1)},
			&agentv1alpha1.Availability{Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, Message: "replicas have reached the max size"},
		},
		"refused": {
			eligibility.Group{Max: ptr.To[int32](0), Refusals: []eligibility.Refusal{{Reason: eligibility.Paused, Message: "by hand"}}},
			&agentv1alpha1.Availability{Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, Message: "by hand"},
		},
		"another holder's": {
			eligibility.Group{Holder: "cluster-autoscaler"},
			&agentv1alpha1.Availability{
				Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED,
				Message: `the node group accepts only claims of the holder "cluster-autoscaler" (annotation ` +
					v1alpha1.HolderAnnotation + ` of the MachineDeployment)`,
			},
		},
		"another holder's, and cooling down": {
			eligibility.Group{
				Holder:   "cluster-autoscaler",
				Refusals: []eligibility.Refusal{{Reason: eligibility.CoolingDown, Message: "it failed", RetryAt: retryAt}},
			},
			&agentv1alpha1.Availability{
				Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED,
				Message: `the node group accepts only claims of the holder "cluster-autoscaler" (annotation ` +
					v1alpha1.HolderAnnotation + ` of the MachineDeployment); it failed`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			shown := protoconv.NodeGroup(nodegroup.NodeGroup{Limits: c.limits}).GetAvailability()
			require.True(t, proto.Equal(c.want, shown), "%v", shown)
		})
	}
	coolingDown := eligibility.Group{Refusals: []eligibility.Refusal{{Reason: eligibility.CoolingDown, RetryAt: retryAt}}}
	shown := protoconv.NodeGroup(nodegroup.NodeGroup{Limits: coolingDown})
	require.Equal(t, retryAt.UTC(), shown.GetAvailability().GetRetryAt().AsTime())

	coolingDown.Holder = "cluster-autoscaler"
	shown = protoconv.NodeGroup(nodegroup.NodeGroup{Limits: coolingDown})
	require.Equal(t, agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, shown.GetHolderAvailability().GetReason())
	require.Equal(t, retryAt.UTC(), shown.GetHolderAvailability().GetRetryAt().AsTime())
}

func TestEveryRefusalOfAGroupThatExistsHasItsReason(t *testing.T) {
	for _, reason := range []eligibility.Reason{
		eligibility.AtMaxSize, eligibility.CoolingDown, eligibility.Paused, eligibility.Deleting, eligibility.ReplicasOwned,
		eligibility.ReplicasLowered, eligibility.Invalid, eligibility.Reserved,
	} {
		require.NotZero(t, protoconv.UnavailableReason(reason), reason)
	}
}

func TestWhatUsersWroteAlwaysFitsIntoAMessage(t *testing.T) {
	bad := "\xff" + strings.Repeat("é", 200)
	shown := protoconv.NodeGroup(nodegroup.NodeGroup{
		Labels:   map[string]string{bad: bad},
		Problems: []capacity.Problem{{Field: bad, Value: bad, Message: bad}},
	})
	_, err := proto.Marshal(shown)
	require.NoError(t, err)
	require.Len(t, []rune(shown.GetProblems()[0].GetValue()), 128)
	_, err = proto.Marshal(protoconv.Claim(&v1alpha1.MachineClaim{
		Spec:   v1alpha1.MachineClaimSpec{DisplayName: bad},
		Status: v1alpha1.MachineClaimStatus{Message: bad, History: []v1alpha1.Event{{Reason: bad, Message: bad}}},
	}, nil))
	require.NoError(t, err)
}

// A Machine that is being deleted or belongs to a claim is no longer the floor's, whatever its
// mark.
func TestWhoseAMachineIs(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*clusterv1.Machine)
		want   agentv1alpha1.MachineOwner
	}{
		"no owner":    {func(m *clusterv1.Machine) { m.Annotations = nil }, agentv1alpha1.MachineOwner_MACHINE_OWNER_UNSPECIFIED},
		"the floor's": {func(*clusterv1.Machine) {}, agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR},
		"a claim's": {
			func(m *clusterv1.Machine) { m.Labels = map[string]string{v1alpha1.ClaimLabel: "c"} }, agentv1alpha1.MachineOwner_MACHINE_OWNER_CLAIM,
		},
		"being deleted": {
			func(m *clusterv1.Machine) { m.DeletionTimestamp = new(metav1.Now()) }, agentv1alpha1.MachineOwner_MACHINE_OWNER_UNSPECIFIED,
		},
		"being released": {
			func(m *clusterv1.Machine) { m.Finalizers = []string{v1alpha1.ReleaseFinalizer} }, agentv1alpha1.MachineOwner_MACHINE_OWNER_UNSPECIFIED,
		},
	} {
		m := &clusterv1.Machine{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{v1alpha1.FloorAnnotation: "true"}}}
		c.change(m)
		require.Equal(t, c.want, protoconv.Machine(m).GetOwner(), name)
	}
}
