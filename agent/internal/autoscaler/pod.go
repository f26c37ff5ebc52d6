package autoscaler

import (
	"errors"

	corev1 "k8s.io/api/core/v1"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/excerpt"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
)

const (
	// maxContainers is the maximum number of a Pod's containers, and of its init containers.
	maxContainers = 500
	// maxResources is the maximum number of resources that a container requests.
	maxResources = 128
)

// These are the fields of a Pod that determine what it requests, by their numbers in Kubernetes'
// generated.proto. An encoded Pod of 256 KiB could otherwise become a hundred megabytes, and a
// quantity such as 1e1000000000 takes gigabytes to calculate with.
var (
	quantities = excerpt.Fields{
		1: {Name: "key"},
		2: {Name: "value", Inside: excerpt.Fields{1: {Name: "string", Check: isQuantity}}},
	}
	resources  = excerpt.Fields{2: {Name: "requests", Most: maxResources, Inside: quantities}}
	containers = excerpt.Fields{
		8: {Name: "resources", Most: 1, Inside: resources}, 24: {Name: "restartPolicy"},
	}
	podFields = excerpt.Fields{
		1: {Name: "metadata", Most: 1, Inside: excerpt.Fields{1: {Name: "name"}, 3: {Name: "namespace"}}},
		2: {Name: "spec", Most: 1, Inside: excerpt.Fields{
			2: {Name: "containers", Most: maxContainers, Inside: containers}, 20: {Name: "initContainers", Most: maxContainers, Inside: containers},
			32: {Name: "overhead", Most: maxResources, Inside: quantities}, 40: {Name: "resources", Most: 1, Inside: resources},
		}},
	}
)

func isQuantity(value []byte) error {
	if _, err := wire.Quantity(string(value)); err != nil {
		return errors.New("is not a quantity that a pod can request")
	}
	return nil
}

// ParsePod returns what an encoded Pod requests, with its name. Nothing else of it is decoded. The
// error is an [*InvalidError].
func ParsePod(encoded []byte) (*corev1.Pod, error) {
	needed, err := excerpt.Of(encoded, podFields)
	if of, ok := errors.AsType[*excerpt.FieldError](err); ok {
		return nil, &InvalidError{Field: "pod_bytes." + of.Field, Message: of.Message}
	}
	var pod corev1.Pod
	if err != nil || pod.Unmarshal(needed) != nil {
		return nil, &InvalidError{Field: "pod_bytes", Message: "is not an encoded Pod"}
	}
	return &pod, nil
}
