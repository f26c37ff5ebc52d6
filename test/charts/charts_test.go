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

	. "github.com/onsi/gomega"
	"github.com/samber/lo"
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
	"k8s.io/apimachinery/pkg/util/yaml"
	podsecurityapi "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

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
	server := startAPIServer(t)

	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		objects := render(t, c, values)

		t.Run("are accepted by the API server", func(t *testing.T) {
			for _, object := range objects {
				dryRun(t, server, object)
			}
		})
		t.Run("meet the restricted Pod Security Standard", func(t *testing.T) {
			g := NewWithT(t)
			evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
			g.Expect(err).NotTo(HaveOccurred())
			for _, deployment := range of[appsv1.Deployment](t, objects, "Deployment") {
				template := deployment.Spec.Template
				restricted := podsecurityapi.LevelVersion{Level: podsecurityapi.LevelRestricted, Version: podsecurityapi.LatestVersion()}
				result := policy.AggregateCheckResults(evaluator.EvaluatePod(restricted, &template.ObjectMeta, &template.Spec))
				g.Expect(result.Allowed).To(BeTrue(), result.ForbiddenDetail())
			}
		})
		t.Run("select their own pods", func(t *testing.T) {
			g := NewWithT(t)
			deployments := of[appsv1.Deployment](t, objects, "Deployment")
			g.Expect(deployments).To(HaveLen(1))
			pod := deployments[0].Spec.Template
			ports := lo.FlatMap(pod.Spec.Containers, func(c corev1.Container, _ int) []corev1.ContainerPort { return c.Ports })
			for _, service := range of[corev1.Service](t, objects, "Service") {
				g.Expect(labels.SelectorFromSet(service.Spec.Selector).Matches(labels.Set(pod.Labels))).To(BeTrue(), service.Name)
				for _, port := range service.Spec.Ports {
					g.Expect(lo.ContainsBy(ports, func(p corev1.ContainerPort) bool { return p.Name == port.TargetPort.StrVal })).
						To(BeTrue(), "service %s names the port %q", service.Name, port.TargetPort.StrVal)
				}
			}
			for _, of := range of[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy") {
				g.Expect(labels.SelectorFromSet(of.Spec.PodSelector.MatchLabels).Matches(labels.Set(pod.Labels))).To(BeTrue())
				admitted := lo.FlatMap(of.Spec.Ingress, func(r networkingv1.NetworkPolicyIngressRule, _ int) []string {
					return lo.Map(r.Ports, func(p networkingv1.NetworkPolicyPort, _ int) string { return p.Port.StrVal })
				})
				g.Expect(admitted).To(ConsistOf(lo.Map(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort, _ int) string { return p.Name })))
			}
			for _, budget := range of[policyv1.PodDisruptionBudget](t, objects, "PodDisruptionBudget") {
				g.Expect(labels.SelectorFromSet(budget.Spec.Selector.MatchLabels).Matches(labels.Set(pod.Labels))).To(BeTrue())
			}
		})
		t.Run("bind their roles to the pods' service account", func(t *testing.T) {
			g := NewWithT(t)
			account := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.ServiceAccountName
			g.Expect(lo.Map(of[corev1.ServiceAccount](t, objects, "ServiceAccount"), func(a corev1.ServiceAccount, _ int) string { return a.Name })).
				To(ConsistOf(account))
			subject := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: c.namespace}
			prometheus := rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: "prometheus", Namespace: "monitoring"}
			for _, binding := range of[rbacv1.ClusterRoleBinding](t, objects, "ClusterRoleBinding") {
				if strings.Contains(binding.Name, "metrics-reader") {
					g.Expect(binding.Subjects).To(ConsistOf(prometheus))
				} else {
					g.Expect(binding.Subjects).To(ConsistOf(subject))
				}
				g.Expect(names(objects, binding.RoleRef.Kind, "")).To(ContainElement(binding.RoleRef.Name))
			}
			for _, binding := range of[rbacv1.RoleBinding](t, objects, "RoleBinding") {
				g.Expect(binding.Subjects).To(ConsistOf(subject))
				g.Expect(names(objects, binding.RoleRef.Kind, binding.Namespace)).To(ContainElement(binding.RoleRef.Name))
			}
		})
		t.Run("grant no secrets but the shim's own two, no wildcards, nothing that grants more", func(t *testing.T) {
			g := NewWithT(t)
			for _, role := range of[rbacv1.ClusterRole](t, objects, "ClusterRole") {
				g.Expect(role.Rules).NotTo(ContainElement(HaveField("Resources", ContainElement("secrets"))))
			}
			for _, rule := range rules(t, objects) {
				g.Expect(rule.Verbs).NotTo(ContainElement(BeElementOf("*", "bind", "escalate", "impersonate")))
				g.Expect(rule.APIGroups).NotTo(ContainElement("*"))
				if lo.Contains(rule.Resources, "secrets") {
					g.Expect(c.name).To(Equal("shim"))
					g.Expect(rule.ResourceNames).To(HaveLen(1))
					g.Expect(rule.Verbs).To(HaveEach(BeElementOf("get", "update")))
				}
				g.Expect(rule.Resources).NotTo(ContainElement(HavePrefix("*")))
			}
		})
		t.Run("pass only flags that exist", func(t *testing.T) {
			g := NewWithT(t)
			options, err := os.ReadFile(filepath.Join(root(t), "docs", "options.md"))
			g.Expect(err).NotTo(HaveOccurred())
			for _, deployment := range of[appsv1.Deployment](t, objects, "Deployment") {
				for _, container := range deployment.Spec.Template.Spec.Containers {
					for _, arg := range container.Args {
						flag, _, _ := strings.Cut(arg, "=")
						g.Expect(string(options)).To(ContainSubstring("`"+flag+"`"), "in docs/options.md")
					}
				}
			}
		})
	})
}

