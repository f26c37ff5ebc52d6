package catalogue

import (
	"context"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// listed is a mirror that has node groups, and never changes.
type listed []*agentv1alpha1.NodeGroup

func (l listed) List() ([]*agentv1alpha1.NodeGroup, uint64) { return l, 1 }
func (listed) Synced() <-chan struct{}                      { return nil }
func (listed) Subscribe() *agentclient.Subscription         { return nil }
func (listed) State() agentclient.State                     { return agentclient.State{Synced: true, Connected: true} }

func (l listed) Get(id string) (*agentv1alpha1.NodeGroup, bool) {
	return lo.Find(l, func(g *agentv1alpha1.NodeGroup) bool { return g.GetId() == id })
}

// empty is an API server without objects.
type empty struct{}

func (empty) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return nil
}

func (empty) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

func TestAPanicCostsOneNodeGroupAlone(t *testing.T) {
	group := func(name string) *agentv1alpha1.NodeGroup {
		return &agentv1alpha1.NodeGroup{
			Id: "fleet/" + name, Name: name, InstanceType: name, Zone: "a", Region: "r", Architecture: "amd64", OperatingSystem: "linux",
			Capacity: map[string]string{"cpu": "4", "memory": "8Gi", "pods": "110"},
		}
	}
	c := New(clock.RealClock{}, listed{group("broken"), group("whole")}, empty{}, time.Minute)
	c.newGroup = func(source *agentv1alpha1.NodeGroup) (*instancetype.Group, error) {
		if source.GetName() == "broken" {
			panic("a bug")
		}
		return instancetype.NewGroup(source)
	}
	require.NoError(t, c.rebuild(t.Context()))
	snapshot := c.Snapshot()
	_, usable := snapshot.Group("fleet/broken")
	require.False(t, usable)
	_, known := snapshot.Source("fleet/broken")
	require.True(t, known, "it is not gone")
	require.ErrorContains(t, snapshot.invalid["fleet/broken"], "node group fleet/broken: an internal error of the shim")
	_, usable = snapshot.Group("fleet/whole")
	require.True(t, usable)
}
