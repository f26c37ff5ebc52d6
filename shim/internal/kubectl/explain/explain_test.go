package explain_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/awslabs/operatorpkg/status"
	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

var now = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

func stamp(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

// edit is a change to the situation in which a NodePool, a NodeClass and one node group with room
// exist.
type edit func(*explain.Situation)

func situation(entry explain.Kind, name string, edits ...edit) *explain.Situation {
	s := &explain.Situation{
		Now: now, Entry: entry, Name: name, Running: -1,
		NodePools: []karpv1.NodePool{*pool()}, NodeClasses: []v1alpha1.ClusterAPINodeClass{*class()},
		Agent: explain.Agent{Groups: []*agentv1alpha1.NodeGroup{group()}},
	}
	for _, e := range edits {
		e(s)
	}
	return s
}

func pool() *karpv1.NodePool {
	return &karpv1.NodePool{
		ObjectMeta: metav1.ObjectMeta{Name: "default"},
		Spec: karpv1.NodePoolSpec{Template: karpv1.NodeClaimTemplate{Spec: karpv1.NodeClaimTemplateSpec{
			NodeClassRef: &karpv1.NodeClassReference{Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: "default"},
		}}},
	}
}

func class(conditions ...status.Condition) *v1alpha1.ClusterAPINodeClass {
	return &v1alpha1.ClusterAPINodeClass{
		ObjectMeta: metav1.ObjectMeta{Name: "default"}, Status: v1alpha1.ClusterAPINodeClassStatus{Conditions: conditions},
	}
}

func group(edits ...func(*agentv1alpha1.NodeGroup)) *agentv1alpha1.NodeGroup {
	g := &agentv1alpha1.NodeGroup{
		Id: "team-a/workers", Name: "workers", InstanceType: "medium", Architecture: "amd64", OperatingSystem: "linux", Zone: "a",
		CapacityType: agentv1alpha1.CapacityType_CAPACITY_TYPE_ON_DEMAND, Capacity: map[string]string{"cpu": "4", "memory": "16Gi", "pods": "110"},
		Price: &agentv1alpha1.Price{PerHour: 0.2, Currency: "EUR"}, Availability: &agentv1alpha1.Availability{Available: true},
		Replicas: 2, MaxSize: proto.Int32(5),
	}
	for _, e := range edits {
		e(g)
	}
	return g
}

func unavailable(reason agentv1alpha1.UnavailableReason, message string, in time.Duration) edit {
	return func(s *explain.Situation) {
		s.Agent.Groups[0].Availability = &agentv1alpha1.Availability{Reason: reason, Message: message}
		if in > 0 {
			s.Agent.Groups[0].Availability.RetryAt = stamp(-in)
		}
	}
}

func pod(edits ...func(*corev1.Pod)) edit {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", CreationTimestamp: before(3 * time.Minute)},
		Spec: corev1.PodSpec{SchedulerName: "default-scheduler", Containers: []corev1.Container{{
			Name: "c", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available",
			LastTransitionTime: before(3 * time.Minute),
		}}},
	}
	for _, e := range edits {
		e(p)
	}
	return func(s *explain.Situation) { s.Pod = p }
}

func podEvent(reason, message string, ago time.Duration) edit {
	return func(s *explain.Situation) {
		s.PodEvents = append(s.PodEvents, corev1.Event{Reason: reason, Message: message, LastTimestamp: before(ago)})
	}
}

func claimEvent(reason, message string) edit {
	return func(s *explain.Situation) {
		s.NodeClaimEvents = append(s.NodeClaimEvents, corev1.Event{Reason: reason, Message: message, LastTimestamp: before(time.Minute)})
	}
}

func condition(kind string, is metav1.ConditionStatus, reason, message string) status.Condition {
	return status.Condition{Type: kind, Status: is, Reason: reason, Message: message, LastTransitionTime: before(2 * time.Minute)}
}

var (
	launched    = condition(karpv1.ConditionTypeLaunched, metav1.ConditionTrue, "Launched", "")
	registered  = condition(karpv1.ConditionTypeRegistered, metav1.ConditionTrue, "Registered", "")
	initialized = condition(karpv1.ConditionTypeInitialized, metav1.ConditionTrue, "Initialized", "")
)

func uninitialized(reason, message string) status.Condition {
	return condition(karpv1.ConditionTypeInitialized, metav1.ConditionUnknown, reason, message)
}

