package adoption

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/samber/lo"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	karpv1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"
	nodeclaimutils "sigs.k8s.io/karpenter/pkg/utils/nodeclaim"

	agentclient "github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/shim/apis/v1alpha1"
	provider "github.com/karpenter-capi/karpenter-capi/shim/internal/cloudprovider"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/instancetype"
	"github.com/karpenter-capi/karpenter-capi/shim/internal/placeholder"
)

// Plan describes what the shim would do about existing machines if it started now. Making it
// changes nothing.
type Plan struct {
	// NodeClaims are those without a claim whose machine would be adopted.
	NodeClaims []Adoption `json:"nodeClaims"`
	// Nodes are those without a NodeClaim that would get one, as their NodeClass requests.
	Nodes []Adoption `json:"nodes"`
	// InTheWay lists what should be adopted and would not be, and why.
	InTheWay []Finding `json:"inTheWay"`
	// Unfinished lists NodeClaims that the other provider has not launched or that are being
	// deleted, and what happens to each.
	Unfinished []Finding `json:"unfinished"`
	// Left are machines of node groups that would remain the user's: no NodeClaim has them, and no
	// NodeClass requests them.
	Left []Leftover `json:"left"`
	// Raised are the node groups whose replicas the adoption of NodeClaims would raise, because the
	// user keeps the min size.
	Raised []Raise `json:"raised"`
	// Disrupted is the number of Nodes that Karpenter would replace right after the switch: those
	// of Expired, and those of Drifted whose NodeClass allows the disruption of adopted Nodes.
	Disrupted int `json:"disrupted"`
	// Expired are NodeClaims that Karpenter ends as soon as it runs, even if their Nodes are
	// protected.
	Expired []Finding `json:"expired"`
	// Drifted are adopted Nodes that Karpenter would replace as soon as their disruption is
	// allowed, and why.
	Drifted []Finding `json:"drifted"`
}

// Adoption is one machine that would be adopted.
type Adoption struct {
	NodeClaim string `json:"nodeClaim"`
	Node      string `json:"node,omitempty"`
	Machine   string `json:"machine"`
	NodeGroup string `json:"nodeGroup"`
	NodePool  string `json:"nodePool,omitempty"`
}

// Finding is a plan's message about an object.
type Finding struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Message string `json:"message"`
}

// Leftover is a machine without a NodeClaim.
type Leftover struct {
	Machine   string `json:"machine"`
	Node      string `json:"node,omitempty"`
	NodeGroup string `json:"nodeGroup"`
	Message   string `json:"message"`
}

// Raise is the number of machines by which a node group would grow.
type Raise struct {
	NodeGroup string `json:"nodeGroup"`
	By        int    `json:"by"`
	Message   string `json:"message"`
}

// Planner makes a [Plan]. Every field is REQUIRED.
type Planner struct {
	// Kube reads the workload cluster from its API server, and creates objects as dry runs only.
	Kube client.Client
	// CloudProvider determines which NodeClaims belong to this provider; Provider describes node
	// groups.
	CloudProvider cloudprovider.CloudProvider
	Provider      Provider
	// Catalogue must already have a snapshot.
	Catalogue Catalogue
	Agent     *agentclient.Client
	Cluster   *agentv1alpha1.ClusterRef
	Clock     clock.PassiveClock
}

// situation is the input of a plan.
type situation struct {
	nodeClaims []karpv1.NodeClaim
	nodes      map[string]*corev1.Node // by provider ID
	pools      []karpv1.NodePool
	classes    []v1alpha1.ClusterAPINodeClass
	machines   []*agentv1alpha1.Machine
	groups     map[string]*agentv1alpha1.NodeGroup
	sharing    map[string][]*karpv1.NodeClaim // by provider ID
	claimed    map[string]bool                // ids of live claims
	rooms      map[string]*room               // by node group
}

// room is a node group's room for adoptions, in machines, counted as the agent does.
type room struct {
	spare    int // machines of neither the user nor a claim; adopted first
	aboveMin int // the user's machines above the min size
	growth   int // how far replicas may be raised
	wanted   int // adoptions by NodeClaims
	raised   int // how far replicas are raised for these
}

// left reports whether an adoption is possible without raising replicas.
func (r *room) left() bool { return r.spare > 0 || r.aboveMin > 0 }

