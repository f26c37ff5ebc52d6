package adoption

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/samber/lo"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

// Plan is what the shim would do about machines that were there before it, if it began now. Nothing is written to make it.
type Plan struct {
	// NodeClaims are those without a claim whose machine would be adopted.
	NodeClaims []Adoption `json:"nodeClaims"`
	// Nodes are those without a NodeClaim that would get one, as their node class asks.
	Nodes []Adoption `json:"nodes"`
	// InTheWay is what would not be adopted although it should be, and why.
	InTheWay []Obstacle `json:"inTheWay"`
	// Unfinished are NodeClaims that the other provider has not launched, or that are being deleted: what becomes of each.
	Unfinished []Obstacle `json:"unfinished"`
	// Left are machines of node groups that would stay the user's: no NodeClaim has them, and no node class asks for them.
	Left []Leftover `json:"left"`
	// Raised are the node groups whose replicas the adoption of NodeClaims would raise, as their user is to keep the min size.
	Raised []Raise `json:"raised"`
	// Disrupted is how many Nodes Karpenter would replace right after the switch: the drifted ones whose node class allows the disruption of
	// adopted Nodes.
	Disrupted int `json:"disrupted"`
	// Drifted are adopted Nodes that Karpenter would replace as soon as their disruption is allowed, and why.
	Drifted []Obstacle `json:"drifted"`
}

// Adoption is one machine that would be adopted.
type Adoption struct {
	NodeClaim string `json:"nodeClaim"`
	Node      string `json:"node,omitempty"`
	Machine   string `json:"machine"`
	NodeGroup string `json:"nodeGroup"`
	NodePool  string `json:"nodePool,omitempty"`
}

// Obstacle is an object and what is said of it.
type Obstacle struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Message string `json:"message"`
}

// Leftover is a machine that nobody's NodeClaim has.
type Leftover struct {
	Machine   string `json:"machine"`
	Node      string `json:"node,omitempty"`
	NodeGroup string `json:"nodeGroup"`
	Message   string `json:"message"`
}

// Raise says by how many machines a node group would grow.
type Raise struct {
	NodeGroup string `json:"nodeGroup"`
	By        int    `json:"by"`
	Message   string `json:"message"`
}

// Planner makes a [Plan]. Every field is REQUIRED.
type Planner struct {
	// Kube reads the workload cluster from its API server.
	Kube client.Reader
	// CloudProvider says which NodeClaims are this provider's; Provider describes node groups.
	CloudProvider cloudprovider.CloudProvider
	Provider      Provider
	// Catalogue has heard of the agent: it has a snapshot.
	Catalogue Catalogue
	Agent     *agentclient.Client
	Cluster   *agentv1alpha1.ClusterRef
}

// situation is what a plan is made from.
type situation struct {
	nodeClaims []karpv1.NodeClaim
	nodes      map[string]*corev1.Node // by provider ID
	pools      []karpv1.NodePool
	classes    []v1alpha1.ClusterAPINodeClass
	machines   []*agentv1alpha1.Machine
	groups     map[string]*agentv1alpha1.NodeGroup
	sharing    map[string][]*karpv1.NodeClaim // by provider ID
	claimed    map[string]bool                // ids of live claims
}

// Plan reads all there is and says what would be done.
func (p *Planner) Plan(ctx context.Context) (*Plan, error) {
	s, err := p.read(ctx)
	if err != nil {
		return nil, err
	}
	plan := &Plan{
		NodeClaims: []Adoption{}, Nodes: []Adoption{}, InTheWay: []Obstacle{}, Unfinished: []Obstacle{}, Left: []Leftover{}, Raised: []Raise{},
		Drifted: []Obstacle{},
	}
	had := p.planNodeClaims(ctx, s, plan)
	p.planMachines(ctx, s, plan, had)
	s.planRaises(plan)
	return plan, nil
}

