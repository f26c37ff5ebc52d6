// Package capacity derives the properties of a MachineDeployment's future machines, from what users
// and providers have specified.
//
// Each value comes from the first source that has it: the MachineDeployment's annotations, its
// machine template, the status of the infrastructure template, the group's real Nodes, a default.
// An unusable value is reported as a [Problem], and the next source is tried. No user input causes
// an error here.
package capacity

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capilabels "sigs.k8s.io/cluster-api/util/labels"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

// These are annotations of a MachineDeployment, with the same keys that cluster-autoscaler reads.
const (
	prefix              = "capacity.cluster-autoscaler.kubernetes.io/"
	CPUAnnotation       = prefix + "cpu"
	MemoryAnnotation    = prefix + "memory"
	DiskAnnotation      = prefix + "ephemeral-disk"
	MaxPodsAnnotation   = prefix + "maxPods"
	GPUTypeAnnotation   = prefix + "gpu-type"
	GPUCountAnnotation  = prefix + "gpu-count"
	LabelsAnnotation    = prefix + "labels"
	TaintsAnnotation    = prefix + "taints"
	CSIDriverAnnotation = prefix + "csi-driver"
	DRADriverAnnotation = prefix + "dra-driver"
	defaultPods         = 110
	defaultOS           = "linux"
)

// DefaultArchitecture is assumed if no source has an architecture and no other default is set.
const DefaultArchitecture = "amd64"

// SourceKind is the kind of source that a value came from.
type SourceKind string

// These are the kinds of sources.
const (
	FromAnnotation             SourceKind = "Annotation"
	FromMachineTemplate        SourceKind = "MachineTemplate"
	FromInfrastructureTemplate SourceKind = "InfrastructureTemplate"
	FromNodes                  SourceKind = "Learned"
	FromPriceList              SourceKind = "PriceList"
	FromEstimate               SourceKind = "Estimate"
	FromDefault                SourceKind = "Default"
)

// Source identifies where a value came from.
type Source struct {
	Kind SourceKind
	// Detail identifies the source within its kind, for display: the annotation's key, or the
	// template's kind and name.
	Detail string
}

// Problem is a value that cannot be used.
type Problem struct {
	// Field is the path of the value in the user's object, for example
	// `metadata.annotations[capacity.cluster-autoscaler.kubernetes.io/cpu]`.
	Field string
	// Value is the value as the user wrote it, which may have 256 KiB.
	Value string
	// Message states what is wrong and what to write instead.
	Message string
}

// Description describes a future machine.
type Description struct {
	// InstanceType is a valid label value and never empty.
	InstanceType string
	// Resources is the machine's total capacity, before any overhead. It is never nil.
	Resources corev1.ResourceList
	// Overhead is the part of Resources that is not available to pods on real Nodes. It is nil
	// until a Node has been seen. Of CPU, memory, disk and pods, Resources minus Overhead never
	// exceeds what the Nodes seen could provide. Devices are not learned this way: one that failed
	// on a single Node would be missing from the machines to come.
	Overhead corev1.ResourceList
	// AttachableVolumes are the limits of CSI drivers, by driver name. A missing driver has no
	// known limit.
	AttachableVolumes map[string]int32
	// Devices are the devices that the machine offers through dynamic resource allocation, by
	// driver.
	Devices []Devices
	// Labels and Taints are those of the future Node.
	Labels map[string]string
	Taints []corev1.Taint
	// Architecture and OperatingSystem are never empty.
	Architecture, OperatingSystem string
	// Zone and Region may be empty.
	Zone, Region string
	// CapacityType is one of the constants of package wire, and never empty.
	CapacityType string
	// Sources has an entry for each value, by the path of its field: `capacity.cpu`,
	// `node_labels.team`, `zone`, ….
	Sources map[string]Source
	// Problems are the values that cannot be used, in a stable order. If there are more than 32, a
	// last one states how many more.
	Problems []Problem
}

