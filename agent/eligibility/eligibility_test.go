package eligibility_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/eligibility"
)

func deployment(change func(*clusterv1.MachineDeployment)) *clusterv1.MachineDeployment {
	md := &clusterv1.MachineDeployment{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "fleet", Name: "small",
			Labels:      map[string]string{v1alpha1.MemberLabel: ""},
			Annotations: map[string]string{},
		},
		Spec: clusterv1.MachineDeploymentSpec{ClusterName: "spoke", Replicas: new(int32(2))},
	}
	if change != nil {
		change(md)
	}
	return md
}

func cluster(change func(*clusterv1.Cluster)) *clusterv1.Cluster {
	c := &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "spoke"}}
	if change != nil {
		change(c)
	}
	return c
}

func TestAnOpenGroupHasNoRefusal(t *testing.T) {
	group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
		md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "1"
		md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "5"
	}), cluster(nil))
	assert.Nil(t, group.Refusal())
	assert.Empty(t, group.Problems)
	assert.Equal(t, int32(1), group.Min)
	assert.Equal(t, int32(5), *group.Max)
	assert.Equal(t, int32(2), group.Replicas)
	assert.False(t, group.Full())
}

func TestFullMeansReplicasAtTheMaxSize(t *testing.T) {
	for text, full := range map[string]bool{"1": true, "2": true, "3": false, "": false} {
		group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
			if text != "" {
				md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = text
			}
		}), cluster(nil))
		assert.Equal(t, full, group.Full(), "max size %q", text)
	}
}

func TestClosedGroupsSayWhy(t *testing.T) {
	deleted := metav1.Now()
	for name, test := range map[string]struct {
		md      func(*clusterv1.MachineDeployment)
		cluster *clusterv1.Cluster
		reason  eligibility.Reason
	}{
		"deployment deleted": {
			md: func(md *clusterv1.MachineDeployment) { md.DeletionTimestamp = &deleted }, cluster: cluster(nil), reason: eligibility.Deleting,
		},
		"no cluster": {reason: eligibility.Deleting},
		"cluster deleted": {
			cluster: cluster(func(c *clusterv1.Cluster) { c.DeletionTimestamp = &deleted }), reason: eligibility.Deleting,
		},
		"not opted in": {md: func(md *clusterv1.MachineDeployment) { md.Labels = nil }, cluster: cluster(nil), reason: eligibility.NotMember},
		"spec.paused": {
			md: func(md *clusterv1.MachineDeployment) { md.Spec.Paused = new(true) }, cluster: cluster(nil), reason: eligibility.Paused,
		},
		"paused by hand": {
			md:      func(md *clusterv1.MachineDeployment) { md.Annotations[clusterv1.PausedAnnotation] = "" },
			cluster: cluster(nil), reason: eligibility.Paused,
		},
		"cluster paused": {cluster: cluster(func(c *clusterv1.Cluster) { c.Spec.Paused = new(true) }), reason: eligibility.Paused},
		"replicas unset": {
			md: func(md *clusterv1.MachineDeployment) { md.Spec.Replicas = nil }, cluster: cluster(nil), reason: eligibility.Invalid,
		},
		"max size not a number": {
			md:      func(md *clusterv1.MachineDeployment) { md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "many" },
			cluster: cluster(nil), reason: eligibility.Invalid,
		},
		"max size negative": {
			md:      func(md *clusterv1.MachineDeployment) { md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "-1" },
			cluster: cluster(nil), reason: eligibility.Invalid,
		},
		"min size not a number": {
			md:      func(md *clusterv1.MachineDeployment) { md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "three" },
			cluster: cluster(nil), reason: eligibility.Invalid,
		},
		"min above max": {
			md: func(md *clusterv1.MachineDeployment) {
				md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "4"
				md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = "3"
			},
			cluster: cluster(nil), reason: eligibility.Invalid,
		},
		"replicas lowered below what is claimed": {
			md: func(md *clusterv1.MachineDeployment) {
				md.Annotations[v1alpha1.ReplicasLoweredAnnotation] = "argocd-controller set replicas to 0"
			},
			cluster: cluster(nil), reason: eligibility.ReplicasLowered,
		},
		"topology sets replicas": {
			md: func(md *clusterv1.MachineDeployment) {
				md.Labels[clusterv1.ClusterTopologyMachineDeploymentNameLabel] = "workers"
			},
			cluster: cluster(func(c *clusterv1.Cluster) {
				c.Spec.Topology.Workers.MachineDeployments = []clusterv1.MachineDeploymentTopology{
					{Name: "workers", Replicas: new(int32(3))},
				}
			}),
			reason: eligibility.ReplicasOwned,
		},
	} {
		t.Run(name, func(t *testing.T) {
			group := eligibility.Of(deployment(test.md), test.cluster)
			refusal := group.Refusal()
			require.NotNil(t, refusal)
			assert.Equal(t, test.reason, refusal.Reason)
			assert.Equal(t, "small", refusal.NodeGroup)
			assert.NotEmpty(t, refusal.Message)
			assert.False(t, group.MayGrow())
		})
	}
}

