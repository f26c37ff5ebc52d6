package failures

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

type recorded struct {
	Kind, Reason, Message, See, After, Proof, From string
	Means                                          Class
	Gone                                           bool
}

func read(t *testing.T) []recorded {
	t.Helper()
	text, err := os.ReadFile("testdata/recorded.yaml")
	require.NoError(t, err)
	var all []recorded
	require.NoError(t, yaml.UnmarshalStrict(text, &all))
	return all
}

func TestWhatProvidersWriteIsJudged(t *testing.T) {
	for _, r := range read(t) {
		got := Of(r.Kind, r.Reason, r.Message)
		assert.Equal(t, r.Means, got.Class, "%s/%s: %s", r.Kind, r.Reason, r.Message)
		assert.Equal(t, r.Gone, got.Gone, "%s/%s: %s", r.Kind, r.Reason, r.Message)
		assert.Equal(t, r.See, got.See, "%s/%s: %s", r.Kind, r.Reason, r.Message)
		after := time.Duration(0)
		if r.After != "" {
			var err error
			after, err = time.ParseDuration(r.After)
			require.NoError(t, err)
		}
		assert.Equal(t, after, got.After, "%s/%s: %s", r.Kind, r.Reason, r.Message)
		assert.Contains(t, []string{"whole", "parts", "prepared"}, r.Proof)
		assert.NotEmpty(t, r.From)
	}
}

// The providers of docs/failures.md, with the classes of their final reports. Docker's provider
// recreates the container instead of failing.
func TestEveryProviderHasRecordedReports(t *testing.T) {
	for kind, final := range map[string][]Class{
		"AWSMachine":       {Capacity, Quota, Configuration, GivenUp},
		"AzureMachine":     {Capacity, Quota, Configuration, GivenUp},
		"GCPMachine":       {Capacity, Quota},
		"VSphereMachine":   {Capacity, Configuration},
		"OpenStackMachine": {Capacity, Quota, Configuration, GivenUp},
		"Metal3Machine":    {Capacity},
		"DockerMachine":    nil,
	} {
		classes := map[Class]bool{}
		for _, r := range read(t) {
			if r.Kind == kind {
				classes[r.Means] = true
			}
		}
		assert.Subset(t, classes, final, kind)
		assert.Contains(t, classes, Transient, kind)
	}
}

// Each of these reasons is also used for errors that pass.
func TestNothingIsFinalByAReasonThatStandsForEverything(t *testing.T) {
	for kind, reasons := range map[string][]string{
		"AWSMachine": {"InstanceProvisionFailed"}, "AzureMachine": {"Failed"}, "GCPMachine": {"NotReady"},
		"DockerMachine":  {"NotReady", "ContainerDeleted"},
		"VSphereMachine": {"CloningFailed", "TaskFailure", "TaskFailed", "NotReady"}, "OpenStackMachine": {"InstanceCreateFailed", "NotReady"},
		"Metal3Machine": {"AssociateBMHFailed", "AssociateBareMetalHostFailed", "NotReady"},
	} {
		for _, reason := range reasons {
			for _, message := range []string{"", "something went wrong", "0 of 2 completed"} {
				assert.Equal(t, Transient, Of(kind, reason, message).Class, "%s/%s: %s", kind, reason, message)
			}
		}
	}
}

func TestReasonsThatPassAreTransientForEveryProvider(t *testing.T) {
	for _, reason := range []string{
		"Failed", "InstanceProvisionFailed", "InstanceProvisionStarted", "VMProvisionFailed", "VMCreateFailed", "CloneFailed",
		"PoweringOnFailed", "AllocationFailed", "IPAllocationFailed", "ProvisionFailed", "AssociateBMHFailed", "InstanceCreateFailed",
		"OpenStackError", "Reconciling", "NotReady", "WaitingForBootstrapData",
	} {
		assert.Equal(t, Transient, Of("ByoMachine", reason, "it did not work").Class, reason)
	}
}

func TestEveryRuleIsTriedOut(t *testing.T) {
	used := map[int]bool{}
	for _, r := range read(t) {
		for i, rule := range rules {
			if rule.fits(r.Kind, r.Reason, r.Message) {
				used[i] = true
				break
			}
		}
	}
	for i, rule := range rules {
		assert.True(t, used[i], "no recorded report fits the rule %d first: %s, %v, %v", i, rule.kind, rule.reason, rule.message)
	}
}

func TestRulesThatCannotBeReadAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"- {means: Capacity}":                               "[0]: neither reason nor message",
		"- {reason: 'a(', means: Capacity}":                 "[0].reason",
		"- {message: 'a(', means: Capacity}":                "[0].message",
		"- {reason: a, means: Broken}":                      `[0].means: "Broken"`,
		"- {reason: a}":                                     "[0].means",
		"- {reason: a, means: TimedOut}":                    `[0].means: "TimedOut"`,
		"- {reason: a, means: Quota, after: soon}":          "[0].after",
		"- {reason: a, means: Transient, gone: true}":       "[0].gone",
		"- {reason: a, means: Quota, otherwise: Transient}": "otherwise",
	} {
		_, err := parse([]byte(text))
		require.Error(t, err, text)
		assert.Contains(t, err.Error(), want)
	}
}

func TestEveryClassOfAReportButTransientSaysSomething(t *testing.T) {
	for _, c := range []Class{Transient, TimedOut, Reported} {
		assert.Empty(t, c.Says(), "no report has it, or it is no failure")
	}
	for _, c := range []Class{Capacity, Quota, Configuration, GivenUp} {
		assert.NotEmpty(t, strings.TrimSpace(c.Says()))
	}
}