func TestAgentConfinedToNamespacesGetsNoClusterWideRights(t *testing.T) {
	g := NewWithT(t)
	objects := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/confined-values.yaml"))

	for _, role := range of[rbacv1.ClusterRole](t, objects, "ClusterRole") {
		for _, rule := range role.Rules {
			g.Expect(append(rule.Resources, rule.NonResourceURLs...)).To(
				ConsistOf(BeElementOf("customresourcedefinitions", "tokenreviews", "subjectaccessreviews", "/metrics")))
		}
	}
	g.Expect(lo.Map(of[rbacv1.Role](t, objects, "Role"), func(r rbacv1.Role, _ int) string { return r.Namespace })).
		To(ConsistOf("team-a", "team-b"))
}

// A policy that omits a destination would cut the shim off.
func TestTheShimsNetworkPolicyLetsItCallWhatItCalls(t *testing.T) {
	g := NewWithT(t)
	objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/defaults-values.yaml"),
		"--set", "networkPolicy.enabled=true,networkPolicy.apiServerPorts={16443},agent.address=agent.example:9443")
	g.Expect(egress(t, objects)).To(ConsistOf(int32(53), int32(53), int32(16443), int32(8443), int32(9443)))

	onSocket := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/sidecar-values.yaml"),
		"--set", "networkPolicy.enabled=true,agent.address=unix:///run/agent/agent-1")
	g.Expect(egress(t, onSocket)).To(ConsistOf(int32(53), int32(53), int32(443), int32(6443)))
}

// A rule without ports allows all connections.
func TestNetworkPoliciesHaveNoRuleWithoutPorts(t *testing.T) {
	for _, c := range charts {
		for _, none := range []string{"[]", "null"} {
			g := NewWithT(t)
			objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"),
				"--set", "networkPolicy.enabled=true", "--set-json", fmt.Sprintf(`networkPolicy.apiServerPorts=%s,networkPolicy.dnsPorts=%[1]s`, none))
			for _, port := range egress(t, objects) {
				g.Expect(port).To(BeEquivalentTo(8443), "the agent's")
			}
		}
	}
}

