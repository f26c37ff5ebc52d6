package coresuites

import (
	"context"
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// Node groups that suites find: as many of a kind as a cloud has, in two zones.
var (
	cpus         = []int64{1, 2, 4, 8, 16, 32}
	zones        = []string{"zone-a", "zone-b"}
	machineSizes = map[string]int64{"c": 2, "m": 4} // GiB of memory for each CPU
)

//go:embed nodeclass.yaml nodepool.yaml
var defaults embed.FS

// WriteDefaults writes the node class and the NodePool that the suites start from into a folder.
func WriteDefaults(dir string) (nodeClass, nodePool string, err error) {
	paths := [2]string{}
	for i, name := range []string{"nodeclass.yaml", "nodepool.yaml"} {
		content, err := defaults.ReadFile(name)
		if err != nil {
			return "", "", err
		}
		paths[i] = filepath.Join(dir, name)
		if err := os.WriteFile(paths[i], content, 0o600); err != nil {
			return "", "", err
		}
	}
	return paths[0], paths[1], nil
}

// Prepare makes the node groups.
func Prepare(ctx context.Context, hub client.Client) error {
	for family, memory := range machineSizes {
		for _, cpu := range cpus {
			for _, zone := range zones {
				objects, err := group(fmt.Sprintf("%s-%d-%s", family, cpu, zone), fmt.Sprintf("%s-%d", family, cpu), zone, cpu, memory*cpu)
				if err != nil {
					return err
				}
				if err := manifests.ApplyObjects(ctx, hub, objects...); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// group is the crowd's node group with another machine.
func group(name, instanceType, zone string, cpu, memory int64) ([]*unstructured.Unstructured, error) {
	objects, err := manifests.LoadAs(manifests.CrowdHub, "crowd", name)
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
		}
	}
	return objects, nil
}
