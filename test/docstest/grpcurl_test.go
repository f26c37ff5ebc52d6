// Package docstest_test runs the commands that the pages show for a sandbox, unchanged.
package docstest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/yaml"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

func TestCookbook(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "cookbook-") //nolint:usetesting // The logs stay if the test fails.
	if err != nil {
		t.Fatal(err)
	}
	// Without a shim: it is not needed here, and would be a second holder of claims.
	s, err := sandbox.Start(ctx, sandbox.Options{Root: root, StateDir: filepath.Join(dir, "sandbox"), WithoutShim: true})
	if err != nil {
		t.Fatal(err)
	}
	paths := s.State().Paths
	t.Cleanup(func() {
		s.Stop()
		if t.Failed() {
			t.Logf("the sandbox's logs are in %s", paths.Logs)
		} else if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})

	output := run(ctx, t, root, strings.ReplaceAll(script(t, root), ".sandbox/default", paths.Dir))
	for _, want := range []string{
		"capi.agent.v1alpha1.ClaimService",                               // list
		`"identity": "spiffe://karpenter-capi/admin"`,                    // status
		"fleet/standard-4\tstandard-4\t4\t16Gi",                          // node groups
		`"synced"`,                                                       // watch
		`"phase": "CLAIM_PHASE_BOUND"`,                                   // claim
		"CLAIM_PHASE_RELEASING",                                          // release
		"by-hand-1\tme\tCLAIM_PHASE_ENDED\tReleased",                     // list of claims
		`Message: claim "by-hand-1" is ended and its id is never reused`, // an id that has ended
		"CLAIM_PHASE_ENDED\tNeverMade",                                   // released before it was made
		`"adoptMachine": "standard-4-`,                                   // adoption
		"Message: invalid request: claim_id:",                            // an invalid request
		"Code: PermissionDenied",                                         // another Cluster
	} {
		if !strings.Contains(output, want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if t.Failed() {
		t.Log(output)
	}

	t.Run("absent replicas are filled in as docs/gitops.md says", func(t *testing.T) {
		got := strings.Fields(run(ctx, t, root, "source "+paths.Env+"\n"+manifestsOf+replicasFilledIn))
		want := []string{
			"new:1", "new-with-sizes:2", "applied:5", "applied-on-the-server:5", "field-given-up:4", "replaced:4",
			"replaced-above-max:3", "replaced-without-max:1", "not-a-number:refused",
		}
		if !slices.Equal(got, want) {
			t.Errorf("replicas are %v, want %v", got, want)
		}
	})
	t.Run("what docs/gitops.md shows keeps the replicas that there are", func(t *testing.T) {
		nodeGroup, patch := shownForGit(t, root)
		got := strings.Fields(run(ctx, t, root, "source "+paths.Env+"\n"+manifestsOf+
			fmt.Sprintf("node_group='%s' patch='%s'\n", nodeGroup, patch)+replicasKept))
		if want := []string{"begun:4", "what-to-write:4", "flux:4"}; !slices.Equal(got, want) {
			t.Errorf("replicas are %v, want %v", got, want)
		}
	})
}

// shownForGit returns the MachineDeployment that docs/gitops.md shows, adapted to the sandbox, and
// the patch that it shows for Flux, both as JSON.
func shownForGit(t *testing.T, root string) (nodeGroup, patch []byte) {
	t.Helper()
	page, err := pages.Read(root, "docs/gitops.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, block := range page.Blocks() {
		if block.Language != "yaml" {
			continue
		}
		switch block.Section {
		case "What to write":
			var md clusterv1.MachineDeployment
			if err := yaml.UnmarshalStrict([]byte(block.Code), &md); err != nil {
				t.Fatalf("docs/gitops.md:%d: %v", block.Line, err)
			}
			nodeGroup, err = json.Marshal(map[string]any{
				"metadata": map[string]any{"labels": md.Labels, "annotations": md.Annotations}, "spec": map[string]any{},
			})
		case "ClusterClass":
			var shown any = &clusterv1.Cluster{}
			if strings.HasPrefix(block.Code, "# in the ClusterClass\n") {
				shown = &clusterv1.ClusterClass{}
			}
			err = yaml.UnmarshalStrict([]byte(block.Code), shown)
		case "Flux":
			var shown struct {
				Spec struct {
					Patches []struct {
						Patch string `json:"patch"`
					} `json:"patches"`
				} `json:"spec"`
			}
			if err = yaml.Unmarshal([]byte(block.Code), &shown); err == nil && len(shown.Spec.Patches) == 1 {
				patch, err = yaml.YAMLToJSON([]byte(shown.Spec.Patches[0].Patch))
			}
		}
		if err != nil {
			t.Fatalf("docs/gitops.md:%d: %v", block.Line, err)
		}
	}
	if nodeGroup == nil || patch == nil {
		t.Fatal("docs/gitops.md does not show what to write, or no patch for Flux")
	}
	return nodeGroup, patch
}

// manifestsOf contains bash functions that write MachineDeployments.
const manifestsOf = `
hub() { bin/kubectl --kubeconfig "$HUB_KUBECONFIG" --namespace fleet "$@"; }
size=cluster.x-k8s.io/cluster-api-autoscaler-node-group
# sizes <min> [max]: annotations
sizes() { echo "{cluster.x-k8s.io/paused: '', $size-min-size: '$1'${2:+, $size-max-size: '$2'}}"; }
# manifest <annotations> [replicas]
manifest() { cat <<YAML
apiVersion: cluster.x-k8s.io/v1beta2
kind: MachineDeployment
metadata: {name: $name, namespace: fleet, annotations: $1}
spec:
  clusterName: spoke
  ${2:+replicas: $2}
  template:
    spec:
      clusterName: spoke
      bootstrap: {dataSecretName: spoke-bootstrap}
      infrastructureRef: {apiGroup: infrastructure.cluster.x-k8s.io, kind: SimMachineTemplate, name: standard-4}
YAML
}
show() { echo "$1:$(hub get machinedeployment "$name" -o jsonpath='{.spec.replicas}')"; }
quietly() { "$@" >/dev/null; }
`

// replicasKept makes the manifests of docs/gitops.md remove replicas from a MachineDeployment.
const replicasKept = `
name=shown
manifest "$(sizes 0 9)" 4 | quietly hub apply --server-side --field-manager=git -f -
show begun
quietly hub patch machinedeployment "$name" --type merge -p "$node_group"
show what-to-write
quietly hub patch machinedeployment "$name" --type json -p "$patch"
show flux
`

// replicasFilledIn writes a MachineDeployment in every way that docs/gitops.md describes, and shows
// the replicas after each. It is paused, so that no Machines are made.
const replicasFilledIn = `
# replace: what kubectl does with the version that it has just read, which Cluster API may have overtaken
replace() {
  local text said; text=$(cat)
  for _ in 1 2 3 4 5; do said=$(hub replace -f - 2>&1 <<<"$text") && return; done
  echo "$said"; return 1
}

name=in-git-without-sizes
manifest "{cluster.x-k8s.io/paused: ''}" | quietly hub create -f -
show new

name=in-git
manifest "$(sizes 2 9)" | quietly hub apply -f -
show new-with-sizes
quietly hub scale machinedeployment "$name" --replicas=5
manifest "$(sizes 2 9)" | quietly hub apply -f -
show applied
manifest "$(sizes 2 9)" | quietly hub apply --server-side --force-conflicts --field-manager=git -f -
show applied-on-the-server
manifest "$(sizes 2 9)" 4 | quietly hub apply --server-side --force-conflicts --field-manager=git -f -
manifest "$(sizes 2 9)" | quietly hub apply --server-side --force-conflicts --field-manager=git -f -
show field-given-up
manifest "$(sizes 2 9)" | replace
show replaced
manifest "$(sizes 2 3)" | replace
show replaced-above-max
manifest "$(sizes 2)" | replace
show replaced-without-max
manifest "$(sizes three 9)" | quietly hub replace -f - 2>/dev/null || echo not-a-number:refused
`

// script returns all commands of the pages about a sandbox, in order. The cookbook comes first: it
// creates the node group.
func script(t *testing.T, root string) string {
	t.Helper()
	var commands strings.Builder
	for _, path := range []string{"docs/grpcurl.md", "README.md", "docs/gitops.md"} {
		page, err := pages.Read(root, path)
		if err != nil {
			t.Fatal(err)
		}
		if page.Script() == "" {
			t.Fatalf("%s shows no commands", path)
		}
		commands.WriteString("( : " + path + "\n" + page.Script() + ")\n")
	}
	return commands.String()
}

// run runs the commands in the folder until one of them fails.
func run(ctx context.Context, t *testing.T, dir, commands string) string {
	t.Helper()
	var output bytes.Buffer
	bash := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
	bash.Dir, bash.Stdout, bash.Stderr = dir, &output, &output
	bash.WaitDelay = 10 * time.Second
	if err := bash.Run(); err != nil {
		t.Fatalf("%v\n%s", err, output.String())
	}
	return output.String()
}
