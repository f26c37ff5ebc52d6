package explain

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/scheduling"
	"sigs.k8s.io/karpenter/pkg/utils/resources"

	"github.com/karpenter-capi/karpenter-capi/pkg/wire"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
)

// plansWithin is how long Karpenter may take to plan a pod before that is worth a remark.
const plansWithin = 30 * time.Second

// Fit is how one node group suits a pod, through one NodePool.
type Fit struct {
	NodePool, NodeGroup string
	// Misfit is why a machine of the group cannot run the pod. Empty if it can.
	Misfit string
	// Unavailable is why the group gives no machine now. Empty if it does.
	Unavailable string
}

// Fits returns how each node group suits a pod, by NodePool. It considers what pod, NodePool and
// node group say of themselves: requests, node selectors and affinities, taints. It does not
// consider other pods (spread, affinity between pods, DaemonSets), volumes or devices.
func Fits(
	pod *corev1.Pod, pools []karpv1.NodePool, classes []v1alpha1.ClusterAPINodeClass, groups []*agentv1alpha1.NodeGroup, now time.Time,
) []Fit {
	var fits []Fit
	for i := range pools {
		class := classOf(&pools[i], classes)
		if class == nil {
			continue
		}
		for _, source := range groups {
			if !Selects(class, source) {
				continue
			}
			fit := Fit{NodePool: pools[i].Name, NodeGroup: source.GetId()}
			group, err := instancetype.NewGroup(source)
			if group == nil {
				fit.Unavailable = "it cannot be used: " + err.Error()
				fits = append(fits, fit)
				continue
			}
			if view, _ := instancetype.NewView(&class.Spec); view != nil { // invalid fields are ignored
				group = view.Of(group)
			}
			fit.Misfit = misfit(pod, &pools[i], group)
			fit.Unavailable = cmp.Or(unavailable(source, now), group.PriceRefused, group.NoCapacity)
			fits = append(fits, fit)
		}
	}
	return fits
}

// Selects reports whether a NodeClass's selector matches a node group.
func Selects(class *v1alpha1.ClusterAPINodeClass, group *agentv1alpha1.NodeGroup) bool {
	if class.Spec.ScalableResourceSelector == nil {
		return true
	}
	selector, err := metav1.LabelSelectorAsSelector(class.Spec.ScalableResourceSelector)
	return err == nil && selector.Matches(labels.Set(group.GetLabels()))
}

func classOf(pool *karpv1.NodePool, classes []v1alpha1.ClusterAPINodeClass) *v1alpha1.ClusterAPINodeClass {
	ref := pool.Spec.Template.Spec.NodeClassRef
	i := slices.IndexFunc(classes, func(c v1alpha1.ClusterAPINodeClass) bool {
		return ref != nil && ref.Group == v1alpha1.Group && ref.Name == c.Name
	})
	if i < 0 {
		return nil
	}
	return &classes[i]
}

// misfit returns why a machine of the group, made for the NodePool, could not run the pod.
func misfit(pod *corev1.Pod, pool *karpv1.NodePool, group *instancetype.Group) string {
	template := pool.Spec.Template
	if err := scheduling.Taints(template.Spec.Taints).ToleratesPod(pod); err != nil {
		return fmt.Sprintf("the pod does not tolerate the taints of NodePool %s: %s", pool.Name, brief(err))
	}
	wanted := scheduling.NewNodeSelectorRequirementsWithMinValues(template.Spec.Requirements...)
	wanted.Add(scheduling.NewLabelRequirements(lo.Assign(template.Labels, map[string]string{karpv1.NodePoolLabelKey: pool.Name})).Values()...)
	own := scheduling.NewStrictPodRequirements(pod)
	if err := wanted.Compatible(own, scheduling.AllowUndefinedWellKnownLabels); err != nil {
		return fmt.Sprintf("the pod's requirements conflict with those of NodePool %s: %s", pool.Name, brief(err))
	}
	wanted.Add(own.Values()...)
	if err := group.Requirements.Intersects(wanted); err != nil {
		return "its labels do not match the requirements: " + brief(err)
	}
	var lasting scheduling.Taints
	for _, taint := range group.Taints {
		same := func(t corev1.Taint) bool { return t.MatchTaint(&taint) && t.Value == taint.Value }
		switch {
		case slices.ContainsFunc(template.Spec.Taints, same):
			lasting = append(lasting, taint)
		case !slices.ContainsFunc(template.Spec.StartupTaints, same): // which go before pods run
			return fmt.Sprintf("its taint %s is not among those of NodePool %s", taint.ToString(), pool.Name)
		}
	}
	if err := lasting.ToleratesPod(pod); err != nil {
		return "the pod does not tolerate its taints: " + brief(err)
	}
	requests := resources.RequestsForPods(pod)
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		request, has := requests[name], group.Allocatable[name]
		if request.Cmp(has) > 0 {
			return fmt.Sprintf("the pod requests %s of %s, and a machine has %s for pods", request.String(), name, has.String())
		}
	}
	return ""
}