// Devices are the devices that a machine offers through one driver for dynamic resource allocation.
type Devices struct {
	Driver string
	Count  int32
	// Kind is the user's name for the devices. It may be empty.
	Kind string
}

// Template is an infrastructure template, or the reason why it could not be read.
type Template struct {
	// Object is the template, or nil if it could not be read.
	Object *unstructured.Unstructured
	// Problem is set if the template could not be read.
	Problem *Problem
}

// Settings apply to all MachineDeployments.
type Settings struct {
	// SyncedLabels are the patterns that Cluster API's manager was given for labels that it copies
	// to Nodes in addition to its own.
	SyncedLabels []*regexp.Regexp
	// Architecture is assumed if no source has one. Empty means [DefaultArchitecture].
	Architecture string
}

// Describe derives the description. It only reads its arguments, and retains none of them.
func Describe(md *clusterv1.MachineDeployment, template Template, learned Learned, settings Settings) Description {
	d := &describer{
		md: md, template: template, learned: learned, settings: settings,
		Description: Description{Resources: corev1.ResourceList{}, Labels: map[string]string{}, Sources: map[string]Source{}},
	}
	if template.Problem != nil {
		d.Problems = append(d.Problems, *template.Problem)
	}
	d.labels()
	d.resources()
	d.attachments()
	d.taints()
	d.placement()
	d.kind()
	slices.SortFunc(d.Problems, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.Field, b.Field), strings.Compare(a.Value, b.Value), strings.Compare(a.Message, b.Message))
	})
	if d.further > 0 {
		d.Problems = append(d.Problems, Problem{
			Field: "metadata.annotations", Message: fmt.Sprintf("there are %d further problems; correct these first", d.further),
		})
	}
	return d.Description
}

type describer struct {
	Description

	md       *clusterv1.MachineDeployment
	template Template
	learned  Learned
	settings Settings
	// without is the resource that an annotation says the machines have none of, "" for none.
	without corev1.ResourceName
	// further is how many problems are not in Problems.
	further int
}

// An annotation may have 256 KiB, and a template more. A machine has few labels, taints and
// resources.
const (
	maxEntries  = 256 // of a list or map
	maxProblems = 32
	maxText     = 512 // characters of a field or a message
)

func (d *describer) problem(field, value, format string, args ...any) {
	if len(d.Problems) >= maxProblems {
		d.further++
		return
	}
	d.Problems = append(d.Problems, Problem{
		Field:   lo.Substring(field, 0, maxText),
		Value:   value,
		Message: lo.Substring(fmt.Sprintf(format, args...), 0, maxText),
	})
}

// entries are those of an annotation that is a comma-separated list.
func (d *describer) entries(annotation string) iter.Seq[string] {
	return func(yield func(string) bool) {
		n := 0
		for entry := range strings.SplitSeq(d.md.Annotations[annotation], ",") {
			if entry = strings.TrimSpace(entry); entry == "" {
				continue
			}
			if n++; n > maxEntries {
				d.problem(AnnotationField(annotation), "", "has more than %d entries; the others are not used", maxEntries)
				return
			}
			if !yield(entry) {
				return
			}
		}
	}
}

// sortedKeys are the keys of a map, if it does not have too many. Their order decides which
// problems are shown.
func sortedKeys[V any](d *describer, field string, entries map[string]V) []string {
	if len(entries) > maxEntries {
		d.problem(field, "", "has %d entries, and a machine has at most %d; none of them is used", len(entries), maxEntries)
		return nil
	}
	return slices.Sorted(maps.Keys(entries))
}

// AnnotationField returns the Field of a [Problem] with an annotation.
func AnnotationField(key string) string { return "metadata.annotations[" + key + "]" }

func fromAnnotation(key string) Source { return Source{FromAnnotation, key} }

func (d *describer) fromTemplate(path string) Source {
	return Source{FromInfrastructureTemplate, d.template.Object.GetKind() + "/" + d.template.Object.GetName() + " " + path}
}

