package kubectl

import (
	"bytes"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/awslabs/operatorpkg/status"
	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// clock is a time that the test sets.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func filled(names ...string) (*board, *clock) {
	c := &clock{at: time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)}
	b := newBoard(c.now)
	b.seeGroup(&agentv1alpha1.NodeGroup{
		Id: "team-a/workers", Replicas: 3, Availability: &agentv1alpha1.Availability{
			Reason: agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, Message: strings.Repeat("the quota is exceeded ", 20),
		},
	})
	for _, name := range names {
		n := &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(c.at)}}
		b.seeNodeClaim(n)
		c.at = c.at.Add(time.Second)
		b.seeClaim(&agentv1alpha1.Claim{
			ClaimId: string(n.UID), DisplayName: name, NodeGroupId: "team-a/workers", Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND,
			Machine: &agentv1alpha1.Machine{Name: "machine-of-" + name, InfrastructureReason: "Waiting", InfrastructureMessage: "for\x1b[2Ja host"},
		})
	}
	return b, c
}

// A line that the terminal wrapped would push the others down, and the next frame would overwrite
// the wrong ones.
func TestAFrameFitsTheTerminal(t *testing.T) {
	b, _ := filled("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")
	for _, size := range []struct{ width, height int }{{80, 24}, {40, 12}, {10, 8}, {200, 50}} {
		frame := b.frame(size.width, size.height)
		assert.LessOrEqual(t, len(frame), size.height)
		for _, line := range frame {
			assert.LessOrEqual(t, utf8.RuneCountInString(line), size.width, line)
			assert.NotContains(t, line, "\x1b", "messages of others do not control the terminal")
		}
	}
	small := strings.Join(b.frame(120, 14), "\n")
	assert.Contains(t, small, "more, older")
	assert.Contains(t, small, "machine-of-j", "the newest are shown")
	assert.NotContains(t, small, "machine-of-a")
}

func TestABoardFollowsANodeClaim(t *testing.T) {
	b, c := filled("a")
	const uid = "uid-a"
	row := func() string {
		for _, line := range b.frame(0, 0) {
			if strings.HasPrefix(line, "a ") {
				return line
			}
		}
		return ""
	}
	assert.Regexp(t, `^a +Bound +machine-of-a +- +- +1\.0s +- +- +- +Waiting: for`, row())
	c.at = c.at.Add(2 * time.Second)
	changes := b.seeClaim(&agentv1alpha1.Claim{
		ClaimId: uid, Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, NodeGroupId: "team-a/workers",
		Machine: &agentv1alpha1.Machine{Name: "machine-of-a", ProviderId: "sim://a", NodeName: "node-a"},
	})
	assert.Equal(t, []change{{"Machine", "machine-of-a", "has its provider ID sim://a"}}, changes)
	assert.Regexp(t, `node-a +- +1\.0s +3\.0s +- +- +on its way`, row())
	assert.Equal(t, []change{{"NodeClaim", "a", "gone"}},
		b.nodeClaimGone(&karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: uid}}))
	assert.Contains(t, row(), "gone")
	c.at = c.at.Add(goneFor + time.Second)
	assert.Empty(t, row())
}

func TestPodsAreToldTogether(t *testing.T) {
	b, _ := filled()
	pod := func(name, node string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase}}
	}
	for _, p := range []*corev1.Pod{
		pod("a", "", corev1.PodPending), pod("b", "n", corev1.PodPending), pod("c", "n", corev1.PodRunning), pod("d", "n", corev1.PodSucceeded),
	} {
		assert.Empty(t, b.seePod(p))
	}
	assert.Equal(t, []change{{"Pods", "", "1 waiting, 1 starting, 1 running"}}, b.podCounts())
	assert.Empty(t, b.podCounts())
	assert.Equal(t, []change{{"Agent", "", "not connected: connection refused"}}, b.seeAgent("connection refused"))
	assert.Empty(t, b.seeAgent("connection refused"))
	assert.Contains(t, strings.Join(b.frame(0, 0), "\n"), "agent: not connected: connection refused")
	assert.Equal(t, []change{{"Agent", "", "connected"}}, b.seeAgent(""))
}

func TestAnExplanationIsWrappedBelowItsColumn(t *testing.T) {
	var out bytes.Buffer
	writeExplanation(&out, &explain.Explanation{
		Subject: "Pod shop/web", State: explain.Waiting, Verdict: "Machine workers-1 waits for its infrastructure: no host is free.",
		Next: []string{"kubectl describe machine workers-1"},
		Steps: []explain.Step{
			{
				Object: "Pod", Name: "shop/web", State: explain.Waiting, Message: "has had no Node for 3m",
				Details: []string{"scheduler: 0/3 nodes are available"},
			},
			{Object: "NodeClaim", Name: "default-x", State: explain.OK, Message: "was launched"},
		},
	}, 50)
	assert.Equal(t, `Pod shop/web: waiting

  Machine workers-1 waits for its infrastructure:
  no host is free.

… Pod        shop/web   has had no Node for 3m
                        scheduler: 0/3 nodes are
                        available
✓ NodeClaim  default-x  was launched

Next:
  - kubectl describe machine workers-1
`, out.String())
}

// The command is usually started long after most NodeClaims.
func TestDurationsAreThoseOfTheNodeClaim(t *testing.T) {
	c := &clock{at: time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)}
	b := newBoard(c.now)
	created := c.at
	n := &karpv1.NodeClaim{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "uid-a", CreationTimestamp: metav1.NewTime(created)}}
	for _, step := range []struct {
		condition string
		after     time.Duration
	}{{karpv1.ConditionTypeLaunched, time.Second}, {karpv1.ConditionTypeRegistered, 58 * time.Second}, {karpv1.ConditionTypeInitialized, time.Minute}} {
		n.Status.Conditions = append(n.Status.Conditions, status.Condition{
			Type: step.condition, Status: metav1.ConditionTrue, LastTransitionTime: metav1.NewTime(created.Add(step.after)),
		})
	}
	c.at = c.at.Add(24 * time.Hour)
	b.seeNodeClaim(n)
	b.seeClaim(&agentv1alpha1.Claim{
		ClaimId: "uid-a", DisplayName: "a", Phase: agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND, NodeGroupId: "team-a/workers",
		History: []*agentv1alpha1.ClaimEvent{{Reason: claimreasons.Bound, Time: timestamppb.New(created.Add(3 * time.Second))}},
		Machine: &agentv1alpha1.Machine{Name: "machine-of-a", ProviderId: "sim://a", NodeName: "node-a"},
	})
	frame := strings.Join(b.frame(0, 0), "\n")
	assert.Regexp(t, `a +Bound +machine-of-a +node-a +1\.0s +3\.0s +- +58\.0s +60\.0s +in use`, frame)
}

func TestClaimsWithoutANodeClaimGo(t *testing.T) {
	b, _ := filled()
	claim := func(id string, phase agentv1alpha1.ClaimPhase) *agentv1alpha1.Claim {
		return &agentv1alpha1.Claim{ClaimId: id, DisplayName: id, Phase: phase, NodeGroupId: "team-a/workers"}
	}
	for _, id := range []string{"ended", "removed"} {
		b.seeClaim(claim(id, agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND))
	}
	assert.Len(t, b.timelines, 2)
	b.seeClaim(claim("ended", agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED))
	b.forget()
	b.claimGone("removed")
	assert.Empty(t, b.timelines)
}
