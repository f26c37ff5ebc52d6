package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/events"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/kubectl/explain"
)

// reading reads a situation, with as many reads at once as what is already known allows. Each read
// sets fields of its own.
type reading struct {
	access *Access
	spoke  client.Client
	// agent is nil until it is connected, and if it cannot be.
	agent *Agent
	s     *explain.Situation

	// nodeName and nodeClaimName are the objects that what was read refers to.
	nodeName, nodeClaimName string
	// machineName is the Machine that the user or the Node names.
	machineName string
}

// Situation reads what is known about an object. name is a pod's name in namespace, or the name of
// another object.
func (a *Access) Situation(ctx context.Context, kind explain.Kind, namespace, name string) (*explain.Situation, error) {
	spoke, err := a.Spoke()
	if err != nil {
		return nil, err
	}
	r := &reading{access: a, spoke: spoke, s: &explain.Situation{Entry: kind, Name: name, Running: -1}}
	if kind == explain.Pod {
		r.s.Name = namespace + "/" + name
	}
	defer func() {
		if r.agent != nil {
			_ = r.agent.Close()
		}
	}()
	start, first := errgroup.WithContext(ctx)
	start.Go(func() error {
		var list karpv1.NodePoolList
		err := r.list(first, "NodePools", &list)
		r.s.NodePools = list.Items
		return err
	})
	start.Go(func() error {
		var list v1alpha1.ClusterAPINodeClassList
		err := r.list(first, "ClusterAPINodeClasses", &list)
		r.s.NodeClasses = list.Items
		return err
	})
	start.Go(func() error { r.connect(first); return nil })
	start.Go(func() error { return r.entry(first, kind, namespace, name) })
	if err := start.Wait(); err != nil {
		return nil, err
	}
	if err := r.chain(ctx); err != nil {
		return nil, err
	}
	r.s.Now = time.Now()
	return r.s, nil
}

func (r *reading) list(ctx context.Context, what string, into client.ObjectList) error {
	if err := r.spoke.List(ctx, into); err != nil {
		return spokeProblem(err, "reading the "+what)
	}
	return nil
}

// connect connects to the agent and reads its node groups. An error is part of the situation.
func (r *reading) connect(ctx context.Context) {
	agent, err := r.access.Agent(ctx)
	r.s.Shim = r.access.Workload(ctx)
	if err != nil {
		r.lost(err)
		return
	}
	r.agent = agent
	response, err := agent.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: agent.Cluster})
	if err != nil {
		r.lost(agentProblem(err, agent))
		return
	}
	r.s.Agent.Groups = response.GetNodeGroups()
}

// lost records that the agent could not be asked.
func (r *reading) lost(err error) {
	r.s.Agent.Err, r.s.Agent.Remedy = err, RemedyOf(err)
}

// entry reads the object that the explanation starts from.
func (r *reading) entry(ctx context.Context, kind explain.Kind, namespace, name string) error {
	switch kind {
	case explain.Pod:
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error {
			pod := &corev1.Pod{}
			if err := r.spoke.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pod); err != nil {
				return missing(err, "Pod", namespace+"/"+name, "Its namespace is chosen with -n.")
			}
			r.s.Pod = pod
			return nil
		})
		group.Go(func() error {
			list, err := r.events(ctx, "Pod", namespace, name)
			r.s.PodEvents = list
			return err
		})
		return group.Wait()
	case explain.NodeClaim:
		r.nodeClaimName = name
		nodeClaim, err := r.nodeClaim(ctx, name)
		if err != nil {
			return err
		}
		if nodeClaim == nil {
			r.s.Gone = name
		}
		r.s.NodeClaim = nodeClaim
		return nil
	case explain.Node:
		node := &corev1.Node{}
		if err := r.spoke.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
			return missing(err, "Node", name, "")
		}
		r.s.Node, r.nodeName = node, name
		return nil
	case explain.Machine:
		if _, machine, err := split(name); err == nil {
			name = machine
		}
		r.machineName = name
		return nil
	}
	return fmt.Errorf("%q is not a kind: write pod, nodeclaim, node or machine", kind)
}

func missing(err error, kind, name, remedy string) error {
	if !apierrors.IsNotFound(err) {
		return spokeProblem(err, fmt.Sprintf("reading %s %s", kind, name))
	}
	err = fmt.Errorf("there is no %s %s", kind, name)
	if remedy == "" {
		return err
	}
	return problem(err, remedy)
}

