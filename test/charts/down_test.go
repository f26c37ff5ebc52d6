package charts_test

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/karpenter-capi/karpenter-capi/test/monitoring"
)

// Another release that Prometheus scrapes does not hide that none of this one's pods answers. For
// the shim, it may be one for another Cluster, or any other Karpenter, which has the same metric.
func TestAReleaseThatIsDownIsMissed(t *testing.T) {
	for _, c := range charts {
		for name, monitor := range map[string]string{
			"a ServiceMonitor": "metrics.serviceMonitor.enabled=true",
			"a PodMonitor":     "metrics.podMonitor.enabled=true,metrics.podMonitor.authorization.credentials.name=token",
			"a ServiceMonitor that adds a label": "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.relabelings[0].targetLabel=spoke," +
				"metrics.serviceMonitor.relabelings[0].replacement=east",
		} {
			t.Run(c.name+" with "+name, func(t *testing.T) {
				alert, target := down(t, c, monitor)
				require.Equal(t, target, missed(t, alert, target,
					map[string]string{"namespace": target["namespace"], "job": "other"}, map[string]string{"namespace": "other", "job": target["job"]}))
				require.Equal(t, target, missed(t, alert, target), "without others")
			})
		}
	}
}

// Where the chart does not know these labels, an alert that looks for them would fire for ever.
func TestAReleaseWhoseTargetHasUnknownLabelsIsNotMissedInVain(t *testing.T) {
	relabeled := func(with string) string {
		return "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor." + with
	}
	for _, c := range charts {
		cases := map[string]string{
			"no monitor":               "metrics.secure=false",
			"another job":              relabeled("relabelings[0].targetLabel=job"),
			"another namespace":        relabeled("metricRelabelings[0].targetLabel=namespace"),
			"labels that are mapped":   relabeled("relabelings[0].action=LabelMap"),
			"labels that are dropped":  relabeled("metricRelabelings[0].action=labeldrop"),
			"a PodMonitor's other job": "metrics.secure=false,metrics.podMonitor.enabled=true,metrics.podMonitor.relabelings[0].targetLabel=job",
		}
		if c.name == "shim" { // another provider's Karpenter still runs
			cases["an adoption that is planned"] = "metrics.serviceMonitor.enabled=true,planAdoption=true"
		}
		for name, monitor := range cases {
			t.Run(c.name+" with "+name, func(t *testing.T) {
				alert, _ := down(t, c, monitor)
				target := map[string]string{"namespace": "chosen", "job": "chosen"}
				require.Empty(t, missed(t, alert, target, map[string]string{"namespace": "other", "job": "other"}), "another release answers")
				require.NotNil(t, missed(t, alert, target))
			})
		}
	}
}

// down returns the alert of a release that is down, and the labels that the Prometheus operator
// gives to the targets of the release's monitor, if it has one.
func down(t *testing.T, c chart, set string) (alert monitoring.Alert, target map[string]string) {
	t.Helper()
	objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), "--set", set+",metrics.prometheusRule.enabled=true")
	for _, o := range objects {
		switch o.GetKind() {
		case "PrometheusRule":
			var rule struct {
				Spec monitoring.Rules `json:"spec"`
			}
			require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &rule))
			alert = rule.Spec.Groups[0].Rules[0]
		case "ServiceMonitor":
			target = map[string]string{"namespace": o.GetNamespace(), "job": scrapedService(t, objects, o)}
		case "PodMonitor":
			target = map[string]string{"namespace": o.GetNamespace(), "job": o.GetNamespace() + "/" + o.GetName()}
		}
	}
	require.True(t, strings.HasSuffix(alert.Alert, "Down"), alert.Alert)
	return alert, target
}

// scrapedService returns the name of the service that a ServiceMonitor selects, which is the job of
// its targets.
func scrapedService(t *testing.T, objects []*unstructured.Unstructured, monitor *unstructured.Unstructured) string {
	t.Helper()
	require.NotContains(t, monitor.Object["spec"], "jobLabel")
	selected, _, err := unstructured.NestedStringMap(monitor.Object, "spec", "selector", "matchLabels")
	require.NoError(t, err)
	services := lo.Filter(of[corev1.Service](t, objects, "Service"), func(s corev1.Service, _ int) bool {
		return labels.SelectorFromSet(selected).Matches(labels.Set(s.Labels))
	})
	require.Len(t, services, 1)
	return services[0].Name
}

// missed evaluates the alert on what a process of the component served until it was killed, with
// the labels of a target, while other targets are scraped all the time. It returns the labels of
// the alert, or nil if it does not fire.
func missed(t *testing.T, alert monitoring.Alert, target map[string]string, others ...map[string]string) map[string]string {
	t.Helper()
	recordings, err := monitoring.Recordings(root(t))
	require.NoError(t, err)
	killed := 10 * time.Minute
	course := monitoring.Course{Target: target, Begins: killed, Until: time.Hour}
	series, err := monitoring.Unfold(recordings[alert.Alert].Recording, course)
	require.NoError(t, err)
	for _, other := range others {
		course.Target, course.Begins = other, course.Until+monitoring.Step
		beside, err := monitoring.Unfold(recordings[alert.Alert].Recording, course)
		require.NoError(t, err)
		series = append(series, beside...)
	}
	at, firing, err := monitoring.NewEngine().Firings(t.Context(), series, alert, course.From, course.Until)
	require.NoError(t, err)
	if len(firing) == 0 {
		return nil
	}
	require.Len(t, firing, 1)
	wait, err := alert.Wait()
	require.NoError(t, err)
	require.Equal(t, killed+wait, at)
	return maps.Clone(firing[0].Map())
}
