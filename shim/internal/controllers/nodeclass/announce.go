package nodeclass

import (
	"context"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// Announce publishes a warning that concerns all NodeClasses, as an event on each of them. It logs
// errors.
func Announce(ctx context.Context, kube client.Reader, recorder events.Recorder, reason, message string) {
	nodeClasses := &v1alpha1.ClusterAPINodeClassList{}
	if err := kube.List(ctx, nodeClasses); err != nil {
		log.FromContext(ctx).Error(err, "listing NodeClasses for an event", "reason", reason)
		return
	}
	for i := range nodeClasses.Items {
		recorder.Publish(events.Event{
			InvolvedObject: &nodeClasses.Items[i],
			Type:           corev1.EventTypeWarning,
			Reason:         reason,
			Message:        lo.Substring(message, 0, 1024),
			DedupeValues:   []string{string(nodeClasses.Items[i].UID), message},
		})
	}
}