func (p *Planner) read(ctx context.Context) (*situation, error) {
	s := &situation{nodes: map[string]*corev1.Node{}, groups: map[string]*agentv1alpha1.NodeGroup{}, claimed: map[string]bool{}}
	nodeClaims, nodes, pools, classes := &karpv1.NodeClaimList{}, &corev1.NodeList{}, &karpv1.NodePoolList{}, &v1alpha1.ClusterAPINodeClassList{}
	for _, list := range []client.ObjectList{nodeClaims, nodes, pools, classes} {
		if err := p.Kube.List(ctx, list); err != nil {
			return nil, fmt.Errorf("reading the workload cluster: %w", err)
		}
	}
	s.nodeClaims = lo.Filter(nodeClaims.Items, func(nc karpv1.NodeClaim, _ int) bool { return nodeclaimutils.IsManaged(&nc, p.CloudProvider) })
	s.sharing = lo.GroupBy(lo.ToSlicePtr(s.nodeClaims), func(nc *karpv1.NodeClaim) string { return nc.Status.ProviderID })
	s.pools, s.classes = pools.Items, classes.Items
	for i := range nodes.Items {
		if id := nodes.Items[i].Spec.ProviderID; id != "" {
			s.nodes[id] = &nodes.Items[i]
		}
	}
	machines, err := p.Agent.Machines.ListMachines(ctx, &agentv1alpha1.ListMachinesRequest{Cluster: p.Cluster})
	if err != nil {
		return nil, fmt.Errorf("listing the machines: %w", err)
	}
	claims, err := p.Agent.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: p.Cluster})
	if err != nil {
		return nil, fmt.Errorf("listing the claims: %w", err)
	}
	groups, err := p.Agent.NodeGroups.ListNodeGroups(ctx, &agentv1alpha1.ListNodeGroupsRequest{Cluster: p.Cluster})
	if err != nil {
		return nil, fmt.Errorf("listing the node groups: %w", err)
	}
	s.machines = machines.GetMachines()
	for _, group := range groups.GetNodeGroups() {
		s.groups[group.GetId()] = group
	}
	for _, claim := range claims.GetClaims() {
		s.claimed[claim.GetClaimId()] = true
	}
	return s, nil
}

// planNodeClaims plans for the NodeClaims without a claim. It returns the machines that NodeClaims have, by name.
func (p *Planner) planNodeClaims(ctx context.Context, s *situation, plan *Plan) map[string]bool {
	byID := lo.KeyBy(lo.Filter(s.machines, func(m *agentv1alpha1.Machine, _ int) bool { return m.GetProviderId() != "" }),
		(*agentv1alpha1.Machine).GetProviderId)
	byName := lo.KeyBy(s.machines, (*agentv1alpha1.Machine).GetName)
	had := map[string]bool{}
	for i := range s.nodeClaims {
		nc := &s.nodeClaims[i]
		say := func(to *[]Obstacle, format string, args ...any) {
			*to = append(*to, Obstacle{Kind: "NodeClaim", Name: nc.Name, Message: fmt.Sprintf(format, args...)})
		}
		if s.claimed[string(nc.UID)] {
			continue
		}
		if !nc.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue() {
			_, name, _ := strings.Cut(nc.Annotations[v1alpha1.PeerMachineAnnotation], "/")
			if m := byName[name]; m != nil && m.GetClaimId() == "" && m.GetDeletedAt() == nil {
				had[name] = true
				say(&plan.Unfinished, "was not launched; it adopts machine %s, which was chosen for it", name)
			} else {
				say(&plan.Unfinished, "was not launched; it claims a machine like a new one")
			}
			continue
		}
		machine := byID[nc.Status.ProviderID]
		switch {
		case nc.Status.ProviderID == "" || placeholder.Is(nc.Status.ProviderID) || machine == nil:
			say(&plan.InTheWay, "has provider ID %q, which no machine of the Cluster has; Karpenter ends it once its Node is not Ready", nc.Status.ProviderID)
			continue
		case !nc.DeletionTimestamp.IsZero():
			had[machine.GetName()] = true
			say(&plan.Unfinished, "is being deleted; its machine %s goes with it", machine.GetName())
			continue
		case machine.GetDeletedAt() != nil:
			had[machine.GetName()] = true
			say(&plan.Unfinished, "its machine %s is being deleted", machine.GetName())
			continue
		}
		had[machine.GetName()] = true
		node := s.nodes[nc.Status.ProviderID]
		if rightful := rightfulOf(s.sharing[nc.Status.ProviderID], node); rightful.UID != nc.UID {
			say(&plan.InTheWay, "has the same provider ID as NodeClaim %s, which has machine %s", rightful.Name, machine.GetName())
			continue
		}
		if machine.GetClaimId() != "" {
			say(&plan.InTheWay, "its machine %s has claim %s", machine.GetName(), machine.GetClaimId())
			continue
		}
		if err := allowed(ctx, p.Agent, p.Cluster, machine, false); err != nil {
			say(&plan.InTheWay, "its machine %s cannot be adopted: %s", machine.GetName(), status.Convert(err).Message())
			continue
		}
		plan.NodeClaims = append(plan.NodeClaims, adoptionOf(nc, node, machine))
		if why := p.drifts(s, nc, node, machine); why != "" {
			say(&plan.Drifted, "%s", why)
			plan.Disrupted += lo.Ternary(s.allowsDisruption(nc), 1, 0)
		}
	}
	return had
}