// events returns the events of an object.
func (r *reading) events(ctx context.Context, kind, namespace, name string) ([]corev1.Event, error) {
	list := &corev1.EventList{}
	selector := fields.Set{"involvedObject.kind": kind, "involvedObject.name": name}.AsSelector()
	if err := r.spoke.List(ctx, list, client.InNamespace(namespace), client.MatchingFieldsSelector{Selector: selector}); err != nil {
		return nil, spokeProblem(err, "reading the events of "+kind+" "+name)
	}
	return list.Items, nil
}

// of returns the events of an object without those of an earlier one with the same name.
func of(object client.Object, events []corev1.Event) []corev1.Event {
	return slices.DeleteFunc(events, func(e corev1.Event) bool {
		return e.InvolvedObject.UID != "" && e.InvolvedObject.UID != object.GetUID()
	})
}

// nodeClaim returns a NodeClaim, or nil if it does not exist.
func (r *reading) nodeClaim(ctx context.Context, name string) (*karpv1.NodeClaim, error) {
	nodeClaim := &karpv1.NodeClaim{}
	err := r.spoke.Get(ctx, client.ObjectKey{Name: name}, nodeClaim)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, spokeProblem(err, "reading NodeClaim "+name)
	}
	return nodeClaim, nil
}

// chain follows the references from the entry.
func (r *reading) chain(ctx context.Context) error {
	if pod := r.s.Pod; pod != nil {
		r.s.PodEvents = of(pod, r.s.PodEvents)
		if err := r.fromPod(ctx, pod); err != nil {
			return err
		}
	}
	if r.machineName != "" {
		if err := r.fromMachine(ctx); err != nil {
			return err
		}
	}
	if r.nodeName != "" && r.s.Node == nil {
		if err := r.readNode(ctx); err != nil {
			return err
		}
	}
	if node := r.s.Node; node != nil {
		r.machineName = cmp.Or(r.machineName, node.Annotations[explain.MachineAnnotation])
		for _, owner := range node.OwnerReferences {
			if owner.Kind == "NodeClaim" {
				r.nodeClaimName = cmp.Or(r.nodeClaimName, owner.Name)
			}
		}
	}
	if r.nodeClaimName == "" && r.s.NodeClaim == nil && r.s.Entry != explain.Machine && r.machineName != "" {
		// Nodes have an owner only once they are registered. If the Machine cannot be read, the
		// output has everything else.
		_, _ = r.followMachine(ctx)
	}
	if r.nodeClaimName != "" && r.s.NodeClaim == nil && r.s.Gone == "" {
		nodeClaim, err := r.nodeClaim(ctx, r.nodeClaimName)
		if err != nil {
			return err
		}
		if r.s.NodeClaim = nodeClaim; nodeClaim == nil {
			r.s.Gone = r.nodeClaimName
		}
	}
	return r.rest(ctx)
}

func (r *reading) fromPod(ctx context.Context, pod *corev1.Pod) error {
	if pod.Spec.NodeName != "" {
		r.nodeName = pod.Spec.NodeName
		return nil
	}
	if plan, ok := explain.PlanOf(r.s.PodEvents); ok {
		r.nodeName, r.nodeClaimName = plan.Node, plan.NodeClaim
		return nil
	}
	if !explain.NeedsNode(pod) {
		return nil
	}
	list := &karpv1.NodeClaimList{}
	if err := r.spoke.List(ctx, list); err != nil {
		return spokeProblem(err, "reading the NodeClaims")
	}
	for i := range list.Items {
		nodeClaim := &list.Items[i]
		if nodeClaim.DeletionTimestamp.IsZero() && !nodeClaim.StatusConditions().IsTrue(karpv1.ConditionTypeInitialized) {
			r.s.OnTheWay = append(r.s.OnTheWay, nodeClaim.Name)
		}
	}
	return nil
}

// fromMachine reads the Machine that the user named, and what it refers to.
func (r *reading) fromMachine(ctx context.Context) error {
	machine, err := r.followMachine(ctx)
	if err != nil {
		return err
	}
	if machine == nil {
		return problem(fmt.Errorf("the agent reports no Machine %s in a node group of the Cluster", r.machineName),
			"Only MachineDeployments with the label node.cluster.x-k8s.io/karpenter-member are node groups: kubectl capi groups.")
	}
	r.nodeName = machine.GetNodeName()
	return nil
}

