package autoscaler

import (
	"fmt"
	"math"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/resource"
)

// UnknownNodeError means that a node is none of the groups'.
type UnknownNodeError struct{ Name string }

func (e *UnknownNodeError) Error() string {
	return fmt.Sprintf("node %s belongs to no node group of the cluster-autoscaler, so its price is not known", e.Name)
}

// UnpricedPodError means that no machine of any group has what a pod requests.
type UnpricedPodError struct{ Name string }

func (e *UnpricedPodError) Error() string {
	return fmt.Sprintf("no node group has machines with what pod %s requests", e.Name)
}

// templatePrefix begins the names that the cluster-autoscaler gives to the nodes it simulates. The
// ID of the group follows.
const templatePrefix = "template-node-for-"

// NodePrice returns the price of a node of a group for a time. The node may be a real one, or one
// that the cluster-autoscaler made up for a simulation. Errors: [*UnknownNodeError],
// [watchcache.ErrNotReady], [watchcache.ErrClosed].
func (s *Scaler) NodePrice(name types.NamespacedName, node Node, during time.Duration) (price float64, err error) {
	err = s.read(name, func(c *cluster) error {
		g := c.pricedGroup(name, node)
		if g == nil {
			return &UnknownNodeError{Name: node.describe()}
		}
		price = g.Price.PerHour * hours(during)
		return nil
	})
	return price, err
}

// pricedGroup returns the group of a node, or nil.
func (c *cluster) pricedGroup(name types.NamespacedName, node Node) *group {
	// A simulated node that was copied from a real one has the provider ID of that one.
	if id, simulated := strings.CutPrefix(node.Name, templatePrefix); simulated {
		for at := len(id); at > 0; at = strings.LastIndexByte(id[:at], '-') { // a random suffix follows, or several
			if g := c.view.groups[id[:at]]; g != nil {
				return g
			}
		}
	}
	if id, template := strings.CutPrefix(node.ProviderID, "capi-template://"); template {
		return c.view.groups[id]
	}
	return c.view.groups[c.groupOf(c.claimOf(name, node))]
}

// PodPrice returns the least that the machines of any group cost for a time, by the share of a
// machine that the pod requests. Errors: [*UnpricedPodError], [watchcache.ErrNotReady],
// [watchcache.ErrClosed].
func (s *Scaler) PodPrice(name types.NamespacedName, pod *corev1.Pod, during time.Duration) (price float64, err error) {
	requests := resource.PodRequests(pod, resource.PodResourcesOptions{})
	err = s.read(name, func(c *cluster) error {
		price = math.Inf(1)
		for _, g := range c.view.order {
			if share, fits := g.share(requests); fits {
				price = min(price, g.Price.PerHour*share*hours(during))
			}
		}
		if math.IsInf(price, 1) {
			return &UnpricedPodError{Name: short(pod.Namespace) + "/" + short(pod.Name)}
		}
		return nil
	})
	return price, err
}

// share returns the largest share of a machine's resources that the requests take. fits is false if
// the machine has less than is requested.
func (g *group) share(requests corev1.ResourceList) (share float64, fits bool) {
	allocatable := g.allocatable()
	for name, request := range requests {
		if request.Sign() <= 0 {
			continue
		}
		has := allocatable[name]
		if has.Cmp(request) < 0 {
			return 0, false
		}
		share = max(share, request.AsApproximateFloat64()/has.AsApproximateFloat64())
	}
	return share, true
}

func hours(d time.Duration) float64 { return max(d, 0).Hours() }