// labels determines the labels of the Node: those of the machine template that Cluster API copies,
// and those of the annotation.
func (d *describer) labels() {
	managed := capilabels.GetManagedLabels(d.md.Spec.Template.Labels, d.settings.SyncedLabels...)
	for _, key := range sortedKeys(d, "spec.template.metadata.labels", managed) {
		value := managed[key]
		if key == clusterv1.ClusterNameLabel || key == clusterv1.MachineDeploymentNameLabel {
			continue
		}
		if faults := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); len(faults) > 0 {
			d.problem("spec.template.metadata.labels["+key+"]", value, "is not a label: %s", strings.Join(faults, "; "))
			continue
		}
		d.label(key, value, Source{FromMachineTemplate, "spec.template.metadata.labels"})
	}
	field := AnnotationField(LabelsAnnotation)
	for part := range d.entries(LabelsAnnotation) {
		key, value, found := strings.Cut(part, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		faults := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...)
		if !found {
			faults = []string{"it has no ="}
		}
		if len(faults) > 0 {
			d.problem(field, part, "is not a label: %s; write key=value,key=value", strings.Join(faults, "; "))
			continue
		}
		d.label(key, value, fromAnnotation(LabelsAnnotation))
	}
}

func (d *describer) label(key, value string, source Source) {
	d.Labels[key] = value
	d.Sources["node_labels."+key] = source
}

// resources determines the capacity. Annotations override the status of the infrastructure
// template, which overrides what Nodes reported.
func (d *describer) resources() {
	d.templateResources()
	for _, r := range []struct {
		annotation string
		name       corev1.ResourceName
		whole      bool
		example    string
	}{
		{CPUAnnotation, corev1.ResourceCPU, false, "4 or 3500m"},
		{MemoryAnnotation, corev1.ResourceMemory, false, "16Gi"},
		{DiskAnnotation, corev1.ResourceEphemeralStorage, false, "100Gi"},
		{MaxPodsAnnotation, corev1.ResourcePods, true, "110"},
	} {
		if quantity, ok := d.quantity(r.annotation, r.whole, r.example); ok {
			d.resource(r.name, quantity, fromAnnotation(r.annotation))
		}
	}
	d.accelerators()
	d.otherResources()
	d.learnedResources()
	if _, known := d.Resources[corev1.ResourcePods]; !known {
		d.resource(corev1.ResourcePods, *resource.NewQuantity(defaultPods, resource.DecimalSI), Source{FromDefault, "the kubelet's default"})
	}
	for name, annotation := range map[corev1.ResourceName]string{corev1.ResourceCPU: CPUAnnotation, corev1.ResourceMemory: MemoryAnnotation} {
		if quantity := d.Resources[name]; quantity.IsZero() && !d.reported(AnnotationField(annotation)) {
			d.problem(AnnotationField(annotation), "",
				"is missing, and the infrastructure template's status.capacity does not have it; without it nothing can be scheduled on this node group")
		}
	}
}

func (d *describer) reported(field string) bool {
	return slices.ContainsFunc(d.Problems, func(p Problem) bool { return p.Field == field })
}

func (d *describer) resource(name corev1.ResourceName, quantity resource.Quantity, source Source) {
	d.Resources[name] = quantity
	d.Sources["capacity."+string(name)] = source
}

// quantity parses an annotation whose value must be positive.
func (d *describer) quantity(annotation string, whole bool, example string) (resource.Quantity, bool) {
	text, ok := d.md.Annotations[annotation]
	if !ok {
		return resource.Quantity{}, false
	}
	quantity, err := wire.Quantity(text)
	switch {
	case err != nil:
		d.problem(AnnotationField(annotation), text, "%v; write for example %s", err, example)
		return resource.Quantity{}, false
	case quantity.IsZero():
		d.problem(AnnotationField(annotation), text, "is zero; write for example %s", example)
		return resource.Quantity{}, false
	}
	if n, exact := quantity.AsInt64(); whole && (!exact || n < 1) {
		d.problem(AnnotationField(annotation), text, "is not a whole number; write for example %s", example)
		return resource.Quantity{}, false
	}
	return quantity, true
}