// followMachine reads a Machine, its claim, and which NodeClaim that is of. It returns nil if there
// is none, and an error if neither the agent nor the hub could be asked.
func (r *reading) followMachine(ctx context.Context) (*agentv1alpha1.Machine, error) {
	if machine := r.machine(ctx, r.machineName); machine != nil {
		r.s.Agent.Machine = machine
	}
	machine := r.s.Agent.Machine
	if r.s.Agent.Err != nil {
		hub, cluster, err := r.hub(ctx)
		if err != nil {
			return nil, cmp.Or(r.s.Agent.Err, err)
		}
		if machine, err = hub.machine(ctx, cluster, r.machineName); err != nil {
			return nil, err
		}
		r.s.Hub.Machine = machine
	}
	if machine.GetClaimId() == "" {
		return machine, nil
	}
	claim := r.claim(ctx, machine.GetClaimId())
	r.s.Agent.Claim = claim
	if claim.GetHolder() == v1alpha1.Holder {
		r.nodeClaimName = claim.GetDisplayName()
	}
	return machine, nil
}

// machine asks the agent for a Machine. It returns nil if there is none, or if the agent cannot be
// asked.
func (r *reading) machine(ctx context.Context, name string) *agentv1alpha1.Machine {
	if r.s.Agent.Err != nil || name == "" {
		return nil
	}
	response, err := r.agent.Machines.GetMachine(ctx, &agentv1alpha1.GetMachineRequest{Cluster: r.agent.Cluster, Name: name})
	if err != nil && !agenterrors.IsNotFound(err) {
		r.lost(agentProblem(err, r.agent))
	}
	return response.GetMachine()
}

// claim asks the agent for a claim. It returns nil if there is none, or if the agent cannot be
// asked.
func (r *reading) claim(ctx context.Context, id string) *agentv1alpha1.Claim {
	if r.s.Agent.Err != nil || id == "" {
		return nil
	}
	response, err := r.agent.Claims.GetClaim(ctx, &agentv1alpha1.GetClaimRequest{Cluster: r.agent.Cluster, ClaimId: id})
	if err != nil && !agenterrors.IsNotFound(err) {
		r.lost(agentProblem(err, r.agent))
	}
	return response.GetClaim()
}

// lastClaimOf returns the newest claim of a NodeClaim that is gone, or nil.
func (r *reading) lastClaimOf(ctx context.Context, nodeClaim string) *agentv1alpha1.Claim {
	if r.s.Agent.Err != nil {
		return nil
	}
	response, err := r.agent.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: r.agent.Cluster, IncludeEnded: true})
	if err != nil {
		r.lost(agentProblem(err, r.agent))
		return nil
	}
	of := lo.Filter(response.GetClaims(), func(c *agentv1alpha1.Claim, _ int) bool { return c.GetDisplayName() == nodeClaim })
	return lo.LastOrEmpty(of)
}

func (r *reading) readNode(ctx context.Context) error {
	node := &corev1.Node{}
	err := r.spoke.Get(ctx, client.ObjectKey{Name: r.nodeName}, node)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return spokeProblem(err, "reading Node "+r.nodeName)
	}
	r.s.Node = node
	return nil
}

// rest reads everything that nothing else depends on.
func (r *reading) rest(ctx context.Context) error {
	group, last := errgroup.WithContext(ctx)
	nodeClaim, hasNode := r.s.NodeClaim, r.s.Node != nil
	if nodeClaim != nil {
		group.Go(func() error {
			list, err := r.events(last, "NodeClaim", corev1.NamespaceDefault, nodeClaim.Name) // where those of cluster-wide objects are
			r.s.NodeClaimEvents = of(nodeClaim, list)
			return err
		})
		if r.s.Pod == nil && nodeClaim.Status.NodeName == "" {
			group.Go(func() error { return r.plannedPods(last, nodeClaim.Name) })
		}
		if !hasNode && nodeClaim.Status.NodeName != "" {
			r.nodeName = nodeClaim.Status.NodeName
			group.Go(func() error {
				if err := r.readNode(last); err != nil {
					return err
				}
				return r.countPods(last)
			})
		}
	}
	if hasNode && r.s.Pod == nil {
		r.nodeName = r.s.Node.Name
		group.Go(func() error { return r.countPods(last) })
	}
	group.Go(func() error { return r.fromAgent(last) })
	if err := group.Wait(); err != nil {
		return err
	}
	if joined := r.s.Agent.Claim.GetMachine().GetNodeName(); r.s.Node == nil && joined != "" { // not registered
		r.nodeName = joined
		if err := r.readNode(ctx); err != nil {
			return err
		}
	}
	if r.access.hasHub() {
		r.fromHub(ctx)
	}
	return nil
}

