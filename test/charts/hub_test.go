package charts_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clusterv1beta1 "sigs.k8s.io/cluster-api/api/core/v1beta1" //nolint:staticcheck // it is served, so it can be written
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	capiconversion "sigs.k8s.io/cluster-api/core/webhooks/conversion"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"
)

const (
	// soon bounds what an API server does by itself: it checks its policies once a second, and the
	// available kinds every 30 seconds.
	soon = 2 * time.Minute
	// unrestricted is a group to which RBAC grants everything.
	unrestricted = "unrestricted"
)

// hub is an API server with Cluster API's kinds in every served version, converted by Cluster API's
// own code.
type hub struct {
	environment *envtest.Environment
	config      *rest.Config
	admin       client.Client
	kubeconfig  string
	stop        func() error
}

// shared is a hub for tests that use their own namespaces or uninstall their releases, and begin with
// [hub.installCRDs] or [hub.deleteCRDs] if it matters to them which of the charts' kinds it has.
var shared struct {
	once sync.Once
	hub  *hub
	err  error
}

func TestMain(m *testing.M) {
	log.SetLogger(logr.Discard())
	code := m.Run()
	if shared.hub != nil {
		if err := shared.hub.stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func theHub(t *testing.T) *hub {
	t.Helper()
	shared.once.Do(func() {
		shared.hub, shared.err = startHub()
		if shared.err == nil {
			shared.err = shared.hub.installClusterAPI(root(t))
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.hub
}

// startHub returns a hub without Cluster API.
func startHub() (*hub, error) {
	environment := &envtest.Environment{}
	config, err := environment.Start()
	if err != nil {
		return nil, errors.Join(err, environment.Stop())
	}
	config.QPS, config.Burst = 1000, 1000
	config.WarningHandler = rest.NoWarnings{} // about the older version
	h := &hub{environment: environment, config: config, stop: environment.Stop}
	dir, err := os.MkdirTemp("", "hub")
	if err != nil {
		return nil, errors.Join(err, h.stop())
	}
	h.stop = func() error { return errors.Join(environment.Stop(), os.RemoveAll(dir)) }
	h.kubeconfig = filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(h.kubeconfig, environment.KubeConfig, 0o600); err != nil {
		return nil, errors.Join(err, h.stop())
	}
	if h.admin, err = client.New(config, client.Options{Scheme: hubScheme()}); err != nil {
		return nil, errors.Join(err, h.stop())
	}
	all := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: unrestricted},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: unrestricted}},
	}
	if err := h.admin.Create(context.Background(), all); err != nil {
		return nil, errors.Join(err, h.stop())
	}
	return h, nil
}

// ownHub returns an API server of the test's own, without Cluster API.
func ownHub(t *testing.T) *hub {
	t.Helper()
	h, err := startHub()
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, h.stop()) })
	return h
}

// installClusterAPI creates the kinds that the policies concern.
func (h *hub) installClusterAPI(top string) error {
	webhooks := envtest.WebhookInstallOptions{IgnoreSchemeConvertible: true}
	if err := webhooks.PrepWithoutInstalling(); err != nil {
		return err
	}
	stop := h.stop
	h.stop = func() error { return errors.Join(stop(), webhooks.Cleanup()) }
	if err := h.serveConversion(webhooks); err != nil {
		return err
	}
	var crds []*apiextensionsv1.CustomResourceDefinition
	for _, kind := range []string{"clusters", "machinedeployments", "machinesets", "machines"} {
		content, err := os.ReadFile(filepath.Join(top, "bin", "capi-core-manifests", "crds", "cluster.x-k8s.io_"+kind+".yaml"))
		if err != nil {
			return fmt.Errorf("run make tools: %w", err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(content, crd); err != nil {
			return err
		}
		crds = append(crds, crd)
	}
	_, err := envtest.InstallCRDs(h.config, envtest.CRDInstallOptions{CRDs: crds, Scheme: hubScheme(), WebhookOptions: webhooks, MaxTime: soon})
	return err
}

// installCRDs creates the kinds of charts, or replaces them, as the files have them. No release owns
// them.
func (h *hub) installCRDs(t *testing.T, charts ...chart) {
	t.Helper()
	_, err := envtest.InstallCRDs(h.config, envtest.CRDInstallOptions{
		Paths: lo.Map(charts, func(c chart, _ int) string { return filepath.Join(chartPath(t, c), "files", "crds") }), MaxTime: soon,
	})
	require.NoError(t, err)
}

// deleteCRDs removes the kinds of a chart with all their objects, whose finalizers do not hold them
// back.
func (h *hub) deleteCRDs(t *testing.T, c chart) {
	t.Helper()
	for _, crd := range h.crds(t, c) {
		objects := &unstructured.UnstructuredList{}
		objects.SetGroupVersionKind(schema.GroupVersionKind{
			Group: crd.Spec.Group, Version: crd.Status.StoredVersions[0], Kind: crd.Spec.Names.ListKind,
		})
		require.NoError(t, h.admin.List(t.Context(), objects))
		for _, object := range objects.Items {
			if len(object.GetFinalizers()) > 0 {
				patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
				require.NoError(t, h.admin.Patch(t.Context(), &object, patch))
			}
		}
		require.NoError(t, h.admin.Delete(t.Context(), &crd))
	}
	eventually(t, func(collect *assert.CollectT) { require.Empty(collect, h.crds(t, c)) })
}

// crds returns those CRDs of a chart that exist.
func (h *hub) crds(t *testing.T, c chart) map[string]apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	list := &apiextensionsv1.CustomResourceDefinitionList{}
	require.NoError(t, h.admin.List(t.Context(), list))
	return lo.PickByKeys(lo.KeyBy(list.Items, func(crd apiextensionsv1.CustomResourceDefinition) string { return crd.Name }), crdNames(t, c))
}

func (h *hub) serveConversion(webhooks envtest.WebhookInstallOptions) error {
	// The version of the kinds that templates refer to. The core manager reads it from their CRDs.
	capiconversion.SetAPIVersionGetter(func(_ context.Context, kind schema.GroupKind) (string, error) { return kind.Group + "/v1", nil })
	scheme, registry := hubScheme(), conversion.NewRegistry()
	for kind, converterFor := range map[string]func(*runtime.Scheme) (conversion.Converter, error){
		"Cluster": capiconversion.Cluster, "MachineDeployment": capiconversion.MachineDeployment,
		"MachineSet": capiconversion.MachineSet, "Machine": capiconversion.Machine,
	} {
		converter, err := converterFor(scheme)
		if err != nil {
			return err
		}
		if err := registry.RegisterConverter(schema.GroupKind{Group: clusterv1.GroupVersion.Group, Kind: kind}, converter); err != nil {
			return err
		}
	}
	dir := webhooks.LocalServingCertDir
	certificate, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	if err != nil {
		return err
	}
	listener, err := tls.Listen("tcp", net.JoinHostPort(webhooks.LocalServingHost, strconv.Itoa(webhooks.LocalServingPort)),
		&tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS13})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/convert", conversion.NewWebhookHandler(scheme, registry))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: soon}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	stop := h.stop
	h.stop = func() error {
		err := errors.Join(stop(), server.Close())
		if serving := <-ended; !errors.Is(serving, http.ErrServerClosed) {
			err = errors.Join(err, serving)
		}
		return err
	}
	return nil
}