// brief cuts what core's errors add for its log.
func brief(err error) string {
	text := strings.ReplaceAll(err.Error(), "\n", "; ")
	return lo.Ellipsis(text, 200)
}

// unavailable returns why the agent accepts no claim on the group now.
func unavailable(group *agentv1alpha1.NodeGroup, now time.Time) string {
	availability := wire.AvailabilityFor(group, v1alpha1.Holder)
	if availability.GetAvailable() {
		return ""
	}
	text := cmp.Or(Word(availability.GetReason()), "Unavailable")
	if message := availability.GetMessage(); message != "" {
		text += ": " + message
	}
	if retry := availability.GetRetryAt(); retry.IsValid() && retry.AsTime().After(now) {
		text += fmt.Sprintf(" (again in %s)", Age(retry.AsTime().Sub(now)))
	}
	return text
}

// Word returns a reason's name as ClusterAPINodeClasses show it, for example AtMaxSize.
func Word(reason agentv1alpha1.UnavailableReason) string {
	if reason == agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_UNSPECIFIED {
		return ""
	}
	return Camel(strings.TrimPrefix(reason.String(), "UNAVAILABLE_REASON_"))
}

// Camel converts the name of an enum's value to one CamelCase word.
func Camel(name string) string {
	var word strings.Builder
	for part := range strings.SplitSeq(name, "_") {
		if part != "" {
			word.WriteString(part[:1] + strings.ToLower(part[1:]))
		}
	}
	return word.String()
}

// remedy is what to do about a group that accepts no claim.
func remedy(group *agentv1alpha1.NodeGroup) string {
	namespace, name, _ := strings.Cut(group.GetId(), "/")
	deployment := fmt.Sprintf("kubectl --context <hub> -n %s", namespace)
	switch wire.AvailabilityFor(group, v1alpha1.Holder).GetReason() {
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE:
		return fmt.Sprintf("Raise its max size: %s annotate machinedeployment %s --overwrite "+
			"cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size=<machines>", deployment, name)
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN:
		return "Correct what the message says, or wait: the node group is used again after its cool-down."
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED:
		return fmt.Sprintf("Find out who paused MachineDeployment %s or its Cluster, and unpause it.", group.GetId())
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_OWNED:
		return fmt.Sprintf("Remove spec.replicas of MachineDeployment %s from the source that sets it (docs/gitops.md).", group.GetId())
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_LOWERED:
		return fmt.Sprintf("Stop the writer that the message names (docs/gitops.md); then: %s annotate machinedeployment %s "+
			"agent.karpenter.cluster.x-k8s.io/replicas-lowered-", deployment, name)
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_INVALID:
		return fmt.Sprintf("Correct the description: kubectl capi groups %s", group.GetId())
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_QUOTA_EXCEEDED:
		return fmt.Sprintf("Raise the ResourceQuota: %s describe resourcequota", deployment)
	case agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED:
		return fmt.Sprintf("See why Cluster API creates no Machines: %s describe machinedeployment %s", deployment, name)
	default:
		return ""
	}
}

