package conformance_test

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	"github.com/karpenter-capi/karpenter-capi/pkg/conformance"
	"github.com/karpenter-capi/karpenter-capi/pkg/fakeagent"
	"github.com/karpenter-capi/karpenter-capi/pkg/features"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var addIDs = flag.Bool("add-ids", false, "add the ids of new behaviours to testdata/ids.txt")

const idsFile = "testdata/ids.txt"

// Old verdicts identify behaviours by ID. An ID is never removed, and never assigned to another
// behaviour. New IDs are appended to the file.
func TestIDsAreFrozen(t *testing.T) {
	content, err := os.ReadFile(idsFile)
	require.NoError(t, err)
	known := map[string]string{}
	for line := range strings.Lines(string(content)) {
		id, sentence, found := strings.Cut(strings.TrimSpace(line), " ")
		require.True(t, found, "%q is not an id and a sentence", line)
		require.NotContains(t, known, id, "the id is there twice")
		known[id] = sentence
	}
	present := map[string]bool{}
	var added []string
	for _, b := range conformance.Behaviours() {
		require.False(t, present[b.ID], "the id %s is there twice", b.ID)
		present[b.ID] = true
		if line := b.Area + ": " + b.Sentence; known[b.ID] == "" {
			added = append(added, b.ID+" "+line+"\n")
		} else {
			require.Equal(t, known[b.ID], line, "the id %s was that of another behaviour; give this one an id of its own", b.ID)
		}
	}
	for id := range known {
		require.True(t, present[id], "the behaviour %s is gone; bring it back", id)
	}
	if *addIDs {
		require.NoError(t, os.WriteFile(idsFile, append(content, strings.Join(added, "")...), 0o600))
		return
	}
	require.Empty(t, added, "these are new: go test ./pkg/conformance -run IDsAreFrozen -add-ids")
}

func TestEveryBehaviourHasAProfileAndAnArea(t *testing.T) {
	for _, b := range conformance.Behaviours() {
		require.Contains(t, conformance.Profiles(), b.Profile, b.ID)
		require.NotEmpty(t, b.Area)
		require.Regexp(t, `^[a-z]+\.[a-z-]+$`, b.ID)
		require.LessOrEqual(t, b.NodeGroups, 2, b.ID)
	}
}

// The page contains the output of --list, and the fake's verdict.
func TestThePageListsEveryBehaviour(t *testing.T) {
	_ = os.Getenv("TESTED_DOCS") // declares a file outside of the module as an input of the test cache
	page, err := os.ReadFile("../../docs/conformance.md")
	require.NoError(t, err)
	require.Contains(t, string(page), conformance.Table())
	require.Contains(t, string(page), fmt.Sprintf("conformance: PASS passed=%d failed=0 skipped=%d\n",
		len(conformance.Behaviours())-count(unserved), count(unserved)))
}

func newFakeEnv(tb testing.TB) conformance.Env {
	tb.Helper()
	return fakeEnvWith(tb)
}

func fakeEnvWith(tb testing.TB, options ...fakeagent.Option) *fakeEnv {
	tb.Helper()
	ahead := &aheadClock{}
	agent := fakeagent.New(append(options,
		fakeagent.WithCoolDown(time.Minute), fakeagent.WithHeartbeatInterval(50*time.Millisecond), fakeagent.WithClock(ahead))...)
	tb.Cleanup(agent.Close)
	stranger := &agentv1alpha1.ClusterRef{Namespace: "default", Name: "stranger"}
	return &fakeEnv{
		agent: agent, clock: ahead,
		client: agent.ClientFor(fakeagent.DefaultCluster()), stranger: agent.ClientFor(stranger),
		autoscaler: agent.AutoscalerFor(fakeagent.DefaultCluster()),
	}
}

