// Package charts_test renders the Helm charts with the values in their ci folders, and checks the
// result against a real API server, the Pod Security Standards, and for consistency.
package charts_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/yaml"
	podsecurityapi "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/monitoring"
)

// Objects of these groups are for operators that the tests' API server does not have.
var foreignGroups = []string{"cert-manager.io", "monitoring.coreos.com"}

// chart is one of our charts, as a user installs it.
type chart struct {
	name      string
	release   string
	namespace string
}

var charts = []chart{
	{name: "agent", release: "capi-agent", namespace: "capi-agent-system"},
	{name: "shim", release: "karpenter", namespace: "karpenter"},
}

func TestRenderedManifests(t *testing.T) {
	server := strictServer(t)

	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		objects := render(t, c, values)

		t.Run("are accepted by the API server", func(t *testing.T) {
			for _, object := range objects {
				dryRun(t, server, object)
			}
		})
		t.Run("meet the restricted Pod Security Standard", func(t *testing.T) {
			evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
			require.NoError(t, err)
			for _, deployment := range of[appsv1.Deployment](t, objects, "Deployment") {
				template := deployment.Spec.Template
				restricted := podsecurityapi.LevelVersion{Level: podsecurityapi.LevelRestricted, Version: podsecurityapi.LatestVersion()}
				result := policy.AggregateCheckResults(evaluator.EvaluatePod(restricted, &template.ObjectMeta, &template.Spec))
				require.True(t, result.Allowed, result.ForbiddenDetail())
			}
		})
		t.Run("select their own pods", func(t *testing.T) {
			deployments := of[appsv1.Deployment](t, objects, "Deployment")
			require.Len(t, deployments, 1)
			pod := deployments[0].Spec.Template
			ports := lo.FlatMap(pod.Spec.Containers, func(c corev1.Container, _ int) []corev1.ContainerPort { return c.Ports })
			for _, service := range of[corev1.Service](t, objects, "Service") {
				require.True(t, labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pod.Labels)), service.Name)
				for _, port := range service.Spec.Ports {
					require.True(t, lo.ContainsBy(ports, func(p corev1.ContainerPort) bool { return p.Name == port.TargetPort.StrVal }),
						"service %s names the port %q", service.Name, port.TargetPort.StrVal)
				}
			}
			for _, of := range of[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy") {
				require.True(t, labels.SelectorFromSet(of.Spec.PodSelector.MatchLabels).Matches(labels.Set(pod.Labels)))
				admitted := lo.FlatMap(of.Spec.Ingress, func(r networkingv1.NetworkPolicyIngressRule, _ int) []string {
					return lo.Map(r.Ports, func(p networkingv1.NetworkPolicyPort, _ int) string { return p.Port.StrVal })
				})
				require.ElementsMatch(t, lo.Map(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort, _ int) string { return p.Name }), admitted)
			}
			for _, budget := range of[policyv1.PodDisruptionBudget](t, objects, "PodDisruptionBudget") {
				require.True(t, labels.SelectorFromSet(budget.Spec.Selector.MatchLabels).Matches(labels.Set(pod.Labels)))
			}
		})
		t.Run("bind their roles to the pods' service account", func(t *testing.T) {
			account := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.ServiceAccountName
			accounts := lo.Map(of[corev1.ServiceAccount](t, objects, "ServiceAccount"), func(a corev1.ServiceAccount, _ int) string { return a.Name })
			require.Equal(t, []string{account}, accounts)
			subject := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: c.namespace}
			prometheus := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: "prometheus", Namespace: "monitoring"}
			for _, binding := range of[rbacv1.ClusterRoleBinding](t, objects, "ClusterRoleBinding") {
				if strings.Contains(binding.Name, "metrics-reader") {
					require.Equal(t, []rbacv1.Subject{prometheus}, binding.Subjects)
				} else {
					require.Equal(t, []rbacv1.Subject{subject}, binding.Subjects)
				}
				require.Contains(t, names(objects, binding.RoleRef.Kind, ""), binding.RoleRef.Name)
			}
			for _, binding := range of[rbacv1.RoleBinding](t, objects, "RoleBinding") {
				require.Equal(t, []rbacv1.Subject{subject}, binding.Subjects)
				require.Contains(t, names(objects, binding.RoleRef.Kind, binding.Namespace), binding.RoleRef.Name)
			}
		})
		t.Run("grant no secrets but the shim's own two, no wildcards, nothing that grants more", func(t *testing.T) {
			for _, role := range of[rbacv1.ClusterRole](t, objects, "ClusterRole") {
				for _, rule := range role.Rules {
					require.NotContains(t, rule.Resources, "secrets")
				}
			}
			for _, rule := range rules(t, objects) {
				require.Empty(t, lo.Intersect(rule.Verbs, []string{"*", "bind", "escalate", "impersonate"}))
				require.NotContains(t, rule.APIGroups, "*")
				if lo.Contains(rule.Resources, "secrets") {
					require.Equal(t, "shim", c.name)
					require.Len(t, rule.ResourceNames, 1)
					require.NotEmpty(t, rule.Verbs)
					require.Subset(t, []string{"get", "update"}, rule.Verbs)
				}
				for _, resource := range rule.Resources {
					require.False(t, strings.HasPrefix(resource, "*"), resource)
				}
			}
		})
		t.Run("pass only flags that exist", func(t *testing.T) {
			options, err := os.ReadFile(filepath.Join(root(t), "docs", "options.md"))
			require.NoError(t, err)
			for _, deployment := range of[appsv1.Deployment](t, objects, "Deployment") {
				for _, container := range deployment.Spec.Template.Spec.Containers {
					for _, arg := range container.Args {
						flag, _, _ := strings.Cut(arg, "=")
						require.Contains(t, string(options), "`"+flag+"`", "in docs/options.md")
					}
				}
			}
		})
	})
}