func adoptionOf(nc *karpv1.NodeClaim, node *corev1.Node, machine *agentv1alpha1.Machine) Adoption {
	a := Adoption{
		NodeClaim: nc.Name, Machine: machine.GetName(), NodeGroup: machine.GetNodeGroupId(), NodePool: nc.Labels[karpv1.NodePoolLabelKey],
	}
	if node != nil {
		a.Node = node.Name
	}
	return a
}

// allowsDisruption reports whether the NodeClaim's node class lets Karpenter disrupt adopted Nodes.
func (s *situation) allowsDisruption(nc *karpv1.NodeClaim) bool {
	return lo.ContainsBy(s.classes, func(class v1alpha1.ClusterAPINodeClass) bool {
		return class.Name == nc.Spec.NodeClassRef.Name && class.Spec.Adoption.Disruption == v1alpha1.DisruptAllowed
	})
}

// drifts says why core would replace the Node of an adopted NodeClaim; "" when it would not.
func (p *Planner) drifts(s *situation, nc *karpv1.NodeClaim, node *corev1.Node, machine *agentv1alpha1.Machine) string {
	if nc.StatusConditions().Get(karpv1.ConditionTypeDrifted).IsTrue() {
		return "has drifted already: " + nc.StatusConditions().Get(karpv1.ConditionTypeDrifted).Reason
	}
	described := p.Provider.Describe(nc.Spec.NodeClassRef.Name, &agentv1alpha1.Claim{NodeGroupId: machine.GetNodeGroupId(), Machine: machine})
	if described == nil {
		return fmt.Sprintf("node group %s is not one of its node class's, or cannot be described to Karpenter", machine.GetNodeGroupId())
	}
	pool, ok := lo.Find(s.pools, func(pool karpv1.NodePool) bool { return pool.Name == nc.Labels[karpv1.NodePoolLabelKey] })
	if !ok {
		return ""
	}
	labels := lo.Assign(nc.Labels, facts(described.Labels, node))
	requirements := scheduling.NewNodeSelectorRequirementsWithMinValues(pool.Spec.Template.Spec.Requirements...)
	if err := scheduling.NewLabelRequirements(labels).Compatible(requirements); err != nil {
		return fmt.Sprintf("does not meet the requirements of NodePool %s: %s", pool.Name, err)
	}
	for _, key := range []string{corev1.LabelInstanceTypeStable, corev1.LabelTopologyZone} {
		if want, is := described.Labels[key], labels[key]; is != want {
			return fmt.Sprintf("its Node has the label %s=%s, and machines of node group %s have %q; correct the node group's description",
				key, is, machine.GetNodeGroupId(), want)
		}
	}
	return ""
}

// planMachines plans for the machines that no NodeClaim has.
func (p *Planner) planMachines(ctx context.Context, s *situation, plan *Plan, had map[string]bool) {
	snapshot := p.Catalogue.Snapshot()
	taken := map[string]int{} // by node group: machines of the user's
	for _, machine := range s.machines {
		group, known := s.groups[machine.GetNodeGroupId()]
		if machine.GetClaimId() != "" || machine.GetDeletedAt() != nil || had[machine.GetName()] || !known {
			continue
		}
		node := s.nodes[machine.GetProviderId()]
		if machine.GetProviderId() == "" || node == nil {
			plan.Left = append(plan.Left, leftover(machine, node, "its Node has not joined"))
			continue
		}
		requested := node.Annotations[v1alpha1.AdoptAnnotation] == yes
		classes := lo.Filter(s.classes, func(class v1alpha1.ClusterAPINodeClass, _ int) bool { return wants(&class, requested) })
		_, nodeClaim, err := propose(snapshot, p.Provider, s.pools, node, machine, classes)
		switch {
		case err != nil:
			plan.InTheWay = append(plan.InTheWay, Obstacle{Kind: "Node", Name: node.Name, Message: strings.ReplaceAll(err.Error(), "\n", "; ")})
			continue
		case nodeClaim == nil:
			plan.Left = append(plan.Left, leftover(machine, node, whyLeft(node)))
			continue
		case int(group.GetFloorReplicas())-taken[group.GetId()] <= int(group.GetMinSize()):
			plan.Left = append(plan.Left, leftover(machine, node, fmt.Sprintf("the user keeps the min size %d", group.GetMinSize())))
			continue
		}
		if err := allowed(ctx, p.Agent, p.Cluster, machine, true); err != nil {
			plan.InTheWay = append(plan.InTheWay, Obstacle{Kind: "Node", Name: node.Name, Message: status.Convert(err).Message()})
			continue
		}
		taken[group.GetId()]++
		plan.Nodes = append(plan.Nodes, adoptionOf(nodeClaim, node, machine))
	}
}

