package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	ctrlclient "sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/capitest"
)

// Every agent of these tests has the rights of the chart's ServiceAccount. It is subject to the
// admission policies of the current chart and of the first chart that had any, because a hub's
// policies may be upgraded before or after the agent.

const (
	agentNamespace = "capi-agent-system"
	account        = "system:serviceaccount:" + agentNamespace + ":capi-agent"
)

// lastPolicy rejects ConfigMaps with a certain name. The API server loads policies in the order of
// their creation: once this one is in force, so are all earlier ones.
const lastPolicy = `
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: last}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: "object.metadata.name != 'last'"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: last}
spec: {policyName: last, validationActions: [Deny]}
`

// confine installs the charts' roles and policies, and returns the client configuration of the
// confined account.
func confine(plane *capitest.ControlPlane) (*rest.Config, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	// They declare the charts, and the pages of the access matrix and the limits, as inputs of the
	// test cache.
	_, _ = os.Getenv("TESTED_CHARTS"), os.Getenv("TESTED_REFERENCE")
	top := filepath.Join("..", "..", "..")
	// The tests write, as administrators, what no agent may write.
	helm := exec.CommandContext(ctx, filepath.Join(top, "bin", "helm"), "template", "capi-agent", filepath.Join(top, "deploy", "charts", "agent"),
		"--namespace", agentNamespace, "--set", "rbac.infrastructureResources={testmachinetemplates},nodePools.publish=true",
		"--set", "admission.exempt.groups={system:masters}", "--set-json", `policy={"identities":[]}`)
	var problems bytes.Buffer
	helm.Stderr = &problems
	chart, err := helm.Output()
	if err != nil {
		return nil, fmt.Errorf("rendering the chart, for which make bin/helm is needed: %w: %s", err, problems.String())
	}
	earlier, err := os.ReadFile(filepath.Join(top, "test", "charts", "testdata", "earlier", "templates", "everything.yaml"))
	if err != nil {
		return nil, err
	}
	if err := plane.Client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: agentNamespace}}); err != nil {
		return nil, err
	}
	err = apply(ctx, plane, chart, "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding",
		"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
	if err != nil {
		return nil, err
	}
	// The earlier chart has no exemptions, and the tests do what most of its policies reject. Only
	// its policy about the agent is applied.
	if err := apply(ctx, plane, earlier, "capi-agent-own-writes"); err != nil {
		return nil, err
	}
	if err := apply(ctx, plane, []byte(lastPolicy), "last"); err != nil {
		return nil, err
	}
	probe := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "last"}}
	err = wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		err := plane.Client.Create(ctx, probe, ctrlclient.DryRunAll)
		if apierrors.IsInvalid(err) {
			return true, nil
		}
		return false, err
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for the policies: %w", err)
	}
	config := rest.CopyConfig(plane.Config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: account, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + agentNamespace, "system:authenticated"},
	}
	return config, nil
}

// apply creates those objects of a manifest that have one of the given kinds or names.
func apply(ctx context.Context, plane *capitest.ControlPlane, manifest []byte, wanted ...string) error {
	created := 0
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(manifest), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			if created < len(wanted) {
				return fmt.Errorf("%d objects of %v", created, wanted)
			}
			return nil
		} else if err != nil {
			return err
		}
		if len(object.Object) == 0 || !slices.Contains(wanted, object.GetKind()) && !slices.Contains(wanted, object.GetName()) {
			continue
		}
		if err := plane.Client.Create(ctx, object); err != nil {
			return err
		}
		created++
	}
}

func TestTheAgentsOfTheseTestsAreConfined(t *testing.T) {
	agent, err := ctrlclient.New(hub, ctrlclient.Options{Scheme: plane.Scheme})
	require.NoError(t, err)
	md := capitest.NewMachineDeployment(plane.Namespace(t), "group", "spoke", 0)
	plane.Create(t, md)
	err = agent.Patch(t.Context(), md, ctrlclient.RawPatch(types.MergePatchType, []byte(`{"spec":{"template":{"spec":{"version":"v9.9.9"}}}}`)))
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	require.ErrorContains(t, err, "the agent changes only replicas")
	require.True(t, apierrors.IsForbidden(agent.Delete(t.Context(), md)), "RBAC")
}