func TestAgentConfinedToNamespacesGetsNoClusterWideRights(t *testing.T) {
	objects := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/confined-values.yaml"))

	for _, role := range of[rbacv1.ClusterRole](t, objects, "ClusterRole") {
		for _, rule := range role.Rules {
			granted := slices.Concat(rule.Resources, rule.NonResourceURLs)
			require.Len(t, granted, 1)
			require.Contains(t, []string{"customresourcedefinitions", "tokenreviews", "subjectaccessreviews", "/metrics"}, granted[0])
		}
	}
	namespaces := lo.Map(of[rbacv1.Role](t, objects, "Role"), func(r rbacv1.Role, _ int) string { return r.Namespace })
	require.ElementsMatch(t, []string{"team-a", "team-b", charts[0].namespace}, namespaces)
	for _, role := range of[rbacv1.Role](t, objects, "Role") {
		if role.Namespace == charts[0].namespace {
			require.Equal(t, []string{"configmaps", "events"}, lo.FlatMap(role.Rules, func(r rbacv1.PolicyRule, _ int) []string { return r.Resources }))
			require.Equal(t, []string{"capi-agent-policy"}, role.Rules[0].ResourceNames)
		}
	}
}

// A stolen certificate is denied while the pods keep running: they watch the policy's ConfigMap from their
// start, and nothing of its content is in their template.
func TestTheFirstDenialChangesTheConfigMapAlone(t *testing.T) {
	const name = "capi-agent-policy"
	deny := `policy.deny=[{"id":"spiffe://karpenter-capi/cluster/team-a/production","issuedBefore":"2026-11-20T12:00:00Z"}]`
	for _, values := range []string{"defaults", "confined", "volume"} {
		t.Run(values, func(t *testing.T) {
			file := filepath.Join(chartPath(t, charts[0]), "ci", values+"-values.yaml")
			before, after := render(t, charts[0], file), render(t, charts[0], file, "--set-json", deny)
			policies := lo.Map([][]*unstructured.Unstructured{before, after}, func(objects []*unstructured.Unstructured, _ int) string {
				configMap, found := lo.Find(of[corev1.ConfigMap](t, objects, "ConfigMap"), func(m corev1.ConfigMap) bool { return m.Name == name })
				require.True(t, found)
				return strings.TrimSpace(configMap.Data["policy.yaml"])
			})
			require.Equal(t, "identities: []", policies[0], "the agent refuses an empty text")
			require.Contains(t, policies[1], "deny:")
			others := func(objects []*unstructured.Unstructured) []*unstructured.Unstructured {
				return lo.Reject(objects, func(o *unstructured.Unstructured, _ int) bool {
					return o.GetKind() == "ConfigMap" && o.GetName() == name
				})
			}
			require.Equal(t, others(before), others(after))

			args := of[appsv1.Deployment](t, before, "Deployment")[0].Spec.Template.Spec.Containers[0].Args
			require.Contains(t, args, "--policy="+charts[0].namespace+"/"+name)
			require.True(t, lo.ContainsBy(of[rbacv1.Role](t, before, "Role"), func(r rbacv1.Role) bool {
				return r.Namespace == charts[0].namespace && slices.Equal(r.Rules[0].ResourceNames, []string{name})
			}))
		})
	}
}

// The agent accepts one policy. Another one of --policy would silently take effect instead of the chart's.
func TestAnotherPolicyThanTheChartsNeedsNull(t *testing.T) {
	defaults := filepath.Join(chartPath(t, charts[0]), "ci", "defaults-values.yaml")
	for _, set := range []string{
		"extraArgs={--policy-file=/etc/policy/policy.yaml}", "extraArgs={--policy=team-a/policy}", "extraArgs={--policy,team-a/policy}",
		"extraEnv[0].name=CAPI_AGENT_POLICY,extraEnv[0].value=team-a/policy", "extraEnv[0].name=CAPI_AGENT_POLICY_FILE,extraEnv[0].value=file",
	} {
		t.Run(set, func(t *testing.T) {
			_, stderr, err := helm(t, "template", charts[0].release, chartPath(t, charts[0]), "--set", "policy.clusters[0]=fleet/a,"+set)
			require.Error(t, err)
			require.Contains(t, stderr, "set policy to null")

			// Helm may replace a null by the chart's own value, which is empty.
			for _, policy := range []string{"policy=null,", ""} {
				objects := render(t, charts[0], defaults, "--set", policy+set)
				args := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0].Args
				require.NotContains(t, args, "--policy="+charts[0].namespace+"/capi-agent-policy")
				require.Empty(t, of[corev1.ConfigMap](t, objects, "ConfigMap"))
				require.Empty(t, of[rbacv1.Role](t, objects, "Role"))
			}
		})
	}
}

// The API server refuses the names of Services and of Jobs' pods' labels that have more than 63 characters.
func TestNamesAreNotTooLong(t *testing.T) {
	for _, c := range charts {
		long := strings.Repeat("a", 60)
		for _, settings := range [][]string{{"--set", "fullnameOverride=" + long}, {"--set", "nameOverride=" + long}} {
			objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "everything-values.yaml"), settings...)
			require.NotEmpty(t, objects)
			for _, o := range objects {
				if lo.Contains([]string{"Service", "Job"}, o.GetKind()) {
					require.LessOrEqual(t, len(o.GetName()), 63, o.GetName())
				}
				for key, value := range o.GetLabels() {
					require.LessOrEqual(t, len(value), 63, key)
				}
			}
		}
	}
	planned := render(t, charts[1], filepath.Join(chartPath(t, charts[1]), "ci", "defaults-values.yaml"),
		"--set", "planAdoption=true,fullnameOverride="+strings.Repeat("a", 60))
	jobs := of[batchv1.Job](t, planned, "Job")
	require.Len(t, jobs, 1)
	require.LessOrEqual(t, len(jobs[0].Name), 60, "the number of the revision has room")
}

// A policy that omits a destination would cut the shim off.
func TestTheShimsNetworkPolicyLetsItCallWhatItCalls(t *testing.T) {
	objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/defaults-values.yaml"),
		"--set", "networkPolicy.enabled=true,networkPolicy.apiServerPorts={16443},agent.address=agent.example:9443")
	require.ElementsMatch(t, []int32{53, 53, 16443, 8443, 9443}, egress(t, objects))

	onSocket := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/sidecar-values.yaml"),
		"--set", "networkPolicy.enabled=true,agent.address=unix:///run/agent/agent-1")
	require.ElementsMatch(t, []int32{53, 53, 443, 6443}, egress(t, onSocket))
}

// A rule without ports allows all connections.
func TestNetworkPoliciesHaveNoRuleWithoutPorts(t *testing.T) {
	for _, c := range charts {
		for _, none := range []string{"[]", "null"} {
			objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"),
				"--set", "networkPolicy.enabled=true", "--set-json", fmt.Sprintf(`networkPolicy.apiServerPorts=%s,networkPolicy.dnsPorts=%[1]s`, none))
			for _, port := range egress(t, objects) {
				require.EqualValues(t, 8443, port, "the agent's")
			}
		}
	}
}

