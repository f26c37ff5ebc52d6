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

// DefaultPods is the kubelet's default for how many pods fit on a machine.
const DefaultPods = 110

// reservable are the resources that a kubelet can be told to keep something of back.
var reservable = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}

// learnable are the resources of which a Node offers less than it has for a reason that holds for the next machine too. Of
// another one it may offer less for a while, when a device fails or its plugin restarts.
var learnable = append(slices.Clone(reservable), corev1.ResourcePods)

// signals are the resources behind the thresholds of v1alpha1.Kubelet.
var signals = map[string]corev1.ResourceName{
	v1alpha1.SignalMemoryAvailable: corev1.ResourceMemory,
	v1alpha1.SignalNodefsAvailable: corev1.ResourceEphemeralStorage,
}

// Threshold is how much of a resource the kubelet keeps free by evicting pods: an amount, or a share of what the machine has.
type Threshold struct {
	amount resource.Quantity
	share  float32
}

// defaultEviction returns the kubelet's own thresholds, which depend on the operating system.
func defaultEviction(operatingSystem string) map[corev1.ResourceName]Threshold {
	memory := resource.MustParse("100Mi")
	if corev1.OSName(operatingSystem) == corev1.Windows {
		memory = resource.MustParse("500Mi")
	}
	return map[corev1.ResourceName]Threshold{corev1.ResourceMemory: {amount: memory}, corev1.ResourceEphemeralStorage: {share: 0.1}}
}

// ParseThreshold reads a threshold as the kubelet writes it: a quantity, or a percentage of which 0% and 100% mean none.
func ParseThreshold(text string) (Threshold, error) {
	number, isShare := strings.CutSuffix(strings.TrimSpace(text), "%")
	if !isShare {
		amount, err := wire.Quantity(text)
		return Threshold{amount: amount}, err
	}
	// In single precision, as the kubelet calculates.
	percentage, err := strconv.ParseFloat(number, 32)
	if err != nil || math.IsNaN(percentage) || percentage < 0 || percentage > 100 {
		return Threshold{}, fmt.Errorf("%.64q is no percentage from 0%% to 100%%", text)
	}
	if percentage == 100 {
		return Threshold{}, nil
	}
	return Threshold{share: float32(percentage) / 100}, nil
}

// of returns the amount for a machine that has so much.
func (t Threshold) of(capacity resource.Quantity) resource.Quantity {
	if t.share > 0 {
		return *resource.NewQuantity(int64(float64(capacity.Value())*float64(t.share)), resource.BinarySI)
	}
	return t.amount.DeepCopy()
}

// Kubelet is what a ClusterAPINodeClass says about the kubelets of its Nodes, ready to calculate with. Nil says nothing.
type Kubelet struct {
	maxPods, podsPerCore         int64
	kubeReserved, systemReserved corev1.ResourceList
	eviction                     map[corev1.ResourceName]Threshold // nil means the kubelet's defaults
}

// ParseKubelet reads a description. It returns what can be used, and an error that names each field that cannot. A nil
// description is a nil Kubelet.
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
			errs = append(errs, fmt.Errorf("spec.kubelet.evictionHard: %.64q takes no room from pods, leave it out", signal))
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
			errs = append(errs, fmt.Errorf("spec.kubelet.%s: %.64q takes no room from pods, leave it out", field, name))
		case err != nil:
			errs = append(errs, fmt.Errorf("spec.kubelet.%s[%s]: %w", field, name, err))
		default:
			list[corev1.ResourceName(name)] = quantity
		}
	}
	return list, errors.Join(errs...)
}

// speaksOf reports whether the description says how much of the resource is kept back.
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

// thresholds returns the eviction thresholds of a machine with the operating system.
func (k *Kubelet) thresholds(operatingSystem string) map[corev1.ResourceName]Threshold {
	if k == nil || k.eviction == nil {
		return defaultEviction(operatingSystem)
	}
	return k.eviction
}

// capacity returns what a Node reports of a machine's capacity: the kubelet decides how many pods that is.
func (k *Kubelet) capacity(machine corev1.ResourceList) corev1.ResourceList {
	if k == nil || (k.maxPods == 0 && k.podsPerCore == 0) {
		return machine
	}
	pods := machine.Pods().Value()
	if k.maxPods > 0 {
		pods = k.maxPods
	}
	if cpu, ok := machine[corev1.ResourceCPU]; ok && k.podsPerCore > 0 {
		// The kubelet counts whole CPUs, of which a machine has one at least.
		pods = min(pods, k.podsPerCore*max(cpu.MilliValue()/1000, 1))
	}
	capacity := maps.Clone(machine)
	capacity[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	return capacity
}

// overhead returns what the kubelet keeps back of a Node's capacity: of each resource the larger of what the description says and
// what real Nodes of such a machine showed, else the kubelet's defaults; and never more than there is, as core takes a negative
// rest for a Node that not even an empty pod fits. What Nodes showed includes what was described of the machine and is not there,
// for which the description of the kubelet cannot make up.
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
			// Which of the three it is, a Node does not say; core adds them up.
			give(overhead.KubeReserved, name, kept, &left)
			continue
		}
		var kube, system resource.Quantity
		if k != nil {
			kube, system = k.kubeReserved[name].DeepCopy(), k.systemReserved[name].DeepCopy()
		}
		eviction := thresholds[name].of(total)
		// Learned are less pods than the machine was said to take, and not less than the description says.
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

// give moves so much of a resource from what is left to a list, or all that is left.
func give(to corev1.ResourceList, name corev1.ResourceName, quantity resource.Quantity, left *resource.Quantity) {
	if quantity.Cmp(*left) > 0 {
		quantity = *left
	}
	if quantity.Sign() > 0 {
		to[name] = quantity.DeepCopy()
		left.Sub(to[name])
	}
}

// hugePages returns the memory that is set aside in huge pages. Kubelets and core subtract it from memory by themselves.
func hugePages(capacity corev1.ResourceList) resource.Quantity {
	var sum resource.Quantity
	for name, quantity := range capacity {
		if strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
			sum.Add(quantity)
		}
	}
	return sum
}

// allocatableOf returns what pods can have, without zero quantities. It is computed by core itself, so that what Create
// promises is what the scheduler planned with.
func allocatableOf(capacity corev1.ResourceList, overhead *cloudprovider.InstanceTypeOverhead) corev1.ResourceList {
	allocatable := (&cloudprovider.InstanceType{Capacity: capacity, Overhead: overhead}).Allocatable()
	maps.DeleteFunc(allocatable, func(_ corev1.ResourceName, quantity resource.Quantity) bool { return quantity.IsZero() })
	return allocatable
}
