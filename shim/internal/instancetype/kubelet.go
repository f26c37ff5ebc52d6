package instancetype

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// DefaultPods is the kubelet's default for the maximum number of pods on a Node.
const DefaultPods = 110

// reservable are the resources that a kubelet can be configured to reserve.
var reservable = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}

// learnable are the resources for which a difference between a Node's capacity and allocatable also
// holds for the next machine. For other resources the difference may be temporary, such as while a
// device has failed or its plugin restarts.
var learnable = append(slices.Clone(reservable), corev1.ResourcePods)

// signals maps the eviction signals of v1alpha1.Kubelet to resources.
var signals = map[string]corev1.ResourceName{
	v1alpha1.SignalMemoryAvailable: corev1.ResourceMemory,
	v1alpha1.SignalNodefsAvailable: corev1.ResourceEphemeralStorage,
}

// Threshold is the amount of a resource that the kubelet keeps free by evicting pods: absolute, or
// a share of the capacity.
type Threshold struct {
	amount resource.Quantity
	share  float32
}

// defaultEviction returns the kubelet's default thresholds, which depend on the operating system.
func defaultEviction(operatingSystem string) map[corev1.ResourceName]Threshold {
	memory := resource.MustParse("100Mi")
	if corev1.OSName(operatingSystem) == corev1.Windows {
		memory = resource.MustParse("500Mi")
	}
	return map[corev1.ResourceName]Threshold{corev1.ResourceMemory: {amount: memory}, corev1.ResourceEphemeralStorage: {share: 0.1}}
}

// ParseThreshold parses a threshold in the kubelet's format: a quantity, or a percentage, where 0%
// and 100% mean none.
func ParseThreshold(text string) (Threshold, error) {
	number, isShare := strings.CutSuffix(strings.TrimSpace(text), "%")
	if !isShare {
		amount, err := wire.Quantity(text)
		return Threshold{amount: amount}, err
	}
	// In single precision, as in the kubelet.
	percentage, err := strconv.ParseFloat(number, 32)
	if err != nil || math.IsNaN(percentage) || percentage < 0 || percentage > 100 {
		return Threshold{}, fmt.Errorf("%.64q is not a percentage from 0%% to 100%%", text)
	}
	if percentage == 100 {
		return Threshold{}, nil
	}
	return Threshold{share: float32(percentage) / 100}, nil
}

// of returns the absolute amount for a machine with the given capacity.
func (t Threshold) of(capacity resource.Quantity) resource.Quantity {
	if t.share > 0 {
		return *resource.NewQuantity(int64(float64(capacity.Value())*float64(t.share)), resource.BinarySI)
	}
	return t.amount.DeepCopy()
}

// Kubelet is a ClusterAPINodeClass's description of its Nodes' kubelets, parsed. Nil means no
// description.
type Kubelet struct {
	maxPods, podsPerCore         int64
	kubeReserved, systemReserved corev1.ResourceList
	eviction                     map[corev1.ResourceName]Threshold // nil means the kubelet's defaults
}

// ParseKubelet parses a description. It returns the usable part, and an error that names each
// unusable field. It returns nil for a nil description.
func ParseKubelet(spec *v1alpha1.Kubelet) (*Kubelet, error) {
	if spec == nil {
		return nil, nil
	}
	kubelet := &Kubelet{}
	var errs []error
	for _, number := range []struct {
		field string
		value *int32
		into  *int64
	}{{"maxPods", spec.MaxPods, &kubelet.maxPods}, {"podsPerCore", spec.PodsPerCore, &kubelet.podsPerCore}} {
		switch {
		case number.value == nil:
		case *number.value < 1:
			errs = append(errs, fmt.Errorf("spec.kubelet.%s: %d is not positive", number.field, *number.value))
		default:
			*number.into = int64(*number.value)
		}
	}
	var err error
	kubelet.kubeReserved, err = reserved("kubeReserved", spec.KubeReserved)
	errs = append(errs, err)
	kubelet.systemReserved, err = reserved("systemReserved", spec.SystemReserved)
	errs = append(errs, err)
	if spec.EvictionHard != nil {
		kubelet.eviction = map[corev1.ResourceName]Threshold{}
	}
	for _, signal := range slices.Sorted(maps.Keys(spec.EvictionHard)) {
		name, ok := signals[signal]
		if !ok {
			errs = append(errs, fmt.Errorf("spec.kubelet.evictionHard: %.64q does not reduce the resources of pods; remove it", signal))
			continue
		}
		threshold, err := ParseThreshold(string(spec.EvictionHard[signal]))
		if err != nil {
			errs = append(errs, fmt.Errorf("spec.kubelet.evictionHard[%s]: %w", signal, err))
			continue
		}
		kubelet.eviction[name] = threshold
	}
	return kubelet, errors.Join(errs...)
}

