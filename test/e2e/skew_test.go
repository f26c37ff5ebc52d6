package e2e_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/samber/lo"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	shimv1 "github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// TestTheVersionBeforeIsCompatible runs the shim of an earlier revision with this agent, and the
// agent of that revision with this shim, brings the older one to this version while pods run, and
// takes it back.
func TestTheVersionBeforeIsCompatible(t *testing.T) {
	if testing.Short() {
		t.Skip("not in the short run: builds an earlier revision")
	}
	revision := earlier(t)
	for _, old := range []string{sandbox.Shim, sandbox.Agent} {
		t.Run("the "+old+" of before", func(t *testing.T) {
			figure := shows(t, fmt.Sprintf("the %s of the revision before works with what is of this one, is upgraded while pods run, and rolled back", old))
			options := sandbox.Options{Name: "e2e-skew-" + lo.Ternary(old == sandbox.Shim, "shim", "agent")}
			// What runs is a copy, which is replaced while the component is stopped.
			command := map[string]string{sandbox.Shim: "karpenter", sandbox.Agent: "capi-agent"}[old]
			before, now := built(t, revision, command), filepath.Join(root(t), "bin", command)
			running := filepath.Join(t.TempDir(), command)
			install(t, before, running)
			*lo.Ternary(old == sandbox.Shim, &options.ShimBinary, &options.AgentBinary) = running
			inSandbox(t, options)
			useCrowd(t)

			replace := func(binary string) {
				t.Helper()
				components := []string{old}
				if old == sandbox.Agent {
					components = lo.Times(agents, sandbox.AgentName)
				}
				for _, component := range components {
					require.NoError(t, w.Sandbox.StopComponent(component))
				}
				install(t, binary, running)
				for _, component := range components {
					require.NoError(t, w.Sandbox.StartComponent(within(t, settleWithin), component))
				}
			}
			kept := func() []string {
				t.Helper()
				var list karpenterv1.NodeClaimList
				require.NoError(t, w.Spoke.List(within(t, soon), &list))
				return lo.Map(list.Items, func(nc karpenterv1.NodeClaim, _ int) string { return nc.Name })
			}
			grows := func(pods int32) []string {
				t.Helper()
				scale(t, "crowd", pods)
				await(t, settleWithin, crowdRuns(int(pods)))
				return kept()
			}
			if old == sandbox.Agent {
				agentIsCompatible(t) // this shim has asked it
			}
			first := grows(2)
			replace(now)
			require.Subset(t, grows(3), first, "after the upgrade")
			agentIsCompatible(t)
			replace(before)
			require.Subset(t, grows(4), first, "after the rollback")
			figure("revision %.12s: 4 pods, with the nodes of before kept over the upgrade and the rollback", revision)
		})
	}
}

// agentIsCompatible waits until the shim says that the agent is compatible.
func agentIsCompatible(t *testing.T) {
	t.Helper()
	poll(t, soon, func(ctx context.Context) (string, error) {
		var class shimv1.ClusterAPINodeClass
		err := w.Spoke.Get(ctx, client.ObjectKey{Name: "crowd"}, &class)
		found := lo.FromPtr(class.StatusConditions().Get(shimv1.ConditionAgentCompatible))
		return lo.Ternary(found.IsTrue(), "",
			fmt.Sprintf("the NodeClass to say that the agent is compatible: it says %s: %s", found.Reason, found.Message)), err
	})
}

// earlier returns the revision that the environment names, else that of the newest release before
// this one, else that of the commit before this one.
func earlier(t *testing.T) string {
	t.Helper()
	if _, err := git(t, "rev-parse", "--git-dir"); err != nil {
		t.Skipf("there is no history here: %v", err)
	}
	name := cmp.Or(os.Getenv("SKEW_FROM"), "HEAD~1")
	if release, err := git(t, "describe", "--tags", "--abbrev=0", "--match=v*", "HEAD~1"); err == nil {
		name = cmp.Or(os.Getenv("SKEW_FROM"), release)
	}
	revision, err := git(t, "rev-parse", "--verify", name+"^{commit}")
	if err != nil {
		t.Skipf("the revision %s is not in this history, which may be shallow: %v", name, err)
	}
	return revision
}

func git(t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = root(t)
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
}

// built returns the binary of a command as it was at a revision.
func built(t *testing.T, revision, command string) string {
	t.Helper()
	dir := t.TempDir()
	run := func(name string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK="+filepath.Join(dir, "go.work"))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s %v: %s", name, args, out)
	}
	archive := filepath.Join(dir, "source.tar")
	_, err := git(t, "archive", "--format=tar", "--output="+archive, revision)
	require.NoError(t, err)
	run("tar", "-xf", archive)
	binary := filepath.Join(dir, command)
	folder := map[string]string{"karpenter": "shim", "capi-agent": "agent"}[command]
	run("go", "build", "-buildvcs=false", "-o", binary, "./"+folder+"/cmd/"+command)
	return binary
}

// install replaces a binary by another one.
func install(t *testing.T, from, to string) {
	t.Helper()
	content, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to+".new", content, 0o700))
	require.NoError(t, os.Rename(to+".new", to))
}
