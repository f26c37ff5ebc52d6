package docstest_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// The pages from which a new user starts and uses a sandbox are followed in order, with make, as they
// stand but for the sandboxes' names.
func TestTheSandboxIsUsedAsThePagesSay(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("pages-%d", os.Getpid())
	t.Setenv("SANDBOX", name)
	t.Cleanup(func() {
		for _, name := range []string{name + "-second", name} { // a second spoke first
			down := exec.CommandContext(context.WithoutCancel(ctx), "bin/sandbox", "down", "--name="+name)
			down.Dir = root
			if output, err := down.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, output)
			}
		}
	})
	named := strings.NewReplacer(".sandbox/default", ".sandbox/"+name, "HUB=default", "HUB="+name, "bin/sandbox status", "bin/sandbox status --name="+name, "second", name+"-second")
	follow := func(path string, wanted ...string) {
		t.Helper()
		page, err := pages.Read(root, path)
		if err != nil {
			t.Fatal(err)
		}
		output := run(ctx, t, root, named.Replace(page.Script()))
		for _, want := range wanted {
			if !strings.Contains(output, named.Replace(want)) {
				t.Errorf("the output of %s lacks %q:\n%s", path, want, output)
			}
		}
	}

	follow("docs/first-fifteen-minutes.md",
		"pod/hello condition met",
		"standard-4-",             // the Machine
		"Pod default/hello: ok",   // the plugin
		`pod "hello" deleted`,     // with the agent away
		"condition met",           // for the NodeClaim and the Machine that are gone
		"nothing is left running", // at the end
	)
	follow("docs/sandbox.md",
		"is ready after", "COMPONENT", // up and status
		"pod/hello created",
		"bootDelay", // how machines behave
		"configmap/prices created",
		"second-4", // the second spoke's node group
	)
}
