// Package staticpool keeps core from creating NodeClaims of a static NodePool in a loop while no
// node group has room for them.
//
// Core deletes a NodeClaim without capacity at once, and replaces a NodeClaim of a static NodePool
// as soon as it is deleted. During such a loop there is always a NodeClaim without a provider ID,
// and core plans nothing while there is one. Core has no hook for this. Therefore the client with
// which its controllers write refuses for a while to create such NodeClaims for the controller that
// replaces them. That controller treats the refusal like any other failed write and retries later.
//
// Replacements of drifted or unhealthy Nodes are not refused: core has tainted the Node by then,
// and a failed write ends its pass of disruption for all NodePools, without removing the taint.
// Instead, the NodePool is hidden from core's disruption meanwhile.
package staticpool

import (
	"context"
	"fmt"
	"slices"
	"time"

	opmetrics "github.com/awslabs/operatorpkg/metrics"
	"github.com/patrickmn/go-cache"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/controllers/disruption"
	static "sigs.k8s.io/karpenter/pkg/controllers/static/provisioning"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/metrics"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
)

// putOffTotal counts the refused creations.
var putOffTotal = opmetrics.NewPrometheusCounter(crmetrics.Registry, prometheus.CounterOpts{
	Namespace: metrics.Namespace, Subsystem: "capi", Name: "static_node_claims_put_off_total",
	Help: "NodeClaims of static NodePools that were not created because no node group had room shortly before.",
}, []opmetrics.Label{{Name: metrics.NodePoolLabel, Help: "The NodePool."}}, opmetrics.Alpha)

// Gate remembers the static NodePools that recently had no room. It is safe for concurrent use.
type Gate struct {
	kube     client.Reader
	recorder events.Recorder
	closed   *cache.Cache // the reason of the refusal, by NodePool; core brings the library
	ttl      time.Duration
}

// New returns a gate that stays closed for ttl after a refusal. kube reads NodePools from a cache.
func New(kube client.Reader, recorder events.Recorder, ttl time.Duration) *Gate {
	return &Gate{kube: kube, recorder: recorder, closed: cache.New(ttl, min(ttl, time.Second)), ttl: ttl}
}

// Refused records that a NodeClaim could not be launched, so that core deletes it: no node group
// had room, or the NodeClass is not Ready. It ignores NodeClaims that belong to no static NodePool.
func (g *Gate) Refused(ctx context.Context, nodeClaim *karpv1.NodeClaim, why error) {
	nodePool, err := g.static(ctx, nodeClaim)
	if err != nil || nodePool == nil {
		return // not readable, or gone: core creates none for it either
	}
	g.closed.SetDefault(nodePool.Name, why.Error())
	g.recorder.Publish(events.Event{
		InvolvedObject: nodePool,
		Type:           corev1.EventTypeWarning,
		Reason:         "NoRoomForReplicas",
		Message: fmt.Sprintf("Another node of this static NodePool could not be launched; Karpenter retries after %s at the earliest. "+
			"Lower spec.replicas, or remove the cause: %s", g.ttl, why),
		DedupeValues:  []string{string(nodePool.UID)},
		DedupeTimeout: 10 * time.Minute,
	})
}

// static returns the static NodePool of a NodeClaim, or nil.
func (g *Gate) static(ctx context.Context, nodeClaim *karpv1.NodeClaim) (*karpv1.NodePool, error) {
	name := nodeClaim.Labels[karpv1.NodePoolLabelKey]
	if name == "" {
		return nil, nil
	}
	nodePool := &karpv1.NodePool{}
	if err := g.kube.Get(ctx, client.ObjectKey{Name: name}, nodePool); err != nil {
		return nil, err
	}
	if nodePool.Spec.Replicas == nil {
		return nil, nil
	}
	return nodePool, nil
}

// replicas is the name of core's controller that creates the NodeClaims that are missing in a
// static NodePool. Core passes it in the context.
var replicas = (&static.Controller{}).Name()

// disrupting is the name of core's controller that replaces Nodes.
var disrupting = (&disruption.Controller{}).Name()

// Client returns a client that refuses to create missing NodeClaims of a static NodePool while the
// gate is closed for it. It also hides such a NodePool from core's disruption, which would taint
// one of its Nodes, fail to create the replacement and take the taint off again, over and over.
// Everything else is passed to kube.
func (g *Gate) Client(kube client.Client) client.Client { return &gated{Client: kube, gate: g} }

type gated struct {
	client.Client

	gate *Gate
}

func (c *gated) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	if err := c.Client.List(ctx, list, options...); err != nil {
		return err
	}
	if nodePools, is := list.(*karpv1.NodePoolList); is && injection.GetControllerName(ctx) == disrupting {
		nodePools.Items = slices.DeleteFunc(nodePools.Items, func(nodePool karpv1.NodePool) bool {
			_, closed := c.gate.closed.Get(nodePool.Name)
			return closed && nodePool.Spec.Replicas != nil
		})
	}
	return nil
}

func (c *gated) Create(ctx context.Context, object client.Object, options ...client.CreateOption) error {
	if nodeClaim, is := object.(*karpv1.NodeClaim); is && injection.GetControllerName(ctx) == replicas {
		nodePool := nodeClaim.Labels[karpv1.NodePoolLabelKey]
		if why, closed := c.gate.closed.Get(nodePool); closed {
			putOffTotal.Inc(map[string]string{metrics.NodePoolLabel: nodePool})
			return apierrors.NewTooManyRequests(
				fmt.Sprintf("no NodeClaim is made for the static NodePool %s now, as no node group has room: %s", nodePool, why), int(c.gate.ttl.Seconds()))
		}
	}
	return c.Client.Create(ctx, object, options...)
}