// egress returns the ports to which the single network policy allows connections, to any
// destination.
func egress(t *testing.T, objects []*unstructured.Unstructured) []int32 {
	t.Helper()
	g := NewWithT(t)
	policies := of[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy")
	g.Expect(policies).To(HaveLen(1))
	return lo.FlatMap(policies[0].Spec.Egress, func(r networkingv1.NetworkPolicyEgressRule, _ int) []int32 {
		g.Expect(r.To).To(BeEmpty())
		g.Expect(r.Ports).NotTo(BeEmpty())
		return lo.Map(r.Ports, func(p networkingv1.NetworkPolicyPort, _ int) int32 { return p.Port.IntVal })
	})
}

func TestTracesGoWhereTheValuesSay(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			g := NewWithT(t)
			defaults := filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml")
			variables := func(set string) map[string]string {
				container := of[appsv1.Deployment](t, render(t, c, defaults, "--set", set), "Deployment")[0].Spec.Template.Spec.Containers[0]
				traces := lo.Filter(container.Env, func(v corev1.EnvVar, _ int) bool { return strings.HasPrefix(v.Name, "OTEL_") })
				return lo.SliceToMap(traces, func(v corev1.EnvVar) (string, string) { return v.Name, v.Value })
			}
			g.Expect(variables("tracing.sampler=always_on")).To(BeEmpty(), "it is off without an endpoint")
			g.Expect(variables("tracing.endpoint=http://collector:4317")).To(Equal(map[string]string{
				"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
			}))
			sampled := variables("tracing.endpoint=http://collector:4317,tracing.sampler=parentbased_traceidratio,tracing.samplerArg=.1")
			g.Expect(sampled).To(And(HaveKeyWithValue("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"), HaveKeyWithValue("OTEL_TRACES_SAMPLER_ARG", ".1")))

			confined := render(t, c, defaults, "--set", "networkPolicy.enabled=true,tracing.endpoint=http://collector:14317")
			g.Expect(egress(t, confined)).To(ContainElement(int32(14317)), "the network policy lets spans out")
		})
	}
}

// This is what helm upgrade --reuse-values does with the values of an older release.
func TestValuesOfAReleaseWithoutSecureMetrics(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			g := NewWithT(t)
			objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), "--set",
				"metrics.secure=null,metrics.tls=null,metrics.readers=null,metrics.serviceMonitor.tlsConfig=null,"+
					"metrics.prometheusRule=null,metrics.dashboard=null,tracing=null,networkPolicy=null"+
					lo.Ternary(c.name == "shim", ",agent.enrollment=null", ""))
			pod := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			g.Expect(pod.Volumes).To(HaveLen(1))
			g.Expect(pod.Containers[0].Args).NotTo(ContainElement(HavePrefix("--metrics-tls")))
		})
	}
}

// Both charts grant the right to review callers only if it is used, and configure Prometheus'
// authentication.
func TestMetricsAreSecureUnlessTheValuesSayOtherwise(t *testing.T) {
	for _, c := range charts {
		for set, secure := range map[string]bool{"metrics.secure=true": true, "metrics.secure=false": false} {
			t.Run(c.name+" "+set, func(t *testing.T) {
				g := NewWithT(t)
				objects := render(t, c, filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml"), "--set", set+",metrics.serviceMonitor.enabled=true")
				args := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0].Args
				g.Expect(slices.Contains(args, "--metrics-secure=false")).To(Equal(!secure))
				asks := lo.ContainsBy(rules(t, objects), func(r rbacv1.PolicyRule) bool { return slices.Contains(r.Resources, "tokenreviews") })
				g.Expect(asks).To(Equal(secure))
				monitor, found := lo.Find(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "ServiceMonitor" })
				g.Expect(found).To(BeTrue())
				endpoints, _, err := unstructured.NestedSlice(monitor.Object, "spec", "endpoints")
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(endpoints).To(HaveLen(1))
				if secure {
					g.Expect(endpoints[0]).To(And(HaveKeyWithValue("scheme", "https"), HaveKey("bearerTokenFile"), HaveKey("tlsConfig")))
				} else {
					g.Expect(endpoints[0]).NotTo(HaveKey("scheme"))
				}
			})
		}
	}
}

