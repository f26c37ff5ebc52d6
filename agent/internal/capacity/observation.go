package capacity

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Observation is what real Nodes of a group showed: of all of them the least that each has and can give, and the most that
// each keeps back. The zero value means that none was seen.
type Observation struct {
	Capacity, Allocatable, Overhead corev1.ResourceList
	// Labels are those of [ObservedLabels] that all of the Nodes agree on. Those for zone and region only contradict.
	Labels map[string]string
}

// ObservedLabels are the labels that are looked at on Nodes.
var ObservedLabels = []string{corev1.LabelArchStable, corev1.LabelOSStable, corev1.LabelTopologyZone, corev1.LabelTopologyRegion}

// observedSource is not more exact: a source that changed with every Node would be a change of the group.
var observedSource = Source{FromNodes, "the group's Nodes"}

// Tolerance is by which share a machine may be described with more memory or disk than its Node shows before that is a
// problem: firmware, the kernel and the filesystem keep some for themselves.
const Tolerance = 0.1

func tolerates(name corev1.ResourceName) bool {
	return name == corev1.ResourceMemory || name == corev1.ResourceEphemeralStorage
}

// learnedResources adds what Nodes showed and nobody described, says where a description promises more than that, and finds
// the overhead.
func (d *describer) learnedResources() {
	for name, shown := range d.observed.Capacity {
		described, known := d.Resources[name]
		if !known {
			d.resource(name, shown, observedSource)
			continue
		}
		if promisesMore(name, described, shown) {
			source := d.Sources["capacity."+string(name)]
			field := source.Detail + "[" + string(name) + "]"
			if source.Kind == FromAnnotation {
				field = AnnotationField(source.Detail)
			}
			d.problem(field, described.String(), "is more than the %s that Nodes of the group show; write what they have, or nothing to learn it",
				shown.String())
		}
	}
	for name, kept := range d.observed.Overhead {
		// Where more is described than there is, the difference is not there for pods either.
		missing := d.Resources[name].DeepCopy()
		missing.Sub(d.observed.Allocatable[name])
		if described := d.Resources[name]; described.Cmp(d.observed.Capacity[name]) > 0 && missing.Cmp(kept) > 0 {
			kept = missing
		}
		if d.Overhead == nil {
			d.Overhead = corev1.ResourceList{}
		}
		d.Overhead[name] = kept
		d.Sources["overhead."+string(name)] = observedSource
	}
}

func promisesMore(name corev1.ResourceName, described, shown resource.Quantity) bool {
	if tolerates(name) {
		return described.AsApproximateFloat64() > (1+Tolerance)*shown.AsApproximateFloat64()
	}
	return described.Cmp(shown) > 0
}

func (d *describer) learnedLabel(key string) candidate {
	return candidate{d.observed.Labels[key], observedSource, "Nodes " + key}
}

// contradictedLabel says where a description names another zone, region, architecture or operating system than all Nodes do.
func (d *describer) contradictedLabel(field, label, value string) {
	shown := d.observed.Labels[label]
	if shown == "" || shown == value || !slices.Contains(ObservedLabels, label) || strings.HasPrefix(field, "Nodes ") {
		return
	}
	instead := "write what they have, or nothing to learn it"
	if label == corev1.LabelTopologyZone || label == corev1.LabelTopologyRegion {
		instead = "write what they have, or nothing if it may be another one each time"
	}
	d.problem(field, value, "is not the %s %q that Nodes of the group show; %s", label, shown, instead)
}
