package invariants

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	karpenterv1 "sigs.k8s.io/karpenter/pkg/apis/v1"

	agentv1 "github.com/karpenter-capi/karpenter-capi/agent/api/v1alpha1"
)

const (
	// Holder is the holder of the shim's claims. Claims of other holders have no NodeClaim.
	Holder = "karpenter"
	// PlaceholderScheme is the prefix of the provider IDs of NodeClaims whose machine has none yet.
	PlaceholderScheme = "capi-claim://"

	interval = 250 * time.Millisecond
	// readWithin bounds one reading.
	readWithin = 20 * time.Second
)

// Rule identifies the violated rule.
type Rule string

// The rules. I1, I2 and I6 are defined in docs/claims.md, "What always holds".
const (
	OneClaimOneMachine   Rule = "I1: one claim has one Machine and one Machine has one claim"
	OneProviderID        Rule = "I1: no two NodeClaims share a provider ID"
	Accounting           Rule = "I2: replicas = Machines = floor + live claims"
	MaxSize              Rule = "I6: no group is raised above its max size"
	FinalizerOnLive      Rule = "a live Machine does not carry the agent's finalizer"
	NothingInFlight      Rule = "nothing is in flight at rest"
	ClaimHasNodeClaim    Rule = "every live claim has its NodeClaim"
	NodeClaimHasClaim    Rule = "every NodeClaim has its live claim"
	SameProviderID       Rule = "a NodeClaim names its Machine's provider ID"
	NodeHasMachine       Rule = "every Node is a Machine's"
	RegisteredHasOneNode Rule = "a registered NodeClaim has its Node"
)

// Violation is a violation of a rule.
type Violation struct {
	Rule Rule
	// Object is the kind and name of the violating object.
	Object string
	// Message describes the violation.
	Message string
	// Count is the number of machines, claims or other objects concerned.
	Count int
}

func (v Violation) String() string {
	return fmt.Sprintf("%s: %s (%s)", v.Object, v.Message, v.Rule)
}

// Describe formats violations, one per line.
func Describe(violations []Violation) string {
	return strings.Join(lo.Map(violations, func(v Violation, _ int) string { return "  " + v.String() }), "\n")
}

type findings []Violation

func (f *findings) add(rule Rule, kind, name, format string, args ...any) {
	f.count(1, rule, kind, name, format, args...)
}

func (f *findings) count(n int32, rule Rule, kind, name, format string, args ...any) {
	*f = append(*f, Violation{Rule: rule, Object: kind + " " + name, Message: fmt.Sprintf(format, args...), Count: int(n)})
}

// Always returns violations of what must hold at every moment. A reading is not atomic, so it only
// checks facts within one object, and facts that can never appear violated because two objects were
// read at different times.
func (s State) Always() []Violation {
	var f findings
	s.providerIDs(&f)
	for i := range s.Machines {
		m := &s.Machines[i]
		if m.DeletionTimestamp.IsZero() && controllerutil.ContainsFinalizer(m, agentv1.ReleaseFinalizer) && !markedForRelease(m) {
			f.add(FinalizerOnLive, "Machine", m.Name, "carries %s and is not being released", agentv1.ReleaseFinalizer)
		}
	}
	machines := map[types.UID]string{}
	for i := range s.Claims {
		c := &s.Claims[i]
		if !live(c) || c.Status.Machine == nil {
			continue
		}
		if other, taken := machines[c.Status.Machine.UID]; taken {
			f.add(OneClaimOneMachine, "MachineClaim", c.Name, "has Machine %s, and so has MachineClaim %s", c.Status.Machine.Name, other)
		}
		machines[c.Status.Machine.UID] = c.Name
	}
	return f
}

// markedForRelease reports whether the Machine has the annotation that is written together with the
// finalizer, just before the Machine is deleted.
func markedForRelease(m *clusterv1.Machine) bool {
	return m.Annotations[clusterv1.DeleteMachineAnnotation] == agentv1.Group
}

// AtRest returns all violations of what must hold once nothing has changed for a while.
func (s State) AtRest() []Violation {
	f := findings(s.Always())
	s.liveMachines(&f)
	s.bindings(&f)
	for i := range s.Deployments {
		s.accounting(&f, &s.Deployments[i])
	}
	s.nodeClaims(&f)
	s.nodes(&f)
	return f
}

func (s State) providerIDs(f *findings) {
	owners := map[string]string{}
	for i := range s.NodeClaims {
		n := &s.NodeClaims[i]
		id := n.Status.ProviderID
		if id == "" {
			continue
		}
		if strings.HasPrefix(id, PlaceholderScheme) && !strings.HasSuffix(id, "/"+string(n.UID)) {
			f.add(OneProviderID, "NodeClaim", n.Name, "has the placeholder of another NodeClaim: %s", id)
		}
		if other, taken := owners[id]; taken {
			f.add(OneProviderID, "NodeClaim", n.Name, "has the provider ID %s, and so has NodeClaim %s", id, other)
		}
		owners[id] = n.Name
	}
}