// egress returns the ports to which the single network policy allows connections, to any
// destination.
func egress(t *testing.T, objects []*unstructured.Unstructured) []int32 {
	t.Helper()
	policies := of[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy")
	require.Len(t, policies, 1)
	return lo.FlatMap(policies[0].Spec.Egress, func(r networkingv1.NetworkPolicyEgressRule, _ int) []int32 {
		require.Empty(t, r.To)
		require.NotEmpty(t, r.Ports)
		return lo.Map(r.Ports, func(p networkingv1.NetworkPolicyPort, _ int) int32 { return p.Port.IntVal })
	})
}

func TestTracesGoWhereTheValuesSay(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			defaults := filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml")
			variables := func(set string) map[string]string {
				container := of[appsv1.Deployment](t, render(t, c, defaults, "--set", set), "Deployment")[0].Spec.Template.Spec.Containers[0]
				traces := lo.Filter(container.Env, func(v corev1.EnvVar, _ int) bool { return strings.HasPrefix(v.Name, "OTEL_") })
				return lo.SliceToMap(traces, func(v corev1.EnvVar) (string, string) { return v.Name, v.Value })
			}
			require.Empty(t, variables("tracing.sampler=always_on"), "it is off without an endpoint")
			require.Equal(t, map[string]string{
				"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
			}, variables("tracing.endpoint=http://collector:4317"))
			sampled := variables("tracing.endpoint=http://collector:4317,tracing.sampler=parentbased_traceidratio,tracing.samplerArg=.1")
			require.Equal(t, "parentbased_traceidratio", sampled["OTEL_TRACES_SAMPLER"])
			require.Equal(t, ".1", sampled["OTEL_TRACES_SAMPLER_ARG"])

			confined := render(t, c, defaults, "--set", "networkPolicy.enabled=true,tracing.endpoint=http://collector:14317")
			require.Contains(t, egress(t, confined), int32(14317), "the network policy lets spans out")
		})
	}
}

// This is what helm upgrade --reuse-values does with the values of an older release.
func TestValuesOfAReleaseWithoutSecureMetrics(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), "--set",
				"metrics.secure=null,metrics.tls=null,metrics.readers=null,metrics.serviceMonitor.tlsConfig=null,metrics.podMonitor=null,"+
					"metrics.prometheusRule=null,metrics.dashboard=null,tracing=null,networkPolicy=null"+
					lo.Ternary(c.name == "shim", ",agent.enrollment=null,nodeRepairSkipRemediation=null", ""))
			pod := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			require.Len(t, pod.Volumes, 1)
			for _, arg := range pod.Containers[0].Args {
				require.False(t, strings.HasPrefix(arg, "--metrics-tls") || strings.HasPrefix(arg, "--node-repair"), arg)
			}
		})
	}
}

// Both charts grant the right to review callers only if it is used, and configure Prometheus'
// authentication.
func TestMetricsAreSecureUnlessTheValuesSayOtherwise(t *testing.T) {
	for _, c := range charts {
		for set, secure := range map[string]bool{"metrics.secure=true": true, "metrics.secure=false": false} {
			t.Run(c.name+" "+set, func(t *testing.T) {
				objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), "--set", set+",metrics.serviceMonitor.enabled=true")
				args := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0].Args
				require.Equal(t, !secure, slices.Contains(args, "--metrics-secure=false"))
				asks := lo.ContainsBy(rules(t, objects), func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "tokenreviews") })
				require.Equal(t, secure, asks)
				monitor, found := lo.Find(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "ServiceMonitor" })
				require.True(t, found)
				endpoints, _, err := unstructured.NestedSlice(monitor.Object, "spec", "endpoints")
				require.NoError(t, err)
				require.Len(t, endpoints, 1)
				endpoint, ok := endpoints[0].(map[string]any)
				require.True(t, ok)
				if secure {
					require.Equal(t, "https", endpoint["scheme"])
					require.Contains(t, endpoint, "bearerTokenFile")
					require.Contains(t, endpoint, "tlsConfig")
				} else {
					require.NotContains(t, endpoint, "scheme")
				}
			})
		}
	}
}

func TestAPodMonitorScrapesAsAServiceMonitorDoes(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			defaults := filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml")
			endpoint := func(kind, list, set string) map[string]any {
				monitor, found := lo.Find(render(t, c, defaults, "--set", set), func(o *unstructured.Unstructured) bool { return o.GetKind() == kind })
				require.True(t, found)
				endpoints, _, err := unstructured.NestedSlice(monitor.Object, "spec", list)
				require.NoError(t, err)
				require.Len(t, endpoints, 1)
				endpoint, ok := endpoints[0].(map[string]any)
				require.True(t, ok)
				return endpoint
			}
			const token = ".authorization.credentials.name=token"
			for _, more := range []string{"", "metrics.tls.secretName=metrics,", "metrics.secure=false,"} {
				require.Equal(t, endpoint("ServiceMonitor", "endpoints", more+"metrics.serviceMonitor.enabled=true,metrics.serviceMonitor"+token),
					endpoint("PodMonitor", "podMetricsEndpoints", more+"metrics.podMonitor.enabled=true,metrics.podMonitor"+token), more)
			}
		})
	}
}

