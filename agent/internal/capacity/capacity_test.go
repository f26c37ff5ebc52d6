package capacity_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/validation"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
)

func deployment(annotations map[string]string) *clusterv1.MachineDeployment {
	return &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Name: "small", Annotations: annotations}}
}

func template(status map[string]any) capacity.Template {
	object := &unstructured.Unstructured{Object: map[string]any{"status": status}}
	object.SetKind("TestMachineTemplate")
	object.SetName("t")
	return capacity.Template{Object: object}
}

func quantities(list corev1.ResourceList) map[string]string {
	texts := map[string]string{}
	for name, quantity := range list {
		texts[string(name)] = quantity.String()
	}
	return texts
}

func fields(problems []capacity.Problem) []string {
	names := []string{}
	for _, p := range problems {
		names = append(names, p.Field)
	}
	return names
}

func TestAnnotationsWinOverTheInfrastructureTemplate(t *testing.T) {
	md := deployment(map[string]string{
		capacity.CPUAnnotation: "4", capacity.GPUTypeAnnotation: "nvidia.com/gpu", capacity.GPUCountAnnotation: "2",
	})
	d := capacity.Describe(md,
		template(map[string]any{
			"capacity": map[string]any{"cpu": "2", "memory": "8Gi", "ephemeral-storage": int64(1000), "example.com/nic": 2.0},
			"nodeInfo": map[string]any{"architecture": "arm64", "operatingSystem": "windows"},
		}), capacity.Learned{}, capacity.Settings{})
	require.Empty(t, d.Problems)
	require.Equal(t, map[string]string{
		"cpu": "4", "memory": "8Gi", "ephemeral-storage": "1k", "pods": "110", "nvidia.com/gpu": "2", "example.com/nic": "2",
	}, quantities(d.Resources))
	require.Equal(t, "arm64", d.Architecture)
	require.Equal(t, "windows", d.OperatingSystem)
	require.Equal(t, "arm64", d.Labels[corev1.LabelArchStable])
	require.Equal(t, capacity.FromAnnotation, d.Sources["capacity.cpu"].Kind)
	require.Equal(t, capacity.Source{
		Kind: capacity.FromInfrastructureTemplate, Detail: "TestMachineTemplate/t status.capacity",
	}, d.Sources["capacity.memory"])
	require.Equal(t, capacity.FromDefault, d.Sources["capacity.pods"].Kind)
}

func TestWhatCannotBeUsedIsAProblemAndTheNextSourceIsAsked(t *testing.T) {
	for name, c := range map[string]struct{ key, value string }{
		"megabits":                         {capacity.MemoryAnnotation, "500mb"},
		"nothing":                          {capacity.MemoryAnnotation, ""},
		"negative":                         {capacity.MemoryAnnotation, "-1Gi"},
		"zero":                             {capacity.MemoryAnnotation, "0"},
		"huge exponent":                    {capacity.MemoryAnnotation, "1e1000000000"},
		"words":                            {capacity.CPUAnnotation, "four"},
		"half a pod":                       {capacity.MaxPodsAnnotation, "1500m"},
		"no pods":                          {capacity.MaxPodsAnnotation, "0"},
		"accelerator no name":              {capacity.GPUTypeAnnotation, "A 100"},
		"accelerator no group":             {capacity.GPUTypeAnnotation, "gpu"},
		"accelerator count":                {capacity.GPUCountAnnotation, "-1"},
		"label without value":              {capacity.LabelsAnnotation, "team"},
		"label key":                        {capacity.LabelsAnnotation, "a b=c"},
		"label value":                      {capacity.LabelsAnnotation, "a=b c"},
		"taint without effect":             {capacity.TaintsAnnotation, "a=b"},
		"pages without a number":           {v1alpha1.ResourcesAnnotation, "hugepages-2Mi"},
		"pages of no size":                 {v1alpha1.ResourcesAnnotation, "hugepages-2mi=1Gi"},
		"a number of pages":                {v1alpha1.ResourcesAnnotation, "hugepages-2Mi=512"},
		"half a page":                      {v1alpha1.ResourcesAnnotation, "hugepages-2Mi=3Mi"},
		"half a resource":                  {v1alpha1.ResourcesAnnotation, "example.com/fpga=500m"},
		"none of a resource":               {v1alpha1.ResourcesAnnotation, "example.com/fpga=0"},
		"resource with its own annotation": {v1alpha1.ResourcesAnnotation, "cpu=4"},
		"resource twice":                   {v1alpha1.ResourcesAnnotation, "example.com/fpga=2,example.com/fpga=3"},
		"GPUs twice":                       {v1alpha1.ResourcesAnnotation, "nvidia.com/gpu=2"},
		"taint effect":                     {capacity.TaintsAnnotation, "a=b:Never"},
		"taint key":                        {capacity.TaintsAnnotation, "=b:NoSchedule"},
	} {
		t.Run(name, func(t *testing.T) {
			annotations := map[string]string{
				c.key: c.value, capacity.GPUTypeAnnotation: "nvidia.com/gpu", capacity.GPUCountAnnotation: "1",
			}
			annotations[c.key] = c.value
			status := map[string]any{"capacity": map[string]any{"cpu": "2", "memory": "8Gi"}}
			d := capacity.Describe(deployment(annotations), template(status), capacity.Learned{}, capacity.Settings{})
			require.Equal(t, []string{capacity.AnnotationField(c.key)}, fields(d.Problems))
			require.Equal(t, "2", d.Resources.Cpu().String())
			require.Equal(t, "8Gi", d.Resources.Memory().String())
			require.Equal(t, "110", d.Resources.Pods().String())
		})
	}
}

