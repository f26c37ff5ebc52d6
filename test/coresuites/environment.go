package coresuites

import (
	"context"
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// Node groups for the suites: as many of a kind as a cloud has, in two zones, and as spot machines,
// too.
var (
	cpus          = []int64{1, 2, 4, 8, 16, 32}
	zones         = []string{"zone-a", "zone-b"}
	capacityTypes = []string{karpenterv1.CapacityTypeOnDemand, karpenterv1.CapacityTypeSpot}
	machineSizes  = map[string]int64{"c": 2, "m": 4} // GiB of memory per CPU
)

// slowType is an instance type of two CPUs whose machines join later than all others. Karpenter
// counts the pods of a CapacityBuffer on the machines whose provider IDs it knows, once in 30 s; a
// machine that is ready before, as the others are, is empty until then, and these specs have empty
// Nodes consolidated after 0 s.
const (
	slowType      = "slow-2"
	slowJoinDelay = 40 * time.Second
)

// armCPUs are the sizes of the few machines with another architecture, which some specs require.
// They have the memory of family m.
var armCPUs = []int64{1, 2, 4}

//go:embed nodeclass.yaml nodepool.yaml
var defaults embed.FS

// Part is a part of a suite that runs with a default NodePool of its own.
type Part struct {
	Suite string
	// Specs is a prefix of the names of the part's specs. If it is empty, the part has all specs of
	// the suite that no other part has.
	Specs string
	// InstanceTypes are those that the NodePool allows. Absent: all but those of other parts.
	InstanceTypes []string
}

// parts are the specs that require a NodePool of their own. Core gives them one where they run
// against its own provider: with one machine for each pod that they make room for.
var parts = []Part{{Suite: "regression", Specs: "CapacityBuffer", InstanceTypes: []string{slowType}}}

// Parts returns the parts of a suite, which together have all its specs.
func Parts(suite string) []Part {
	return append([]Part{{Suite: suite}}, lo.Filter(parts, func(p Part, _ int) bool { return p.Suite == suite })...)
}

// Others returns the prefixes of the names of the suite's specs that are in other parts.
func (p Part) Others() []string {
	return lo.FilterMap(parts, func(other Part, _ int) (string, bool) { return other.Specs, p.Specs == "" && other.Suite == p.Suite })
}

// Has reports whether the spec is in the part. What runs before or after all specs does so in every
// part.
func (p Part) Has(s Spec) bool {
	ofOther := slices.ContainsFunc(p.Others(), func(other string) bool { return strings.HasPrefix(s.Name, other) })
	return s.OfSuite || strings.HasPrefix(s.Name, p.Specs) && !ofOther
}

// WriteDefaults writes the part's default NodeClass and NodePool to a folder.
func (p Part) WriteDefaults(dir string) (nodeClass, nodePool string, err error) {
	paths := [2]string{}
	for i, name := range []string{"nodeclass.yaml", "nodepool.yaml"} {
		content, err := defaults.ReadFile(name)
		if err != nil {
			return "", "", err
		}
		if name == "nodepool.yaml" {
			if content, err = p.allowed(content); err != nil {
				return "", "", err
			}
		}
		paths[i] = filepath.Join(dir, name)
		if err := os.WriteFile(paths[i], content, 0o600); err != nil {
			return "", "", err
		}
	}
	return paths[0], paths[1], nil
}

// allowed returns the NodePool with a requirement that allows the part's instance types only.
func (p Part) allowed(nodePool []byte) ([]byte, error) {
	operator, instanceTypes := corev1.NodeSelectorOpIn, p.InstanceTypes
	if len(instanceTypes) == 0 {
		operator = corev1.NodeSelectorOpNotIn
		instanceTypes = lo.FlatMap(parts, func(other Part, _ int) []string { return other.InstanceTypes })
	}
	var object map[string]any
	if err := yaml.Unmarshal(nodePool, &object); err != nil {
		return nil, err
	}
	path := []string{"spec", "template", "spec", "requirements"}
	requirements, _, err := unstructured.NestedSlice(object, path...)
	if err != nil {
		return nil, err
	}
	requirements = append(requirements, map[string]any{
		"key": corev1.LabelInstanceTypeStable, "operator": string(operator), "values": lo.ToAnySlice(instanceTypes),
	})
	if err := unstructured.SetNestedSlice(object, requirements, path...); err != nil {
		return nil, err
	}
	return yaml.Marshal(object)
}

// FeatureGates returns the feature gates of core with which a suite runs. Terminating first is only
// for the suite whose specs of it enable it: with it, core disrupts more Nodes of a static NodePool
// at a time than the specs of suite regression expect.
func FeatureGates(suite string) []string {
	gates := []string{"NodeRepair", "NodeOverlay", "StaticCapacity", "CapacityBuffer"}
	if suite == "disruption" {
		gates = append(gates, "TerminateFirstDrift", "TerminateFirstRepair")
	}
	return gates
}

// settings returns a Deployment that runs nothing. Suites read Karpenter's settings from it, and
// change and restart it where they need others.
func settings(featureGates []string) *appsv1.Deployment {
	labels := map[string]string{"app.kubernetes.io/name": "karpenter"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "karpenter"},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(0)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{
					Name: "controller", Image: "karpenter",
					Env: []corev1.EnvVar{{Name: "FEATURE_GATES", Value: strings.Join(featureGates, "=true,") + "=true"}},
				}}},
			},
		},
	}
}