// The suite reports the same outside of a Go test as in one.
func TestChecksPassWhatATestPasses(t *testing.T) {
	var told []string
	verdict := conformance.Check(t.Context(), conformance.Checks{
		NewEnv: newFakeEnv, Progress: func(r conformance.Result) { told = append(told, r.ID) },
	})
	requirePass(t, verdict, len(conformance.Behaviours())-count(unserved), count(unserved))
	require.Len(t, told, len(verdict.Results))
	for _, r := range verdict.Results {
		if r.Outcome == conformance.Skipped {
			require.Equal(t, "the agent does not serve the protocol of a cluster-autoscaler", r.Message, r.ID)
		}
	}
}

func requirePass(t *testing.T, verdict conformance.Verdict, passed, skipped int) {
	t.Helper()
	for _, r := range verdict.Results {
		require.NotEqual(t, conformance.Failed, r.Outcome, "%s: %s", r.ID, r.Message)
	}
	require.Equal(t, fmt.Sprintf("conformance: PASS passed=%d failed=0 skipped=%d", passed, skipped), verdict.Line())
}

// standing is an agent whose Cluster is in use: it has the user's own machines, and claims of
// others.
func standing(t *testing.T) (*fakeagent.Agent, conformance.Given) {
	t.Helper()
	agent := fakeagent.New(fakeagent.WithHeartbeatInterval(50*time.Millisecond), fakeagent.WithInfrastructure(fakeagent.Infrastructure{
		Provision: time.Millisecond, Join: time.Millisecond, Terminate: time.Millisecond,
	}))
	t.Cleanup(agent.Close)
	given := conformance.Given{Of: fakeagent.DefaultCluster(), Caller: agent.ClientFor(fakeagent.DefaultCluster()), Within: 10 * time.Second}
	for _, name := range []string{"first", "second"} {
		given.NodeGroups = append(given.NodeGroups, agent.AddNodeGroup(&agentv1alpha1.NodeGroup{Name: name, Replicas: 2}))
	}
	for _, id := range []string{"ended", "live"} {
		_, err := given.Caller.Claims.CreateClaim(t.Context(), &agentv1alpha1.CreateClaimRequest{
			Cluster: given.Of, ClaimId: id, Holder: "karpenter", Candidates: given.NodeGroups[:1],
		})
		require.NoError(t, err)
	}
	_, err := given.Caller.Claims.ReleaseClaim(t.Context(), &agentv1alpha1.ReleaseClaimRequest{Cluster: given.Of, ClaimId: "ended"})
	require.NoError(t, err)
	return agent, given
}

func check(t *testing.T, given conformance.Given, profiles ...conformance.Profile) conformance.Verdict {
	t.Helper()
	target, err := given.Target(t.Context())
	require.NoError(t, err)
	return conformance.Check(t.Context(), conformance.Checks{NewEnv: target.NewEnv, Lacks: target.Lacks, Profiles: profiles})
}

func count(want func(conformance.Behaviour) bool) int {
	n := 0
	for _, b := range conformance.Behaviours() {
		if want(b) {
			n++
		}
	}
	return n
}

func faulty(b conformance.Behaviour) bool { return b.Profile == conformance.ProfileFault }

// unserved are the behaviours of the protocol that the fake does not serve.
func unserved(b conformance.Behaviour) bool { return strings.HasPrefix(b.ID, "autoscaler.") }

func TestAClusterInUseIsCheckedAndLeftAsItWas(t *testing.T) {
	agent, given := standing(t)
	given.Autoscaler = agent.AutoscalerFor(given.Of)
	given.Admin = agent.Client()
	given.Stranger = agent.ClientFor(&agentv1alpha1.ClusterRef{Namespace: "default", Name: "stranger"})
	groups := func() []*agentv1alpha1.NodeGroup {
		response, err := given.Caller.NodeGroups.ListNodeGroups(t.Context(), &agentv1alpha1.ListNodeGroupsRequest{Cluster: given.Of})
		require.NoError(t, err)
		return response.GetNodeGroups()
	}
	require.Eventually(t, func() bool { return groups()[0].GetReplicas() == 3 }, 10*time.Second, time.Millisecond)
	verdict := check(t, given)
	skipped := count(func(b conformance.Behaviour) bool { return faulty(b) || unserved(b) })
	requirePass(t, verdict, len(conformance.Behaviours())-skipped, skipped)
	require.Eventually(t, func() bool {
		return groups()[0].GetReplicas() == 3 && groups()[1].GetReplicas() == 2
	}, 10*time.Second, time.Millisecond)
	response, err := given.Caller.Claims.ListClaims(t.Context(), &agentv1alpha1.ListClaimsRequest{Cluster: given.Of})
	require.NoError(t, err)
	require.Len(t, response.GetClaims(), 1)
	require.Equal(t, "live", response.GetClaims()[0].GetClaimId())
}

