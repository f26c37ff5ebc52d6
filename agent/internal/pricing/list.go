package pricing

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
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
	prices   map[string][]listed // by instance type, the most specific first
	length   int
}

// selector is what a price applies to. An empty field matches all.
type selector struct {
	instanceType, cluster, zone, region, infrastructure, capacityType string
}

type listed struct {
	selector

	perHour float64
}

// entry is a price as written by the user.
type entry struct {
	InstanceType   string   `json:"instanceType"`
	Cluster        string   `json:"cluster"`
	Zone           string   `json:"zone"`
	Region         string   `json:"region"`
	Infrastructure string   `json:"infrastructure"`
	CapacityType   string   `json:"capacityType"`
	PerHour        *float64 `json:"perHour"`
}

func (e entry) selector() selector {
	return selector{e.InstanceType, e.Cluster, e.Zone, e.Region, e.Infrastructure, e.CapacityType}
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
		return nil, fmt.Errorf("it does not have the form of a price list: %w", err)
	}
	errs := unknown
	if file.Currency != "" && !IsCurrency(file.Currency) {
		errs = append(errs, fmt.Errorf("currency: %q is not an ISO 4217 code; write for example EUR", file.Currency))
	}
	list := &List{Name: name, currency: file.Currency, prices: make(map[string][]listed, len(file.Prices))}
	indexes := make(map[selector]int, len(file.Prices))
	for i, e := range file.Prices {
		field := fmt.Sprintf("prices[%d]", i)
		errs = append(errs, e.faults(field)...)
		if first, twice := indexes[e.selector()]; twice {
			errs = append(errs, fmt.Errorf("%s: is for the same machines as prices[%d]; remove one", field, first))
			continue
		}
		indexes[e.selector()] = i
		perHour := 0.0
		if e.PerHour != nil {
			perHour = *e.PerHour
		}
		list.prices[e.InstanceType] = append(list.prices[e.InstanceType], listed{e.selector(), perHour})
		list.length++
	}
	for _, entries := range list.prices {
		slices.SortStableFunc(entries, func(a, b listed) int { return b.precedence(a.selector) })
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
	for name, value := range map[string]string{"instanceType": e.InstanceType, "zone": e.Zone, "region": e.Region} {
		if faults := validation.IsValidLabelValue(value); len(faults) > 0 {
			wrong(name, "%.128q cannot be one: %s", value, strings.Join(faults, "; "))
		}
	}
	if e.Cluster != "" && !clusterPattern.MatchString(e.Cluster) {
		wrong("cluster", "%.128q is not a Cluster; write <namespace>/<name>, in which * matches any characters, for example team-a/*", e.Cluster)
	}
	if e.Infrastructure != "" && !kindName.MatchString(e.Infrastructure) {
		wrong("infrastructure", "%.128q is not a kind; write the kind of the infrastructure objects, for example Metal3Machine", e.Infrastructure)
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
	return l.length
}

// String describes the size of the list, for display.
func (l *List) String() string { return fmt.Sprintf("%d prices", l.Len()) }

// price looks up the price of a machine: that of the most specific entry that matches.
func (l *List) price(machine selector) (Price, bool) {
	if l == nil {
		return Price{}, false
	}
	for _, candidate := range l.prices[machine.instanceType] {
		if candidate.matches(machine) {
			return Price{
				PerHour: candidate.perHour, Currency: l.currency,
				Source: capacity.Source{Kind: capacity.FromPriceList, Detail: l.Name + " " + candidate.describe()},
			}, true
		}
	}
	return Price{}, false
}

// selectorOf returns the only selector that matches no other machines than those of a group.
func selectorOf(md *clusterv1.MachineDeployment, machine capacity.Description) selector {
	return selector{
		instanceType: machine.InstanceType, cluster: md.Namespace + "/" + md.Spec.ClusterName, zone: machine.Zone, region: machine.Region,
		infrastructure: strings.TrimSuffix(md.Spec.Template.Spec.InfrastructureRef.Kind, "Template"), capacityType: machine.CapacityType,
	}
}

// fields returns the fields after the instance type, those that count more first.
func (s selector) fields() []string {
	return []string{s.cluster, s.zone, s.region, s.infrastructure, s.capacityType}
}

// matches reports whether the entry applies to a machine.
func (s selector) matches(machine selector) bool {
	for i, wanted := range s.fields() {
		if wanted != "" && wanted != machine.fields()[i] && (i > 0 || !matchesCluster(wanted, machine.cluster)) {
			return false
		}
	}
	return s.instanceType == machine.instanceType
}

// precedence returns a positive number if the selector counts more than another one, a negative
// number if it counts less, and never 0 for two different ones. The first field in which only one
// has a value decides; of two patterns of Clusters, the one without an asterisk or the longer one.
func (s selector) precedence(other selector) int {
	for i, ours := range s.fields() {
		theirs := other.fields()[i]
		if order := cmp.Compare(min(len(ours), 1), min(len(theirs), 1)); order != 0 {
			return order
		}
		if i > 0 || ours == theirs {
			continue
		}
		return cmp.Or(
			cmp.Compare(strings.Count(theirs, "*"), strings.Count(ours, "*")), cmp.Compare(len(ours), len(theirs)), cmp.Compare(ours, theirs),
		)
	}
	return 0
}

// These are the forms of a Cluster, in which * matches any characters within either part, and of a
// kind.
var (
	clusterPattern = regexp.MustCompile(`^[a-z0-9.*-]+/[a-z0-9.*-]+$`)
	kindName       = regexp.MustCompile(`^[A-Z][A-Za-z0-9]*$`)
)

// matchesCluster reports whether a pattern that has been validated matches a Cluster.
func matchesCluster(pattern, cluster string) bool {
	matched, err := path.Match(pattern, cluster)
	return err == nil && matched
}

// describe identifies the entry in a way that does not change when entries are inserted before it.
func (s selector) describe() string {
	parts := []string{"instanceType=" + s.instanceType}
	for i, name := range []string{"cluster", "zone", "region", "infrastructure", "capacityType"} {
		if value := s.fields()[i]; value != "" {
			parts = append(parts, name+"="+value)
		}
	}
	return strings.Join(parts, ",")
}