func draining(message string) status.Condition {
	return condition(karpv1.ConditionTypeDrained, metav1.ConditionUnknown, "Draining", message)
}

var attached = condition(karpv1.ConditionTypeVolumesDetached, metav1.ConditionUnknown, "AwaitingVolumeDetachment", "pvc-1")

func nodeClaim(conditions ...status.Condition) edit {
	return func(s *explain.Situation) {
		s.NodeClaim = &karpv1.NodeClaim{
			ObjectMeta: metav1.ObjectMeta{
				Name: "default-x", UID: "uid", CreationTimestamp: before(2 * time.Minute),
				Annotations: map[string]string{v1alpha1.NodeGroupAnnotation: "team-a/workers"},
			},
			Spec: karpv1.NodeClaimSpec{NodeClassRef: &karpv1.NodeClassReference{
				Group: v1alpha1.Group, Kind: "ClusterAPINodeClass", Name: "default",
			}},
			Status: karpv1.NodeClaimStatus{Conditions: conditions, ProviderID: "capi-claim://team-a/production/uid"},
		}
		for _, c := range conditions {
			if c.Type == karpv1.ConditionTypeRegistered && c.IsTrue() {
				s.NodeClaim.Status.NodeName = "node-1"
			}
		}
	}
}

func deletingNodeClaim(conditions ...status.Condition) edit {
	return func(s *explain.Situation) {
		nodeClaim(append(conditions, launched, registered, initialized)...)(s)
		at := before(time.Minute)
		s.NodeClaim.DeletionTimestamp = &at
	}
}

func claim(phase agentv1alpha1.ClaimPhase, edits ...func(*agentv1alpha1.Claim)) edit {
	c := &agentv1alpha1.Claim{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"}, ClaimId: "uid", DisplayName: "default-x", Holder: "karpenter",
		NodeGroupId: "team-a/workers", Phase: phase, CreatedAt: stamp(2 * time.Minute),
	}
	for _, e := range edits {
		e(c)
	}
	return func(s *explain.Situation) { s.Agent.Claim = c }
}

func why(reason, message string) func(*agentv1alpha1.Claim) {
	return func(c *agentv1alpha1.Claim) { c.Reason, c.Message = reason, message }
}

func with(machine *agentv1alpha1.Machine) func(*agentv1alpha1.Claim) {
	return func(c *agentv1alpha1.Claim) { c.Machine = machine }
}

func machine(edits ...func(*agentv1alpha1.Machine)) *agentv1alpha1.Machine {
	m := &agentv1alpha1.Machine{
		Cluster: &agentv1alpha1.ClusterRef{Namespace: "team-a", Name: "production"}, Name: "workers-1", NodeGroupId: "team-a/workers",
		ClaimId: "uid", Phase: "Provisioning", CreatedAt: stamp(time.Minute), UpToDate: true,
	}
	for _, e := range edits {
		e(m)
	}
	return m
}

func provisioned(m *agentv1alpha1.Machine) { m.ProviderId, m.Phase = "sim://1", "Provisioned" }

func hasJoined(m *agentv1alpha1.Machine) {
	m.ProviderId, m.NodeName, m.Phase = "sim://1", "node-1", "Running"
}

func goes(reason, message string) func(*agentv1alpha1.Machine) {
	return func(m *agentv1alpha1.Machine) {
		m.DeletedAt, m.DeletingReason, m.DeletingMessage, m.Phase = stamp(time.Minute), reason, message, "Deleting"
	}
}

func node(edits ...func(*corev1.Node)) edit {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1", Annotations: map[string]string{explain.MachineAnnotation: "workers-1"}},
		Spec:       corev1.NodeSpec{ProviderID: "sim://1"},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	for _, e := range edits {
		e(n)
	}
	return func(s *explain.Situation) { s.Node, s.Running = n, 3 }
}

func taint(key string, effect corev1.TaintEffect) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: effect}) }
}

func agentIsLost(s *explain.Situation) {
	s.Agent = explain.Agent{Err: errors.New("the agent at hub:8443 does not answer"), Remedy: []string{"Forward a port."}}
}

const (
	pending   = agentv1alpha1.ClaimPhase_CLAIM_PHASE_PENDING
	bound     = agentv1alpha1.ClaimPhase_CLAIM_PHASE_BOUND
	releasing = agentv1alpha1.ClaimPhase_CLAIM_PHASE_RELEASING
	over      = agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED
)

