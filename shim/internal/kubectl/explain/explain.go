// Package explain explains the state of a pod, NodeClaim, Node or Machine. It turns what the
// workload cluster and the management cluster report into one chain, from the pod to the
// infrastructure, with a verdict and what to do next.
//
// Everything in it is pure: the same [Situation] always gives the same [Explanation].
package explain

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
)

// Kind is the kind of object that an explanation starts from.
type Kind string

// The kinds.
const (
	Pod       Kind = "pod"
	NodeClaim Kind = "nodeclaim"
	Node      Kind = "node"
	Machine   Kind = "machine"
)

// Kinds returns every kind, in the order of the chain.
func Kinds() []Kind { return []Kind{Pod, NodeClaim, Node, Machine} }

// Situation is what was read from both clusters. Nil and empty fields mean that there is no such
// object, except where an error states that it could not be read.
type Situation struct {
	// Now is the time of reading.
	Now time.Time
	// Entry and Name are what the explanation is about. Name includes a pod's namespace.
	Entry Kind
	Name  string

	Pod       *corev1.Pod
	PodEvents []corev1.Event

	NodePools   []karpv1.NodePool
	NodeClasses []v1alpha1.ClusterAPINodeClass

	NodeClaim       *karpv1.NodeClaim
	NodeClaimEvents []corev1.Event
	// Gone is the name of a NodeClaim that the pod, the Node or the claim names and that does not
	// exist.
	Gone string
	// OnTheWay are the names of the NodeClaims without a usable Node. Only set for a pod that has
	// no published plan.
	OnTheWay []string
	// Planned are the pods that Karpenter planned for the NodeClaim, as namespace/name.
	Planned []string

	Node *corev1.Node
	// Running is the number of pods on the Node. Negative if unknown.
	Running int

	// Shim is Karpenter's own Deployment, or nil if it was not looked for or not found.
	Shim *Workload

	Agent Agent
	Hub   Hub
}

// Workload is how many pods of a Deployment are ready.
type Workload struct {
	Name          string // namespace/name
	Ready, Wanted int32
}

// Agent is what the agent reported.
type Agent struct {
	// Err is why the agent could not be asked. Everything else is then unknown.
	Err error
	// Remedy is what to do about Err.
	Remedy []string

	Groups []*agentv1alpha1.NodeGroup
	// Claim is the NodeClaim's or the Machine's. Nil if there is none.
	Claim *agentv1alpha1.Claim
	// Machine is the claim's, or the one that the Node or the user names.
	Machine *agentv1alpha1.Machine
}

// Hub is what the management cluster's API server reported.
type Hub struct {
	// Asked is whether a kubeconfig for it was given.
	Asked bool
	// Err is why it could not be read.
	Err error
	// Claim and Machine replace the agent's if that could not be asked.
	Claim   *agentv1alpha1.Claim
	Machine *agentv1alpha1.Machine
	// Notes are unmet conditions and warnings of its objects.
	Notes []Note
}

// Note is what an object of the management cluster says.
type Note struct {
	Object  string `json:"object"` // for example Machine team-a/workers-x7
	Message string `json:"message"`
}

// State is how far a step of the chain is.
type State string

// The states.
const (
	// OK means that nothing is to be done or awaited here.
	OK State = "ok"
	// Waiting means that it goes on by itself.
	Waiting State = "waiting"
	// Blocked means that it does not go on until something changes.
	Blocked State = "blocked"
	// Ending means that the object is being removed.
	Ending State = "ending"
	// Unknown means that it could not be read.
	Unknown State = "unknown"
	// Absent means that there is no such object, or not yet.
	Absent State = "absent"
)

// Step is one object of the chain.
type Step struct {
	Object  string   `json:"object"`
	Name    string   `json:"name,omitempty"`
	State   State    `json:"state"`
	Message string   `json:"message"`
	Details []string `json:"details,omitempty"`
}

// Explanation is the answer.
type Explanation struct {
	Subject string `json:"subject"`
	State   State  `json:"state"`
	// Verdict is the cause, in a sentence.
	Verdict string `json:"verdict"`
	// Next is what to do. Empty if nothing is.
	Next  []string `json:"next,omitempty"`
	Steps []Step   `json:"steps"`
}