func TestAGroupIsOneHoldersOrEveryones(t *testing.T) {
	group := eligibility.Of(deployment(func(*clusterv1.MachineDeployment) {}), cluster(nil))
	for _, holder := range []string{"", "karpenter", "cluster-autoscaler"} {
		assert.Nil(t, group.For("small", holder))
	}
	group = eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
		md.Annotations[v1alpha1.HolderAnnotation] = "cluster-autoscaler"
	}), cluster(nil))
	assert.Nil(t, group.Refusal(), "to its holder it is open")
	assert.Nil(t, group.For("small", "cluster-autoscaler"))
	for _, holder := range []string{"", "karpenter", "cluster-autoscaler-b"} {
		refusal := group.For("small", holder)
		require.NotNil(t, refusal, holder)
		assert.Equal(t, eligibility.Reserved, refusal.Reason)
		assert.False(t, refusal.Reason.NoRoom(), "waiting does not help")
		assert.Contains(t, refusal.Message, v1alpha1.HolderAnnotation)
	}
}

func TestTheAgentsOwnPauseClosesNothing(t *testing.T) {
	group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
		md.Annotations[clusterv1.PausedAnnotation] = v1alpha1.PausedByAgent
	}), cluster(nil))
	assert.Nil(t, group.Refusal())
}

func TestATopologyWithoutReplicasClosesNothing(t *testing.T) {
	group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
		md.Labels[clusterv1.ClusterTopologyMachineDeploymentNameLabel] = "workers"
	}), cluster(func(c *clusterv1.Cluster) {
		c.Spec.Topology.Workers.MachineDeployments = []clusterv1.MachineDeploymentTopology{{Name: "workers"}}
	}))
	assert.Nil(t, group.Refusal())
}

func TestProblemsNameTheField(t *testing.T) {
	group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
		md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "-3"
	}), cluster(nil))
	require.Len(t, group.Problems, 1)
	assert.Contains(t, group.Problems[0].Field, clusterv1.AutoscalerMinSizeAnnotation)
	assert.Equal(t, "-3", group.Problems[0].Value)
	assert.False(t, group.SizesUsable())
}

func TestHowLongClaimsWaitIsReadWhereItCanBe(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"15m": 15 * time.Minute, "1h30m": 90 * time.Minute, "900s": 15 * time.Minute, "10s": 10 * time.Second, "168h": 7 * 24 * time.Hour,
		"15": 0, "0s": 0, "-1m": 0, "": 0, "soon": 0, "1ms": 0, "169h": 0, "876000h": 0,
	} {
		group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
			md.Annotations[v1alpha1.MaxNodeProvisionTimeAnnotation] = text
		}), cluster(nil))
		assert.Equal(t, want, group.MaxNodeProvisionTime, "%q", text)
		assert.Nil(t, group.Refusal(), "%q: claims go on", text)
		if want == 0 {
			require.Len(t, group.Problems, 1, "%q", text)
			assert.Equal(t, text, group.Problems[0].Value)
			assert.Contains(t, group.Problems[0].Field, "maxnodeprovisiontime")
		} else {
			assert.Empty(t, group.Problems, "%q", text)
		}
	}
	assert.Zero(t, eligibility.Of(deployment(nil), cluster(nil)).MaxNodeProvisionTime)
}

