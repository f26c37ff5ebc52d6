package pricing

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

// currency matches the format of ISO 4217 codes.
var currency = regexp.MustCompile(`^[A-Z]{3}$`)

// IsCurrency reports whether a text has the format of an ISO 4217 code.
func IsCurrency(text string) bool { return currency.MatchString(text) }

// List is an immutable price list. Nil is an empty list.
type List struct {
	// Name identifies the list, for display.
	Name string

	currency string
	prices   map[machineKind]listed
}

// machineKind is what a price applies to. An empty zone or capacity type matches all.
type machineKind struct {
	instanceType, zone, capacityType string
}

type listed struct {
	perHour float64
	index   int
}

// entry is a price as written by the user.
type entry struct {
	InstanceType string   `json:"instanceType"`
	Zone         string   `json:"zone"`
	CapacityType string   `json:"capacityType"`
	PerHour      *float64 `json:"perHour"`
}

// ParseList parses a price list. The error lists every unusable field. A list with such a field is
// rejected as a whole, because half of the prices can be worse than none.
func ParseList(name string, content []byte) (*List, error) {
	document, err := yaml.YAMLToJSONStrict(content)
	if err != nil {
		return nil, fmt.Errorf("it is not YAML: %w", err)
	}
	var file struct {
		Currency string  `json:"currency"`
		Prices   []entry `json:"prices"`
	}
	unknown, err := kjson.UnmarshalStrict(document, &file)
	if err != nil {
		return nil, fmt.Errorf("it has not the form of a price list: %w", err)
	}
	errs := unknown
	if file.Currency != "" && !IsCurrency(file.Currency) {
		errs = append(errs, fmt.Errorf("currency: %q is not an ISO 4217 code; write for example EUR", file.Currency))
	}
	list := &List{Name: name, currency: file.Currency, prices: make(map[machineKind]listed, len(file.Prices))}
	for i, e := range file.Prices {
		field := fmt.Sprintf("prices[%d]", i)
		errs = append(errs, e.faults(field)...)
		kind := machineKind{e.InstanceType, e.Zone, e.CapacityType}
		if first, twice := list.prices[kind]; twice {
			errs = append(errs, fmt.Errorf("%s: is for the same machines as prices[%d]; remove one", field, first.index))
			continue
		}
		perHour := 0.0
		if e.PerHour != nil {
			perHour = *e.PerHour
		}
		list.prices[kind] = listed{perHour, i}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return list, nil
}

func (e entry) faults(field string) []error {
	var errs []error
	wrong := func(name, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s.%s: %s", field, name, fmt.Sprintf(format, args...)))
	}
	if e.InstanceType == "" {
		wrong("instanceType", "is missing; write the instance type of node groups")
	}
	for name, value := range map[string]string{"instanceType": e.InstanceType, "zone": e.Zone} {
		if faults := validation.IsValidLabelValue(value); len(faults) > 0 {
			wrong(name, "%.128q cannot be one: %s", value, strings.Join(faults, "; "))
		}
	}
	if e.CapacityType != "" {
		if _, err := wire.ParseCapacityType(e.CapacityType); err != nil {
			wrong("capacityType", "%v", err)
		}
	}
	switch {
	case e.PerHour == nil:
		wrong("perHour", "is missing; write a number, 0 or more, for example 0.096")
	case !isPrice(*e.PerHour) || math.IsNaN(*e.PerHour):
		wrong("perHour", "%v is not a price; write a number, 0 or more, for example 0.096", *e.PerHour)
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errs
}

// Len returns the number of prices.
func (l *List) Len() int {
	if l == nil {
		return 0
	}
	return len(l.prices)
}

// String describes the size of the list, for display.
func (l *List) String() string { return fmt.Sprintf("%d prices", l.Len()) }

// price looks up the price of a machine. It tries the entry with the machine's zone and capacity
// type, then with the zone only, then with the capacity type only, then with neither.
func (l *List) price(machine capacity.Description) (Price, bool) {
	if l == nil {
		return Price{}, false
	}
	for _, kind := range []machineKind{
		{machine.InstanceType, machine.Zone, machine.CapacityType},
		{machine.InstanceType, machine.Zone, ""},
		{machine.InstanceType, "", machine.CapacityType},
		{machine.InstanceType, "", ""},
	} {
		if found, ok := l.prices[kind]; ok {
			return Price{
				PerHour: found.perHour, Currency: l.currency,
				Source: capacity.Source{Kind: capacity.FromPriceList, Detail: l.Name + " " + kind.describe()},
			}, true
		}
	}
	return Price{}, false
}

// describe identifies the entry in a way that does not change when entries are inserted before it.
func (k machineKind) describe() string {
	text := "instanceType=" + k.instanceType
	if k.zone != "" {
		text += ",zone=" + k.zone
	}
	if k.capacityType != "" {
		text += ",capacityType=" + k.capacityType
	}
	return text
}
