package docstest_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/test/pages"
)

// The pages from which a new user starts and uses a sandbox are followed in order, with make. Only
// the names of the sandboxes are others.
func TestTheSandboxIsUsedAsThePagesSay(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("pages-%d", os.Getpid())
	t.Setenv("SANDBOX", name)
	for _, variable := range []string{"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"} { // those of the make that runs this test
		t.Setenv(variable, "")
	}
	t.Cleanup(func() {
		for _, name := range []string{name + "-second", name} { // a second spoke first
			down := exec.CommandContext(context.WithoutCancel(ctx), "bin/sandbox", "down", "--name="+name,
				fmt.Sprintf("--keep-logs=%t", t.Failed()))
			down.Dir = root
			if output, err := down.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, output)
			}
			if err := os.Remove(filepath.Join(root, ".sandbox", name+".lock")); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Error(err)
			}
		}
	})
	named := strings.NewReplacer(
		".sandbox/default", ".sandbox/"+name, "bin/sandbox status", "bin/sandbox status --name="+name,
		"HUB=default", "HUB="+name, "second", name+"-second",
	)
	follow := func(path string, wanted ...string) {
		t.Helper()
		page, err := pages.Read(root, path)
		if err != nil {
			t.Fatal(err)
		}
		output := run(ctx, t, root, named.Replace(page.Script()))
		for _, want := range wanted {
			if !regexp.MustCompile(named.Replace(want)).MatchString(output) {
				t.Errorf("the output of %s lacks %s:\n%s", path, want, output)
			}
		}
	}

	follow("docs/first-fifteen-minutes.md",
		`pod/hello condition met`,
		`machine\.cluster\.x-k8s\.io/standard-4-`,
		`Pod default/hello: ok`, // the plugin
		`pod "hello" deleted`,
		`nodeclaim\.karpenter\.sh/default-\w+ condition met`, // it has gone
		`agent +\d+ +true +1 `,                               // it has restarted once
		`nothing is left running`,
	)
	follow("docs/sandbox.md",
		`is ready after`, `COMPONENT`, // up and status
		`pod/hello created`,
		`bootDelay`, // how machines behave
		`configmap/prices created`,
		`second-4`, // the second spoke's node group
	)
}