func TestHowLongFailedMachinesAreKeptIsReadWhereItCanBe(t *testing.T) {
	for text, want := range map[string]time.Duration{"2h": 2 * time.Hour, "1m": time.Minute, "59s": 0, "169h": 0, "yes": 0, "": 0} {
		group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
			md.Annotations[v1alpha1.KeepFailedAnnotation] = text
		}), cluster(nil))
		assert.Equal(t, want, group.KeepFailed, "%q", text)
		assert.Nil(t, group.Refusal(), "%q: claims go on", text)
		if want == 0 {
			require.Len(t, group.Problems, 1, "%q", text)
			assert.Contains(t, group.Problems[0].Field, "keep-failed-machines")
			assert.Contains(t, group.Problems[0].Message, "from 60s to 168h")
		}
	}
}

// Every user setting must be respected whatever else is wrong, so no reason may hide another.
func TestEveryReasonIsKept(t *testing.T) {
	group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
		md.Labels = nil
		md.Annotations[clusterv1.PausedAnnotation] = ""
		md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = "three"
	}), cluster(nil))
	assert.True(t, group.Has(eligibility.NotMember))
	assert.True(t, group.Has(eligibility.Paused))
	assert.True(t, group.Has(eligibility.Invalid))
	assert.Equal(t, eligibility.NotMember, group.Refusal().Reason)
	assert.Contains(t, group.Refusal().Message, clusterv1.PausedAnnotation)
	assert.Contains(t, group.Refusal().Message, "three", "the value that cannot be read")
}

func TestWhatStopsGrowingAndShrinking(t *testing.T) {
	for reason, may := range map[eligibility.Reason]struct{ grow, shrink bool }{
		eligibility.Deleting:        {grow: false, shrink: true},
		eligibility.NotMember:       {grow: false, shrink: true},
		eligibility.Paused:          {},
		eligibility.ReplicasOwned:   {},
		eligibility.ReplicasLowered: {},
		eligibility.Invalid:         {},
		eligibility.CoolingDown:     {grow: true, shrink: true},
		eligibility.QuotaExceeded:   {grow: true, shrink: true},
		eligibility.MachinesBlocked: {grow: true, shrink: true},
	} {
		group := eligibility.Group{}.With(&eligibility.Refusal{Reason: reason})
		assert.Equal(t, may.grow, group.MayGrow(), "%s: grow", reason)
		assert.Equal(t, may.shrink, group.MayShrink(), "%s: shrink", reason)
	}
	var open eligibility.Group
	assert.True(t, open.MayGrow())
	assert.True(t, open.MayShrink())
}

// FuzzOf checks that no annotation value makes Of panic, and that sizes are never negative.
func FuzzOf(f *testing.F) {
	f.Add("0", "10")
	f.Add("-1", "9999999999999999999")
	f.Add("", "1e3")
	f.Fuzz(func(t *testing.T, low, high string) {
		group := eligibility.Of(deployment(func(md *clusterv1.MachineDeployment) {
			md.Annotations[clusterv1.AutoscalerMinSizeAnnotation] = low
			md.Annotations[clusterv1.AutoscalerMaxSizeAnnotation] = high
		}), cluster(nil))
		if group.Min < 0 || group.Max != nil && (*group.Max < 0 || group.Min > *group.Max && group.SizesUsable()) {
			t.Fatalf("impossible sizes: %+v", group)
		}
	})
}