// Explain explains a situation.
func Explain(s *Situation) Explanation {
	t := &story{s: s, e: Explanation{Subject: subject(s), State: Unknown, Steps: []Step{}}}
	t.pod()
	t.karpenter()
	t.nodeClaim()
	t.connection()
	t.claim()
	t.nodeGroup()
	t.machine()
	t.node()
	t.hub()
	if t.e.Verdict == "" {
		t.e.Verdict = "Nothing is wrong with it."
		if t.e.State == Unknown {
			t.e.State = OK
		}
	}
	return t.e
}

func subject(s *Situation) string {
	return map[Kind]string{Pod: "Pod", NodeClaim: "NodeClaim", Node: "Node", Machine: "Machine"}[s.Entry] + " " + s.Name
}

// story builds an explanation along the chain. The last conclusion counts: what is further along
// the chain is the cause of what comes before.
type story struct {
	s       *Situation
	e       Explanation
	settled bool
}

func (t *story) add(step Step) { t.e.Steps = append(t.e.Steps, step) }

// conclude sets the verdict, unless an earlier step has settled it.
func (t *story) conclude(state State, verdict string, next ...string) {
	if t.settled {
		return
	}
	t.e.State, t.e.Verdict, t.e.Next = state, verdict, next
}

// settle sets the verdict for good.
func (t *story) settle(state State, verdict string, next ...string) {
	t.conclude(state, verdict, next...)
	t.settled = true
}

// claimed returns the claim and its machine, from the agent or, if that could not be asked, from
// the management cluster.
func (t *story) claimed() (*agentv1alpha1.Claim, *agentv1alpha1.Machine) {
	claim, machine := t.s.Agent.Claim, t.s.Agent.Machine
	if t.s.Agent.Err != nil {
		claim, machine = t.s.Hub.Claim, t.s.Hub.Machine
	}
	if machine == nil {
		machine = claim.GetMachine()
	}
	return claim, machine
}

// hidden reports whether claims and machines could not be read at all.
func (t *story) hidden() bool {
	return t.s.Agent.Err != nil && (!t.s.Hub.Asked || t.s.Hub.Err != nil)
}

func (t *story) group(id string) *agentv1alpha1.NodeGroup {
	i := slices.IndexFunc(t.s.Agent.Groups, func(g *agentv1alpha1.NodeGroup) bool { return g.GetId() == id })
	if id == "" || i < 0 {
		return nil
	}
	return t.s.Agent.Groups[i]
}

// ago formats the time since a moment, or "" if that is unknown.
func (t *story) ago(moment time.Time) string {
	if moment.IsZero() || moment.Unix() == 0 {
		return ""
	}
	return Age(t.s.Now.Sub(moment)) + " ago"
}

// Age formats a duration for people, with at most two units.
func Age(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 10*time.Minute:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	default:
		return fmt.Sprintf("%dd", int(d.Hours())/24)
	}
}

// joined joins the parts that are not empty.
func joined(separator string, parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), separator)
}

// some lists names, at most three of them.
func some(names []string) string {
	if len(names) <= 3 {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), len(names)-3)
}

// sentence ends a text with a full stop.
func sentence(text string) string {
	text = strings.TrimSpace(text)
	if text == "" || strings.HasSuffix(text, ".") {
		return text
	}
	return text + "."
}

// newest returns the newest event that the filter accepts, or nil.
func newest(events []corev1.Event, accepts func(*corev1.Event) bool) *corev1.Event {
	var found *corev1.Event
	for i := range events {
		if accepts(&events[i]) && (found == nil || !When(&events[i]).Before(When(found))) {
			found = &events[i]
		}
	}
	return found
}

// When returns when an event was last observed.
func When(event *corev1.Event) time.Time {
	for _, at := range []time.Time{event.LastTimestamp.Time, event.EventTime.Time, event.FirstTimestamp.Time} {
		if !at.IsZero() {
			return at
		}
	}
	return event.CreationTimestamp.Time
}

func withReason(reasons ...string) func(*corev1.Event) bool {
	return func(event *corev1.Event) bool { return slices.Contains(reasons, event.Reason) }
}