func TestWhatTheTargetLacksIsSkippedWithTheReason(t *testing.T) {
	agent, given := standing(t)
	reasons := func(given conformance.Given) map[string]string {
		found := map[string]string{}
		for _, r := range check(t, given).Results {
			if r.Outcome == conformance.Skipped {
				found[r.ID] = r.Message
			} else {
				require.Equal(t, conformance.Passed, r.Outcome, "%s: %s", r.ID, r.Message)
			}
		}
		return found
	}
	given.NodeGroups = given.NodeGroups[:1]
	skipped := reasons(given)
	require.Equal(t, "needs a control over the target, and there is none", skipped["claims.machine-lost"])
	require.Equal(t, "needs 2 node groups to use, and 1 are given", skipped["claims.first-answer-stands"])
	require.Equal(t, "needs an identity with the role autoscaler, and none is given", skipped["holders.foreign-id"])
	require.Contains(t, skipped["requests.other-cluster"], "the identity of a Cluster that does not exist")
	require.NotContains(t, skipped, "claims.new")

	given.Caller = agent.ClientAs(fakeagent.Identity{
		ID: "spiffe://karpenter-capi/reader", Grants: []fakeagent.Grant{{Role: fakeagent.RoleReader, AllClusters: true}},
	})
	skipped = reasons(given)
	require.Equal(t, "needs a caller with the role cluster or admin, and it has the roles reader", skipped["claims.new"])
	require.Contains(t, skipped["server.status"], "the Cluster's own identity")
	require.NotContains(t, skipped, "nodegroups.snapshot")
}

func TestProfilesSelectBehaviours(t *testing.T) {
	_, given := standing(t)
	for _, r := range check(t, given, conformance.ProfileReader).Results {
		require.Equal(t, conformance.ProfileReader, r.Profile)
	}
}

func TestATargetThatCannotBeUsedIsAnError(t *testing.T) {
	agent, given := standing(t)
	given.NodeGroups = append(given.NodeGroups, "default/missing")
	_, err := given.Target(t.Context())
	require.ErrorContains(t, err, "node group default/missing")
	given.NodeGroups = given.NodeGroups[:1]
	agent.Block(given.NodeGroups[0], agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "it is paused", time.Time{})
	_, err = given.Target(t.Context())
	require.ErrorContains(t, err, "takes no claims now: it is paused")
	closed, err := client.New(client.Options{Address: "127.0.0.1:1", PlaintextLoopback: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, closed.Close()) })
	given.Caller = closed
	_, err = given.Target(t.Context())
	require.ErrorContains(t, err, "asking the agent who the caller is")
}

// An agent that breaks the contract fails, and the verdict names the behaviour.
func TestABrokenAgentFails(t *testing.T) {
	broken := func(tb testing.TB) conformance.Env {
		tb.Helper()
		env := fakeEnvWith(tb)
		env.agent.Fail("GetMachine", fakeagent.Always, context.DeadlineExceeded)
		return env
	}
	verdict := conformance.Check(t.Context(), conformance.Checks{
		NewEnv: broken, Only: func(id string) bool { return strings.HasPrefix(id, "machines.") },
	})
	require.False(t, verdict.Pass())
	require.Equal(t, "conformance: FAIL passed=3 failed=1 skipped=0", verdict.Line())
	i := slices.IndexFunc(verdict.Results, func(r conformance.Result) bool { return r.Outcome == conformance.Failed })
	require.Equal(t, "machines.get", verdict.Results[i].ID)
	require.Contains(t, verdict.Results[i].Message, "context deadline exceeded")
}