// liveMachines checks that a Machine that stays carries no remains of a release.
func (s State) liveMachines(f *findings) {
	byProviderID := map[string]string{}
	for i := range s.Machines {
		m := &s.Machines[i]
		if !m.DeletionTimestamp.IsZero() {
			f.add(NothingInFlight, "Machine", m.Name, "is still being deleted (finalizers: %s)", strings.Join(m.Finalizers, ", "))
			continue
		}
		if controllerutil.ContainsFinalizer(m, agentv1.ReleaseFinalizer) && markedForRelease(m) {
			f.add(FinalizerOnLive, "Machine", m.Name, "carries %s and is not being deleted", agentv1.ReleaseFinalizer)
		}
		if id := m.Spec.ProviderID; id != "" {
			if other, taken := byProviderID[id]; taken {
				f.add(OneClaimOneMachine, "Machine", m.Name, "has the provider ID %s, and so has Machine %s", id, other)
			}
			byProviderID[id] = m.Name
		}
	}
}

// bindings checks that claims and Machines refer to each other.
func (s State) bindings(f *findings) {
	claims := map[string]*agentv1.MachineClaim{}
	for i := range s.Claims {
		if c := &s.Claims[i]; live(c) {
			claims[c.Spec.ClaimID] = c
		}
	}
	labelled := map[string]*clusterv1.Machine{}
	for i := range s.Machines {
		m := &s.Machines[i]
		id := m.Labels[agentv1.ClaimLabel]
		if id == "" {
			continue
		}
		if other := labelled[id]; other != nil {
			f.add(OneClaimOneMachine, "Machine", m.Name, "is labelled with claim %s, and so is Machine %s", id, other.Name)
		}
		labelled[id] = m
		switch c := claims[id]; {
		case c == nil:
			f.add(OneClaimOneMachine, "Machine", m.Name, "is labelled with claim %s, which does not live", id)
		case c.Status.Machine == nil || c.Status.Machine.UID != m.UID:
			f.add(OneClaimOneMachine, "Machine", m.Name, "is labelled with claim %s, which names another Machine or none", id)
		case m.Labels[clusterv1.MachineDeploymentNameLabel] != c.Spec.NodeGroup:
			f.add(OneClaimOneMachine, "Machine", m.Name, "is of another node group than its claim, which is of %s", c.Spec.NodeGroup)
		}
	}
	for id, c := range claims {
		switch phase := c.CurrentPhase(); {
		case phase == agentv1.PhaseReleasing:
			f.add(NothingInFlight, "MachineClaim", c.Name, "is still being released: %s", c.Status.Message)
		case phase == agentv1.PhasePending:
			f.add(NothingInFlight, "MachineClaim", c.Name, "has no Machine yet: %s", c.Status.Message)
		case labelled[id] == nil:
			f.add(OneClaimOneMachine, "MachineClaim", c.Name, "is Bound, and no Machine carries its label")
		}
	}
}

// accounting checks that each replica has an owner.
func (s State) accounting(f *findings, md *clusterv1.MachineDeployment) {
	if md.Spec.Replicas == nil {
		return // a topology has not set them yet: claims on the group are refused
	}
	replicas := *md.Spec.Replicas
	machines := lo.CountBy(s.Machines, func(m clusterv1.Machine) bool { return m.Labels[clusterv1.MachineDeploymentNameLabel] == md.Name })
	claims := lo.CountBy(s.Claims, func(c agentv1.MachineClaim) bool { return live(&c) && c.Spec.NodeGroup == md.Name })
	floor, err := Floor(md)
	if err != nil {
		f.add(Accounting, "MachineDeployment", md.Name, "%v", err)
		return
	}
	l, _ := ledgerOf(md)
	if l == nil && claims > 0 {
		f.add(Accounting, "MachineDeployment", md.Name, "has %d live claims and no ledger", claims)
		return
	}
	if int(replicas) != machines || int(replicas) != int(floor)+claims {
		f.add(Accounting, "MachineDeployment", md.Name, "replicas %d, Machines %d, floor %d, live claims %d", replicas, machines, floor, claims)
	}
	if limit := size(md, clusterv1.AutoscalerMaxSizeAnnotation, math.MaxInt32); replicas > limit && claims > 0 {
		f.add(MaxSize, "MachineDeployment", md.Name, "replicas %d are above the max size %d while claims live", replicas, limit)
	}
	if md.Annotations[clusterv1.PausedAnnotation] == agentv1.PausedByAgent {
		f.add(NothingInFlight, "MachineDeployment", md.Name, "is still paused by the agent")
	}
	if l == nil {
		return
	}
	for _, id := range slices.Sorted(maps.Keys(l.Pending)) {
		f.add(NothingInFlight, "MachineDeployment", md.Name, "its ledger holds claim %s as pending", id)
	}
	for _, uid := range slices.Sorted(maps.Keys(l.Releasing)) {
		f.add(NothingInFlight, "MachineDeployment", md.Name, "its ledger holds the Machine with UID %s as releasing", uid)
	}
}

