// Package cookbook_test runs the commands that docs/grpcurl.md shows, as they stand, against a sandbox.
package cookbook_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
)

// Commands are in fences marked sh; what a person has done before, or only may do, is marked console.
var fence = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

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
	// The shim is left out: nothing here needs one, and it would be a second holder of claims.
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

	output := run(ctx, t, root, strings.ReplaceAll(script(t, filepath.Join(root, "docs", "grpcurl.md")), ".sandbox/default", paths.Dir))
	for _, want := range []string{
		"capi.agent.v1alpha1.ClaimService",                           // list
		`"identity": "spiffe://karpenter-capi/cluster/fleet/spoke"`,  // status
		"fleet/standard-4\tstandard-4\t4\t16Gi",                      // node groups
		`"synced"`,                                                   // watch
		`"phase": "CLAIM_PHASE_BOUND"`,                               // claim
		"CLAIM_PHASE_RELEASING",                                      // release
		"by-hand-1\tme\tCLAIM_PHASE_ENDED\tReleased",                 // list of claims
		`Message: claim "by-hand-1" is ended and its id is never us`, // an id that has ended
		"CLAIM_PHASE_ENDED\tNeverMade",                               // released before it was made
		`"adoptMachine": "standard-4-`,                               // taking over
		"Message: invalid request: claim_id:",                        // a mistake
		"Code: PermissionDenied",                                     // somebody else's Cluster
	} {
		if !strings.Contains(output, want) {
			t.Errorf("the output lacks %q", want)
		}
	}
	if t.Failed() {
		t.Log(output)
	}
}

// script is every command of the page, in order.
func script(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var commands strings.Builder
	for _, match := range fence.FindAllSubmatch(text, -1) {
		commands.Write(match[1])
	}
	if commands.Len() == 0 {
		t.Fatalf("%s shows no commands", page)
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