func hubScheme() *runtime.Scheme {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, apiextensionsv1.AddToScheme, clusterv1.AddToScheme, clusterv1beta1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			panic(err) // only two types with the same name can cause this
		}
	}
	return scheme
}

// as returns a client of a user in the given groups.
func (h *hub) as(t *testing.T, user string, groups ...string) client.Client {
	t.Helper()
	config := rest.CopyConfig(h.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	c, err := client.New(config, client.Options{Scheme: h.admin.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// tool returns a client that may do everything that RBAC can grant.
func (h *hub) tool(t *testing.T) client.Client {
	t.Helper()
	return h.as(t, "git-sync", unrestricted)
}

func (h *hub) namespaces(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		err := h.admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
		if client.IgnoreAlreadyExists(err) != nil {
			t.Fatal(err)
		}
	}
}

// release is a release of the agent's chart.
type release struct{ name, namespace string }

func (r release) user() string { return "system:serviceaccount:" + r.namespace + ":" + r.name }

// hubName is the suffix of the names of what the release creates outside its namespace.
func (r release) hubName() string { return r.name + "." + r.namespace }

// agent returns a client with the rights that the chart grants to its agent, once the API server
// knows that they apply in a namespace.
func (h *hub) agent(t *testing.T, r release, namespace string) client.Client {
	t.Helper()
	agent := h.as(t, r.user(), "system:serviceaccounts", "system:serviceaccounts:"+r.namespace)
	eventually(t, func(c *assert.CollectT) {
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: namespace, Verb: "patch", Group: clusterv1.GroupVersion.Group, Resource: "machinedeployments",
			},
		}}
		require.NoError(c, agent.Create(t.Context(), review))
		require.True(c, review.Status.Allowed, "%s", review.Status.Reason)
	})
	return agent
}

// install installs the chart, and uninstalls it at the end of the test.
func (h *hub) install(t *testing.T, r release, chart string, settings ...string) {
	t.Helper()
	h.helm(t, append([]string{"install", r.name, chart, "--namespace", r.namespace, "--create-namespace"}, settings...)...)
	t.Cleanup(func() { h.uninstall(t, r, "--ignore-not-found") })
}

func (h *hub) upgrade(t *testing.T, r release, settings ...string) {
	t.Helper()
	h.helm(t, append([]string{"upgrade", r.name, chartPath(t, charts[0]), "--namespace", r.namespace}, settings...)...)
}

func (h *hub) uninstall(t *testing.T, r release, settings ...string) {
	t.Helper()
	h.helm(t, append([]string{"uninstall", r.name, "--namespace", r.namespace}, settings...)...)
}

func (h *hub) helm(t *testing.T, args ...string) {
	t.Helper()
	if _, stderr, err := helm(t, append(args, "--kubeconfig", h.kubeconfig)...); err != nil {
		t.Fatalf("helm %s: %v\n%s", strings.Join(args, " "), err, stderr)
	}
}

// without returns settings for a cluster without cert-manager, in which no release owns the CRDs,
// because several share it.
func without(settings ...string) []string {
	return append([]string{"--set", "tls.certManager.enabled=false,crds.install=false"}, settings...)
}

// confined returns settings for an agent that serves only some namespaces.
func confined(namespaces ...string) []string {
	return without("--set", "namespaces={"+strings.Join(namespaces, ",")+"}")
}

func eventually(t *testing.T, condition func(*assert.CollectT)) {
	t.Helper()
	require.EventuallyWithT(t, condition, soon, 100*time.Millisecond)
}