// The charts say the same as their files, which test/monitoring checks.
func TestAlertsHaveARunbookAndDashboardsAreForGrafanasSidecar(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			defaults := filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml")
			kinds := func(objects []*unstructured.Unstructured) []string {
				return lo.Map(objects, func(o *unstructured.Unstructured, _ int) string { return o.GetKind() + "/" + o.GetName() })
			}
			for _, kind := range kinds(render(t, c, defaults)) {
				require.False(t, strings.HasPrefix(kind, "PrometheusRule/") || strings.HasSuffix(kind, "-dashboard"), "%s is off", kind)
			}

			all, err := monitoring.Alerts(root(t))
			require.NoError(t, err)
			first := lo.Ternary(c.name == "agent", "CapiAgentDown", "KarpenterCapiDown")
			objects := render(t, c, defaults, "--set", "metrics.dashboard.enabled=true,metrics.prometheusRule.enabled=true,"+
				"metrics.prometheusRule.runbookURL=https://example.com/r,metrics.prometheusRule.disabled={"+first+"}")
			rule, found := lo.Find(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "PrometheusRule" })
			require.True(t, found)
			var prometheusRule struct {
				Spec monitoring.Rules `json:"spec"`
			}
			require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(rule.Object, &prometheusRule))
			alerts := 0
			for _, group := range prometheusRule.Spec.Groups {
				for _, rendered := range group.Rules {
					original, found := lo.Find(all, func(a monitoring.Alert) bool { return a.Alert == rendered.Alert })
					require.True(t, found)
					require.Equal(t, "https://example.com/r#"+strings.ToLower(rendered.Alert), rendered.Annotations["runbook_url"])
					delete(rendered.Annotations, "runbook_url")
					require.Equal(t, original, rendered)
					require.NotEqual(t, first, rendered.Alert, "it is disabled")
					alerts++
				}
			}
			prefix := strings.TrimSuffix(first, "Down")
			require.Equal(t, lo.CountBy(all, func(a monitoring.Alert) bool { return strings.HasPrefix(a.Alert, prefix) })-1, alerts)

			dashboard, found := lo.Find(of[corev1.ConfigMap](t, objects, "ConfigMap"), func(m corev1.ConfigMap) bool {
				return strings.HasSuffix(m.Name, "-dashboard")
			})
			require.True(t, found)
			require.Equal(t, "1", dashboard.Labels["grafana_dashboard"])
			require.Len(t, dashboard.Data, 1)
			for name, content := range dashboard.Data {
				file, err := os.ReadFile(filepath.Join(chartPath(t, c), "dashboards", name))
				require.NoError(t, err)
				require.JSONEq(t, string(file), content)
			}
		})
	}
}

// The secrets are where the shim looks for them, and it can access no others.
func TestAShimThatEnrollsMayReadTwoSecretsAndWriteItsOwn(t *testing.T) {
	for set, namespace := range map[string]string{"agent.enrollment.namespace=": "karpenter", "agent.enrollment.namespace=identities": "identities"} {
		t.Run(namespace, func(t *testing.T) {
			objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/enrollment-values.yaml"), "--set", set)
			pod := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			require.Empty(t, pod.Volumes)
			require.Subset(t, pod.Containers[0].Args, []string{
				"--agent-identity-secret=" + namespace + "/karpenter-agent-identity", "--agent-bootstrap-secret=" + namespace + "/karpenter-agent-bootstrap",
			})
			for _, arg := range pod.Containers[0].Args {
				require.False(t, strings.HasPrefix(arg, "--agent-tls") || strings.HasPrefix(arg, "--agent-ca"), arg)
			}
			roles := lo.Filter(of[rbacv1.Role](t, objects, "Role"), func(r rbacv1.Role, _ int) bool { return strings.HasSuffix(r.Name, "-agent-identity") })
			require.Len(t, roles, 1)
			require.Equal(t, namespace, roles[0].Namespace)
			require.ElementsMatch(t, []rbacv1.PolicyRule{
				{
					APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"karpenter-agent-identity"}, Verbs: []string{"get", "update"},
				},
				{
					APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"karpenter-agent-bootstrap"}, Verbs: []string{"get"},
				},
			}, roles[0].Rules)
			secrets := of[corev1.Secret](t, objects, "Secret")
			require.Len(t, secrets, 1)
			require.Equal(t, "karpenter-agent-identity", secrets[0].Name)
			require.Equal(t, namespace, secrets[0].Namespace)
			require.Empty(t, secrets[0].Data, "what the shim has written stays there in an upgrade")
			require.Empty(t, secrets[0].StringData)
		})
	}
}

// In the spoke, the release's namespace need not exist, and the kubeconfig may write secrets.
func TestAHubHostedShimKeepsItsSecretsInTheSpoke(t *testing.T) {
	objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/hub-hosted-enrollment-values.yaml"))
	require.Subset(t, of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0].Args, []string{
		"--agent-identity-secret=kube-system/karpenter-agent-identity", "--agent-bootstrap-secret=kube-system/karpenter-agent-bootstrap",
	})
	require.Empty(t, of[corev1.Secret](t, objects, "Secret"))
	require.Empty(t, of[rbacv1.Role](t, objects, "Role"))
}

// A control plane's operator decides where its kubeconfig is. The pod must find the key of each.
func TestTheKubeconfigOfEveryControlPlaneIsFound(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs", "install.md"))
	require.NoError(t, err)
	for _, layout := range []struct {
		controlPlane, values string
		// secret and its keys are as the control plane's operator writes them, key is the one that is to be read.
		secret, key string
		keys        []string
		documented  string
	}{
		{"Cluster API", "hub-hosted", "production-kubeconfig", "value", []string{"value"}, "`<cluster>-kubeconfig` | `value`"},
		{
			"Kamaji", "hub-hosted-kamaji", "production-admin-kubeconfig", "admin.svc",
			[]string{"admin.conf", "admin.svc", "super-admin.conf", "super-admin.svc"},
			"`<tenant control plane>-admin-kubeconfig` | `admin.svc`",
		},
		{
			"HyperShift", "hub-hosted-hypershift", "service-network-admin-kubeconfig", "kubeconfig",
			[]string{"kubeconfig"},
			"`service-network-admin-kubeconfig` in the control plane's namespace | `kubeconfig`",
		},
	} {
		t.Run(layout.controlPlane, func(t *testing.T) {
			objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci", layout.values+"-values.yaml"))
			pod := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			variable, found := lo.Find(pod.Containers[0].Env, func(v corev1.EnvVar) bool { return v.Name == "KUBECONFIG" })
			require.True(t, found)
			folder, file := filepath.Split(variable.Value)
			mount, found := lo.Find(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == filepath.Clean(folder) })
			require.True(t, found)
			volume, found := lo.Find(pod.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
			require.True(t, found)
			require.Equal(t, layout.secret, volume.Secret.SecretName)
			require.Empty(t, volume.Secret.Items, "each key of the secret is a file")
			require.Empty(t, mount.SubPath, "the kubelet never updates a sub path")
			require.Contains(t, layout.keys, file)
			require.Equal(t, layout.key, file)
			require.Contains(t, string(page), layout.documented)
		})
	}
}