// Prepare creates the node groups, and the Deployment with the settings of a suite.
func Prepare(ctx context.Context, hub, spoke client.Client, suite string) error {
	if err := spoke.Create(ctx, settings(FeatureGates(suite))); err != nil {
		return err
	}
	create := func(instanceType, architecture string, cpu, memory int64) error {
		for _, zone := range zones {
			for _, capacityType := range capacityTypes {
				objects, err := group(instanceType, zone, capacityType, architecture, cpu, memory*cpu)
				if err != nil {
					return err
				}
				if err := manifests.ApplyObjects(ctx, hub, objects...); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for family, memory := range machineSizes {
		for _, cpu := range cpus {
			if err := create(fmt.Sprintf("%s-%d", family, cpu), karpenterv1.ArchitectureAmd64, cpu, memory); err != nil {
				return err
			}
		}
	}
	for _, cpu := range armCPUs {
		if err := create(fmt.Sprintf("arm-%d", cpu), karpenterv1.ArchitectureArm64, cpu, machineSizes["m"]); err != nil {
			return err
		}
	}
	return create(slowType, karpenterv1.ArchitectureAmd64, 2, machineSizes["c"])
}

// group returns the crowd's node group with different machines.
func group(instanceType, zone, capacityType, architecture string, cpu, memory int64) ([]*unstructured.Unstructured, error) {
	objects, err := manifests.LoadAs(manifests.CrowdHub, "crowd", fmt.Sprintf("%s-%s-%s", instanceType, zone, capacityType))
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		switch o.GetKind() {
		case "SimMachineTemplate":
			spec, _, err := unstructured.NestedMap(o.Object, "spec", "template", "spec")
			if err != nil {
				return nil, err
			}
			spec["instanceType"], spec["zone"] = instanceType, zone
			if instanceType == slowType {
				spec["joinDelay"] = slowJoinDelay.String()
			}
			spec["nodeInfo"] = map[string]any{"architecture": architecture}
			// As everywhere, and as nodeclass.yaml says: specs rely on it that a pod of one CPU
			// does not fit on a machine of one.
			spec["kubeReserved"] = map[string]any{"cpu": "80m", "memory": "256Mi"}
			spec["capacity"] = map[string]any{
				"cpu": strconv.FormatInt(cpu, 10), "memory": fmt.Sprintf("%dGi", memory), "pods": "110", "ephemeral-storage": "100Gi",
			}
			if err := unstructured.SetNestedMap(o.Object, spec, "spec", "template", "spec"); err != nil {
				return nil, err
			}
		case "MachineDeployment":
			labels := o.GetLabels()
			labels["fleet.example.com/pool"] = "core"
			o.SetLabels(labels)
			o.SetAnnotations(lo.Assign(o.GetAnnotations(), map[string]string{
				"capacity.cluster-autoscaler.kubernetes.io/labels": fmt.Sprintf("%s=%s,%s=%s,%s=%s", corev1.LabelInstanceTypeStable, instanceType,
					karpenterv1.CapacityTypeLabelKey, capacityType, corev1.LabelTopologyZone, zone),
			}))
		}
	}
	return objects, nil
}
