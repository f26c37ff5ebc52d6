package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/samber/lo"
	"k8s.io/apimachinery/pkg/types"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/manifests"
	"github.com/karpenter-capi/karpenter-capi/test/world"
)

// karpenterFor is how long Karpenter scales up and down.
const karpenterFor = 120 * time.Second

// most pods of each Deployment of the fleet.
var mostPods = map[string]int32{"web": 10, "data": 10, "batch": 6}

// karpenterScales runs the fleet of the demo: pods come and go, Karpenter makes and removes nodes, and whoever serves it dies.
func karpenterScales(ctx context.Context, r *run) error {
	for _, component := range slices.Backward(karpenter) {
		if err := r.Sandbox.StartComponent(ctx, component); err != nil {
			return err
		}
	}
	err := r.fleet(ctx)
	for _, component := range karpenter {
		if stopErr := r.Sandbox.StopComponent(component); err == nil {
			err = stopErr
		}
	}
	return err
}

func (r *run) fleet(ctx context.Context) error {
	groups := []*group{{name: "small-a", own: 1}, {name: "large-b"}, {name: "small-b-spot"}}
	for _, g := range groups {
		r.people.share(g.name, g.own, 0)
	}
	if err := manifests.Apply(ctx, r.Hub, manifests.FleetHub); err != nil {
		return err
	}
	for _, file := range []string{manifests.FleetSpoke, manifests.FleetWorkload} {
		if err := manifests.Apply(ctx, r.Spoke, file); err != nil {
			return err
		}
	}
	bounded, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	if err := r.awaitNodes(bounded, groups[0], 1); err != nil {
		return err
	}
	if err := r.AwaitNodePool(bounded, "default"); err != nil {
		return err
	}
	stop := r.killing(ctx, 3*time.Second, 9*time.Second, sandbox.Agent, sandbox.Shim)
	err := r.scaleUpAndDown(ctx, karpenterFor)
	stop()
	if err != nil {
		return err
	}
	for _, pods := range []map[string]int32{{"web": 6, "data": 6, "batch": 3}, {"web": 0, "data": 0, "batch": 0}} {
		if err := r.scalePods(ctx, pods); err != nil {
			return err
		}
		total := int(lo.Sum(lo.Values(pods)))
		waiting, cancel := context.WithTimeout(ctx, settleWithin)
		err := world.Poll(waiting, func(ctx context.Context) (string, error) {
			var nodeClaims karpenterv1.NodeClaimList
			if err := r.Spoke.List(ctx, &nodeClaims); err != nil {
				return "", err
			}
			s := r.Recorder.State()
			if s.Pods.Running == total && s.Pods.Total() == total && (total > 0 || len(nodeClaims.Items) == 0) {
				return "", nil
			}
			return fmt.Sprintf("%d pods to run: %d of %d do, on %d nodes", total, s.Pods.Running, s.Pods.Total(), len(nodeClaims.Items)), nil
		})
		cancel()
		if err != nil {
			r.row.Unsettled++
			return err
		}
		if err := r.rest(ctx); err != nil {
			return err
		}
	}
	for _, file := range []string{manifests.FleetWorkload, manifests.FleetSpoke} {
		if err := manifests.Delete(ctx, r.Spoke, file); err != nil {
			return err
		}
	}
	r.people.update(func() {
		for _, g := range groups {
			r.people.torn[g.name] = true
			delete(r.people.shares, g.name)
		}
	})
	return manifests.Delete(ctx, r.Hub, manifests.FleetHub)
}

// scaleUpAndDown changes how many pods there are, all the time.
func (r *run) scaleUpAndDown(ctx context.Context, d time.Duration) error {
	for began := time.Now(); time.Since(began) < d; {
		pods := map[string]int32{}
		for name, most := range mostPods {
			pods[name] = rand.Int32N(most + 1)
		}
		if err := r.scalePods(ctx, pods); err != nil {
			return err
		}
		if err := wait(ctx, between(3*time.Second, 9*time.Second)); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) scalePods(ctx context.Context, pods map[string]int32) error {
	for name, n := range pods {
		if err := r.Scale(ctx, types.NamespacedName{Namespace: "default", Name: name}, n); err != nil {
			return err
		}
	}
	return nil
}