// accelerators reads the number of accelerators, as an extended resource (gpu-type), as devices of
// a driver for dynamic resource allocation (dra-driver), or as both.
func (d *describer) accelerators() {
	kind, hasKind := d.md.Annotations[GPUTypeAnnotation]
	driver, hasDriver := d.md.Annotations[DRADriverAnnotation]
	text, hasCount := d.md.Annotations[GPUCountAnnotation]
	if !hasKind && !hasDriver && !hasCount {
		return
	}
	kind, driver = strings.TrimSpace(kind), strings.TrimSpace(driver)
	if strings.TrimSpace(text) == "0" { // it declares that there are none, whatever the template and Nodes say
		if strings.Contains(kind, "/") {
			d.without = corev1.ResourceName(kind)
			delete(d.Resources, d.without)
			delete(d.Sources, "capacity."+kind)
		}
		return
	}
	var count resource.Quantity
	usable := false
	if hasCount {
		count, usable = d.quantity(GPUCountAnnotation, true, "1")
	} else {
		beside := map[bool]string{true: "gpu-type", false: "dra-driver"}[hasKind]
		d.problem(AnnotationField(GPUCountAnnotation), "", "is missing beside %s; write how many, for example 1", beside)
	}
	if hasCount && !hasKind && !hasDriver {
		d.problem(AnnotationField(GPUTypeAnnotation), "", "is missing beside gpu-count; write a resource name, for example nvidia.com/gpu")
	}
	if hasKind && d.resourceName(kind) && usable {
		d.resource(corev1.ResourceName(kind), count, fromAnnotation(GPUCountAnnotation))
	}
	if hasDriver && d.driverName(DRADriverAnnotation, driver, driver, "write one driver's name, for example gpu.nvidia.com") && usable {
		if count.CmpInt64(maxDevices) > 0 {
			d.problem(AnnotationField(GPUCountAnnotation), text, "is more devices than a machine has; write at most %d", maxDevices)
			return
		}
		d.Devices = []Devices{{Driver: driver, Count: int32(count.Value()), Kind: kind}}
		d.Sources["devices."+driver] = fromAnnotation(DRADriverAnnotation)
	}
}

// maxDevices limits the devices of one driver. Each becomes an object in the scheduler.
const maxDevices = 1024

func (d *describer) resourceName(kind string) bool {
	if len(validation.IsQualifiedName(kind)) > 0 || !strings.Contains(kind, "/") {
		d.problem(AnnotationField(GPUTypeAnnotation), kind, "is not a resource name; write for example nvidia.com/gpu")
		return false
	}
	return true
}

// otherResources reads the extended resources and huge pages that no other annotation describes.
func (d *describer) otherResources() {
	const instead = "write resource=quantity,resource=quantity, for example example.com/fpga=2,hugepages-2Mi=1Gi"
	field := AnnotationField(v1alpha1.ResourcesAnnotation)
	for part := range d.entries(v1alpha1.ResourcesAnnotation) {
		name, text, _ := strings.Cut(part, "=")
		name, text = strings.TrimSpace(name), strings.TrimSpace(text)
		unit, ok := ResourceUnit(corev1.ResourceName(name))
		if !ok {
			d.problem(field, part, "does not name an extended resource or huge pages; %s", instead)
			continue
		}
		quantity, err := wire.Quantity(text)
		if n := quantity.Value(); err != nil || n < 1 || n%unit != 0 || quantity.CmpInt64(n) != 0 {
			d.problem(field, part, "has no quantity that is a multiple of %d; %s", unit, instead)
			continue
		}
		if by := d.Sources["capacity."+name]; by.Kind == FromAnnotation {
			d.problem(field, part, "has a quantity from %s, which is used; remove one of them", by.Detail)
			continue
		}
		d.resource(corev1.ResourceName(name), quantity, fromAnnotation(v1alpha1.ResourcesAnnotation))
	}
}

