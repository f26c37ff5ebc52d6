package nodegroup

import (
	"strconv"
	"strings"
	"time"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capacity"
)

// These are the annotations of a MachineDeployment that replace options of the cluster-autoscaler,
// with the same keys that its provider for Cluster API reads. Their prefix is that of
// MaxNodeProvisionTimeAnnotation in package v1alpha1.
const (
	autoscalingPrefix              = "cluster.x-k8s.io/autoscaling-options-"
	UtilizationThresholdAnnotation = autoscalingPrefix + "scaledownutilizationthreshold"
	GPUThresholdAnnotation         = autoscalingPrefix + "scaledowngpuutilizationthreshold"
	UnneededTimeAnnotation         = autoscalingPrefix + "scaledownunneededtime"
	UnreadyTimeAnnotation          = autoscalingPrefix + "scaledownunreadytime"
)

// AutoscalingOptions are the options of the cluster-autoscaler that a node group replaces. Those
// that are nil are not replaced.
type AutoscalingOptions struct {
	UtilizationThreshold, GPUUtilizationThreshold   *float64
	UnneededTime, UnreadyTime, MaxNodeProvisionTime *time.Duration
}

// Empty reports whether no option is replaced.
func (o AutoscalingOptions) Empty() bool { return o == AutoscalingOptions{} }

// autoscalingOptions reads the options from the annotations, except for MaxNodeProvisionTime, which
// claims use as well. Values that cannot be used are reported and left out.
func autoscalingOptions(annotations map[string]string) (o AutoscalingOptions, problems []capacity.Problem) {
	problem := func(key, message string) {
		problems = append(problems, capacity.Problem{Field: capacity.AnnotationField(key), Value: annotations[key], Message: message})
	}
	share := func(key string, into **float64) {
		text, present := annotations[key]
		if !present {
			return
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
		if err != nil || !(value >= 0 && value <= 1) {
			problem(key, "is not a share; write a number from 0 to 1, for example 0.5")
			return
		}
		*into = &value
	}
	duration := func(key string, into **time.Duration) {
		text, present := annotations[key]
		if !present {
			return
		}
		value, err := time.ParseDuration(strings.ToLower(strings.TrimSpace(text)))
		if err != nil || value < 0 {
			problem(key, `is not a duration; write one such as "10m" or "1h30m"`)
			return
		}
		*into = &value
	}
	share(UtilizationThresholdAnnotation, &o.UtilizationThreshold)
	share(GPUThresholdAnnotation, &o.GPUUtilizationThreshold)
	duration(UnneededTimeAnnotation, &o.UnneededTime)
	duration(UnreadyTimeAnnotation, &o.UnreadyTime)
	return o, problems
}