// fits explains why nothing is on its way for a pod.
func (t *story) fits(pod *corev1.Pod) {
	coming := len(t.s.OnTheWay) > 0
	usable := t.nodePools()
	switch {
	case t.settled || len(usable) == 0:
		return
	case t.s.Agent.Err != nil:
		t.selected()
		return
	}
	fits := Fits(pod, usable, t.s.NodeClasses, t.s.Agent.Groups, t.s.Now)
	var fitting, ready []Fit
	for _, fit := range fits {
		switch {
		case fit.Misfit != "":
		case fit.Unavailable != "":
			fitting = append(fitting, fit)
		default:
			fitting, ready = append(fitting, fit), append(ready, fit)
		}
		t.add(fit.step())
	}
	if coming {
		return
	}
	switch {
	case len(fits) == 0:
		t.conclude(Blocked, "No node group is selected by a NodePool's ClusterAPINodeClass.",
			"kubectl describe clusterapinodeclass", "kubectl capi groups")
	case len(fitting) == 0:
		t.conclude(Blocked, fmt.Sprintf("No node group fits the pod. %s: %s.", fits[0].NodeGroup, fits[0].Misfit),
			"Change the pod, or describe a node group that fits it: kubectl capi groups -o wide")
	case len(ready) == 0:
		var next []string
		for _, fit := range fitting {
			if text := remedy(t.group(fit.NodeGroup)); text != "" && !slices.Contains(next, text) {
				next = append(next, text)
			}
		}
		verdict := fmt.Sprintf("The pod fits, but no node group has room. %s: %s", fitting[0].NodeGroup, sentence(fitting[0].Unavailable))
		t.conclude(Blocked, verdict, next...)
	default:
		t.ready(pod, ready[0])
	}
}

// ready concludes for a pod for which a node group has room.
func (t *story) ready(pod *corev1.Pod, fit Fit) {
	waited := t.s.Now.Sub(pod.CreationTimestamp.Time)
	if condition := podCondition(pod); condition != nil && !condition.LastTransitionTime.IsZero() {
		waited = t.s.Now.Sub(condition.LastTransitionTime.Time)
	}
	verdict := fmt.Sprintf("Node group %s fits the pod and has room.", fit.NodeGroup)
	if waited < plansWithin {
		t.conclude(Waiting, verdict+" Karpenter launches a node within seconds.")
		return
	}
	t.conclude(Waiting, verdict+" The cause is not in the specifications of the pod or the node group.",
		"Check other pods (spread, affinity, DaemonSets), volumes and devices.",
		fmt.Sprintf("Read Karpenter's events of the pod: kubectl -n %s describe pod %s", pod.Namespace, pod.Name), "Read Karpenter's log.")
}

func (f Fit) step() Step {
	step := Step{Object: "NodeGroup", Name: f.NodeGroup, State: OK, Message: "fits and has room, for NodePool " + f.NodePool}
	switch {
	case f.Misfit != "":
		step.State, step.Message = Blocked, "does not fit: "+f.Misfit
	case f.Unavailable != "":
		step.State, step.Message = Blocked, "fits, but "+f.Unavailable
	}
	return step
}

// nodePools adds a step for each NodePool that makes no nodes now, and returns the others.
func (t *story) nodePools() []karpv1.NodePool {
	var usable []karpv1.NodePool
	foreign := 0
	for i := range t.s.NodePools {
		pool := &t.s.NodePools[i]
		ref := pool.Spec.Template.Spec.NodeClassRef
		if ref == nil || ref.Group != v1alpha1.Group {
			foreign++
			continue
		}
		state, message, next := t.nodePool(pool)
		if state == OK {
			usable = append(usable, *pool)
			continue
		}
		t.add(Step{Object: "NodePool", Name: pool.Name, State: state, Message: message})
		t.conclude(state, fmt.Sprintf("NodePool %s launches no nodes: %s", pool.Name, sentence(message)), next...)
	}
	if len(t.s.NodePools) == foreign {
		t.add(Step{Object: "NodePool", State: Absent, Message: "there is none with a ClusterAPINodeClass"})
		t.conclude(Blocked, "There is no NodePool with a ClusterAPINodeClass: Karpenter launches no nodes here.",
			"Create a NodePool and a ClusterAPINodeClass (docs/install.md).")
	}
	return usable
}