// The charts say the same as their files, which test/monitoring checks.
func TestAlertsHaveARunbookAndDashboardsAreForGrafanasSidecar(t *testing.T) {
	for _, c := range charts {
		t.Run(c.name, func(t *testing.T) {
			g := NewWithT(t)
			defaults := filepath.Join(chartPath(t, c), "ci", "defaults-values.yaml")
			kinds := func(objects []*unstructured.Unstructured) []string {
				return lo.Map(objects, func(o *unstructured.Unstructured, _ int) string { return o.GetKind() + "/" + o.GetName() })
			}
			g.Expect(kinds(render(t, c, defaults))).NotTo(ContainElement(Or(HavePrefix("PrometheusRule/"), HaveSuffix("-dashboard"))), "they are off")

			all, err := monitoring.Alerts(root(t))
			g.Expect(err).NotTo(HaveOccurred())
			first := lo.Ternary(c.name == "agent", "CapiAgentDown", "KarpenterCapiDown")
			objects := render(t, c, defaults, "--set", "metrics.dashboard.enabled=true,metrics.prometheusRule.enabled=true,"+
				"metrics.prometheusRule.runbookURL=https://example.com/r,metrics.prometheusRule.disabled={"+first+"}")
			rule, found := lo.Find(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "PrometheusRule" })
			g.Expect(found).To(BeTrue())
			var prometheusRule struct {
				Spec monitoring.Rules `json:"spec"`
			}
			g.Expect(runtime.DefaultUnstructuredConverter.FromUnstructured(rule.Object, &prometheusRule)).To(Succeed())
			alerts := 0
			for _, group := range prometheusRule.Spec.Groups {
				for _, rendered := range group.Rules {
					original, found := lo.Find(all, func(a monitoring.Alert) bool { return a.Alert == rendered.Alert })
					g.Expect(found).To(BeTrue())
					g.Expect(rendered.Annotations).To(HaveKeyWithValue("runbook_url", "https://example.com/r#"+strings.ToLower(rendered.Alert)))
					delete(rendered.Annotations, "runbook_url")
					g.Expect(rendered).To(Equal(original))
					g.Expect(rendered.Alert).NotTo(Equal(first), "it is disabled")
					alerts++
				}
			}
			prefix := strings.TrimSuffix(first, "Down")
			g.Expect(alerts).To(Equal(lo.CountBy(all, func(a monitoring.Alert) bool { return strings.HasPrefix(a.Alert, prefix) }) - 1))

			dashboard, found := lo.Find(of[corev1.ConfigMap](t, objects, "ConfigMap"), func(m corev1.ConfigMap) bool {
				return strings.HasSuffix(m.Name, "-dashboard")
			})
			g.Expect(found).To(BeTrue())
			g.Expect(dashboard.Labels).To(HaveKeyWithValue("grafana_dashboard", "1"))
			g.Expect(dashboard.Data).To(HaveLen(1))
			for name, content := range dashboard.Data {
				file, err := os.ReadFile(filepath.Join(chartPath(t, c), "dashboards", name))
				g.Expect(err).NotTo(HaveOccurred())
				g.Expect(content).To(MatchJSON(file))
			}
		})
	}
}

