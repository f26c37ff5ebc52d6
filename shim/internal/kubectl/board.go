package kubectl

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	"github.com/karpenter-capi/karpenter-capi/pkg/claimreasons"
	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// stage is a stage of a NodeClaim's way to a usable Node.
type stage int

// The stages, in order.
const (
	stageCreated stage = iota
	stageLaunched
	stageBound
	stageProvisioned
	stageJoined
	stageReady
	stageDeleting
	stageGone

	stages
)

// wordGone marks an object that no longer exists.
const wordGone = "gone"

func (s stage) String() string {
	return [stages]string{"created", "launched", "bound", "provisioned", "joined", "ready", "being deleted", wordGone}[s]
}

// timeline is what is known of one NodeClaim.
type timeline struct {
	name, group, machine, node string
	claim                      string // the claim's phase
	infrastructure             string // what the infrastructure says, while there is no provider ID
	why                        string // why Karpenter removes it
	at                         [stages]time.Time
}

// change is one line about something that changed.
type change struct {
	kind, name, what string
}

// board is what `top` shows. Its methods return what changed. It is not safe for concurrent use.
type board struct {
	now       func() time.Time
	pods      map[types.NamespacedName]string
	timelines map[types.UID]*timeline
	groups    map[string]*agentv1alpha1.NodeGroup
	nodes     map[string]bool // whether ready, by name
	told      string          // the last line about pods
	agent     string          // why the agent is not connected, or ""
	spoke     string          // why the spoke is not watched, or ""
}

// goneFor is how long a NodeClaim is shown once it is gone.
const goneFor = 5 * time.Second

func newBoard(now func() time.Time) *board {
	return &board{
		now: now, pods: map[types.NamespacedName]string{}, timelines: map[types.UID]*timeline{},
		groups: map[string]*agentv1alpha1.NodeGroup{}, nodes: map[string]bool{},
	}
}

func (b *board) timeline(uid types.UID) *timeline {
	j := b.timelines[uid]
	if j == nil {
		j = &timeline{}
		b.timelines[uid] = j
	}
	return j
}

// reach records that a stage was reached, at a time that an object states or else now. It reports
// whether that is new.
func (b *board) reach(j *timeline, s stage, stated time.Time) bool {
	if !j.at[s].IsZero() {
		return false
	}
	if stated.IsZero() || !stated.Equal(reached) && b.now().Sub(stated) < 2*time.Second { // objects state whole seconds
		stated = b.now()
	}
	j.at[s] = stated
	return true
}

// reached is the time of a stage that was reached before anybody looked, if no object states when.
var reached = time.Unix(0, 0)

func (j *timeline) took(s stage) string {
	if j.at[s].IsZero() || j.at[s].Equal(reached) || j.at[stageCreated].IsZero() {
		return ""
	}
	return fmt.Sprintf("%.1fs", max(j.at[s].Sub(j.at[stageCreated]).Seconds(), 0))
}

func (b *board) seeNodeClaim(n *karpv1.NodeClaim) []change {
	j := b.timeline(n.UID)
	j.name = n.Name
	j.node = cmp.Or(n.Status.NodeName, j.node)
	var changes []change
	tell := func(s stage, stated time.Time) {
		if b.reach(j, s, stated) {
			changes = append(changes, change{"NodeClaim", n.Name, s.String() + lo.Ternary(s == stageCreated, "", prefix(" after ", j.took(s)))})
		}
	}
	tell(stageCreated, n.CreationTimestamp.Time)
	conditions := n.StatusConditions()
	for _, step := range []struct {
		condition string
		stage     stage
	}{{karpv1.ConditionTypeLaunched, stageLaunched}, {karpv1.ConditionTypeRegistered, stageJoined}, {karpv1.ConditionTypeInitialized, stageReady}} {
		if condition := conditions.Get(step.condition); condition.IsTrue() {
			tell(step.stage, condition.LastTransitionTime.Time)
		}
	}
	if why := conditions.Get(karpv1.ConditionTypeDisruptionReason); why.IsTrue() && j.why != why.Reason {
		j.why = why.Reason
		changes = append(changes, change{"NodeClaim", n.Name, "is removed by Karpenter: " + why.Reason})
	}
	if !n.DeletionTimestamp.IsZero() {
		tell(stageDeleting, n.DeletionTimestamp.Time)
	}
	return changes
}

func prefix(with, text string) string { return lo.Ternary(text == "", "", with+text) }

func (b *board) nodeClaimGone(n *karpv1.NodeClaim) []change {
	j := b.timeline(n.UID)
	j.name = n.Name
	if !b.reach(j, stageGone, time.Time{}) {
		return nil
	}
	return []change{{"NodeClaim", n.Name, wordGone}}
}