type expectation struct {
	s       *explain.Situation
	state   explain.State
	verdict string // is part of it
	next    string // is part of one of them; empty for any
	step    string // object and message of one of the steps; empty for any
}

func check(t *testing.T, cases map[string]expectation) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			e := explain.Explain(c.s)
			assert.Equal(t, c.state, e.State, "%+v", e)
			assert.Contains(t, e.Verdict, c.verdict)
			anyContains(t, e.Next, c.next)
			var steps []string
			for _, step := range e.Steps {
				for _, text := range append([]string{step.Message}, step.Details...) {
					steps = append(steps, step.Object+" "+text)
				}
			}
			anyContains(t, steps, c.step)
		})
	}
}

func anyContains(t *testing.T, texts []string, part string) {
	t.Helper()
	if part == "" {
		return
	}
	for _, text := range texts {
		if strings.Contains(text, part) {
			return
		}
	}
	assert.Failf(t, "missing", "%q is in none of %q", part, texts)
}

func TestAPodWithoutANodeClaim(t *testing.T) {
	const name = "shop/web"
	at := func(edits ...edit) *explain.Situation { return situation(explain.Pod, name, edits...) }
	check(t, map[string]expectation{
		"no NodePool": {
			s:     at(pod(), func(s *explain.Situation) { s.NodePools = nil }),
			state: explain.Blocked, verdict: "There is no NodePool", next: "Create a NodePool",
		},
		"only another provider's NodePool": {
			s:     at(pod(), func(s *explain.Situation) { s.NodePools[0].Spec.Template.Spec.NodeClassRef.Group = "karpenter.k8s.aws" }),
			state: explain.Blocked, verdict: "There is no NodePool",
		},
		"a NodePool without its NodeClass": {
			s:     at(pod(), func(s *explain.Situation) { s.NodeClasses = nil }),
			state: explain.Blocked, verdict: "its ClusterAPINodeClass default does not exist", next: "Create the ClusterAPINodeClass",
		},
		"a selector that selects nothing": {
			s: at(pod(), func(s *explain.Situation) {
				s.NodeClasses[0] = *class(condition(v1alpha1.ConditionNodeGroupsFound, metav1.ConditionFalse, "NoNodeGroups", "it matches none"))
			}),
			state: explain.Blocked, verdict: "it matches none", next: "karpenter-member",
		},
		"Karpenter has lost the agent": {
			s: at(pod(), func(s *explain.Situation) {
				s.NodeClasses[0] = *class(condition(v1alpha1.ConditionAgentReachable, metav1.ConditionFalse, "AgentUnreachable", "no connection since 11:50"))
			}),
			state: explain.Blocked, verdict: "no connection since 11:50", next: "capi-agent-system get pods",
		},
		"the agent refuses Karpenter": {
			s: at(pod(), func(s *explain.Situation) {
				s.NodeClasses[0] = *class(condition(v1alpha1.ConditionAgentReachable, metav1.ConditionFalse, "AgentRefused", "not this identity's Cluster"))
			}),
			state: explain.Blocked, verdict: "not this identity's Cluster", next: "Compare the certificate",
		},
		"the limit of the NodePool": {
			s: at(pod(), func(s *explain.Situation) {
				s.NodePools[0].Spec.Limits = karpv1.Limits{corev1.ResourceCPU: resource.MustParse("8")}
				s.NodePools[0].Status.Resources = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8")}
			}),
			state: explain.Blocked, verdict: "its limit of 8 cpu is reached", next: "Raise spec.limits",
		},
		"no group is large enough": {
			s: at(pod(func(p *corev1.Pod) {
				p.Spec.Containers[0].Resources.Requests[corev1.ResourceMemory] = resource.MustParse("64Gi")
			})),
			state: explain.Blocked, verdict: "No node group fits the pod. team-a/workers: the pod requests 64Gi of memory", next: "groups -o wide",
			step: "NodeGroup does not fit",
		},
		"a zone that no group has": {
			s:     at(pod(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelTopologyZone: "b"} })),
			state: explain.Blocked, verdict: "its labels do not match the requirements",
		},
		"a taint that the NodePool does not have": {
			s: at(pod(), func(s *explain.Situation) {
				s.Agent.Groups[0].Taints = []*agentv1alpha1.Taint{{Key: "gpu", Effect: "NoSchedule"}}
			}),
			state: explain.Blocked, verdict: "its taint gpu:NoSchedule is not among those of NodePool default",
		},
		"a taint that is gone before pods run": {
			s: at(pod(), func(s *explain.Situation) {
				s.Agent.Groups[0].Taints = []*agentv1alpha1.Taint{{Key: "agent", Effect: "NoSchedule"}}
				s.NodePools[0].Spec.Template.Spec.StartupTaints = []corev1.Taint{{Key: "agent", Effect: corev1.TaintEffectNoSchedule}}
			}),
			state: explain.Waiting, verdict: "Node group team-a/workers fits the pod and has room",
		},
		"limits that are reached, in order": {
			s: at(pod(), func(s *explain.Situation) {
				s.NodePools[0].Spec.Limits = karpv1.Limits{}
				s.NodePools[0].Status.Resources = corev1.ResourceList{}
				for _, name := range []corev1.ResourceName{"memory", "cpu", "pods", "example.com/gpu"} {
					s.NodePools[0].Spec.Limits[name], s.NodePools[0].Status.Resources[name] = resource.MustParse("8"), resource.MustParse("8")
				}
			}),
			state: explain.Blocked, verdict: "its limit of 8 cpu is reached",
		},
		"a taint that the pod does not tolerate": {
			s: at(pod(), func(s *explain.Situation) {
				s.NodePools[0].Spec.Template.Spec.Taints = []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}
			}),
			state: explain.Blocked, verdict: "does not tolerate the taints of NodePool default",
		},
		"a group at its max size": {
			s:     at(pod(), unavailable(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_AT_MAX_SIZE, "5 of at most 5 machines", 0)),
			state: explain.Blocked, verdict: "AtMaxSize: 5 of at most 5 machines", next: "Raise its max size",
		},
		"a group that cools down": {
			s:     at(pod(), unavailable(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, "quota exceeded", 90*time.Second)),
			state: explain.Blocked, verdict: "CoolingDown: quota exceeded (again in 90s)", next: "after its cool-down",
		},
		"a frozen group": {
			s:     at(pod(), unavailable(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_REPLICAS_LOWERED, "argocd set replicas to 0", 0)),
			state: explain.Blocked, verdict: "ReplicasLowered: argocd set replicas to 0", next: "replicas-lowered-",
		},
		"a group whose price is missing": {
			s:     at(pod(), func(s *explain.Situation) { s.Agent.Groups[0].Price = nil }),
			state: explain.Blocked, verdict: "the agent reports no price",
		},
		"a group that fits and has room, just now": {
			s:     at(pod(func(p *corev1.Pod) { p.Status.Conditions[0].LastTransitionTime = before(5 * time.Second) })),
			state: explain.Waiting, verdict: "Karpenter launches a node within seconds",
		},
		"a group that fits and has room, for long": {
			s:     at(pod(), podEvent("FailedScheduling", "Failed to schedule pod, unsatisfiable topology constraint", time.Minute)),
			state: explain.Waiting, verdict: "not in the specifications", next: "Check other pods (spread, affinity, DaemonSets)",
			step: "Pod Karpenter, 60s ago: unsatisfiable topology constraint",
		},
		"a plan whose NodeClaim failed": {
			s: at(pod(), podEvent("Nominated", "Pod should schedule on: nodeclaim/default-x", time.Minute),
				claim(over, why("Failed", "quota exceeded")),
				func(s *explain.Situation) { s.Gone = "default-x" },
				unavailable(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_COOLING_DOWN, "quota exceeded", time.Minute)),
			state: explain.Blocked, verdict: "The last attempt, NodeClaim default-x, has ended (Failed)",
		},
		"others on their way": {
			s:     at(pod(), func(s *explain.Situation) { s.OnTheWay = []string{"default-y"} }),
			state: explain.Waiting, verdict: "has not published where it plans the pod", next: "why nodeclaim default-y",
		},
		"an agent that cannot be asked": {
			s: at(pod(), agentIsLost, func(s *explain.Situation) {
				s.NodeClasses[0].Status.Selected = []v1alpha1.SelectedNodeGroup{{Name: "team-a/workers", Reason: "AtMaxSize", Message: "5 of 5"}}
			}),
			state: explain.Unknown, verdict: "the agent could not be queried", next: "Forward a port.", step: "NodeGroup AtMaxSize: 5 of 5",
		},
		"a Karpenter that does not run": {
			s:     at(pod(), func(s *explain.Situation) { s.Shim = &explain.Workload{Name: "karpenter/karpenter", Wanted: 2} }),
			state: explain.Blocked, verdict: "Karpenter does not run", next: "kubectl -n karpenter get pods",
		},
		"a scheduling gate": {
			s:     at(pod(func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}} })),
			state: explain.Blocked, verdict: "the scheduling gate example.com/wait",
		},
		"a pod of a DaemonSet": {
			s:     at(pod(func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet"}} })),
			state: explain.Blocked, verdict: "belongs to a DaemonSet",
		},
		"a pod that the scheduler has not seen": {
			s:     at(pod(func(p *corev1.Pod) { p.Status.Conditions = nil })),
			state: explain.Waiting, verdict: "has not tried the pod yet",
		},
		"a pod that has ended": {
			s:     at(pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })),
			state: explain.OK, verdict: "The pod has ended",
		},
		"a pod that runs, while the agent cannot be asked": {
			s:     at(pod(runs), node(), nodeClaim(launched, registered, initialized), agentIsLost),
			state: explain.OK, verdict: "The pod runs on Node node-1",
		},
		"a pod whose containers start": {
			s: at(pod(runs, func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }), node(), nodeClaim(launched, registered, initialized),
				claim(bound, with(machine(hasJoined)))),
			state: explain.Waiting, verdict: "its containers are being started",
		},
	})
}

