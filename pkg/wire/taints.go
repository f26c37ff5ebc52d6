package wire

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Taints converts taints from the wire. It returns the usable taints, and an error that names each
// unusable one.
func Taints(taints []*agentv1alpha1.Taint) ([]corev1.Taint, error) {
	converted := make([]corev1.Taint, 0, len(taints))
	var errs []error
	for _, taint := range taints {
		t, err := Taint(taint)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		converted = append(converted, t)
	}
	return converted, errors.Join(errs...)
}

// Taint converts a taint from the wire.
func Taint(taint *agentv1alpha1.Taint) (corev1.Taint, error) {
	if taint.GetKey() == "" {
		return corev1.Taint{}, errors.New("a taint has no key")
	}
	effect := corev1.TaintEffect(taint.GetEffect())
	switch effect {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		return corev1.Taint{Key: taint.GetKey(), Value: taint.GetValue(), Effect: effect}, nil
	}
	return corev1.Taint{}, fmt.Errorf("taint %q: effect %q is not one of NoSchedule, PreferNoSchedule, NoExecute",
		taint.GetKey(), taint.GetEffect())
}

// FromTaints converts taints for the wire. It returns nil for an empty list.
func FromTaints(taints []corev1.Taint) []*agentv1alpha1.Taint {
	if len(taints) == 0 {
		return nil
	}
	converted := make([]*agentv1alpha1.Taint, 0, len(taints))
	for _, taint := range taints {
		converted = append(converted, &agentv1alpha1.Taint{Key: taint.Key, Value: taint.Value, Effect: string(taint.Effect)})
	}
	return converted
}
