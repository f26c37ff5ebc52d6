package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// Given is an agent with an existing Cluster and node groups that the suite has no control over:
// their infrastructure creates machines and joins their Nodes on its own. Every claim that a
// behaviour creates is released when its check ends. What existed before is not changed. Meanwhile,
// nothing else may claim from the node groups or change their replicas.
type Given struct {
	// Of is the Cluster. REQUIRED.
	Of *agentv1alpha1.ClusterRef
	// Caller may read the Cluster. If it has the role cluster or admin, it claims as karpenter.
	// REQUIRED.
	Caller *client.Client
	// Autoscaler has the role autoscaler for the Cluster. Admin has the role admin. Stranger has
	// the role cluster for a Cluster that does not exist. OPTIONAL.
	Autoscaler, Admin, Stranger *client.Client
	// NodeGroups are the IDs of node groups that may be claimed from, with room for sixteen
	// machines each. OPTIONAL.
	NodeGroups []string
	// Within is how long to wait for conditions that the agent must reach eventually: that a
	// machine is there with its Node, or is gone. REQUIRED.
	Within time.Duration
}

// Target is an agent that behaviours are checked on.
type Target struct {
	// NewEnv and Lacks are the fields of [Checks].
	NewEnv func(tb testing.TB) Env
	Lacks  func(Behaviour) string
}

// Target asks the agent for the caller's role and for the node groups. The error names what is
// missing, and how to fix it.
func (g Given) Target(ctx context.Context) (Target, error) {
	status, err := g.Caller.Status.GetStatus(ctx, &agentv1alpha1.GetStatusRequest{})
	if err != nil {
		return Target{}, fmt.Errorf("asking the agent who the caller is: %w", err)
	}
	var errs []error
	for _, id := range g.NodeGroups {
		response, err := g.Caller.NodeGroups.GetNodeGroup(ctx, &agentv1alpha1.GetNodeGroupRequest{Cluster: g.Of, Id: id})
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("node group %s: %w", id, err))
		case !response.GetNodeGroup().GetAvailability().GetAvailable():
			errs = append(errs, fmt.Errorf("node group %s takes no claims now: %s", id, response.GetNodeGroup().GetAvailability().GetMessage()))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Target{}, err
	}
	if slices.Contains(status.GetRoles(), string(CallerAdmin)) && g.Admin == nil {
		g.Admin = g.Caller
	}
	return Target{
		NewEnv: func(testing.TB) Env { return &given{Given: g, prefix: "cf-" + uuid.NewString()[:8] + "-"} },
		Lacks:  func(b Behaviour) string { return g.lacks(b, status.GetRoles()) },
	}, nil
}

func (g Given) lacks(b Behaviour, roles []string) string {
	has := map[Caller]bool{
		CallerCluster:    slices.Contains(roles, string(CallerCluster)),
		CallerAutoscaler: g.Autoscaler != nil,
		CallerAdmin:      g.Admin != nil,
		CallerStranger:   g.Stranger != nil,
	}
	what := map[Caller]string{
		CallerCluster:    "the Cluster's own identity as the caller, which has the roles " + strings.Join(roles, ", "),
		CallerAutoscaler: "an identity with the role autoscaler, and none is given",
		CallerAdmin:      "an identity with the role admin, and none is given",
		CallerStranger:   "the identity of a Cluster that does not exist, and none is given",
	}
	if b.Profile == ProfileFault {
		return "needs a control over the target, and there is none"
	}
	if b.Profile != ProfileReader && !has[CallerCluster] && !slices.Contains(roles, string(CallerAdmin)) {
		return "needs a caller with the role cluster or admin, and it has the roles " + strings.Join(roles, ", ")
	}
	if b.NodeGroups > len(g.NodeGroups) {
		return fmt.Sprintf("needs %d node groups to use, and %d are given", b.NodeGroups, len(g.NodeGroups))
	}
	for _, caller := range b.Callers {
		if !has[caller] {
			return "needs " + what[caller]
		}
	}
	return ""
}

// given is the [Env] of one case.
type given struct {
	Given

	prefix string
	leased int
}

func (g *given) Prefix() string { return g.prefix }

func (g *given) Cluster() *agentv1alpha1.ClusterRef { return g.Of }

func (g *given) Client() *client.Client { return g.Caller }

func (g *given) Autoscaler() *client.Client { return g.Given.Autoscaler }

func (g *given) Admin() *client.Client { return g.Given.Admin }

func (g *given) Stranger() *client.Client { return g.Given.Stranger }

func (g *given) Patience() time.Duration { return g.Within }

// CreateNodeGroup returns the next of the node groups. Cases that need no control request only
// ordinary ones.
func (g *given) CreateNodeGroup(tb testing.TB, _ MachineDeployment) string {
	tb.Helper()
	if g.leased == len(g.NodeGroups) {
		tb.Fatalf("the case needs more than %d node groups", g.leased)
	}
	id := g.NodeGroups[g.leased]
	g.leased++
	return id
}

// ProvisionMachine does nothing: the infrastructure provisions the machine.
func (g *given) ProvisionMachine(testing.TB, string) {}

// JoinNode does nothing: the infrastructure joins the Node.
func (g *given) JoinNode(testing.TB, string) {}

func (g *given) UpdateNodeGroup(tb testing.TB, _ MachineDeployment) {
	tb.Helper()
	uncontrolled(tb)
}

func (g *given) DeleteNodeGroup(tb testing.TB, _ string) {
	tb.Helper()
	uncontrolled(tb)
}

func (g *given) HoldMachines(tb testing.TB, _ string, _ bool) {
	tb.Helper()
	uncontrolled(tb)
}

func (g *given) LoseMachine(tb testing.TB, _ string) {
	tb.Helper()
	uncontrolled(tb)
}

// uncontrolled fails a case that should have the profile fault.
func uncontrolled(tb testing.TB) {
	tb.Helper()
	tb.Fatal("the case asks for what takes a control, and its profile does not say so")
}