func (b *board) seeClaim(c *agentv1alpha1.Claim) []change {
	uid := types.UID(c.GetClaimId())
	phase := explain.ClaimPhase(c.GetPhase())
	j, known := b.timelines[uid]
	if !known && c.GetPhase() == agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return nil // of a NodeClaim that was gone before
	}
	if !known {
		j = b.timeline(uid)
	}
	j.name = cmp.Or(j.name, c.GetDisplayName(), c.GetClaimId())
	var changes []change
	var bound, provisioned time.Time
	for _, event := range c.GetHistory() {
		if event.GetReason() == claimreasons.Bound {
			bound = event.GetTime().AsTime()
		}
	}
	if j.claim == "" && !bound.IsZero() {
		provisioned = reached
	}
	if before := j.claim; before != phase {
		why := lo.Ternary(c.GetReason() == phase, "", c.GetReason())
		changes = append(changes, change{"Claim", j.name, phase + " on " + c.GetNodeGroupId() + prefix(": ", why)})
	}
	m := c.GetMachine()
	j.claim, j.group, j.machine = phase, c.GetNodeGroupId(), cmp.Or(m.GetName(), j.machine)
	if m == nil {
		return changes
	}
	b.reach(j, stageBound, bound)
	if m.GetProviderId() != "" {
		if j.infrastructure = ""; b.reach(j, stageProvisioned, provisioned) {
			changes = append(changes, change{kindMachine, m.GetName(), "has its provider ID " + m.GetProviderId()})
		}
	} else if says := joined(m.GetInfrastructureReason(), m.GetInfrastructureMessage()); says != j.infrastructure {
		j.infrastructure = says
		if says != "" {
			changes = append(changes, change{kindMachine, m.GetName(), "infrastructure: " + says})
		}
	}
	if m.GetNodeName() != "" {
		j.node = m.GetNodeName()
	}
	return changes
}

// claimGone drops a claim whose NodeClaim was never seen.
func (b *board) claimGone(id string) []change {
	if j := b.timelines[types.UID(id)]; j != nil && j.at[stageCreated].IsZero() {
		delete(b.timelines, types.UID(id))
	}
	return nil
}

func (b *board) seeGroup(g *agentv1alpha1.NodeGroup) []change {
	before := b.groups[g.GetId()]
	b.groups[g.GetId()] = g
	var changes []change
	if before != nil && before.GetReplicas() != g.GetReplicas() {
		changes = append(changes, change{"NodeGroup", g.GetId(), fmt.Sprintf("%d -> %d machines", before.GetReplicas(), g.GetReplicas())})
	}
	was, is := wire.AvailabilityFor(before, v1alpha1.Holder), wire.AvailabilityFor(g, v1alpha1.Holder)
	switch {
	case before != nil && was.GetAvailable() && !is.GetAvailable(), before == nil && !is.GetAvailable():
		changes = append(changes, change{"NodeGroup", g.GetId(), "refuses claims: " + joined(explain.Word(is.GetReason()), is.GetMessage())})
	case before != nil && !was.GetAvailable() && is.GetAvailable():
		changes = append(changes, change{"NodeGroup", g.GetId(), "accepts claims again"})
	}
	return changes
}

func (b *board) groupGone(id string) []change {
	delete(b.groups, id)
	return []change{{"NodeGroup", id, wordGone}}
}

