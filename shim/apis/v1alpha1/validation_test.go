package v1alpha1_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/apiservertest"
)

func TestTheAPIServerRefusesWhatCannotBe(t *testing.T) {
	kube := apiservertest.Start(t, "shim").Client

	for name, test := range map[string]struct {
		spec string
		says []string // empty if it is accepted
	}{
		"nothing": {spec: "{}"},
		"everything": {spec: `
kubelet:
  maxPods: 110
  podsPerCore: 10
  kubeReserved: {cpu: 100m, memory: 1Gi, ephemeral-storage: "1.5Gi"}
  systemReserved: {cpu: "1"}
  evictionHard: {memory.available: 500Mi, nodefs.available: 12.5%}
drift: {nodeGroupNotSelected: Ignore, machineNotUpToDate: Replace}
price: {whenUnknown: Unavailable}
maxNodeProvisionTime: 1h30m`},
		"waiting for no machine":          {spec: `maxNodeProvisionTime: 9s`, says: []string{"maxNodeProvisionTime must be from 10s to 168h"}},
		"waiting for a machine for ever":  {spec: `maxNodeProvisionTime: 169h`, says: []string{"maxNodeProvisionTime must be from 10s to 168h"}},
		"waiting for a machine some time": {spec: `maxNodeProvisionTime: long`, says: []string{"spec.maxNodeProvisionTime", "should match"}},
		"thresholds that are none":        {spec: `kubelet: {evictionHard: {memory.available: "0%", nodefs.available: "100%"}}`},
		"no pods":                         {spec: `kubelet: {maxPods: 0}`, says: []string{"spec.kubelet.maxPods", "greater than or equal to 1"}},
		"no pods per core":                {spec: `kubelet: {podsPerCore: 0}`, says: []string{"spec.kubelet.podsPerCore", "greater than or equal to 1"}},
		"reserving another resource": {
			spec: `kubelet: {kubeReserved: {pid: "100"}}`,
			says: []string{"spec.kubelet.kubeReserved", "kubeReserved may contain only cpu, memory and ephemeral-storage"},
		},
		"reserving another resource for the system": {
			spec: `kubelet: {systemReserved: {pods: "1"}}`,
			says: []string{"spec.kubelet.systemReserved", "systemReserved may contain only cpu, memory and ephemeral-storage"},
		},
		"reserving no quantity": {
			spec: `kubelet: {systemReserved: {memory: much}}`, says: []string{"spec.kubelet.systemReserved", "write a quantity, for example 100m or 1Gi"},
		},
		"reserving less than nothing": {
			spec: `kubelet: {kubeReserved: {cpu: "-1"}}`, says: []string{"spec.kubelet.kubeReserved", "write a quantity, for example 100m or 1Gi"},
		},
		"reserving what takes a gigabyte to calculate": {
			spec: `kubelet: {kubeReserved: {cpu: "1e1000000000"}}`, says: []string{"write a quantity, for example 100m or 1Gi"},
		},
		"reserving a percentage": {spec: `kubelet: {kubeReserved: {cpu: "5%"}}`, says: []string{"write a quantity, for example 100m or 1Gi"}},
		"evicting on another signal": {
			spec: `kubelet: {evictionHard: {imagefs.available: 15%}}`,
			says: []string{"spec.kubelet.evictionHard", "evictionHard may contain only memory.available and nodefs.available"},
		},
		"evicting at more than everything": {
			spec: `kubelet: {evictionHard: {nodefs.available: 101%}}`,
			says: []string{"spec.kubelet.evictionHard", "write a quantity or a percentage up to 100%, for example 100Mi or 5%"},
		},
		"evicting at no threshold": {spec: `kubelet: {evictionHard: {memory.available: "<5%"}}`, says: []string{"write a quantity or a percentage"}},
		"evicting on nothing":      {spec: `kubelet: {evictionHard: {}}`, says: []string{"spec.kubelet.evictionHard"}},
		"another drift action": {
			spec: `drift: {nodeGroupNotSelected: Never}`, says: []string{"spec.drift.nodeGroupNotSelected", `"Replace", "Ignore"`},
		},
		"another price policy": {spec: `price: {whenUnknown: Guess}`, says: []string{"spec.price.whenUnknown", `"Estimate", "Unavailable"`}},
		"a selector with an operator that is none": {
			spec: `scalableResourceSelector: {matchExpressions: [{key: team, operator: Near}]}`,
			says: []string{"must be one of In, NotIn, Exists, DoesNotExist"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			spec := map[string]any{}
			require.NoError(t, yaml.Unmarshal([]byte(test.spec), &spec))
			object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
			object.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("ClusterAPINodeClass"))
			object.SetName(strings.ReplaceAll(name, " ", "-"))
			err := kube.Create(t.Context(), object, &client.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if len(test.says) == 0 {
				require.NoError(t, err)
				return
			}
			for _, said := range test.says {
				require.ErrorContains(t, err, said)
			}
		})
	}
}