// Only an agent that does not list the feature may lack the protocol of a cluster-autoscaler.
func TestAFeatureThatIsListedMustBeServed(t *testing.T) {
	verdict := conformance.Check(t.Context(), conformance.Checks{
		NewEnv: func(tb testing.TB) conformance.Env {
			tb.Helper()
			return fakeEnvWith(tb, fakeagent.WithFeatures(features.All()...))
		},
		Only: func(id string) bool { return strings.HasPrefix(id, "autoscaler.") },
	})
	require.Equal(t, count(unserved), verdict.Count(conformance.Failed), verdict.Line())
	require.Contains(t, verdict.Results[0].Message, "unknown service clusterautoscaler.cloudprovider.v1.externalgrpc.CloudProvider")
}

// A failing part fails its case. A case that panics does not affect the others.
func TestAPanicIsAFailure(t *testing.T) {
	verdict := conformance.Check(t.Context(), conformance.Checks{
		NewEnv: func(testing.TB) conformance.Env { panic("no agent") },
		Only:   func(id string) bool { return id == "server.health" || id == "server.reflection" },
	})
	require.Equal(t, 2, verdict.Count(conformance.Failed))
	require.Contains(t, verdict.Results[0].Message, "panic: no agent")
}

func TestNothingCheckedIsNoPass(t *testing.T) {
	require.False(t, conformance.Check(t.Context(), conformance.Checks{Only: func(string) bool { return false }}).Pass())
	skipped := conformance.Check(t.Context(), conformance.Checks{Lacks: func(conformance.Behaviour) string { return "everything" }})
	require.False(t, skipped.Pass())
	require.Equal(t, len(conformance.Behaviours()), skipped.Count(conformance.Skipped))
}

func TestVerdictFiles(t *testing.T) {
	verdict := conformance.Verdict{
		Began: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Seconds: 3,
		Results: []conformance.Result{
			{ID: "a.one", Area: "A", Behaviour: "it does", Profile: conformance.ProfileReader, Outcome: conformance.Passed, Seconds: 1},
			{ID: "a.two", Area: "A", Behaviour: "it does too", Profile: conformance.ProfileReader, Outcome: conformance.Failed, Message: "no \x1b<b>"},
			{ID: "b.one", Area: "B", Behaviour: "and it", Profile: conformance.ProfileFault, Outcome: conformance.Skipped, Message: "no control"},
		},
	}
	var out bytes.Buffer
	require.NoError(t, verdict.WriteJSON(&out))
	var parsed struct {
		Verdict string               `json:"verdict"`
		Passed  int                  `json:"passed"`
		Failed  int                  `json:"failed"`
		Skipped int                  `json:"skipped"`
		Results []conformance.Result `json:"results"`
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &parsed))
	require.Equal(t, "FAIL", parsed.Verdict)
	require.Equal(t, []int{1, 1, 1}, []int{parsed.Passed, parsed.Failed, parsed.Skipped})
	require.Equal(t, verdict.Results, parsed.Results)

	out.Reset()
	require.NoError(t, verdict.WriteJUnit(&out))
	var suite struct {
		Tests    int `xml:"tests,attr"`
		Failures int `xml:"failures,attr"`
		Cases    []struct {
			Class   string `xml:"classname,attr"`
			Name    string `xml:"name,attr"`
			Failure string `xml:"failure"`
			Skipped *struct {
				Message string `xml:"message,attr"`
			} `xml:"skipped"`
		} `xml:"testcase"`
	}
	require.NoError(t, xml.Unmarshal(out.Bytes(), &suite))
	require.Equal(t, 3, suite.Tests)
	require.Equal(t, 1, suite.Failures)
	require.Equal(t, "a.two", suite.Cases[1].Name)
	require.Equal(t, "no <b>", suite.Cases[1].Failure)
	require.Equal(t, "no control", suite.Cases[2].Skipped.Message)
}
