package hub

import "sigs.k8s.io/controller-runtime/pkg/config"

// Controllers is how controllers on the hub run.
func Controllers() config.Controller {
	return config.Controller{
		SkipNameValidation: new(true),
		// It can deadlock when it is shut down, and the process would not end within its grace period: controller-runtime issue
		// 3538, in all releases that go with this Kubernetes.
		UsePriorityQueue: new(false),
	}
}
