package streams

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// NodeGroups are the rules of a Cluster's node groups.
func NodeGroups(cluster *agentv1alpha1.ClusterRef) Rules[*agentv1alpha1.NodeGroup] {
	return Rules[*agentv1alpha1.NodeGroup]{
		Name: "node groups", Key: (*agentv1alpha1.NodeGroup).GetId, Generations: true,
		Foreign: func(g *agentv1alpha1.NodeGroup) string { return another(cluster, g.GetCluster()) },
		Backward: func(before, after *agentv1alpha1.NodeGroup) string {
			if after.GetCreatedAt().AsTime().Before(before.GetCreatedAt().AsTime()) {
				return "it was made earlier than the one before it"
			}
			return ""
		},
	}
}

// Claims are the rules of a holder's claims, or of all claims of a Cluster when holder is empty. Ids of claims are never used again, with two
// exceptions: one that was forgotten can be released once more, which leaves a claim that was released before it was made; and a claim that was to
// adopt a machine, and could not, leaves its id for another try.
func Claims(cluster *agentv1alpha1.ClusterRef, holder string) Rules[*agentv1alpha1.Claim] {
	return Rules[*agentv1alpha1.Claim]{
		Name: "claims", Key: (*agentv1alpha1.Claim).GetClaimId, Told: withoutPast,
		Again: func(c *agentv1alpha1.Claim) string {
			if c.GetNodeGroupId() != "" && c.GetAdoptMachine() == "" {
				return "it is on node group " + c.GetNodeGroupId()
			}
			return ""
		},
		Foreign: func(c *agentv1alpha1.Claim) string {
			if holder != "" && c.GetHolder() != holder {
				return "it is held by " + c.GetHolder()
			}
			return another(cluster, c.GetCluster())
		},
		Backward: func(before, after *agentv1alpha1.Claim) string {
			return first(
				changed("holder", before.GetHolder(), after.GetHolder()),
				moves(before.GetPhase(), after.GetPhase()),
				changed("machine", before.GetMachine().GetUid(), after.GetMachine().GetUid()),
				lost("time of release", before.GetReleasedAt() != nil, after.GetReleasedAt() != nil),
				lost("time of end", before.GetEndedAt() != nil, after.GetEndedAt() != nil),
				lost("time of failure", before.GetFailedAt() != nil, after.GetFailedAt() != nil),
			)
		},
	}
}

// withoutPast leaves out what streams leave out of claims that have ended.
func withoutPast(c *agentv1alpha1.Claim) *agentv1alpha1.Claim {
	if c.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return c
	}
	told := proto.CloneOf(c)
	told.History = nil
	return told
}

// Machines are the rules of a Cluster's machines. Cluster API makes up a new name for each.
func Machines(cluster *agentv1alpha1.ClusterRef) Rules[*agentv1alpha1.Machine] {
	return Rules[*agentv1alpha1.Machine]{
		Name: "machines", Key: (*agentv1alpha1.Machine).GetName,
		Again:   func(*agentv1alpha1.Machine) string { return "names are used once" },
		Foreign: func(m *agentv1alpha1.Machine) string { return another(cluster, m.GetCluster()) },
		Backward: func(before, after *agentv1alpha1.Machine) string {
			return first(
				changed("UID", before.GetUid(), after.GetUid()),
				changed("provider ID", before.GetProviderId(), after.GetProviderId()),
				changed("Node", before.GetNodeName(), after.GetNodeName()),
				lost("provider ID", before.GetProviderId() != "", after.GetProviderId() != ""),
				lost("time of deletion", before.GetDeletedAt() != nil, after.GetDeletedAt() != nil),
			)
		},
	}
}

func another(wanted, is *agentv1alpha1.ClusterRef) string {
	if proto.Equal(wanted, is) {
		return ""
	}
	return fmt.Sprintf("it is of Cluster %s/%s", is.GetNamespace(), is.GetName())
}

// changed tells of a value that was set and is another one.
func changed(what, before, after string) string {
	if before == "" || after == "" || before == after {
		return ""
	}
	return fmt.Sprintf("its %s was %s and is %s", what, before, after)
}

// lost tells of what was set and is not any more.
func lost(what string, before, after bool) string {
	if before && !after {
		return "its " + what + " is not set any more"
	}
	return ""
}

// moves tells of a phase that comes before the one that the claim was in.
func moves(before, after agentv1alpha1.ClaimPhase) string {
	if after < before {
		return fmt.Sprintf("it was %s and is %s", before, after)
	}
	return ""
}

func first(reasons ...string) string {
	for _, r := range reasons {
		if r != "" {
			return r
		}
	}
	return ""
}
