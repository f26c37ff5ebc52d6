package instancetype

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"unique"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// attributeType is the attribute in which the autoscaler's Cluster API provider publishes the kind
// of a device.
const attributeType resourcev1.QualifiedName = "type"

// DeviceKind is a kind of device that a DRA driver offers. Kind may be empty.
type DeviceKind struct{ Driver, Kind string }

func sortedKinds(devices map[DeviceKind]int) []DeviceKind {
	return slices.SortedFunc(maps.Keys(devices), func(a, b DeviceKind) int {
		return cmp.Or(cmp.Compare(a.Driver, b.Driver), cmp.Compare(a.Kind, b.Kind))
	})
}

// volumesOf returns the valid volume limits, and an error that names the invalid ones.
func volumesOf(source *agentv1alpha1.NodeGroup) (map[string]int, error) {
	var errs []error
	volumes := map[string]int{}
	for driver, limit := range source.GetAttachableVolumes() {
		if driver == "" || limit < 0 {
			errs = append(errs, fmt.Errorf("attachable volumes of %.64q: %d is not a limit", driver, limit))
			continue
		}
		volumes[driver] = int(limit)
	}
	return volumes, errors.Join(errs...)
}

// devicesOf returns the valid devices, and an error that names the invalid ones. Counts are limited
// to the size of a ResourceSlice, because core plans with one slice per driver.
func devicesOf(source *agentv1alpha1.NodeGroup) (map[DeviceKind]int, error) {
	var errs []error
	devices := map[DeviceKind]int{}
	for _, device := range source.GetDevices() {
		kind := DeviceKind{Driver: device.GetDriver(), Kind: device.GetKind()}
		if problems := validation.IsDNS1123Subdomain(kind.Driver); len(problems) > 0 || device.GetCount() < 0 {
			errs = append(errs, fmt.Errorf("%d devices of driver %.64q cannot be", device.GetCount(), kind.Driver))
			continue
		}
		if len(kind.Kind) > resourcev1.DeviceAttributeMaxValueLength {
			errs = append(errs, fmt.Errorf("devices of driver %s: the kind %.64q… is too long", kind.Driver, kind.Kind))
			continue
		}
		if count := min(int(device.GetCount()), resourcev1.ResourceSliceMaxDevices); count > 0 {
			devices[kind] = count
		}
	}
	return devices, errors.Join(errs...)
}

// leastDevices returns the minimum count of each kind of device over all groups.
func leastDevices(groups []*Group) map[DeviceKind]int {
	least := maps.Clone(groups[0].Devices)
	for _, g := range groups[1:] {
		for kind, count := range least {
			if least[kind] = min(count, g.Devices[kind]); least[kind] == 0 {
				delete(least, kind)
			}
		}
	}
	return least
}

// sliceTemplates describes devices as the autoscaler's Cluster API provider does, with the one
// attribute that is known. Core uses them only with --ignore-dra-requests=false.
func sliceTemplates(devices map[DeviceKind]int) []*cloudprovider.ResourceSliceTemplate {
	byDriver := map[string]*cloudprovider.ResourceSliceTemplate{}
	var templates []*cloudprovider.ResourceSliceTemplate
	for _, kind := range sortedKinds(devices) {
		template, ok := byDriver[kind.Driver]
		if !ok {
			driver := unique.Make(kind.Driver)
			template = &cloudprovider.ResourceSliceTemplate{Driver: driver, Pool: cloudprovider.ResourcePool{Name: driver}}
			byDriver[kind.Driver] = template
			templates = append(templates, template)
		}
		for range devices[kind] {
			device := cloudprovider.Device{Name: unique.Make("device-" + strconv.Itoa(len(template.Devices)))}
			if kind.Kind != "" {
				device.Attributes = map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{attributeType: {StringValue: new(kind.Kind)}}
			}
			template.Devices = append(template.Devices, device)
		}
	}
	return templates
}
