package pricing

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

// FlatRates are the prices per hour of resources, for machines without a provider's price. All are
// finite and not negative.
type FlatRates struct {
	// PerMachine is the price of a machine of any size.
	PerMachine float64
	// PerCPU, PerGiB and PerDiskGiB are the prices of a CPU, and of a GiB of memory and of disk.
	PerCPU, PerGiB, PerDiskGiB float64
	// PerAccelerator is the price of one unit of any extended resource. If it is nil, machines may
	// have none: they would look as cheap as others.
	PerAccelerator *float64
}

// FlatEntry restricts the prices of a list to some machines. Empty fields match all.
type FlatEntry struct {
	Cluster, Zone, Region, Infrastructure, CapacityType string
}

// hours in the periods that a price may be given for. A month is a twelfth of a year of 365 days.
var hours = map[string]float64{"hour": 1, "month": 365 * 24 / 12, "year": 365 * 24}

// FlatList writes a price list that [ParseList] accepts. A machine is either
//
//	<instance type>=cpu=<CPUs>,memory=<quantity>[,ephemeral-storage=<quantity>][,<extended resource>=<number>]
//	<instance type>=<price>/<hour, month or year>
//
// with at least one machine. The error lists every mistake.
func FlatList(currency string, rates FlatRates, of FlatEntry, machines []string) ([]byte, error) {
	type written struct {
		InstanceType   string  `json:"instanceType"`
		Cluster        string  `json:"cluster,omitempty"`
		Zone           string  `json:"zone,omitempty"`
		Region         string  `json:"region,omitempty"`
		Infrastructure string  `json:"infrastructure,omitempty"`
		CapacityType   string  `json:"capacityType,omitempty"`
		PerHour        float64 `json:"perHour"`
	}
	file := struct {
		Currency string    `json:"currency,omitempty"`
		Prices   []written `json:"prices"`
	}{Currency: currency}
	errs := rates.faults()
	for _, machine := range machines {
		name, description, _ := strings.Cut(machine, "=")
		perHour, err := rates.price(description)
		if err != nil {
			errs = append(errs, fmt.Errorf("%q: %w", machine, err))
		}
		// More digits would only show how floats are represented.
		perHour = math.Round(perHour*1e6) / 1e6
		file.Prices = append(file.Prices, written{name, of.Cluster, of.Zone, of.Region, of.Infrastructure, of.CapacityType, perHour})
	}
	if len(machines) == 0 {
		errs = append(errs, errors.New("there are no machines; write for example large=cpu=8,memory=32Gi"))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	content, err := yaml.Marshal(file)
	if err != nil {
		return nil, fmt.Errorf("writing a price list: %w", err)
	}
	if _, err := ParseList("the list", content); err != nil {
		return nil, err
	}
	return content, nil
}

func (r FlatRates) faults() []error {
	var errs []error
	for _, rate := range []float64{r.PerMachine, r.PerCPU, r.PerGiB, r.PerDiskGiB, lo.FromPtr(r.PerAccelerator)} {
		if !isPrice(rate) {
			errs = append(errs, fmt.Errorf("%v is not a rate; write a number, 0 or more", rate))
		}
	}
	return errs
}

// price returns the price per hour of a machine as described after the instance type.
func (r FlatRates) price(description string) (float64, error) {
	if amount, period, found := strings.Cut(description, "/"); found && !strings.Contains(description, "=") {
		price, err := strconv.ParseFloat(amount, 64)
		if err != nil || !isPrice(price) || hours[period] == 0 {
			return 0, fmt.Errorf("%q is not a price; write for example 900/month, or a price per hour or year", description)
		}
		return price / hours[period], nil
	}
	resources := corev1.ResourceList{}
	for part := range strings.SplitSeq(description, ",") {
		name, amount, _ := strings.Cut(part, "=")
		known := slices.Contains([]string{string(corev1.ResourceCPU), string(corev1.ResourceMemory), string(corev1.ResourceEphemeralStorage)}, name)
		if !known && (!strings.Contains(name, "/") || len(validation.IsQualifiedName(name)) > 0) {
			return 0, fmt.Errorf("%q is not a resource; write cpu, memory, ephemeral-storage or an extended resource, for example nvidia.com/gpu", name)
		}
		quantity, err := wire.Quantity(amount)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		resources[corev1.ResourceName(name)] = quantity
	}
	if resources.Cpu().IsZero() || resources.Memory().IsZero() {
		return 0, errors.New("cpu and memory are required; write for example large=cpu=8,memory=32Gi")
	}
	price := r.PerMachine + r.PerCPU*resources.Cpu().AsApproximateFloat64() + r.PerGiB*gibibytes(*resources.Memory()) +
		r.PerDiskGiB*gibibytes(*resources.StorageEphemeral())
	for name, quantity := range resources {
		if !isExtended(name) {
			continue
		}
		if r.PerAccelerator == nil {
			return 0, fmt.Errorf("there is no rate for %s; give --per-gpu, 0 if it costs nothing", name)
		}
		price += *r.PerAccelerator * quantity.AsApproximateFloat64()
	}
	if price == 0 {
		return 0, errors.New("its price would be 0; give rates, or the price itself, for example large=0/hour")
	}
	return price, nil
}

func gibibytes(quantity resource.Quantity) float64 {
	return quantity.AsApproximateFloat64() / (1 << 30)
}