// The secrets are where the shim looks for them, and it can access no others.
func TestAShimThatEnrollsMayReadTwoSecretsAndWriteItsOwn(t *testing.T) {
	for set, namespace := range map[string]string{"agent.enrollment.namespace=": "karpenter", "agent.enrollment.namespace=identities": "identities"} {
		t.Run(namespace, func(t *testing.T) {
			g := NewWithT(t)
			objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/enrollment-values.yaml"), "--set", set)
			pod := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			g.Expect(pod.Volumes).To(BeEmpty())
			g.Expect(pod.Containers[0].Args).To(ContainElements(
				"--agent-identity-secret="+namespace+"/karpenter-agent-identity", "--agent-bootstrap-secret="+namespace+"/karpenter-agent-bootstrap"))
			g.Expect(pod.Containers[0].Args).NotTo(ContainElement(Or(HavePrefix("--agent-tls"), HavePrefix("--agent-ca"))))
			roles := lo.Filter(of[rbacv1.Role](t, objects, "Role"), func(r rbacv1.Role, _ int) bool { return strings.HasSuffix(r.Name, "-agent-identity") })
			g.Expect(roles).To(HaveLen(1))
			g.Expect(roles[0].Namespace).To(Equal(namespace))
			g.Expect(roles[0].Rules).To(ConsistOf(
				rbacv1.PolicyRule{
					APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"karpenter-agent-identity"}, Verbs: []string{"get", "update"},
				},
				rbacv1.PolicyRule{
					APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{"karpenter-agent-bootstrap"}, Verbs: []string{"get"},
				},
			))
			secrets := of[corev1.Secret](t, objects, "Secret")
			g.Expect(secrets).To(HaveLen(1))
			g.Expect(secrets[0].Name).To(Equal("karpenter-agent-identity"))
			g.Expect(secrets[0].Namespace).To(Equal(namespace))
			g.Expect(secrets[0].Data).To(BeEmpty(), "what the shim has written stays there in an upgrade")
			g.Expect(secrets[0].StringData).To(BeEmpty())
		})
	}
}

// In the spoke, the release's namespace need not exist, and the kubeconfig may write secrets.
func TestAHubHostedShimKeepsItsSecretsInTheSpoke(t *testing.T) {
	g := NewWithT(t)
	objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/hub-hosted-enrollment-values.yaml"))
	g.Expect(of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0].Args).To(ContainElements(
		"--agent-identity-secret=kube-system/karpenter-agent-identity", "--agent-bootstrap-secret=kube-system/karpenter-agent-bootstrap"))
	g.Expect(of[corev1.Secret](t, objects, "Secret")).To(BeEmpty())
	g.Expect(of[rbacv1.Role](t, objects, "Role")).To(BeEmpty())
}

// A control plane's operator decides where its kubeconfig is. The pod must find the key of each.
func TestTheKubeconfigOfEveryControlPlaneIsFound(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root(t), "docs", "install.md"))
	NewWithT(t).Expect(err).NotTo(HaveOccurred())
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
			g := NewWithT(t)
			objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci", layout.values+"-values.yaml"))
			pod := of[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec
			variable, found := lo.Find(pod.Containers[0].Env, func(v corev1.EnvVar) bool { return v.Name == "KUBECONFIG" })
			g.Expect(found).To(BeTrue())
			folder, file := filepath.Split(variable.Value)
			mount, found := lo.Find(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == filepath.Clean(folder) })
			g.Expect(found).To(BeTrue())
			volume, found := lo.Find(pod.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
			g.Expect(found).To(BeTrue())
			g.Expect(volume.Secret.SecretName).To(Equal(layout.secret))
			g.Expect(volume.Secret.Items).To(BeEmpty(), "each key of the secret is a file")
			g.Expect(mount.SubPath).To(BeEmpty(), "the kubelet never updates a sub path")
			g.Expect(layout.keys).To(ContainElement(file))
			g.Expect(file).To(Equal(layout.key))
			g.Expect(string(page)).To(ContainSubstring(layout.documented))
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
				g := NewWithT(t)
				deployment := of[appsv1.Deployment](t, render(t, charts[i], filepath.Join(root(t), "deploy/charts", values), "--set", set), "Deployment")[0]
				var found *corev1.ProjectedVolumeSource
				for _, volume := range deployment.Spec.Template.Spec.Volumes {
					if volume.Projected != nil {
						found = volume.Projected
					}
				}
				g.Expect(found).NotTo(BeNil())
				g.Expect(found.Sources).To(HaveLen(2))
				g.Expect(lo.Map(found.Sources[0].Secret.Items, func(item corev1.KeyToPath, _ int) string { return item.Path })).
					To(Equal([]string{"tls.crt", "tls.key"}))
				g.Expect(found.Sources[1]).To(Equal(want))
			})
		}
	}
}

