package hub

import "sigs.k8s.io/controller-runtime/pkg/config"

// Controllers returns the settings of controllers on the hub.
func Controllers() config.Controller {
	return config.Controller{
		SkipNameValidation: new(true),
		// One object must not end the process that serves all Clusters.
		RecoverPanic: new(true),
		// The priority queue can deadlock at shutdown, and the process would then exceed its grace
		// period: controller-runtime issue 3538, in all releases that match this Kubernetes
		// version.
		UsePriorityQueue: new(false),
	}
}
