// Package manifests builds the objects that a sandbox starts with: Cluster API's own, adapted to a
// manager that runs as a process beside the API server, and the permissions in this project's Helm
// charts.
package manifests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/samber/lo"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Scheme returns a scheme with the kinds that every Kubernetes API server serves, and
// CustomResourceDefinitions.
func Scheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	lo.Must0(clientgoscheme.AddToScheme(scheme))
	lo.Must0(apiextensionsv1.AddToScheme(scheme))
	return scheme
}

// Webhooks identifies the webhook server of a manager.
type Webhooks struct {
	// Address is its host:port.
	Address string
	// CA is the authority of its certificate, PEM.
	CA []byte
}

func (w Webhooks) url(path string) *string {
	return new((&url.URL{Scheme: "https", Host: w.Address, Path: path}).String())
}

// ClusterAPI reads Cluster API's manifests from dir (the folder crds and the file webhooks.yaml).
// It points the webhooks, and the conversion of every kind with more than one served version, to
// the given server.
func ClusterAPI(dir string, webhooks Webhooks) ([]client.Object, error) {
	definitions, err := CRDs(os.DirFS(filepath.Join(dir, "crds")))
	if err != nil {
		return nil, err
	}
	for _, crd := range definitions {
		if lo.CountBy(crd.Spec.Versions, func(v apiextensionsv1.CustomResourceDefinitionVersion) bool { return v.Served }) < 2 {
			continue
		}
		crd.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{
			Strategy: apiextensionsv1.WebhookConverter,
			Webhook: &apiextensionsv1.WebhookConversion{
				ClientConfig:             &apiextensionsv1.WebhookClientConfig{URL: webhooks.url("/convert"), CABundle: webhooks.CA},
				ConversionReviewVersions: []string{"v1"},
			},
		}
	}

	data, err := os.ReadFile(filepath.Join(dir, "webhooks.yaml")) //nolint:gosec // the caller's to choose
	if err != nil {
		return nil, err
	}
	configurations, err := decode(data)
	if err != nil {
		return nil, fmt.Errorf("reading the webhook configurations: %w", err)
	}
	redirect := func(c *admissionv1.WebhookClientConfig) error {
		if c.Service == nil || c.Service.Path == nil {
			return errors.New("a webhook configuration names no service with a path")
		}
		c.URL, c.Service, c.CABundle = webhooks.url(*c.Service.Path), nil, webhooks.CA
		return nil
	}
	objects := Objects(definitions)
	for _, u := range configurations {
		var object client.Object
		var configs []*admissionv1.WebhookClientConfig
		switch u.GetKind() {
		case "MutatingWebhookConfiguration":
			c := &admissionv1.MutatingWebhookConfiguration{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, c); err != nil {
				return nil, err
			}
			for i := range c.Webhooks {
				configs = append(configs, &c.Webhooks[i].ClientConfig)
			}
			object = c
		case "ValidatingWebhookConfiguration":
			c := &admissionv1.ValidatingWebhookConfiguration{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, c); err != nil {
				return nil, err
			}
			for i := range c.Webhooks {
				configs = append(configs, &c.Webhooks[i].ClientConfig)
			}
			object = c
		default:
			return nil, fmt.Errorf("unexpected %s among the webhook configurations", u.GetKind())
		}
		for _, c := range configs {
			if err := redirect(c); err != nil {
				return nil, err
			}
		}
		object.SetName("capi-" + object.GetName())
		objects = append(objects, object)
	}
	return objects, nil
}

// CRDs reads the CustomResourceDefinitions in the YAML files of a folder. A missing folder is an
// error.
func CRDs(dir fs.FS) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	var crds []*apiextensionsv1.CustomResourceDefinition
	err := fs.WalkDir(dir, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".yaml" {
			return err
		}
		data, err := fs.ReadFile(dir, path)
		if err != nil {
			return err
		}
		objects, err := decode(data)
		if err != nil {
			return fmt.Errorf("reading %s: %w", path, err)
		}
		for _, o := range objects {
			crd := &apiextensionsv1.CustomResourceDefinition{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, crd); err != nil {
				return fmt.Errorf("reading %s: %w", path, err)
			}
			crds = append(crds, crd)
		}
		return nil
	})
	return crds, err
}

// Objects returns the definitions as objects.
func Objects(crds []*apiextensionsv1.CustomResourceDefinition) []client.Object {
	return lo.Map(crds, func(crd *apiextensionsv1.CustomResourceDefinition, _ int) client.Object { return crd })
}

// permissions are the kinds in a chart that grant or restrict access, including admission policies.
var permissions = []schema.GroupKind{
	{Kind: "ServiceAccount"},
	{Kind: "Secret"}, // referenced by a role
	{Group: "rbac.authorization.k8s.io", Kind: "Role"},
	{Group: "rbac.authorization.k8s.io", Kind: "ClusterRole"},
	{Group: "rbac.authorization.k8s.io", Kind: "RoleBinding"},
	{Group: "rbac.authorization.k8s.io", Kind: "ClusterRoleBinding"},
	{Group: "admissionregistration.k8s.io", Kind: "ValidatingAdmissionPolicy"},
	{Group: "admissionregistration.k8s.io", Kind: "ValidatingAdmissionPolicyBinding"},
}

// Chart describes how a Helm chart is rendered.
type Chart struct {
	// Helm is the path of the helm binary, and Dir the path of the chart.
	Helm, Dir string
	// Release and Namespace are those of the installation.
	Release, Namespace string
	// Values are settings of the form path=value.
	Values []string
	// Account is returned if the chart creates no ServiceAccount: that of another chart.
	Account client.ObjectKey
}

// Permissions renders the chart and returns its ServiceAccount, and all roles, secrets and
// admission policies with their bindings.
func (c Chart) Permissions(ctx context.Context) (account client.ObjectKey, objects []client.Object, err error) {
	args := []string{"template", c.Release, c.Dir, "--namespace", c.Namespace}
	for _, v := range c.Values {
		args = append(args, "--set", v)
	}
	cmd := exec.CommandContext(ctx, c.Helm, args...) //nolint:gosec // the caller's to choose
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		return account, nil, fmt.Errorf("rendering the chart %s: %w: %s", c.Dir, err, bytes.TrimSpace(problems.Bytes()))
	}
	rendered, err := decode(out.Bytes())
	if err != nil {
		return account, nil, fmt.Errorf("reading the rendered chart %s: %w", c.Dir, err)
	}
	return pickPermissions(rendered, c)
}

func pickPermissions(rendered []*unstructured.Unstructured, c Chart) (account client.ObjectKey, objects []client.Object, err error) {
	for _, o := range rendered {
		if !slices.Contains(permissions, o.GroupVersionKind().GroupKind()) {
			continue
		}
		if o.GetKind() == "ServiceAccount" {
			if account.Name != "" {
				return account, nil, fmt.Errorf("the chart %s has more than one ServiceAccount", c.Dir)
			}
			if o.GetNamespace() == "" {
				o.SetNamespace(c.Namespace)
			}
			account = client.ObjectKeyFromObject(o)
		}
		objects = append(objects, o)
	}
	if account.Name == "" {
		account = c.Account
	}
	if account.Name == "" {
		return account, nil, fmt.Errorf("the chart %s has no ServiceAccount", c.Dir)
	}
	return account, objects, nil
}

// decode parses YAML documents and skips empty ones.
func decode(data []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(&u.Object); errors.Is(err, io.EOF) {
			return objects, nil
		} else if err != nil {
			return nil, err
		}
		if len(u.Object) > 0 {
			objects = append(objects, u)
		}
	}
}