func runs(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = "node-1", corev1.PodRunning }

func TestANodeClaimOnItsWay(t *testing.T) {
	at := func(edits ...edit) *explain.Situation { return situation(explain.NodeClaim, "default-x", edits...) }
	planned := podEvent("Nominated", "Pod should schedule on: nodeclaim/default-x", time.Minute)
	check(t, map[string]expectation{
		"new": {s: at(nodeClaim()), state: explain.Waiting, verdict: "about to claim a machine"},
		"without an agent": {
			s:     at(nodeClaim(condition(karpv1.ConditionTypeLaunched, metav1.ConditionUnknown, "AgentUnreachable", "connection refused")), agentIsLost),
			state: explain.Blocked, verdict: "connection refused", next: "See whether the agent runs",
		},
		"waiting for a Machine": {
			s:     at(nodeClaim(launched), claim(pending, why("WaitingForMachine", "replicas were raised"))),
			state: explain.Waiting, verdict: "waits for Cluster API to create a Machine of node group team-a/workers",
			next: "describe machinedeployment workers",
		},
		"in a group that Cluster API blocks": {
			s: at(nodeClaim(launched), claim(pending),
				unavailable(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_MACHINES_BLOCKED, "the control plane is upgrading", 0)),
			state: explain.Blocked, verdict: "the control plane is upgrading", next: "See why Cluster API creates no Machines",
		},
		"in a group that was paused": {
			s:     at(nodeClaim(launched), claim(pending), unavailable(agentv1alpha1.UnavailableReason_UNAVAILABLE_REASON_PAUSED, "the Cluster is paused", 0)),
			state: explain.Blocked, verdict: "the Cluster is paused", next: "unpause it",
		},
		"whose write is refused": {
			s:     at(nodeClaim(launched), claim(pending, why("WriteRefused", "admission webhook denied it"))),
			state: explain.Blocked, verdict: "admission webhook denied it", next: "Correct the webhook",
		},
		"adopting": {
			s:     at(nodeClaim(launched), claim(pending, func(c *agentv1alpha1.Claim) { c.AdoptMachine = "workers-9" })),
			state: explain.Waiting, verdict: "adopting Machine workers-9",
		},
		"with a machine whose infrastructure says why": {
			s: at(nodeClaim(launched), claim(bound, with(machine(func(m *agentv1alpha1.Machine) {
				m.InfrastructureReason, m.InfrastructureMessage = "InstanceProvisionFailed", "UnauthorizedOperation"
			})))),
			state: explain.Waiting, verdict: "Machine workers-1 waits for its infrastructure: InstanceProvisionFailed: UnauthorizedOperation",
			next: "kubectl --context <hub> -n team-a describe machine workers-1", step: "Infrastructure InstanceProvisionFailed",
		},
		"the same, seen from the pod": {
			s: situation(explain.Pod, "shop/web", pod(), planned, nodeClaim(launched), claim(bound, with(machine(func(m *agentv1alpha1.Machine) {
				m.InfrastructureReason, m.InfrastructureMessage = "InstanceProvisionFailed", "UnauthorizedOperation"
			})))),
			state: explain.Waiting, verdict: "InstanceProvisionFailed: UnauthorizedOperation", step: "Pod planned for NodeClaim default-x 60s ago",
		},
		"with a machine whose infrastructure is silent": {
			s:     at(nodeClaim(launched), claim(bound, with(machine()))),
			state: explain.Waiting, verdict: "which reports nothing yet",
		},
		"with an instance that boots": {
			s:     at(nodeClaim(launched), claim(bound, with(machine(provisioned)))),
			state: explain.Waiting, verdict: "its Node has not joined", next: "boot log",
		},
		"past its deadline, kept as the Node may exist": {
			s:     at(nodeClaim(launched), claim(bound, with(machine(provisioned)), why("NodeNotSeen", "Cluster API cannot reach the cluster"))),
			state: explain.Waiting, verdict: "Cluster API cannot reach the cluster",
		},
		"with a Node of another provider ID": {
			s:     at(nodeClaim(launched), claim(bound, with(machine(hasJoined))), node(func(n *corev1.Node) { n.Spec.ProviderID = "sim://other" })),
			state: explain.Blocked, verdict: "The provider IDs of Node node-1 and of its Machine differ", next: "--provider-id",
		},
		"with a Node that waits for Cluster API": {
			s: at(nodeClaim(launched, registered, uninitialized("StartupTaintsExist", "a taint")),
				claim(bound, with(machine(hasJoined))), node(taint("node.cluster.x-k8s.io/uninitialized", corev1.TaintEffectNoSchedule))),
			state: explain.Waiting, verdict: "waits for Cluster API to find its Machine", next: "RemoteConnectionProbe",
		},
		"with a Node without its device": {
			s: at(nodeClaim(launched, registered, uninitialized("ResourceNotRegistered", "nvidia.com/gpu")),
				claim(bound, with(machine(hasJoined))), node()),
			state: explain.Waiting, verdict: "nvidia.com/gpu", next: "device plugin",
		},
		"with a Node without network": {
			s: at(nodeClaim(launched, registered, uninitialized("NodeNotReady", "")),
				claim(bound, with(machine(hasJoined))), node(notReady)),
			state: explain.Waiting, verdict: "joined and is not ready yet: KubeletNotReady: cni plugin not initialized",
		},
		"in use": {
			s:     at(nodeClaim(launched, registered, initialized), claim(bound, with(machine(hasJoined))), node()),
			state: explain.OK, verdict: "Nothing is wrong", step: "Pods 3 on the Node",
		},
		"given up as failed": {
			s: at(nodeClaim(launched), claim(releasing, why("Failed", "no capacity"), func(c *agentv1alpha1.Claim) { c.FailedAt = stamp(time.Second) },
				with(machine()))),
			state: explain.Ending, verdict: "given up as failed: no capacity",
		},
		"late": {
			s:     at(nodeClaim(launched), claim(releasing, why("Late", "no Node in 30m"), with(machine(provisioned)))),
			state: explain.Ending, verdict: "The machine is late", next: "maxNodeProvisionTime",
		},
		"whose machine another actor deleted": {
			s:     at(nodeClaim(launched, registered, initialized), claim(over, why("MachineLost", "its Machine is gone")), node()),
			state: explain.Ending, verdict: "Another actor deleted its Machine",
		},
		"unknown to the agent": {
			s:     at(nodeClaim(launched)),
			state: explain.Blocked, verdict: "the agent has no claim for it", next: "docs/disaster-recovery.md",
		},
		"of a shim whose agent cannot be asked": {
			s:     at(nodeClaim(launched), agentIsLost, claimEvent("WaitingForMachine", "Still waiting: machine workers-1 has no provider ID.")),
			state: explain.Unknown, verdict: "Still waiting: machine workers-1 has no provider ID", next: "Forward a port.",
		},
		"the same, with the hub's kubeconfig": {
			s: at(nodeClaim(launched), agentIsLost, func(s *explain.Situation) {
				s.Hub = explain.Hub{Asked: true, Claim: situation("", "", claim(bound, with(machine()))).Agent.Claim}
				s.Hub.Machine = machine(func(m *agentv1alpha1.Machine) {
					m.InfrastructureReason, m.InfrastructureMessage = "WaitingForHost", "no host is free"
				})
			}),
			state: explain.Waiting, verdict: "WaitingForHost: no host is free",
		},
		"with a hub that cannot be read": {
			s: at(nodeClaim(launched), agentIsLost, func(s *explain.Situation) {
				s.Hub = explain.Hub{Asked: true, Err: errors.New("connection refused")}
			}),
			state: explain.Unknown, verdict: "the agent could not be queried", step: "Hub was not read: connection refused",
		},
		"with what the hub's objects say": {
			s: at(nodeClaim(launched), claim(bound, with(machine())), func(s *explain.Situation) {
				s.Hub = explain.Hub{Asked: true, Notes: []explain.Note{{Object: "Machine team-a/workers-1", Message: "BootstrapConfigReady is False"}}}
			}),
			state: explain.Waiting, step: "Hub BootstrapConfigReady is False",
		},
	})
}