// Annotated resources take precedence over what the template and Nodes report.
func TestExtendedResourcesAndHugePagesAreAnnotated(t *testing.T) {
	d := capacity.Describe(deployment(map[string]string{
		v1alpha1.ResourcesAnnotation: " example.com/fpga=2, hugepages-2Mi = 1.5Gi,",
		capacity.GPUTypeAnnotation:   "nvidia.com/gpu", capacity.GPUCountAnnotation: "1",
	}), template(map[string]any{"capacity": map[string]any{"cpu": "2", "memory": "8Gi", "example.com/fpga": "1"}}),
		capacity.Learned{Capacity: corev1.ResourceList{"hugepages-2Mi": resource.MustParse("2Gi")}}, capacity.Settings{})
	require.Empty(t, d.Problems)
	for name, want := range map[corev1.ResourceName]string{"example.com/fpga": "2", "hugepages-2Mi": "1536Mi", "nvidia.com/gpu": "1"} {
		quantity := d.Resources[name]
		require.Equal(t, want, quantity.String(), name)
	}
	require.Equal(t, capacity.Source{Kind: capacity.FromAnnotation, Detail: v1alpha1.ResourcesAnnotation}, d.Sources["capacity.example.com/fpga"])
}

func TestTheDefaultArchitectureIsForMachinesThatHaveNone(t *testing.T) {
	arm := capacity.Settings{Architecture: "arm64"}
	d := capacity.Describe(deployment(nil), capacity.Template{}, capacity.Learned{}, arm)
	require.Equal(t, "arm64", d.Architecture)
	require.Equal(t, "arm64", d.Labels[corev1.LabelArchStable])
	require.Equal(t, "amd64", capacity.Describe(deployment(nil), capacity.Template{}, capacity.Learned{}, capacity.Settings{}).Architecture)
	d = capacity.Describe(deployment(nil), template(map[string]any{"nodeInfo": map[string]any{"architecture": "s390x"}}), capacity.Learned{}, arm)
	require.Equal(t, "s390x", d.Architecture)
}

func TestMissingCapacityIsSaid(t *testing.T) {
	d := capacity.Describe(deployment(nil), capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.ElementsMatch(t, []string{
		capacity.AnnotationField(capacity.CPUAnnotation), capacity.AnnotationField(capacity.MemoryAnnotation),
	}, fields(d.Problems))
}

func TestLabelsAreThoseThatReachTheNode(t *testing.T) {
	md := deployment(map[string]string{capacity.LabelsAnnotation: "team=blue, x.node.cluster.x-k8s.io/pool=annotated"})
	md.Spec.Template.Labels = map[string]string{
		"node-role.kubernetes.io/gpu":           "",
		"x.node.cluster.x-k8s.io/pool":          "propagated",
		"node-restriction.kubernetes.io/tenant": "a",
		"example.com/not-copied":                "x",
		"custom.example.com/copied":             "y",
	}
	d := capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{
		SyncedLabels: []*regexp.Regexp{regexp.MustCompile(`^custom\.example\.com/`)},
	})
	require.Equal(t, map[string]string{
		"node-role.kubernetes.io/gpu": "", "x.node.cluster.x-k8s.io/pool": "annotated", "node-restriction.kubernetes.io/tenant": "a",
		"custom.example.com/copied": "y", "team": "blue",
		corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux", corev1.LabelInstanceTypeStable: "small",
	}, d.Labels)
	require.Equal(t, capacity.FromAnnotation, d.Sources["node_labels.team"].Kind)
}