// With a new key, cert-manager's renewal of the authority would lock every spoke out.
func TestTheAuthorityKeepsItsKeyWhenItIsRenewed(t *testing.T) {
	g := NewWithT(t)
	objects := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/defaults-values.yaml"))
	authorities := 0
	for _, object := range objects {
		if isCA, _, _ := unstructured.NestedBool(object.Object, "spec", "isCA"); object.GetKind() == "Certificate" && isCA {
			policy, _, err := unstructured.NestedString(object.Object, "spec", "privateKey", "rotationPolicy")
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(policy).To(Equal("Never"))
			authorities++
		}
	}
	g.Expect(authorities).To(Equal(1))
}

// A hub-hosted shim reads a kubeconfig that others may write, and needs nothing of the hub's API
// server. A token of the hub in its pod could only be stolen.
func TestPodsHaveATokenOnlyOfAnAPIServerThatTheyCall(t *testing.T) {
	hubHosted := 0
	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		if c.name != "shim" {
			return
		}
		g := NewWithT(t)
		running := of[appsv1.Deployment](t, render(t, c, values), "Deployment")[0].Spec.Template.Spec
		planning := of[batchv1.Job](t, render(t, c, values, "--set", "planAdoption=true"), "Job")[0].Spec.Template.Spec
		for _, pod := range []corev1.PodSpec{running, planning} {
			elsewhere := lo.ContainsBy(pod.Containers[0].Env, func(v corev1.EnvVar) bool { return v.Name == "KUBECONFIG" })
			g.Expect(pod.AutomountServiceAccountToken).To(HaveValue(Equal(!elsewhere)))
			for _, volume := range pod.Volumes {
				for _, source := range lo.FromPtr(volume.Projected).Sources {
					g.Expect(source.ServiceAccountToken).To(BeNil(), volume.Name)
				}
			}
			if elsewhere {
				hubHosted++
			}
		}
	})
	NewWithT(t).Expect(hubHosted).To(BeNumerically(">=", 4), "the values of two hub-hosted shims, each as a Deployment and as a Job")
}

// An upgrade must keep everything in the secret that the shim needs to continue.
func TestAnUpgradeKeepsTheShimsIdentity(t *testing.T) {
	server := startAPIServer(t)
	g := NewWithT(t)
	rendered := func() *unstructured.Unstructured {
		objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci/enrollment-values.yaml"))
		secret, found := lo.Find(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == "Secret" })
		g.Expect(found).To(BeTrue())
		return secret
	}
	g.Expect(server.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: rendered().GetNamespace()}})).To(Succeed())
	apply := func() {
		desired := client.ApplyConfigurationFromUnstructured(rendered())
		g.Expect(server.Apply(t.Context(), desired, client.FieldOwner("helm"), client.ForceOwnership)).To(Succeed())
	}
	apply()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: rendered().GetNamespace(), Name: rendered().GetName()}}
	g.Expect(server.Get(t.Context(), client.ObjectKeyFromObject(secret), secret)).To(Succeed())
	secret.Data = map[string][]byte{"tls.crt": []byte("certificate")}
	g.Expect(server.Update(t.Context(), secret)).To(Succeed())
	apply()
	g.Expect(server.Get(t.Context(), client.ObjectKeyFromObject(secret), secret)).To(Succeed())
	g.Expect(secret.Data).To(HaveKeyWithValue("tls.crt", []byte("certificate")))
}

