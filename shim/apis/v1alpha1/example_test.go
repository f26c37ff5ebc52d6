package v1alpha1_test

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// A NodeClass that selects the node groups whose MachineDeployments have a label.
func ExampleClusterAPINodeClass() {
	class := v1alpha1.ClusterAPINodeClass{
		TypeMeta:   metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "ClusterAPINodeClass"},
		ObjectMeta: metav1.ObjectMeta{Name: "gpu"},
		Spec: v1alpha1.ClusterAPINodeClassSpec{
			ScalableResourceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"hardware": "gpu"}},
		},
	}
	text, err := yaml.Marshal(class.Spec)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(string(text))
	// Output:
	// scalableResourceSelector:
	//   matchLabels:
	//     hardware: gpu
}
