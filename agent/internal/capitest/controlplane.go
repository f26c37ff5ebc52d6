package capitest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	addonsv1 "sigs.k8s.io/cluster-api/api/addons/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

// AssetsVariable is the environment variable with the directory that contains etcd and
// kube-apiserver.
const AssetsVariable = "KUBEBUILDER_ASSETS"

// ControlPlane is a running API server.
type ControlPlane struct {
	// Config connects to it as an administrator.
	Config *rest.Config
	// Scheme has the types of core, Cluster API and this module.
	Scheme *apiruntime.Scheme
	// Client reads and writes directly, without a cache.
	Client client.WithWatch

	environment *envtest.Environment
	guard       *guard
	namespaces  atomic.Int64
}

// crdsWithin bounds how long the API server takes to serve the CRDs. The machine may be busy with
// other tests.
const crdsWithin = time.Minute

// StartControlPlane starts etcd and kube-apiserver on loopback and installs the CRDs. This takes
// seconds: share one control plane per test binary, from TestMain, and give each test its own
// namespace. The caller must call Stop.
func StartControlPlane() (*ControlPlane, error) {
	_ = os.Getenv("TESTED_CHARTS") // declares the charts' CRDs as inputs of the test cache
	top, err := repository()
	if err != nil {
		return nil, err
	}
	assets := os.Getenv(AssetsVariable)
	if assets == "" {
		assets = filepath.Join(top, "bin")
	}
	for _, binary := range []string{"etcd", "kube-apiserver"} {
		if _, err := os.Stat(filepath.Join(assets, binary)); err != nil {
			return nil, fmt.Errorf("%s is needed to run these tests: build the sandbox's tools (make tools), or set %s to a folder that holds it: %w",
				binary, AssetsVariable, err)
		}
	}
	crds, err := crds(top)
	if err != nil {
		return nil, err
	}
	environment := &envtest.Environment{
		Scheme:                Scheme(),
		BinaryAssetsDirectory: assets,
		CRDInstallOptions:     envtest.CRDInstallOptions{CRDs: crds, MaxTime: crdsWithin},
	}
	config, err := environment.Start()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting the API server: %w", err), environment.Stop())
	}
	guard, err := guardChildren()
	if err != nil {
		return nil, errors.Join(err, environment.Stop())
	}
	config.QPS, config.Burst = 1000, 1000
	c, err := client.NewWithWatch(config, client.Options{Scheme: environment.Scheme})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making a client: %w", err), environment.Stop(), guard.dismiss())
	}
	return &ControlPlane{Config: config, Scheme: environment.Scheme, Client: c, environment: environment, guard: guard}, nil
}

// Main runs the tests of a package with one control plane for all of them, which it stores in plane, and
// ends the process. It is to be called from TestMain.
func Main(m *testing.M, plane **ControlPlane) {
	// Flags are parsed before anything is started, because an unknown flag ends the process.
	flag.Parse()
	log.SetLogger(logr.Discard())
	started, err := StartControlPlane()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	*plane = started
	code := m.Run()
	if err := started.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// Stop stops the API server and etcd and removes their data. If the process ends without calling
// it, they stop as well, but their data stays in the temporary directory.
func (p *ControlPlane) Stop() error { return errors.Join(p.environment.Stop(), p.guard.dismiss()) }

// KubeConfig returns a kubeconfig for an administrator, for use by other processes.
func (p *ControlPlane) KubeConfig() []byte { return slices.Clone(p.environment.KubeConfig) }

// Namespace creates a new, empty namespace.
func (p *ControlPlane) Namespace(tb testing.TB) string {
	tb.Helper()
	name := fmt.Sprintf("test-%d", p.namespaces.Add(1))
	if err := p.Client.Create(context.Background(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		tb.Fatalf("creating namespace %s: %v", name, err)
	}
	return name
}

// Scheme returns a new scheme with the types of core, Cluster API and this module.
func Scheme() *apiruntime.Scheme {
	s := apiruntime.NewScheme()
	for _, add := range []func(*apiruntime.Scheme) error{
		scheme.AddToScheme, apiextensionsv1.AddToScheme, clusterv1.AddToScheme, addonsv1.AddToScheme, v1alpha1.AddToScheme,
	} {
		if err := add(s); err != nil {
			panic(err) // only possible if two types have the same name
		}
	}
	return s
}

func repository() (string, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		return "", errors.New("the sources' folder is not known")
	}
	return filepath.Abs(filepath.Join(filepath.Dir(file), "..", "..", ".."))
}

func crds(top string) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	ours := filepath.Join(top, "deploy", "charts", "agent", "files", "crds", "agent.karpenter.cluster.x-k8s.io_")
	own, err := readCRDs(ours+"machineclaims.yaml", ours+"spokes.yaml", ours+"nodepoolsets.yaml")
	if err != nil {
		return nil, err
	}
	const bases = "core/config/crd/bases/"
	theirs, err := ClusterAPICRDs(
		bases+"addons.cluster.x-k8s.io_clusterresourcesets.yaml", bases+"cluster.x-k8s.io_clusters.yaml", bases+"cluster.x-k8s.io_machinedeployments.yaml",
		bases+"cluster.x-k8s.io_machinesets.yaml", bases+"cluster.x-k8s.io_machines.yaml", bases+"cluster.x-k8s.io_machinehealthchecks.yaml",
	)
	return slices.Concat([]*apiextensionsv1.CustomResourceDefinition{infrastructureTemplateCRD()}, own, theirs), err
}

