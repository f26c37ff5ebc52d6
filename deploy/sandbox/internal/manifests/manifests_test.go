package manifests

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

const twoVersions = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.com}
spec:
  group: example.com
  names: {kind: Thing, plural: things}
  scope: Namespaced
  versions:
  - {name: v1, served: true, storage: false}
  - {name: v2, served: true, storage: true}
`

const oneServed = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: others.example.com}
spec:
  group: example.com
  names: {kind: Other, plural: others}
  scope: Namespaced
  versions:
  - {name: v1, served: false, storage: false}
  - {name: v2, served: true, storage: true}
`

const webhookConfigurations = `
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata: {name: mutating-webhook-configuration}
webhooks:
- name: a.example.com
  clientConfig: {service: {name: webhook-service, namespace: system, path: /mutate-a}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: validating-webhook-configuration}
webhooks:
- name: a.example.com
  clientConfig: {service: {name: webhook-service, namespace: system, path: /validate-a}}
- name: b.example.com
  clientConfig: {service: {name: webhook-service, namespace: system, path: /validate-b}}
`

func clusterAPI(t *testing.T, configurations string) ([]client.Object, error) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "crds"), 0o700); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{"crds/two.yaml": twoVersions, "crds/one.yaml": oneServed, "webhooks.yaml": configurations} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return ClusterAPI(dir, Webhooks{Address: "127.0.0.1:9443", CA: []byte("authority")})
}

func TestClusterAPIPointsToTheManager(t *testing.T) {
	objects, err := clusterAPI(t, webhookConfigurations)
	if err != nil {
		t.Fatal(err)
	}
	urls := map[string]string{}
	for _, o := range objects {
		var clients []admissionv1.WebhookClientConfig
		switch o := o.(type) {
		case *apiextensionsv1.CustomResourceDefinition:
			if o.Spec.Conversion != nil {
				c := o.Spec.Conversion.Webhook.ClientConfig
				clients = append(clients, admissionv1.WebhookClientConfig{URL: c.URL, CABundle: c.CABundle})
			}
		case *admissionv1.MutatingWebhookConfiguration:
			for _, w := range o.Webhooks {
				clients = append(clients, w.ClientConfig)
			}
		case *admissionv1.ValidatingWebhookConfiguration:
			for _, w := range o.Webhooks {
				clients = append(clients, w.ClientConfig)
			}
		}
		for _, c := range clients {
			if c.Service != nil || string(c.CABundle) != "authority" {
				t.Errorf("%s is called as %+v", o.GetName(), c)
			}
			urls[*c.URL] = o.GetName()
		}
	}
	want := map[string]string{
		"https://127.0.0.1:9443/convert":    "things.example.com",
		"https://127.0.0.1:9443/mutate-a":   "capi-mutating-webhook-configuration",
		"https://127.0.0.1:9443/validate-a": "capi-validating-webhook-configuration",
		"https://127.0.0.1:9443/validate-b": "capi-validating-webhook-configuration",
	}
	if len(urls) != len(want) {
		t.Errorf("got %v", urls)
	}
	for url, name := range want {
		if urls[url] != name {
			t.Errorf("%s is called for %q, want %q", url, urls[url], name)
		}
	}
}

func TestClusterAPIRefusesWhatItCannotRedirect(t *testing.T) {
	for name, configurations := range map[string]string{
		"a webhook that is not a service": strings.NewReplacer("service: {name: webhook-service, namespace: system, path: /mutate-a}", "url: 'https://a'").
			Replace(webhookConfigurations),
		"another kind": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: m}",
		"no YAML":      "a: [",
	} {
		t.Run(name, func(t *testing.T) {
			if objects, err := clusterAPI(t, configurations); err == nil {
				t.Errorf("got %d objects and no error", len(objects))
			}
		})
	}
}

func TestCRDsAreReadFromEveryFileAndDocument(t *testing.T) {
	crds, err := CRDs(fstest.MapFS{
		"a.yaml":     {Data: []byte(twoVersions + "\n---\n" + oneServed)},
		"sub/b.yaml": {Data: []byte(oneServed)},
		"README.md":  {Data: []byte("# not YAML: [")},
	})
	if err != nil || len(crds) != 3 {
		t.Fatalf("got %d, %v", len(crds), err)
	}
	if _, err := CRDs(os.DirFS(filepath.Join(t.TempDir(), "absent"))); err == nil {
		t.Error("a folder that is not there is no error")
	}
}

func TestOnlyPermissionsArePicked(t *testing.T) {
	rendered, err := decode([]byte(`
apiVersion: v1
kind: ServiceAccount
metadata: {name: shim}
---
# an empty document
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: shim}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: shim}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: shim, namespace: kube-system}
---
apiVersion: v1
kind: Secret
metadata: {name: shim}
`))
	if err != nil {
		t.Fatal(err)
	}
	account, objects, err := pickPermissions(rendered, Chart{Namespace: "karpenter"})
	if err != nil {
		t.Fatal(err)
	}
	if account != (client.ObjectKey{Namespace: "karpenter", Name: "shim"}) {
		t.Errorf("the ServiceAccount is %s", account)
	}
	kinds := []string{}
	for _, o := range objects {
		kinds = append(kinds, o.GetObjectKind().GroupVersionKind().Kind)
	}
	if !slices.Equal(kinds, []string{"ServiceAccount", "ClusterRole", "RoleBinding", "Secret"}) {
		t.Errorf("picked %v", kinds)
	}

	if _, _, err := pickPermissions(rendered[1:], Chart{}); err == nil {
		t.Error("a chart without a ServiceAccount is no error")
	}
	if _, _, err := pickPermissions(append(rendered, rendered[0]), Chart{}); err == nil {
		t.Error("a chart with two ServiceAccounts is no error")
	}
}

func TestWhatAProviderInstallsIsMarkedForClusterctl(t *testing.T) {
	provider := Provider{Name: "sim", Type: "InfrastructureProvider", Label: "infrastructure-sim", Namespace: "sim-system", Version: "v1.2.3"}
	crd := &apiextensionsv1.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"kept": "yes"}}}
	provider.Mark([]client.Object{crd})
	for _, o := range []client.Object{crd, provider.Entry()} {
		if _, marked := o.GetLabels()["clusterctl.cluster.x-k8s.io"]; !marked || o.GetLabels()["cluster.x-k8s.io/provider"] != "infrastructure-sim" {
			t.Errorf("%T is labelled %v", o, o.GetLabels())
		}
	}
	if crd.Labels["kept"] != "yes" {
		t.Errorf("other labels are lost: %v", crd.Labels)
	}
}