// ResourceUnit returns what quantities of a resource are multiples of: the size of the page in
// bytes for huge pages, and 1 for an extended resource. It reports false for any other name.
func ResourceUnit(name corev1.ResourceName) (int64, bool) {
	if len(validation.IsQualifiedName(string(name))) > 0 {
		return 0, false
	}
	text, huge := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix)
	if !huge {
		return 1, strings.Contains(text, "/")
	}
	size, err := wire.Quantity(text)
	return size.Value(), err == nil && size.Sign() > 0
}

// maxDriverName is the maximum length of a driver's name in Kubernetes.
const maxDriverName = 63

// driverName reports whether Kubernetes accepts a name for a driver. If not, it adds a problem.
func (d *describer) driverName(annotation, name, written, instead string) bool {
	faults := validation.IsDNS1123Subdomain(strings.ToLower(name))
	if len(name) > maxDriverName {
		faults = append(faults, validation.MaxLenError(maxDriverName))
	}
	if len(faults) > 0 {
		d.problem(AnnotationField(annotation), written, "is not a driver's name: %s; %s", strings.Join(faults, "; "), instead)
	}
	return len(faults) == 0
}

// attachments reads how many volumes of each CSI driver can be attached.
func (d *describer) attachments() {
	const instead = "write driver=limit,driver=limit, for example ebs.csi.aws.com=25"
	field := AnnotationField(CSIDriverAnnotation)
	for part := range d.entries(CSIDriverAnnotation) {
		name, text, _ := strings.Cut(part, "=")
		name, text = strings.TrimSpace(name), strings.TrimSpace(text)
		if !d.driverName(CSIDriverAnnotation, name, part, instead) {
			continue
		}
		limit, err := strconv.ParseInt(text, 10, 32)
		if err != nil || limit < 0 {
			d.problem(field, part, "has no limit that is a whole number, 0 or more; %s", instead)
			continue
		}
		if _, twice := d.AttachableVolumes[name]; twice {
			d.problem(field, part, "names a driver twice, and the first limit is used; %s", instead)
			continue
		}
		if d.AttachableVolumes == nil {
			d.AttachableVolumes = map[string]int32{}
		}
		d.AttachableVolumes[name] = int32(limit)
		d.Sources["attachable_volumes."+name] = fromAnnotation(CSIDriverAnnotation)
	}
}

func (d *describer) templateResources() {
	if d.template.Object == nil {
		return
	}
	capacity, found, err := unstructured.NestedMap(d.template.Object.Object, "status", "capacity")
	field := d.template.Object.GetKind() + "/" + d.template.Object.GetName() + " status.capacity"
	if err != nil {
		d.problem(field, "", "is not a map of resource names to quantities")
		return
	}
	if !found {
		return
	}
	for _, name := range sortedKeys(d, field, capacity) {
		value := capacity[name]
		text, ok := scalar(value)
		if !ok {
			d.problem(field+"["+name+"]", fmt.Sprint(value), "is not a quantity")
			continue
		}
		quantity, err := wire.Quantity(text)
		if err != nil {
			d.problem(field+"["+name+"]", text, "%v", err)
			continue
		}
		if len(validation.IsQualifiedName(name)) > 0 {
			d.problem(field+"["+name+"]", text, "is not a resource name")
			continue
		}
		if quantity.IsZero() {
			continue // the machine has none
		}
		d.resource(corev1.ResourceName(name), quantity, d.fromTemplate("status.capacity"))
	}
}

// scalar returns the text of a quantity, which may be given as a number.
func scalar(value any) (string, bool) {
	switch value := value.(type) {
	case string:
		return value, true
	case int64:
		return strconv.FormatInt(value, 10), true
	case float64:
		return strconv.FormatFloat(value, 'f', -1, 64), true
	}
	return "", false
}

