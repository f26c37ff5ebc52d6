package autoscaler

import (
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
)

// Options are the cluster-autoscaler's options for the nodes of a group.
type Options struct {
	UtilizationThreshold, GPUUtilizationThreshold   float64
	UnneededTime, UnreadyTime, MaxNodeProvisionTime time.Duration
	ZeroOrMaxNodeScaling, IgnoreDaemonSets          bool
}

// Options returns the options of a group: the defaults, with those that the MachineDeployment's
// annotations replace. replaced is false if they replace none. Errors: [*UnknownGroupError],
// [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) Options(name types.NamespacedName, id string, defaults Options) (o Options, replaced bool, err error) {
	err = s.inGroup(name, id, func(_ *cluster, g *group) error {
		of := g.Autoscaling
		replaced = !of.Empty()
		o = Options{
			UtilizationThreshold:    lo.FromPtrOr(of.UtilizationThreshold, defaults.UtilizationThreshold),
			GPUUtilizationThreshold: lo.FromPtrOr(of.GPUUtilizationThreshold, defaults.GPUUtilizationThreshold),
			UnneededTime:            lo.FromPtrOr(of.UnneededTime, defaults.UnneededTime),
			UnreadyTime:             lo.FromPtrOr(of.UnreadyTime, defaults.UnreadyTime),
			MaxNodeProvisionTime:    lo.FromPtrOr(of.MaxNodeProvisionTime, defaults.MaxNodeProvisionTime),
			ZeroOrMaxNodeScaling:    defaults.ZeroOrMaxNodeScaling,
			IgnoreDaemonSets:        defaults.IgnoreDaemonSets,
		}
		return nil
	})
	return o, replaced, err
}
