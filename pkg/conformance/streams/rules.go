package streams

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// NodeGroups returns the rules for a Cluster's node groups.
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

// Claims returns the rules for a holder's claims, or for all claims of a Cluster if holder is
// empty. Claim IDs are never reused, with two exceptions. A forgotten claim can be released again,
// which leaves a claim that was released before it was made. A claim that failed to adopt a machine
// leaves its ID for another try.
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

// withoutPast removes from an ended claim what streams do not show.
func withoutPast(c *agentv1alpha1.Claim) *agentv1alpha1.Claim {
	if c.GetPhase() != agentv1alpha1.ClaimPhase_CLAIM_PHASE_ENDED {
		return c
	}
	told := proto.CloneOf(c)
	told.History = nil
	return told
}

// Machines returns the rules for a Cluster's machines. Cluster API generates a new name for each.
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

// changed reports that a value that was set has changed.
func changed(what, before, after string) string {
	if before == "" || after == "" || before == after {
		return ""
	}
	return fmt.Sprintf("its %s was %s and is %s", what, before, after)
}

// lost reports that a value is no longer set.
func lost(what string, before, after bool) string {
	if before && !after {
		return "its " + what + " is not set any more"
	}
	return ""
}

// moves reports that a claim has returned to an earlier phase.
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
