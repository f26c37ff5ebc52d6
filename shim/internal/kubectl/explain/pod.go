package explain

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/karpenter/pkg/events"
	podutils "sigs.k8s.io/karpenter/pkg/utils/pod"
)

// Plan is where Karpenter planned a pod. One or both of the names may be set.
type Plan struct {
	NodeClaim, Node string
	At              time.Time
}

var planned = regexp.MustCompile(`\b(nodeclaim|node)/([^\s,]+)`)

// PlanOf returns the newest plan that Karpenter has published for a pod, and false if there is
// none. Karpenter publishes five a second, so not every planned pod has one.
func PlanOf(podEvents []corev1.Event) (Plan, bool) {
	event := newest(podEvents, withReason(events.Nominated))
	if event == nil {
		return Plan{}, false
	}
	plan := Plan{At: When(event)}
	for _, match := range planned.FindAllStringSubmatch(event.Message, -1) {
		if match[1] == "node" {
			plan.Node = match[2]
		} else {
			plan.NodeClaim = match[2]
		}
	}
	return plan, plan.Node != "" || plan.NodeClaim != ""
}

// NeedsNode reports whether Karpenter should make room for a pod.
func NeedsNode(pod *corev1.Pod) bool {
	return pod != nil && pod.Spec.NodeName == "" && pod.DeletionTimestamp.IsZero() && !podutils.IsTerminal(pod)
}

func (t *story) pod() {
	pod := t.s.Pod
	if pod == nil {
		t.pods()
		return
	}
	name := pod.Namespace + "/" + pod.Name
	step := Step{Object: "Pod", Name: name}
	switch {
	case podutils.IsTerminal(pod):
		step.State, step.Message = OK, "has ended: "+string(pod.Status.Phase)
		t.settle(OK, fmt.Sprintf("The pod has ended (%s): it needs no node.", pod.Status.Phase))
	case !pod.DeletionTimestamp.IsZero():
		step.State, step.Message = Ending, "has been terminating for "+Age(t.s.Now.Sub(pod.DeletionTimestamp.Time))
		t.conclude(Ending, "The pod is being deleted.", fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name))
	case pod.Spec.NodeName != "" && pod.Status.Phase == corev1.PodRunning:
		step.State, step.Message = OK, "runs on Node "+pod.Spec.NodeName
		t.conclude(OK, "The pod runs on Node "+pod.Spec.NodeName+".")
	case pod.Spec.NodeName != "":
		step.State, step.Message, step.Details = Waiting, "starts on Node "+pod.Spec.NodeName, starting(pod)
		t.conclude(Waiting, "The pod has its Node "+pod.Spec.NodeName+", and its containers are being started.",
			fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name))
	default:
		analyse := t.pending(pod, &step)
		t.add(step)
		if analyse {
			t.fits(pod)
		}
		return
	}
	t.add(step)
}

// pods describes the pods of another entry point.
func (t *story) pods() {
	switch {
	case t.s.Node != nil && t.s.Running >= 0:
		t.add(Step{Object: "Pods", State: OK, Message: fmt.Sprintf("%d on the Node", t.s.Running)})
	case len(t.s.Planned) > 0:
		t.add(Step{Object: "Pods", State: Waiting, Message: fmt.Sprintf("%d are planned for it: %s", len(t.s.Planned), some(t.s.Planned))})
	}
}

func starting(pod *corev1.Pod) []string {
	var details []string
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if c.State.Waiting != nil {
			details = append(details, fmt.Sprintf("container %s: %s", c.Name, joined(": ", c.State.Waiting.Reason, c.State.Waiting.Message)))
		}
	}
	return details
}

// failed is how Karpenter's events begin that say why it cannot plan a pod. The scheduler's own
// have the same reason.
const failed = "Failed to schedule pod, "