// nodeClaims checks that claims and NodeClaims refer to each other.
func (s State) nodeClaims(f *findings) {
	claims := map[string]*agentv1.MachineClaim{}
	for i := range s.Claims {
		if c := &s.Claims[i]; live(c) && c.Spec.Holder == Holder {
			claims[c.Spec.ClaimID] = c
		}
	}
	machines := lo.KeyBy(s.Machines, func(m clusterv1.Machine) types.UID { return m.UID })
	nodes := lo.KeyBy(s.Nodes, func(n corev1.Node) string { return n.Name })
	for i := range s.NodeClaims {
		n := &s.NodeClaims[i]
		c := claims[string(n.UID)]
		delete(claims, string(n.UID))
		if !n.DeletionTimestamp.IsZero() {
			f.add(NothingInFlight, "NodeClaim", n.Name, "is still being deleted")
			continue
		}
		if c == nil {
			f.add(NodeClaimHasClaim, "NodeClaim", n.Name, "has no live claim %s", n.UID)
			continue
		}
		if c.Status.Machine != nil {
			m, found := machines[c.Status.Machine.UID]
			if found && m.Spec.ProviderID != "" && n.Status.ProviderID != m.Spec.ProviderID {
				f.add(SameProviderID, "NodeClaim", n.Name, "has %s, its Machine %s has %s", n.Status.ProviderID, m.Name, m.Spec.ProviderID)
			}
		}
		if n.StatusConditions().IsTrue(karpenterv1.ConditionTypeRegistered) {
			if node, found := nodes[n.Status.NodeName]; !found || node.Spec.ProviderID != n.Status.ProviderID {
				f.add(RegisteredHasOneNode, "NodeClaim", n.Name, "is registered, and its Node %q is not there or has another provider ID", n.Status.NodeName)
			}
		}
	}
	for id, c := range claims {
		f.add(ClaimHasNodeClaim, "MachineClaim", c.Name, "lives (%s), and there is no NodeClaim with the UID %s", c.CurrentPhase(), id)
	}
}

func (s State) nodes(f *findings) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		mine := lo.ContainsBy(s.Machines, func(m clusterv1.Machine) bool {
			return m.Status.NodeRef.Name == n.Name && (m.Spec.ProviderID == "" || m.Spec.ProviderID == n.Spec.ProviderID)
		})
		if !mine {
			f.add(NodeHasMachine, "Node", n.Name, "belongs to no Machine (provider ID %s)", n.Spec.ProviderID)
		}
	}
}

// Checker checks one Cluster of one hub. It is safe for concurrent use if its readers are.
type Checker struct {
	// Hub and Spoke should read without a cache: a stale one causes false violations.
	Hub, Spoke client.Reader
	// Cluster is the spoke's Cluster in the hub.
	Cluster types.NamespacedName
	// Expected, if set, returns what users and holders know at the moment; see [State.Against].
	Expected func() Expected
	// Part, if set, is all that must be at rest, while the rest of the Cluster need not be. What
	// must always hold is checked for everything.
	Part *Part
}

// Settle checks repeatedly until there are no violations twice in a row, and then returns none. If
// the context ends first, it returns the last violations seen, and an error if not even those could
// be determined. It returns a violation of what must always hold ([State.Always]) at once.
func (c Checker) Settle(ctx context.Context) ([]Violation, error) {
	var (
		last  []Violation
		fatal bool
		clean int
		fault error
	)
	_ = wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		// The end of the wait must not interrupt a reading and thereby hide earlier violations.
		reading, cancel := context.WithTimeout(context.WithoutCancel(ctx), readWithin)
		defer cancel()
		state, err := Read(reading, c.Hub, c.Spoke, c.Cluster)
		if err != nil {
			fault, clean = err, 0
			return false, nil
		}
		fault = nil
		if always := state.Always(); len(always) > 0 {
			last, fatal = always, true
			return true, nil
		}
		if c.Part != nil {
			state = state.Of(*c.Part)
		}
		last = state.AtRest()
		if c.Expected != nil {
			last = append(last, state.Against(c.Expected())...)
		}
		clean = lo.Ternary(len(last) == 0, clean+1, 0)
		return clean >= 2, nil
	})
	switch {
	case fatal:
		return last, nil
	case fault != nil:
		return nil, fault
	case clean == 0 && len(last) == 0:
		return nil, fmt.Errorf("nothing was read: %w", ctx.Err())
	}
	return last, nil
}