// The old and the new authority can be trusted at the same time, wherever the certificate comes from.
func TestAuthoritiesMayBeABundleOfTheirOwn(t *testing.T) {
	for i, values := range []string{"agent/ci/defaults-values.yaml", "shim/ci/defaults-values.yaml"} {
		for set, want := range map[string]corev1.VolumeProjection{
			"tls.authorities.configMapName=bundle,tls.authorities.key=all.pem": {ConfigMap: &corev1.ConfigMapProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: "bundle"}, Items: []corev1.KeyToPath{{Key: "all.pem", Path: "ca.crt"}},
			}},
			"tls.authorities.secretName=bundle": {Secret: &corev1.SecretProjection{
				LocalObjectReference: corev1.LocalObjectReference{Name: "bundle"}, Items: []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}},
			}},
		} {
			t.Run(charts[i].name+", "+set, func(t *testing.T) {
				deployment := of[appsv1.Deployment](t, render(t, charts[i], filepath.Join(root(t), "deploy/charts", values), "--set", set), "Deployment")[0]
				var found *corev1.ProjectedVolumeSource
				for _, volume := range deployment.Spec.Template.Spec.Volumes {
					if volume.Projected != nil {
						found = volume.Projected
					}
				}
				require.NotNil(t, found)
				require.Len(t, found.Sources, 2)
				paths := lo.Map(found.Sources[0].Secret.Items, func(item corev1.KeyToPath, _ int) string { return item.Path })
				require.Equal(t, []string{"tls.crt", "tls.key"}, paths)
				require.Equal(t, want, found.Sources[1])
			})
		}
	}
}

// With a new key, cert-manager's renewal of the authority would lock every spoke out.
func TestTheAuthorityKeepsItsKeyWhenItIsRenewed(t *testing.T) {
	objects := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/defaults-values.yaml"))
	authorities := 0
	for _, object := range objects {
		if isCA, _, _ := unstructured.NestedBool(object.Object, "spec", "isCA"); object.GetKind() == "Certificate" && isCA {
			policy, _, err := unstructured.NestedString(object.Object, "spec", "privateKey", "rotationPolicy")
			require.NoError(t, err)
			require.Equal(t, "Never", policy)
			authorities++
		}
	}
	require.Equal(t, 1, authorities)
}

// A client's certificate is copied to another cluster. A stolen one is useless within hours, as those are
// that the agent issues itself.
func TestCertificatesOfClientsAreValidForHours(t *testing.T) {
	values := filepath.Join(root(t), "deploy/charts/agent/ci/everything-values.yaml")
	lifetimes := func(more ...string) map[string][2]string {
		found := map[string][2]string{}
		for _, object := range render(t, charts[0], values, more...) {
			if object.GetKind() != "Certificate" {
				continue
			}
			usages, _, err := unstructured.NestedStringSlice(object.Object, "spec", "usages")
			require.NoError(t, err)
			duration, _, err := unstructured.NestedString(object.Object, "spec", "duration")
			require.NoError(t, err)
			renewBefore, _, err := unstructured.NestedString(object.Object, "spec", "renewBefore")
			require.NoError(t, err)
			found[strings.Join(usages, ", ")] = [2]string{duration, renewBefore}
		}
		return found
	}
	byDefault := lifetimes()
	require.Equal(t, [2]string{"24h", "12h"}, byDefault["client auth"])
	require.Equal(t, [2]string{"2160h", "720h"}, byDefault["server auth"])
	require.Equal(t, [2]string{"6h", "3h"},
		lifetimes("--set", "tls.certManager.clientDuration=6h,tls.certManager.clientRenewBefore=3h")["client auth"])
}

// The agent calls the API server of the hub. A hub-hosted shim reads a kubeconfig that others may write, and needs nothing of the hub's API
// server. A token of the hub in its pod could only be stolen.
func TestPodsHaveATokenOnlyOfAnAPIServerThatTheyCall(t *testing.T) {
	hubHosted := 0
	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		running := of[appsv1.Deployment](t, render(t, c, values), "Deployment")[0].Spec.Template.Spec
		if c.name == "agent" {
			require.Equal(t, new(true), running.AutomountServiceAccountToken, "whatever the default of its account is")
			return
		}
		planning := of[batchv1.Job](t, render(t, c, values, "--set", "planAdoption=true"), "Job")[0].Spec.Template.Spec
		for _, pod := range []corev1.PodSpec{running, planning} {
			elsewhere := lo.ContainsBy(pod.Containers[0].Env, func(v corev1.EnvVar) bool { return v.Name == "KUBECONFIG" })
			require.Equal(t, new(!elsewhere), pod.AutomountServiceAccountToken)
			for _, volume := range pod.Volumes {
				for _, source := range lo.FromPtr(volume.Projected).Sources {
					require.Nil(t, source.ServiceAccountToken, volume.Name)
				}
			}
			if elsewhere {
				hubHosted++
			}
		}
	})
	require.GreaterOrEqual(t, hubHosted, 4, "the values of two hub-hosted shims, each as a Deployment and as a Job")
}

// An upgrade must keep everything in the secret that the shim needs to continue.
func TestAnUpgradeKeepsTheShimsIdentity(t *testing.T) {
	server := strictServer(t)
	rendered := func() *unstructured.Unstructured {
		objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/enrollment-values.yaml"))
		secret, found := lo.Find(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "Secret" })
		require.True(t, found)
		return secret
	}
	theHub(t).namespaces(t, rendered().GetNamespace())
	apply := func() {
		desired := client.ApplyConfigurationFromUnstructured(rendered())
		require.NoError(t, server.Apply(t.Context(), desired, client.FieldOwner("helm"), client.ForceOwnership))
	}
	apply()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: rendered().GetNamespace(), Name: rendered().GetName()}}
	t.Cleanup(func() { assert.NoError(t, server.Delete(context.Background(), secret)) })
	require.NoError(t, server.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	secret.Data = map[string][]byte{"tls.crt": []byte("certificate")}
	require.NoError(t, server.Update(t.Context(), secret))
	apply()
	require.NoError(t, server.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	require.Equal(t, []byte("certificate"), secret.Data["tls.crt"])
}

// Without confinement the right is in the ClusterRole, otherwise in the Role of each namespace.
func TestAgentMayReadQuotasWhereverItsClustersAre(t *testing.T) {
	readsQuotas := func(rules []rbacv1.PolicyRule) bool {
		return lo.ContainsBy(rules, func(r rbacv1.PolicyRule) bool {
			return slices.Equal(r.APIGroups, []string{""}) && slices.Contains(r.Resources, "resourcequotas") &&
				lo.Every(r.Verbs, []string{"list", "watch"})
		})
	}
	everywhere := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/defaults-values.yaml"))
	require.True(t, lo.ContainsBy(of[rbacv1.ClusterRole](t, everywhere, "ClusterRole"), func(r rbacv1.ClusterRole) bool {
		return readsQuotas(r.Rules)
	}))
	confined := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/confined-values.yaml"))
	for _, role := range of[rbacv1.Role](t, confined, "Role") {
		require.Equal(t, role.Namespace != charts[0].namespace, readsQuotas(role.Rules), role.Namespace)
	}
}

// This is what helm upgrade --reuse-values does with the values of an older release.
func TestAgentWithoutPricingValues(t *testing.T) {
	values := filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(values, []byte("pricing: null\n"), 0o600))
	require.Empty(t, of[rbacv1.Role](t, render(t, charts[0], values, "--set", "policy=null"), "Role"))

	require.NoError(t, os.WriteFile(values, []byte("pricing: {list: 1e3/0123}\npolicy: null\n"), 0o600))
	roles := of[rbacv1.Role](t, render(t, charts[0], values), "Role")
	require.Len(t, roles, 1, "names that look like numbers stay names")
	require.Equal(t, "1e3", roles[0].Namespace)
	require.Equal(t, []string{"0123"}, roles[0].Rules[0].ResourceNames)
}

