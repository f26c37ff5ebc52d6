package kubectl

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// The cause of a warning may have been removed since, so its age is part of it.
func TestWarningsOfTheHubHaveTheirAge(t *testing.T) {
	event := func(name, reason string, age time.Duration) *corev1.Event {
		return &corev1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: "fleet", Name: name},
			InvolvedObject: corev1.ObjectReference{Kind: "MachineDeployment", Namespace: "fleet", Name: "workers"},
			Type:           corev1.EventTypeWarning, Reason: reason, Message: "it was wrong", LastTimestamp: metav1.NewTime(time.Now().Add(-age)),
		}
	}
	builder := fake.NewClientBuilder().WithObjects(
		event("a", "Older", 5*time.Minute), event("b", "Newer", 10*time.Second), event("c", "Old", 24*time.Hour))
	for field, value := range map[string]func(*corev1.Event) string{
		"involvedObject.kind": func(e *corev1.Event) string { return e.InvolvedObject.Kind },
		"involvedObject.name": func(e *corev1.Event) string { return e.InvolvedObject.Name },
		"type":                func(e *corev1.Event) string { return e.Type },
	} {
		builder = builder.WithIndex(&corev1.Event{}, field, func(o client.Object) []string {
			return []string{value(o.(*corev1.Event))} //nolint:forcetypeassert // it is one
		})
	}
	warnings, err := (&hub{kube: builder.Build()}).warnings(t.Context(), "MachineDeployment", "fleet", "workers")
	require.NoError(t, err)
	require.Len(t, warnings, 2)
	require.Regexp(t, `^Newer \(1[0-9]s ago\): it was wrong$`, warnings[0])
	require.Regexp(t, `^Older \(5m.* ago\): it was wrong$`, warnings[1])
}
