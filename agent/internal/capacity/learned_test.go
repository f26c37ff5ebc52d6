package capacity_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
)

func list(pairs ...string) corev1.ResourceList {
	quantities := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		quantities[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return quantities
}

func TestFirstSourceThatHasAResourceWins(t *testing.T) {
	const resourceName = "example.com/nic"
	annotated := map[string]string{capacity.GPUTypeAnnotation: resourceName, capacity.GPUCountAnnotation: "1"}
	provided := template(map[string]any{"capacity": map[string]any{resourceName: "2"}})
	seen := capacity.Learned{Capacity: list(resourceName, "3", "pods", "58")}
	for name, c := range map[string]struct {
		annotations map[string]string
		template    capacity.Template
		learned     capacity.Learned
		want        string
		source      capacity.SourceKind
	}{
		"annotation":              {annotated, provided, seen, "1", capacity.FromAnnotation},
		"infrastructure template": {nil, provided, seen, "2", capacity.FromInfrastructureTemplate},
		"Nodes":                   {nil, capacity.Template{}, seen, "3", capacity.FromNodes},
	} {
		t.Run(name, func(t *testing.T) {
			d := capacity.Describe(deployment(c.annotations), c.template, c.learned, capacity.Settings{})
			require.Equal(t, c.want, quantities(d.Resources)[resourceName])
			require.Equal(t, c.source, d.Sources["capacity."+resourceName].Kind)
			require.Equal(t, "58", quantities(d.Resources)["pods"], "Nodes over the default")
		})
	}
}

func TestFirstSourceThatHasALabelWins(t *testing.T) {
	for name, c := range map[string]struct {
		annotation string
		nodeInfo   string
		label      string
		node       string
		want       string
		source     capacity.SourceKind
		problem    string
	}{
		"annotation":              {"s390x", "arm64", "ppc64le", "s390x", "s390x", capacity.FromAnnotation, ""},
		"infrastructure template": {"", "arm64", "ppc64le", "arm64", "arm64", capacity.FromInfrastructureTemplate, ""},
		"machine template":        {"", "", "ppc64le", "ppc64le", "ppc64le", capacity.FromMachineTemplate, ""},
		"Nodes":                   {"", "", "", "arm64", "arm64", capacity.FromNodes, ""},
		"default":                 {"", "", "", "", "amd64", capacity.FromDefault, ""},
		"annotation, and Nodes differ": {
			"s390x", "arm64", "", "amd64", "s390x", capacity.FromAnnotation, capacity.AnnotationField(capacity.LabelsAnnotation),
		},
		"infrastructure template, and Nodes differ": {
			"", "arm64", "", "amd64", "arm64", capacity.FromInfrastructureTemplate, "TestMachineTemplate/t status.nodeInfo.architecture",
		},
		"machine template, and Nodes differ": {
			"", "", "arm64", "amd64", "arm64", capacity.FromMachineTemplate, "spec.template.metadata.labels[kubernetes.io/arch]",
		},
	} {
		t.Run(name, func(t *testing.T) {
			md := deployment(map[string]string{capacity.CPUAnnotation: "1", capacity.MemoryAnnotation: "1Gi"})
			if c.annotation != "" {
				md.Annotations[capacity.LabelsAnnotation] = corev1.LabelArchStable + "=" + c.annotation
			}
			md.Spec.Template.Labels = map[string]string{corev1.LabelArchStable: c.label}
			learned := capacity.Learned{Labels: map[string]string{corev1.LabelArchStable: c.node}}
			d := capacity.Describe(md, template(map[string]any{"nodeInfo": map[string]any{"architecture": c.nodeInfo}}), learned, capacity.Settings{})
			require.Equal(t, c.want, d.Architecture)
			require.Equal(t, c.want, d.Labels[corev1.LabelArchStable])
			require.Equal(t, c.source, d.Sources["architecture"].Kind)
			if c.problem == "" {
				require.Empty(t, d.Problems)
				return
			}
			require.Equal(t, []string{c.problem}, fields(d.Problems))
			require.Contains(t, d.Problems[0].Message, `"amd64" that Nodes of the group report`)
		})
	}
}

func TestZoneAndRegionAreNotLearned(t *testing.T) {
	learned := capacity.Learned{Labels: map[string]string{corev1.LabelTopologyZone: "z", corev1.LabelTopologyRegion: "r"}}
	d := capacity.Describe(deployment(nil), capacity.Template{}, learned, capacity.Settings{})
	require.Equal(t, []string{"", ""}, []string{d.Zone, d.Region}, "the next machine may come elsewhere")
	require.NotContains(t, d.Labels, corev1.LabelTopologyZone)
	require.NotContains(t, d.Labels, corev1.LabelTopologyRegion)
	md := deployment(nil)
	md.Spec.Template.Spec.FailureDomain = "a"
	d = capacity.Describe(md, capacity.Template{}, learned, capacity.Settings{})
	require.Equal(t, "a", d.Zone)
	require.Contains(t, fields(d.Problems), "spec.template.spec.failureDomain")
}

func TestPromisingMoreThanNodesHaveIsAProblem(t *testing.T) {
	described := map[string]string{
		capacity.CPUAnnotation: "4", capacity.MemoryAnnotation: "16Gi", capacity.DiskAnnotation: "100Gi", capacity.MaxPodsAnnotation: "58",
	}
	for name, c := range map[string]struct {
		shown corev1.ResourceList
		field string
	}{
		"the same":             {list("cpu", "4", "memory", "16Gi", "ephemeral-storage", "100Gi", "pods", "58"), ""},
		"Nodes have more":      {list("cpu", "8", "memory", "32Gi", "ephemeral-storage", "200Gi", "pods", "110"), ""},
		"the kernel's share":   {list("memory", "15Gi", "ephemeral-storage", "95Gi"), ""},
		"half of the CPUs":     {list("cpu", "2"), capacity.AnnotationField(capacity.CPUAnnotation)},
		"half of the memory":   {list("memory", "8Gi"), capacity.AnnotationField(capacity.MemoryAnnotation)},
		"half of the disk":     {list("ephemeral-storage", "50Gi"), capacity.AnnotationField(capacity.DiskAnnotation)},
		"one pod less":         {list("pods", "57"), capacity.AnnotationField(capacity.MaxPodsAnnotation)},
		"nothing is described": {list("example.com/nic", "1"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			d := capacity.Describe(deployment(described), capacity.Template{}, capacity.Learned{Capacity: c.shown}, capacity.Settings{})
			require.Equal(t, "4", d.Resources.Cpu().String(), "what is described is shown")
			if c.field == "" {
				require.Empty(t, d.Problems)
				return
			}
			require.Equal(t, []string{c.field}, fields(d.Problems))
			require.Contains(t, d.Problems[0].Message, "that Nodes of the group report; write their value, or remove it to have it learned")
		})
	}
	d := capacity.Describe(deployment(map[string]string{capacity.MemoryAnnotation: "1Gi"}),
		template(map[string]any{"capacity": map[string]any{"cpu": "8"}}), capacity.Learned{Capacity: list("cpu", "4")}, capacity.Settings{})
	require.Equal(t, []string{"TestMachineTemplate/t status.capacity[cpu]"}, fields(d.Problems))
}

func TestWhatIsLeftForPodsIsNeverMoreThanNodesCanGive(t *testing.T) {
	seen := capacity.Learned{
		Capacity: list("memory", "15Gi"), Allocatable: list("memory", "14Gi"), Overhead: list("memory", "1Gi"),
	}
	for described, want := range map[string]string{"": "1Gi", "15Gi": "1Gi", "16Gi": "2Gi", "30Gi": "16Gi", "8Gi": "1Gi"} {
		t.Run("described as "+described, func(t *testing.T) {
			annotations := map[string]string{}
			if described != "" {
				annotations[capacity.MemoryAnnotation] = described
			}
			d := capacity.Describe(deployment(annotations), capacity.Template{}, seen, capacity.Settings{})
			require.Equal(t, map[string]string{"memory": want}, quantities(d.Overhead))
			require.Equal(t, capacity.FromNodes, d.Sources["overhead.memory"].Kind)
		})
	}
	require.Nil(t, capacity.Describe(deployment(nil), capacity.Template{}, capacity.Learned{}, capacity.Settings{}).Overhead)
}

func TestVolumesThatCanBeAttached(t *testing.T) {
	for text, c := range map[string]struct {
		want     map[string]int32
		problems int
	}{
		"ebs.csi.aws.com=25":                       {map[string]int32{"ebs.csi.aws.com": 25}, 0},
		" ebs.csi.aws.com = 25 , a.example.com=0,": {map[string]int32{"ebs.csi.aws.com": 25, "a.example.com": 0}, 0},
		"":                             {nil, 0},
		"ebs.csi.aws.com":              {nil, 1},
		"ebs.csi.aws.com=":             {nil, 1},
		"ebs.csi.aws.com=many":         {nil, 1},
		"ebs.csi.aws.com=-1":           {nil, 1},
		"ebs.csi.aws.com=2.5":          {nil, 1},
		"ebs.csi.aws.com=99999999999":  {nil, 1},
		"=25":                          {nil, 1},
		"no driver=25":                 {nil, 1},
		"a=1,a=2":                      {map[string]int32{"a": 1}, 1},
		"a=1,b=x,c=3":                  {map[string]int32{"a": 1, "c": 3}, 1},
		"a=1=2":                        {nil, 1},
		strings.Repeat("a", 64) + "=1": {nil, 1},
	} {
		t.Run(text, func(t *testing.T) {
			md := described(map[string]string{capacity.CSIDriverAnnotation: text})
			d := capacity.Describe(md, capacity.Template{}, capacity.Learned{}, capacity.Settings{})
			require.Equal(t, c.want, d.AttachableVolumes)
			require.Len(t, d.Problems, c.problems)
			for _, problem := range d.Problems {
				require.Equal(t, capacity.AnnotationField(capacity.CSIDriverAnnotation), problem.Field)
				require.NotEmpty(t, problem.Value)
				require.Contains(t, problem.Message, "write driver=limit,driver=limit")
			}
		})
	}
}

func described(annotations map[string]string) *clusterv1.MachineDeployment {
	annotations[capacity.CPUAnnotation], annotations[capacity.MemoryAnnotation] = "1", "1Gi"
	return deployment(annotations)
}

func TestAcceleratorsAreAResourceOrDevicesOrBoth(t *testing.T) {
	const kind, count, driver = capacity.GPUTypeAnnotation, capacity.GPUCountAnnotation, capacity.DRADriverAnnotation
	for name, c := range map[string]struct {
		annotations map[string]string
		resource    string
		devices     []capacity.Devices
		problems    []string
	}{
		"a resource": {map[string]string{kind: "nvidia.com/gpu", count: "2"}, "2", nil, nil},
		"devices": {
			map[string]string{driver: "gpu.nvidia.com", count: "2"}, "", []capacity.Devices{{Driver: "gpu.nvidia.com", Count: 2}}, nil,
		},
		"both": {
			map[string]string{driver: " gpu.nvidia.com ", kind: "nvidia.com/gpu", count: "2"},
			"2",
			[]capacity.Devices{{Driver: "gpu.nvidia.com", Count: 2, Kind: "nvidia.com/gpu"}},
			nil,
		},
		"said to have none":       {map[string]string{driver: "gpu.nvidia.com", count: "0"}, "", nil, nil},
		"no kind, and none of it": {map[string]string{kind: "cpu", count: "0"}, "", nil, nil},
		"devices, not how many":   {map[string]string{driver: "gpu.nvidia.com"}, "", nil, []string{count}},
		"how many, not of what":   {map[string]string{count: "2"}, "", nil, []string{kind}},
		"several drivers":         {map[string]string{driver: "a.example.com,b.example.com", count: "2"}, "", nil, []string{driver}},
		"a driver with a count":   {map[string]string{driver: "a.example.com=2", count: "2"}, "", nil, []string{driver}},
		"no driver":               {map[string]string{driver: "", count: "2"}, "", nil, []string{driver}},
		"too many":                {map[string]string{driver: "gpu.nvidia.com", count: "1e9"}, "", nil, []string{count}},
		"half a device":           {map[string]string{driver: "gpu.nvidia.com", count: "1.5"}, "", nil, []string{count}},
		"two things are mistaken": {map[string]string{driver: "a b", count: "x"}, "", nil, []string{count, driver}},
	} {
		t.Run(name, func(t *testing.T) {
			d := capacity.Describe(described(c.annotations), capacity.Template{}, capacity.Learned{}, capacity.Settings{})
			require.Equal(t, c.resource, quantities(d.Resources)["nvidia.com/gpu"])
			require.Equal(t, c.devices, d.Devices)
			want := []string{}
			for _, annotation := range c.problems {
				want = append(want, capacity.AnnotationField(annotation))
			}
			require.ElementsMatch(t, want, fields(d.Problems))
		})
	}
}

// The annotation comes before the infrastructure template and Nodes.
func TestMachinesThatAreSaidToHaveNoAcceleratorsHaveNone(t *testing.T) {
	d := capacity.Describe(described(map[string]string{capacity.GPUTypeAnnotation: "nvidia.com/gpu", capacity.GPUCountAnnotation: "0"}),
		template(map[string]any{"capacity": map[string]any{"nvidia.com/gpu": "1"}}), capacity.Learned{Capacity: list("nvidia.com/gpu", "1")},
		capacity.Settings{})
	require.NotContains(t, d.Resources, corev1.ResourceName("nvidia.com/gpu"))
	require.NotContains(t, d.Sources, "capacity.nvidia.com/gpu")
	require.False(t, d.Resources.Cpu().IsZero())
	require.Empty(t, d.Problems)
}