func TestTaintsOfTheAnnotationWinForOneKeyAndEffect(t *testing.T) {
	md := deployment(map[string]string{capacity.TaintsAnnotation: "dedicated=b:NoSchedule,solo:NoExecute"})
	md.Spec.Template.Spec.Taints = []clusterv1.MachineTaint{
		{Key: "dedicated", Value: "a", Effect: corev1.TaintEffectNoSchedule},
		{Key: "dedicated", Value: "a", Effect: corev1.TaintEffectNoExecute},
		{Key: clusterv1.NodeUninitializedTaint.Key, Effect: corev1.TaintEffectNoSchedule},
	}
	require.Equal(t, []corev1.Taint{
		{Key: "dedicated", Value: "a", Effect: corev1.TaintEffectNoExecute},
		{Key: "dedicated", Value: "b", Effect: corev1.TaintEffectNoSchedule},
		{Key: "solo", Effect: corev1.TaintEffectNoExecute},
	}, capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{}).Taints)
}

func TestZoneIsTheFailureDomainUnlessTheAnnotationSaysOtherwise(t *testing.T) {
	md := deployment(nil)
	md.Spec.Template.Spec.FailureDomain = "zone-a"
	require.Equal(t, "zone-a", capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{}).Zone)
	md.Annotations = map[string]string{capacity.LabelsAnnotation: "topology.kubernetes.io/zone=zone-b,topology.kubernetes.io/region=r"}
	d := capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.Equal(t, "zone-b", d.Zone)
	require.Equal(t, "r", d.Region)
	md.Annotations, md.Spec.Template.Spec.FailureDomain = nil, "not/a label"
	d = capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.Empty(t, d.Zone)
	require.Contains(t, fields(d.Problems), "spec.template.spec.failureDomain")
}

func TestCapacityTypeComesFromTheFirstThatSaysIt(t *testing.T) {
	const label = "karpenter.sh/capacity-type"
	md := deployment(nil)
	require.Equal(t, "on-demand", capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{}).CapacityType)
	md.Labels = map[string]string{label: "spot"}
	require.Equal(t, "spot", capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{}).CapacityType)
	md.Annotations = map[string]string{label: "reserved"}
	require.Equal(t, "reserved", capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{}).CapacityType)
	md.Annotations[capacity.LabelsAnnotation] = label + "=on-demand"
	d := capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.Equal(t, "on-demand", d.CapacityType)
	require.NotContains(t, d.Labels, label)
	md.Annotations[capacity.LabelsAnnotation] = label + "=cheap"
	d = capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.Equal(t, "reserved", d.CapacityType)
	require.Contains(t, fields(d.Problems), capacity.AnnotationField(capacity.LabelsAnnotation))
}

func TestInstanceTypeIsAlwaysALabelValue(t *testing.T) {
	md := deployment(nil)
	md.Name = strings.Repeat("long-", 40) + "name"
	d := capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.Empty(t, validation.IsValidLabelValue(d.InstanceType))
	require.NotEmpty(t, d.InstanceType)
	md.Spec.Template.Labels = map[string]string{corev1.LabelInstanceTypeStable: "m5.large"}
	require.Equal(t, "m5.large", capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{}).InstanceType)
}

// usable checks what holds for every description, whatever the input.
func usable(t *testing.T, d capacity.Description) {
	t.Helper()
	for key, value := range d.Labels {
		if len(validation.IsQualifiedName(key)) > 0 || len(validation.IsValidLabelValue(value)) > 0 {
			t.Errorf("label %q=%q is not valid", key, value)
		}
	}
	for name, quantity := range d.Resources {
		if quantity.Sign() <= 0 || len(validation.IsQualifiedName(string(name))) > 0 {
			t.Errorf("resource %q=%s is not valid", name, quantity.String())
		}
	}
	for _, taint := range d.Taints {
		if len(validation.IsQualifiedName(taint.Key)) > 0 || len(validation.IsValidLabelValue(taint.Value)) > 0 || taint.Effect == "" {
			t.Errorf("taint %v is not valid", taint)
		}
	}
	for driver, limit := range d.AttachableVolumes {
		if driver == "" || len(driver) > 63 || limit < 0 {
			t.Errorf("%d volumes of %q", limit, driver)
		}
	}
	for _, devices := range d.Devices {
		if devices.Driver == "" || len(devices.Driver) > 63 || devices.Count < 1 || devices.Count > 1024 {
			t.Errorf("devices %v", devices)
		}
	}
	if d.InstanceType == "" || d.Architecture == "" || d.OperatingSystem == "" || d.CapacityType == "" {
		t.Error("a value that must not be empty is")
	}
	for _, problem := range d.Problems {
		if problem.Field == "" || problem.Message == "" {
			t.Errorf("%+v says nothing", problem)
		}
	}
}