func TestShimsFeatureGatesBringTheirRules(t *testing.T) {
	resources := func(values string) []string {
		objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci", values))
		return lo.FlatMap(rules(t, objects), func(r rbacv1.PolicyRule, _ int) []string { return r.Resources })
	}
	featured := []string{"nodeoverlays", "capacitybuffers", "podtemplates", "deviceclasses", "resourceclaims", "resourceslices"}
	require.Empty(t, lo.Intersect(resources("defaults-values.yaml"), featured))
	require.Subset(t, resources("everything-values.yaml"), featured)

	old := filepath.Join(t.TempDir(), "values.yaml") // as helm upgrade --reuse-values has them
	values := "agent: {address: 'a:1'}\ncluster: {namespace: team-a, name: production}\nsettings: {ignoreDRARequests: null}\n"
	require.NoError(t, os.WriteFile(old, []byte(values), 0o600))
	for _, rule := range rules(t, render(t, charts[1], old)) {
		require.NotContains(t, rule.APIGroups, "resource.k8s.io")
	}
}

// Core takes the lease's name from the environment. A role for another lease would leave every
// replica waiting to be elected.
func TestTheShimMayWriteTheLeaseThatItIsToldToUse(t *testing.T) {
	for _, lease := range []string{"karpenter-leader-election", "of-another-name"} {
		objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/defaults-values.yaml"), "--set", "leaderElection.name="+lease)
		environment := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0].Env
		require.Contains(t, environment, corev1.EnvVar{Name: "LEADER_ELECTION_NAME", Value: lease})
		may := lo.FilterMap(rules(t, objects), func(r rbacv1.PolicyRule, _ int) ([]string, bool) {
			return r.ResourceNames, slices.Contains(r.Resources, "leases") && slices.Contains(r.Verbs, "update")
		})
		require.Equal(t, [][]string{{lease}}, may)
	}
}

// The shim releases its lease last. If the kubelet kills it before, the next leader waits until the
// lease expires.
func TestTheShimHasTheTimeToReleaseItsLease(t *testing.T) {
	const (
		manager = 30 * time.Second // controller-runtime's default for the runnables' end
		traces  = 5 * time.Second  // in which pkg/tracing exports the last spans
	)
	objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/defaults-values.yaml"))
	seconds := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.TerminationGracePeriodSeconds
	require.Greater(t, time.Duration(*seconds)*time.Second, manager+traces)
}

func TestPublishedNodePoolsBringTheirRules(t *testing.T) {
	grants := func(of int, values, resource, verb string) bool {
		objects := render(t, charts[of], filepath.Join(root(t), "deploy/charts", charts[of].name, "ci", values))
		return slices.ContainsFunc(rules(t, objects), func(r rbacv1.PolicyRule) bool {
			return slices.Contains(r.Resources, resource) && slices.Contains(r.Verbs, verb)
		})
	}
	for _, right := range []struct {
		of             int
		resource, verb string
	}{
		{0, "nodepoolsets", "watch"},
		{0, "nodepoolsets/status", "patch"},
		{0, "spokes", "watch"},
		{1, "nodepools", "create"},
		{1, "nodepools", "delete"},
		{1, "clusterapinodeclasses", "create"},
		{1, "clusterapinodeclasses", "delete"},
	} {
		require.True(t, grants(right.of, "everything-values.yaml", right.resource, right.verb), "%v", right)
		require.False(t, grants(right.of, "defaults-values.yaml", right.resource, right.verb), "%v", right)
	}
	require.False(t, grants(0, "everything-values.yaml", "nodepoolsets", "update"), "what users publish is not the agent's to change")
}

// Argo CD renders every version as the first revision, and a Job cannot be changed.
func TestAnotherPlanIsAnotherJob(t *testing.T) {
	name := func(set string) string {
		return of[batchv1.Job](t, render(t, charts[1], filepath.Join(chartPath(t, charts[1]), "ci", "defaults-values.yaml"),
			"--set", "planAdoption=true,"+set), "Job")[0].Name
	}
	first := name("image.tag=a")
	require.Equal(t, first, name("image.tag=a"))
	require.NotEqual(t, first, name("image.tag=b"))
}

// When Argo CD prunes, it heeds its own annotation alone.
func TestCRDsThatAreKeptAreNotPruned(t *testing.T) {
	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		options := func(settings ...string) []string {
			var all []string
			for _, object := range render(t, c, values, append(settings, "--set", "crds.install=true")...) {
				if object.GetKind() == "CustomResourceDefinition" {
					all = append(all, object.GetAnnotations()["argocd.argoproj.io/sync-options"])
				}
			}
			return lo.Uniq(all)
		}
		if len(options()) == 0 {
			return // they are in another cluster
		}
		own := `crds.annotations.argocd\.argoproj\.io/sync-options=Replace=true`
		require.Equal(t, []string{"Prune=false"}, options("--set", "crds.keep=true"))
		require.Equal(t, []string{"Prune=false,Replace=true"}, options("--set", "crds.keep=true", "--set-string", own))
		require.Equal(t, []string{""}, options("--set", "crds.keep=false"))
	})
}