// Without confinement the right is in the ClusterRole, otherwise in the Role of each namespace.
func TestAgentMayReadQuotasWhereverItsClustersAre(t *testing.T) {
	readsQuotas := func(rules []rbacv1.PolicyRule) bool {
		return lo.ContainsBy(rules, func(r rbacv1.PolicyRule) bool {
			return slices.Equal(r.APIGroups, []string{""}) && slices.Contains(r.Resources, "resourcequotas") &&
				lo.Every(r.Verbs, []string{"list", "watch"})
		})
	}
	g := NewWithT(t)
	everywhere := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/defaults-values.yaml"))
	g.Expect(lo.ContainsBy(of[rbacv1.ClusterRole](t, everywhere, "ClusterRole"), func(r rbacv1.ClusterRole) bool {
		return readsQuotas(r.Rules)
	})).To(BeTrue())
	confined := render(t, charts[0], filepath.Join(root(t), "deploy/charts/agent/ci/confined-values.yaml"))
	for _, role := range of[rbacv1.Role](t, confined, "Role") {
		g.Expect(readsQuotas(role.Rules)).To(BeTrue(), role.Namespace)
	}
}

// This is what helm upgrade --reuse-values does with the values of an older release.
func TestAgentWithoutPricingValues(t *testing.T) {
	g := NewWithT(t)
	values := filepath.Join(t.TempDir(), "values.yaml")
	g.Expect(os.WriteFile(values, []byte("pricing: null\n"), 0o600)).To(Succeed())
	g.Expect(of[rbacv1.Role](t, render(t, charts[0], values), "Role")).To(BeEmpty())

	g.Expect(os.WriteFile(values, []byte("pricing: {list: 1e3/0123}\n"), 0o600)).To(Succeed())
	roles := of[rbacv1.Role](t, render(t, charts[0], values), "Role")
	g.Expect(roles).To(HaveLen(1), "names that look like numbers stay names")
	g.Expect(roles[0].Namespace).To(Equal("1e3"))
	g.Expect(roles[0].Rules[0].ResourceNames).To(ConsistOf("0123"))
}

func TestShimsFeatureGatesBringTheirRules(t *testing.T) {
	g := NewWithT(t)
	resources := func(values string) []string {
		objects := render(t, charts[1], filepath.Join(root(t), "deploy/charts/shim/ci", values))
		return lo.FlatMap(rules(t, objects), func(r rbacv1.PolicyRule, _ int) []string { return r.Resources })
	}
	featured := []string{"nodeoverlays", "capacitybuffers", "podtemplates", "deviceclasses", "resourceclaims", "resourceslices"}
	g.Expect(resources("defaults-values.yaml")).NotTo(ContainElement(BeElementOf(featured)))
	g.Expect(resources("everything-values.yaml")).To(ContainElements(featured))

	old := filepath.Join(t.TempDir(), "values.yaml") // as helm upgrade --reuse-values has them
	values := "agent: {address: 'a:1'}\ncluster: {namespace: team-a, name: production}\nsettings: {ignoreDRARequests: null}\n"
	g.Expect(os.WriteFile(old, []byte(values), 0o600)).To(Succeed())
	g.Expect(rules(t, render(t, charts[1], old))).NotTo(ContainElement(HaveField("APIGroups", ContainElement("resource.k8s.io"))))
}