func (b *board) seeNode(n *corev1.Node) []change {
	ready := lo.ContainsBy(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	before, known := b.nodes[n.Name]
	b.nodes[n.Name] = ready
	var changes []change
	if !known {
		changes = append(changes, change{"Node", n.Name, "joined"})
	}
	if known && before != ready || !known && ready {
		changes = append(changes, change{"Node", n.Name, lo.Ternary(ready, "ready", "not ready")})
	}
	return changes
}

func (b *board) nodeGone(n *corev1.Node) []change {
	delete(b.nodes, n.Name)
	return []change{{"Node", n.Name, wordGone}}
}

func (b *board) seePod(p *corev1.Pod) []change {
	name := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
	switch {
	case !p.DeletionTimestamp.IsZero(), p.Status.Phase == corev1.PodSucceeded, p.Status.Phase == corev1.PodFailed:
		delete(b.pods, name)
	case p.Status.Phase == corev1.PodRunning:
		b.pods[name] = "running"
	case p.Spec.NodeName != "":
		b.pods[name] = "starting"
	default:
		b.pods[name] = "waiting"
	}
	return nil // told together, by [board.podCounts]
}

func (b *board) podGone(p *corev1.Pod) []change {
	delete(b.pods, types.NamespacedName{Namespace: p.Namespace, Name: p.Name})
	return nil
}

// podLine counts the pods.
func (b *board) podLine() string {
	counts := lo.CountValues(lo.Values(b.pods))
	return fmt.Sprintf("%d waiting, %d starting, %d running", counts["waiting"], counts["starting"], counts["running"])
}

// podCounts returns the counts of pods if they have changed since the last call.
func (b *board) podCounts() []change {
	line := b.podLine()
	if line == b.told {
		return nil
	}
	b.told = line
	return []change{{"Pods", "", line}}
}

// seeAgent records the state of the connection to the agent: why it is lost, or "".
func (b *board) seeAgent(why string) []change {
	if why == b.agent {
		return nil
	}
	b.agent = why
	return []change{{"Agent", "", lo.Ternary(why == "", "connected", "not connected: "+why)}}
}

// seeSpoke records why the spoke cannot be watched, or nil.
func (b *board) seeSpoke(err error) []change {
	why := ""
	if err != nil {
		why = err.Error()
	}
	if why == b.spoke {
		return nil
	}
	b.spoke = why
	return []change{{"Spoke", "", lo.Ternary(why == "", "watched", "not watched: "+why)}}
}

// frame draws the board in lines of at most width characters, and in at most height lines.
func (b *board) frame(width, height int) []string {
	nodes := lo.CountBy(lo.Values(b.nodes), func(ready bool) bool { return ready })
	lines := []string{fmt.Sprintf("%s   pods: %s   nodes: %d ready of %d", b.now().Format(time.TimeOnly), b.podLine(), nodes, len(b.nodes))}
	if b.agent != "" {
		lines = append(lines, "agent: not connected: "+b.agent)
	}
	if b.spoke != "" {
		lines = append(lines, "spoke: not watched, what follows may be old: "+b.spoke)
	}
	lines = append(lines, "")
	lines = append(lines, grid(b.groupRows())...)
	lines = append(lines, "")
	rows := b.timelineRows()
	if most := max(height-len(lines)-2, 3); height > 0 && len(rows)-1 > most {
		hidden := len(rows) - 1 - most
		lines = append(lines, fmt.Sprintf("%d more, older", hidden))
		rows = append(rows[:1], rows[1+hidden:]...)
	}
	lines = append(lines, grid(rows)...)
	if height > 0 && len(lines) > height {
		lines = lines[:height]
	}
	return lo.Map(lines, func(line string, _ int) string { return cut(oneLine(line), width) })
}

func (b *board) groupRows() [][]string {
	rows := [][]string{{"GROUP", "MACHINES", "MAX", "CLAIMS", "PRICE/H", "TAKES CLAIMS"}}
	claims := map[string]int{}
	for _, j := range b.timelines {
		if j.claim != "" && j.claim != "Ended" {
			claims[j.group]++
		}
	}
	for _, id := range slices.Sorted(maps.Keys(b.groups)) {
		g := b.groups[id]
		takes := "yes"
		if availability := wire.AvailabilityFor(g, v1alpha1.Holder); !availability.GetAvailable() {
			takes = joined(explain.Word(availability.GetReason()), availability.GetMessage())
		}
		rows = append(rows, []string{id, strconv.Itoa(int(g.GetReplicas())), most(g), strconv.Itoa(claims[id]), price(g), takes})
	}
	return rows
}

func (b *board) timelineRows() [][]string {
	rows := [][]string{{"NODECLAIM", "CLAIM", "MACHINE", "NODE", "LAUNCHED", "BOUND", "PROVISIONED", "JOINED", "READY", "NOW"}}
	timelines := lo.Values(b.timelines)
	slices.SortFunc(timelines, func(x, y *timeline) int {
		return cmp.Or(x.at[stageCreated].Compare(y.at[stageCreated]), cmp.Compare(x.name, y.name))
	})
	for _, j := range timelines {
		if gone := j.at[stageGone]; !gone.IsZero() && b.now().Sub(gone) > goneFor {
			continue
		}
		rows = append(rows, []string{
			j.name, j.claim, j.machine, j.node, j.took(stageLaunched), j.took(stageBound), j.took(stageProvisioned), j.took(stageJoined),
			j.took(stageReady), j.outcome(),
		})
	}
	return rows
}

// outcome says in a few words where a NodeClaim is.
func (j *timeline) outcome() string {
	switch {
	case !j.at[stageGone].IsZero():
		return wordGone
	case !j.at[stageDeleting].IsZero():
		return "going" + prefix(": ", strings.ToLower(j.why))
	case !j.at[stageReady].IsZero():
		return "in use"
	case j.infrastructure != "":
		return j.infrastructure
	default:
		return "on its way"
	}
}

// forget drops NodeClaims that have been gone for long.
func (b *board) forget() {
	maps.DeleteFunc(b.timelines, func(_ types.UID, j *timeline) bool {
		ended := j.claim == explain.ClaimPhase(agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED)
		if j.at[stageCreated].IsZero() && ended {
			return true // its NodeClaim was never seen
		}
		gone := j.at[stageGone]
		return !gone.IsZero() && b.now().Sub(gone) > goneFor && (j.claim == "" || ended)
	})
}

// grid aligns rows in columns.
func grid(rows [][]string) []string {
	var text strings.Builder
	_ = table(&text, rows) // a builder never fails
	return strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
}