// As described in docs/migrate-from-karpenter-provider-cluster-api.md: nothing runs but the Job
// that prints the plan.
func TestThePlanOfAdoptionIsAJobInPlaceOfKarpenter(t *testing.T) {
	server := strictServer(t)
	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		if c.name != "shim" {
			return
		}
		objects := render(t, c, values, "--set", "planAdoption=true")
		require.Empty(t, of[appsv1.Deployment](t, objects, "Deployment"))
		require.Empty(t, of[policyv1.PodDisruptionBudget](t, objects, "PodDisruptionBudget"))
		jobs := of[batchv1.Job](t, objects, "Job")
		require.Len(t, jobs, 1)
		planning := jobs[0].Spec.Template.Spec
		// It serves no metrics, and waits for no certificate for them.
		running := of[appsv1.Deployment](t, render(t, c, values, "--set", "metrics.tls.secretName="), "Deployment")[0].Spec.Template.Spec
		require.Len(t, planning.Containers, 1, "a sidecar would not end")
		require.Equal(t, append([]string{"plan-adoption"}, running.Containers[0].Args...), planning.Containers[0].Args)
		require.True(t, equality.Semantic.DeepEqual(planning.Containers[0].Env, running.Containers[0].Env), "the same environment")
		require.True(t, equality.Semantic.DeepEqual(planning.Volumes, running.Volumes), "the same volumes")
		require.Equal(t, running.ServiceAccountName, planning.ServiceAccountName)
		for _, object := range objects { // fills in defaults
			dryRun(t, server, object)
		}
	})
}

func TestDeploymentsAreAsTheValuesSay(t *testing.T) {
	rendered := func(c chart, settings ...string) []*unstructured.Unstructured {
		return render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), settings...)
	}
	deployment := func(c chart, settings ...string) appsv1.DeploymentSpec {
		return of[appsv1.Deployment](t, rendered(c, settings...), "Deployment")[0].Spec
	}
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			byDefault := deployment(c)
			if c.name == "shim" { // there may be no room for a further pod
				require.Equal(t, intstr.FromInt32(0), *byDefault.Strategy.RollingUpdate.MaxSurge)
				require.Equal(t, intstr.FromInt32(1), *byDefault.Strategy.RollingUpdate.MaxUnavailable)
			} else {
				require.Empty(t, byDefault.Strategy)
			}
			require.Empty(t, byDefault.Template.Spec.DNSPolicy)
			require.Nil(t, byDefault.Template.Spec.DNSConfig)

			changed := deployment(c, "--set", "revisionHistoryLimit=0,strategy.type=Recreate,dnsPolicy=Default,dnsConfig.searches={example.com}")
			require.Equal(t, ptr.To[int32](0), changed.RevisionHistoryLimit)
			require.Equal(t, appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}, changed.Strategy)
			require.Equal(t, corev1.DNSDefault, changed.Template.Spec.DNSPolicy)
			require.Equal(t, []string{"example.com"}, changed.Template.Spec.DNSConfig.Searches)
		})
	}
	require.Equal(t, corev1.DNSClusterFirstWithHostNet, deployment(charts[1], "--set", "hostNetwork=true").Template.Spec.DNSPolicy)

	services := of[corev1.Service](t, rendered(charts[0], "--set", "service.type=NodePort,service.nodePort=30443"), "Service")
	require.Len(t, lo.Filter(services, func(s corev1.Service, _ int) bool {
		return s.Spec.Ports[0].NodePort == 30443
	}), 1, "that of the callers alone")
}

func TestValuesThatCannotWorkAreRefused(t *testing.T) {
	for _, tc := range []struct {
		name  string
		chart chart
		set   string
		says  string
	}{
		{"a value that does not exist", charts[0], "replica=3", "replica"},
		{"a Cluster without its namespace", charts[0], "clusters={production}", "clusters"},
		{"a duration without a unit", charts[0], "tls.certManager.duration=90", "duration"},
		{"an issuer that is neither made nor named", charts[0], "tls.certManager.issuer.create=false", "tls.certManager.issuer.name is required"},
		{
			"onboarding without an authority", charts[0], "onboarding.enabled=true,tls.certManager.enabled=false", "onboarding.issuerSecretName is required",
		},
		{"no agent", charts[1], "cluster.namespace=n,cluster.name=c", "agent.address is required"},
		{
			"an issuer in the spoke, which could sign any identity", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,tls.certManager.enabled=true", "certManager",
		},
		{"no Cluster", charts[1], "agent.address=a:8443", "cluster.namespace is required"},
		{
			"metrics of the hub that the spoke is asked about", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,kubeconfig.secretName=k,leaderElection.namespace=n", "metrics.secure must be false",
		},
		{
			"a lease in a namespace of the hub", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,kubeconfig.secretName=k,metrics.secure=false", "leaderElection.namespace is required",
		},
		{
			"readers of metrics without their role", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,rbac.create=false,metrics.readers[0].namespace=n,metrics.readers[0].name=p",
			"metrics.readers needs rbac.create",
		},
		{
			"an enrollment on a socket", charts[1], "agent.address=unix:///run/agent.sock,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true",
			"agent.enrollment.enabled has no effect",
		},
		{
			"an enrollment and a mounted certificate", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true,tls.secretName=s",
			"exclude agent.enrollment.enabled",
		},
		{
			"an enrollment and a volume with a certificate", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true,tls.volume.emptyDir.medium=Memory",
			"exclude agent.enrollment.enabled",
		},
		{
			"a volume and a secret with a certificate of the shim", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,tls.secretName=s,tls.volume.emptyDir.medium=Memory", "tls.volume excludes tls.secretName",
		},
		{"a volume and cert-manager's certificate", charts[0], "tls.volume.csi.driver=d", "tls.volume excludes tls.certManager.enabled"},
		{"a volume with a name", charts[0], "tls.volume.name=tls,tls.certManager.enabled=false", "tls.volume.name: the chart names"},
		{
			"a ServiceMonitor that cannot verify", charts[0],
			"tls.volume.csi.driver=d,tls.certManager.enabled=false,metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.tlsConfig is required",
		},
		{
			"a PodMonitor that cannot verify", charts[0],
			"tls.volume.csi.driver=d,tls.certManager.enabled=false,metrics.podMonitor.enabled=true,metrics.podMonitor.authorization.type=Bearer",
			"metrics.podMonitor.tlsConfig is required",
		},
		{"a PodMonitor without a token", charts[0], "metrics.podMonitor.enabled=true", "metrics.podMonitor.authorization is required"},
		{
			"two monitors", charts[0], "metrics.podMonitor.enabled=true,metrics.serviceMonitor.enabled=true",
			"metrics.podMonitor excludes metrics.serviceMonitor",
		},
		{
			"authorities in two places", charts[0], "tls.authorities.configMapName=a,tls.authorities.secretName=b",
			"tls.authorities.configMapName excludes tls.authorities.secretName",
		},
		{
			"authorities beside a volume", charts[0], "tls.volume.csi.driver=d,tls.certManager.enabled=false,tls.authorities.configMapName=a",
			"tls.volume excludes tls.authorities",
		},
		{
			"authorities for an enrollment", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true,tls.authorities.configMapName=a",
			"tls.authorities excludes agent.enrollment.enabled",
		},
		{"a class without a load balancer", charts[0], "service.loadBalancerClass=c", "service.loadBalancerClass needs"},
		{"a port on nodes that the service does not have", charts[0], "service.nodePort=30443", "service.nodePort needs"},
		{"a traffic policy inside a cluster", charts[0], "service.externalTrafficPolicy=Local", "service.externalTrafficPolicy needs"},
		{
			"one secret for both sides of an enrollment", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true,agent.enrollment.identitySecretName=s," +
				"agent.enrollment.bootstrapSecretName=s",
			"are the same",
		},
		{"a feature gate that Karpenter does not have", charts[1], "settings.featureGates.Fly=true", "Fly"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, stderr, err := helm(t, "template", tc.chart.release, chartPath(t, tc.chart), "--set", tc.set)
			require.Error(t, err)
			require.Contains(t, stderr, tc.says)
		})
	}
}