// take takes room for one adoption without raising replicas, and reports whether there was any.
func (r *room) take() bool {
	switch {
	case r.spare > 0:
		r.spare--
	case r.aboveMin > 0:
		r.aboveMin--
	default:
		return false
	}
	return true
}

// admit is [room.take] for a NodeClaim: it raises replicas if necessary and possible.
func (r *room) admit() bool {
	if !r.take() {
		if r.raised >= r.growth {
			return false
		}
		r.raised++
	}
	r.wanted++
	return true
}

// Plan reads the current state and returns the plan.
func (p *Planner) Plan(ctx context.Context) (*Plan, error) {
	s, err := p.read(ctx)
	if err != nil {
		return nil, err
	}
	plan := &Plan{
		NodeClaims: []Adoption{}, Nodes: []Adoption{}, InTheWay: []Finding{}, Unfinished: []Finding{}, Left: []Leftover{}, Raised: []Raise{},
		Drifted: []Finding{}, Expired: []Finding{},
	}
	had, err := p.planNodeClaims(ctx, s, plan)
	if err != nil {
		return nil, err
	}
	if err := p.planMachines(ctx, s, plan, had); err != nil {
		return nil, err
	}
	s.planRaises(plan)
	return plan, nil
}

func (p *Planner) read(ctx context.Context) (*situation, error) {
	s := &situation{nodes: map[string]*corev1.Node{}, groups: map[string]*agentv1alpha1.NodeGroup{}, claimed: map[string]bool{}}
	nodeClaims, nodes, pools, classes := &karpv1.NodeClaimList{}, &corev1.NodeList{}, &karpv1.NodePoolList{}, &v1alpha1.ClusterAPINodeClassList{}
	for _, list := range []client.ObjectList{nodeClaims, nodes, pools, classes} {
		if err := p.Kube.List(ctx, list); err != nil {
			return nil, fmt.Errorf("reading the spoke: %w", err)
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
	claimsOf := map[string]int{}
	for _, claim := range claims.GetClaims() {
		s.claimed[claim.GetClaimId()] = true
		claimsOf[claim.GetNodeGroupId()]++
	}
	s.rooms = lo.MapValues(s.groups, func(g *agentv1alpha1.NodeGroup, id string) *room {
		replicas, floor := int(g.GetReplicas()), int(g.GetFloorReplicas())
		growth := math.MaxInt
		if g.MaxSize != nil {
			growth = max(0, int(g.GetMaxSize())-replicas)
		}
		return &room{spare: max(0, replicas-floor-claimsOf[id]), aboveMin: max(0, floor-int(g.GetMinSize())), growth: growth}
	})
	return s, nil
}

// planNodeClaims plans for the NodeClaims without a claim. It returns the names of the machines
// that NodeClaims have.
func (p *Planner) planNodeClaims(ctx context.Context, s *situation, plan *Plan) (map[string]bool, error) {
	byID := lo.KeyBy(lo.Filter(s.machines, func(m *agentv1alpha1.Machine, _ int) bool { return m.GetProviderId() != "" }),
		(*agentv1alpha1.Machine).GetProviderId)
	had := map[string]bool{}
	for i := range s.nodeClaims {
		nc := &s.nodeClaims[i]
		if s.claimed[string(nc.UID)] {
			continue
		}
		say := func(to *[]Finding, format string, args ...any) {
			*to = append(*to, Finding{Kind: "NodeClaim", Name: nc.Name, Message: fmt.Sprintf(format, args...)})
		}
		if !nc.StatusConditions().Get(karpv1.ConditionTypeLaunched).IsTrue() {
			if err := p.planUnlaunched(ctx, s, plan, nc, had); err != nil {
				return nil, err
			}
			continue
		}
		if ends := nc.Spec.ExpireAfter.Duration; ends != nil && nc.DeletionTimestamp.IsZero() {
			if at := nc.CreationTimestamp.Add(*ends); !p.Clock.Now().Before(at) {
				say(&plan.Expired, "has expired at %s (spec.expireAfter)", at.UTC().Format(time.RFC3339))
				plan.Disrupted++
			}
		}
		machine, id := byID[nc.Status.ProviderID], nc.Status.ProviderID
		switch {
		case id == "" || placeholder.Is(id):
			say(&plan.InTheWay, "has no claim, and no machine has its provider ID %q; Karpenter deletes it", id)
			continue
		case machine == nil:
			say(&plan.InTheWay, "the agent reports no machine with its provider ID %s in this Cluster; label the MachineDeployment of that machine with %s, "+
				"or, if the machine is gone or of another Cluster, annotate the NodeClaim with %s=true to end it",
				id, v1alpha1.PeerMemberLabel, v1alpha1.ReturnMachineAnnotation)
			continue
		}
		had[machine.GetName()] = true
		node := s.nodes[id]
		rightful := rightfulOf(s.sharing[id], node)
		going := !nc.DeletionTimestamp.IsZero()
		switch {
		case machine.GetDeletedAt() != nil:
			say(&plan.Unfinished, "its machine %s is being deleted", machine.GetName())
			continue
		case rightful.UID != nc.UID && going:
			say(&plan.Unfinished, "is being deleted; its machine %s also belongs to NodeClaim %s, and stays", machine.GetName(), rightful.Name)
			continue
		case rightful.UID != nc.UID:
			say(&plan.InTheWay, "has the same provider ID as NodeClaim %s, which has machine %s", rightful.Name, machine.GetName())
			continue
		case machine.GetClaimId() != "":
			say(&plan.InTheWay, "its machine %s has claim %s", machine.GetName(), machine.GetClaimId())
			continue
		}
		refusal, err := p.refusal(ctx, s, machine, false)
		switch {
		case err != nil:
			return nil, err
		case refusal != "":
			say(&plan.InTheWay, "its machine %s cannot be adopted: %s", machine.GetName(), refusal)
			continue
		case going:
			say(&plan.Unfinished, "is being deleted; its machine %s is deleted with it", machine.GetName())
			continue
		}
		plan.NodeClaims = append(plan.NodeClaims, adoptionOf(nc, node, machine))
		if why := p.drifts(s, nc, node, machine); why != "" {
			say(&plan.Drifted, "%s", why)
			plan.Disrupted += lo.Ternary(s.allowsDisruption(nc), 1, 0)
		}
	}
	return had, nil
}

// planUnlaunched plans for a NodeClaim that core has not launched. It adds the machine that the
// NodeClaim adopts to had.
func (p *Planner) planUnlaunched(ctx context.Context, s *situation, plan *Plan, nc *karpv1.NodeClaim, had map[string]bool) error {
	say := func(to *[]Finding, format string, args ...any) {
		*to = append(*to, Finding{Kind: "NodeClaim", Name: nc.Name, Message: fmt.Sprintf(format, args...)})
	}
	name, ours := machineOf(nc, p.Cluster.GetNamespace())
	machine, found := lo.Find(s.machines, func(m *agentv1alpha1.Machine) bool { return m.GetName() == name })
	free := found && machine.GetClaimId() == "" && machine.GetDeletedAt() == nil && !had[name] &&
		(machine.GetProviderId() == "" || len(s.sharing[machine.GetProviderId()]) == 0)
	switch {
	case !nc.DeletionTimestamp.IsZero() && free:
		say(&plan.Unfinished, "is being deleted and was never launched; machine %s, which was chosen for it, stays the user's", name)
	case !nc.DeletionTimestamp.IsZero():
		say(&plan.Unfinished, "is being deleted and was never launched")
	case !free && ours:
		say(&plan.Unfinished, "was created to adopt machine %s, which is gone or claimed; Karpenter deletes it", name)
	case !free:
		say(&plan.Unfinished, "was not launched; it claims a machine like a new one")
	default:
		had[name] = true
		refusal, err := p.refusal(ctx, s, machine, ours)
		switch {
		case err != nil:
			return err
		case refusal != "":
			say(&plan.InTheWay, "was not launched, and machine %s, which was chosen for it, cannot be adopted: %s", name, refusal)
		default:
			say(&plan.Unfinished, "was not launched; it adopts machine %s, which was chosen for it", name)
		}
	}
	return nil
}

// refusal returns why a NodeClaim could not adopt the machine. If it could, refusal takes the room
// for it and returns "".
func (p *Planner) refusal(ctx context.Context, s *situation, machine *agentv1alpha1.Machine, aboveMinSize bool) (string, error) {
	group, known := s.groups[machine.GetNodeGroupId()]
	if !known {
		return "it belongs to no node group", nil
	}
	refusal, err := p.refused(ctx, machine, aboveMinSize)
	if err != nil || refusal != "" {
		return refusal, err
	}
	room := s.rooms[group.GetId()]
	switch {
	case aboveMinSize && !room.take():
		return keepsMinSize(group), nil
	case !aboveMinSize && !room.admit():
		return fmt.Sprintf("%s of node group %s, whose replicas cannot be raised above the max size %d; lower the annotation %s",
			keepsMinSize(group), group.GetId(), group.GetMaxSize(), minSizeAnnotation), nil
	}
	return "", nil
}

func keepsMinSize(group *agentv1alpha1.NodeGroup) string {
	return fmt.Sprintf("the user keeps the min size %d", group.GetMinSize())
}

// refused returns why the agent would refuse to adopt the machine now, or "" if it would not. An
// error means that this is not known.
func (p *Planner) refused(ctx context.Context, machine *agentv1alpha1.Machine, aboveMinSize bool) (string, error) {
	err := allowed(ctx, p.Agent, p.Cluster, machine, aboveMinSize)
	switch {
	case err == nil:
		return "", nil
	case provider.IsAdoptionRefused(err):
		return status.Convert(err).Message(), nil
	}
	return "", fmt.Errorf("asking whether machine %s could be adopted: %w", machine.GetName(), err)
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

// allowsDisruption reports whether the NodeClaim's NodeClass lets Karpenter disrupt adopted Nodes.
func (s *situation) allowsDisruption(nc *karpv1.NodeClaim) bool {
	return lo.ContainsBy(s.classes, func(class v1alpha1.ClusterAPINodeClass) bool {
		return class.Name == nc.Spec.NodeClassRef.Name && class.Spec.Adoption.Disruption == v1alpha1.DisruptAllowed
	})
}

// drifts returns why core would replace the Node of an adopted NodeClaim, or "" if it would not.
func (p *Planner) drifts(s *situation, nc *karpv1.NodeClaim, node *corev1.Node, machine *agentv1alpha1.Machine) string {
	if nc.StatusConditions().Get(karpv1.ConditionTypeDrifted).IsTrue() {
		return "has drifted already: " + nc.StatusConditions().Get(karpv1.ConditionTypeDrifted).Reason
	}
	described := p.Provider.Describe(nc.Spec.NodeClassRef.Name, &agentv1alpha1.Claim{NodeGroupId: machine.GetNodeGroupId(), Machine: machine})
	if described == nil {
		return fmt.Sprintf("node group %s is not one of its NodeClass's, or cannot be described to Karpenter", machine.GetNodeGroupId())
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
	keys := []string{corev1.LabelInstanceTypeStable}
	// The zones of a node group without a zone are learned from its Nodes.
	if group, ok := p.Catalogue.Snapshot().Group(machine.GetNodeGroupId()); ok && group.Zone != instancetype.ZoneNone {
		keys = append(keys, corev1.LabelTopologyZone)
	}
	for _, key := range keys {
		if want, is := described.Labels[key], labels[key]; is != want {
			return fmt.Sprintf("its Node has the label %s=%s, and machines of node group %s have %q; correct the node group's description",
				key, is, machine.GetNodeGroupId(), want)
		}
	}
	return ""
}

// planMachines plans for the machines without a NodeClaim.
func (p *Planner) planMachines(ctx context.Context, s *situation, plan *Plan, had map[string]bool) error {
	snapshot := p.Catalogue.Snapshot()
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
		say := func(to *[]Finding, message string) {
			*to = append(*to, Finding{Kind: "Node", Name: node.Name, Message: strings.ReplaceAll(message, "\n", "; ")})
		}
		requested := node.Annotations[v1alpha1.AdoptAnnotation] == yes
		classes := lo.Filter(s.classes, func(class v1alpha1.ClusterAPINodeClass, _ int) bool { return wants(&class, requested) })
		_, nodeClaim, err := propose(snapshot, p.Provider, s.pools, node, machine, classes)
		switch {
		case err != nil:
			say(&plan.InTheWay, err.Error())
			continue
		case nodeClaim == nil:
			plan.Left = append(plan.Left, leftover(machine, node, whyLeft(node)))
			continue
		case !mayBeAdopted(node) || notReady(node) != "":
			say(&plan.InTheWay, cmp.Or(notReady(node), whyNever(node)))
			continue
		case !s.rooms[group.GetId()].left():
			plan.Left = append(plan.Left, leftover(machine, node, keepsMinSize(group)))
			continue
		}
		refusal, err := p.refused(ctx, machine, true)
		if err != nil {
			return err
		}
		if refusal != "" {
			say(&plan.InTheWay, refusal)
			continue
		}
		switch err := wouldBeCreated(ctx, p.Kube, nodeClaim); {
		case lacksRight(err):
			return fmt.Errorf("the plan needs the right to create NodeClaims, which it only does as dry runs: %w", err)
		case isRefused(err):
			say(&plan.InTheWay, err.Error())
			continue
		case client.IgnoreAlreadyExists(err) != nil:
			return fmt.Errorf("planning for Node %s: %w", node.Name, err)
		}
		s.rooms[group.GetId()].take()
		plan.Nodes = append(plan.Nodes, adoptionOf(nodeClaim, node, machine))
		if why := p.drifts(s, nodeClaim, node, machine); why != "" {
			say(&plan.Drifted, why)
			plan.Disrupted += lo.Ternary(s.allowsDisruption(nodeClaim), 1, 0)
		}
	}
	return nil
}

// whyNever returns why [Nodes] ignores a Node that is Ready.
func whyNever(node *corev1.Node) string {
	if !node.DeletionTimestamp.IsZero() {
		return "is being deleted"
	}
	return fmt.Sprintf("has the label %[1]s=%[2]s, but no NodeClaim; remove the label to have it adopted (kubectl label node %[3]s %[1]s-)",
		karpv1.NodePoolLabelKey, node.Labels[karpv1.NodePoolLabelKey], node.Name)
}

func leftover(machine *agentv1alpha1.Machine, node *corev1.Node, message string) Leftover {
	l := Leftover{Machine: machine.GetName(), NodeGroup: machine.GetNodeGroupId(), Message: message}
	if node != nil {
		l.Node = node.Name
	}
	return l
}

// whyLeft returns what to do about a machine that no NodeClaim has and that no NodeClass requests.
func whyLeft(node *corev1.Node) string {
	adopt := "spec.adoption of the NodeClass"
	if _, has := node.Labels[karpv1.NodePoolLabelKey]; has {
		adopt += fmt.Sprintf(", once its Node no longer has the label %s", karpv1.NodePoolLabelKey)
	}
	if _, peers := node.Labels[v1alpha1.PeerMemberLabel]; peers {
		return fmt.Sprintf("the other provider claimed it, but it has no NodeClaim: to remove it, drain its Node, annotate the Machine with %s, then "+
			"lower the replicas by one; or have it adopted (%s)", deleteMachineAnnotation, adopt)
	}
	return fmt.Sprintf("it has no NodeClaim: it stays the user's, unless it is adopted (%s)", adopt)
}

// Annotations of Cluster API.
const (
	minSizeAnnotation       = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size"
	deleteMachineAnnotation = "cluster.x-k8s.io/delete-machine"
)

// planRaises reports the node groups in which NodeClaims are to adopt more machines than the user
// has above the min size.
func (s *situation) planRaises(plan *Plan) {
	for _, id := range slices.Sorted(maps.Keys(s.rooms)) {
		r, minSize := s.rooms[id], int(s.groups[id].GetMinSize())
		if r.raised == 0 {
			continue
		}
		plan.Raised = append(plan.Raised, Raise{NodeGroup: id, By: r.raised, Message: fmt.Sprintf(
			"NodeClaims adopt %d machines, and the min size is %d: lower the annotation %s of its MachineDeployment to %d first",
			r.wanted, minSize, minSizeAnnotation, max(0, minSize-r.raised))})
	}
}

// Write prints the plan as text.
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
	obstacles := func(title string, all []Finding) {
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
	obstacles("NodeClaims that have expired, so Karpenter replaces their Nodes as soon as it runs", p.Expired)
	say("Nodes that the switch disrupts, because their NodeClaims have expired or their disruption is already allowed: %d", p.Disrupted)
	return tabs.Flush()
}