// taints determines the taints of the Node: those of the machine template and of the annotation.
// The annotation takes precedence for the same key and effect.
func (d *describer) taints() {
	type identity struct {
		key    string
		effect corev1.TaintEffect
	}
	found := map[identity]corev1.Taint{}
	add := func(taint corev1.Taint, source Source) {
		found[identity{taint.Key, taint.Effect}] = taint
		d.Sources["taints."+taint.Key+":"+string(taint.Effect)] = source
	}
	for _, taint := range d.md.Spec.Template.Spec.Taints {
		add(corev1.Taint{Key: taint.Key, Value: taint.Value, Effect: taint.Effect}, Source{FromMachineTemplate, "spec.template.spec.taints"})
	}
	for part := range d.entries(TaintsAnnotation) {
		taint, err := parseTaint(part)
		if err != nil {
			d.problem(AnnotationField(TaintsAnnotation), part, "is not a taint: %v; write key=value:NoSchedule", err)
			continue
		}
		add(taint, fromAnnotation(TaintsAnnotation))
	}
	for _, taint := range found {
		// Cluster API removes this taint as soon as it has labelled the Node.
		if taint.Key != clusterv1.NodeUninitializedTaint.Key {
			d.Taints = append(d.Taints, taint)
		}
	}
	slices.SortFunc(d.Taints, func(a, b corev1.Taint) int {
		return strings.Compare(a.Key+":"+string(a.Effect), b.Key+":"+string(b.Effect))
	})
}

func parseTaint(text string) (corev1.Taint, error) {
	i := strings.LastIndex(text, ":")
	if i < 0 {
		return corev1.Taint{}, errors.New("it has no effect")
	}
	taint := corev1.Taint{Effect: corev1.TaintEffect(text[i+1:])}
	taint.Key, taint.Value, _ = strings.Cut(text[:i], "=")
	switch taint.Effect {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
	default:
		return corev1.Taint{}, errors.New("its effect is not one of NoSchedule, PreferNoSchedule, NoExecute")
	}
	if faults := append(validation.IsQualifiedName(taint.Key), validation.IsValidLabelValue(taint.Value)...); len(faults) > 0 {
		return corev1.Taint{}, fmt.Errorf("%s", strings.Join(faults, "; "))
	}
	return taint, nil
}

// placement determines zone, region, architecture and operating system. A label of the annotation
// takes precedence. Zone and region are not learned: the location of the existing Nodes of a group
// without a failure domain does not determine the location of the next one.
func (d *describer) placement() {
	d.Zone = d.value("zone", corev1.LabelTopologyZone, []candidate{
		{d.md.Spec.Template.Spec.FailureDomain, Source{FromMachineTemplate, "spec.template.spec.failureDomain"}, "spec.template.spec.failureDomain"},
		d.templateLabel(corev1.LabelTopologyZone),
	})
	d.Region = d.value("region", corev1.LabelTopologyRegion, []candidate{d.templateLabel(corev1.LabelTopologyRegion)})
	d.Architecture = d.value("architecture", corev1.LabelArchStable, []candidate{
		d.nodeInfo("architecture"), d.templateLabel(corev1.LabelArchStable), d.learnedLabel(corev1.LabelArchStable),
		{cmp.Or(d.settings.Architecture, DefaultArchitecture), Source{FromDefault, "--default-architecture"}, ""},
	})
	d.OperatingSystem = d.value("operating_system", corev1.LabelOSStable, []candidate{
		d.nodeInfo("operatingSystem"), d.templateLabel(corev1.LabelOSStable), d.learnedLabel(corev1.LabelOSStable),
		{defaultOS, Source{FromDefault, "most machines"}, ""},
	})
}

type candidate struct {
	value  string
	source Source
	field  string // where the user wrote it
}