// The spoke's API server is the only one that a hub-hosted shim calls.
func TestAHubHostedShimHasNoRightsInTheHub(t *testing.T) {
	for _, set := range []string{"", ",agent.enrollment.enabled=true", ",settings.featureGates.PodDeletionCostManagement=true", ",rbac.create=true"} {
		stdout, stderr, err := helm(t, "template", charts[1].release, chartPath(t, charts[1]), "--set",
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,kubeconfig.secretName=k,metrics.secure=false,leaderElection.namespace=kube-system"+set)
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "kind: Deployment")
		require.NotContains(t, stdout, "authorization.k8s.io", set)
		require.NotContains(t, stdout, "admissionregistration.k8s.io", set)
	}
}

// forEachValues runs a test for each values file of each chart.
func forEachValues(t *testing.T, test func(t *testing.T, c chart, values string)) {
	t.Helper()
	for _, c := range charts {
		files, err := filepath.Glob(filepath.Join(chartPath(t, c), "ci", "*-values.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no values to test the chart %s with: %v", c.name, err)
		}
		for _, values := range files {
			t.Run(c.name+"/"+strings.TrimSuffix(filepath.Base(values), "-values.yaml"), func(t *testing.T) { test(t, c, values) })
		}
	}
}

// strictServer returns a client of the shared API server, which has the kinds of both charts and
// refuses unknown fields.
func strictServer(t *testing.T) client.Client {
	t.Helper()
	h := theHub(t)
	h.installCRDs(t, charts...)
	server, err := client.New(h.config, client.Options{})
	require.NoError(t, err)
	return client.WithFieldValidation(server, metav1.FieldValidationStrict)
}

// dryRun fails the test if the API server would refuse the object.
func dryRun(t *testing.T, server client.Client, object *unstructured.Unstructured) {
	t.Helper()
	if lo.Contains(foreignGroups, object.GroupVersionKind().Group) {
		return
	}
	if namespace := object.GetNamespace(); namespace != "" {
		err := server.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
		require.NoError(t, lo.Ternary(apierrors.IsAlreadyExists(err), nil, err))
	}
	err := server.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(object), client.DryRunAll, client.FieldOwner("charts-test"))
	require.NoError(t, err, "%s %s", object.GetKind(), object.GetName())
}

// render returns the objects of the chart with the values in a file, in the order of installation.
func render(t *testing.T, c chart, values string, more ...string) []*unstructured.Unstructured {
	t.Helper()
	args := append([]string{"template", c.release, chartPath(t, c), "--namespace", c.namespace, "--values", values}, more...)
	stdout, stderr, err := helm(t, args...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, stderr)
	}
	return decoded(t, stdout)
}

// decoded returns the objects of a manifest.
func decoded(t *testing.T, manifest string) []*unstructured.Unstructured {
	t.Helper()
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return objects
		} else if err != nil {
			t.Fatalf("decoding what helm rendered: %v", err)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
}

func helm(t *testing.T, args ...string) (string, string, error) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	command := exec.CommandContext(context.Background(), filepath.Join(root(t), "bin", "helm"), args...)
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	if errors.Is(err, fs.ErrNotExist) {
		t.Fatal("no bin/helm: run make bin/helm")
	}
	return stdout.String(), stderr.String(), err
}

// of returns the objects of a kind.
func of[T any](t *testing.T, objects []*unstructured.Unstructured, kind string) []T {
	t.Helper()
	var found []T
	for _, object := range objects {
		if object.GetKind() != kind {
			continue
		}
		var typed T
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, &typed, true); err != nil {
			t.Fatalf("%s %s: %v", kind, object.GetName(), err)
		}
		found = append(found, typed)
	}
	return found
}

// rules returns the rules of all roles.
func rules(t *testing.T, objects []*unstructured.Unstructured) []rbacv1.PolicyRule {
	t.Helper()
	var found []rbacv1.PolicyRule
	for _, role := range of[rbacv1.ClusterRole](t, objects, "ClusterRole") {
		found = append(found, role.Rules...)
	}
	for _, role := range of[rbacv1.Role](t, objects, "Role") {
		found = append(found, role.Rules...)
	}
	return found
}

func names(objects []*unstructured.Unstructured, kind, namespace string) []string {
	return lo.FilterMap(objects, func(o *unstructured.Unstructured, _ int) (string, bool) {
		return o.GetName(), o.GetKind() == kind && o.GetNamespace() == namespace
	})
}

func chartPath(t *testing.T, c chart) string {
	t.Helper()
	return filepath.Join(root(t), "deploy", "charts", c.name)
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
	// They declare the charts and two pages as inputs of the test cache.
	_, _ = os.Getenv("TESTED_CHARTS"), os.Getenv("TESTED_REFERENCE")
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir
		}
	}
	t.Fatal("not below a go.work")
	return ""
}