func leftover(machine *agentv1alpha1.Machine, node *corev1.Node, message string) Leftover {
	l := Leftover{Machine: machine.GetName(), NodeGroup: machine.GetNodeGroupId(), Message: message}
	if node != nil {
		l.Node = node.Name
	}
	return l
}

// whyLeft says what to do about a machine that no NodeClaim has.
func whyLeft(node *corev1.Node) string {
	if _, peers := node.Labels[v1alpha1.PeerMemberLabel]; peers {
		return "the other provider claimed it, and no NodeClaim has it: lower the replicas by one to be rid of it, or have it adopted " +
			"(spec.adoption of the node class)"
	}
	return "no NodeClaim has it: it stays the user's, unless spec.adoption of the node class says otherwise"
}

// planRaises finds the node groups whose users have fewer machines, beyond the min size, than NodeClaims are to adopt.
func (s *situation) planRaises(plan *Plan) {
	wanted := lo.CountValuesBy(plan.NodeClaims, func(a Adoption) string { return a.NodeGroup })
	alone := lo.CountValuesBy(plan.Nodes, func(a Adoption) string { return a.NodeGroup })
	claims := map[string]int{}
	for _, m := range s.machines {
		if m.GetClaimId() != "" {
			claims[m.GetNodeGroupId()]++
		}
	}
	for _, id := range slices.Sorted(maps.Keys(wanted)) {
		group := s.groups[id]
		// What is neither the floor's nor a claim's is spare, and is adopted first.
		spare := max(0, int(group.GetReplicas())-int(group.GetFloorReplicas())-claims[id])
		beyond := max(0, int(group.GetFloorReplicas())-int(group.GetMinSize())-alone[id])
		if by := wanted[id] - spare - beyond; by > 0 {
			plan.Raised = append(plan.Raised, Raise{NodeGroup: id, By: by, Message: fmt.Sprintf(
				"NodeClaims adopt %d machines, and the min size is %d: lower the annotation cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size "+
					"of its MachineDeployment to %d first", wanted[id], group.GetMinSize(), max(0, int(group.GetMinSize())-by))})
		}
	}
}

// Write says the plan to people.
func (p *Plan) Write(to io.Writer) error {
	tabs := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	say := func(format string, args ...any) { _, _ = fmt.Fprintf(tabs, format+"\n", args...) }
	adoptions := func(title string, all []Adoption) {
		say("%s: %d", title, len(all))
		if len(all) > 0 {
			say("  NODECLAIM\tNODE\tMACHINE\tNODE GROUP\tNODEPOOL")
		}
		for _, a := range all {
			say("  %s\t%s\t%s\t%s\t%s", a.NodeClaim, cmp.Or(a.Node, "-"), a.Machine, a.NodeGroup, cmp.Or(a.NodePool, "-"))
		}
	}
	obstacles := func(title string, all []Obstacle) {
		say("%s: %d", title, len(all))
		for _, o := range all {
			say("  %s %s: %s", o.Kind, o.Name, o.Message)
		}
	}
	adoptions("NodeClaims whose machine is adopted", p.NodeClaims)
	adoptions("Nodes that get a NodeClaim", p.Nodes)
	obstacles("NodeClaims that are not finished", p.Unfinished)
	obstacles("In the way", p.InTheWay)
	say("Machines that stay the user's: %d", len(p.Left))
	for _, l := range p.Left {
		say("  %s (%s): %s", l.Machine, l.NodeGroup, l.Message)
	}
	say("Node groups whose replicas are raised: %d", len(p.Raised))
	for _, r := range p.Raised {
		say("  %s by %d: %s", r.NodeGroup, r.By, r.Message)
	}
	obstacles("Nodes that Karpenter would replace as soon as their disruption is allowed", p.Drifted)
	say("Nodes whose disruption is allowed already, so that the switch disrupts them: %d", p.Disrupted)
	return tabs.Flush()
}
