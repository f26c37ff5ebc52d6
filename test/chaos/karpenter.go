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
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// karpenterFor is how long Karpenter scales up and down.
const karpenterFor = 120 * time.Second

// podsWithin is how long pods may take to run or to end, with their Nodes: about fifty, on a
// machine that is busy with other work.
const podsWithin = 5 * time.Minute

// mostPods is the maximum number of pods of each Deployment of the fleet.
var mostPods = map[string]int32{"web": 10, "data": 10, "batch": 6}

// karpenterScales runs the demo's fleet: pods come and go, Karpenter adds and removes nodes, and
// the components that serve it are killed.
func karpenterScales(ctx context.Context, r *run) error {
	return r.withKarpenter(ctx, func() error { return r.fleetScales(ctx) })
}

// withKarpenter runs do with all components that only Karpenter needs.
func (r *run) withKarpenter(ctx context.Context, do func() error) error {
	for _, component := range slices.Backward(karpenter) {
		if err := r.Sandbox.StartComponent(ctx, component); err != nil {
			return err
		}
	}
	err := do()
	for _, component := range karpenter {
		if stopErr := r.Sandbox.StopComponent(component); err == nil {
			err = stopErr
		}
	}
	return err
}

// fleet consists of node groups, a NodePool and pods.
type fleet struct {
	groups []*group
	pool   string
	// hub and spoke are the manifest files.
	hub   string
	spoke []string
}

// settleFleet creates a fleet without pods, and waits until the users' own machines run.
func (r *run) settleFleet(ctx context.Context, f *fleet) error {
	for _, g := range f.groups {
		r.intent.share(g.name, g.own, 0)
	}
	if err := manifests.Apply(ctx, r.Hub, f.hub); err != nil {
		return err
	}
	for _, file := range f.spoke {
		if err := manifests.Apply(ctx, r.Spoke, file); err != nil {
			return err
		}
	}
	bounded, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for _, g := range f.groups {
		if err := r.awaitNodes(bounded, g, int(g.own)); err != nil {
			return err
		}
	}
	return r.AwaitNodePool(bounded, f.pool)
}

// razeFleet deletes a fleet whose NodeClaims are gone.
func (r *run) razeFleet(ctx context.Context, f *fleet) error {
	for _, file := range slices.Backward(f.spoke) {
		if err := manifests.Delete(ctx, r.Spoke, file); err != nil {
			return err
		}
	}
	r.intent.update(func() {
		for _, g := range f.groups {
			r.intent.torn[g.name] = true
			delete(r.intent.shares, g.name)
		}
	})
	return manifests.Delete(ctx, r.Hub, f.hub)
}

func (r *run) fleetScales(ctx context.Context) error {
	demo := &fleet{
		groups: []*group{{name: "small-a", own: 1}, {name: "large-b"}, {name: "small-b-spot"}}, pool: "default",
		hub: manifests.FleetHub, spoke: []string{manifests.FleetSpoke, manifests.FleetWorkload},
	}
	if err := r.settleFleet(ctx, demo); err != nil {
		return err
	}
	stop := r.killing(ctx, 3*time.Second, 9*time.Second, sandbox.Agent, sandbox.Shim)
	err := r.scaleUpAndDown(ctx, karpenterFor)
	stop()
	if err != nil {
		return err
	}
	for _, pods := range []map[string]int32{{"web": 6, "data": 6, "batch": 3}, {"web": 0, "data": 0, "batch": 0}} {
		if err := r.runPods(ctx, pods); err != nil {
			return err
		}
		if err := r.rest(ctx); err != nil {
			return err
		}
	}
	return r.razeFleet(ctx, demo)
}

// runPods scales the Deployments and waits until the pods run, or, if there are none, until no
// NodeClaim is left.
func (r *run) runPods(ctx context.Context, pods map[string]int32) error {
	if err := r.scalePods(ctx, pods); err != nil {
		return err
	}
	return r.awaitPods(ctx, int(lo.Sum(lo.Values(pods))))
}

func (r *run) awaitPods(ctx context.Context, total int) error {
	waiting, cancel := context.WithTimeout(ctx, podsWithin)
	defer cancel()
	err := testenv.Poll(waiting, func(ctx context.Context) (string, error) {
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
	if err != nil {
		r.row.Unsettled++
	}
	return err
}

// scaleUpAndDown repeatedly changes the number of pods.
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
