package charts_test

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Releases of the charts as they were before their last change, with the values that they were tested
// with then, are upgraded by the command of docs/install.md.
func TestChartsAreUpgradedFromTheCommitBefore(t *testing.T) {
	h := theHub(t)
	h.namespaces(t, "team-a", "team-b", "billing", "monitoring")
	for _, u := range []struct {
		chart    chart
		values   []string
		settings string
	}{
		{
			charts[0],
			[]string{"defaults", "confined", "everything"},
			"tls.certManager.enabled=false,onboarding.issuerSecretName=issuer,metrics.serviceMonitor.enabled=false,metrics.prometheusRule.enabled=false",
		},
		{
			charts[1], []string{"defaults", "enrollment", "everything"}, "metrics.serviceMonitor.enabled=false,metrics.prometheusRule.enabled=false",
		},
	} {
		t.Run(u.chart.name, func(t *testing.T) {
			before, missing := earlierChart(t, u.chart)
			if missing != "" {
				t.Skip(missing)
			}
			h.deleteCRDs(t, u.chart)
			for _, values := range u.values {
				t.Run(values, func(t *testing.T) {
					r := release{u.chart.release, u.chart.namespace}
					h.install(t, r, before, "--values", filepath.Join(before, "ci", values+"-values.yaml"), "--set", u.settings)
					old := h.manifest(t, r)
					h.helm(t, h.command("upgrade", r, chartPath(t, u.chart), "--reset-then-reuse-values")...)
					h.requireUpgraded(t, old, h.manifest(t, r))
				})
			}
		})
	}
}

// requireUpgraded checks that the objects of a release exist, and those that only its previous
// revision had do not.
func (h *hub) requireUpgraded(t *testing.T, old, upgraded map[string]*unstructured.Unstructured) {
	t.Helper()
	require.NotEmpty(t, old)
	for key, object := range upgraded {
		require.NoError(t, h.admin.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopy()), key)
	}
	for key, object := range lo.OmitByKeys(old, lo.Keys(upgraded)) {
		eventually(t, func(c *assert.CollectT) {
			err := h.admin.Get(t.Context(), client.ObjectKeyFromObject(object), object.DeepCopy())
			require.True(c, apierrors.IsNotFound(err), "%s: %v", key, err)
		})
	}
}

// manifest returns the objects of a release.
func (h *hub) manifest(t *testing.T, r release) map[string]*unstructured.Unstructured {
	t.Helper()
	manifest, stderr, err := helm(t, "get", "manifest", r.name, "--namespace", r.namespace, "--kubeconfig", h.kubeconfig)
	require.NoError(t, err, stderr)
	return lo.KeyBy(decoded(t, manifest), func(o *unstructured.Unstructured) string {
		return fmt.Sprintf("%s %s/%s", o.GroupVersionKind().GroupKind(), o.GetNamespace(), o.GetName())
	})
}

// earlierChart returns a folder with a chart as it was before its last change: at HEAD if something is
// not committed, else before the last commit that changed it, or at the revision that the environment
// names. missing says why there is none.
func earlierChart(t *testing.T, c chart) (folder, missing string) {
	t.Helper()
	path := "deploy/charts/" + c.name
	git := func(args ...string) (string, error) {
		command := exec.CommandContext(t.Context(), "git", args...)
		command.Dir = root(t)
		out, err := command.Output()
		if failed := (&exec.ExitError{}); errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(failed.Stderr)))
		}
		return strings.TrimSpace(string(out)), err
	}
	changed, err := git("status", "--porcelain", "--", path)
	if err != nil {
		return "", fmt.Sprintf("there is no history here: %v", err)
	}
	name := "HEAD"
	if changed == "" {
		last, err := git("log", "-1", "--format=%H", "--", path)
		require.NoError(t, err)
		name = last + "~1"
	}
	name = cmp.Or(os.Getenv("SKEW_FROM"), name)
	tree, err := git("rev-parse", "--verify", name+":"+path)
	if err != nil {
		return "", fmt.Sprintf("%s has no %s in this history, which may be shallow: %v", name, path, err)
	}
	dir := t.TempDir()
	_, err = git("archive", "--format=tar", "--output="+filepath.Join(dir, "chart.tar"), "--prefix="+c.name+"/", tree)
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-xf", filepath.Join(dir, "chart.tar")).CombinedOutput()
	require.NoError(t, err, string(out))
	return filepath.Join(dir, c.name), ""
}

// fromEarlier runs a test with the chart as it was before its last change, and the flags that its
// upgrade needs. Without the history, it reports that as a skipped test, and runs the test with the
// oldest chart that testdata has.
func fromEarlier(t *testing.T, c chart, test func(t *testing.T, path string, flags ...string)) {
	t.Helper()
	path, missing := earlierChart(t, c)
	t.Run("from the commit before", func(t *testing.T) {
		if missing != "" {
			t.Skipf("the test begins with the oldest chart instead: %s", missing)
		}
		test(t, path)
	})
	if missing != "" {
		t.Run("from the oldest chart", func(t *testing.T) { test(t, unownedChart(t, c), "--take-ownership") })
	}
}