// templateLabel returns a label of the machine template. Cluster API may not copy it to the Node,
// but it still describes the machines.
func (d *describer) templateLabel(key string) candidate {
	const path = "spec.template.metadata.labels"
	return candidate{d.md.Spec.Template.Labels[key], Source{FromMachineTemplate, path}, path + "[" + key + "]"}
}

func (d *describer) nodeInfo(name string) candidate {
	if d.template.Object == nil {
		return candidate{}
	}
	path := "status.nodeInfo." + name
	value, _, err := unstructured.NestedString(d.template.Object.Object, "status", "nodeInfo", name)
	field := d.template.Object.GetKind() + "/" + d.template.Object.GetName() + " " + path
	if err != nil {
		d.problem(field, "", "is not a string")
		return candidate{}
	}
	return candidate{value, d.fromTemplate(path), field}
}

// value returns the first usable candidate, and sets it as the Node's label. A label that the Node
// already has takes precedence.
func (d *describer) value(path, label string, candidates []candidate) string {
	if value, labelled := d.Labels[label]; labelled && value != "" {
		source := d.Sources["node_labels."+label]
		d.Sources[path] = source
		field := "spec.template.metadata.labels[" + label + "]"
		if source.Kind == FromAnnotation {
			field = AnnotationField(LabelsAnnotation)
		}
		d.contradictedLabel(field, label, value)
		return value
	}
	for _, c := range candidates {
		if c.value == "" {
			continue
		}
		if faults := validation.IsValidLabelValue(c.value); len(faults) > 0 {
			d.problem(c.field, c.value, "cannot be the value of the label %s: %s", label, strings.Join(faults, "; "))
			continue
		}
		d.Sources[path] = c.source
		d.label(label, c.value, c.source)
		d.contradictedLabel(c.field, label, c.value)
		return c.value
	}
	return ""
}

// kind determines the instance type and the capacity type.
func (d *describer) kind() {
	name := candidate{d.md.Name, Source{FromDefault, "the MachineDeployment's name"}, "metadata.name"}
	if len(validation.IsValidLabelValue(name.value)) > 0 {
		name.value = shortened(name.value)
	}
	d.InstanceType = d.value("instance_type", corev1.LabelInstanceTypeStable, []candidate{
		{d.md.Annotations[corev1.LabelInstanceTypeStable], fromAnnotation(corev1.LabelInstanceTypeStable), AnnotationField(corev1.LabelInstanceTypeStable)},
		d.templateLabel(corev1.LabelInstanceTypeStable), name,
	})

	const label = wire.CapacityTypeLabel
	d.CapacityType = wire.CapacityTypeOnDemand
	d.Sources["capacity_type"] = Source{FromDefault, wire.CapacityTypeOnDemand}
	candidates := []candidate{
		{d.md.Annotations[label], fromAnnotation(label), AnnotationField(label)},
		d.templateLabel(label),
		{d.md.Labels[label], Source{FromMachineTemplate, "metadata.labels"}, "metadata.labels[" + label + "]"},
	}
	if value := d.Labels[label]; value != "" {
		candidates = slices.Insert(candidates, 0, candidate{value, d.Sources["node_labels."+label], AnnotationField(LabelsAnnotation)})
	}
	// Karpenter sets this label on the Node itself.
	delete(d.Labels, label)
	delete(d.Sources, "node_labels."+label)
	for _, c := range candidates {
		if c.value == "" {
			continue
		}
		if _, err := wire.ParseCapacityType(c.value); err != nil {
			d.problem(c.field, c.value, "%v", err)
			continue
		}
		d.CapacityType, d.Sources["capacity_type"] = c.value, c.source
		return
	}
}

// shortened turns a name that is too long into a label value, which is unique with near certainty.
func shortened(name string) string {
	sum := fnv.New64a()
	_, _ = sum.Write([]byte(name))
	cut := strings.TrimRight(name[:min(len(name), 46)], "-._")
	return fmt.Sprintf("%s-%016x", cut, sum.Sum64())
}