func (r *reading) fromAgent(ctx context.Context) error {
	switch {
	case r.s.Agent.Claim != nil:
	case r.s.NodeClaim != nil:
		r.s.Agent.Claim = r.claim(ctx, string(r.s.NodeClaim.UID))
	case r.s.Gone != "":
		r.s.Agent.Claim = r.lastClaimOf(ctx, r.s.Gone)
		if r.s.Agent.Claim == nil && r.s.Entry == explain.NodeClaim && r.s.Agent.Err == nil {
			return fmt.Errorf("there is no NodeClaim %s, and the agent has no claim of it", r.s.Gone)
		}
	}
	if r.s.Agent.Claim.GetMachine() == nil && r.s.Agent.Machine == nil && r.machineName != "" {
		r.s.Agent.Machine = r.machine(ctx, r.machineName)
	}
	return nil
}

// plannedPods finds the pods that Karpenter planned for a NodeClaim.
func (r *reading) plannedPods(ctx context.Context, nodeClaim string) error {
	list := &corev1.EventList{}
	selector := fields.Set{"involvedObject.kind": "Pod", "reason": events.Nominated}.AsSelector()
	if err := r.spoke.List(ctx, list, client.MatchingFieldsSelector{Selector: selector}); err != nil {
		return spokeProblem(err, "reading the events of pods")
	}
	for i := range list.Items {
		event := &list.Items[i]
		if plan, ok := explain.PlanOf([]corev1.Event{*event}); ok && plan.NodeClaim == nodeClaim {
			r.s.Planned = append(r.s.Planned, event.InvolvedObject.Namespace+"/"+event.InvolvedObject.Name)
		}
	}
	slices.Sort(r.s.Planned)
	r.s.Planned = slices.Compact(r.s.Planned)
	return nil
}

// countPods counts the pods on the Node that have not ended.
func (r *reading) countPods(ctx context.Context) error {
	list := &corev1.PodList{}
	selector := fields.Set{"spec.nodeName": r.nodeName}.AsSelector()
	if err := r.spoke.List(ctx, list, client.MatchingFieldsSelector{Selector: selector}); err != nil {
		return spokeProblem(err, "reading the pods of Node "+r.nodeName)
	}
	r.s.Running = lo.CountBy(list.Items, func(p corev1.Pod) bool {
		return p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
	})
	return nil
}

// hub returns the management cluster's reader and the Cluster in it.
func (r *reading) hub(ctx context.Context) (*hub, *agentv1alpha1.ClusterRef, error) {
	kube, err := r.access.Hub()
	if err != nil {
		return nil, nil, err
	}
	cluster := r.access.HubCluster(ctx)
	if r.agent != nil {
		cluster = r.agent.Cluster
	}
	if cluster == nil {
		return nil, nil, problem(errors.New("the spoke's Cluster is not known"), "Name it: --cluster=<namespace>/<name>.")
	}
	return &hub{kube: kube}, cluster, nil
}

// fromHub reads what the management cluster's objects say. An error is part of the situation.
func (r *reading) fromHub(ctx context.Context) {
	r.s.Hub.Asked = true
	hub, cluster, err := r.hub(ctx)
	if err != nil {
		r.s.Hub.Err = err
		return
	}
	claim, machine := r.s.Agent.Claim, r.s.Agent.Machine
	if r.s.Agent.Err != nil && r.s.NodeClaim != nil {
		if r.s.Hub.Claim, err = hub.claim(ctx, cluster, string(r.s.NodeClaim.UID)); err != nil {
			r.s.Hub.Err = err
			return
		}
		claim = r.s.Hub.Claim
	}
	name := cmp.Or(claim.GetMachine().GetName(), machine.GetName(), r.machineName)
	if r.s.Agent.Err != nil && name != "" && r.s.Hub.Machine == nil {
		if r.s.Hub.Machine, err = hub.machine(ctx, cluster, name); err != nil {
			r.s.Hub.Err = err
			return
		}
		machine = r.s.Hub.Machine
	}
	if id := machine.GetClaimId(); r.s.Agent.Err != nil && r.s.Hub.Claim == nil && id != "" {
		if r.s.Hub.Claim, err = hub.claim(ctx, cluster, id); err != nil {
			r.s.Hub.Err = err
			return
		}
		claim = r.s.Hub.Claim
	}
	_, group, _ := strings.Cut(cmp.Or(claim.GetNodeGroupId(), machine.GetNodeGroupId()), "/")
	r.s.Hub.Notes, r.s.Hub.Err = hub.notes(ctx, cluster.GetNamespace(), name, group)
}