func notReady(n *corev1.Node) {
	n.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: "KubeletNotReady", Message: "cni plugin not initialized",
	}}
}

func TestWhatGoes(t *testing.T) {
	at := func(edits ...edit) *explain.Situation { return situation(explain.NodeClaim, "default-x", edits...) }
	drained := condition(karpv1.ConditionTypeDrained, metav1.ConditionTrue, "Drained", "")
	check(t, map[string]expectation{
		"a Node that is drained": {
			s: at(deletingNodeClaim(draining("2 pods are waiting")), node(),
				claim(bound, with(machine(hasJoined)))),
			state: explain.Ending, verdict: "still draining the Node: Draining: 2 pods are waiting", next: "kubectl get pdb -A",
		},
		"volumes that are attached": {
			s: at(deletingNodeClaim(drained, attached), node(),
				claim(bound, with(machine(hasJoined)))),
			state: explain.Ending, verdict: "its volumes are still attached",
		},
		"a machine behind a hook": {
			s: at(deletingNodeClaim(drained), claim(releasing, why("ReleaseRequested", ""),
				with(machine(hasJoined, goes("WaitingForPreTerminateHook", "hook backup"))))),
			state: explain.Ending, verdict: "A pre-terminate hook holds the Machine",
			step: "Deletion pending for 60s: WaitingForPreTerminateHook: hook backup",
		},
		"a machine that Cluster API drains": {
			s:     at(deletingNodeClaim(drained), claim(releasing, why("Collected", ""), with(machine(hasJoined, goes("DrainingNode", "pods left: a, b"))))),
			state: explain.Ending, verdict: "Cluster API drains the Node. pods left: a, b", next: "spec.nodeName=node-1",
		},
		"an instance that the provider removes": {
			s: at(deletingNodeClaim(drained), claim(releasing, why("ReleaseRequested", ""),
				with(machine(hasJoined, goes("WaitingForInfrastructureDeletion", ""))))),
			state: explain.Ending, verdict: "The infrastructure provider is removing the instance",
		},
		"a machine that another actor deletes": {
			s: at(nodeClaim(launched, registered, initialized), node(),
				claim(bound, why("MachineDeleting", "another actor is deleting its Machine"), with(machine(hasJoined, goes("DrainingNode", ""))))),
			state: explain.Ending, verdict: "Another actor deletes it, not Karpenter",
		},
		"a NodeClaim without a known machine": {
			s:     at(deletingNodeClaim(), claimEvent("MachineUnknown", "the agent reports no Machine with its provider ID")),
			state: explain.Blocked, verdict: "The NodeClaim cannot be deleted: the agent reports no Machine",
		},
		"a running pod whose Node goes": {
			s: situation(explain.Pod, "shop/web", pod(runs), deletingNodeClaim(draining("1 pod")),
				node(), claim(bound, with(machine(hasJoined)))),
			state: explain.Ending, verdict: "still draining",
		},
	})
}