// fuzzAnnotation fuzzes the value of one annotation.
func fuzzAnnotation(f *testing.F, annotation string, seeds ...string) {
	f.Helper()
	for _, seed := range append(seeds, "", " ", ",", "=", "\x00", "é", strings.Repeat("a=b,", 100), strings.Repeat("z", 300)) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		md := deployment(map[string]string{capacity.GPUTypeAnnotation: "nvidia.com/gpu", capacity.GPUCountAnnotation: "2"})
		md.Annotations[annotation] = text
		d := capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
		usable(t, d)
		field := capacity.AnnotationField(annotation)
		for _, problem := range d.Problems {
			if problem.Field == field && problem.Value != "" && !strings.Contains(text, problem.Value) {
				t.Errorf("%q: the problem names %q, which was not written", text, problem.Value)
			}
		}
	})
}

// Cluster API's own documentation uses 500mb, which is not a quantity. Other implementations panic
// on such values.
func FuzzQuantity(f *testing.F) {
	fuzzAnnotation(f, capacity.MemoryAnnotation, "16Gi", "500mb", "500MB", "16 Gi", "1e1000000000", "-1", "0", ".", "1E",
		"9223372036854775808", "0x10", "1e-24")
}

func FuzzLabels(f *testing.F) {
	fuzzAnnotation(f, capacity.LabelsAnnotation, "a=b", "a=b,c=d", "a", "=b", "a=b=c", "a/b/c=d", "karpenter.sh/capacity-type=cheap",
		"node.kubernetes.io/instance-type=", "topology.kubernetes.io/zone=a b", "kubernetes.io/arch=-")
}

func FuzzTaints(f *testing.F) {
	fuzzAnnotation(f, capacity.TaintsAnnotation, "a=b:NoSchedule", "a:NoExecute", "a=b", ":NoSchedule", "a=b:c:NoSchedule", "a:Never",
		"node.cluster.x-k8s.io/uninitialized:NoSchedule", "a=b:NoSchedule,a=c:NoSchedule")
}

func FuzzGPUType(f *testing.F) {
	fuzzAnnotation(f, capacity.GPUTypeAnnotation, "nvidia.com/gpu", "gpu", "a/b/c", "/gpu", "nvidia.com/", "cpu", "memory")
}

func FuzzGPUCount(f *testing.F) {
	fuzzAnnotation(f, capacity.GPUCountAnnotation, "1", "0", "-1", "1.5", "1e3", "1k", "500m", "9223372036854775808")
}

func FuzzCSIDriver(f *testing.F) {
	fuzzAnnotation(f, capacity.CSIDriverAnnotation, "ebs.csi.aws.com=25", "a=1,b=2", "a=1,a=2", "a", "=1", "a=-1", "a=2147483648", "A=1")
}

func FuzzDRADriver(f *testing.F) {
	fuzzAnnotation(f, capacity.DRADriverAnnotation, "gpu.nvidia.com", "GPU.nvidia.com", "a,b", "a=1", ".", "-a")
}

func FuzzDescribe(f *testing.F) {
	f.Add("4", "16Gi", "a=b", "a=b:NoSchedule", "nvidia.com/gpu", "1", "zone-a")
	f.Add("1e1000000000", "500mb", "=,=", ":::", "", "-1", "é")
	f.Add("9223372036854775807", ".", "a=b=c,", "a:NoSchedule,a=b:NoSchedule", "x/y", "1e3", strings.Repeat("z", 300))
	f.Fuzz(func(t *testing.T, cpu, memory, labels, taints, gpu, count, zone string) {
		md := deployment(map[string]string{
			capacity.CPUAnnotation: cpu, capacity.MemoryAnnotation: memory, capacity.LabelsAnnotation: labels, capacity.TaintsAnnotation: taints,
			capacity.GPUTypeAnnotation: gpu, capacity.GPUCountAnnotation: count, capacity.MaxPodsAnnotation: count, capacity.DiskAnnotation: memory,
			v1alpha1.ResourcesAnnotation: gpu + "=" + count + "," + labels,
			"karpenter.sh/capacity-type": labels,
		})
		md.Spec.Template.Spec.FailureDomain = zone
		md.Spec.Template.Labels = map[string]string{"node.cluster.x-k8s.io/" + gpu: labels}
		d := capacity.Describe(md, template(map[string]any{
			"capacity": map[string]any{gpu: cpu, "memory": memory, "x": count, "y": nil}, "nodeInfo": map[string]any{"architecture": zone},
		}), capacity.Learned{}, capacity.Settings{})
		usable(t, d)
	})
}

