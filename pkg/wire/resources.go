package wire

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
)

// maxQuantityLength and maxExponent limit what is parsed. A quantity such as `1e1000000000` is
// short and valid, but calculating with it uses gigabytes of memory.
const (
	maxQuantityLength = 64
	maxExponent       = 24
)

// maxNamed is how many unusable quantities an error names. A report of Nodes can have a million.
const maxNamed = 8

// ResourceList converts quantities in Kubernetes notation, by resource name. It returns the usable
// quantities, which are never nil, and an error that names the keys whose quantities are negative
// or cannot be parsed, at most the first [maxNamed].
func ResourceList(quantities map[string]string) (corev1.ResourceList, error) {
	list := make(corev1.ResourceList, len(quantities))
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(quantities)) {
		quantity, err := Quantity(quantities[name])
		if err != nil {
			if len(errs) < maxNamed {
				errs = append(errs, fmt.Errorf("resource %q: %w", name, err))
			}
			continue
		}
		list[corev1.ResourceName(name)] = quantity
	}
	return list, errors.Join(errs...)
}

// Quantity parses an amount in Kubernetes notation, for example `4`, `500m` or `16Gi`. Negative
// amounts are rejected. Amounts above the largest int64 are capped, as Kubernetes does.
func Quantity(s string) (resource.Quantity, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return resource.Quantity{}, errors.New("the quantity is empty")
	}
	if len(s) > maxQuantityLength || exponent(s) > maxExponent {
		return resource.Quantity{}, fmt.Errorf("%.64q is not a quantity that a machine can have", s)
	}
	quantity, err := resource.ParseQuantity(s)
	if err != nil {
		return resource.Quantity{}, fmt.Errorf("%q is not a quantity (write for example 4, 500m or 16Gi): %w", s, err)
	}
	if quantity.Sign() < 0 {
		return resource.Quantity{}, fmt.Errorf("%q is negative", s)
	}
	if quantity.Cmp(largest) > 0 {
		return largest.DeepCopy(), nil
	}
	return quantity, nil
}

// largest is the limit that Kubernetes applies, except to numbers with leading zeros.
var largest = *resource.NewQuantity(math.MaxInt64, resource.DecimalSI)

// exponent returns the absolute value of the decimal exponent in s, or 0 if there is none.
func exponent(s string) int {
	i := strings.IndexAny(s, "eE")
	if i < 0 || i == len(s)-1 {
		return 0 // `E` alone is the suffix exa
	}
	n, err := strconv.Atoi(s[i+1:])
	switch {
	case errors.Is(err, strconv.ErrRange):
		return maxExponent + 1
	case err != nil:
		return 0 // a suffix such as `Ei`, or no number, which the parser reports better
	}
	return max(n, -n)
}

// Quantities converts a resource list to quantities in Kubernetes notation. It returns nil for an
// empty list.
func Quantities(list corev1.ResourceList) map[string]string {
	if len(list) == 0 {
		return nil
	}
	quantities := make(map[string]string, len(list))
	for name, quantity := range list {
		quantities[string(name)] = quantity.String()
	}
	return quantities
}