// pending describes a pod without a Node. It reports whether nothing is on its way for the pod, so
// that node groups must be looked at.
func (t *story) pending(pod *corev1.Pod, step *Step) (analyse bool) {
	step.State = Waiting
	step.Message = "has had no Node for " + Age(t.s.Now.Sub(pod.CreationTimestamp.Time))
	if condition := podCondition(pod); condition != nil && condition.Message != "" {
		step.Details = append(step.Details, "scheduler: "+condition.Message)
	}
	said := newest(t.s.PodEvents, func(e *corev1.Event) bool {
		return e.Reason == events.FailedScheduling && strings.HasPrefix(e.Message, failed)
	})
	plan, hasPlan := PlanOf(t.s.PodEvents)
	if said != nil && (!hasPlan || When(said).After(plan.At)) {
		step.Details = append(step.Details, fmt.Sprintf("Karpenter, %s: %s", t.ago(When(said)), strings.TrimPrefix(said.Message, failed)))
	}
	describe := fmt.Sprintf("kubectl -n %s describe pod %s", pod.Namespace, pod.Name)
	switch {
	case len(pod.Spec.SchedulingGates) > 0:
		step.State = Blocked
		gate := pod.Spec.SchedulingGates[0].Name
		t.settle(Blocked, fmt.Sprintf("The pod has the scheduling gate %s: nothing is planned for it until that is removed.", gate),
			"Find out what removes the gate: "+describe)
	case owned(pod, "DaemonSet"):
		step.State = Blocked
		t.settle(Blocked, "The pod belongs to a DaemonSet: Karpenter launches no nodes for such pods.",
			"See why it does not fit the Node that it is for: "+describe)
	case pod.Status.NominatedNodeName != "":
		t.settle(Waiting, fmt.Sprintf("The pod preempts others on Node %s and is scheduled there once they are gone.",
			pod.Status.NominatedNodeName), describe)
	case !podutils.FailedToSchedule(pod):
		t.settle(Waiting, fmt.Sprintf("The scheduler %s has not tried the pod yet: Karpenter makes room only for pods that it has found unschedulable.",
			pod.Spec.SchedulerName), describe)
	case hasPlan:
		return t.planned(step, plan)
	case len(t.s.OnTheWay) > 0:
		step.Details = append(step.Details, fmt.Sprintf("%d NodeClaims are on their way: %s", len(t.s.OnTheWay), some(t.s.OnTheWay)))
		t.conclude(Waiting, fmt.Sprintf("Karpenter has not published where it plans the pod. %d NodeClaims are on their way.", len(t.s.OnTheWay)),
			"kubectl capi why nodeclaim "+t.s.OnTheWay[0])
		return true
	default:
		return true
	}
	return false
}

// planned describes a pod with a published plan. It reports whether nothing came of the plan.
func (t *story) planned(step *Step, plan Plan) (inVain bool) {
	switch {
	case t.s.NodeClaim != nil:
		step.Details = append(step.Details, fmt.Sprintf("planned for NodeClaim %s %s", t.s.NodeClaim.Name, t.ago(plan.At)))
		t.conclude(Waiting, fmt.Sprintf("The pod waits for the Node of NodeClaim %s.", t.s.NodeClaim.Name))
	case t.s.Gone != "":
		step.Details = append(step.Details, fmt.Sprintf("was planned for NodeClaim %s %s, which is gone", t.s.Gone, t.ago(plan.At)))
		return true
	case plan.Node != "":
		step.Details = append(step.Details, fmt.Sprintf("planned for Node %s %s", plan.Node, t.ago(plan.At)))
		t.conclude(Waiting, fmt.Sprintf("Karpenter expects the scheduler to place the pod on Node %s, which exists.", plan.Node))
	default:
		return true
	}
	return false
}

func podCondition(pod *corev1.Pod) *corev1.PodCondition {
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled })
	if i < 0 || pod.Status.Conditions[i].Status == corev1.ConditionTrue {
		return nil
	}
	return &pod.Status.Conditions[i]
}

func owned(object metav1.Object, kind string) bool {
	return slices.ContainsFunc(object.GetOwnerReferences(), func(o metav1.OwnerReference) bool { return o.Kind == kind })
}