func (t *story) nodePool(pool *karpv1.NodePool) (state State, message string, next []string) {
	class := classOf(pool, t.s.NodeClasses)
	describe := "kubectl describe nodepool " + pool.Name
	switch conditions := pool.StatusConditions(); {
	case !pool.DeletionTimestamp.IsZero():
		return Ending, "it is being deleted", []string{describe}
	case pool.Spec.Replicas != nil:
		return Blocked, "it is static: it has spec.replicas, and launches no nodes for pods", nil
	case class == nil:
		return Blocked, fmt.Sprintf("its ClusterAPINodeClass %s does not exist", pool.Spec.Template.Spec.NodeClassRef.Name),
			[]string{"Create the ClusterAPINodeClass, or correct spec.template.spec.nodeClassRef."}
	case !class.DeletionTimestamp.IsZero():
		return Blocked, fmt.Sprintf("its ClusterAPINodeClass %s is being deleted", class.Name),
			[]string{"Refer to another ClusterAPINodeClass in spec.template.spec.nodeClassRef of NodePool " + pool.Name + "."}
	case !conditionsReady(class):
		return Blocked, fmt.Sprintf("its ClusterAPINodeClass %s is not ready: %s", class.Name, classTrouble(class)), classRemedy(class)
	case conditions.Get(karpv1.ConditionTypeValidationSucceeded).IsFalse():
		return Blocked, "it is invalid: " + conditions.Get(karpv1.ConditionTypeValidationSucceeded).Message, []string{describe}
	}
	for _, name := range slices.Sorted(maps.Keys(pool.Spec.Limits)) {
		limit := pool.Spec.Limits[name]
		if used := pool.Status.Resources[name]; used.Cmp(limit) >= 0 {
			return Blocked, fmt.Sprintf("its limit of %s %s is reached (%s in use)", limit.String(), name, used.String()),
				[]string{"Raise spec.limits of NodePool " + pool.Name + "."}
		}
	}
	return OK, "", nil
}

func conditionsReady(class *v1alpha1.ClusterAPINodeClass) bool {
	conditions := class.StatusConditions()
	return !conditions.Get(v1alpha1.ConditionAgentReachable).IsFalse() && !conditions.Get(v1alpha1.ConditionNodeGroupsFound).IsFalse()
}

// classTrouble returns what a NodeClass's conditions report, or "".
func classTrouble(class *v1alpha1.ClusterAPINodeClass) string {
	conditions := class.StatusConditions()
	for _, kind := range []string{v1alpha1.ConditionAgentReachable, v1alpha1.ConditionNodeGroupsFound} {
		if condition := conditions.Get(kind); condition.IsFalse() {
			return joined(": ", condition.Reason, condition.Message)
		}
	}
	return ""
}

func classRemedy(class *v1alpha1.ClusterAPINodeClass) []string {
	condition := class.StatusConditions().Get(v1alpha1.ConditionAgentReachable)
	if !condition.IsFalse() {
		return []string{"Give the MachineDeployments the label node.cluster.x-k8s.io/karpenter-member, or correct spec.scalableResourceSelector."}
	}
	switch condition.Reason {
	case "LiveSetRefused":
		return []string{"The message has the UIDs of two clusters: see \"Claims whose owner is missing\" in docs/troubleshooting.md."}
	case "AgentRefused":
		return []string{
			"Compare the certificate of Karpenter with --cluster-namespace and --cluster-name, and with the agent's policy (docs/install.md).",
			"See whether the Cluster is onboarded: kubectl capi spokes --hub-kubeconfig <file>",
		}
	}
	return []string{
		"See whether the agent runs: kubectl --context <hub> -n capi-agent-system get pods",
		"See whether its address can be reached from Karpenter's pods, and whether Karpenter's certificate has expired (docs/troubleshooting.md).",
	}
}

// selected shows what NodeClasses report of their groups while the agent cannot be asked.
func (t *story) selected() {
	for i := range t.s.NodeClasses {
		class := &t.s.NodeClasses[i]
		for _, group := range class.Status.Selected {
			step := Step{Object: "NodeGroup", Name: group.Name, State: OK, Message: "has room, as ClusterAPINodeClass " + class.Name + " reports"}
			if !group.Available {
				step.State, step.Message = Blocked, joined(": ", group.Reason, group.Message)
			}
			t.add(step)
		}
	}
}
