package e2e_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/test/manifests"
)

// operatorsGroups are the groups of operators that the sandbox does not have: cert-manager and
// Prometheus.
var operatorsGroups = []string{"cert-manager.io", "monitoring.coreos.com"}

// Every test of the package shows that these permissions suffice for agent and shim: the sandbox
// runs them with tokens of the charts' ServiceAccounts, and TestMain searches their logs for
// refusals.
func TestChartsAreAcceptedByTheClustersTheyAreFor(t *testing.T) {
	shows(t, "the charts are accepted by the clusters that they are for")
	for _, tc := range []struct {
		chart, release, namespace string
		cluster                   client.Client
	}{
		{"agent", "capi-agent", "capi-agent-system", w.Hub},
		{"shim", "karpenter", "karpenter-system", w.Spoke},
	} {
		files, err := filepath.Glob(filepath.Join(root(t), "deploy", "charts", tc.chart, "ci", "*-values.yaml"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no values to render the chart %s with: %v", tc.chart, err)
		}
		for _, values := range files {
			t.Run(tc.chart+"/"+strings.TrimSuffix(filepath.Base(values), "-values.yaml"), func(t *testing.T) {
				checked := 0
				for _, object := range template(t, tc.chart, tc.release, tc.namespace, values) {
					if lo.Contains(operatorsGroups, object.GroupVersionKind().Group) {
						continue
					}
					require.NoError(t, dryRun(t, tc.cluster, object), "%s %s", object.GetKind(), object.GetName())
					checked++
				}
				require.Greater(t, checked, 3)
			})
		}
	}
}

// template returns the objects that helm renders.
func template(t *testing.T, chart, release, namespace, values string) []*unstructured.Unstructured {
	t.Helper()
	var stdout, stderr bytes.Buffer
	helm := exec.CommandContext(t.Context(), filepath.Join(root(t), "bin", "helm"), "template", release,
		filepath.Join(root(t), "deploy", "charts", chart), "--namespace", namespace, "--values", values)
	helm.Stdout, helm.Stderr, helm.Env = &stdout, &stderr, append(os.Environ(), "HELM_PLUGINS="+t.TempDir())
	err := helm.Run()
	if errors.Is(err, fs.ErrNotExist) {
		t.Fatal("no bin/helm: run make bin/helm")
	}
	if err != nil {
		t.Fatalf("helm template: %v\n%s", err, stderr.String())
	}
	objects, err := manifests.Parse(stdout.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// dryRun returns an error if the API server would refuse the object, with strict validation of
// field names. It creates the object's namespace.
func dryRun(t *testing.T, c client.Client, object *unstructured.Unstructured) error {
	t.Helper()
	if name := object.GetNamespace(); name != "" {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if err := client.IgnoreAlreadyExists(c.Create(t.Context(), namespace)); err != nil {
			return err
		}
	}
	return client.WithFieldValidation(c, metav1.FieldValidationStrict).Apply(t.Context(),
		client.ApplyConfigurationFromUnstructured(object), client.DryRunAll, client.ForceOwnership, client.FieldOwner("helm"))
}