// As described in docs/migrate-from-karpenter-provider-cluster-api.md: nothing runs but the Job
// that prints the plan.
func TestThePlanOfAdoptionIsAJobInPlaceOfKarpenter(t *testing.T) {
	server := startAPIServer(t)
	forEachValues(t, func(t *testing.T, c chart, values string) {
		t.Helper()
		if c.name != "shim" {
			return
		}
		g := NewWithT(t)
		objects := render(t, c, values, "--set", "planAdoption=true")
		g.Expect(of[appsv1.Deployment](t, objects, "Deployment")).To(BeEmpty())
		g.Expect(of[policyv1.PodDisruptionBudget](t, objects, "PodDisruptionBudget")).To(BeEmpty())
		jobs := of[batchv1.Job](t, objects, "Job")
		g.Expect(jobs).To(HaveLen(1))
		planning := jobs[0].Spec.Template.Spec
		// It serves no metrics, and waits for no certificate for them.
		running := of[appsv1.Deployment](t, render(t, c, values, "--set", "metrics.tls.secretName="), "Deployment")[0].Spec.Template.Spec
		g.Expect(planning.Containers).To(HaveLen(1), "a sidecar would not end")
		g.Expect(planning.Containers[0].Args).To(Equal(append([]string{"plan-adoption"}, running.Containers[0].Args...)))
		g.Expect(equality.Semantic.DeepEqual(planning.Containers[0].Env, running.Containers[0].Env)).To(BeTrue(), "the same environment")
		g.Expect(equality.Semantic.DeepEqual(planning.Volumes, running.Volumes)).To(BeTrue(), "the same volumes")
		g.Expect(planning.ServiceAccountName).To(Equal(running.ServiceAccountName))
		for _, object := range objects { // fills in defaults
			dryRun(t, server, object)
		}
	})
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
		{"no Cluster", charts[1], "agent.address=a:8443", "cluster.namespace is required"},
		{
			"metrics of the hub that the spoke is asked about", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,kubeconfig.secretName=k", "metrics.secure must be false",
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
		{"a traffic policy inside a cluster", charts[0], "service.externalTrafficPolicy=Local", "service.externalTrafficPolicy needs"},
		{
			"the role of an enrollment in another cluster", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true,kubeconfig.secretName=k,metrics.secure=false",
			"rbac.create must be false",
		},
		{
			"one secret for both sides of an enrollment", charts[1],
			"agent.address=a:8443,cluster.namespace=n,cluster.name=c,agent.enrollment.enabled=true,agent.enrollment.identitySecretName=s," +
				"agent.enrollment.bootstrapSecretName=s",
			"are the same",
		},
		{"a feature gate that Karpenter does not have", charts[1], "settings.featureGates.Fly=true", "Fly"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := NewWithT(t)
			_, stderr, err := helm(t, "template", tc.chart.release, chartPath(t, tc.chart), "--set", tc.set)
			g.Expect(err).To(HaveOccurred())
			g.Expect(stderr).To(ContainSubstring(tc.says))
		})
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

// startAPIServer runs a kube-apiserver for the duration of the test.
func startAPIServer(t *testing.T) client.Client {
	t.Helper()
	g := NewWithT(t)
	environment := &envtest.Environment{CRDDirectoryPaths: lo.Map(charts, func(c chart, _ int) string { return filepath.Join(chartPath(t, c), "crds") })}
	config, err := environment.Start()
	g.Expect(err).NotTo(HaveOccurred())
	t.Cleanup(func() {
		if err := environment.Stop(); err != nil {
			t.Errorf("stopping the API server: %v", err)
		}
	})
	server, err := client.New(config, client.Options{})
	g.Expect(err).NotTo(HaveOccurred())
	return client.WithFieldValidation(server, metav1.FieldValidationStrict)
}

// dryRun fails the test if the API server would refuse the object.
func dryRun(t *testing.T, server client.Client, object *unstructured.Unstructured) {
	t.Helper()
	g := NewWithT(t)
	if lo.Contains(foreignGroups, object.GroupVersionKind().Group) {
		return
	}
	if namespace := object.GetNamespace(); namespace != "" {
		err := server.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
		g.Expect(lo.Ternary(apierrors.IsAlreadyExists(err), nil, err)).NotTo(HaveOccurred())
	}
	err := server.Apply(t.Context(), client.ApplyConfigurationFromUnstructured(object), client.DryRunAll, client.FieldOwner("charts-test"))
	g.Expect(err).NotTo(HaveOccurred(), "%s %s", object.GetKind(), object.GetName())
}

// render returns the objects of the chart with the values in a file, in the order of installation.
func render(t *testing.T, c chart, values string, more ...string) []*unstructured.Unstructured {
	t.Helper()
	args := append([]string{"template", c.release, chartPath(t, c), "--namespace", c.namespace, "--values", values}, more...)
	stdout, stderr, err := helm(t, args...)
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, stderr)
	}
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(stdout), 4096)
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
	_ = os.Getenv("TESTED_FILES") // tells the test cache that the charts are an input
	return filepath.Join(root(t), "deploy", "charts", c.name)
}

// root returns the repository's folder.
func root(t *testing.T) string {
	t.Helper()
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