// ClusterAPICRDs reads CustomResourceDefinitions from Cluster API's module, given their paths in
// it. Each has one version, the newest, because there is no conversion webhook.
func ClusterAPICRDs(paths ...string) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	top, err := repository()
	if err != nil {
		return nil, err
	}
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/cluster-api")
	list.Dir = filepath.Join(top, "agent")
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("finding the module sigs.k8s.io/cluster-api: %w", err)
	}
	files := make([]string, 0, len(paths))
	for _, path := range paths {
		files = append(files, filepath.Join(strings.TrimSpace(string(out)), filepath.FromSlash(path)))
	}
	return readCRDs(files...)
}

func readCRDs(files ...string) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	all := make([]*apiextensionsv1.CustomResourceDefinition, 0, len(files))
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading a CRD: %w", err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.UnmarshalStrict(content, crd); err != nil {
			return nil, fmt.Errorf("parsing %s: %w", file, err)
		}
		// Older versions would need a conversion webhook, which does not exist here.
		crd.Spec.Versions = newest(crd.Spec.Versions)
		crd.Spec.Conversion = nil
		all = append(all, crd)
	}
	return all, nil
}

func newest(versions []apiextensionsv1.CustomResourceDefinitionVersion) []apiextensionsv1.CustomResourceDefinitionVersion {
	for _, version := range versions {
		if version.Storage {
			return []apiextensionsv1.CustomResourceDefinitionVersion{version}
		}
	}
	return versions
}

// These name the infrastructure template kind that the model's machine templates refer to. The
// model does not interpret it.
const (
	InfrastructureGroup        = "infrastructure.cluster.x-k8s.io"
	InfrastructureVersion      = "v1alpha7"
	InfrastructureTemplateKind = "TestMachineTemplate"
	InfrastructureMachineKind  = "TestMachine"
)

func infrastructureTemplateCRD() *apiextensionsv1.CustomResourceDefinition {
	preserve := true
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{
			Name: "testmachinetemplates." + InfrastructureGroup,
			// Only this label names the version that belongs to the contract.
			Labels: map[string]string{"cluster.x-k8s.io/v1beta2": InfrastructureVersion},
		},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: InfrastructureGroup,
			Names: apiextensionsv1.CustomResourceDefinitionNames{
				Kind: InfrastructureTemplateKind, ListKind: InfrastructureTemplateKind + "List",
				Plural: "testmachinetemplates", Singular: "testmachinetemplate",
			},
			Scope: apiextensionsv1.NamespaceScoped,
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: InfrastructureVersion, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
					Type: "object", XPreserveUnknownFields: &preserve,
				}},
				Subresources: &apiextensionsv1.CustomResourceSubresources{Status: &apiextensionsv1.CustomResourceSubresourceStatus{}},
			}},
		},
	}
}
