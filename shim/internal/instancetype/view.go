package instancetype

import (
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// View is how one ClusterAPINodeClass sees groups: with its description of the kubelet and with the
// prices that it accepts. Immutable.
type View struct {
	kubelet         *Kubelet
	knownPricesOnly bool
}

// NewView returns the view of a NodeClass, and an error that names each field that is invalid and
// therefore ignored.
func NewView(spec *v1alpha1.ClusterAPINodeClassSpec) (*View, error) {
	kubelet, err := ParseKubelet(spec.Kubelet)
	return &View{kubelet: kubelet, knownPricesOnly: spec.Price.WhenUnknown == v1alpha1.UnknownPriceUnavailable}, err
}

// Of returns the group as the NodeClass sees it, or the same object if the class changes nothing.
// It is expensive; call it once for each group and class.
func (v *View) Of(g *Group) *Group {
	refused := v.knownPricesOnly && g.PriceRefused == "" && PriceSource(g.Source) == PriceSourceEstimate
	if v.kubelet == nil && !refused {
		return g
	}
	seen := *g
	seen.Capacity = v.kubelet.capacity(g.Capacity)
	seen.Overhead = v.kubelet.overhead(g.Capacity, g.learned, g.Source.GetOperatingSystem())
	seen.Allocatable = allocatableOf(seen.Capacity, seen.Overhead)
	if refused {
		seen.Available = false
		seen.PriceRefused = "the price is an estimate, which spec.price.whenUnknown excludes; " +
			"set the annotation or the price list in the hub"
	}
	seen.requireCapacity()
	seen.fingerprint, seen.shape = seen.hash(), seen.hashShape()
	return &seen
}

// Values of [PriceSource].
const (
	PriceSourceAnnotation = "Annotation"
	PriceSourcePriceList  = "PriceList"
	PriceSourceEstimate   = "Estimate"
	PriceSourceUnknown    = "Unknown"
)

// PriceSource returns the source of a group's price, for the NodeClass's status.
func PriceSource(source *agentv1alpha1.NodeGroup) string {
	switch source.GetSources()["price"].GetKind() {
	case agentv1alpha1.SourceKind_SOURCE_KIND_ANNOTATION:
		return PriceSourceAnnotation
	case agentv1alpha1.SourceKind_SOURCE_KIND_PRICE_LIST:
		return PriceSourcePriceList
	case agentv1alpha1.SourceKind_SOURCE_KIND_ESTIMATE:
		return PriceSourceEstimate
	default:
		return PriceSourceUnknown
	}
}