func reserved(field string, quantities map[string]v1alpha1.ReservedQuantity) (corev1.ResourceList, error) {
	list := corev1.ResourceList{}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(quantities)) {
		quantity, err := wire.Quantity(string(quantities[name]))
		switch {
		case !slices.Contains(reservable, corev1.ResourceName(name)):
			errs = append(errs, fmt.Errorf("spec.kubelet.%s: %.64q does not reduce the resources of pods; remove it", field, name))
		case err != nil:
			errs = append(errs, fmt.Errorf("spec.kubelet.%s[%s]: %w", field, name, err))
		default:
			list[corev1.ResourceName(name)] = quantity
		}
	}
	return list, errors.Join(errs...)
}

// speaksOf reports whether the description specifies a reservation of the resource.
func (k *Kubelet) speaksOf(name corev1.ResourceName) bool {
	if k == nil {
		return false
	}
	if name == corev1.ResourcePods {
		return k.maxPods > 0 || k.podsPerCore > 0
	}
	_, kube := k.kubeReserved[name]
	_, system := k.systemReserved[name]
	_, eviction := k.eviction[name]
	return kube || system || eviction
}

// thresholds returns the eviction thresholds for a machine with the given operating system.
func (k *Kubelet) thresholds(operatingSystem string) map[corev1.ResourceName]Threshold {
	if k == nil || k.eviction == nil {
		return defaultEviction(operatingSystem)
	}
	return k.eviction
}

// capacity returns a Node's reported capacity for a machine's capacity. They differ in the number
// of pods, which the kubelet determines.
func (k *Kubelet) capacity(machine corev1.ResourceList) corev1.ResourceList {
	if k == nil || (k.maxPods == 0 && k.podsPerCore == 0) {
		return machine
	}
	pods := machine.Pods().Value()
	if k.maxPods > 0 {
		pods = k.maxPods
	}
	if cpu, ok := machine[corev1.ResourceCPU]; ok && k.podsPerCore > 0 {
		// The kubelet counts whole CPUs, with a minimum of one.
		pods = min(pods, k.podsPerCore*max(cpu.MilliValue()/1000, 1))
	}
	capacity := maps.Clone(machine)
	capacity[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	return capacity
}

// overhead returns what the kubelet reserves of a Node's capacity. For each resource it uses the
// larger of the described reservation and what real Nodes of such a machine showed, or the
// kubelet's defaults if there is neither.
//
// The overhead never exceeds the capacity: core treats a negative remainder as a Node on which not
// even an empty pod fits. Learned values include capacity that the machine was described with but
// does not have; a described kubelet cannot make up for that.
func (k *Kubelet) overhead(machine, learned corev1.ResourceList, operatingSystem string) *cloudprovider.InstanceTypeOverhead {
	capacity := k.capacity(machine)
	overhead := &cloudprovider.InstanceTypeOverhead{
		KubeReserved: corev1.ResourceList{}, SystemReserved: corev1.ResourceList{}, EvictionThreshold: corev1.ResourceList{},
	}
	thresholds := k.thresholds(operatingSystem)
	for _, name := range learnable {
		total, ok := capacity[name]
		if !ok {
			continue
		}
		left := total.DeepCopy()
		if kept, known := learned[name]; known && !k.speaksOf(name) {
			// A Node does not report which of the three it is; core adds them up.
			give(overhead.KubeReserved, name, kept, &left)
			continue
		}
		var kube, system resource.Quantity
		if k != nil {
			kube, system = k.kubeReserved[name].DeepCopy(), k.systemReserved[name].DeepCopy()
		}
		eviction := thresholds[name].of(total)
		// The learned number of pods is relative to the machine's described maximum, not to the
		// kubelet's.
		more := learned[name].DeepCopy()
		if name == corev1.ResourcePods && more.Sign() > 0 {
			more.Add(total)
			more.Sub(machine[name])
		}
		for _, said := range []resource.Quantity{kube, system, eviction} {
			more.Sub(said)
		}
		if more.Sign() > 0 {
			kube.Add(more)
		}
		give(overhead.KubeReserved, name, kube, &left)
		give(overhead.SystemReserved, name, system, &left)
		give(overhead.EvictionThreshold, name, eviction, &left)
	}
	return overhead
}

// give moves the quantity, or all that is left if that is less, from left to the list.
func give(to corev1.ResourceList, name corev1.ResourceName, quantity resource.Quantity, left *resource.Quantity) {
	if quantity.Cmp(*left) > 0 {
		quantity = *left
	}
	if quantity.Sign() > 0 {
		to[name] = quantity.DeepCopy()
		left.Sub(to[name])
	}
}

// hugePages returns the memory reserved as huge pages. Kubelets and core subtract it from memory
// themselves.
func hugePages(capacity corev1.ResourceList) resource.Quantity {
	var sum resource.Quantity
	for name, quantity := range capacity {
		if strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
			sum.Add(quantity)
		}
	}
	return sum
}

// allocatableOf returns what is left for pods, without zero quantities. Core's own code computes
// it, so that Create reports exactly what the scheduler planned with.
func allocatableOf(capacity corev1.ResourceList, overhead *cloudprovider.InstanceTypeOverhead) corev1.ResourceList {
	allocatable := (&cloudprovider.InstanceType{Capacity: capacity, Overhead: overhead}).Allocatable()
	maps.DeleteFunc(allocatable, func(_ corev1.ResourceName, quantity resource.Quantity) bool { return quantity.IsZero() })
	return allocatable
}
