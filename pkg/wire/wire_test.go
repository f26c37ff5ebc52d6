package wire_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

func TestResourceListKeepsWhatCanBeUsedAndNamesTheRest(t *testing.T) {
	list, err := wire.ResourceList(map[string]string{
		"cpu": "4", "memory": " 16Gi ", "pods": "-1", "nvidia.com/gpu": "two", "ephemeral-storage": "",
	})
	require.ErrorContains(t, err, `"pods"`)
	require.ErrorContains(t, err, `"nvidia.com/gpu"`)
	require.ErrorContains(t, err, `"ephemeral-storage"`)
	require.NotContains(t, err.Error(), `"cpu"`)
	require.Len(t, list, 2)
	require.True(t, list.Cpu().Equal(resource.MustParse("4")))
	require.True(t, list.Memory().Equal(resource.MustParse("16Gi")))
}

func TestResourceListNamesABoundedNumberOfMistakes(t *testing.T) {
	many := map[string]string{"fine": "1"}
	for n := range 1000 {
		many[fmt.Sprintf("wrong-%d", n)] = "nonsense"
	}
	list, err := wire.ResourceList(many)
	require.Error(t, err)
	require.Len(t, list, 1)
	require.Equal(t, 8, strings.Count(err.Error(), "wrong-"))
}

func TestResourceListOfNothingIsEmpty(t *testing.T) {
	list, err := wire.ResourceList(nil)
	require.NoError(t, err)
	require.NotNil(t, list)
	require.Empty(t, list)
}

func TestQuantitiesRoundTrip(t *testing.T) {
	original := map[string]string{"cpu": "3900m", "memory": "16Gi", "pods": "110", "example.com/device": "1E"}
	list, err := wire.ResourceList(original)
	require.NoError(t, err)
	require.Equal(t, original, wire.Quantities(list))
	require.Nil(t, wire.Quantities(nil))
}

func TestQuantity(t *testing.T) {
	for _, s := range []string{"0", "4", "+4", "500m", "16Gi", "1.5", "1e3", "1E3", "1E", "1Ei", "12E", "1e-3", "100k"} {
		_, err := wire.Quantity(s)
		require.NoError(t, err, s)
	}
	for _, s := range []string{
		"", " ", "four", "4 Gi", "4GiB", "-1", "-0.5", "1e", "1e+", "0x10", "NaN", "1e1000000000", "1e-1000000000",
		"1e99999999999999999999", "1E-2147483648", strings.Repeat("9", 65), "４",
	} {
		begun := time.Now()
		_, err := wire.Quantity(s)
		require.Error(t, err, s)
		require.Less(t, time.Since(begun), time.Second, s)
	}
}

func FuzzQuantity(f *testing.F) {
	long := strings.Repeat("0", 38) + "1" + strings.Repeat("0", 25)
	for _, s := range []string{"4", "16Gi", "-1", "1e-999999999", "1E", "1Ei", ".", "e", "1e+-1", long} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		quantity, err := wire.Quantity(s)
		if err != nil {
			return
		}
		require.GreaterOrEqual(t, quantity.Sign(), 0)
		again, err := wire.Quantity(quantity.String())
		require.NoError(t, err)
		require.Zero(t, quantity.Cmp(again))
	})
}

func TestTaints(t *testing.T) {
	original := []corev1.Taint{
		{Key: "dedicated", Value: "web", Effect: corev1.TaintEffectNoSchedule},
		{Key: "spot", Effect: corev1.TaintEffectPreferNoSchedule},
		{Key: "gone", Effect: corev1.TaintEffectNoExecute},
	}
	converted, err := wire.Taints(wire.FromTaints(original))
	require.NoError(t, err)
	require.Equal(t, original, converted)
	require.Nil(t, wire.FromTaints(nil))

	converted, err = wire.Taints([]*agentv1alpha1.Taint{
		nil, {Key: "odd", Effect: "Sometimes"}, {Key: "fine", Effect: "NoSchedule"}, {Effect: "NoSchedule"},
	})
	require.ErrorContains(t, err, `"odd"`)
	require.ErrorContains(t, err, "no key")
	require.Equal(t, []corev1.Taint{{Key: "fine", Effect: corev1.TaintEffectNoSchedule}}, converted)
}

func TestCapacityTypesRoundTrip(t *testing.T) {
	for number := range agentv1alpha1.CapacityType_name {
		capacityType := agentv1alpha1.CapacityType(number)
		parsed, err := wire.ParseCapacityType(wire.CapacityType(capacityType))
		require.NoError(t, err)
		if capacityType == agentv1alpha1.CapacityType_CAPACITY_TYPE_UNSPECIFIED {
			capacityType = agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND
		}
		require.Equal(t, capacityType, parsed)
	}
	_, err := wire.ParseCapacityType("free")
	require.ErrorContains(t, err, `"free"`)
	require.Equal(t, wire.CapacityTypeOnDemand, wire.CapacityType(99))
}

func TestClaimPhasesRoundTrip(t *testing.T) {
	for number := range agentv1alpha1.ClaimPhase_name {
		phase := agentv1alpha1.ClaimPhase(number)
		if phase == agentv1alpha1.ClaimPhase_CLAIM_PHASE_UNSPECIFIED {
			continue
		}
		parsed, err := wire.ParseClaimPhase(wire.ClaimPhase(phase))
		require.NoError(t, err)
		require.Equal(t, phase, parsed)
	}
	require.Equal(t, "Unknown", wire.ClaimPhase(99))
	_, err := wire.ParseClaimPhase("Lost")
	require.ErrorContains(t, err, `"Lost"`)
}

func TestTheAvailabilityIsThatForTheHolder(t *testing.T) {
	open := &agentv1alpha1.Availability{Available: true}
	full := &agentv1alpha1.Availability{Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE}
	reserved := &agentv1alpha1.Availability{Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_RESERVED}
	for name, c := range map[string]struct {
		group *agentv1alpha1.NodeGroup
		want  *agentv1alpha1.Availability
	}{
		"everybody's":             {&agentv1alpha1.NodeGroup{Availability: open}, open},
		"everybody's, full":       {&agentv1alpha1.NodeGroup{Availability: full}, full},
		"another's":               {&agentv1alpha1.NodeGroup{Availability: reserved, Holder: "b", HolderAvailability: open}, reserved},
		"the holder's":            {&agentv1alpha1.NodeGroup{Availability: reserved, Holder: "a", HolderAvailability: open}, open},
		"the holder's, full":      {&agentv1alpha1.NodeGroup{Availability: reserved, Holder: "a", HolderAvailability: full}, full},
		"of an old agent":         {&agentv1alpha1.NodeGroup{Availability: reserved, Holder: "a"}, open},
		"of an old agent, paused": {&agentv1alpha1.NodeGroup{Availability: full, Holder: "a"}, full},
		"unknown":                 {&agentv1alpha1.NodeGroup{Holder: "a"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			require.True(t, proto.Equal(c.want, wire.AvailabilityFor(c.group, "a")))
		})
	}
}