func TestMachinesAndNodesWithoutANodeClaim(t *testing.T) {
	of := func(entry explain.Kind, m *agentv1alpha1.Machine, edits ...edit) *explain.Situation {
		return situation(entry, m.GetName(), append([]edit{func(s *explain.Situation) { s.Agent.Machine = m }}, edits...)...)
	}
	floor := machine(hasJoined, func(m *agentv1alpha1.Machine) {
		m.ClaimId, m.Owner = "", agentv1alpha1.MachineOwner_MACHINE_OWNER_FLOOR
	})
	spare := machine(func(m *agentv1alpha1.Machine) { m.ClaimId = "" })
	check(t, map[string]expectation{
		"the floor's machine": {s: of(explain.Machine, floor, node()), state: explain.OK, verdict: "part of the floor", next: "kubectl capi adopt"},
		"a spare":             {s: of(explain.Machine, spare), state: explain.Waiting, verdict: "waits for its infrastructure"},
		"a Node with Karpenter's taint": {
			s:     of(explain.Node, floor, node(taint(karpv1.UnregisteredTaintKey, corev1.TaintEffectNoExecute))),
			state: explain.Blocked, verdict: "joined with Karpenter's taint", next: "karpenter.sh/unregistered-",
		},
		"the same, if the agent cannot be asked": {
			s: situation(explain.Node, "node-1", agentIsLost, node(taint(karpv1.UnregisteredTaintKey, corev1.TaintEffectNoExecute),
				notReady)),
			state: explain.Blocked, verdict: "Node node-1 is not ready",
		},
		"a Node with Karpenter's taint whose claim was not read": {
			s: situation(explain.Node, "node-1", agentIsLost, node(taint(karpv1.UnregisteredTaintKey, corev1.TaintEffectNoExecute)),
				func(s *explain.Situation) { s.Hub = explain.Hub{Asked: true, Machine: machine(hasJoined)} }),
			state: explain.OK, step: "Claim was not read",
		},
		"a Node of the control plane": {
			s:     situation(explain.Node, "node-1", node(func(n *corev1.Node) { n.Annotations = nil })),
			state: explain.OK, verdict: "has not matched the Node with a Machine of a node group",
		},
		"a Node that has stopped": {
			s: situation(explain.Node, "node-1", node(notReady), nodeClaim(launched, registered, initialized),
				claim(bound, with(machine(hasJoined)))),
			state: explain.Blocked, verdict: "Node node-1 is not ready",
		},
		"an unadopted machine of another provider": {
			s: situation(explain.NodeClaim, "default-x", nodeClaim(launched, registered, initialized), node(), func(s *explain.Situation) {
				s.NodeClaim.Annotations, s.NodeClaim.Status.ProviderID = nil, "sim://1"
			}),
			state: explain.Blocked, verdict: "has not been adopted", next: "kubectl capi adopt",
		},
		"one that cannot be adopted": {
			s: situation(explain.NodeClaim, "default-x", nodeClaim(launched, registered, initialized), node(),
				claimEvent("MachineWithoutClaim", "node group team-a/workers is paused"), func(s *explain.Situation) {
					s.NodeClaim.Annotations, s.NodeClaim.Status.ProviderID = nil, "sim://1"
				}),
			state: explain.Blocked, verdict: "node group team-a/workers is paused", next: "kubectl capi adopt",
		},
		"a claim without an owner": {
			s: of(explain.Machine, machine(hasJoined), node(), claim(bound, why("OwnerMissing", "its NodeClaim is gone"), with(machine(hasJoined))),
				func(s *explain.Situation) { s.Gone = "default-x" }),
			state: explain.Blocked, verdict: "its NodeClaim is gone", next: "release it by hand",
		},
		"a machine that is returned": {
			s: situation(explain.NodeClaim, "default-x", nodeClaim(launched, registered, initialized), node(), claim(bound, with(machine(hasJoined))),
				func(s *explain.Situation) {
					s.NodeClaim.Annotations[v1alpha1.ReturnMachineAnnotation] = "true"
				}),
			state: explain.Ending, verdict: "returning its machine to the user",
		},
	})
}

func TestAPlanIsReadFromTheNewestEvent(t *testing.T) {
	plan, ok := explain.PlanOf([]corev1.Event{
		{Reason: "Nominated", Message: "Pod should schedule on: nodeclaim/default-b, node/node-2", LastTimestamp: before(time.Second)},
		{Reason: "Nominated", Message: "Pod should schedule on: nodeclaim/default-a", LastTimestamp: before(time.Minute)},
		{Reason: "FailedScheduling", Message: "Failed to schedule pod, nodeclaim/default-c"},
	})
	assert.True(t, ok)
	assert.Equal(t, explain.Plan{NodeClaim: "default-b", Node: "node-2", At: before(time.Second).Time}, plan)
	_, ok = explain.PlanOf(nil)
	assert.False(t, ok)
}

func TestAge(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0s": -time.Second, "90s": 90 * time.Second, "3m05s": 185 * time.Second, "45m": 45 * time.Minute, "3h30m": 210 * time.Minute, "5d": 121 * time.Hour,
	} {
		assert.Equal(t, want, explain.Age(d))
	}
}