// An API server accepts annotations of 256 KiB. A description is sent to the Cluster's callers, and
// kept.
func TestLargeAnnotationsAreDescribedInLittle(t *testing.T) {
	const most = 256 << 10
	repeated := func(entry string) string { return strings.Repeat(entry, most/len(entry)) }
	numbered := func(format string) string {
		var b strings.Builder
		for i := 0; b.Len() < most-100; i++ {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	many := map[string]any{}
	for i := range 20000 {
		many[fmt.Sprintf("example.com/r%d", i)] = "1"
	}
	for name, c := range map[string]struct {
		annotation, value string
		template          capacity.Template
	}{
		"labels that are none":       {capacity.LabelsAnnotation, repeated("=,"), capacity.Template{}},
		"very many labels":           {capacity.LabelsAnnotation, numbered("a%d=,"), capacity.Template{}},
		"one very long label":        {capacity.LabelsAnnotation, repeated("a"), capacity.Template{}},
		"taints that are none":       {capacity.TaintsAnnotation, repeated(":NoExecute,"), capacity.Template{}},
		"very many taints":           {capacity.TaintsAnnotation, numbered("a%d:NoExecute,"), capacity.Template{}},
		"resources that are none":    {v1alpha1.ResourcesAnnotation, repeated("a,"), capacity.Template{}},
		"very many resources":        {v1alpha1.ResourcesAnnotation, numbered("e/a%d=1,"), capacity.Template{}},
		"drivers that are none":      {capacity.CSIDriverAnnotation, repeated("_,"), capacity.Template{}},
		"very many drivers":          {capacity.CSIDriverAnnotation, numbered("a%d=1,"), capacity.Template{}},
		"a very long quantity":       {capacity.CPUAnnotation, repeated("x"), capacity.Template{}},
		"a very long resource name":  {capacity.GPUTypeAnnotation, repeated("x"), capacity.Template{}},
		"a very long driver's name":  {capacity.DRADriverAnnotation, repeated("X"), capacity.Template{}},
		"a template with very many":  {"", "", template(map[string]any{"capacity": many})},
		"a template with one, badly": {"", "", template(map[string]any{"capacity": map[string]any{repeated("x"): repeated("x")}})},
	} {
		t.Run(name, func(t *testing.T) {
			d := capacity.Describe(deployment(map[string]string{c.annotation: c.value}), c.template, capacity.Learned{}, capacity.Settings{})
			require.NotEmpty(t, d.Problems)
			require.LessOrEqual(t, len(d.Problems), 33)
			length := 0
			for _, p := range d.Problems {
				length += len(p.Field) + min(len(p.Value), 128) + len(p.Message) // callers see the beginning of a value
			}
			require.Less(t, length, 48<<10)
			require.LessOrEqual(t, len(d.Labels), 260)
			require.LessOrEqual(t, len(d.Taints), 256)
			require.LessOrEqual(t, len(d.Resources), 260)
			require.LessOrEqual(t, len(d.AttachableVolumes), 256)
			require.LessOrEqual(t, len(d.Sources), 270)
		})
	}
	d := capacity.Describe(deployment(map[string]string{capacity.LabelsAnnotation: strings.Repeat("=,", 100)}),
		capacity.Template{}, capacity.Learned{}, capacity.Settings{})
	require.Equal(t, "there are 70 further problems; correct these first", d.Problems[len(d.Problems)-1].Message, "cpu and memory are missing, too")
}

// A description that is equal is no change of the catalogue.
func TestADescriptionIsTheSameEachTime(t *testing.T) {
	md := deployment(map[string]string{v1alpha1.ResourcesAnnotation: "example.com/fpga=2,hugepages-2Mi=2Gi,example.com/nic=2"})
	seen := capacity.Learned{Capacity: list("example.com/fpga", "1", "hugepages-2Mi", "1Gi", "example.com/nic", "1", "cpu", "1", "memory", "1Gi")}
	bad := map[string]any{}
	for i := range 50 {
		bad[fmt.Sprintf("example.com/r%d", i)] = "x"
	}
	first := capacity.Describe(md, template(map[string]any{"capacity": bad}), seen, capacity.Settings{})
	require.Len(t, first.Problems, 33)
	for range 50 {
		require.Equal(t, first, capacity.Describe(md, template(map[string]any{"capacity": bad}), seen, capacity.Settings{}))
	}
	first = capacity.Describe(md, capacity.Template{}, seen, capacity.Settings{})
	require.Len(t, first.Problems, 3)
	for range 50 {
		require.Equal(t, first, capacity.Describe(md, capacity.Template{}, seen, capacity.Settings{}))
	}
}
