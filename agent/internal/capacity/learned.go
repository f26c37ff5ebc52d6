package capacity

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Learned is what is known from the real Nodes of a group: the minimum of their capacity and
// allocatable, and the maximum of their overhead. The zero value means that none was seen.
type Learned struct {
	Capacity, Allocatable, Overhead corev1.ResourceList
	// Labels are the [LearnedLabels] whose values all Nodes share. Zone and region are only used
	// to detect contradictions.
	Labels map[string]string
}

// LearnedLabels are the labels of Nodes that are evaluated.
var LearnedLabels = []string{corev1.LabelArchStable, corev1.LabelOSStable, corev1.LabelTopologyZone, corev1.LabelTopologyRegion}

// learnedSource does not name a Node: a source that changed with every Node would change the group
// each time.
var learnedSource = Source{FromNodes, "the group's Nodes"}

// Tolerance is the fraction by which the described memory or disk may exceed what the Node reports
// before that is a problem. Firmware, the kernel and the filesystem reserve some of it.
const Tolerance = 0.1

func tolerates(name corev1.ResourceName) bool {
	return name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage
}

// learnedResources adds resources that Nodes reported and no other source described. It reports
// descriptions that exceed what Nodes reported, and determines the overhead.
func (d *describer) learnedResources() {
	for _, name := range slices.Sorted(maps.Keys(d.learned.Capacity)) {
		shown := d.learned.Capacity[name]
		described, known := d.Resources[name]
		if !known {
			if name != d.without {
				d.resource(name, shown, learnedSource)
			}
			continue
		}
		if promisesMore(name, described, shown) {
			source := d.Sources["capacity."+string(name)]
			field := source.Detail + "[" + string(name) + "]"
			if source.Kind == FromAnnotation {
				field = AnnotationField(source.Detail)
			}
			d.problem(field, described.String(), "is more than the %s that Nodes of the group report; write their value, or remove it to have it learned",
				shown.String())
		}
	}
	for name, kept := range d.learned.Overhead {
		// If the description exceeds the real capacity, the difference is not available to pods
		// either.
		missing := d.Resources[name].DeepCopy()
		missing.Sub(d.learned.Allocatable[name])
		if described := d.Resources[name]; described.Cmp(d.learned.Capacity[name]) > 0 && missing.Cmp(kept) > 0 {
			kept = missing
		}
		if d.Overhead == nil {
			d.Overhead = corev1.ResourceList{}
		}
		d.Overhead[name] = kept
		d.Sources["overhead."+string(name)] = learnedSource
	}
}

func promisesMore(name corev1.ResourceName, described, shown resource.Quantity) bool {
	if tolerates(name) {
		return described.AsApproximateFloat64() > (1+Tolerance)*shown.AsApproximateFloat64()
	}
	return described.Cmp(shown) > 0
}

func (d *describer) learnedLabel(key string) candidate {
	return candidate{d.learned.Labels[key], learnedSource, "Nodes " + key}
}

// contradictedLabel reports a description whose zone, region, architecture or operating system
// differs from that of all Nodes.
func (d *describer) contradictedLabel(field, label, value string) {
	shown := d.learned.Labels[label]
	if shown == "" || shown == value || !slices.Contains(LearnedLabels, label) || strings.HasPrefix(field, "Nodes ") {
		return
	}
	instead := "write their value, or remove it to have it learned"
	if label == corev1.LabelTopologyZone || label == corev1.LabelTopologyRegion {
		instead = "write their value, or remove it if it differs from Node to Node"
	}
	d.problem(field, value, "is not the %s %q that Nodes of the group report; %s", label, shown, instead)
}
